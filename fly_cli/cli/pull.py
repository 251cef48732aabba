"""`fly pull`: fetch models before they are needed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..catalog import load_catalog
from ..graphemes import visible_line
from ..settings import LOOKUP
from ..streams import write
from . import common
from .talk import Talk


def pull(
    context: typer.Context,
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Alias, hub id or .gguf file. Without one: the configured pair, or the default pair.",
            show_default=False,
        ),
    ] = None,
    offline: common.Offline = None,
    color: common.Color = None,
    quiet: common.Quiet = None,
    config: common.ConfigFile = None,
) -> None:
    """Fetch models, check them and make them ready to load. Prints the folder of each.

    Files that come as GGUF are converted once to bf16 safetensors; the GGUF file is kept in the cache beside them.
    """
    from ..weights import locate

    layers = common.configure(context.params, config)
    catalog = load_catalog(layers.aliases, layers.pairs)
    settings = common.effective(layers, catalog)
    pair = [name for name in (settings.models.target, settings.models.draft) if name not in (None, LOOKUP)]
    progress = Talk(settings.output).progress()
    for model in name or pair:
        located = locate(str(model), catalog, offline=settings.models.offline, refresh=True, progress=progress)
        path = str(located.path)
        write(sys.stdout, (visible_line(path) if sys.stdout.isatty() else path) + "\n")
