"""A model's configuration and tokenizer, found or fetched without its weights."""

from __future__ import annotations

import os
from pathlib import Path

from . import hub
from .catalog import Catalog, Entry
from .errors import FlyError, ModelNotFoundError
from .gguf_header import read_header
from .progress import Progress, Silent
from .storage import default_cache_dir
from .weights import (
    MARKER,
    Located,
    cached_hub_folder,
    check_folder,
    converted_name,
    entry_named,
    local_key,
    local_path,
)


def locate_description(
    name: str,
    catalog: Catalog,
    *,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Located | None:
    """The folder with configuration and tokenizer of the model `name`; of the hub's models nothing else is fetched.

    None for a GGUF file that was not converted yet: what it says is inside it. Raises as `locate` does.
    """
    cache = cache_dir or default_cache_dir()
    progress = progress or Silent()
    entry = entry_named(name, catalog)
    if entry.path is not None:
        path = local_path(Path(entry.path))
        if os.path.isdir(path):
            return Located(name, path, str(path), weights=has_weights(path))
        folder = cache / "models" / f"{local_key(path)}-bf16"
        if not (folder / MARKER).is_file():
            read_header(path)  # refuses what is no GGUF file
    elif entry.file is not None:
        folder = cache / "models" / converted_name(entry)
    else:
        try:
            return described_hub_model(name, entry, offline or hub.is_offline(), progress)
        finally:
            progress.finish()
    return Located(name, folder, entry.source, converted=True) if (folder / MARKER).is_file() else None


def described_hub_model(name: str, entry: Entry, offline: bool, progress: Progress) -> Located:
    """The hub's cache's folder of a model's configuration and tokenizer, fetched where they are missing."""
    if folder := cached_hub_folder(entry):
        return Located(name, folder, entry.source)
    repo = str(entry.hub)
    folder = cached_hub_folder(entry, weights=False)
    if folder is None and offline:
        raise ModelNotFoundError(
            f"the configuration of `{repo}` is not in the cache {hub.cache_location()}, and connections are off",
            hint="run the command once without `--offline` and HF_HUB_OFFLINE",
        )
    folder = folder or hub.fetch_model(repo, entry.revision, progress, weights=False)
    return Located(name, folder, entry.source, weights=False)


def has_weights(folder: Path) -> bool:
    """Whether a model's folder is whole. Raises `ModelNotFoundError` for one without a configuration."""
    try:
        check_folder(folder)
    except FlyError:
        if not (folder / "config.json").is_file():
            raise
        return False
    return True
