"""Where weights are kept, whether they fit, and who may write there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import DownloadError, FlyError, OutOfMemoryError
from .progress import Progress

HEADROOM_BYTES = 200_000_000  # of disk, left free for everything else
POLL_SECONDS = 0.3


def default_cache_dir() -> Path:
    """`FLY_CACHE`, else the usual place of the platform."""
    if chosen := os.environ.get("FLY_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fly" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fly"
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")).absolute() / "fly"


def size_text(size: int) -> str:
    """Bytes in words, as `1.1 GB`."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale * 0.9995:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def require_disk(folder: Path, needed: int, doing: str) -> None:
    """Raise `DownloadError` unless `needed` bytes fit on the disk of `folder`."""
    place = folder
    while not place.exists():
        place = place.parent
    if not has_room(place, needed):
        free = shutil.disk_usage(place).free
        raise DownloadError(
            f"{doing} needs {size_text(needed)} of disk in `{folder}`, and {size_text(free)} are free",
            hint="free some space, or set FLY_CACHE (HF_HOME for models of the hub) to a folder on a larger disk",
        )


def has_room(folder: Path, needed: int) -> bool:
    """Whether `needed` bytes fit on the disk of a folder that exists, and some stay free. Raises `OSError`."""
    return shutil.disk_usage(folder).free >= needed + HEADROOM_BYTES


def require_memory(needed: int, doing: str) -> None:
    """Raise `OutOfMemoryError` unless `needed` bytes of memory can be had."""
    import psutil  # type: ignore[import-untyped]

    available = psutil.virtual_memory().available
    if available < needed:
        raise OutOfMemoryError(
            f"{doing} needs about {size_text(needed)} of memory, and {size_text(available)} are available",
            hint="close other programs, or use a smaller model",
        )


@contextmanager
def exclusive(lock_file: Path, what: str, progress: Progress) -> Iterator[None]:
    """Only one process at a time; the others wait, and say so. A lock ends with its process."""
    from filelock import FileLock, Timeout

    make_folder(lock_file.parent)
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"another process is fetching or converting {what}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def prepared_name(folder: Path, *form: Any) -> str:
    """A name for what is prepared from a model folder in some form: of its path, and its weights' sizes and times."""
    files = sorted(folder.glob("*.safetensors"))
    key = json.dumps([*form, str(folder.resolve()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]])
    return f"{folder.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlyError(
            f"the folder `{folder}` cannot be made: {error.strerror}",
            hint="set FLY_CACHE to a folder that you can write to",
        ) from error


@contextmanager
def watched(folder: Path, expected: int, progress: Progress) -> Iterator[None]:
    """Report what arrives in `folder` meanwhile, whoever writes it there: `expected` bytes once it went well."""
    done = threading.Event()
    start, seen = bytes_in(folder), 0

    def watch() -> None:
        nonlocal seen
        while not done.wait(POLL_SECONDS):
            arrived = min(bytes_in(folder) - start, expected)
            if arrived > seen:
                progress.advance(arrived - seen)
                seen = arrived

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress.advance(expected - seen)


def bytes_in(folder: Path) -> int:
    """The size of all files under `folder`, which may come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):  # passes over a folder that has gone
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
