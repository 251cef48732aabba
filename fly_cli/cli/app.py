"""The Typer app: which commands there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from ..errors import ExitCode
from . import config
from .generate import generate
from .help import SectionedCommand
from .models import models
from .pull import pull
from .replay import replay
from .usage import as_usage_error

NAME = "fly"
DISTRIBUTION = "fly-decode"
COMPLETION_VARIABLE = "_FLY_COMPLETE"  # set by the shell's completion script

app = typer.Typer(
    name=NAME,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # takes as long to import as Typer

        print(f"{NAME} {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def fly(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run a large language model faster with a small one, by loosely speculative decoding (FLy).

    FLy is lossy on purpose: where the target is unsure it may keep the draft's token. `--mode exact` is not.
    """


for command in (generate, pull, models, replay):
    app.command(cls=SectionedCommand)(command)
app.add_typer(config.app, name="config")


@cache
def build_command() -> Any:
    return typer.main.get_command(app)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command. Errors pass through, except Typer's own, which become `UsageError`."""
    command = build_command()
    if COMPLETION_VARIABLE in os.environ:
        command.main(list(arguments), prog_name=NAME)
    try:
        # Not `command.main`, which would turn a broken pipe into exit code 1 and Ctrl-C into a line of its own.
        with command.make_context(NAME, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as exit:
        return exit.exit_code
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return ExitCode.USAGE
        raise as_usage_error(error, arguments) from None
    return ExitCode.DONE
