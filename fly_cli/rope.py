"""Rotary positions that depend on how long the text is.

Two kinds do. LongRoPE (Phi-3) has two sets of frequencies: a text longer than the original context takes the second
one, for all of its positions, so nothing that was cached with the first is of use any more. Dynamic NTK has other
frequencies for each length beyond the context. With a cache, transformers turns the prompt by those of its whole
length and each new token by those of the length at which it came, and never again; so do we, however many tokens a
forward checks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

KIND = "rope_type"  # what transformers calls it, in modules and in configs
GROWING = "max_seq_len_cached"  # ends the names of what a module remembers of the longest text so far


class LengthRope:
    """The rotary embeddings of a model, and the length of the text that each row of a forward is told.

    `switch` is the length up to which LongRoPE has its first set of frequencies, None for any other model.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        kinds = {module: kinds_of(module) for module in model.modules() if hasattr(module, KIND)}
        self._changing = [m for m, own in kinds.items() if any(changes_with_length(kind) for kind in own)]
        self.dynamic = any("dynamic" in kind for module in self._changing for kind in kinds[module])
        lengths = [
            int(one["original_max_position_embeddings"])
            for one in rope_parameters(config)
            if one.get(KIND) == "longrope" and self._changing
        ]
        self.switch: int | None = min(lengths, default=None)

    @contextmanager
    def told(self, lengths: Sequence[int]) -> Iterator[None]:
        """Inside, a forward over as many rows as there are `lengths` takes the text to be so long in each of them."""
        before = [vars(module).get("forward") for module in self._changing]
        for module in self._changing:
            module.forward = partial(turn, module, module.forward, lengths)
        try:
            yield
        finally:
            for module, forward in zip(self._changing, before, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


def turn(module: nn.Module, forward: Any, lengths: Sequence[int], x: Tensor, position_ids: Tensor, **more: Any) -> Any:
    """What `forward` gives for these positions, [1, rows] or more dimensions in front, in texts of these lengths.

    A rotary embedding takes the highest position for the text's end: so each call has that end as one position more.
    What it remembers of a longer text is put back, since its next text may be shorter.
    """
    buffers, growing = dict(module._buffers), {name: value for name, value in vars(module).items() if GROWING in name}
    pieces, start = [], 0
    for length, rows in groupby(lengths):
        end = start + len(list(rows))
        part = position_ids[..., start:end]
        start = end
        result = forward(x, torch.cat([part, part.new_full((*part.shape[:-1], 1), length - 1)], dim=-1), **more)
        pieces.append([one[..., :-1, :] for one in (result if isinstance(result, tuple) else (result,))])
        module._buffers.update(buffers)
        vars(module).update(growing)
    joined = tuple(torch.cat(one, dim=-2) for one in zip(*pieces, strict=True))
    return joined if isinstance(result, tuple) else joined[0]


def kinds_of(module: nn.Module) -> list[str]:
    """The kinds of rotary embedding in a module: one, or one for each type of layer."""
    kind = getattr(module, KIND)
    return [str(one) for one in (kind.values() if isinstance(kind, dict) else [kind])]


def changes_with_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one table, or one for each type of layer."""
    own = getattr(config, "rope_parameters", None) or {}
    if KIND in own:
        return [own]
    return [one for one in own.values() if isinstance(one, dict)]


def context_length(config: Any) -> int | None:
    """The most tokens that a text may have, by the model's text config; None where it sets no limit.

    Dynamic NTK and YaRN stretch the context by a factor, and configs that ask for them may still tell the length
    before it.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if stated is None:
        return None
    lengths = [int(stated)]
    for one in rope_parameters(config):
        factor = one.get("factor") or 1
        if "dynamic" in str(one.get(KIND)):
            lengths.append(int(stated * factor))
        elif one.get(KIND) == "yarn":
            lengths.append(int(one.get("original_max_position_embeddings", stated) * factor))
    return max(lengths)
