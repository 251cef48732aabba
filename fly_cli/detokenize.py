"""Ids to pieces of text, one by one.

The law of a detokenizer: the pieces joined, with `flush()`, are the full decode of the new ids behind the prompt. It
holds by construction for byte-level and SentencePiece-like tokenizers, whose decoders are modelled here exactly; a
model that disagrees with its tokenizer on a sample of ids is not used.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Ids in, pieces of text out."""

    def push(self, token_id: int) -> str:
        """The text that this id completed: "" for hidden ids and while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What the bytes still held decode to; the next id begins a new character."""
        ...

    def fork(self) -> Self:
        """An independent copy, cheap."""
        ...


NewDetokenizer = Callable[[frozenset[int], Sequence[int]], Detokenizer]


def choose_detokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> NewDetokenizer:
    """What makes detokenizers for this tokenizer: from (hidden ids, prompt ids)."""

    @cache
    def token_of(token_id: int) -> str | None:
        return token_at(tokenizer, token_id) if 0 <= token_id < vocab_size else None

    new: NewDetokenizer | None = None
    steps = _decoder_steps(tokenizer)
    if [step["type"] for step in steps] == ["ByteLevel"]:

        @cache
        def bytes_of(token_id: int) -> bytes:
            return _byte_level(token_of(token_id) or "")

        def new(hidden: frozenset[int], prompt_ids: Sequence[int]) -> Detokenizer:
            return ByteDetokenizer(bytes_of, hidden)

    elif (rules := SpaceRules.read(steps)) is not None:

        def new(hidden: frozenset[int], prompt_ids: Sequence[int]) -> Detokenizer:
            return PieceDetokenizer(token_of, rules, hidden, prompt_ids)

    if new is not None and _agrees(new, tokenizer, vocab_size):
        return new

    def decode(ids: Sequence[int]) -> str:
        return decode_all(tokenizer, ids)

    def visible(hidden: frozenset[int]) -> Callable[[int], bool]:
        return lambda token_id: token_id not in hidden and token_of(token_id) is not None

    return lambda hidden, prompt_ids: WindowDetokenizer(decode, visible(hidden), prompt_ids)


