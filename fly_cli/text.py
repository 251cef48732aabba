"""Prompts to ids and ids to text: the only file that knows tokenizers.

A detokenizer turns ids into pieces of text, one by one. Its law: the pieces joined, with `flush()`, are the full
decode of the new ids behind the prompt. It holds by construction for byte-level and SentencePiece-like tokenizers,
whose decoders are modelled here exactly; a model that disagrees with its tokenizer on a sample of ids is not used.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from .errors import PromptError, SettingsError
from .prompts import Prompt, replace_surrogates
from .settings import TextSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

# Names under which model families mark the end of a turn or of a text. They count where the vocabulary has them as
# added tokens, since a checkpoint's own lists of end ids are often incomplete.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek: full-width bars, lower one-eighth blocks
    "<eos>",
    "</s>",
)
# Ordinary added tokens that switch the model's channel: thoughts and tool calls.
SWITCH_TOKEN = re.compile(r"[<\[].*(think|thought|reason|tool|function|call|channel).*[>\]]", re.IGNORECASE)
GGUF_PLACEHOLDER = re.compile(r"\[PAD(\d+)\]")  # fills the rows of a GGUF vocabulary that have no token


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


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a prompt, what the user should know about them, and where the chat template came from."""

    ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    template_source: str | None = None  # None: no template was used


