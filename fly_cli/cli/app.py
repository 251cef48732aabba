"""The Typer app: which commands there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import ExitCode
from .help import SectionedCommand
from .usage import as_usage_error

NAME = "fly"
DISTRIBUTION = "fly-decode"
COMPLETION_VARIABLE = "_FLY_COMPLETE"  # set by the shell's completion script

COMMANDS = {  # name -> one line of help; the function or Typer app of that name is in the module of that name
    "generate": "Answer a prompt, and show how each token got there.",
    "bench": "Measure how much faster a pair is than other ways to decode.",
    "tune": "Find the settings that suit a pair on this machine, and keep them.",
    "check": "Tell whether two models can decode together here.",
    "pull": "Fetch models before they are needed.",
    "models": "List the models that have a name.",
    "replay": "Show a recorded run again.",
    "config": "Show the settings, and where each came from.",
}


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is asked for: help and usage errors need none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@cache
def load_command(name: str) -> Any:
    """The command as Typer's parser has it."""
    found = getattr(import_module(f".{name}", __package__), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=SectionedCommand)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name=NAME,
    cls=LazyGroup,
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
