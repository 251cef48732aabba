"""Attention over a few rows on CPUs, in fp32 and without copies of the keys.

transformers' way there repeats keys and values for every group of heads, and PyTorch's kernel is slow in 16 bits where
the CPU has no instructions for them: behind a text of 1500 tokens a row took 3 ms a layer, and takes 0.4. Each row is
computed by itself, over the keys that it sees: a row of a block gets, bit for bit, what it would get alone. Many rows
(a prompt), other devices, and whatever else a model asks of its attention go the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .cpu_linear import cpu_multiplies_16_bit

NAME = "sdpa"  # models look at it to see what masks they must make
MOST_ROWS = 32
multiplies_16_bit = cpu_multiplies_16_bit()  # asked once: a compiler cannot see into it
Spans = Sequence[tuple[int, int]]
_spans: tuple[Callable[[], Tensor | None], Spans | None] = (lambda: None, None)  # of the mask that was looked at last
HARMLESS = {"dropout", "scaling", "is_causal", "sliding_window", "position_ids", "use_cache", "cache", "logits_to_keep"}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`. [1, heads, rows, width] and so on -> [1, rows, heads, width]."""
    if not is_ours(query, attention_mask, more):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    spans = visible_spans(attention_mask, key.shape[2])
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.float()
    wide = (query.float(), key.float(), value.float())
    scale = more.get("scaling")
    if spans is None:
        output = scaled_dot_product_attention(*wide, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    else:
        output = row_by_row(*wide, spans, scale)
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


def row_by_row(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None) -> Tensor:
    """Attention of each row over its span of keys; the heads that share keys take the place of rows."""
    grouped = query.reshape(*key.shape[:2], -1, *query.shape[2:]).unbind(3)  # a row: [1, key heads, group, width]
    outputs = [
        scaled_dot_product_attention(row, key[:, :, first:behind], value[:, :, first:behind], scale=scale)
        for row, (first, behind) in zip(grouped, spans, strict=True)
    ]
    return torch.stack(outputs, dim=3).flatten(1, 2)


def visible_spans(attention_mask: Tensor | None, num_keys: int) -> Spans | None:
    """The keys [first, behind) that each row sees; None where they are not a stretch for each, alike for all heads."""
    global _spans
    if attention_mask is None:
        return [(0, num_keys)]
    if attention_mask.dtype != torch.bool or attention_mask.shape[:2] != (1, 1) or torch.compiler.is_compiling():
        return None
    mask, spans = _spans
    if mask() is not attention_mask:  # all layers of a kind have the same one
        spans = stretches(attention_mask[0, 0])
        _spans = ref(attention_mask), spans
    return spans


def stretches(seen: Tensor) -> Spans | None:
    """[first, behind) of each row of a table [rows, keys]; None unless each row is a single stretch."""
    ones = seen.int()
    counts, first, behind = ones.sum(-1), ones.argmax(-1), seen.shape[1] - ones.flip(-1).argmax(-1)
    if not bool(((behind - first == counts) & (counts > 0)).all()):
        return None
    return list(zip(first.tolist(), behind.tolist(), strict=True))


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
