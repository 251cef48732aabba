"""What the rows of a bench add up to: pure functions from rows to figures.

Counting rules, where tools differ:

- Speed is *micro*: all tokens over all seconds, so long answers weigh more. *Macro* is the plain mean of each
  prompt's own ratio. A prompt's turns and repeats are added up first.
- Decode speed leaves out the prefill and the tokens that came with it, on both sides; end-to-end speed has both.
- A ratio of two arms is *paired*: it is taken over the (prompt, repeat, turn)s that both arms answered.
- Mean acceptance length is micro: tokens after the first over target forwards, the bonus token included.
- Acceptance at position j is the share of the rounds that drafted a token there which kept it.
- A mismatch that the walk met was deferred, or rejected and corrected: the share deferred is over both.
- Recovery is the sum of an arm's scores over the sum of the target's, on the answers that have both.
- Agreement is told per conversation: turns behind one that differs answer another conversation, and do not count.

A figure without a meaning is None.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, stdev
from typing import Any

from .intervals import estimate
from .stats import acceptance_by_position, ratio

Row = Mapping[str, Any]
Pace = Callable[[Row], tuple[float, float] | None]  # tokens and seconds of a row
Vector = tuple[float, ...]

COUNTS = (
    "num_prompt_tokens",
    "num_new_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_deferred_tokens",
    "draft_s",
    "verify_s",
    "other_s",
    "decode_s",
)


# --- one arm


def fold(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of one arm's rows."""
    ok = answered(rows)
    failed = {row["prompt_id"] for row in rows if row["status"] != "ok"}
    drafting = [step for row in ok if (step := per_step(row)) is not None]
    origins = total_counts(ok, "origins")
    lengths, kept = total_counts(ok, "draft_length_histogram"), total_counts(ok, "acceptance_histogram")
    return {
        "num_ok_prompts": len({row["prompt_id"] for row in rows} - failed),
        "num_failed_prompts": len(failed),
        "num_failed_rows": len(rows) - len(ok),
        **{name: total(ok, name) for name in COUNTS},
        "prefill_s": total(ok, "ttft_s"),
        "num_timed_rows": len(values(ok, "tpot_ms")),  # the others ended with the tokens that came first
        "decode_tps": tokens_per_second(ok, decoding),
        "decode_tps_repeats": over_repeats(ok, decoding),
        "end_to_end_tps": tokens_per_second(ok, whole_run),
        "end_to_end_tps_repeats": over_repeats(ok, whole_run),
        "ttft_s": middle(ok, "ttft_s"),
        "tpot_ms": middle(ok, "tpot_ms"),
        "mean_acceptance_length": ratio(sum(tokens for tokens, _ in drafting), sum(steps for _, steps in drafting)),
        "draft_acceptance_rate": ratio(total(ok, "num_accepted_draft_tokens") or 0, total(ok, "num_draft_tokens") or 0),
        "acceptance_by_position": list(acceptance_by_position(*map(numbered, (lengths, kept)))),
        "acceptance_histogram": kept,
        "draft_length_histogram": lengths,
        "origins": origins,
        "deferred_mismatch_share": ratio(
            origins.get("deferred", 0), origins.get("deferred", 0) + origins.get("corrected", 0)
        ),
        "overhead_share": middle(ok, "overhead_share"),
        "peak_memory_bytes": max(values(ok, "peak_memory_bytes"), default=None),
        "score": mean_score(ok),
    }


