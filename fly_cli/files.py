"""Files that others see whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`: it takes that name once it is on disk, and goes if anything fails."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # the name must not be on disk before the content
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may be one that nobody can write to
            unfinished.unlink(missing_ok=True)
        raise
