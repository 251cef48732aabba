"""How long-running steps tell what they are doing, to whoever wants to show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One step at a time; starting the next one ends the one before."""

    def start(self, description: str, total: int | None) -> None:
        """A step begins; `total` in bytes, None where it cannot be measured."""

    def advance(self, amount: int) -> None:
        """That many bytes of the step are done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def finish(self) -> None:
        """The step is over."""


class Silent:
    """Shows nothing."""

    def start(self, description: str, total: int | None) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass
