"""A summary as tables for people: aligned text, and Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from .graphemes import visible_line
from .json_text import json_text

NOTHING = "-"
Figures = Mapping[str, Any]

RULES = (
    "Speed is tokens per second of decode time: the prefill and the tokens that came with it are left out, on both "
    "sides of a ratio. `end to end` has both.",
    "`over target` is all tokens over all seconds (micro), `per prompt` the mean of each prompt's own ratio (macro).",
    "Brackets are 95% bootstrap intervals over prompts, both arms of a ratio drawn together. "
    "Few prompts make them too narrow; fewer than 4 have none.",
    "`tokens a round` is committed tokens per target forward, the bonus token included (mean acceptance length). "
    "`kept` is accepted over drafted tokens.",
    "`of mismatches` is the share of the mismatches met that were deferred instead of corrected.",
    "`recovery` is the sum of scores over that of the target. `same answer` counts answers equal to the target's token "
    "by token; `first difference` is the median place where the others leave it.",
)


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def format_table(summary: Mapping[str, Any]) -> str:
    """The summary as aligned text, nothing cut off."""
    parts = [format_columns(table) for table in tables(summary)] or ["nothing was measured"]
    if summary["notes"]:
        parts.append("\n".join(f"note: {visible_line(note)}" for note in summary["notes"]))
    return "\n\n".join(parts) + "\n"


def to_markdown(summary: Mapping[str, Any], plots: Sequence[Path] = ()) -> str:
    """The summary as a Markdown report, with the plots that lie beside it."""
    parts = ["# fly bench"]
    for table in tables(summary):
        parts += [f"## {table.title}", markdown_columns(table)]
    if summary["notes"]:
        parts += ["## Notes", "\n".join(f"- {escaped(note)}" for note in summary["notes"])]
    if plots:
        parts += ["## Plots", "\n\n".join(f"![{path.stem.replace('_', ' ')}]({path.name})" for path in plots)]
    parts += ["## How to read it", "\n".join(f"- {rule}" for rule in RULES)]
    parts += ["## Settings, versions and machine", fenced(json_text(summary["header"], indent=2))]
    return "\n\n".join(parts) + "\n"


def format_comparison(comparison: Mapping[str, Any], name_a: str = "A", name_b: str = "B") -> str:
    """Two results side by side as aligned text."""
    name_a, name_b = visible_line(name_a), visible_line(name_b)
    rows = [(arm, *cells) for arm, metrics in comparison["arms"].items() for cells in comparison_cells(arm, metrics)]
    title = f"{name_b} against {name_a}, {comparison['num_common_prompts']} prompts in both"
    head = ("arm", "figure", name_a, name_b, "change", "prompts")
    parts = [format_columns(Table(title, head, rows))] if rows else [f"{title}: nothing to compare"]
    for side, name in (("a", name_a), ("b", name_b)):
        if comparison[f"num_prompts_only_{side}"]:
            parts.append(f"note: prompts only in {name}, left out: {comparison[f'num_prompts_only_{side}']}")
        if arms := comparison[f"arms_only_{side}"]:
            parts.append(f"note: only in {name}: {', '.join(map(visible_line, arms))}")
    if comparison["settings"]:
        lines = [f"  {one['name']}: {shown(one['a'])}, {shown(one['b'])}" for one in comparison["settings"]]
        parts.append("\n".join(["What else differs:", *map(visible_line, lines)]))
    return "\n\n".join(parts) + "\n"


def comparison_cells(arm: str, metrics: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """A row of cells for each figure that both results have."""
    for name, label in (
        ("decode_tps", "tokens/s"),
        ("speedup_vs_target", "over target"),
        ("mean_acceptance_length", "tokens a round"),
        ("score", "score"),
    ):
        if (metric := metrics[name]) is not None and (arm, name) != ("target", "speedup_vs_target"):
            is_ratio = name == "decode_tps"
            change = "× " * is_ratio + interval(metric["change"], signed=not is_ratio)
            yield label, number(metric["a"]), number(metric["b"]), change, str(metric["num_prompts"])
    if (same := metrics["agreement"]) is not None:
        yield "same answer", NOTHING, NOTHING, f"{same['num_identical']} of {same['num_answers']}", NOTHING


# --- the tables of a summary


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """All that a summary has to show; a table with nothing in it is left out."""
    overall = summary["overall"]
    found = [speed_table(overall), latency_table(overall), acceptance_table(overall), quality_table(overall)]
    if len(summary["categories"]) > 1:
        found += [
            category_table(summary, "Speed-up over target by category", "speedup_vs_target"),
            category_table(summary, "Score by category", "score"),
        ]
    return [table for table in found if table.rows]


def speed_table(overall: Mapping[str, Figures]) -> Table:
    head = ("arm", "prompts", "tokens/s", "over target", "per prompt", "over exact")
    rows = [
        (
            arm,
            prompts_of(own),
            with_range(own["decode_tps"], own["decode_tps_repeats"]),
            speedup(own["speedup_vs_target"], arm == "target"),
            number(own["speedup_vs_target"] and own["speedup_vs_target"]["macro"]),
            speedup(own["speedup_vs_exact"], arm == "exact"),
        )
        for arm, own in overall.items()
    ]
    return without_empty_columns(Table("Speed", head, rows))


def latency_table(overall: Mapping[str, Figures]) -> Table:
    head = ("arm", "tokens/s", "over target", "first token", "per token", "memory")
    rows = [
        (
            arm,
            with_range(own["end_to_end_tps"], own["end_to_end_tps_repeats"]),
            speedup(own["end_to_end_speedup_vs_target"], arm == "target"),
            with_unit(own["ttft_s"], "s"),
            with_unit(own["tpot_ms"], "ms"),
            size(own["peak_memory_bytes"]),
        )
        for arm, own in overall.items()
    ]
    return without_empty_columns(Table("End to end", head, rows))


def acceptance_table(overall: Mapping[str, Figures]) -> Table:
    head = ("arm", "tokens a round", "drafted", "kept", "deferred", "of mismatches", "draft", "verify", "other")
    rows = [
        (
            arm,
            number(own["mean_acceptance_length"]),
            count(own["num_draft_tokens"]),
            percent(own["draft_acceptance_rate"]),
            count(own["num_deferred_tokens"]),
            percent(own["deferred_mismatch_share"]),
            *(percent(share(own[part], own["decode_s"])) for part in ("draft_s", "verify_s", "other_s")),
        )
        for arm, own in overall.items()
        if own["num_draft_tokens"]
    ]
    return Table("Drafting, and where decode time goes", head, rows)


def quality_table(overall: Mapping[str, Figures]) -> Table:
    swept = any("[" in arm for arm in overall)
    head = ("arm", "score", "scored", "recovery", "same answer", "first difference", "front" if swept else "")
    rows = [
        (
            arm,
            interval(own["score"]),
            count(own["score"] and own["score"]["num_rows"]),
            interval(own["recovery_vs_target"]) if arm != "target" else NOTHING,
            *agreement_cells(own["agreement_vs_target"] if arm != "target" else None),
            "*" if swept and own["pareto_front"] else NOTHING,
        )
        for arm, own in overall.items()
    ]
    title = "Quality" + (" (* = on the Pareto front of speed and quality)" if swept else "")
    return without_empty_columns(Table(title, head, rows))


def category_table(summary: Mapping[str, Any], title: str, name: str) -> Table:
    """A figure for each category and arm; arms stand in columns unless there are more of them than categories."""
    by_category = summary["by_category"]
    arms = [
        arm
        for arm in summary["arms"]
        if any(own[arm][name] for own in by_category.values()) and (name != "speedup_vs_target" or arm != "target")
    ]
    cells = {(category, arm): interval(own[arm][name]) for category, own in by_category.items() for arm in arms}
    prompts = {
        category: str(max((own[arm]["num_ok_prompts"] for arm in own), default=0))
        for category, own in by_category.items()
    }
    if not arms:
        return Table(title, (), ())
    if len(arms) > len(by_category):
        head = ("arm", *(f"{category} ({prompts[category]})" for category in by_category))
        return Table(title, head, [(arm, *(cells[category, arm] for category in by_category)) for arm in arms])
    rows = [(category, prompts[category], *(cells[category, arm] for arm in arms)) for category in by_category]
    return Table(title, ("category", "prompts", *arms), rows)


def without_empty_columns(table: Table) -> Table:
    """The table without the columns that say nothing; no rows where only the first column says anything."""
    kept = [0, *(at for at in range(1, len(table.head)) if any(row[at] != NOTHING for row in table.rows))]
    if len(kept) == 1:
        return Table(table.title, (), ())
    return Table(table.title, [table.head[at] for at in kept], [[row[at] for at in kept] for row in table.rows])


# --- cells


def number(value: float | None, *, signed: bool = False) -> str:
    """A figure with three digits, or two behind the point."""
    if value is None:
        return NOTHING
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:{'+' if signed else ''}.{digits}f}"


def interval(found: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    """A figure with its interval in brackets."""
    if found is None or found["value"] is None:
        return NOTHING
    value = number(found["value"], signed=signed)
    if found["low"] is None:
        return value
    return f"{value} [{number(found['low'], signed=signed)}, {number(found['high'], signed=signed)}]"


def speedup(found: Mapping[str, Any] | None, is_base: bool) -> str:
    """A speed-up with its interval; the base itself is not uncertain."""
    return number(found["value"]) if found and is_base else interval(found)


def with_range(value: float | None, repeats: Mapping[str, Any] | None) -> str:
    """A figure with the least and the most of its repeats; their median where there are some."""
    if repeats is None:
        return number(value)
    return f"{number(repeats['median'])} ({number(repeats['min'])} to {number(repeats['max'])})"


def with_unit(value: float | None, unit: str) -> str:
    return NOTHING if value is None else f"{number(value)} {unit}"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def size(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 2**30:.1f} GiB"


def prompts_of(own: Figures) -> str:
    failed = own["num_failed_prompts"]
    return f"{own['num_ok_prompts']}" + (f" (+{failed} failed)" if failed else "")


def agreement_cells(found: Mapping[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return NOTHING, NOTHING
    place = found["median_first_divergence"]
    return f"{found['num_identical']} of {found['num_answers']}", NOTHING if place is None else f"token {place:.0f}"


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- as text and as Markdown


def format_columns(table: Table) -> str:
    """The table with its title, columns aligned by the cells that they take on a terminal."""
    lines = [[visible_line(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([visible_line(table.title), *(f"  {aligned(line, widths)}".rstrip() for line in lines)])


def aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    spaces = [" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)]
    return "  ".join([line[0] + spaces[0], *(space + cell for cell, space in zip(line[1:], spaces[1:], strict=True))])


def markdown_columns(table: Table) -> str:
    rule = ["---", *("---:" for _ in table.head[1:])]
    lines = [[escaped(cell) for cell in table.head], rule, *([escaped(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Text in which Markdown sees nothing but text."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", visible_line(text))


def fenced(text: str) -> str:
    """A block of code, in a fence longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}json\n{text}\n{fence}"
