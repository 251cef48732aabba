"""Attention over a few rows on CPUs, in fp32 and without copies of the keys.

transformers' way there repeats keys and values for every group of heads, and PyTorch's kernel is slow in 16 bits where
the CPU has no instructions for them: behind a text of 1500 tokens a row took 3 ms a layer, and takes 0.4. Many rows (a
prompt), other devices, and whatever else a model asks of its attention go the usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .cpu_linear import cpu_multiplies_16_bit

NAME = "sdpa"  # models look at it to see what masks they must make
MOST_ROWS = 32
multiplies_16_bit = cpu_multiplies_16_bit()  # asked once: a compiler cannot see into it
HARMLESS = {"dropout", "scaling", "is_causal", "sliding_window", "position_ids", "use_cache", "cache", "logits_to_keep"}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`. [1, heads, rows, width] and so on -> [1, rows, heads, width]."""
    if not is_ours(query, attention_mask, more):
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


def is_ours(query: Tensor, attention_mask: Tensor | None, more: dict[str, Any]) -> bool:
    """Whether this is attention over a few rows that the CPU does not do as well by itself."""
    rows = query.shape[2]
    return (
        query.device.type == "cpu"
        and rows <= MOST_ROWS
        and (rows == 1 or attention_mask is not None)
        and not more.get("dropout")
        and all(name in HARMLESS or value is None for name, value in more.items())
        and (query.dtype == torch.float32 or not multiplies_16_bit)
    )


def speed_up_attention() -> None:
    """Put ours in the place of transformers' own, in this process, for models that attend in PyTorch's way."""
    AttentionInterface.register(NAME, attend)
