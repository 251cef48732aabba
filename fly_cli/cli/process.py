"""The process around a command: signals, standard streams, and a reader that has gone away."""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

STDOUT, STDERR = 1, 2  # their descriptors
HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into `KeyboardInterrupt`; a second one kills at once.

    It also remembers: libraries swallow the exception or turn it into another one, above all while they are
    being imported. `check` raises it again.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the signal's number
        self._deferred = False

    def arrive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)
        if not self._deferred:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.received is not None:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What is done inside is done to its end: text is shown whole or not at all."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()


interruption = Interruption()


@contextmanager
def handled_signals() -> Iterator[Interruption]:
    """Signals go to `interruption`, and back to where they went before."""
    interruption.received = None
    # What was ignored from the start stays so: a shell has its background jobs ignore Ctrl-C. None is a handler in C.
    ours = [number for number in HANDLED if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    try:
        before = {number: signal.signal(number, interruption.arrive) for number in ours}
    except ValueError:  # not in the main thread: signals are the host program's own business
        yield interruption
        return
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare_streams() -> None:
    """Make the standard streams usable: UTF-8 whatever the locale, and present even when closed from the start.

    A closed descriptor must be taken, or the next file opened would get its number and be written into. In
    place of stdout comes a pipe without a reader, so that writing to it fails as it does after `| head`.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, STDOUT)
        if writer != STDOUT:
            os.close(writer)
        sys.stdout = os.fdopen(STDOUT, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is sys.__stderr__:
        lenient = io.BufferedWriter(BestEffort(STDERR, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(lenient, line_buffering=True)
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)


class BestEffort(io.FileIO):
    """A file that loses what it cannot take: an answer does not end because nobody can be told about it."""

    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)  # None: a full pipe that nobody is to wait for
        except OSError:
            written = None
        return len(data) if written is None else written


def use_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode, unless paths and arguments are UTF-8 already.

    Elsewhere a path outside the locale's alphabet has two spellings, one that files open by and one that is shown,
    written in YAML and taken by the libraries; only Python's own mode makes them one.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def is_same_file(path: str | os.PathLike[str], other: str | os.PathLike[str] | IO[Any]) -> bool:
    """Whether `path` leads to the very file, pipe or terminal that the other is; what holds nothing never counts."""
    try:
        there = os.stat(path)
        same = os.path.samestat(there, os.stat(other if isinstance(other, str | os.PathLike) else other.fileno()))
        return same and not os.path.samestat(there, os.stat(os.devnull))
    except (OSError, ValueError):  # nothing there, or not a real file
        return False


def reader_is_gone(stream: IO[str]) -> bool:
    """Whether what is written to `stream` would reach nobody (the other end of a pipe is closed)."""
    if not hasattr(select, "poll"):
        return False
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):  # not a real file
        return False


def discard_output() -> None:
    """Send what is still buffered, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # not a real file
            continue
    os.close(nowhere)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import and load without looking for garbage among what is there to stay: it takes a third of the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def quiet_imports() -> None:
    """Prepare for libraries that are imported next.

    They are not to warn about what is checked here, or does not matter. And OpenMP's threads are not to spin while they
    wait: alone on the machine that brings nothing, and beside other work it makes everything many times slower.
    """
    import logging
    import warnings

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
