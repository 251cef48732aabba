"""Files that others see whole or not at all."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

UNFINISHED = re.compile(r"\..+\.([0-9a-f]{8})-([0-9]{1,9})\.unfinished(\.[a-z]+)?")
FORGOTTEN_SECONDS = 24 * 3600.0  # after which the file of a process that cannot be asked for is taken for left behind


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`: it takes that name once it is on disk, and goes if anything fails.

    What processes that were killed have left in the folder goes too.
    """
    remove_leftovers(path.parent)
    unfinished = path.with_name(f".{path.name}.{realm()}-{os.getpid()}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())  # the name must not be on disk before the content
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may be one that nobody can write to
            unfinished.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of processes that are gone."""
    with suppress(OSError):  # others may remove them at the same time
        for path in folder.glob(".*.unfinished*"):
            if (found := UNFINISHED.fullmatch(path.name)) and is_left(path, found[1], int(found[2])):
                path.unlink(missing_ok=True)


def is_left(path: Path, where: str, process: int) -> bool:
    """Whether nobody writes the file any more; a process elsewhere is taken to be at work for a day."""
    if where != realm():
        return path.stat().st_mtime < time.time() - FORGOTTEN_SECONDS
    import psutil  # type: ignore[import-untyped]

    return not psutil.pid_exists(process)


@cache
def realm() -> str:
    """A name for what process ids count in: this machine, or this container of it."""
    try:
        inside = os.readlink("/proc/self/ns/pid")
    except OSError:  # not on Linux
        inside = ""
    return hashlib.sha256(f"{platform.node()}\0{inside}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
