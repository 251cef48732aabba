"""How far a bench has come, on stderr: a bar with the time left on a terminal, a line a prompt elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..bench_rows import Key, Row, shortened
from ..graphemes import visible_line
from ..streams import write_line
from ..theme import ColorPolicy
from .progress import write_note

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Clock = Callable[[], float]


class BenchView:
    """Takes rows as they come; `expected` are the keys of all that will. Shows nothing by itself."""

    def __init__(self, expected: Iterable[Key], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._open = Counter((prompt_id, repeat) for prompt_id, _, repeat, _ in expected)
        self._rows = self._open.total()
        self._prompts = len(self._open)
        self._left = self._rows
        self._speeds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(dict)

    def handle(self, row: Row) -> None:
        """Take a row; the last one of a prompt is worth a line."""
        about = row["prompt_id"], row["repeat"]
        self._left -= 1
        self._open[about] -= 1
        sums = self._speeds[about].setdefault(row["arm"], [0.0, 0.0])
        if row["status"] == "ok" and row.get("decode_s"):
            sums[0] += row["num_new_tokens"] - row["num_first_tokens"]
            sums[1] += row["decode_s"]
        self.advance()
        if not self._open[about]:
            del self._open[about]
            self.prompt_done(f"[{self._prompts - len(self._open)}/{self._prompts}] {self._summary(about)}")

    def _summary(self, about: tuple[str, int]) -> str:
        arms = self._speeds.pop(about)
        speeds = [f"{arm} {tokens / seconds:.1f}" if seconds else f"{arm} -" for arm, (tokens, seconds) in arms.items()]
        return f"{shortened(about[0])}: {', '.join(sorted(speeds))} tokens/s{self.time_left()}"

    def time_left(self) -> str:
        """How long the rest will take at the speed so far, with a comma before it; "" where nothing is known."""
        done = self._rows - self._left
        if not done or not self._left:
            return ""
        return f", {duration((self._clock() - self._began) / done * self._left)} left"

    def advance(self) -> None:
        """A row is done."""

    def prompt_done(self, line: str) -> None:
        """All rows of a prompt are done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def close(self) -> None:
        """The run is over, or was interrupted."""


class LineView(BenchView):
    """A line for each prompt."""

    def prompt_done(self, line: str) -> None:
        write_line(sys.stderr, visible_line(line))

    def note(self, text: str) -> None:
        write_note(text)


class BarView(BenchView):
    """A bar that goes away at the end. It is drawn between turns only, so that it costs the measured ones nothing."""

    def __init__(self, expected: Iterable[Key], policy: ColorPolicy, clock: Clock = time.monotonic) -> None:
        super().__init__(expected, clock)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        self._bars: Bars = Bars(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns{task.fields[left]}", markup=False),
            console=Console(stderr=True, no_color=not policy.color, highlight=False),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bars.add_task("", total=self._rows, left="")
        self._bars.start()
        self._bars.refresh()

    def advance(self) -> None:
        self._bars.update(self._task, advance=1, left=self.time_left(), refresh=True)

    def note(self, text: str) -> None:
        write_note(text, self._bars)

    def close(self) -> None:
        self._bars.stop()


def make_view(expected: Iterable[Key], policy: ColorPolicy, *, quiet: bool) -> BenchView:
    """What shows a bench, as far as it may."""
    if quiet:
        return BenchView(expected)
    return BarView(expected, policy) if policy.live else LineView(expected)


def duration(seconds: float) -> str:
    """A time in words, as `3 h 5 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
