"""A command whose processes work as one: what goes wrong in all of them is shown once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import FlyError, LostProcessError
from ..processes import ALONE, Alone, Processes
from .process import quiet_imports


@contextmanager
def as_one(processes: Processes) -> Iterator[Alone]:
    """Inside, the processes of this run do together what the first one finds; a process alone is its own first."""
    if processes.world == 1:
        yield ALONE
        return
    quiet_imports()
    try:
        from ..team import join_team, leave

        yield join_team(processes.world)
        leave()
    except FlyError as error:
        lost = isinstance(error, LostProcessError) and not processes.first  # whoever was lost, or the first, says why
        if lost or not processes.tells(error.message, shared=not isinstance(error, LostProcessError)):
            raise typer.Exit(error.exit_code) from None
        raise
