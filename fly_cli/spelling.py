"""How a tokenizer spells text in the middle of an answer: what lets two models with different tokenizers talk.

A tokenizer takes each text for a whole one: it may put a space in front, change characters, or merge what it sees
across the seam to what was there before. Here ids stand for bytes, and ids that do not spell a text byte by byte do
not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .detokenize import WindowDetokenizer, choose_bytes, token_at
from .errors import UnsupportedModelError
from .text import Codec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_TAIL = 256  # bytes that are spelled anew, where no word begins in them
SHORTEST_TAIL = 32
WHITE = b" \t\r\n"


class Spelling:
    """How the ids of one tokenizer spell text.

    Raises `UnsupportedModelError` for a tokenizer whose ids do not stand for bytes of their own.
    """

    def __init__(self, codec: Codec, name: str):
        self.codec = codec
        self.ids_of: Callable[[str], list[int]] = codec.piece_ids  # of a piece of text
        self._of_token = choose_bytes(codec.tokenizer)
        self._known: dict[int, bytes] = {}
        modelled = self._of_token is not None and not isinstance(codec.detokenizer(), WindowDetokenizer)
        if modelled and not self._spells_pieces():
            self.ids_of = piece_encoder(codec.tokenizer.backend_tokenizer)
        if not modelled or not self._spells_pieces():
            raise UnsupportedModelError(
                f"the tokenizer of `{name}` is of a kind that cannot be translated",
                hint="choose a draft model with the target's own tokenizer, or `--draft lookup`, which needs none",
            )

    def _spells_pieces(self) -> bool:
        return self.ends(self.ids_of("a"), b"a")[-1:] == [1]

    def bytes_of(self, token_id: int) -> bytes:
        """What an id stands for; nothing for special tokens, end tokens and ids without a token."""
        if token_id not in self._known:
            is_text = token_id < self.codec.vocab_size and token_id not in self.codec.special_ids
            token = token_at(self.codec.tokenizer, token_id) if is_text else None
            self._known[token_id] = self._of_token(token) if token is not None and self._of_token else b""
        return self._known[token_id]

    def ends(self, ids: Sequence[int], data: bytes) -> list[int]:
        """Where in `data` each id ends, for as many of the first ids as spell it."""
        found: list[int] = []
        end = 0
        for spelled in map(self.bytes_of, ids):
            if not spelled or not data.startswith(spelled, end):
                break
            end += len(spelled)
            found.append(end)
        return found

    def behind(self, before: str, text: str, skip: int = 0) -> Spelled:
        """Ids that spell `text` from its byte `skip` on, as it is spelled behind `before`.

        A seam may fall into what would be one id, such as behind half a word: then the text is spelled by itself.
        Nothing is spelled where that is no way either, and nothing from the first id on that stands for other bytes.
        """
        for context in dict.fromkeys((before, "")):
            start = len(context.encode())
            ids = self.ids_of(context + text)
            ends = self.ends(ids, (context + text).encode())
            if start + skip in (0, *ends):
                first = (0, *ends).index(start + skip)
                return Spelled(ids[first : len(ends)], [end - start for end in ends[first:]])
        return Spelled([], [])


def piece_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Encodes as the tokenizer does, but for the space that it puts in front of a text."""
    state = json.loads(tokenizer.to_str())
    steps = {name: plain_step(state[name]) for name in ("normalizer", "pre_tokenizer")}
    copy: Tokenizer = type(tokenizer).from_str(json.dumps(state | steps | {"truncation": None, "padding": None}))
    copy.encode_special_tokens = True  # as text
    return lambda text: list(copy.encode(text, add_special_tokens=False).ids)


def plain_step(step: Any) -> Any:
    """A step of a `tokenizers` pipeline without what puts a space in front; None where nothing is left of it."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            (key,) = step.keys() - {"type"}
            return step | {key: [one for one in map(plain_step, step[key]) if one is not None]}
    return step


@dataclass(frozen=True, slots=True)
class Spelled:
    """Ids, and the byte of the text where each of them ends."""

    ids: list[int]
    ends: list[int]


@dataclass(frozen=True, slots=True)
class Translation:
    """How the target spells text, and how a draft model with another tokenizer does."""

    target: Spelling
    draft: Spelling


class Retelling:
    """A growing text in ids. Only its tail is spelled anew: the ids in front of it stay, however the text goes on."""

    def __init__(self, spelling: Spelling, first_ids: Sequence[int]):
        self.spelling = spelling
        self.tail = ""
        self._settled = list(first_ids)
        self._tail_ids: list[int] = []

    @property
    def ids(self) -> list[int]:
        return self._settled + self._tail_ids

    @property
    def num_settled(self) -> int:
        return len(self._settled)

    def add(self, text: str) -> None:
        """Take in what comes next. The cost does not depend on what was there."""
        if not text:
            return
        self.tail += text
        self._tail_ids = self.spelling.ids_of(self.tail)
        data = self.tail.encode()
        ends = self.spelling.ends(self._tail_ids, data)
        if cuts := [at for at, end in enumerate(ends) if begins_word(data, end)]:
            self._settle(cuts[-1] + 1, ends[cuts[-1]])
        elif len(data) > LONGEST_TAIL:
            cuts = [at for at, end in enumerate(ends) if end <= len(data) - SHORTEST_TAIL and is_cut(data, end)]
            at = cuts[-1] + 1 if cuts else len(self._tail_ids)
            self._settle(at, ends[at - 1] if cuts else len(data))

    def _settle(self, num_ids: int, num_bytes: int) -> None:
        self._settled += self._tail_ids[:num_ids]
        self._tail_ids = self._tail_ids[num_ids:]
        self.tail = self.tail.encode()[num_bytes:].decode()


def begins_word(data: bytes, at: int) -> bool:
    """Whether there is a single space at `at`, with a word behind it: no id reaches from before it to behind it."""
    return 0 < at < len(data) - 1 and data[at] == WHITE[0] and data[at - 1] not in WHITE and data[at + 1] not in WHITE


def is_cut(data: bytes, at: int) -> bool:
    """Whether a character begins at `at`."""
    return data[at] & 0xC0 != 0x80
