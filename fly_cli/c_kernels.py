"""C kernels that are compiled where they run, once, in a fraction of a second, where there is a C compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from .files import written_whole
from .storage import default_cache_dir

K = TypeVar("K")
INCLUDE = re.compile(rb'^#include "(.+)"', re.MULTILINE)
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fno-strict-aliasing")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512_BF16 = (*AVX2, "-mavx512f", "-mavx512bf16")
AVX512_VNNI = (*AVX2, "-mavx512f", "-mavx512vl", "-mavx512vnni")


def working_kernel(
    source: Path,
    constants: Mapping[str, int],
    load: Callable[[Path], K],
    is_right: Callable[[K], bool],
    instructions: tuple[str, ...] = AVX2,
) -> K | None:
    """What `load` makes of the compiled library; None where it cannot be had or fails its self-test."""
    if not cpu_has(instructions):
        return None
    try:
        for _ in range(2):  # a file that was damaged is made again
            library = compiled(source, constants, instructions)
            with suppress(OSError, AttributeError):
                if is_right(kernel := load(library)):
                    return kernel
            library.unlink(missing_ok=True)
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def cpu_has(instructions: tuple[str, ...]) -> bool:
    """Whether this CPU has `AVX2`, `AVX512_BF16` or `AVX512_VNNI`, and PyTorch may use them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    if instructions == AVX2:
        return capability in ("AVX2", "AVX512")
    has = torch.cpu._is_avx512_bf16_supported if instructions == AVX512_BF16 else torch.cpu._is_vnni_supported
    return capability == "AVX512" and has()


def compiled(
    source: Path, constants: Mapping[str, int], instructions: tuple[str, ...], cache_dir: Path | None = None
) -> Path:
    """The shared library, made where it is not there yet. Raises `OSError` or `SubprocessError` where it cannot be."""
    flags = (*FLAGS, *(f"-D{name}={value}" for name, value in constants.items()), *instructions)
    key = hashlib.sha256(whole_text(source) + repr(flags).encode()).hexdigest()[:12]
    library = (cache_dir or default_cache_dir()) / "kernels" / f"{source.stem}-{key}.so"
    if library.is_file():
        return library
    failure: Exception = FileNotFoundError("no C compiler")
    for compiler in filter(None, map(shutil.which, dict.fromkeys((os.environ.get("CC") or "cc", "gcc")))):
        try:
            compile_with(compiler, source, flags, library)
            return library
        except (OSError, subprocess.SubprocessError) as error:  # perhaps without OpenMP's header: the next may have it
            failure = error
    raise failure


def whole_text(source: Path) -> bytes:
    """A source and all that it includes from its own folder."""
    text = source.read_bytes()
    return text + b"".join(whole_text(source.with_name(name.decode())) for name in INCLUDE.findall(text))


def digest_of_sources() -> str:
    """Of all kernels: what they took before one was changed says nothing of later ones."""
    return hashlib.sha256(b"".join(map(whole_text, sorted(Path(__file__).parent.glob("*.c"))))).hexdigest()


def compile_with(compiler: str, source: Path, flags: tuple[str, ...], library: Path) -> None:
    """Make the shared library, whole or not at all. Raises `OSError` or `SubprocessError` where it cannot be."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(library) as unfinished:
        part = unfinished.with_name(unfinished.name + ".o")
        try:
            run([compiler, *flags, "-c", str(source), "-o", str(part)])
            # Without OpenMP's own library: the threads are those of PyTorch's, which is in the process already.
            run([compiler, "-shared", str(part), "-o", str(unfinished)])
        finally:
            part.unlink(missing_ok=True)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def functions(library: Path) -> ctypes.CDLL:
    """The functions of a shared library. Raises `OSError` for one that does not load."""
    return ctypes.CDLL(str(library), mode=getattr(os, "RTLD_NOW", 0))
