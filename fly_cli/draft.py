"""Drafters: what proposes the tokens that the target verifies.

A drafter takes the committed ids and proposes up to `limit` more. It stops at an end token of its own, and may
propose nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from .cached_model import DraftModel
from .events import Source
from .evidence import to_host
from .lookup import NgramIndex
from .sampling import Chooser
from .schedule import Adaptive, Way
from .verify import Verdict

GoesOn = Callable[[Sequence[float], int], bool]  # (confidences of the tokens so far, limit) -> whether to go on
COPIED_TOKENS = 6  # copied tokens that the draft model checks in one forward


@dataclass(slots=True)
class Draft:
    """Proposed ids, where each was taken from, and what the user should know."""

    ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    confidences: list[float] = field(default_factory=list)  # the draft model's own probability of each of its tokens
    steps: list[int] = field(default_factory=list)  # rows of each of its forwards
    match_length: int = 0  # of the n-gram in front of copied tokens

    def add(self, token: int, source: Source) -> None:
        self.ids.append(token)
        self.sources.append(source)


class Drafter(Protocol):
    """Proposes tokens; `forward_seconds` is the time it has spent inside a draft model so far."""

    @property
    def forward_seconds(self) -> float: ...

    def propose(self, ids: list[int], limit: int) -> Draft: ...

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Hear what became of the last draft."""


def probability_of(chosen: Tensor, log_weights: Tensor) -> Tensor:
    """The probability of each row's chosen id. [rows], [rows, V] any dtype -> [rows] fp32."""
    log_weights = log_weights.float()
    return (log_weights.gather(-1, chosen[:, None])[:, 0] - log_weights.logsumexp(dim=-1)).exp()


class LookupDrafter:
    """Copies what followed the same n-gram earlier; needs no draft model (prompt lookup decoding)."""

    forward_seconds = 0.0

    def __init__(self, stop_ids: Set[int]):
        self.stop_ids = stop_ids
        self.index = NgramIndex()

    def propose(self, ids: list[int], limit: int) -> Draft:
        """Up to `limit` copied ids, cut behind the first end token."""
        length, copied = self.index.match(ids, limit)
        draft = Draft(match_length=length)
        for token in copied:
            draft.add(token, Source.COPY)
            if token in self.stop_ids:
                break
        return draft

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn: it always copies."""


class ModelDrafter:
    """The draft model's own continuation, sped up by prompt lookup (FLy section 3.4, multi-level acceleration).

    With lookup, copied tokens run through the draft model in one forward and are taken while the model's own choice
    equals them; the first difference is replaced by the model's choice. So lookup changes the cost of a draft,
    not its tokens.
    """

    def __init__(self, model: DraftModel, chooser: Chooser, stop_ids: Set[int], *, lookup: bool, fallback: bool = True):
        self.model = model
        self.chooser = chooser
        self.stop_ids = stop_ids
        self.index = NgramIndex() if lookup else None
        self.fallback = LookupDrafter(stop_ids) if fallback else None
        self._noted = False

    @property
    def forward_seconds(self) -> float:
        return self.model.forward_seconds

    def propose(self, ids: list[int], limit: int, goes_on: GoesOn | None = None) -> Draft:
        """Up to `limit` ids; copied ones alone, or none, where the draft model's context or vocabulary does not reach.

        `goes_on` is asked after each forward, with the confidences so far and the limit, whether another one pays.
        """
        if why_not := self.out_of_reach(ids):
            draft = self.fallback.propose(ids, limit) if self.fallback else Draft()
            draft.notes = self.note_once(why_not)
            return draft
        return self._draft(ids, limit, goes_on)

    def _draft(self, ids: list[int], limit: int, goes_on: GoesOn | None) -> Draft:
        """What the model itself proposes."""
        if self.model.max_length is not None:
            limit = min(limit, self.model.max_length - len(ids))
        limit = int(min(limit, self.model.room_before_switch(len(ids)) + 1))  # the last token is not read
        self.model.settle(ids[:-1])
        draft = Draft()
        while len(draft.ids) < limit:
            sequence = ids + draft.ids
            room = limit - len(draft.ids)
            # The token after the copied ones is free, so copy one less than there is room for.
            copied = self.index.find(sequence, min(COPIED_TOKENS, room - 1)) if self.index else []
            warped = self.chooser.warp(self.model.read(sequence + copied, last=len(copied) + 1))
            chosen = self.chooser.choose(warped, len(sequence))
            draft.steps.append(len(copied) + 1)
            if goes_on is None:
                ended = self._extend(draft, copied, chosen.tolist())
            else:
                tokens, confidences = to_host([chosen, probability_of(chosen, warped)])
                ended = self._extend(draft, copied, list(map(int, tokens)))
                draft.confidences += confidences[: len(draft.ids) - len(draft.confidences)]
                ended = ended or not goes_on(draft.confidences, limit)
            if ended:
                break
        return draft

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn: it always drafts."""

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

    def note_once(self, why_not: str) -> tuple[str, ...]:
        """What the user is told when the model steps aside, the first time."""
        from_here = "drafting goes on with prompt lookup alone" if self.fallback else "nothing is drafted from here on"
        notes = () if self._noted else (f"{why_not}: {from_here}",)
        self._noted = True
        return notes

    def out_of_reach(self, ids: Sequence[int]) -> str | None:
        """Why the model cannot draft behind these ids; None if it can."""
        if why_not := self._why_too_long(len(ids)):
            return why_not
        if max(ids) >= self.model.vocab_rows:
            return "the text has a token that the draft model does not know"
        return None

    def _why_too_long(self, num_tokens: int) -> str | None:
        if self.model.max_length is not None and num_tokens >= self.model.max_length:
            return f"the text is longer than the draft model's context of {self.model.max_length} tokens"
        return None


