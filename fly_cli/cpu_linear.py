"""Faster 16-bit linear layers on CPUs that cannot multiply 16-bit numbers.

There PyTorch's kernel costs the same again for every row, so checking 16 tokens takes 10 times as long as one, and
speculation cannot pay. Widening the weights to fp32 piece by piece, each piece small enough to stay in the cache,
takes a fixed time and then runs at fp32 speed: 2.4 times faster at 16 rows, 5 times at 64 (measured on AVX2).
Products and sums are fp32 in both ways, so the results differ by rounding alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEW_ROWS = 6  # up to here PyTorch's own kernel is faster
PIECE = 786_432  # weights widened at a time: 3 MB in fp32
ROW_MULTIPLE = 16  # fp32 kernels are slow at other counts; zero rows fill up


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
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen_linears(model: nn.Module) -> int:
    """Make the model's 16-bit linear layers on the CPU widening ones; how many there were.

    Layers of another class (quantised ones) and layers with hooks (offloaded ones) stay as they are.
    """
    if cpu_multiplies_16_bit():
        return 0
    scratch = torch.empty(PIECE)
    count = 0
    for module in model.modules():
        if type(module) is not nn.Linear or hasattr(module, "_hf_hook") or module.in_features > PIECE:
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype in (torch.bfloat16, torch.float16):
            module.__class__ = WideningLinear
            module.scratch = scratch
            count += 1
    return count