def choose_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """What gives the bytes that a token stands for behind other tokens; None where the decoder is not modelled here."""
    steps = _decoder_steps(tokenizer)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level
    rules = SpaceRules.read(steps)
    return rules.bytes_of if rules is not None else None


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The steps of a `tokenizers` decoder as plain data, [] where there is none to read."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    try:
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "None"}
    except Exception:  # a decoder written in Python has no state to read
        return []
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _agrees(new: NewDetokenizer, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """True if the detokenizer gives what the tokenizer does, on ids from all over the vocabulary."""
    known = [one for one in range(0, vocab_size, max(1, vocab_size // 500)) if token_at(tokenizer, one) is not None]
    low = [one for one in range(min(vocab_size, 500)) if token_at(tokenizer, one) is not None]  # the byte tokens' place
    for ids in [known, known[::-1], low, *([token_id] for token_id in known[::8])]:
        detokenizer = new(frozenset(), ())
        if "".join(map(detokenizer.push, ids)) + detokenizer.flush() != decode_all(tokenizer, ids):
            return False
    return True


class ByteDetokenizer:
    """For byte-level vocabularies: every token is some bytes, and the text is their UTF-8.

    A sequence that can no longer become a character is released at once, one U+FFFD for each part of it that
    might have begun one, as in a full decode.
    """

    __slots__ = ("_bytes_of", "_hidden", "_pending")

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: frozenset[int], pending: bytes = b""):
        self._bytes_of = bytes_of
        self._hidden = hidden
        self._pending = pending  # at most three bytes

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        data = self._pending + self._bytes_of(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def fork(self) -> Self:
        return type(self)(self._bytes_of, self._hidden, self._pending)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: byte-level vocabularies spell the 68 bytes that do not print as U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    """The bytes of a token; one with a character outside the byte alphabet (an added token) stands for itself."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


@dataclass(frozen=True, slots=True)
class Replace:
    """A decoder step that turns one text into another. `first` is what the very first token gets instead."""

    old: str
    new: str
    first: str | None = None

    def apply(self, text: str, first: bool) -> str:
        return text.replace(self.old, self.first if first and self.first is not None else self.new)


@dataclass(frozen=True, slots=True)
class SpaceRules:
    """How a SentencePiece-like decoder turns tokens into text.

    `before` works on tokens, then runs of byte tokens (`<0xE4>`) become text, `after` works on that, and
    at the start of the whole text up to `strip` times `strip_text` is dropped.
    """

    before: tuple[Replace, ...] = ()
    byte_tokens: bool = False
    after: tuple[Replace, ...] = ()
    strip: int = 0
    strip_text: str = " "

    @classmethod
    def read(cls, steps: Sequence[Mapping[str, Any]]) -> SpaceRules | None:
        """The rules of these decoder steps, None where they are not of this kind."""
        replaces: dict[bool, list[Replace]] = {False: [], True: []}  # keyed by: behind the byte step
        byte_tokens = fused = False
        strip, strip_text = 0, " "
        for step in steps:
            match step["type"], step:
                case _ if strip:
                    return None  # nothing may come behind the strip
                case "Replace", {"pattern": {"String": old}, "content": new} if not fused or len(old) == 1:
                    replaces[byte_tokens].append(Replace(old, new))
                case "Metaspace", {"replacement": old, "prepend_scheme": scheme} if not fused:
                    replaces[byte_tokens].append(Replace(old, " ", None if scheme == "never" else ""))
                case "ByteFallback", _ if not byte_tokens and not fused:
                    byte_tokens = True
                case "Fuse", _:
                    fused = True
                case "Strip", {"content": strip_text, "start": strip, "stop": 0} if fused:
                    pass
                case _:
                    return None
        if not steps:
            return None
        return cls(tuple(replaces[False]), byte_tokens, tuple(replaces[True]), strip, strip_text)

    def bytes_of(self, token: str) -> bytes:
        """What a token stands for that is not the first of its text."""
        for step in self.before:
            token = step.apply(token, first=False)
        if self.byte_tokens and (byte := _byte_token(token)) is not None:
            return byte
        for step in self.after:
            token = step.apply(token, first=False)
        return token.encode()


class PieceDetokenizer:
    """For SentencePiece-like vocabularies, with or without byte tokens.

    A full decode judges a run of byte tokens as a whole: valid UTF-8 is text, and otherwise each of its bytes is a
    U+FFFD. So a run is held while it is valid and released at its end, or byte by byte once it is broken.
    """

    __slots__ = ("_first", "_hidden", "_partial", "_rules", "_run", "_run_text", "_strip", "_token_of")

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        rules: SpaceRules,
        hidden: frozenset[int],
        prompt_ids: Sequence[int] = (),
    ):
        self._token_of = token_of
        self._rules = rules
        self._hidden = hidden
        self._first = True  # no token yet
        self._strip = rules.strip
        self._run = 0  # byte tokens held; -1 in a broken run
        self._run_text = ""  # the whole characters of the run
        self._partial = b""  # the bytes behind them, at most three
        for token_id in prompt_ids:  # only the text's start is special: behind it the prompt does not matter
            if not self._first and not self._strip:
                break
            self.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._token_of(token_id)
        if token is None:
            return ""
        for step in self._rules.before:
            token = step.apply(token, self._first and self._run == 0)
        if self._rules.byte_tokens and (byte := _byte_token(token)) is not None:
            return self._push_byte(byte)
        return self._end_run() + self._item(token)

    def flush(self) -> str:
        return self._end_run()

    def fork(self) -> Self:
        copy = object.__new__(type(self))
        for name in self.__slots__:
            setattr(copy, name, getattr(self, name))
        return copy

    def _push_byte(self, byte: bytes) -> str:
        if self._run < 0:
            return self._item(REPLACEMENT)
        self._run += 1
        self._partial += byte
        try:
            text, used = codecs.utf_8_decode(self._partial, "strict", False)
        except UnicodeDecodeError:
            return self._break_run(-1)
        self._run_text += text
        self._partial = self._partial[used:]
        return ""

    def _end_run(self) -> str:
        if self._partial:
            return self._break_run(0)
        text = self._item(self._run_text) if self._run > 0 else ""
        self._run, self._run_text = 0, ""
        return text

    def _break_run(self, run: int) -> str:
        text = "".join(self._item(REPLACEMENT) for _ in range(self._run))
        self._run, self._run_text, self._partial = run, "", b""
        return text

    def _item(self, text: str) -> str:
        """What one token, or one run of bytes, adds to the text."""
        for step in self._rules.after:
            text = step.apply(text, self._first)
        self._first = False
        while self._strip and text:
            if text.startswith(self._rules.strip_text):
                text = text[len(self._rules.strip_text) :]
                self._strip -= 1
            else:
                self._strip = 0
        return text


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_token(token: str) -> bytes | None:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else None


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of ids, and gives what the last ones added to its text.

    Equal to a full decode where a token's text depends on no more than the ids of one window around it.
    """

    WINDOW = 8

    __slots__ = ("_base", "_context", "_decode", "_pending", "_visible")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        visible: Callable[[int], bool],
        prompt_ids: Sequence[int] = (),
    ):
        self._decode = decode
        self._visible = visible
        self._context = tuple(filter(visible, prompt_ids))[-self.WINDOW :]
        self._base = decode(self._context)
        self._pending: tuple[int, ...] = ()

    def push(self, token_id: int) -> str:
        if not self._visible(token_id):
            return ""
        self._pending += (token_id,)
        text = self._decode(self._context + self._pending)[len(self._base) :]
        incomplete = not text or text.endswith(REPLACEMENT)
        return "" if incomplete and len(self._pending) < self.WINDOW else self._release(text)

    def flush(self) -> str:
        return self._release(self._decode(self._context + self._pending)[len(self._base) :])

    def fork(self) -> Self:
        copy = object.__new__(type(self))
        for name in self.__slots__:
            setattr(copy, name, getattr(self, name))
        return copy

    def _release(self, text: str) -> str:
        self._context = (self._context + self._pending)[-self.WINDOW :]
        self._base = self._decode(self._context)
        self._pending = ()
        return text


def decode_all(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The full decode: nothing hidden, no clean-up of spaces."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_at(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """The vocabulary's spelling of an id, None where it has none."""
    try:
        token = tokenizer.convert_ids_to_tokens(token_id)
    except (IndexError, KeyError, OverflowError):  # how tokenizers written in Python say no
        return None
    return token if isinstance(token, str) else None
