"""`fly replay TRACE`: show a recorded run again, or judge its evidence by other rules."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from ..commentary import Commentary
from ..config import OutputSettings
from ..errors import UsageError
from ..events import Drafted, Event, Finished, Round, Started
from ..graphemes import visible_line
from ..render import Released, make_renderer, write
from ..settings import check_range
from ..stats import summarize
from ..theme import decide_color
from ..trace import Rejudged, read_trace, rejudge
from .common import OUTPUT, Color, ConfigFile, Quiet, ShowRejected, Verbose, configure, option

REJUDGE = "Judging again"
LONGEST_PAUSE = 3600.0  # seconds


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="File that `--trace` wrote.", show_default=False)],
    entropy_threshold: Annotated[
        float | None,
        option("--entropy-threshold", "--theta", panel=REJUDGE, default="as recorded", help="Entropy to keep from."),
    ] = None,
    window_size: Annotated[
        int | None,
        option("--window-size", "-w", panel=REJUDGE, default="as recorded", help="Clean tokens after a kept mismatch."),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(rich_help_panel=OUTPUT, help="1 replays at the recorded pace, 2 twice as fast, 0 at once."),
    ] = 0.0,
    svg: Annotated[Path | None, option("--svg", panel=OUTPUT, help="Also draw the answer into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="One JSON object.")] = False,
    color: Color = None,
    show_rejected: ShowRejected = None,
    quiet: Quiet = None,
    verbose: Verbose = None,
    config: ConfigFile = None,
) -> None:
    """Show a recorded run again, in the same colours, without any model.

    With another entropy threshold or window size the recorded evidence is judged again, as far as it goes: up to
    the first round that would have committed other tokens.
    """
    flags = {"color": color, "show_rejected": show_rejected, "quiet": quiet, "verbose": verbose}
    output: OutputSettings = configure(flags, config).group(OutputSettings)
    check_range("speed", speed, 0.0)
    check_range("entropy_threshold", entropy_threshold or 0.0, 0.0)
    check_range("window_size", window_size or 0, 0)

    recorded = read_trace(trace)
    runs: list[Sequence[Event]] = list(recorded.runs())
    others: list[Rejudged] = []
    if entropy_threshold is not None or window_size is not None:
        others = [rejudge(run, entropy_threshold=entropy_threshold, window_size=window_size) for run in runs]
        runs = [other.events for other in others]
    if (as_json or svg) and len(runs) != 1:
        raise UsageError(f"the trace has {len(runs)} runs, and `--json` and `--svg` take one", hint="leave them out")
    notes = [*recorded.notes, *(other.describe() for other in others)]
    if svg:
        from ..picture import export_svg  # rich's console takes a while to import

        export_svg(runs[0], svg, title=f"fly replay {trace.name}", show_rejected=output.show_rejected)
    if as_json:
        write(sys.stdout, json.dumps(as_object(runs[0], others, notes), allow_nan=False) + "\n")
        return
    for run in runs:
        show(run, output, speed)
    if not output.quiet:
        for note in notes:
            write(sys.stderr, f"note: {visible_line(note)}\n")


def show(run: Sequence[Event], output: OutputSettings, speed: float) -> None:
    """Render one run: the answer to stdout, the talk to stderr."""
    policy = decide_color(output.color, sys.stdout.isatty(), os.environ)
    talk_policy = decide_color(output.color, sys.stderr.isatty(), os.environ)
    same_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    commentary = None
    if not output.quiet:
        commentary = Commentary(sys.stderr, talk_policy, verbose=output.verbose, delay=same_terminal)
    with closing(make_renderer(sys.stdout, policy, show_rejected=output.show_rejected)) as renderer:
        for event in paced(run, speed):
            if commentary:
                commentary.handle(event)
            renderer.handle(event)
    if commentary:
        commentary.close()


def paced(run: Sequence[Event], speed: float) -> Iterator[Event]:
    """The events, each after the time that it took when it was recorded, divided by `speed` (0: at once)."""
    for event, following in zip(run, [*run[1:], None], strict=True):
        if speed > 0:
            time.sleep(min(seconds_to(event, following) / speed, LONGEST_PAUSE))
        yield event


def seconds_to(event: Event, following: Event | None) -> float:
    """How long the run took from the event before to this one."""
    match event:
        case Started():
            return event.prefill_seconds
        case Drafted():
            return following.draft_seconds if isinstance(following, Round) else 0.0
        case Round():
            return event.verify_seconds + event.other_seconds
        case Finished():
            return 0.0


def as_object(run: Sequence[Event], others: Sequence[Rejudged], notes: Sequence[str]) -> dict[str, Any]:
    """The run's text, figures and settings, and what came of other rules, as JSON values."""
    released = Released()
    pieces = [piece for event in run for piece in released.take(event)] + released.rest()
    started = next(event for event in run if isinstance(event, Started))
    value = {
        "text": "".join(piece.text for piece in pieces),
        **summarize(run).as_json(),
        "settings": dict(started.settings),
        "notes": list(notes),
    }
    for other in others:
        value["rejudged"] = other.as_json()
    return value