class Codec:
    """A target's tokenizer, as this tool uses it.

    `end_ids` are the generation config's end ids (an int, a list or None), `vocab_rows` the rows of the model's
    embedding. Raises `SettingsError` for a stop token that does not exist, and for a system message or template
    name that the tokenizer has no use for.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: TextSettings,
        end_ids: int | Iterable[int] | None,
        vocab_rows: int,
    ):
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab_rows = vocab_rows
        self.vocab_size: int = selectable_ids(tokenizer, vocab_rows)
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        switches = {token_id for token_id, token in added.items() if SWITCH_TOKEN.fullmatch(token.content)}
        self.stop_ids: frozenset[int] = self._find_stop_ids(end_ids, added)
        # Special ids include bos and pad: tokenizers list every named special token.
        self.protected_ids: frozenset[int] = frozenset(special | switches | self.stop_ids)
        self.hidden_ids: frozenset[int] = frozenset() if settings.show_special else frozenset(special | self.stop_ids)
        self._template, self._template_source = (None, None) if settings.raw else choose_template(tokenizer, settings)
        if settings.system is not None and self._template is None:
            raise SettingsError(
                "the model has no chat template, so a system message has no place",
                hint="give one with `--chat-template FILE`, or drop `--system` (`--raw` says that plain text is meant)",
            )
        markers = sorted((token.content for token in added.values() if token.content.strip()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, markers)) or "(?!)")  # (?!) matches nothing
        self._new_detokenizer = choose_detokenizer(tokenizer, self.vocab_size)

    # --- prompts to ids

    def encode(self, prompt: Prompt) -> Encoded:
        """The ids to send for the prompt. Raises `PromptError` where there is nothing to send, or no way to."""
        if self._template is not None:
            encoded = self._encode_chat(prompt)
        elif prompt.messages is not None:
            reason = "which `--raw` cannot send" if self.settings.raw else "and the model has no chat template"
            raise PromptError(
                f"prompt `{prompt.id}` is a chat, {reason}",
                hint="give a template with `--chat-template FILE`, or write the text as one prompt and use `--raw`",
            )
        else:
            encoded = self._encode_plain(prompt)
        if not encoded.ids:
            raise PromptError(f"the prompt `{prompt.id}` is empty", hint="this model needs at least one token to begin")
        if (highest := max(encoded.ids)) >= self.vocab_rows:
            raise PromptError(
                f"the prompt `{prompt.id}` has token id {highest}, and the model knows {self.vocab_rows} ids",
                hint="the tokenizer does not belong to this model",
            )
        return encoded

    def _encode_plain(self, prompt: Prompt) -> Encoded:
        """The text as it is, with the start token that the tokenizer itself puts in front."""
        text, notes = _mend(prompt.text or "")
        if not self.settings.raw:
            if prompt.is_blank():
                return Encoded(())
            notes.append("the model has no chat template: the prompt was sent as plain text")
        bare = self._ids(text, add_special_tokens=False)
        front, behind = self._own_specials()
        if front and bare and front[-1] == bare[0] == self.tokenizer.bos_token_id:
            notes.append("the prompt begins with the start token itself, so none was added")
            front.pop()
        while behind and behind[-1] in self.stop_ids:
            behind.pop()
            if not behind or behind[-1] not in self.stop_ids:
                notes.append("the tokenizer puts an end token behind the prompt; it was dropped")
        return Encoded((*front, *bare, *behind), tuple(notes))

    def _own_specials(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts in front of a text, and behind it."""
        bare = self._ids("a", add_special_tokens=False)
        full = self._ids("a", add_special_tokens=True)
        at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    def _encode_chat(self, prompt: Prompt) -> Encoded:
        """The chat as the template writes it, its own start token included or not."""
        if prompt.is_blank():
            return Encoded(())
        messages, notes = self._messages(prompt)
        text, messages = self._render(messages, notes)
        ids = None
        if any(self._marker.search(value) for message in messages for value in message.values()):
            ids = self._ids_with_markers_as_text(messages, notes)
        if ids is None:
            ids = self._ids(text, add_special_tokens=False)
        return Encoded(tuple(ids), tuple(notes), self._template_source)

    def _messages(self, prompt: Prompt) -> tuple[list[dict[str, str]], list[str]]:
        messages = [dict(message) for message in prompt.messages or [{"role": "user", "content": prompt.text or ""}]]
        notes: list[str] = []
        if self.settings.system is not None:
            if messages[0]["role"] == "system":
                notes.append(f"`{prompt.id}` has its own system message, so `--system` was left out")
            else:
                messages.insert(0, {"role": "system", "content": self.settings.system})
        for message in messages:
            for key, value in message.items():
                message[key], new_notes = _mend(value)
                notes += new_notes
        return messages, list(dict.fromkeys(notes))

    def _render(self, messages: list[dict[str, str]], notes: list[str]) -> tuple[str, list[dict[str, str]]]:
        """The chat as text, and the messages it shows: a system message may move into the first user turn."""
        text, failure = self._try_template(messages)
        if text is not None and not self._leaves_out_system(messages, text):
            return text, messages
        folded = _fold_system(messages)
        folded_text = self._try_template(folded)[0] if folded else None
        if folded and folded_text is not None:
            reason = f"refuses the system message ({failure})" if failure else "leaves out the system message"
            notes.append(f"the chat template {reason}: it was put in front of the first user turn")
            return folded_text, folded
        if text is not None:
            return text, messages
        raise PromptError(
            f"the chat template refuses this prompt: {failure}",
            hint="change the roles of its messages, or use `--chat-template FILE` or `--raw`",
        )

    def _leaves_out_system(self, messages: list[dict[str, str]], text: str) -> bool:
        if messages[0]["role"] != "system" or messages[0]["content"].strip() in text:
            return False
        return self._try_template(messages[1:])[0] == text

    def _try_template(self, messages: list[dict[str, str]]) -> tuple[str | None, str | None]:
        """The rendered chat, or None and the template's own message."""
        try:
            return str(self._apply_template(messages, tokenize=False)), None
        except Exception as error:  # a template is a program that came with the checkpoint: it may raise anything
            return None, _one_line(error)

    def _ids_with_markers_as_text(self, messages: list[dict[str, str]], notes: list[str]) -> list[int] | None:
        """The chat's ids with control markers inside contents as plain text; None where the tokenizer cannot."""
        try:
            ids = self._apply_template(messages, tokenize=True, return_dict=False, sanitize_control_tokens=True)
        except Exception as error:
            notes.append(f"the prompt spells a control token, and it acts as one ({_one_line(error)})")
            return None
        return [int(token_id) for token_id in ids]

    def _apply_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, add_generation_prompt=True, **options
        )

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # verbose=False: no warning about a model's maximum length, which the decoder checks itself
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [int(token_id) for token_id in ids]

    # --- ids to text

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the ids behind this prompt. Ids without a token of their own give no text."""
        return self._new_detokenizer(self.hidden_ids, prompt_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one id by itself, special or not."""
        return decode_all(self.tokenizer, [token_id]) if token_id < self.vocab_size else ""

    # --- special ids

    def _find_stop_ids(self, end_ids: int | Iterable[int] | None, added: Mapping[int, Any]) -> frozenset[int]:
        listed = [end_ids] if isinstance(end_ids, int) else list(end_ids or ())
        eos = self.tokenizer.eos_token_id
        known = [token_id for token_id, token in added.items() if token.content in END_TOKENS]
        own = [self._stop_token_id(token) for token in self.settings.stop_token]
        ids = {*listed, *known, *own, *([] if eos is None else [eos])}
        return frozenset(token_id for token_id in ids if 0 <= token_id < self.vocab_rows)

    def _stop_token_id(self, token: str) -> int:
        """The id of a user's stop token: digits are an id, anything else is a token's text."""
        if token.isdecimal():
            if int(token) < self.vocab_size:
                return int(token)
            raise SettingsError(f"stop token {token} does not exist", hint=f"ids go from 0 to {self.vocab_size - 1}")
        token = replace_surrogates(token)
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if isinstance(token_id, int) and self.tokenizer.convert_ids_to_tokens(token_id) == token:
            return token_id
        ids = self._ids(token, add_special_tokens=False)
        if len(ids) == 1 and decode_all(self.tokenizer, ids).strip() == token.strip():
            return ids[0]
        raise SettingsError(
            f"stop token {token!r} is not one token of this model",
            hint="give a token of its vocabulary or an id, or use `--stop` for a text",
        )


