"""What is said on stderr while a command works: notes, and what it is busy with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..commentary import Commentary
from ..config import OutputSettings
from ..graphemes import visible_line
from ..progress import Progress, Silent
from ..streams import write_line
from ..theme import NO_ESCAPES, decide_color


class Talk:
    """The voice of a command: silent when `quiet`, and without live displays where stderr is no terminal."""

    def __init__(self, output: OutputSettings) -> None:
        self.quiet = output.quiet
        self.verbose = output.verbose
        self.policy = decide_color(output.color, sys.stderr.isatty(), os.environ)

    def note(self, text: str) -> None:
        self.lines([f"note: {text}"])

    def lines(self, lines: Iterable[str]) -> None:
        if not self.quiet:
            for line in lines:
                write_line(sys.stderr, visible_line(line))

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Say what the command is busy with, for as long as it is."""
        if self.quiet or not self.policy.live:
            yield
            return
        from rich.console import Console

        with Console(stderr=True, no_color=not self.policy.color).status(text):
            yield

    def commentary(self, *, plain: bool = False) -> list[Commentary]:
        """The sink that talks about a run, if any; `plain` where the answer's tokens are not shown in colours."""
        if self.quiet:
            return []
        policy = NO_ESCAPES if plain else self.policy
        delay = not plain and sys.stdout.isatty() and sys.stderr.isatty()
        return [Commentary(sys.stderr, policy, verbose=self.verbose, delay=delay)]

    def progress(self) -> Progress:
        """What shows downloads and conversions."""
        if self.quiet:
            return Silent()
        from .progress import make_progress

        return make_progress(self.policy)
