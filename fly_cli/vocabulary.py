"""Loads tokenizers, and says what the ids of two models have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from .errors import ModelError
from .text import GGUF_PLACEHOLDER, one_line

SHOWN = 5  # differing ids that are named
NAMED = ("bos", "eos", "pad", "unk")  # special tokens that every tokenizer may have


class Match(StrEnum):
    """How well the ids of two models fit."""

    SAME = "same"
    PADDED = "padded"  # the same tokenizer, and tables of different size
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """What the ids of a target and a draft have in common. Pairs are the target's, then the draft's."""

    kind: Match
    rows: tuple[int, int]  # of the embedding tables
    tokens: tuple[int, int] | None = None  # of the tokenizers; None where both have the same file
    num_shared_ids: int | None = None  # ids that both have a token for
    num_shared_tokens: int | None = None  # token strings that both have, whatever their ids
    num_differing: int = 0  # shared ids that mean something else
    differing: tuple[tuple[int, str, str], ...] = ()  # the first of them: id, the target's token, the draft's

    @property
    def lacking(self) -> range:
        """The ids that only the larger table has."""
        return range(min(self.rows), max(self.rows))

    def describe_extra(self, target: str, draft: str) -> str:
        """In a sentence without a full stop, which tokens only one side has; empty where there are none."""
        if self.tokens is None or self.num_shared_ids is None:
            return ""
        own, other = (count - self.num_shared_ids for count in self.tokens)
        told = [f"`{target}` has {tokens_text(own)} that `{draft}` lacks: they are not drafted"] if own else []
        told += [f"`{draft}` has {tokens_text(other)} that `{target}` lacks: they are not used"] if other else []
        return "; ".join(told)

    def describe(self) -> str:
        """In a sentence without a full stop."""
        target, draft = self.rows
        if self.kind is Match.SAME:
            return f"their tokenizers agree, and both tables have {target} rows"
        if self.kind is Match.PADDED:
            smaller = "target" if target < draft else "draft"
            return (
                f"their tokenizers agree, and the tables have {target} and {draft} rows: the {smaller}'s lacks the ids "
                f"{self.lacking[0]} to {self.lacking[-1]}"
            )
        token_id, one, other = self.differing[0]
        return (
            f"their tokenizers differ in {self.num_differing} of {self.num_shared_ids} shared ids "
            f"(id {token_id} is {one!r} in one and {other!r} in the other)"
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder. Raises `ModelError` when there is none that loads."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer.decode(tokenizer("a", verbose=False)["input_ids"])  # some loads, and then cannot do its work
        return tokenizer
    except MemoryError:
        raise
    except Exception as error:  # the files may hold anything, and the readers raise anything about it
        raise ModelError(
            f"the tokenizer in `{folder}` cannot be loaded: {one_line(error)}",
            hint="the folder needs tokenizer.json (or the files of a slow tokenizer) and tokenizer_config.json",
        ) from error


def compare_vocabularies(
    target: Path, draft: Path, *, rows: tuple[int, int], trust_remote_code: bool = False
) -> Vocabularies:
    """What the ids of two model folders have in common; `rows` are those of their embedding tables.

    Ids that only one side has are fine, and so are special tokens under another name: the target judges every token.
    Raises `ModelError` for a tokenizer that does not load.
    """
    match = Match.SAME if rows[0] == rows[1] else Match.PADDED
    names = [folder / "tokenizer.json" for folder in (target, draft)]
    if all(name.is_file() for name in names) and names[0].read_bytes() == names[1].read_bytes():
        return Vocabularies(match, rows)
    theirs = [load_tokenizer(folder, trust_remote_code=trust_remote_code) for folder in (target, draft)]
    (own, own_special), (other, other_special) = map(table_of, theirs)
    shared = own.keys() & other.keys()
    differing = sorted(
        token_id
        for token_id in shared
        if own[token_id] != other[token_id] and not (token_id in own_special and token_id in other_special)
    )
    return Vocabularies(
        Match.DIFFERENT if differing else match,
        rows,
        tokens=(len(own), len(other)),
        num_shared_ids=len(shared),
        num_shared_tokens=len(set(own.values()) & set(other.values())),
        num_differing=len(differing),
        differing=tuple((token_id, own[token_id], other[token_id]) for token_id in differing[:SHOWN]),
    )


def table_of(tokenizer: Any) -> tuple[dict[int, str], set[int]]:
    """Token strings by id, and the ids of added tokens. Placeholder rows are left out."""
    words = {i: token for token, i in tokenizer.get_vocab().items() if not GGUF_PLACEHOLDER.fullmatch(token)}
    return words, set(tokenizer.added_tokens_decoder)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a model marks its text with."""

    end: tuple[str, ...]  # what ends its answers, by its own configuration
    named: Mapping[str, str]  # bos, eos and the like
    special: tuple[str, ...]  # every token that is special to its tokenizer, by id

    def differences(self, other: SpecialTokens) -> dict[str, tuple[str, str]]:
        """Role -> what this model has, and what the other has in its place; only what differs."""
        found = {
            name: (self.named.get(name, "-"), other.named.get(name, "-"))
            for name in NAMED
            if self.named.get(name) != other.named.get(name)
        }
        if set(self.end) != set(other.end):
            found["end"] = (some(self.end), some(other.end))
        if more := set(self.special) ^ set(other.special):
            mine, theirs = ([token for token in one.special if token in more] for one in (self, other))
            found["special"] = (some(mine), some(theirs))
        return found


def special_tokens(tokenizer: Any, end_ids: Collection[int]) -> SpecialTokens:
    """The special tokens of a model whose configuration names these ends."""
    ends = zip(sorted(end_ids), tokenizer.convert_ids_to_tokens(sorted(end_ids)), strict=True)
    named = {name: str(token) for name in NAMED if (token := getattr(tokenizer, f"{name}_token", None)) is not None}
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return SpecialTokens(
        end=tuple(str(token_id) if token is None else token for token_id, token in ends),
        named=named,
        special=tuple(added[token_id].content for token_id in sorted(added) if added[token_id].special),
    )


def tokens_text(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def some(tokens: Sequence[str]) -> str:
    """The first tokens, and how many there are where that is more."""
    if not tokens:
        return "-"
    more = f" and {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    return ", ".join(tokens[:SHOWN]) + more
