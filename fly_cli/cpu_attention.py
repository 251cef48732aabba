"""Attention over a few rows on CPUs, with sums in fp32 and without repeated keys.

transformers' way there repeats keys and values for every group of heads, and PyTorch's kernel is slow in 16 bits where
the CPU has no instructions for them: behind a text of 2000 tokens a row took 3.4 ms a layer, and takes 0.6 with the
kernel of `row_attention`. Where that is not to be had, PyTorch's own does it, in fp32 if it must. Many rows (a prompt),
other devices, and whatever else a model asks of its attention go the usual way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .cpu_linear import cpu_multiplies_16_bit
from .row_attention import LANES, RowAttention, row_attention

NAME = "sdpa"  # models look at it to see what masks they must make
MOST_ROWS = 32
multiplies_16_bit = cpu_multiplies_16_bit()  # asked once: a compiler cannot see into it
_known: deque[tuple[Callable[[], Tensor | None], Tensor | None]] = deque(maxlen=2)  # masks, and the spans they leave
HARMLESS = {
    *("dropout", "scaling", "is_causal", "sliding_window", "position_ids", "use_cache", "cache", "logits_to_keep"),
    "output_router_logits",
}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward`. [1, heads, rows, width] and so on -> [1, rows, heads, width]."""
    if not is_ours(query, attention_mask, more):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    scale = query.shape[-1] ** -0.5 if more.get("scaling") is None else more["scaling"]
    kernel = kernel_for(query, key, value)
    spans = visible_spans(attention_mask, query.shape[2], key.shape[2]) if kernel else None
    if kernel and spans is not None:
        return kernel(query, key, value, spans, scale), None
    if multiplies_16_bit and query.dtype != torch.float32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.float()
    wide = (query.float(), key.float(), value.float())
    output = scaled_dot_product_attention(*wide, attn_mask=attention_mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


def kernel_for(query: Tensor, key: Tensor, value: Tensor) -> RowAttention | None:
    """The compiled kernel, where there is one and it is made for such tensors."""
    tensors = (query, key, value)
    fit = (
        not torch.compiler.is_compiling()
        and all(x.dtype == torch.bfloat16 and x.dim() == 4 and len(x) == 1 for x in tensors)
        and query.shape[-1] == key.shape[-1]
        and key.shape[:3] == value.shape[:3]
        and 0 not in key.shape
        and not any((query.shape[1] % key.shape[1], query.shape[-1] % LANES, value.shape[-1] % LANES))
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
    return row_attention() if fit else None


def visible_spans(attention_mask: Tensor | None, num_rows: int, num_keys: int) -> Tensor | None:
    """The keys [first, behind) that each row sees; None where they are not a stretch for each, alike for all heads.

    The masks looked at last are remembered: all layers of a kind have the same one, and nobody changes it between them.
    """
    if attention_mask is None:
        return all_of(num_keys)
    if attention_mask.dtype != torch.bool or attention_mask.shape != (1, 1, num_rows, num_keys):
        return None
    for mask, spans in _known:
        if mask() is attention_mask:
            return spans
    spans = stretches(attention_mask[0, 0])
    _known.append((ref(attention_mask), spans))
    return spans


@lru_cache(maxsize=4)  # all layers have as many keys
def all_of(num_keys: int) -> Tensor:
    """The span of a row that sees all keys."""
    return torch.tensor([[0, num_keys]], device="cpu")


def stretches(seen: Tensor) -> Tensor | None:
    """[first, behind) of each row of a table [rows, keys]; None unless each row is a single stretch."""
    ones = seen.int()
    counts, first, behind = ones.sum(-1), ones.argmax(-1), seen.shape[1] - ones.flip(-1).argmax(-1)
    single = ((behind - first == counts) & (counts > 0)).all()
    return torch.stack((first, behind), dim=1) if single else None


def is_ours(query: Tensor, attention_mask: Tensor | None, more: dict[str, Any]) -> bool:
    """Whether this is attention over a few rows on a CPU, with nothing that is not known here."""
    rows = query.shape[2]
    return (
        query.device.type == "cpu"
        and rows <= MOST_ROWS
        and (rows == 1 or attention_mask is not None)
        and not more.get("dropout")
        and all(name in HARMLESS or value is None for name, value in more.items())
    )


def speed_up_attention() -> None:
    """Put ours in the place of transformers' own, in this process, for models that attend in PyTorch's way."""
    AttentionInterface.register(NAME, attend)
