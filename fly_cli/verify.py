"""The acceptance rule: which drafted tokens are kept (FLy, ICLR 2026, sections 3.1 and 3.2).

Plain Python over plain lists, so that the rule can be read, stepped through and replayed from a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .events import Origin


class Rules(Protocol):
    """The three settings that the walk depends on (`DecodeSettings` has them)."""

    @property
    def entropy_threshold(self) -> float | None: ...
    @property
    def window_size(self) -> int: ...
    @property
    def strict_first(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the target says about n drafted tokens. Row j of its n+1 logit rows predicts position j."""

    draft_ids: tuple[int, ...]  # [n]
    target_ids: tuple[int, ...]  # [n+1] the target's own choice in each row
    top_ids: tuple[int, ...]  # [n+1] each row's argmax (equal to target_ids when greedy)
    entropies: tuple[float | None, ...]  # [n] None where not measured (rows that match)
    allowed: tuple[bool, ...]  # [n] the target could have produced draft_ids[j]: finite logit after warping
    protected: tuple[bool, ...]  # [n] draft, target or top id is an end, pad, special or tag token
    num_new_tokens: int  # new tokens committed before this block, the prefill token included
    copied: tuple[bool, ...] = ()  # [n] copied from the text, not chosen by a draft model; empty: none

    def __post_init__(self) -> None:
        n = len(self.draft_ids)
        rows = (len(self.target_ids), len(self.top_ids), len(self.entropies), len(self.allowed), len(self.protected))
        if rows != (n + 1, n + 1, n, n, n) or len(self.copied) not in (0, n):
            raise ValueError(f"evidence of {n} drafted tokens has rows {rows}")

    @property
    def matches(self) -> tuple[bool, ...]:
        """[n] whether each drafted token is the target's own choice."""
        return tuple(drafted == chosen for drafted, chosen in zip(self.draft_ids, self.target_ids, strict=False))


class Rejection(StrEnum):
    """The rule that ended the walk (design: rules a to e)."""

    STRICT = "strict"  # gate switched off: every mismatch is rejected
    CONFIDENT = "confident"  # a: the target was sure (entropy below the threshold)
    NO_WINDOW = "no window"  # b: too few drafted tokens follow
    SECOND_MISMATCH = "second mismatch"  # c: the target corrects within the window
    PROTECTED = "protected"  # d: an end, pad, special or tag token is involved
    COPIED = "copied"  # copied text is no model's opinion, and whatever follows it in the copy matches by itself
    IMPOSSIBLE = "impossible"  # e: the target cannot produce the drafted token
    FIRST_TOKENS = "first tokens"  # e: among the first `strict_first` new tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a block ends: `origins` of the kept tokens, then the target's own token `final_id`."""

    origins: tuple[Origin, ...]  # EXACT or DEFERRED, one for each kept drafted token
    final_id: int
    final_origin: Origin  # CORRECTED, BONUS, or TARGET when nothing was drafted
    rejection: Rejection | None = None

    @property
    def num_kept(self) -> int:
        return len(self.origins)


def judge(evidence: Evidence, rules: Rules) -> Verdict:
    """Walk the draft from left to right, and stop at the first mismatch that is not forgiven."""
    origins: list[Origin] = []
    for j, match in enumerate(evidence.matches):
        if match:
            origins.append(Origin.EXACT)
        elif rejection := why_rejected(evidence, j, rules):
            return Verdict(tuple(origins), evidence.target_ids[j], Origin.CORRECTED, rejection)
        else:
            origins.append(Origin.DEFERRED)
    return Verdict(tuple(origins), evidence.target_ids[-1], Origin.BONUS if origins else Origin.TARGET)


def why_rejected(evidence: Evidence, j: int, rules: Rules) -> Rejection | None:
    """The rule that rejects the mismatch at `j`, or None when it is kept (deferred)."""
    if rules.entropy_threshold is None:
        return Rejection.STRICT
    if evidence.protected[j]:
        return Rejection.PROTECTED
    if evidence.copied and evidence.copied[j]:
        return Rejection.COPIED
    if not evidence.allowed[j]:
        return Rejection.IMPOSSIBLE
    if evidence.num_new_tokens + j < rules.strict_first:
        return Rejection.FIRST_TOKENS
    entropy = evidence.entropies[j]
    if entropy is None:
        raise ValueError(f"the entropy of mismatched row {j} was not measured")
    if entropy < rules.entropy_threshold:
        return Rejection.CONFIDENT
    window = evidence.matches[j + 1 : j + 1 + rules.window_size]
    if len(window) < rules.window_size:
        return Rejection.NO_WINDOW
    if not all(window):
        return Rejection.SECOND_MISMATCH
    return None
