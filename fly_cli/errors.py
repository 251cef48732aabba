"""Errors that a user can cause, and the exit codes they end in.

    FlyError                    1  something went wrong that the user can act on
    ├── UsageError              2  bad flags, settings, prompts or names
    │   ├── SettingsError       2  a value out of range, an unknown key, flags that exclude each other
    │   ├── PromptError         2  no prompt, a bad JSONL row, a prompt that the model cannot take
    │   ├── TraceError          2  a file that is not a trace
    │   └── ModelNotFoundError  2  no such alias, folder, file or hub id
    ├── DownloadError           1  weights could not be fetched, or are not what the catalog promises
    ├── ModelError              1  a model that cannot be loaded or used
    │   └── UnsupportedModelError 2  an architecture, cache or file that this tool refuses
    ├── OutOfMemoryError        1  models or caches do not fit
    ├── LostProcessError        1  another process of this run has gone, and nothing can be done without it
    └── DecodeError             1  the models gave something that cannot be decoded (NaN logits)

Anything else that escapes is a bug and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns to the shell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class FlyError(Exception):
    """An error with a message (what happened) and a hint (what to do), neither ending in a full stop."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(FlyError):
    exit_code = ExitCode.USAGE


class SettingsError(UsageError):
    pass


class PromptError(UsageError):
    pass


class TraceError(UsageError):
    pass


class ModelNotFoundError(UsageError):
    pass


class DownloadError(FlyError):
    pass


class ModelError(FlyError):
    pass


class UnsupportedModelError(ModelError):
    exit_code = ExitCode.USAGE


class OutOfMemoryError(FlyError):
    pass


class LostProcessError(FlyError):
    pass


class DecodeError(FlyError):
    pass


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is Python's or torch's way to say so (told by name: torch need not be imported for it)."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("OutOfMemoryError" in kinds or "can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def out_of_memory(doing: str, error: BaseException | None = None) -> OutOfMemoryError:
    """What to tell a user whose memory ran out while `doing` something, and what the library said of it."""
    said = f" ({' '.join(str(error).split())[:200]})" if str(error or "") else ""
    return OutOfMemoryError(
        f"memory ran out while {doing}{said}",
        hint="use a smaller draft or `--draft lookup`, `--dtype bfloat16`, or a shorter prompt",
    )


@contextmanager
def memory_errors(doing: str) -> Iterator[None]:
    """Memory that runs out while `doing` something is an error that the user can act on, not a bug."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(doing, error) from error
