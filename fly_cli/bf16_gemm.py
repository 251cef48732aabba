"""A compiled kernel for products with bf16 weights, for CPUs that cannot multiply bf16 (AVX2).

PyTorch's own takes as long again for every row there, and so speculation could not pay. With this one, four rows take
as long as one, which takes as long as reading the weights; more take what the CPU's arithmetic takes (82% of its peak).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .c_kernels import functions, working_kernel

SOURCE = Path(__file__).with_suffix(".c")
STEP = 4  # inputs come in multiples of it
PANEL = 24  # outputs that are kept together: with four rows of inputs, three vectors of eight fill the registers
AT_ONCE = 64  # rows that are widened at a time
CHUNK = 128  # inputs whose weights stay in the CPU's first cache while all rows use them
CONSTANTS = {"STEP": STEP, "PANEL": PANEL, "AT_ONCE": AT_ONCE, "CHUNK": CHUNK}
LARGEST_ERROR = 0.005  # of the self-test, relative to the largest result; to round to bf16 makes 2^-8 = 0.0039 at most


def packed_length(height: int, width: int) -> int:
    """How many numbers the packed weights of a layer have: the last panel is filled up."""
    return -(-height // PANEL) * PANEL * width


@dataclass(frozen=True)
class Gemm:
    """The functions of the compiled library, on tensors."""

    library: Any

    def pack(self, weight: Tensor) -> Tensor:
        """bf16 [out, in] in the order in which `multiply` reads it."""
        height, width = weight.shape
        packed = weight.new_empty(packed_length(height, width))
        self.library.pack(weight.data_ptr(), packed.data_ptr(), width, height, torch.get_num_threads())
        return packed

    def multiply(self, input: Tensor, packed: Tensor, bias: Tensor | None, height: int) -> Tensor:
        """bf16 [rows, in] times packed weights of `height` outputs, plus fp32 [out]: bf16 [rows, out]."""
        (rows, width), threads = input.shape, torch.get_num_threads()
        output = input.new_empty(rows, height)
        scratch = torch.empty(threads * min(rows, AT_ONCE) * width, dtype=torch.float32, device="cpu")
        offset = None if bias is None else bias.data_ptr()
        pointers = (input.data_ptr(), packed.data_ptr(), offset, output.data_ptr(), scratch.data_ptr())
        self.library.bf16_gemm(*pointers, rows, width, height, threads)
        return output


@cache
def bf16_gemm() -> Gemm | None:
    """The kernel; None where it cannot be had or is wrong."""
    return working_kernel(SOURCE, CONSTANTS, load, is_right)


def load(library: Path) -> Gemm:
    """The functions of a shared library. Raises `OSError` for one that does not load."""
    loaded = functions(library)
    loaded.pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int]
    loaded.bf16_gemm.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    loaded.pack.restype = loaded.bf16_gemm.restype = None
    return Gemm(loaded)


def is_right(gemm: Gemm) -> bool:
    """The self-test, on a small layer, of every way through the kernel."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    # Enough panels for all that a thread takes at a time, and a part of one; more inputs than a chunk has.
    height, width = 4 * torch.get_num_threads() * PANEL + PANEL - 2, CHUNK + STEP
    weight, bias = random(height, width).bfloat16(), random(height)
    packed = gemm.pack(weight)
    for rows in (1, 2, 3, 5, AT_ONCE + 1):
        input = random(rows, width).bfloat16()
        right = input.float() @ weight.float().T + bias
        error = (gemm.multiply(input, packed, bias, height).float() - right).abs().max()
        if not error <= LARGEST_ERROR * right.abs().max():  # a NaN is wrong too
            return False
    return True
