"""A draft model on the CPU with int4 weights: what it has read, whatever computes its forwards."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .cached_model import Timings
from .lookup import common_prefix
from .rope import context_length

FIRST_CAPACITY = 512  # tokens in the cache at first; it doubles
REFERENCE_IDS = 12
REFERENCE_READS = (8, 9, 12)  # tokens of a text that are read one after another: a prompt, one row, some rows
LEAST_LIKENESS = 0.8  # cosine of the logits with the plain model's: 0.96 on the default draft, about 0 for garbage


class Int4Error(Exception):
    """The int4 form cannot be made, or is not right."""


def head_width(config: Any) -> int:
    """Numbers of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Int4Model(ABC):
    """A model that remembers what it has read. `read` is all there is to know about it.

    Its cache is preallocated, and rewinding it is knowing a shorter length: what lies behind is written over.
    """

    reads_rows = True
    chunk = 512  # tokens of a forward; bounds the memory of a long prompt

    def __init__(self, config: Any, *, name: str, vocab_size: int | None = None):
        text = config.get_text_config(decoder=True)
        self.name = name
        self.path = Path(config.name_or_path)
        self.max_length = context_length(text)
        self.vocab_rows = int(text.vocab_size)
        self.vocab_size = min(vocab_size or self.vocab_rows, self.vocab_rows)
        self.forward_seconds = 0.0
        self.timings = Timings()
        self.reset()

    def reset(self) -> None:
        """Forget everything read."""
        self._ids: list[int] = []
        self._allocate(FIRST_CAPACITY, kept=0)
        self._capacity = FIRST_CAPACITY

    def settle(self, ids: Sequence[int]) -> None:  # noqa: B027  # no model has anything to do
        """Nothing to do: what is cached beyond `ids` is written over."""

    def room_before_switch(self, length: int) -> float:
        """No limit: positions that change with the length of the text are not built."""
        return math.inf

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor:
        """Logits that follow each of the last `last` ids of the whole sequence `ids`. [last, vocab_size] fp32.

        Only what the cache lacks is fed; where a forward has the logits of one row, more rows are as many forwards.
        Raises `ValueError` unless there are `last` ids, and one at least.
        """
        if not 0 < last <= len(ids):
            raise ValueError(f"{len(ids)} ids have no {last} last ones to read")
        if last > 1 and not self.reads_rows:
            return torch.cat([self.read(ids[: len(ids) - behind]) for behind in reversed(range(last))])
        ids = list(ids)
        kept = min(common_prefix(self._ids, ids), len(ids) - last)
        self._ids = []  # an interrupted forward leaves the cache empty, not wrong
        self._make_room_for(len(ids), kept)
        logits = []
        for start in range(kept, len(ids), self.chunk):
            end = min(start + self.chunk, len(ids))
            started = perf_counter()
            wanted = max(end - max(start, len(ids) - last), 0)
            logits.append(self._forward(ids[start:end], start, wanted)[:, : self.vocab_size])
            seconds = perf_counter() - started
            self.forward_seconds += seconds
            self.timings.add(end - start, seconds)
        self._ids = ids
        return torch.cat(logits)

    def _make_room_for(self, length: int, kept: int) -> None:
        """See that the cache holds `length` tokens; the first `kept` stay."""
        capacity = self._capacity
        while capacity < length:
            capacity *= 2
        if capacity > self._capacity:
            self._allocate(capacity, kept)
            self._capacity = capacity  # not before: this may fail, or be interrupted

    @abstractmethod
    def _forward(self, ids: list[int], start: int, last: int) -> Tensor:
        """One forward over `ids` behind `start` cached tokens: the logits of its last rows. [last, vocab_rows] fp32."""

    @abstractmethod
    def _allocate(self, capacity: int, kept: int) -> None:
        """Make a cache for `capacity` tokens; the first `kept` stay."""


def check(model: Int4Model, reference: Tensor) -> None:
    """Compare the model's logits with the plain model's. Raises `Int4Error` where they are not alike."""
    right = reference[:, : model.vocab_size]
    likeness = torch.cosine_similarity(reference_reads(model), right, dim=-1).min().item()
    model.reset()
    model.timings.clear()  # first forwards, which fetch the weights from the disk, say nothing of later ones
    if not likeness >= LEAST_LIKENESS:  # a NaN is no less wrong
        raise Int4Error(f"its logits are not the model's (cosine {likeness:.2f})")


def reference_reads(model: Any) -> Tensor:
    """Logits [len(REFERENCE_READS), vocab_size] of anything with `read`, behind texts of some lengths."""
    # The same texts, however many of the ids may be chosen.
    ids = [(7919 * j + 11) % model.vocab_rows for j in range(1, REFERENCE_IDS + 1)]
    return torch.cat([model.read(ids[:length]) for length in REFERENCE_READS]).float()
