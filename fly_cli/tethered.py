"""`python -m fly_cli.tethered MODULE ARGUMENTS...`: run a module in a process that ends with the one that started it.

A process that is killed ends no child of its own. The child would go on, take memory and disk, and make again the
folders that the next run has removed. So its standard input is a pipe that nobody writes to: it ends with the parent.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STDIN = 0  # its descriptor


def tethered(module: str, *arguments: str) -> list[str]:
    """The command that runs the module so."""
    return [sys.executable, "-m", __name__, module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables`, in which the command finds this package."""
    package = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}


@contextmanager
def tether() -> Iterator[int]:
    """The standard input of the command: it ends behind this block, or with this process."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def main(module: str, *arguments: str) -> None:
    """Run the module, with an empty standard input, for as long as the parent lives."""
    line = os.dup(STDIN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    threading.Thread(target=end_with, args=(line,), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(line: int) -> None:
    """End this process where the pipe ends."""
    os.read(line, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
