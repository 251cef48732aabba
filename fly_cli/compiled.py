"""A draft model whose steps are compiled: on a GPU one CUDA graph in the place of some hundred launches.

A step over one row is bound by those launches, not by the memory, and a draft model makes a dozen of them a round.
Compiled code needs tensors that stay where they are, so the cache has a fixed length; a text that outgrows it is read
again into one that grows, and goes on with plain steps. Prompts and blocks of rows run as they are, on the same cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from .cached_model import CachedModel
from .skeleton import PLANNED_TOKENS
from .storage import default_cache_dir

LENGTH = PLANNED_TOKENS  # tokens of the cache
LIKENESS = 0.98  # cosine of the logits of a compiled step and of the plain model, at least
PROBED, TRIED = 16, 8  # tokens of the text that both are tried on: read at once, and step by step
Compiler = Callable[[Any], Any]


class CompileError(Exception):
    """Why the steps of a model are not compiled, in one line without a full stop."""


class CompiledModel(CachedModel):
    """A `CachedModel` on a cache of fixed length whose forwards over one row are compiled.

    A step that cannot be compiled raises what the compiler raises; `compiled` makes one that was tried.
    """

    _gradients_off = torch.no_grad  # compiled code takes inference tensors for another kind

    def __init__(self, plain: CachedModel, compiler: Compiler) -> None:
        self._fixed = StaticCache(config=plain.config, max_cache_len=LENGTH)
        self._fits = True  # the text, into the cache of fixed length
        self._step = compiler(plain.model.forward)
        super().__init__(plain.model, name=plain.name, vocab_size=plain.vocab_size)

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor:
        """As `CachedModel.read`."""
        if self._fits and len(ids) > LENGTH:
            self._fits = False
            self._forget()
        return super().read(ids, last)

    def reset(self) -> None:
        """As `CachedModel.reset`."""
        self._fits = True
        super().reset()

    def _new_cache(self) -> Cache:
        """An empty cache: of the fixed length always the same, since compiled code knows it by its place."""
        if not self._fits:
            return super()._new_cache()
        self._fixed.reset()
        return self._fixed

    def _call(self, inputs: Tensor, **wanted: Any) -> Tensor:
        if inputs.shape[1] > 1 or self._cache is not self._fixed or not self._fixed.layers[0].is_initialized:
            return super()._call(inputs, **wanted)
        if inputs.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: Tensor = self._step(inputs, cache=self._cache, use_cache=True, **wanted).logits
        return logits.clone()  # the next step writes over it

    def _probe(self) -> None:
        """Nothing: the plain model has shown what its layers remember."""


def compiled(plain: CachedModel, *, faster: bool, compiler: Compiler | None = None) -> CompiledModel:
    """The model with compiled steps, compared with itself as it is. Raises `CompileError`.

    With `faster` also where a compiled step is right, and takes as long as a plain one.
    """
    if reason := no_compile(plain):
        raise CompileError(reason)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "compiled"))  # later runs find it there
    text = [(37 * index + 5) % plain.vocab_size for index in range(PROBED + TRIED)]
    expected = plain.read(text, TRIED).float()
    model = CompiledModel(plain, compiler or compile_step)
    try:
        found = torch.cat(steps(model, text)).float()
        likeness = torch.cosine_similarity(found, expected, dim=-1).min().item()
        if not likeness >= LIKENESS:
            raise CompileError(f"compiled steps give other logits (cosine {likeness:.2f})")
        times = []
        for one in (plain, model):
            one.timings.clear()
            steps(one, text)
            times.append(median(one.timings[1]))
    except (torch.OutOfMemoryError, MemoryError, CompileError):
        raise
    except Exception as error:  # the compiler meets the model's own code
        raise CompileError(f"its steps cannot be compiled: {str(error).strip().partition(chr(10))[0]}") from error
    if faster and times[1] >= times[0]:
        raise CompileError(f"a compiled step takes {1000 * times[1]:.1f} ms, a plain one {1000 * times[0]:.1f}")
    model.reset()
    model.forward_seconds = 0.0
    model.timings.clear()
    return model


def steps(model: CachedModel, text: list[int]) -> list[Tensor]:
    """The logits behind the last `TRIED` ids, read one by one."""
    model.reset()
    model.read(text[:PROBED])
    return [model.read(text[: PROBED + index + 1]) for index in range(TRIED)]


def compile_step(forward: Any) -> Any:
    return torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=False)


def no_compile(plain: CachedModel) -> str | None:
    """Why the steps of a model cannot be compiled; None where they may be."""
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=plain.config).layers):
        return "it has layers without a cache of fixed length"
    if plain.positions_change:
        return "its positions change with the length of the text"
    if len({parameter.device for parameter in plain.model.parameters()}) > 1 or hasattr(plain.model, "_hf_hook"):
        return "it is not on one device"
    if not getattr(plain.model, "_can_compile_fullgraph", False):
        return f"transformers does not compile models of type `{plain.config.model_type}`"
    return None
