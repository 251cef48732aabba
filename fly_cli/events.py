"""What the decoder tells the world: frozen records, from which every number is derived.

A run of one prompt is `Started`, then for each round `Drafted` and `Round`, then `Finished`.

Text. `Token.text` is the piece of text that the token completed ("" while a character's bytes are
still incomplete, and for hidden special tokens). The last `held` characters of the text so far could
still turn out to be the start of a stop string (or are the stop string and what came with it), so a
consumer must not show them. With
`text = "".join(all token texts) + Finished.tail`, `Finished.text` is `text`, cut at the stop string.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verify import Evidence, Verdict


class Origin(StrEnum):
    """How a committed token got there."""

    EXACT = "exact"  # drafted, and equal to the target's own choice
    DEFERRED = "deferred"  # drafted, not the target's choice, kept by FLy's rules
    CORRECTED = "corrected"  # the target's choice in place of a rejected draft token
    BONUS = "bonus"  # the target's choice after a fully kept draft
    TARGET = "target"  # the target's choice with nothing drafted (prefill, plain decoding)


DRAFTED_ORIGINS = frozenset({Origin.EXACT, Origin.DEFERRED})


class Source(StrEnum):
    """Where a drafted token was taken from."""

    MODEL = "model"  # the draft model's own choice
    LOOKUP = "lookup"  # copied from earlier in the sequence and confirmed by the draft model
    COPY = "copy"  # copied from earlier in the sequence, sent to the target unconfirmed


class FinishReason(StrEnum):
    """Why a run ended. `STOP` is an end token or a stop string."""

    STOP = "stop"
    LENGTH = "length"  # max new tokens, or the end of the model's context


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token: vocabulary id, the text it completed, and its origin."""

    id: int
    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class DraftToken:
    """One proposed token; `text` is what it would add to the text if everything before it is kept."""

    id: int
    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was read and the target chose its first token (origin TARGET; not a round)."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    first: Token
    held: int
    prefill_seconds: float  # start of the run to the first token on the host: time to first token
    settings: Mapping[str, Any]  # effective decode settings, as JSON values
    notes: tuple[str, ...] = ()  # things the user should know, one line each
    cost_table: str = ""  # digest of the table that adaptive drafting went by


@dataclass(frozen=True, slots=True)
class Drafted:
    """A block is about to be verified."""

    index: int  # round number from 0
    tokens: tuple[DraftToken, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One verify step: what was drafted, what the target thought of it, and what was committed.

    `tokens` is cut at an end id, a stop string and max new tokens; `verdict` is not.
    The times are in seconds of wall clock and add up to the round's duration.
    """

    index: int
    drafted: tuple[DraftToken, ...]
    evidence: Evidence
    verdict: Verdict
    tokens: tuple[Token, ...]
    held: int
    draft_seconds: float  # inside the drafter
    verify_seconds: float  # target forward and the transfer of its evidence
    other_seconds: float  # everything else in the round
    draft_forward_seconds: float = 0.0  # the part of draft_seconds inside the draft model's forwards
    verify_forward_seconds: float = 0.0  # the part of verify_seconds inside the target's forward
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over. `stop` is the stop string or the end token's text that ended it, if any."""

    reason: FinishReason
    text: str  # the whole answer
    tail: str  # characters that incomplete bytes at the very end decode to (usually "")
    stop: str | None = None
    stop_id: int | None = None
    seconds: float = 0.0  # start of the run to here


Event = Started | Drafted | Round | Finished
