"""From the target's logits to the plain lists that the walk judges, with one transfer to the host a round."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from .errors import DecodeError
from .sampling import Chooser
from .settings import DecodeSettings
from .verify import Evidence


def measure(
    logits: Tensor,
    draft_ids: Sequence[int],
    *,
    position: int,
    num_new_tokens: int,
    chooser: Chooser,
    settings: DecodeSettings,
    protected_ids: Set[int],
    copied: Sequence[bool] = (),
    record: bool = False,
) -> Evidence:
    """Evidence of n drafted tokens from the target's n+1 logit rows, [n+1, V] in the model's dtype.

    Row j predicts absolute position `position + j`. Entropies are of the raw logits, in fp32; only mismatches
    that were not copied have one, unless `record` asks for all. Raises `DecodeError` for a row with NaN or without a
    finite peak.
    """
    n = len(draft_ids)
    top = logits.argmax(dim=-1)
    peak = logits.gather(-1, top[:, None])[:, 0].float()
    warped = chooser.warp(logits)
    chosen = top if chooser.greedy else chooser.choose(warped, position)
    drafted = torch.tensor(draft_ids, dtype=torch.long, device=logits.device)
    allowed = warped[:n].gather(-1, drafted[:, None])[:, 0] > -torch.inf

    wanted = record or settings.entropy_threshold is not None
    everywhere = wanted and (record or logits.device.type != "cpu")
    entropies = entropy(logits[:n], settings.entropy, settings.entropy_top_k) if everywhere else None
    table = to_host([top, chosen, peak.isfinite(), allowed, *([] if entropies is None else [entropies])])
    top_ids, target_ids, finite = ([int(x) for x in column] for column in table[:3])
    if not all(finite):
        raise DecodeError(
            f"the target's logits for new token {num_new_tokens + finite.index(0) + 1} are not finite",
            hint="try `--dtype float32`, or check the model's files",
        )

    values: list[float | None] = [None] * n if entropies is None else list(table[4])
    if wanted and entropies is None:
        rows = [j for j in range(n) if draft_ids[j] != target_ids[j] and not (copied and copied[j])]
        if rows:
            few = entropy(logits[rows], settings.entropy, settings.entropy_top_k).tolist()
            for j, value in zip(rows, few, strict=True):
                values[j] = value
    return Evidence(
        draft_ids=tuple(draft_ids),
        target_ids=tuple(target_ids),
        top_ids=tuple(top_ids),
        entropies=tuple(values),
        allowed=tuple(bool(x) for x in table[3]),
        protected=tuple(not protected_ids.isdisjoint((draft_ids[j], target_ids[j], top_ids[j])) for j in range(n)),
        num_new_tokens=num_new_tokens,
        copied=tuple(copied),
    )


def entropy(logits: Tensor, kind: str, top_k: int) -> Tensor:
    """How unsure each row is. [rows, V] any dtype -> [rows] fp32.

    `topk`: -sum p ln p over the k likeliest ids, nats, p from the full softmax and not renormalised (authors' code).
    Not monotone: in a very flat row each p is so small that the sum is low, and the gate stays shut.
    `normalized`: the full entropy divided by ln V, in [0, 1] (paper, section 3.1).
    """
    probabilities = logits.float().softmax(dim=-1)
    if kind == "topk":
        probabilities = probabilities.topk(min(top_k, logits.shape[-1]), dim=-1).values
    nats: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return nats if kind == "topk" else nats / math.log(logits.shape[-1])


def to_host(columns: list[Tensor]) -> list[list[float]]:
    """The columns as lists, moved in one transfer. Ids below 2**24 are exact in fp32."""
    rows = max(len(column) for column in columns)
    padded = [torch.nn.functional.pad(column.float(), (0, rows - len(column))) for column in columns]
    moved: list[list[float]] = torch.stack(padded).tolist()
    return [values[: len(column)] for values, column in zip(moved, columns, strict=True)]
