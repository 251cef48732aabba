"""A compiled kernel for the forwards of a plain decoder with int4 weights, for CPUs with AVX2 (and VNNI).

A whole forward is one call, which reads each weight once: 4 bits and its share of a scale.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .c_kernels import AVX2, AVX512_VNNI, cpu_has, functions, working_kernel
from .row_attention import TILE

SOURCE = Path(__file__).with_suffix(".c")
OUTS = 8  # outputs of a panel: the lanes of a vector
BLOCK = 32  # inputs that share a scale
BLOCK_BYTES = 2 * OUTS + BLOCK * OUTS // 2
CONSTANTS = {"TILE": TILE, "OUTS": OUTS, "BLOCK": BLOCK, "AHEAD": 16 * BLOCK_BYTES}
LARGEST_ERROR = 0.02  # of the self-test, relative; to round inputs to 8 bits makes 0.005
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """`matrix` of the source."""

    _fields_ = (("packed", POINTER), ("bias", POINTER), ("inputs", SIZE), ("outputs", SIZE))


class Layer(ctypes.Structure):
    """`layer` of the source."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
    )


class Decoder(ctypes.Structure):
    """`decoder` of the source."""

    _fields_ = (
        ("layers", POINTER),
        *((name, SIZE) for name in ("num_layers", "width", "inner", "heads", "key_heads", "head_width")),
        ("embedding", Matrix),
        ("head", Matrix),
        ("norm", POINTER),
        ("epsilon", ctypes.c_float),
    )


class Narrow(ctypes.Structure):
    """`narrow` of the source."""

    _fields_ = (("numbers", POINTER), ("scales", POINTER), ("sums", POINTER))


class Workspace(ctypes.Structure):
    """`workspace` of the source."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "normal", "y", "attention", "query", "attended", "spans")),
        ("room", SIZE),
        ("input", Narrow),
    )


def packed_bytes(outputs: int, inputs: int) -> int:
    """Of a weight [outputs, inputs]: the last panel is filled up."""
    return -(-outputs // OUTS) * (inputs // BLOCK) * BLOCK_BYTES


@dataclass(frozen=True)
class Kernel:
    """The functions of the compiled library, on tensors."""

    library: Any

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] in any dtype -> int4 in the order in which forwards read it: uint8 [packed_bytes]."""
        weight = weight.detach().bfloat16().contiguous()
        packed = empty(packed_bytes(*weight.shape), dtype=torch.uint8)
        self.library.pack_int4(weight.data_ptr(), packed.data_ptr(), *reversed(weight.shape), torch.get_num_threads())
        return packed

    def forward(
        self,
        decoder: Decoder,
        workspace: Workspace,
        ids: list[int],
        start: int,
        cache: Tensor,
        turns: Tensor,
        logits: Tensor,
    ) -> None:
        """Write the logits [last, vocabulary] of the last rows of `ids`, which stand behind `start` cached tokens.

        cache [layers, 2, capacity, key heads, head width] bf16, turns [capacity, 2, head width / 2] fp32.
        """
        rows = torch.tensor(ids, device="cpu")
        self.library.forward(
            ctypes.byref(decoder),
            rows.data_ptr(),
            *(len(ids), start, len(logits)),
            *(cache.data_ptr(), cache.shape[2], turns.data_ptr()),
            *(ctypes.byref(workspace), logits.data_ptr()),
            torch.get_num_threads(),
        )

    def product(self, input: Tensor, packed: Tensor, outputs: int) -> Tensor:
        """fp32 [rows, in] times packed weights: fp32 [rows, outputs]."""
        rows, inputs = input.shape
        output, room = empty(rows, outputs), narrow_room(rows, inputs)
        weight = Matrix(packed.data_ptr(), None, inputs, outputs)
        pointers = (ctypes.byref(weight), ctypes.byref(narrow(room)), output.data_ptr())
        self.library.product(input.data_ptr(), *pointers, rows, torch.get_num_threads())
        return output


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room on the CPU, whatever the default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def narrow_room(rows: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows are kept in 8 bits: numbers [rows, in], and their blocks' scales and sums."""
    blocks = rows * inputs // BLOCK
    return empty(rows * inputs, dtype=torch.int8), empty(blocks), empty(blocks, dtype=torch.int32)


def narrow(room: tuple[Tensor, Tensor, Tensor]) -> Narrow:
    return Narrow(*(one.data_ptr() for one in room))


@cache
def int4_kernel() -> Kernel | None:
    """The kernel; None where it cannot be had or is wrong."""
    instructions = AVX512_VNNI if cpu_has(AVX512_VNNI) else AVX2
    return working_kernel(SOURCE, CONSTANTS, load, is_right, instructions)


def load(library: Path) -> Kernel:
    """The functions of a shared library. Raises `OSError` for one that does not load."""
    loaded = functions(library)
    loaded.pack_int4.argtypes = [POINTER, POINTER, SIZE, SIZE, ctypes.c_int]
    loaded.product.argtypes = [POINTER] * 4 + [SIZE, ctypes.c_int]
    loaded.forward.argtypes = [POINTER, POINTER, *[SIZE] * 3, POINTER, SIZE, *[POINTER] * 3, ctypes.c_int]
    loaded.pack_int4.restype = loaded.product.restype = loaded.forward.restype = None
    return Kernel(loaded)


def is_right(kernel: Kernel) -> bool:
    """The self-test: products of up to five rows with two panels and a part of one."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-8, 8, (2 * OUTS + 3, 2 * BLOCK), generator=generator, device="cpu")
    steps[:, ::BLOCK] = -8  # what a block's scale follows: these weights are kept as they are
    weight = steps.float() / 64
    packed = kernel.pack(weight)
    for rows in range(1, 6):
        input = torch.randn(rows, 2 * BLOCK, generator=generator, dtype=torch.float32, device="cpu")
        right = input @ weight.T
        if not (kernel.product(input, packed, len(weight)) - right).norm() <= LARGEST_ERROR * right.norm():
            return False
    return True
