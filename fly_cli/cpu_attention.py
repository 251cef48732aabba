"""Attention over a few rows on CPUs, in fp32 and without copies of the keys.

transformers' way there repeats keys and values for every group of heads, and PyTorch's kernel is slow in 16 bits where
the CPU has no instructions for them: behind a text of 1500 tokens a row took 3 ms a layer, and takes 0.4. Many rows (a
prompt) go the usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .cpu_linear import cpu_multiplies_16_bit

USUAL, OURS = "sdpa", "fly_cpu"
MOST_ROWS = 32


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`. [1, heads, rows, width] and so on -> [1, rows, heads, width]."""
    rows = query.shape[2]
    plain = all(more.get(name) is None for name in ("position_bias", "softcap")) and not more.get("dropout")
    if rows > MOST_ROWS or (rows > 1 and attention_mask is None) or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.float()
    output = nn.functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        attn_mask=attention_mask,
        scale=more.get("scaling"),
        enable_gqa=True,
    )
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


AttentionInterface.register(OURS, attend)
AttentionMaskInterface.register(OURS, sdpa_mask)


def speed_up_attention(model: Any) -> bool:
    """Give a model that attends in PyTorch's way ours, where the CPU would not do as well by itself; whether it was."""
    wide = model.dtype == torch.float32 or not cpu_multiplies_16_bit()
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    config = model.config.get_text_config(decoder=True)
    if not wide or not on_cpu or config._attn_implementation != USUAL or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(OURS)
    return True
