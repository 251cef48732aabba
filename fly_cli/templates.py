"""Chat templates are programs that come with a model: one that never ends, or eats the memory, is told beforehand.

A template is tried on small chats in a copy of this process, which can be ended whatever it does and has its own limit
of memory. That is once for each template, before any weights are read. Elsewhere than on Linux nothing is tried.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from .errors import UnsupportedModelError

MOST_SECONDS = 10.0
MOST_BYTES = 512_000_000
TRIALS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")],
)


def refuse_endless(template: str, special_tokens: dict[str, str]) -> None:
    """Raise `UnsupportedModelError` for a template that does not come to an end within limits."""
    if not ends(template, tuple(special_tokens.items())):
        raise UnsupportedModelError(
            f"the chat template does not end within {MOST_SECONDS:g} seconds and {MOST_BYTES / 1e6:g} MB of memory",
            hint="give another with `--chat-template FILE`, or use `--raw`",
        )


@cache
def ends(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether the template comes to an end, a result or an error of its own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = dict(special_tokens)

    def render() -> None:
        for chat in TRIALS:
            try:
                render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **tokens)
            except MemoryError:
                raise
            except Exception:  # a template may refuse a chat
                continue

    return comes_back(render, MOST_SECONDS, MOST_BYTES)


def comes_back(work: Callable[[], object], seconds: float, more_bytes: int) -> bool:
    """Whether `work` returns in that time, with that much memory more than now; True where that cannot be tried."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:  # a daemon may have no children
        return True
    process = multiprocessing.get_context("fork").Process(target=limited, args=(work, more_bytes), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy has none of our threads, and needs none
        try:
            process.start()
        except OSError:  # no room for a copy
            return True
    with ended(process):
        process.join(seconds)
        return process.exitcode == 0


@contextmanager
def ended(process: multiprocessing.process.BaseProcess) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.join()
        process.close()


def limited(work: Callable[[], object], more_bytes: int) -> None:
    """Do the work within the limit of memory, and end this process without touching what the other one has open."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        longest = int(2 * MOST_SECONDS)  # for a copy that nobody ends, since the other process was killed
        for kind, most in ((resource.RLIMIT_AS, now + more_bytes), (resource.RLIMIT_CPU, longest)):
            with suppress(ValueError, OSError):  # a lower limit is there already
                resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
        work()
        code = 0
    finally:
        os._exit(code)
