"""A picture of a run's answer in its colours, as SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .commentary import format_closing_line, roles_of
from .errors import FlyError
from .events import Event, Started
from .graphemes import visible, visible_line
from .render import Released, bracketed, merge_clusters
from .stats import summarize
from .theme import LEGEND, THEME

NOT_IN_XML = re.compile("[\ufffe\uffff]")  # nor controls and surrogates, which are made visible before


def export_svg(
    events: Sequence[Event], path: str | Path, title: str, *, columns: int = 100, show_rejected: bool = False
) -> None:
    """Write a picture of the run's answer, its legend and its closing line to an SVG file.

    The picture needs no font from elsewhere, and is the same for the same events. Raises `FlyError` where the
    file cannot be written.
    """
    console = Console(
        record=True, file=StringIO(), width=columns, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    for part in (draw_legend(events), draw_answer(events, show_rejected), Text(format_closing_line(summarize(events)))):
        console.print(part, overflow="fold", highlight=False)
        if part.plain and not part.plain.endswith("\n"):
            console.print()
    picture = console.export_svg(title=visible_line(title), unique_id="fly")
    picture = NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", picture)
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    try:
        Path(path).write_text(picture, encoding="utf-8", errors="replace")
    except OSError as error:
        raise FlyError(
            f"the picture `{path}` cannot be written: {error.strerror}", hint="choose another `--svg` file"
        ) from error


def draw_legend(events: Sequence[Event]) -> Text:
    """The legend of the run's roles, each word in its style."""
    started = next((event for event in events if isinstance(event, Started)), None)
    legend = Text()
    for role in roles_of(started.settings) if started else []:
        legend.append(", " if legend else "").append(str(role), THEME[role]).append(f": {LEGEND[role]}")
    return legend


def draw_answer(events: Sequence[Event], show_rejected: bool) -> Text:
    """The answer, each grapheme cluster in the style of its role, controls made visible."""
    released = Released("kept" if show_rejected else "no")
    pieces = [piece for event in events for piece in released.take(event)] + released.rest()
    answer = Text()
    for role, run in groupby(merge_clusters(map(bracketed, pieces)), key=lambda piece: piece.role):
        answer.append("".join(visible(piece.text) for piece in run), THEME[role])
    return answer
