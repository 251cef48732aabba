"""A summary as plots: SVG files, drawn by matplotlib, which comes with an extra."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FlyError
from .graphemes import visible_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summary = Mapping[str, Any]
# Text stays text, in any script, and the same summary gives the same bytes.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fly", "text.parse_math": False, "font.size": 9}
PARTS = {"prefill_s": "prefill", "draft_s": "draft", "verify_s": "verify", "other_s": "other"}
NOT_IN_SVG = re.compile("[\ud800-\udfff\ufffe\uffff]")
LONGEST_LABEL = 40  # characters
WIDTH, ROW, MARGIN = 7.0, 0.22, 1.2  # inches; a row is a bar


def write_plots(summary: Summary, folder: Path) -> list[Path]:
    """The files drawn into the folder; what has nothing to show is left out. Raises `FlyError` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise FlyError("plots need matplotlib", hint="pip install 'fly-decode[plots]'") from None
    written = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
        # The viewer's fonts draw the text; that ours lack some of it changes nothing.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for draw in (speedup_by_category, acceptance_by_position, time_split, speed_quality):
            figure = Figure(figsize=(WIDTH, 4), layout="constrained")
            if draw(figure.add_subplot(), summary):
                path = folder / f"{draw.__name__}.svg"
                figure.savefig(path, format="svg", metadata={"Date": None})
                written.append(path)
    return written


def speedup_by_category(axes: Axes, summary: Summary) -> bool:
    """Bars of the speed-up over the target with their intervals, all prompts first."""
    groups = {"all": summary["overall"]}
    if len(summary["categories"]) > 1:
        groups |= summary["by_category"]
    arms = [arm for arm in summary["arms"] if arm != "target" and value_of(summary, arm) is not None]
    if not arms:
        return False
    step = len(arms) + 1
    for place, arm in enumerate(arms):
        for group, figures in enumerate(groups.values()):
            found = figures[arm]["speedup_vs_target"]
            if found is None or found["value"] is None:  # of a run that was interrupted, or where all failed
                continue
            at = group * step + place
            axes.barh(at, found["value"], color=f"C{summary['arms'].index(arm)}", label=arm if group == 0 else None)
            if found["low"] is not None:
                axes.plot([found["low"], found["high"]], [at, at], color="black", linewidth=1)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(
        [group * step + (len(arms) - 1) / 2 for group in range(len(groups))], [label_of(group) for group in groups]
    )
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over target (decode tokens/s), 95% intervals")
    add_legend(axes)
    set_height(axes, step * len(groups))
    return True


def acceptance_by_position(axes: Axes, summary: Summary) -> bool:
    """For each arm the share of drafted tokens that was kept, over their place in the draft."""
    from matplotlib.ticker import MaxNLocator

    shares = {arm: own["acceptance_by_position"] for arm, own in summary["overall"].items()}
    for place, (arm, found) in enumerate(shares.items()):
        if found:
            axes.plot(range(1, len(found) + 1), found, color=f"C{place}", marker="o", markersize=3, label=arm)
    if not any(shares.values()):
        return False
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share kept of the tokens drafted there")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes)
    return True


def time_split(axes: Axes, summary: Summary) -> bool:
    """Where a token's time goes; arms that do not tell their parts have one bar for decoding."""
    arms = [arm for arm in summary["arms"] if summary["overall"][arm]["decode_s"] is not None]
    ends = dict.fromkeys(arms, 0.0)
    for part, label in (PARTS | {"decode_s": "not told apart"}).items():
        told = [arm for arm in arms if (part == "decode_s") == (summary["overall"][arm]["verify_s"] is None)]
        if part == "prefill_s":
            told = arms
        lengths = [milliseconds_per_token(summary["overall"][arm], part) for arm in told]
        if not any(lengths):
            continue
        axes.barh(told, lengths, left=[ends[arm] for arm in told], label=label)
        ends |= {arm: ends[arm] + length for arm, length in zip(told, lengths, strict=True)}
    if not any(ends.values()):
        return False
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per new token")
    add_legend(axes)
    set_height(axes, 2 * len(arms))
    return True


def speed_quality(axes: Axes, summary: Summary) -> bool:
    """Each arm's speed-up against its quality; those on the Pareto front are joined by a line."""
    overall = summary["overall"]
    arms = [
        arm for arm in summary["arms"] if value_of(summary, arm) is not None and overall[arm]["quality"] is not None
    ]
    if len(arms) < 2:
        return False
    points = {arm: (value_of(summary, arm) or 0.0, overall[arm]["quality"]) for arm in arms}
    for arm, (speed, quality) in points.items():
        axes.scatter(speed, quality, s=20, color="C0" if overall[arm]["pareto_front"] else "grey")
        axes.annotate(arm, (speed, quality), xytext=(4, 4), textcoords="offset points")
    front = sorted(points[arm] for arm in arms if overall[arm]["pareto_front"])
    axes.plot([speed for speed, _ in front], [quality for _, quality in front], color="C0", linewidth=1)
    scored = any(overall[arm]["recovery_vs_target"] is not None for arm in arms)
    axes.set_xlabel("speed-up over target (decode tokens/s)")
    axes.set_ylabel("recovery of the target's score" if scored else "share of answers equal to the target's")
    axes.margins(0.15)
    return True


def value_of(summary: Summary, arm: str) -> float | None:
    """The arm's speed-up over the target, on all prompts."""
    found = summary["overall"][arm]["speedup_vs_target"]
    return None if found is None else found["value"]


def milliseconds_per_token(own: Mapping[str, Any], part: str) -> float:
    return 1000 * (own[part] or 0.0) / own["num_new_tokens"] if own["num_new_tokens"] else 0.0


def label_of(name: str) -> str:
    """A name from the data as a label: one short line that an SVG file can hold."""
    line = NOT_IN_SVG.sub("\N{REPLACEMENT CHARACTER}", visible_line(name[: 2 * LONGEST_LABEL]))
    return line if len(line) <= LONGEST_LABEL else line[: LONGEST_LABEL - 1] + "…"


def add_legend(axes: Axes) -> None:
    """One line above the plot, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False)


def set_height(axes: Axes, rows: int) -> None:
    axes.get_figure(root=True).set_size_inches(WIDTH, MARGIN + ROW * rows)  # type: ignore[union-attr]
