"""Confidence intervals by the paired bootstrap: whole prompts are drawn, each with everything measured on it.

A figure is a function of column sums over prompts, such as (tokens / seconds) of one arm over that of another: one
row a prompt, one column a measured quantity, both arms in the same row. So a ratio of sums, a mean and a difference
of two ratios are all handled the same way, and what two arms share (an easy prompt, a slow minute) cancels.

The interval is the percentile interval, widened for few prompts as Student's t is (the "expanded percentile"):
plain percentile and BCa intervals are narrower and hold the truth less often. In simulations of speed-ups a 95%
interval held it in 85% of cases with 4 prompts, 90 to 92% with 8 to 12, 93% with 24 to 40. No interval is given for
fewer than `MIN_PROMPTS` prompts, nor where too many resamples have no value (a score of zero to divide by).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist
from typing import Any

MIN_PROMPTS = 4
RESAMPLES = 2000
CHUNK = 1 << 17  # drawn indices held at once: a megabyte


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the interval around it; None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


def estimate(
    rows: Sequence[Sequence[float]],
    statistic: Callable[..., Any],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The statistic of the rows' column sums, with its bootstrap interval over rows.

    `statistic` takes one argument a column, and must work on arrays of sums: `lambda a, b: a / b`. Same rows and
    seed: same interval.
    """
    if not rows:
        return Estimate(None)
    import numpy as np  # takes a tenth of a second: only where there is something to measure

    table = np.asarray(rows, dtype=np.float64)
    columns = range(table.shape[1])
    with np.errstate(all="ignore"):
        value = float(statistic(*(table[:, column].sum(keepdims=True) for column in columns))[0])
        if not isfinite(value) or len(rows) < MIN_PROMPTS:
            return Estimate(value if isfinite(value) else None)
        drawn = np.concatenate(
            [
                statistic(*(table[indices, column].sum(axis=1) for column in columns))
                for indices in _draws(len(rows), resamples, seed)
            ]
        )
    tail = (1 - level) / 2
    known = drawn[np.isfinite(drawn)]
    if len(known) < (1 - tail) * resamples:
        return Estimate(value)
    share = NormalDist().cdf(-_student(tail, len(rows) - 1) * sqrt(len(rows) / (len(rows) - 1)))
    low, high = np.quantile(known, [share, 1 - share])
    return Estimate(value, float(low), float(high))


def _draws(rows: int, resamples: int, seed: int) -> Iterator[Any]:
    """Row numbers of all resamples in pieces of bounded size, each [some resamples, rows]."""
    import numpy as np

    generator = np.random.default_rng(seed)
    step = max(1, CHUNK // rows)
    for start in range(0, resamples, step):
        yield generator.integers(0, rows, size=(min(step, resamples - start), rows))


def _student(tail: float, degrees: int) -> float:
    """How many standard errors leave `tail` above them in Student's t (Cornish-Fisher series: 1% off at 3 degrees)."""
    z = -NormalDist().inv_cdf(tail)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
