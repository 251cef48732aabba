"""A run's figures, all folded from its events.

Counting rules (names follow the field; a figure without a meaning is None, never NaN or infinity):

- *New tokens* are the tokens that were committed: the prefill token, then `Round.tokens`, which are cut at an
  end token, a stop string and the length limit. Hidden end tokens count. Chunks of text are not tokens.
- A *drafted* token was sent to the target. It is *accepted* when the walk kept it **and** it was committed: exact
  plus deferred. What was cut off does not count, so 0 <= accepted <= drafted.
- Every new token has one origin, so exact + deferred + corrected + bonus + target = new tokens.
- Acceptance at position j is the share of the rounds that drafted a token there (more than j of them) that kept it
  (accepted more than j). Both counts follow from the two histograms, of one run or of many added up.
- A *round* is one verify step. The prefill token is no round, and is not in `mean_acceptance_length`.
- Time to first token is the whole prefill. *Decode* time is the rest of the run, on the wall clock, whatever else
  happened in it (drawing included): draft + verify + other = decode.
- Decode speed counts the tokens behind the *first tokens*, those that came with the prefill. Here that is one. Others
  draft before their first forward, so that several tokens come with it: none of these is a token of decode time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from statistics import median
from typing import Any

from .events import DRAFTED_ORIGINS, Drafted, Event, Finished, FinishReason, Origin, Round, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run."""

    prompt_id: str | None
    finish_reason: FinishReason | None  # None: the run was interrupted
    num_prompt_tokens: int
    num_new_tokens: int
    num_first_tokens: int  # of these, what came with the prefill
    num_spec_steps: int  # rounds
    num_draft_tokens: int
    num_accepted_draft_tokens: int  # exact + deferred
    num_deferred_tokens: int
    mean_acceptance_length: float | None  # committed tokens per round (per target forward)
    draft_acceptance_rate: float | None  # accepted / drafted
    acceptance_histogram: Mapping[int, int]  # accepted tokens of a round -> number of rounds
    draft_length_histogram: Mapping[int, int]  # drafted tokens of a round -> number of rounds
    acceptance_by_position: tuple[float, ...]  # [n] of the rounds that drafted position j, the share that kept it
    origins: Mapping[Origin, int]  # every origin, those with 0 tokens too
    ttft_s: float | None  # start of the run to the first token
    tpot_ms: float | None  # decode time per token after the first tokens
    decode_tps: float | None  # tokens after the first tokens per second of decode time
    end_to_end_tps: float | None  # all new tokens per second of the whole run
    decode_s: float
    draft_s: float  # inside the drafter
    verify_s: float  # target forwards and the transfers of their evidence
    other_s: float  # the rest of decode time
    overhead_share: float | None  # median over rounds: share of the round outside the two models' forwards

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values, names unchanged."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("acceptance_histogram", "draft_length_histogram"):
            values[name] = {str(length): rounds for length, rounds in values[name].items()}
        values["acceptance_by_position"] = list(self.acceptance_by_position)
        values["origins"] = {str(origin): count for origin, count in self.origins.items()}
        return values


class Tally:
    """Folds the events of one run as they come. `summary()` may be asked for at any time."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._origins: Counter[Origin] = Counter()
        self._kept: Counter[int] = Counter()  # accepted tokens of a round -> number of rounds
        self._drafted: Counter[int] = Counter()  # the same of drafted tokens
        self._after_first = 0
        self._draft_s = self._verify_s = self._rounds_s = 0.0
        self._overheads: list[float] = []

    def handle(self, event: Event) -> None:
        """Take the next event. Raises `ValueError` at the start of a second run."""
        match event:
            case Started():
                if self._started is not None:
                    raise ValueError("a tally is for one run")
                self._started = event
                self._origins[event.first.origin] += 1
            case Drafted():
                pass
            case Round():
                self._add_round(event)
            case Finished():
                self._finished = event

    def close(self) -> None:
        """Nothing to do: a tally is a sink like the others."""

    def _add_round(self, event: Round) -> None:
        self._origins.update(token.origin for token in event.tokens)
        self._after_first += len(event.tokens)
        self._kept[num_accepted(event)] += 1
        self._drafted[len(event.drafted)] += 1
        self._draft_s += event.draft_seconds
        self._verify_s += event.verify_seconds
        duration = event.draft_seconds + event.verify_seconds + event.other_seconds
        self._rounds_s += duration
        if duration > 0:
            inside = event.draft_forward_seconds + event.verify_forward_seconds
            self._overheads.append(max(0.0, duration - inside) / duration)

    def summary(self) -> Summary:
        """The figures so far."""
        rounds = self._kept.total()
        new_tokens = self._origins.total()
        drafted, accepted = (sum(counter.elements()) for counter in (self._drafted, self._kept))
        after_first = self._after_first
        prefill_s = self._started.prefill_seconds if self._started else 0.0
        whole_s = self._finished.seconds if self._finished else 0.0
        decode_s = whole_s - prefill_s if whole_s > prefill_s else self._rounds_s
        return Summary(
            prompt_id=self._started.prompt_id if self._started else None,
            finish_reason=self._finished.reason if self._finished else None,
            num_prompt_tokens=len(self._started.prompt_ids) if self._started else 0,
            num_new_tokens=new_tokens,
            num_first_tokens=new_tokens - after_first,
            num_spec_steps=rounds,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            num_deferred_tokens=self._origins[Origin.DEFERRED],
            mean_acceptance_length=ratio(after_first, rounds),
            draft_acceptance_rate=ratio(accepted, drafted),
            acceptance_histogram=dict(sorted(self._kept.items())),
            draft_length_histogram=dict(sorted(self._drafted.items())),
            acceptance_by_position=acceptance_by_position(self._drafted, self._kept),
            origins={origin: self._origins[origin] for origin in Origin},
            ttft_s=prefill_s if self._started else None,
            tpot_ms=ratio(1000 * decode_s, after_first) if decode_s > 0 else None,
            decode_tps=ratio(after_first, decode_s) if after_first else None,
            end_to_end_tps=ratio(new_tokens, prefill_s + decode_s),
            decode_s=decode_s,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            other_s=max(0.0, decode_s - self._draft_s - self._verify_s),
            overhead_share=median(self._overheads) if self._overheads else None,
        )


def summarize(events: Iterable[Event]) -> Summary:
    """The figures of the events of one run."""
    tally = Tally()
    for event in events:
        tally.handle(event)
    return tally.summary()


def num_accepted(event: Round) -> int:
    """Drafted tokens that were kept and committed."""
    return sum(token.origin in DRAFTED_ORIGINS for token in event.tokens)


def acceptance_by_position(drafted: Mapping[int, int], accepted: Mapping[int, int]) -> tuple[float, ...]:
    """[j] the share kept of the tokens drafted at j, from the rounds counted by drafted and by accepted tokens."""

    def rounds_beyond(lengths: Mapping[int, int], position: int) -> int:
        return sum(rounds for length, rounds in lengths.items() if length > position)

    longest = max((length for length, rounds in drafted.items() if rounds), default=0)
    return tuple(rounds_beyond(accepted, j) / rounds_beyond(drafted, j) for j in range(longest))


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where that has no meaning."""
    found = part / whole if whole > 0 else inf
    return found if isfinite(found) else None
