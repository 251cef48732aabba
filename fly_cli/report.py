"""The summary of a bench (`summary.json`), folded from its rows; two of them side by side; and the Pareto front.

    {"format": 1, "header": {...}, "arms": [...], "categories": [...],
     "overall": {arm: figures}, "by_category": {category: {arm: figures}}, "notes": [...]}

`figures.py` has the counting rules. Tables, Markdown and plots show a summary, and know no rows.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from . import figures
from .figures import Row, Vector, decoding, speed_ratio, whole_run
from .intervals import estimate
from .plots import write_plots
from .tables import format_comparison, format_table, to_markdown

__all__ = [
    "compare",
    "format_comparison",
    "format_table",
    "pareto",
    "quality",
    "summarise",
    "to_markdown",
    "write_plots",
]

FORMAT = 1
Statistic = Callable[..., Any]
TARGET, EXACT = "target", "exact"  # the arms that others are measured against


def summarise(header: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """The summary of a bench; rows may come from a generator, of which only the figures are kept."""
    by_arm = group_by_arm(rows)
    arms = [arm for arm in header.get("arms", ()) if arm in by_arm]
    arms += [arm for arm in by_arm if arm not in arms]
    by_arm = {arm: by_arm[arm] for arm in arms}
    categories = list(dict.fromkeys(category_of(row) for arm in arms for row in by_arm[arm]))
    overall = figures_of_arms(by_arm)
    points = [(speed_of(overall[arm]), quality(overall[arm])) for arm in arms]
    for arm, point, best in zip(arms, points, pareto(points), strict=True):
        overall[arm] |= {"quality": point[1], "pareto_front": best}
    return {
        "format": FORMAT,
        "header": dict(header),
        "arms": arms,
        "categories": categories,
        "overall": overall,
        "by_category": {category: figures_of_arms(only(by_arm, category)) for category in categories},
        "notes": [note for arm in arms for note in notes_on(arm, overall[arm], by_arm[arm])],
    }


def group_by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each arm, without their texts and with their ids packed: thousands of them fit in memory."""
    found: dict[str, dict[tuple[str, int, int], Row]] = defaultdict(dict)
    for row in rows:
        ids = row.get("ids")
        slim = {name: value for name, value in row.items() if name != "text"}
        found[row["arm"]][figures.place(row)] = {**slim, "ids": None if ids is None else array("i", ids)}
    return {arm: list(by_place.values()) for arm, by_place in found.items()}


def category_of(row: Row) -> str:
    """What a row is counted under: the subtask of data sets that have one, else the category."""
    return str(row.get("subtask") or row.get("category") or "all")


def only(by_arm: Mapping[str, Sequence[Row]], category: str) -> dict[str, list[Row]]:
    return {arm: [row for row in rows if category_of(row) == category] for arm, rows in by_arm.items()}


def figures_of_arms(by_arm: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """Each arm's own figures, and what it is against the target's and against standard speculative decoding."""
    target, exact = by_arm.get(TARGET, ()), by_arm.get(EXACT, ())
    return {
        arm: {
            **figures.fold(rows),
            "speedup_vs_target": figures.speedup(rows, target),
            "speedup_vs_exact": figures.speedup(rows, exact),
            "end_to_end_speedup_vs_target": figures.speedup(rows, target, whole_run),
            "end_to_end_speedup_vs_exact": figures.speedup(rows, exact, whole_run),
            "recovery_vs_target": figures.recovery(rows, target),
            "agreement_vs_target": figures.agreement(rows, target),
        }
        for arm, rows in by_arm.items()
    }


def notes_on(arm: str, own: Mapping[str, Any], rows: Sequence[Row]) -> Iterable[str]:
    """What a reader must know about an arm's figures, a line each."""
    if own["num_failed_prompts"]:
        of = own["num_ok_prompts"] + own["num_failed_prompts"]
        yield f"{arm}: {own['num_failed_prompts']} of {of} prompts failed; what failed is in no figure"
    answered = figures.answered(rows)
    if own["num_timed_rows"] < len(answered):
        timed = f"{own['num_timed_rows']} of {len(answered)} answers"
        yield f"{arm}: the time per token is that of {timed}; the others ended with the tokens that came first"
    for base in (TARGET, EXACT):
        against = own[f"speedup_vs_{base}"]
        if against and against["num_unpaired_prompts"] and arm != base:
            both, one = against["num_prompts"], against["num_unpaired_prompts"]
            yield f"{arm}: compared with {base} on {both} prompts; answered by one of them only: {one}"
    unscored = [row for row in answered if row.get("scorer") and row.get("score") is None]
    if unscored:
        code = (
            " (`--run-code` runs what they wrote)" if any(row["scorer"] == "python_tests" for row in unscored) else ""
        )
        yield f"{arm}: answers that could be scored and were not: {len(unscored)}{code}"


# --- the Pareto front


def pareto(points: Sequence[tuple[float | None, float | None]]) -> list[bool]:
    """For each (speed, quality) whether no other point is at least as good in both and better in one.

    What is not known counts as worst; a point with neither is on no front.
    """
    known = [tuple(-1.0 if part is None else part for part in point) for point in points]
    return [
        point != (-1.0, -1.0)
        and not any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in known)
        for point in known
    ]


