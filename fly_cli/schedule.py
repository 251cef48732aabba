"""Which way to draft in a round, and how much: as much as pays, and nothing where nothing pays.

A round costs time: the target's forward over n + 1 rows and the draft model's steps. It brings tokens: the kept ones
and one of the target's own. Over a whole answer, tokens per second are greatest if every drafted token is worth its
time: its chance to be kept against its seconds at the rate that is reached anyway (the marginal value rule of
renewal-reward theory). Everything here is a function of a cost table that is fixed when the run starts and of this
prompt's own acceptance counts, never of a clock: same ids, settings and table, same choices.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import linear_regression
from typing import Any

from .events import Origin
from .lookup import common_prefix
from .verify import Rejection, Verdict

CONFIDENCE_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
CONFIDENCE_PRIORS = (0.35, 0.5, 0.7, 0.75, 0.9, 0.95, 0.98, 0.998)  # to be the target's own choice; the default pair
MATCH_EDGES = (2, 3, 4, 8)  # lengths of n-grams: 1, 2, 3, 4 to 7, 8 and more
MATCH_PRIORS = (0.15, 0.4, 0.5, 0.7, 0.9)
BEHIND_PRIOR = 0.85  # a copied token behind a kept one
NEXT_PRIOR = 0.85  # a token that is not drafted yet
OPEN_PRIOR = 0.9  # a mismatch: the target was unsure, and no protected token is involved
CLEAN_PRIOR = 0.3  # such a mismatch: everything in its window matches
PRIOR_WEIGHT = 4.0  # trials that a prior counts for
TRIAL_DECAY = 0.98  # weight of a trial one trial later
ROUND_DECAY = 0.9  # weight of a round one round later
EXPECTED_TOKENS = 16  # that an answer still has at least, besides as many as it has already
SAVED_SHARE = 0.5  # of the time that a token takes anyway, that a draft model saves where it is of use
LONGEST_REST = 32  # rounds between two trials of a draft model that does not pay


def room_for_draft(draft_tokens: int, room: int) -> int:
    """The most tokens that may be drafted: `draft_tokens`, as far as they fit.

    `room` is how many more tokens the sequence may take (max new tokens and context length alike); a round
    of n drafted tokens commits up to n + 1.
    """
    return max(0, min(draft_tokens, room - 1))


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward over some rows, for target and draft model: measured points and straight lines between."""

    target: Mapping[int, float]  # rows -> seconds
    draft: Mapping[int, float] | None = None  # None: no draft model

    def verify_seconds(self, drafted: int) -> float:
        """A target forward that checks `drafted` tokens, which has a row more."""
        return interpolate(self._rising["target"], drafted + 1)

    def step_seconds(self, rows: int = 1) -> float:
        """A draft model's forward."""
        return interpolate(self._rising["draft"], rows) if self.draft else 0.0

    @cached_property
    def _rising(self) -> dict[str, Mapping[int, float]]:
        return {"target": rising(self.target), "draft": rising(self.draft or {})}

    @property
    def digest(self) -> str:
        """A name for the table in results: choices, and in mode `fly` the text, depend on it."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:12]

    def as_json(self) -> dict[str, Any]:
        tables = {"target": self.target, "draft": self.draft}
        return {name: {str(rows): s for rows, s in sorted(t.items())} if t else None for name, t in tables.items()}

    @classmethod
    def from_json(cls, tables: Mapping[str, Mapping[str, float] | None]) -> CostTable:
        """The table that `as_json` told."""
        target, draft = (
            {int(rows): float(s) for rows, s in (tables[name] or {}).items()} or None for name in ("target", "draft")
        )
        if target is None:
            raise ValueError("a cost table without costs of the target")
        if not all(0 < seconds < math.inf for table in (target, draft or {}) for seconds in table.values()):
            raise ValueError("a cost table with times that are none")
        return cls(target, draft)


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """The nearest points that never fall: measured times are noisy, and more rows are no less work.

    Isotonic regression by pooling adjacent violators.
    """
    pools: list[list[tuple[int, float]]] = []

    def mean(pool: Sequence[tuple[int, float]]) -> float:
        return sum(seconds for _, seconds in pool) / len(pool)

    for point in sorted(points.items()):
        pools.append([point])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return {rows: mean(pool) for pool in pools for rows, _ in pool}


def interpolate(points: Mapping[int, float], rows: int) -> float:
    """Seconds at `rows`. Behind the points goes on what is straight through all; more rows never take less time."""
    known = sorted(points.items())
    if len(known) == 1:
        return known[0][1]
    right = min(max(1, bisect_right([point[0] for point in known], rows)), len(known) - 1)
    (left_rows, left), (right_rows, upper) = known[right - 1], known[right]
    if rows > right_rows:  # far from what was measured, the last two points alone say little
        return upper + max(0.0, linear_regression(*zip(*known, strict=True)).slope) * (rows - right_rows)
    slope = max(0.0, (upper - left) / (right_rows - left_rows))
    return max(0.1 * left, left + slope * (rows - left_rows))


def guess_costs(target_bytes: int, draft_bytes: int | None) -> CostTable:
    """What to expect of a machine that has not run the pair yet. Only ratios matter: times go with the bytes read."""
    target = {1: 1.0, 16: 1.5}
    if draft_bytes is None:
        return CostTable(target)
    step = draft_bytes / target_bytes
    return CostTable(target, {1: step, 8: 1.3 * step})


class Way(StrEnum):
    """How a round drafts."""

    NONE = "none"
    COPY = "copy"  # copied tokens straight to the target
    MODEL = "model"  # the draft model


@dataclass
class Share:
    """How often something was so: at first a belief, worth some trials; what is long ago counts less."""

    prior: float
    true: float = field(init=False)
    tried: float = PRIOR_WEIGHT

    def __post_init__(self) -> None:
        self.true = self.prior * self.tried

    @property
    def value(self) -> float:
        return self.true / self.tried

    def add(self, true: bool) -> None:
        self.tried = TRIAL_DECAY * self.tried + 1
        self.true = TRIAL_DECAY * self.true + true


@dataclass
class Takings:
    """Decayed sums over rounds: committed tokens, and seconds by the cost table."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = ROUND_DECAY * self.tokens + tokens
        self.seconds = ROUND_DECAY * self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Adaptive:
    """Chooses each round's way and length for one prompt."""

    costs: CostTable
    window_size: int | None = None  # W; None: no mismatch is kept
    translated: bool = False  # the draft model's tokens are not the target's, so neither are their numbers
    by_confidence: list[Share] = field(default_factory=lambda: [Share(prior) for prior in CONFIDENCE_PRIORS])
    by_match: list[Share] = field(default_factory=lambda: [Share(prior) for prior in MATCH_PRIORS])
    behind: Share = field(default_factory=lambda: Share(BEHIND_PRIOR))
    next: Share = field(default_factory=lambda: Share(NEXT_PRIOR))
    open: Share = field(default_factory=lambda: Share(OPEN_PRIOR))
    clean: Share = field(default_factory=lambda: Share(CLEAN_PRIOR))
    spoken: Takings = field(default_factory=lambda: Takings(PRIOR_WEIGHT, PRIOR_WEIGHT))  # steps in place of seconds
    rounds: Takings = field(default_factory=Takings)
    rest: int = 0  # rounds for which the draft model is left alone
    longer_rest: int = 2

    @property
    def plain_rate(self) -> float:
        """Tokens per second without any drafting."""
        return 1.0 / self.costs.verify_seconds(0)

    @property
    def rate(self) -> float:
        """What a second is worth in tokens: what this prompt reaches, and at least plain decoding."""
        return max(self.plain_rate, self.rounds.rate)

    @property
    def token_seconds(self) -> float:
        """What the draft model takes for a token of the target."""
        return self.costs.step_seconds() * self.spoken.seconds / self.spoken.tokens

    def choose(self, limit: int, match_length: int, num_copied: int, *, with_model: bool = True) -> tuple[Way, int]:
        """The way that gains most, and its length. `match_length` is that of the n-gram before the copied tokens.

        The draft model is taken up to `limit`: `goes_on` ends it. `with_model` says whether it can draft here.
        """
        if limit <= 0:
            return Way.NONE, 0
        ways = {(Way.NONE, 0): self._gain(1.0, self.costs.verify_seconds(0))}
        if num_copied:
            length, gain = self._best_copy(match_length, min(limit, num_copied))
            ways[Way.COPY, length] = gain
        if with_model and self.costs.draft is not None and self.rest <= 1:
            # The last round of a rest is a trial.
            ways[Way.MODEL, limit] = float("inf") if self.rest == 1 else self._best_model(limit, self.rate)
        self.rest = max(0, self.rest - 1)
        return max(ways, key=lambda way: ways[way])

    def pays_to_read(self, num_tokens: int, num_new: int) -> bool:
        """Whether the draft model should read a text of so many tokens, of which so many are new, to draft behind it.

        That takes its time once, and nobody knows how long the answer will be: short answers to long prompts would
        come later than without drafts. So the longer the text, the more of the answer has to be there first; and where
        copying it is fast already, there is less to save.
        """
        seconds = self.costs.step_seconds(num_tokens) - self.costs.step_seconds()
        return (num_new + EXPECTED_TOKENS) * SAVED_SHARE >= seconds * self.rate

    def _gain(self, tokens: float, seconds: float) -> float:
        """What a round brings beyond what its time is worth."""
        return tokens - self.rate * seconds

    def _best_copy(self, match_length: int, most: int) -> tuple[int, float]:
        """How many of the copied tokens to send, and the gain."""
        chance, tokens = self._match(match_length).value, 1.0
        gains = {}
        for n in range(1, most + 1):
            tokens += chance
            gains[n] = self._gain(tokens, self.costs.verify_seconds(n))
            chance *= self.behind.value
        best = max(gains, key=lambda n: gains[n])
        return best, gains[best]

    def _best_model(self, limit: int, rate: float) -> float:
        """What the draft model gains at the best fixed length; stopping at doubts it gains more."""
        lengths = range(1, limit + 1)
        return max(
            (1 + self._kept([], n) - rate * (n * self.token_seconds + self.costs.verify_seconds(n)) for n in lengths),
            default=float("-inf"),
        )

    def goes_on(self, confidences: Sequence[float], limit: int) -> bool:
        """Whether more is worth drafting, in a draft of at most `limit`, behind tokens of such confidence.

        More is one token or several: rows come in blocks, and the first of a block may not pay on its own. More may
        also be the window that a doubtful token needs behind it to be kept.
        """
        n, token_seconds = len(confidences), self.token_seconds
        kept, seconds = self._kept(confidences, n), self.costs.verify_seconds(n)
        return any(
            self._kept(confidences, n + more) - kept
            > self.rate * (more * token_seconds + self.costs.verify_seconds(n + more) - seconds)
            for more in range(1, limit - n + 1)
        )

    def _kept(self, confidences: Sequence[float], drafted: int) -> float:
        """How many tokens of a draft of so many are kept on average; those behind `confidences` are not drafted yet."""
        tokens, chance = 0.0, 1.0
        for j, confidence in enumerate(confidences):
            chance *= self.chance_of(confidence, drafted - 1 - j)
            tokens += chance
        further, share = drafted - len(confidences), self.next.value
        return tokens + chance * (share * (1 - share**further) / (1 - share) if share < 1 else further)

    def chance_of(self, confidence: float, num_behind: int) -> float:
        """How likely a token of the draft model is kept, with so many drafted behind it.

        It is the target's own choice, or deferred if a window fits.
        """
        exact = self._confidence(confidence).value
        if self.window_size is None or num_behind < self.window_size:
            return exact
        return exact + (1 - exact) * self.open.value * self.clean.value

    def learn_none(self) -> None:
        """Take in a round without a draft."""
        self.rounds.add(1, self.costs.verify_seconds(0))

    def learn_copy(self, drafted: int, verdict: Verdict) -> None:
        """Take in a round of copied tokens."""
        self.rounds.add(verdict.num_kept + 1, self.costs.verify_seconds(drafted))

    def learn_match(self, match_length: int, copied: Sequence[int], committed: Sequence[int]) -> None:
        """See what copied tokens would have been worth, or were, from what was committed in their place."""
        right = common_prefix(copied, committed)
        if copied and committed:
            self._match(match_length).add(right > 0)
        for j in range(1, min(right + 1, len(copied), len(committed))):
            self.behind.add(j < right)

    def learn_model(self, confidences: Sequence[float], verdict: Verdict, steps: Sequence[int]) -> None:
        """Take in a round of the draft model, empty or not; `steps` are the rows of its forwards."""
        kept = verdict.num_kept
        if self.translated:
            self.spoken.add(len(confidences), len(steps))
        if not confidences:
            self.next.add(False)
        for j, confidence in enumerate(confidences[: kept + 1]):
            self._confidence(confidence).add(j < kept and verdict.origins[j] is Origin.EXACT)
            self.next.add(j < kept)
        for _ in range(verdict.origins.count(Origin.DEFERRED)):
            self.open.add(True)
            self.clean.add(True)
        if verdict.rejection is not None:
            unclean = verdict.rejection is Rejection.SECOND_MISMATCH
            self.open.add(unclean or verdict.rejection is Rejection.NO_WINDOW)
            if unclean:
                self.clean.add(False)
        seconds = self.costs.verify_seconds(len(confidences)) + sum(map(self.costs.step_seconds, steps))
        self.rounds.add(kept + 1, seconds)
        if self._best_model(max(1, len(confidences)), self.plain_rate) < 0:  # what plain decoding gains
            self.rest, self.longer_rest = self.longer_rest, min(2 * self.longer_rest, LONGEST_REST)
        else:
            self.longer_rest = 2

    def _match(self, length: int) -> Share:
        return self.by_match[bisect_right(MATCH_EDGES, length)]

    def _confidence(self, confidence: float) -> Share:
        return self.by_confidence[bisect_right(CONFIDENCE_EDGES, confidence)]
