"""A causal language model that remembers what it has read: the only file that touches a KV cache."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from .cache_layers import can_rewind, not_rewindable
from .lookup import common_prefix

TIMINGS_KEPT = 32
PREFILL_CHUNK = 2048  # tokens a forward; bounds the memory of a long prompt's activations


class Timings(dict[int, deque[float]]):
    """Rows -> seconds of the last forwards over so many."""

    def add(self, rows: int, seconds: float) -> None:
        self.setdefault(rows, deque(maxlen=TIMINGS_KEPT)).append(seconds)


class DraftModel(Protocol):
    """What a drafter needs of a model, whatever runs it."""

    name: str
    path: Path  # the folder that it came from
    max_length: int | None
    vocab_rows: int
    vocab_size: int
    forward_seconds: float
    timings: Timings
    reads_rows: bool  # whether one forward has the logits of several rows

    def reset(self) -> None: ...

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor: ...

    def settle(self, ids: Sequence[int]) -> None: ...


class CachedModel:
    """A model and its cache. `read` is all there is to know about it.

    Raises `UnsupportedModelError` when made of a model whose cache cannot be rewound (recurrent states).
    """

    reads_rows = True

    def __init__(self, model: Any, *, name: str, vocab_size: int | None = None):
        self.model = model
        self.name = name
        self.path = Path(getattr(model, "name_or_path", ""))
        config = model.config.get_text_config(decoder=True)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.vocab_rows = int(config.vocab_size)  # ids that the embedding knows
        self.vocab_size = min(vocab_size or self.vocab_rows, self.vocab_rows)  # ids that may be chosen
        self.forward_seconds = 0.0  # time spent inside the model, ever
        self.timings = Timings()
        self._config = config
        self._device = model.get_input_embeddings().weight.device
        # With accelerate's hooks, offloaded embeddings live on "meta" between forwards.
        if self._device.type == "meta":
            self._device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", "cpu"))
        self._crops_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reset()
        self._probe()

    def reset(self) -> None:
        """Forget everything read."""
        self._cache = DynamicCache(config=self._config)
        self._cache.activate_past_recording()
        self._ids: list[int] = []
        self._floor = 0  # sliding layers can be rewound to here, not further

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor:
        """Logits that follow each of the last `last` ids of the whole sequence `ids`. [last, vocab_size].

        Only what the cache lacks is fed; what it holds beyond the common prefix is dropped. A forward that is
        interrupted leaves the cache empty, not wrong.
        """
        ids = list(ids)
        kept = min(common_prefix(self._ids, ids), len(ids) - last)
        if kept < self._floor:
            self.reset()
            kept = 0
        dropped = len(self._ids) - kept
        cached, self._ids = self._ids[:kept], []
        if dropped:
            self._drop(dropped)
        try:
            start = kept
            while len(ids) - last - start >= PREFILL_CHUNK:  # nobody reads these rows
                self._forward(ids[start : start + PREFILL_CHUNK], 1)
                start += PREFILL_CHUNK
            logits = self._forward(ids[start:], last)
        except BaseException:
            self.reset()
            raise
        self._ids = cached + ids[len(cached) :]
        return logits

    def settle(self, ids: Sequence[int]) -> None:
        """Promise that `ids` will not be taken back, so that sliding layers may forget what they no longer need.

        What is cached beyond `ids` is dropped. Without this call sliding layers keep everything.
        """
        kept = common_prefix(self._ids, ids)
        if kept < self._floor:
            self.reset()
            return
        if kept < len(self._ids):
            self._drop(len(self._ids) - kept)
            self._ids = self._ids[:kept]
        sliding = [layer for layer in self._cache.layers if hasattr(layer, "sliding_window") and layer.is_initialized]
        if sliding:
            self._cache.crop(0)
            # A layer still shorter than its window has forgotten nothing.
            full = any(kept >= layer.sliding_window for layer in sliding)
            self._floor = kept if full else 0

    def _forward(self, ids: Sequence[int], last: int) -> Tensor:
        """One forward over `ids`, on top of the cache. [last, vocab_size]."""
        started = perf_counter()
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self._device)
        with torch.inference_mode():
            wanted = {"logits_to_keep": last} if self._crops_logits else {}
            logits = self.model(inputs, cache=self._cache, use_cache=True, **wanted).logits
        logits = logits[0, -last:, : self.vocab_size]
        synchronize(logits.device)
        seconds = perf_counter() - started
        self.forward_seconds += seconds
        self.timings.add(len(ids), seconds)
        return logits  # type: ignore[no-any-return]

    def _drop(self, count: int) -> None:
        """Take back the last `count` ids of the cache.

        A sliding layer's own `crop` also forgets what its window no longer needs, and then cannot go further
        back; dropping the newest states alone keeps every older position reachable until `settle`.
        """
        for layer in self._cache.layers:
            if hasattr(layer, "sliding_window") and layer.is_initialized:
                layer.keys = layer.keys[..., :-count, :]
                layer.values = layer.values[..., :-count, :]
                layer.cumulative_length -= count
            else:
                layer.crop(-count)

    def _probe(self) -> None:
        """Read one token and look at the cache: only then does each layer know whether it can be rewound."""
        try:
            self._forward([0], 1)
        except TypeError as error:
            raise not_rewindable(self.name, self.model) from error
        if not can_rewind(self.model, self._cache) or self._cache.get_seq_length() != 1:
            raise not_rewindable(self.name, self.model)
        self.reset()
        self.forward_seconds = 0.0
        self.timings.clear()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is true. Nothing to wait for on a CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
