"""A compiled kernel for a handful of rows times bf16 weights, for CPUs that cannot multiply bf16 (AVX2).

PyTorch's own takes as long again for every row there, and so speculation could not pay. Checking 4 tokens takes 4 times
less with this one, and 8 tokens 3 times less, than with weights that are widened first (`cpu_linear`). It is compiled
once, in a fraction of a second, where there is a C compiler; `None` elsewhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .files import written_whole
from .storage import default_cache_dir

SOURCE = Path(__file__).with_suffix(".c")
STEP = 16  # inputs come in multiples of it
FLAGS = ("-O3", "-fPIC", "-fopenmp")
INSTRUCTIONS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}  # by what PyTorch finds
LARGEST_ERROR = 1e-4  # of the self-test, relative to the largest result; another order of sums makes 1e-6
Kernel = Callable[[Tensor, Tensor], Tensor]


@cache
def bf16_rows() -> Kernel | None:
    """The kernel: fp32 [rows, in] and bf16 [out, in] to fp32 [rows, out]; None where it cannot be had or is wrong."""
    instructions = INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())
    if instructions is None or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        kernel = load(compiled(instructions))
        return kernel if is_right(kernel) else None
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def compiled(instructions: tuple[str, ...], cache_dir: Path | None = None) -> Path:
    """The shared library, made where it is not there yet. Raises `OSError` or `SubprocessError` where it cannot be."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, instructions)).encode()).hexdigest()[:12]
    library = (cache_dir or default_cache_dir()) / "kernels" / f"bf16_rows-{key}.so"
    if library.is_file():
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc"))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    library.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(library) as unfinished:
        part = unfinished.with_name(unfinished.name + ".o")
        try:
            run([compiler, *FLAGS, *instructions, "-c", str(SOURCE), "-o", str(part)])
            # Without OpenMP's own library: the threads are those of PyTorch's, which is in the process already.
            run([compiler, "-shared", str(part), "-o", str(unfinished)])
        finally:
            part.unlink(missing_ok=True)
    return library


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def load(library: Path) -> Kernel:
    """The function of a shared library, on tensors. Raises `OSError` for one that does not load."""
    function = ctypes.CDLL(str(library), mode=getattr(os, "RTLD_NOW", 0)).bf16_rows
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    function.restype = None

    def kernel(input: Tensor, weight: Tensor) -> Tensor:
        (rows, width), height = input.shape, weight.shape[0]
        output = input.new_empty(rows, height)
        parted = torch.empty_like(input)  # tensors begin at cache lines, as what is read over and over should
        tensors = (input, weight, output, parted)
        function(*(one.data_ptr() for one in tensors), rows, width, height, torch.get_num_threads())
        return output

    return kernel


def is_right(kernel: Kernel) -> bool:
    """The self-test, on a small layer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(46, 3 * STEP, generator=generator, dtype=torch.float32).bfloat16()
    for rows in (1, 5, 13):
        input = torch.randn(rows, 3 * STEP, generator=generator, dtype=torch.float32)
        right = input @ weight.float().T
        if not (kernel(input, weight) - right).abs().max() <= LARGEST_ERROR * right.abs().max():  # a NaN is wrong too
            return False
    return True