def quality(own: Mapping[str, Any]) -> float | None:
    """An arm's quality: its recovery where answers were scored, else its share of the target's own answers."""
    scored, same = own["recovery_vs_target"], own["agreement_vs_target"]
    found: float | None = scored["value"] if scored else same["identical_share"] if same else None
    return found


def speed_of(own: Mapping[str, Any]) -> float | None:
    """An arm's speed-up over the target where it has one, else its tokens per second."""
    against = own["speedup_vs_target"]
    found: float | None = against["value"] if against else own["decode_tps"]
    return found


# --- two results


def compare(
    summary_a: Mapping[str, Any], rows_a: Iterable[Row], summary_b: Mapping[str, Any], rows_b: Iterable[Row]
) -> dict[str, Any]:
    """B against A, arm by arm, on the prompts that both have answers to, with the interval of the difference."""
    by_arm_a, by_arm_b = group_by_arm(rows_a), group_by_arm(rows_b)
    arms = [arm for arm in summary_a["arms"] if arm in by_arm_b]
    prompts_a, prompts_b = (
        {row["prompt_id"] for rows in by_arm.values() for row in rows} for by_arm in (by_arm_a, by_arm_b)
    )
    return {
        "format": FORMAT,
        "settings": differing("", *({**one["header"], "sessions": None} for one in (summary_a, summary_b))),
        "num_common_prompts": len(prompts_a & prompts_b),
        "num_prompts_only_a": len(prompts_a - prompts_b),
        "num_prompts_only_b": len(prompts_b - prompts_a),
        "arms_only_a": [arm for arm in summary_a["arms"] if arm not in by_arm_b],
        "arms_only_b": [arm for arm in summary_b["arms"] if arm not in by_arm_a],
        "arms": {
            arm: compare_arm(by_arm_a[arm], by_arm_b[arm], by_arm_a.get(TARGET, ()), by_arm_b.get(TARGET, ()))
            for arm in arms
        },
    }


def compare_arm(
    rows_a: Sequence[Row], rows_b: Sequence[Row], target_a: Sequence[Row], target_b: Sequence[Row]
) -> dict[str, Any]:
    """The figures of an arm in A and in B; `change` is B over A for a speed, B minus A for what is a ratio itself."""
    speeds = joined(sums(rows_a, decoding), sums(rows_b, decoding))
    speedups = joined(
        figures.pair_vectors(rows_a, target_a, decoding), figures.pair_vectors(rows_b, target_b, decoding)
    )
    lengths = joined(sums(rows_a, figures.per_step), sums(rows_b, figures.per_step))
    scores = joined(sums(rows_a, per_answer), sums(rows_b, per_answer))
    return {
        "decode_tps": change(speeds, figures.quotient, lambda a, b, c, d: (c / d) / (a / b)),
        "speedup_vs_target": change(speedups, speed_ratio, lambda *v: speed_ratio(*v[4:]) - speed_ratio(*v[:4])),
        "mean_acceptance_length": change(lengths, figures.quotient, lambda a, b, c, d: c / d - a / b),
        "score": change(scores, figures.quotient, lambda a, b, c, d: c / d - a / b),
        "agreement": figures.agreement(rows_b, rows_a),
    }


def change(vectors: Mapping[str, Vector], value: Statistic, difference: Statistic) -> dict[str, Any] | None:
    """The figure in A and in B over the same prompts, and the change with its interval; None without such prompts."""
    table = list(vectors.values())
    if not table:
        return None
    columns = [sum(column) for column in zip(*table, strict=True)]
    half = len(columns) // 2
    return {
        "a": plain(value, columns[:half]),
        "b": plain(value, columns[half:]),
        "change": estimate(table, difference).as_json(),
        "num_prompts": len(table),
    }


def plain(value: Statistic, columns: Sequence[float]) -> float | None:
    try:
        found = float(value(*columns))
    except ZeroDivisionError:
        return None
    return found if isfinite(found) else None


def sums(rows: Iterable[Row], measure: Callable[[Row], Vector | None]) -> dict[str, Vector]:
    """What each prompt's answers add up to."""
    found = ((row["prompt_id"], measure(row)) for row in figures.answered(rows))
    return figures.by_prompt((name, one) for name, one in found if one is not None)


def joined(one: Mapping[str, Vector], other: Mapping[str, Vector]) -> dict[str, Vector]:
    """The vectors of prompts that both have, side by side."""
    return {name: (*vector, *other[name]) for name, vector in one.items() if name in other}


def per_answer(row: Row) -> Vector | None:
    return None if row.get("score") is None else (row["score"], 1.0)


def differing(name: str, a: Any, b: Any) -> list[dict[str, Any]]:
    """What two headers do not share, one entry a value: `{"name": "arms.fly.draft_tokens", "a": 15, "b": 5}`."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys([*a, *b])
        return [
            entry for key in keys for entry in differing(f"{name}.{key}" if name else str(key), a.get(key), b.get(key))
        ]
    return [] if a == b else [{"name": name, "a": a, "b": b}]
