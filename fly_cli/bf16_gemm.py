"""A compiled kernel for products with bf16 weights, for CPUs with AVX2 or with AVX-512 and bf16 products.

With AVX2 PyTorch's own takes as long again for every row, and so speculation could not pay. With this one, four rows
take as long as one (with AVX-512, eight), which takes as long as reading the weights; more take what the CPU's
arithmetic takes (82% and 75% of its peak). A row has the same value alone and in a block, which it has not in oneDNN's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .c_kernels import AVX2, AVX512_BF16, cpu_has, functions, working_kernel

SOURCE = Path(__file__).with_suffix(".c")
STEP = 4  # inputs come in multiples of it
AT_ONCE = 64  # rows that are read at a time
LARGEST_ERROR = 0.005  # of the self-test, relative to the largest result; to round to bf16 makes 2^-8 = 0.0039 at most


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled to."""

    instructions: tuple[str, ...]
    panel: int  # outputs that are kept together: three vectors, which with `most` rows fill the registers
    most: int  # rows that share a loaded weight
    chunk: int  # inputs whose weights stay in the CPU's first cache while all rows use them

    @property
    def constants(self) -> dict[str, int]:
        """Of the source."""
        return {"STEP": STEP, "AT_ONCE": AT_ONCE, "PANEL": self.panel, "MOST": self.most, "CHUNK": self.chunk}


FORMS = (Form(AVX512_BF16, panel=48, most=8, chunk=512), Form(AVX2, panel=24, most=4, chunk=128))


@dataclass(frozen=True)
class Gemm:
    """The functions of the compiled library, on tensors."""

    library: Any
    form: Form

    def packed_length(self, height: int, width: int) -> int:
        """How many numbers the packed weights of a layer have: the last panel is filled up."""
        return -(-height // self.form.panel) * self.form.panel * width

    def pack(self, weight: Tensor) -> Tensor:
        """bf16 [out, in] in the order in which `multiply` reads it."""
        height, width = weight.shape
        packed = weight.new_empty(self.packed_length(height, width))
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
    """The kernel; None where it cannot be had or is wrong, and for CPUs with AMX, where oneDNN's is faster."""
    form = next((form for form in FORMS if cpu_has(form.instructions)), None)
    if form is None or torch.cpu._is_amx_tile_supported():
        return None
    return working_kernel(SOURCE, form.constants, partial(load, form=form), is_right, form.instructions)


def load(library: Path, form: Form) -> Gemm:
    """The functions of a shared library. Raises `OSError` for one that does not load."""
    loaded = functions(library)
    loaded.pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int]
    loaded.bf16_gemm.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    loaded.pack.restype = loaded.bf16_gemm.restype = None
    return Gemm(loaded, form)


def is_right(gemm: Gemm) -> bool:
    """The self-test, on a small layer, of every way through the kernel."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    # Enough panels for all that a thread takes at a time, and a part of one; more inputs than a chunk has.
    height, width = (4 * torch.get_num_threads() + 1) * gemm.form.panel - 2, gemm.form.chunk + STEP
    weight, bias = random(height, width).bfloat16(), random(height)
    packed = gemm.pack(weight)
    for rows in (*range(1, gemm.form.most + 2), AT_ONCE + 1):
        input = random(rows, width).bfloat16()
        right = input.float() @ weight.float().T + bias
        error = (gemm.multiply(input, packed, bias, height).float() - right).abs().max()
        if not error <= LARGEST_ERROR * right.abs().max():  # a NaN is wrong too
            return False
    return True