class AdaptiveDrafter:
    """Drafts the way and as far as `schedule.Adaptive` says that it pays; without a draft model it copies or rests."""

    def __init__(self, copier: LookupDrafter | None, model: ModelDrafter | None, policy: Adaptive):
        self.copier = copier
        self.model = model
        self.policy = policy
        self._copied = Draft()  # what the text offered in this round
        self._first_length: int | None = None  # of the text, when the first draft was asked for
        self._reads = False  # whether the draft model reads along

    @property
    def forward_seconds(self) -> float:
        return self.model.forward_seconds if self.model else 0.0

    def propose(self, ids: list[int], limit: int) -> Draft:
        """The draft of this round, of at most `limit` ids; empty where plain decoding is faster."""
        self._copied = copied = self.copier.propose(ids, limit) if self.copier else Draft()
        why_not = self.model.out_of_reach(ids) if self.model else None
        with_model = why_not is None and self._pays_to_read(ids)
        way, length = self.policy.choose(limit, copied.match_length, len(copied.ids), with_model=with_model)
        if way is Way.MODEL and self.model is not None:
            return self.model.propose(ids, length, self.policy.goes_on)
        notes = self.model.note_once(why_not) if self.model and why_not else ()
        if way is Way.COPY:
            return replace(copied, ids=copied.ids[:length], sources=copied.sources[:length], notes=notes)
        return Draft(notes=notes)

    def _pays_to_read(self, ids: Sequence[int]) -> bool:
        if self._first_length is None:
            self._first_length = len(ids)
        self._reads = self._reads or self.policy.pays_to_read(len(ids), len(ids) - self._first_length)
        return self._reads

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Hear what became of the last draft."""
        committed = [*draft.ids[: verdict.num_kept], verdict.final_id]
        self.policy.learn_match(self._copied.match_length, self._copied.ids, committed)
        if draft.steps:
            self.policy.learn_model(draft.confidences, verdict, draft.steps)
        elif not draft.ids:
            self.policy.learn_none()
        else:
            self.policy.learn_copy(len(draft.ids), verdict)
