"""Drafters: what proposes the tokens that the target verifies.

A drafter takes the committed ids and proposes up to `limit` more. It stops at an end token of its own, and may
propose nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from .cached_model import CachedModel
from .events import Source
from .lookup import NgramIndex
from .sampling import Chooser

COPIED_TOKENS = 6  # copied tokens that the draft model checks in one forward


@dataclass(slots=True)
class Draft:
    """Proposed ids, where each was taken from, and what the user should know."""

    ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def add(self, token: int, source: Source) -> None:
        self.ids.append(token)
        self.sources.append(source)


class Drafter(Protocol):
    """Proposes tokens; `forward_seconds` is the time it has spent inside a draft model so far."""

    @property
    def forward_seconds(self) -> float: ...

    def propose(self, ids: list[int], limit: int) -> Draft: ...


class LookupDrafter:
    """Copies what followed the same n-gram earlier; needs no draft model (prompt lookup decoding)."""

    forward_seconds = 0.0

    def __init__(self, stop_ids: Set[int]):
        self.stop_ids = stop_ids
        self.index = NgramIndex()

    def propose(self, ids: list[int], limit: int) -> Draft:
        """Up to `limit` copied ids, cut behind the first end token."""
        draft = Draft()
        for token in self.index.find(ids, limit):
            draft.add(token, Source.COPY)
            if token in self.stop_ids:
                break
        return draft


class ModelDrafter:
    """The draft model's own continuation, sped up by prompt lookup (FLy section 3.4, multi-level acceleration).

    With lookup, copied tokens run through the draft model in one forward and are taken while the model's own choice
    equals them; the first difference is replaced by the model's choice. So lookup changes the cost of a draft,
    not its tokens.
    """

    def __init__(self, model: CachedModel, chooser: Chooser, stop_ids: Set[int], *, lookup: bool):
        self.model = model
        self.chooser = chooser
        self.stop_ids = stop_ids
        self.index = NgramIndex() if lookup else None
        self.fallback = LookupDrafter(stop_ids)
        self._noted = False

    @property
    def forward_seconds(self) -> float:
        return self.model.forward_seconds

    def propose(self, ids: list[int], limit: int) -> Draft:
        """Up to `limit` ids; copied ones alone where the draft model's context or vocabulary does not reach."""
        if why_not := self._out_of_reach(ids):
            draft = self.fallback.propose(ids, limit)
            draft.notes = () if self._noted else (f"{why_not}: drafting goes on with prompt lookup alone",)
            self._noted = True
            return draft
        if self.model.max_length is not None:
            limit = min(limit, self.model.max_length - len(ids))
        self.model.settle(len(ids) - 1)
        draft = Draft()
        while len(draft.ids) < limit:
            sequence = ids + draft.ids
            room = limit - len(draft.ids)
            # The token after the copied ones is free, so copy one less than there is room for.
            copied = self.index.find(sequence, min(COPIED_TOKENS, room - 1)) if self.index else []
            logits = self.model.read(sequence + copied, last=len(copied) + 1)
            chosen = self.chooser.choose(self.chooser.warp(logits), len(sequence)).tolist()
            if self._extend(draft, copied, chosen):
                break
        return draft

    def _extend(self, draft: Draft, copied: Sequence[int], chosen: Sequence[int]) -> bool:
        """Take choices while they equal the copied ids, and one more. True when an end token was drafted."""
        for j, token in enumerate(chosen):
            confirmed = j < len(copied) and copied[j] == token
            draft.add(token, Source.LOOKUP if confirmed else Source.MODEL)
            if token in self.stop_ids:
                return True
            if not confirmed:
                break
        return False

    def _out_of_reach(self, ids: Sequence[int]) -> str | None:
        if self.model.max_length is not None and len(ids) >= self.model.max_length:
            return f"the text is longer than the draft model's context of {self.model.max_length} tokens"
        if max(ids) >= self.model.vocab_rows:
            return "the text has a token that the draft model does not know"
        return None
