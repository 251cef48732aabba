"""Typer's complaints about the command line, told as the rest of the tool tells its errors."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import UsageError

OPTION = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def as_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> UsageError:
    """The same complaint as a `UsageError`, with a hint made from what was typed."""
    details: Any = error
    context = getattr(details, "ctx", None)
    command = context.command_path if context else " ".join(["fly", *arguments[:1]])
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    possibilities: Sequence[str] | None = getattr(details, "possibilities", None)
    if possibilities is not None:
        message = f"no such option: {details.option_name}"
    hint = f"`{command} --help` lists what it takes"
    if prompts := [argument for argument in arguments if looks_like_a_prompt(argument)]:
        hint = f"put `--` before a prompt that begins with a dash: {command} -- {shlex.quote(prompts[0])}"
    elif "unexpected extra argument" in message:
        hint = f'quote a prompt of several words: {command} "two words"'
    elif nearest := difflib.get_close_matches(str(getattr(details, "option_name", "")), possibilities or (), n=1):
        hint = f"did you mean `{nearest[0]}`?"
    return UsageError(message, hint)


def looks_like_a_prompt(argument: str) -> bool:
    """Whether an argument that begins with a dash was hardly meant as an option."""
    return argument.startswith("-") and argument not in ("-", "--") and OPTION.fullmatch(argument) is None
