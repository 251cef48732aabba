"""Downloads and conversions as the user sees them: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..graphemes import visible_line
from ..progress import Progress
from ..storage import size_text
from ..streams import write_line
from ..theme import ColorPolicy

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


def make_progress(policy: ColorPolicy) -> Progress:
    """What shows the steps on stderr, as far as `policy` lets it."""
    return BarProgress(policy) if policy.live else LineProgress()


class LineProgress:
    """One line for each step and note."""

    def start(self, description: str, total: int | None) -> None:
        self.note(description if total is None else f"{description} ({size_text(total)})")

    def advance(self, amount: int) -> None:
        pass

    def note(self, text: str) -> None:
        write_note(text)

    def finish(self) -> None:
        pass


class BarProgress:
    """The step in progress as a bar that goes away with it; notes stay above. The cursor is back after `finish`."""

    def __init__(self, policy: ColorPolicy) -> None:
        self._policy = policy
        self._bars: Bars | None = None

    def start(self, description: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.finish()
        measured = (DownloadColumn(), TimeRemainingColumn()) if total is not None else (TimeElapsedColumn(),)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *measured,
            console=Console(stderr=True, no_color=not self._policy.color, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bars.add_task(visible_line(description), total=total)
        self._bars.start()

    def advance(self, amount: int) -> None:
        if self._bars is not None:
            self._bars.advance(self._bars.task_ids[0], amount)

    def note(self, text: str) -> None:
        write_note(text, self._bars)

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def write_note(text: str, bars: Bars | None = None) -> None:
    """A note on stderr; above bars that go on, where there are any."""
    line = f"note: {visible_line(text)}"
    if bars is None:
        write_line(sys.stderr, line)
    else:
        bars.console.print(line, markup=False, emoji=False, soft_wrap=True)
