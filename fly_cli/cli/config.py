"""`fly config show`: the effective settings, and where each came from."""

from __future__ import annotations

import sys

import typer

from ..catalog import load_catalog
from ..streams import write
from . import common
from .talk import Talk

config = typer.Typer(name="config", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@config.callback()
def settings() -> None:
    """Show the settings, and where each came from."""


@config.command()
def show(file: common.ConfigFile = None) -> None:
    """Print every setting with its origin, as YAML that can be copied into a config file."""
    layers = common.configure({}, file)
    effective = common.effective(layers, load_catalog(layers.aliases, layers.pairs))
    read = str(layers.file or f"{common.default_config_file()} (there is none)")
    lines = [f"# file: {common.yaml_comment(read)}", *common.format_values(effective.values)]
    for name, table in (("aliases", layers.aliases), ("pairs", layers.pairs)):
        if table:
            lines.append(f"{name}: {common.yaml_value(table)}")
    write(sys.stdout, "".join(line + "\n" for line in lines))
    talk = Talk(effective.output)
    for note in effective.notes:
        talk.note(note)
