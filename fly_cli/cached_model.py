"""A causal language model that remembers what it has read: the only file that touches a KV cache."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .cache_layers import can_rewind, not_causal, not_rewindable
from .errors import UnsupportedModelError
from .lookup import common_prefix
from .rope import LengthRope, context_length

TIMINGS_KEPT = 32
PREFILL_CHUNK = 2048  # tokens a forward; bounds the memory of a long prompt's activations
PREFILL_CELLS = 2048 * 8192  # rows x cached tokens; bounds that of attention masks and scores
PREFILL_LEAST = 256  # tokens a forward, however long the text


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

    def room_before_switch(self, length: int) -> float: ...


class CachedModel:
    """A model and its cache. `read` is all there is to know about it.

    Raises `UnsupportedModelError` when made of a model whose cache cannot be rewound (recurrent states).
    """

    reads_rows = True
    _gradients_off: Callable[[], Any] = torch.inference_mode

    def __init__(self, model: Any, *, name: str, vocab_size: int | None = None):
        self.model = model
        self.name = name
        self.path = Path(getattr(model, "name_or_path", ""))
        config = model.config.get_text_config(decoder=True)
        self.max_length = context_length(config)
        self.vocab_rows = int(config.vocab_size)  # ids that the embedding knows
        self.vocab_size = min(vocab_size or self.vocab_rows, self.vocab_rows)  # ids that may be chosen
        self.forward_seconds = 0.0  # time spent inside the model, ever
        self.timings = Timings()
        self.config = config
        self._device = model.get_input_embeddings().weight.device
        # With accelerate's hooks, offloaded embeddings live on "meta" between forwards.
        if self._device.type == "meta":
            self._device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", "cpu"))
        self._rope = LengthRope(model, config)
        self._crops_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.reset()
        self._probe()

    def reset(self) -> None:
        """Forget everything read: what is read next is a prompt."""
        self._prompt_length: int | None = None
        self._forget()

    def _forget(self) -> None:
        """Empty the cache."""
        self._cache = self._new_cache()
        self._ids: list[int] = []
        self._floor = 0  # sliding layers can be rewound to here, not further
        self._switched = False  # what is cached has the positions of a text longer than LongRoPE's first context

    def _new_cache(self) -> Cache:
        cache = DynamicCache(config=self.config)
        cache.activate_past_recording()
        return cache

    @property
    def positions_change(self) -> bool:
        """Whether the rotary positions depend on how long the text is (see `rope`)."""
        return self._rope.switch is not None or self._rope.dynamic

    def room_before_switch(self, length: int) -> float:
        """How many ids behind `length` others have the same positions as they (see `rope`): mostly no limit."""
        switch = self._rope.switch
        return switch - length if switch is not None and length <= switch else math.inf

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor:
        """Logits that follow each of the last `last` ids of the whole sequence `ids`. [last, vocab_size].

        Only what the cache lacks is fed; what it holds beyond the common prefix is dropped. A forward that is
        interrupted leaves the cache empty, not wrong.
        """
        ids = list(ids)
        switch = self._rope.switch
        if switch is not None and len(ids) - last < switch < len(ids):
            before = self.read(ids[:switch], last - (len(ids) - switch))
            return torch.cat([before, self.read(ids, len(ids) - switch)])
        if self._prompt_length is None:
            self._prompt_length = len(ids)
        kept = min(common_prefix(self._ids, ids), len(ids) - last)
        switched = switch is not None and len(ids) > switch
        if kept < self._floor or switched is not self._switched:
            self._forget()
            kept, self._switched = 0, switched
        dropped = len(self._ids) - kept
        cached, self._ids = self._ids[:kept], []
        try:
            if dropped:
                self._drop(dropped)
            start = kept
            while len(ids) - last - start >= (rows := prefill_rows(len(ids))):  # nobody reads these rows
                self._forward(ids, start, start + rows, 1)
                start += rows
                self._slide(start)
            logits = self._forward(ids, start, len(ids), last)
        except BaseException:
            self._forget()
            raise
        self._ids = cached + ids[len(cached) :]
        return logits

    def settle(self, ids: Sequence[int]) -> None:
        """Promise that `ids` will not be taken back, so that sliding layers may forget what they no longer need.

        What is cached beyond `ids` is dropped. Without this call sliding layers keep everything.
        """
        kept = common_prefix(self._ids, ids)
        if kept < self._floor:
            self._forget()
            return
        if kept < len(self._ids):
            self._drop(len(self._ids) - kept)
            self._ids = self._ids[:kept]
        self._slide(kept)

    def _slide(self, length: int) -> None:
        """Let sliding layers forget what their window no longer needs of a cache of so many ids."""
        sliding = [layer for layer in self._cache.layers if hasattr(layer, "sliding_window") and layer.is_initialized]
        if sliding:
            self._cache.crop(0)
            # A layer still shorter than its window has forgotten nothing.
            full = any(length >= layer.sliding_window for layer in sliding)
            self._floor = length if full else 0

    def _forward(self, ids: Sequence[int], start: int, end: int, last: int) -> Tensor:
        """One forward over ids[start:end] of a text, on top of the cache of what is before. [last, vocab_size]."""
        started = perf_counter()
        inputs = torch.tensor([ids[start:end]], dtype=torch.long, device=self._device)
        lengths = [len(ids)] * (end - start)
        if self._rope.dynamic:
            lengths = [max(position + 1, self._prompt_length or 0) for position in range(start, end)]
        with self._gradients_off(), self._rope.told(lengths):
            wanted = {"logits_to_keep": last} if self._crops_logits else {}
            logits = self._call(inputs, **wanted)
        logits = logits[0, -last:, : self.vocab_size]
        synchronize(logits.device)
        seconds = perf_counter() - started
        self.forward_seconds += seconds
        self.timings.add(end - start, seconds)
        return logits

    def _call(self, inputs: Tensor, **wanted: Any) -> Tensor:
        """The model itself on ids [1, rows]: logits [1, rows or fewer, rows of the table]."""
        logits: Tensor = self.model(inputs, cache=self._cache, use_cache=True, **wanted).logits
        return logits

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
        if refused := not_causal(self.name, self.model.config):
            raise refused
        try:
            self._forward([0], 0, 1, 1)
        except (TypeError, ValueError) as error:  # it takes no cache, or has no layer that counts tokens
            raise self._refusal() from error
        if not can_rewind(self.model, self._cache) or self._cache.get_seq_length() != 1:
            raise self._refusal()
        self.reset()
        self.forward_seconds = 0.0
        self.timings.clear()

    def _refusal(self) -> UnsupportedModelError:
        """Why the cache is not what it should be."""
        taken = inspect.signature(self.model.forward).parameters
        if "cache" in taken or "past_key_values" not in taken:
            return not_rewindable(self.name, self.model)
        return UnsupportedModelError(
            f"the code of `{self.name}` is for another release of transformers: it takes `past_key_values`, no `cache`",
            hint="use a model that transformers itself has code for",
        )


def prefill_rows(length: int) -> int:
    """Tokens of a text of that length that one forward of its prefill takes."""
    return max(min(PREFILL_CHUNK, PREFILL_CELLS // length), min(PREFILL_LEAST, PREFILL_CHUNK))


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is true. Nothing to wait for on a CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
