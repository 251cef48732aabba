"""The command line. `main` is the only place that shows errors and decides the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import ExitCode, FlyError
from .process import discard_output, handled_signals, prepare_streams, use_utf8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `fly` with `arguments` (default: the process's own) and return its exit code."""
    with handled_signals() as interruption:
        try:
            with interruption.deferred():
                prepare_streams()
            if arguments is None:
                use_utf8()
            from .app import invoke  # here, so that Ctrl-C during this import is handled as well

            code = invoke(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
        except BaseException as error:  # every exit code is decided here
            # After a signal any error is taken for its echo: an interrupted import raises all kinds.
            code = explain(error) if interruption.received is None else leave(interruption.received)
    return code


def explain(error: BaseException) -> int:
    """Show an error that ended a command, and return the exit code for it."""
    match error:
        case FlyError():
            show_error(error.message, error.hint)
            return error.exit_code
        case BrokenPipeError():
            discard_output()
            return ExitCode.BROKEN_PIPE
        case OSError() if error.errno is not None:
            name = f": {error.filename}" if error.filename is not None else ""
            show_error(f"{error.strerror}{name}", "check the path, its permissions and the free space")
            discard_output()
            return ExitCode.FAILED
        case SystemExit():
            return error.code if isinstance(error.code, int) else ExitCode.FAILED
        case _:
            import traceback  # takes as long to import as all that is needed before signals are handled

            from ..graphemes import visible_lines

            print(visible_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)
            return ExitCode.FAILED


def leave(number: int) -> int:
    """One line for a run that signal `number` ended, and the exit code that a shell gives it."""
    from ..processes import follows

    code = ExitCode(128 + number)
    # Where the interrupt passed through an `exec` of text (dataclasses make theirs so), Python has noted that it will
    # end itself by the signal instead of by this code; another `exec` clears the note.
    exec("")
    try:
        sys.stdout.flush()
        if not follows(os.environ):
            print(code.name.lower(), file=sys.stderr)
    except OSError:  # the reader is gone too
        discard_output()
    return code


def show_error(message: str, hint: str = "") -> None:
    """`error: what`, a blank line, `hint: what to do`, on stderr; control characters visible."""
    from ..graphemes import visible_line
    from ..streams import write_line

    for line in (f"error: {visible_line(message)}", *(["", f"hint: {visible_line(hint)}"] if hint else [])):
        write_line(sys.stderr, line)
