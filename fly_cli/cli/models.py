"""`fly models`: the aliases, and what is on this machine already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ..catalog import Catalog, Entry, load_catalog
from ..graphemes import visible_line
from ..json_text import json_text
from ..storage import size_text
from ..streams import write
from . import common

HEADINGS = ("alias", "size", "cached", "licence", "gated", "draft", "source")
YES_NO = {True: "yes", False: "no", None: "?"}


def models(
    as_json: Annotated[
        bool, common.option("--json", panel=common.OUTPUT, help="A JSON list, with all that is known of each model.")
    ] = False,
    config: common.ConfigFile = None,
) -> None:
    """List the aliases: how much a pull fetches, what is cached, the licence, and where the weights come from.

    Gated models ask you to log in to the hub and accept their terms first.
    """
    layers = common.configure({}, config)
    catalog = load_catalog(layers.aliases, layers.pairs)
    found = {entry.alias: find_cached(entry) for entry in catalog}
    if as_json:
        text = json_text([as_record(entry, found[entry.alias], catalog) for entry in catalog])
    else:
        rows = [as_row(entry, found[entry.alias], catalog) for entry in catalog]
        text = format_table([HEADINGS, *rows])
    write(sys.stdout, text + "\n")


def find_cached(entry: Entry) -> Path | None:
    """Where the model is on this machine (a folder, or a .gguf file still to be converted), or None."""
    from ..weights import cached_path

    return cached_path(entry)


def as_record(entry: Entry, folder: Path | None, catalog: Catalog) -> dict[str, Any]:
    """All that is known of a model as JSON values."""
    return {
        **asdict(entry),
        "source": entry.source,
        "download_bytes": entry.download_bytes,
        "draft": catalog.draft_for(entry.alias),
        "cached": folder is not None,
        "cached_path": None if folder is None else str(folder),
    }


def as_row(entry: Entry, folder: Path | None, catalog: Catalog) -> tuple[str, ...]:
    """A line of the table."""
    size = entry.download_bytes
    cells = (
        entry.alias,
        "?" if size is None else size_text(size),
        YES_NO[folder is not None],
        entry.licence or "?",
        YES_NO[entry.gated],
        catalog.draft_for(entry.alias) or "-",
        entry.path or str(entry.hub),
    )
    return tuple(map(visible_line, cells))


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, never cut or wrapped: one model a line, for eyes and for `grep` alike."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