def choose_template(tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> tuple[str | None, str | None]:
    """The chat template's text and where it came from; two Nones for a model without one."""
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {}
    if settings.chat_template is not None:
        if settings.chat_template in named:
            return named[settings.chat_template], f"named template `{settings.chat_template}`"
        return settings.chat_template, "--chat-template"
    if named:
        if "default" not in named:
            names = ", ".join(f"`{name}`" for name in sorted(named))
            raise SettingsError(
                f"the model has several chat templates and no default: {names}", hint="name one with `--chat-template`"
            )
        return named["default"], "named template `default`"
    if own is None:
        return None, None
    # Loading leaves no trace of where it found the template: ask the folder again, in the order of the loader.
    folder = Path(str(tokenizer.name_or_path or ""))
    if (folder / TEMPLATE_FILE).is_file():
        return own, TEMPLATE_FILE
    if (folder / CONFIG_FILE).is_file() and '"chat_template"' in (folder / CONFIG_FILE).read_text(encoding="utf-8"):
        return own, CONFIG_FILE
    return own, "tokenizer"  # a hub id, GGUF metadata, or a tokenizer built in code


def selectable_ids(tokenizer: PreTrainedTokenizerBase, vocab_rows: int) -> int:
    """1 + the highest id with a token of its own; rows above it pad the embedding and must never be chosen."""
    for token_id in reversed(range(vocab_rows)):
        token = _token(tokenizer, token_id)
        placeholder = GGUF_PLACEHOLDER.fullmatch(token) if token is not None else None
        if token is not None and not (placeholder and int(placeholder[1]) == token_id):
            return token_id + 1
    raise SettingsError("the tokenizer knows none of the model's ids", hint="give the tokenizer of this model")


def decode_all(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The full decode: nothing hidden, no clean-up of spaces."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """The vocabulary's spelling of an id, None where it has none."""
    try:
        token = tokenizer.convert_ids_to_tokens(token_id)
    except (IndexError, KeyError, OverflowError):  # how tokenizers written in Python say no
        return None
    return token if isinstance(token, str) else None


def _mend(text: str) -> tuple[str, list[str]]:
    mended = replace_surrogates(text)
    return mended, [] if mended == text else ["the prompt has characters that are not Unicode; they became U+FFFD"]


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The messages with the system message in front of the first user turn; None where there is no such pair."""
    if messages[0]["role"] != "system":
        return None
    system, *rest = messages
    for at, message in enumerate(rest):
        if message["role"] == "user":
            folded = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return [*rest[:at], folded, *rest[at + 1 :]]
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- detokenizers


NewDetokenizer = Callable[[frozenset[int], Sequence[int]], Detokenizer]


def choose_detokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> NewDetokenizer:
    """What makes detokenizers for this tokenizer: from (hidden ids, prompt ids)."""

    @cache
    def token_of(token_id: int) -> str | None:
        return _token(tokenizer, token_id) if 0 <= token_id < vocab_size else None

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
    known = [one for one in range(0, vocab_size, max(1, vocab_size // 500)) if _token(tokenizer, one) is not None]
    low = [one for one in range(min(vocab_size, 500)) if _token(tokenizer, one) is not None]  # the byte tokens' place
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


# --- stop strings


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that was found, and how many characters of the text come before it."""

    stop: str
    end: int


class StopMatcher:
    """Finds stop strings in a text that comes in pieces.

    The first piece that completes a stop string ends the text. If it completes several, the one that begins first
    counts, and of those that begin together the longest. Each character costs one step for each stop string.
    """

    def __init__(self, stop: Iterable[str] = ()):
        self._stops = tuple((text, _fall_backs(text)) for text in dict.fromkeys(stop) if text)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._length = 0

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        return max(self._matched, default=0)

    def push(self, piece: str) -> StopMatch | None:
        """The match that this piece completed, if any."""
        found: list[tuple[int, int, str]] = []
        for at, (stop, fall_backs) in enumerate(self._stops):
            matched = self._matched[at]
            for position, character in enumerate(piece, start=self._length + 1):
                while matched and stop[matched] != character:
                    matched = fall_backs[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    found.append((position - matched, -matched, stop))
                    matched = 0
                    break
            self._matched[at] = matched
        self._length += len(piece)
        if not found:
            return None
        self._matched = [0] * len(self._stops)
        start, _, stop = min(found)
        return StopMatch(stop, start)


def _fall_backs(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper prefix that it also ends with."""
    table = [0]
    for character in text[1:]:
        length = table[-1]
        while length and text[length] != character:
            length = table[length - 1]
        table.append(length + (text[length] == character))
    return table
