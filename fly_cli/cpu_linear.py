"""Faster 16-bit linear layers on CPUs.

bf16 weights go to a kernel of ours where there is one (`panels`). With AVX-512 and bf16 it takes 1.1 to 1.4 times less
than oneDNN's best for up to 8 rows, and for hundreds 1.05 times more; with AVX-512 alone 2 to 3 times less from 4 rows
on. Elsewhere it depends on the CPU.

Where it multiplies 16-bit numbers, oneDNN brings the weights into the order of its kernels in every call. Keeping them
in that order takes 1.4 times less for one row and 2 times less for 8 to 16 (measured on AVX-512), and the results are
the same.

Where it does not, PyTorch's kernel costs the same again for every row, so checking 16 tokens takes 10 times as long as
one, and speculation cannot pay. Many rows are multiplied with weights that are widened to fp32 piece by piece, each
piece small enough to stay in the cache: that takes a fixed time and then runs at fp32 speed.
Products and sums are fp32 in all ways, so the results differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .panels import keep_panels, use_panels
from .progress import Progress

FEW_ROWS = 2  # up to here PyTorch's own kernel is faster than widening
PIECE = 786_432  # weights widened at a time: 3 MB in fp32
PACKED_FOR_ROWS = 16
LARGEST_ERROR = 0.02  # of the packed kernel's self-test, relative to the largest result; bf16 rounding makes 0.004
ROW_MULTIPLE = 16  # fp32 kernels are slow at other counts; zero rows fill up


class PackedLinear(nn.Module):
    """A bf16 linear layer whose weight [out, in] is kept as oneDNN's kernels read it. For inference only."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), PACKED_FOR_ROWS)
        self.bias = layer.bias
        self.weight_bytes = layer.weight.nbytes

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] bf16 -> [..., out] bf16."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output


class WideningLinear(nn.Linear):
    """`nn.Linear` with 16-bit weights, computed in fp32 a piece at a time where there are more than a few rows."""

    scratch: Tensor  # [PIECE] fp32, shared by all layers of a model

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the input's dtype. For inference only."""
        rows = input.numel() // self.in_features
        if rows <= FEW_ROWS:
            return super().forward(input)
        columns = self.scratch.new_zeros(self.in_features, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)
        columns[:, :rows] = input.reshape(rows, self.in_features).t()
        output = self.scratch.new_empty(self.out_features, columns.shape[1])
        height = max(1, PIECE // self.in_features)
        for start in range(0, self.out_features, height):
            piece = self.weight[start : start + height]
            wide = self.scratch[: piece.numel()].view_as(piece)
            torch.mm(wide.copy_(piece), columns, out=output[start : start + height])
        result = output[:, :rows].t()
        if self.bias is not None:
            result = result + self.bias
        return result.to(input.dtype).reshape(*input.shape[:-1], self.out_features)


def cpu_multiplies_16_bit() -> bool:
    """True if the CPU has instructions for bf16 products (AMX, AVX-512 bf16, Arm bf16)."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def packing_works() -> bool:
    """Whether this build of PyTorch has oneDNN's packed bf16 kernel, and it is right: tried on a small layer."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 48).requires_grad_(False).bfloat16()
    try:
        packed = PackedLinear(layer)
        for rows in (1, 7, 40):
            input = torch.randn(1, rows, 64, generator=generator).bfloat16()
            right = nn.functional.linear(input.float(), layer.weight.float(), layer.bias.float())
            error = (packed(input).float() - right).abs().max()
            if not error <= LARGEST_ERROR * right.abs().max():  # a NaN is no less wrong
                return False
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def speed_up_linears(model: nn.Module, folder: Path | None = None, *, whole_weights: bool = False) -> int:
    """Give the model's 16-bit linear layers on the CPU the fastest form there is; how many there were.

    What `keep_fast_linears` has kept for a model folder is used. With `whole_weights` layers keep a `weight` that a
    model's own code may look at.
    """
    layers = plain_linears(model)
    in_panels = 0 if whole_weights else use_panels(model, layers, folder)
    if cpu_multiplies_16_bit():
        return in_panels + (pack(model, layers) if not whole_weights and packing_works() else 0)
    return in_panels + widen(list(layers.values()))


def keep_fast_linears(model: nn.Module, folder: Path, name: str, progress: Progress) -> None:
    """Put on disk what `speed_up_linears` would otherwise make in each run for the model of a folder."""
    keep_panels(plain_linears(model), folder, name, progress)


def plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers on the CPU that may be replaced, by name.

    Layers and weights of another class (quantised ones), and layers whose forward was replaced (offloaded ones, and
    parts of a layer that several processes share) stay as they are.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
    }


def pack(model: nn.Module, layers: dict[str, nn.Linear]) -> int:
    """Replace the bf16 layers by packed ones, one by one, so that no two copies of the model are in memory."""
    names = [name for name, layer in layers.items() if layer.weight.dtype == torch.bfloat16]
    for name in names:
        model.set_submodule(name, PackedLinear(layers.pop(name)))
    return len(names)


def widen(layers: Sequence[nn.Linear]) -> int:
    """Make the 16-bit layers widening ones."""
    scratch = torch.empty(PIECE, dtype=torch.float32)
    count = 0
    for layer in layers:
        if layer.in_features <= PIECE and layer.weight.dtype in (torch.bfloat16, torch.float16):
            layer.__class__ = WideningLinear
            layer.scratch = scratch
            count += 1
    return count