def answered(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """What the rows have under this name, those left out that have nothing."""
    return [row[name] for row in rows if row.get(name) is not None]


def total(rows: Iterable[Row], name: str) -> float | None:
    found = values(rows, name)
    return sum(found) if found else None


def middle(rows: Iterable[Row], name: str) -> float | None:
    found = values(rows, name)
    return median(found) if found else None


def total_counts(rows: Iterable[Row], name: str) -> dict[str, int]:
    """The rows' mappings from a key to a count, added up; keys that are numbers in their order."""
    counts: Counter[str] = Counter()
    for one in values(rows, name):
        counts.update(one)
    keys = sorted(counts, key=int) if all(key.isdecimal() for key in counts) else list(counts)
    return {key: counts[key] for key in keys}


def numbered(histogram: Mapping[str, int]) -> dict[int, int]:
    """A histogram with its keys as the numbers that they are."""
    return {int(length): rounds for length, rounds in histogram.items()}


def after_first(row: Row) -> int | None:
    """Tokens that did not come with the prefill."""
    tokens, first = row.get("num_new_tokens"), row.get("num_first_tokens")
    return None if tokens is None or first is None else tokens - first


def per_step(row: Row) -> tuple[float, float] | None:
    """Tokens after the first tokens, and the rounds that they took."""
    tokens, steps = after_first(row), row.get("num_spec_steps")
    return None if tokens is None or steps is None else (tokens, steps)


def decoding(row: Row) -> tuple[float, float] | None:
    """Tokens after the first tokens, and the seconds that they took."""
    tokens, seconds = after_first(row), row.get("decode_s")
    return None if tokens is None or seconds is None else (tokens, seconds)


def whole_run(row: Row) -> tuple[float, float] | None:
    """All new tokens, and the seconds from the prompt to the end."""
    tokens, first, rest = row.get("num_new_tokens"), row.get("ttft_s"), row.get("decode_s")
    return None if tokens is None or first is None or rest is None else (tokens, first + rest)


def tokens_per_second(rows: Iterable[Row], pace: Pace) -> float | None:
    found = [one for one in map(pace, rows) if one is not None]
    return ratio(sum(tokens for tokens, _ in found), sum(seconds for _, seconds in found))


def over_repeats(rows: Iterable[Row], pace: Pace) -> dict[str, Any] | None:
    """Tokens per second of each repeat, over what every repeat answered; None for one repeat."""
    repeats: dict[int, dict[tuple[str, int], tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        if (found := pace(row)) is not None:
            repeats[row["repeat"]][row["prompt_id"], row["turn"]] = found
    if len(repeats) < 2:
        return None
    common = set.intersection(*(set(one) for one in repeats.values()))
    speeds = [ratio(sum(one[key][0] for key in common), sum(one[key][1] for key in common)) for one in repeats.values()]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < 2:
        return None
    return {
        "median": median(known),
        "min": min(known),
        "max": max(known),
        "stdev": stdev(known),
        "num_repeats": len(known),
    }


def mean_score(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The mean score of the rows that have one, its interval over prompts, and how many have one."""
    scored = [row for row in rows if row.get("score") is not None]
    if not scored:
        return None
    sums = by_prompt((row["prompt_id"], (row["score"], 1.0)) for row in scored)
    return {**estimate(list(sums.values()), quotient).as_json(), "num_rows": len(scored)}


# --- two arms on the same prompts


def speedup(rows: Sequence[Row], base: Sequence[Row], pace: Pace = decoding) -> dict[str, Any] | None:
    """How many times faster `rows` are than `base`; None where there is no base."""
    if not base:
        return None
    vectors = list(pair_vectors(rows, base, pace).values())
    ratios = [(speed_ratio(*vector), 1.0) for vector in vectors if all(part > 0 for part in vector)]
    macro = estimate(ratios, quotient)
    return {
        **estimate(vectors, speed_ratio).as_json(),
        "macro": macro.value,
        "macro_low": macro.low,
        "macro_high": macro.high,
        "num_prompts": len(vectors),
        "num_unpaired_prompts": num_prompts([*rows, *base]) - len(vectors),
    }


def recovery(rows: Sequence[Row], base: Sequence[Row]) -> dict[str, Any] | None:
    """The share of the base's scores that `rows` reach; None where nothing was scored."""
    vectors = list(pair_vectors(rows, base, scoring).values())
    return {**estimate(vectors, score_ratio).as_json(), "num_prompts": len(vectors)} if vectors else None


def agreement(rows: Sequence[Row], base: Sequence[Row]) -> dict[str, Any] | None:
    """How many answers are the base's own, id by id, and where the others leave it; None where there is no base."""
    divergences = []
    conversation: tuple[str, int] | None = None
    for row, other in matched(rows, base):
        if conversation == (row["prompt_id"], row["repeat"]) or row.get("ids") is None or other.get("ids") is None:
            continue  # behind a turn that differs
        divergences.append(first_divergence(row["ids"], other["ids"]))
        if divergences[-1] is not None:
            conversation = row["prompt_id"], row["repeat"]
    if not divergences:
        return None
    found = [place for place in divergences if place is not None]
    return {
        "identical_share": (len(divergences) - len(found)) / len(divergences),
        "num_identical": len(divergences) - len(found),
        "num_answers": len(divergences),
        "median_first_divergence": median(found) if found else None,
    }


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers first differ, which may be behind the end of one of them; None where they are equal."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def matched(rows: Iterable[Row], base: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Answers of both to the same turn, turns of a conversation together and in order."""
    others = {place(row): row for row in answered(base)}
    return [(row, others[place(row)]) for row in sorted(answered(rows), key=place) if place(row) in others]


def place(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row["repeat"], row["turn"]


def scoring(row: Row) -> tuple[float] | None:
    return None if row.get("score") is None else (row["score"],)


def pair_vectors(
    rows: Iterable[Row], base: Iterable[Row], measure: Callable[[Row], Vector | None]
) -> dict[str, Vector]:
    """For each prompt what was measured on both: the values of `rows`, then those of `base`."""
    pairs = ((row["prompt_id"], measure(row), measure(other)) for row, other in matched(rows, base))
    return by_prompt((name, (*one, *other)) for name, one, other in pairs if one is not None and other is not None)


def by_prompt(named: Iterable[tuple[str, Vector]]) -> dict[str, Vector]:
    """The vectors of each prompt, added up, in the order of the prompts' names, whatever the order of the rows."""
    sums: dict[str, Vector] = {}
    for name, vector in named:
        sums[name] = tuple(map(sum, zip(sums[name], vector, strict=True))) if name in sums else vector
    return dict(sorted(sums.items()))


def num_prompts(rows: Iterable[Row]) -> int:
    return len({row["prompt_id"] for row in rows})


# Statistics of sums over prompts, for numbers and for arrays alike.


def quotient(part: Any, whole: Any) -> Any:
    return part / whole


def score_ratio(score: Any, base_score: Any) -> Any:
    return score / base_score


def speed_ratio(tokens: Any, seconds: Any, base_tokens: Any, base_seconds: Any) -> Any:
    return (tokens / seconds) / (base_tokens / base_seconds)
