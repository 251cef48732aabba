"""What is said about a run on stderr: legend, notes, a line for each round, and the closing line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from .events import Drafted, Event, Finished, Origin, Round, Started
from .graphemes import visible_line
from .stats import Summary, Tally
from .streams import write, write_line
from .theme import ColorPolicy, format_legend


class Commentary:
    """Takes a run's events and talks about them, each before the renderer takes it.

    Close it after the renderer, and not at all where the run was interrupted: that has a line of its own.
    `delay` keeps notes and lines about rounds until the answer is complete: for a terminal that shows both.
    """

    def __init__(self, stream: TextIO, policy: ColorPolicy, *, verbose: bool = False, delay: bool = False) -> None:
        self._stream = stream
        self._policy = policy
        self._verbose = verbose
        self._delay = delay
        self._delayed: list[str] = []
        self._tally = Tally()

    def handle(self, event: Event) -> None:
        self._tally.handle(event)
        match event:
            case Started():
                if legend := format_legend(self._policy, roles_of(event.settings)):
                    write(self._stream, legend + "\n")
                for note in event.notes:
                    self._say(f"note: {visible_line(note)}")
            case Round():
                for line in self._lines(event):
                    self._say(line, self._delay)
            case Drafted() | Finished():
                pass

    def close(self, unfinished: str = "interrupted") -> None:
        """Say what was delayed, and the closing line; `unfinished` is the reason for a run without `Finished`."""
        for line in self._delayed:
            self._say(line)
        self._delayed = []
        self._say(format_closing_line(self._tally.summary(), unfinished))

    def _lines(self, event: Round) -> Iterator[str]:
        if self._verbose:
            yield format_round(event)
        for note in event.notes:
            yield f"note: {visible_line(note)}"

    def _say(self, line: str, delay: bool = False) -> None:
        if delay:
            self._delayed.append(line)
        else:
            write_line(self._stream, line)


def roles_of(settings: Mapping[str, Any]) -> list[Origin]:
    """The origins that a run with these settings can show; none where nothing is drafted: then all are alike."""
    if settings.get("draft_tokens") == 0:
        return []
    return [origin for origin in Origin if origin is not Origin.DEFERRED or settings.get("mode", "fly") == "fly"]


def format_closing_line(summary: Summary, unfinished: str = "interrupted") -> str:
    """One line: tokens, speed, acceptance, deferred tokens, time to first token, where the time went."""
    reason = summary.finish_reason or unfinished
    parts = [f"{count(summary.num_new_tokens, 'token')} ({reason})"]
    if summary.decode_tps is not None:
        digits = ".1f" if summary.decode_tps >= 1 else ".2g"
        parts.append(f"{summary.decode_tps:{digits}} tokens/s")
    if summary.mean_acceptance_length is not None:
        parts.append(f"{summary.mean_acceptance_length:.2f} tokens a round")
    if summary.num_draft_tokens:
        parts.append(f"{summary.num_deferred_tokens} deferred")
    if summary.ttft_s is not None:
        parts.append(f"first token after {summary.ttft_s:.2f} s")
    if summary.decode_s > 0:
        times = {"draft": summary.draft_s, "verify": summary.verify_s, "rest": summary.other_s}
        parts.append(", ".join(f"{name} {100 * time / sum(times.values()):.0f}%" for name, time in times.items()))
    return ", ".join(parts)


def format_round(event: Round) -> str:
    """One line about a round: its number, its walk as text, what was drafted, kept and committed, and its times."""
    verdict, drafted = event.verdict, len(event.drafted)
    parts = ["nothing drafted"]
    if drafted:
        origins = Counter(verdict.origins)
        kinds = f"{origins[Origin.EXACT]} exact, {origins[Origin.DEFERRED]} deferred"
        parts = [f"{draw_walk(event)} drafted {drafted}, kept {verdict.num_kept} ({kinds})"]
    if verdict.rejection is not None:
        parts.append(f"rejected: {verdict.rejection}")
    if len(event.tokens) <= verdict.num_kept:
        parts.append(f"cut to {count(len(event.tokens), 'token')}")
    parts.append(f"{event.draft_seconds:.2f} s draft + {event.verify_seconds:.2f} s verify")
    return f"round {event.index}: " + ", ".join(parts)


def draw_walk(event: Round) -> str:
    """The walk over a block: `=` exact, `x` deferred, `!` rejected (the walk ends), `.` never judged."""
    verdict = event.verdict
    walk = "".join("=" if origin is Origin.EXACT else "x" for origin in verdict.origins)
    if verdict.rejection is not None:
        walk += "!"
    return walk.ljust(len(event.drafted), ".")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
