"""A compiled kernel for attention over bf16 keys, for CPUs with AVX2.

PyTorch's own takes keys in fp32 where the CPU cannot multiply bf16, a copy of all of them for every layer and pass, and
rounds a row of a block otherwise than a row alone. This one reads them as they are, and gives each row what it would
get alone, bit for bit. It is faster where the CPU can, too: one row behind 2000 tokens took 3.5 ms a layer, and takes
0.2 (AVX-512).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .c_kernels import functions, working_kernel

SOURCE = Path(__file__).with_suffix(".c")
LANES = 8  # numbers of a vector; widths are multiples of it
TILE = LANES  # keys that are widened at a time
CONSTANTS = {"TILE": TILE}
LARGEST_ERROR = 0.01  # of the self-test: what rounds to bf16 is 1 or so, and so off by 2^-8 = 0.0039 at most


class RowsOf(ctypes.Structure):
    """`rows_of` of the source: where the rows or keys of all heads lie, counted in numbers."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("next", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


def rows_of(x: Tensor) -> RowsOf:
    """Of [1, heads, rows, width]."""
    _, heads_apart, rows_apart, _ = x.stride()
    return RowsOf(x.data_ptr(), rows_apart, heads_apart, x.shape[-1])


def attention_room(group: int, keys: int, width: int, value_width: int) -> int:
    """fp32 numbers that a thread of `attend` works in, over `keys` keys that a group of heads shares."""
    return group * (width + value_width + keys + TILE) + TILE * max(width, value_width)


@dataclass(frozen=True)
class RowAttention:
    """The function of the compiled library, on tensors."""

    library: Any

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float) -> Tensor:
        """bf16 [1, heads, rows, width], [1, key heads, keys, ...], spans [rows, 2] -> [1, rows, heads, value width].

        A row sees the keys [first, behind) of its span, which has one at least. Widths are multiples of `LANES`.
        """
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        (_, heads, rows, width), (_, key_heads, keys, _) = query.shape, key.shape
        group, threads, value_width = heads // key_heads, torch.get_num_threads(), value.shape[-1]
        room = attention_room(group, keys, width, value_width)
        scratch = torch.empty(threads * room, dtype=torch.float32, device="cpu")
        output = query.new_empty(1, rows, heads, value_width)
        places = (ctypes.byref(rows_of(x)) for x in (query, key, value))
        pointers = (spans.data_ptr(), output.data_ptr(), scratch.data_ptr())
        self.library.attend(*places, *pointers, room, rows, key_heads, group, scale, threads)
        return output


@cache
def row_attention() -> RowAttention | None:
    """The kernel; None where it cannot be had or is wrong."""
    return working_kernel(SOURCE, CONSTANTS, load, is_right)


def load(library: Path) -> RowAttention:
    """The function of a shared library. Raises `OSError` for one that does not load."""
    loaded = functions(library)
    pointers, sizes = [ctypes.POINTER(RowsOf)] * 3 + [ctypes.c_void_p] * 3, [ctypes.c_int64] * 4
    loaded.attend.argtypes = [*pointers, *sizes, ctypes.c_float, ctypes.c_int]
    loaded.attend.restype = None
    return RowAttention(loaded)


def is_right(kernel: RowAttention) -> bool:
    """The self-test: rows that see a part of a tile, all of one, and more."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, count, 2 * LANES, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
        for heads, count in ((6, 3), (2, 2 * TILE + 3), (2, 2 * TILE + 3))
    )
    spans = [(0, 3), (1, TILE + 1), (2, 2 * TILE + 3)]
    output = kernel(query, key, value, torch.tensor(spans, device="cpu"), 0.3).float()
    for row, (first, behind) in enumerate(spans):
        seen = key[:, :, first:behind].float(), value[:, :, first:behind].float()
        right = scaled_dot_product_attention(query[:, :, row : row + 1].float(), *seen, scale=0.3, enable_gqa=True)
        if not (output[0, row] - right[0, :, 0]).abs().max() <= LARGEST_ERROR:  # a NaN is wrong too
            return False
    return True
