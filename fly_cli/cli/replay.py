"""`fly replay TRACE`: show a recorded run again, or judge its evidence by other rules."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import OutputSettings
from ..errors import UsageError
from ..events import Drafted, Event, Finished, Round, Started
from ..json_text import json_text
from ..render import make_renderer
from ..settings import check_range
from ..streams import write
from ..theme import decide_color
from ..trace import Rejudged, Trace, read_trace, rejudge
from .common import OUTPUT, Color, ConfigFile, Quiet, ShowRejected, Verbose, check_output, configure, option
from .process import interruption
from .results import Result
from .talk import Talk

JUDGING = "Judging again"
LONGEST_PAUSE = 3600.0  # seconds


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="File that --trace wrote.", show_default=False)],
    entropy_threshold: Annotated[
        float | None,
        option(
            "--entropy-threshold",
            "--theta",
            panel=JUDGING,
            default="as recorded",
            help="Keep a mismatch only where the target's entropy is at least this.",
        ),
    ] = None,
    window_size: Annotated[
        int | None,
        option(
            "--window-size",
            "-w",
            panel=JUDGING,
            default="as recorded",
            help="Drafted tokens that must all match after a mismatch for it to be kept.",
        ),
    ] = None,
    speed: Annotated[
        float,
        option("--speed", panel=OUTPUT, default="0", help="1 is the recorded pace, 2 twice that, 0 without a pause."),
    ] = 0.0,
    svg: Annotated[
        Path | None, option("--svg", panel=OUTPUT, help="Also draw the answer in its colours into this SVG file.")
    ] = None,
    as_json: Annotated[
        bool, option("--json", panel=OUTPUT, help="One JSON object: text, figures, tokens, settings.")
    ] = False,
    color: Color = None,
    show_rejected: ShowRejected = None,
    quiet: Quiet = None,
    verbose: Verbose = None,
    config: ConfigFile = None,
) -> None:
    """Show a recorded run again, in the same colours and without any model.

    With another entropy threshold or window size the recorded evidence is judged again, as far as it goes: up to
    the first round that would have committed other tokens.
    """
    flags = {name: context.params[name] for name in ("color", "show_rejected", "quiet", "verbose")}
    layers = configure(flags, config)
    output: OutputSettings = layers.group(OutputSettings)
    check_range("speed", speed, 0.0)
    if entropy_threshold is not None:
        check_range("entropy_threshold", entropy_threshold, 0.0)
    if window_size is not None:
        check_range("window_size", window_size, 0)
    if svg:
        check_output("--svg", svg, [trace, layers.file])

    recorded = read_trace(trace)
    others: list[Rejudged] = []
    if entropy_threshold is not None or window_size is not None:
        others = [rejudge(run, entropy_threshold=entropy_threshold, window_size=window_size) for run in recorded.runs()]
    runs = [other.events for other in others] if others else recorded.runs()
    if (as_json or svg) and len(runs) != 1:
        raise UsageError(
            f"the trace has {len(runs)} runs, and `--json` and `--svg` take one", hint="record that run by itself"
        )
    if svg:
        from ..picture import export_svg  # needs all of rich, which takes a while

        export_svg(runs[0], svg, title=f"fly replay {trace.name}", show_rejected=output.show_rejected)
    if as_json:
        write(sys.stdout, json_text(as_object(runs[0], recorded, others)) + "\n")
        return
    talk = Talk(output)
    for run in runs:
        show(run, output, talk, speed, ended(others))
    for note in (*recorded.notes, *(other.describe() for other in others)):
        talk.note(note)


def show(run: Sequence[Event], output: OutputSettings, talk: Talk, speed: float, unfinished: str) -> None:
    """Render one run: the answer to stdout, the talk to stderr."""
    policy = decide_color(output.color, sys.stdout.isatty(), os.environ)
    renderer = make_renderer(sys.stdout, policy, show_rejected=output.show_rejected)
    commentary = talk.commentary(plain=not policy.cues)
    try:
        for event in paced(run, speed):
            with interruption.deferred():
                for sink in (*commentary, renderer):
                    sink.handle(event)
    finally:
        with interruption.deferred():
            renderer.close()
    for sink in commentary:
        sink.close(unfinished)


def ended(others: Sequence[Rejudged]) -> str:
    """Why a run without `Finished` ends where it does."""
    return "diverged" if any(other.divergence for other in others) else "interrupted"


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


def as_object(run: Sequence[Event], recorded: Trace, others: Sequence[Rejudged]) -> dict[str, Any]:
    """The run as `generate --json` shows it, without what only the models know; `rejudged` says what other rules do."""
    result = Result()
    for event in run:
        result.handle(event)
    result.close()
    started = run[0]
    assert isinstance(started, Started), "a run begins with its start"
    value = result.as_json(started.prompt_id, ended(others))
    value["notes"] += recorded.notes
    value |= {"tokens": result.tokens, "settings": {"decode": result.settings}}
    if others:
        value["rejudged"] = others[0].as_json()
    return value
