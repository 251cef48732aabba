"""Where a result was measured, and with which weights."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .json_text import read_json

CHUNK_BYTES = 1 << 22
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def describe_machine() -> dict[str, Any]:
    """The parts of this machine that speed depends on, as JSON values."""
    import psutil  # type: ignore[import-untyped]
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
    }


def processor_name() -> str:
    """The processor as it calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def identify_model(folder: Path) -> dict[str, str]:
    """What tells this model from any other: a commit of the hub, or the sha256 of its GGUF file or of its own files."""
    if (origin := gguf_origin(folder / "fly.json")) is not None:
        return origin
    if folder.parent.name == "snapshots":  # the hub's cache
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return {"source": name, "commit": folder.name}
    return {"source": folder.name, "sha256": folder_sha256(folder)}


def gguf_origin(marker: Path) -> dict[str, str] | None:
    """What `weights` says of a model that it made of a GGUF file; None where it did not make it."""
    try:
        facts = read_json(marker.read_text(encoding="utf-8"))
        source, sha256 = facts["source"], facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {"source": source, "gguf_sha256": sha256} if isinstance(source, str) and isinstance(sha256, str) else None


def folder_sha256(folder: Path) -> str:
    """The sha256 over names and contents of a model's files."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        found.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for chunk in chunks(path):
            found.update(chunk)
    return found.hexdigest()


def chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
