"""What a model's layers remember of the text, as far as its class and configuration tell, and whether that rewinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from .errors import UnsupportedModelError

# Kinds of layers that were seen to be as before when tokens were taken back.
REWINDABLE = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """How many layers of a model remember what."""

    counts: Mapping[str, int]  # kind -> layers
    rewindable: bool


def cache_layers(name: str, model: Any) -> CacheLayers:
    """What the layers of a model remember, weights or not. Raises `UnsupportedModelError` for kinds without a cache."""
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    except MemoryError:
        raise
    except Exception as error:  # a configuration may name kinds that no cache knows
        raise UnsupportedModelError(
            f"`{name}` (model type `{model.config.model_type}`) has layers that transformers keeps no cache of",
            hint="use a model with attention layers",
        ) from error
    kinds = ("state of its own" if has_own_state(model) else kind_of(layer) for layer in cache.layers)
    return CacheLayers(dict(Counter(kinds)), can_rewind(model, cache))


def kind_of(layer: Any) -> str:
    """What a layer remembers."""
    if isinstance(layer, DummyLayer):
        return "nothing"
    parts = ["recurrent state"] if hasattr(layer, "conv_states") else []
    if not parts and type(layer) not in REWINDABLE:
        return type(layer).__name__
    if isinstance(layer, DynamicSlidingWindowLayer):
        parts.append(f"sliding window of {layer.sliding_window}")
    elif isinstance(layer, DynamicLayer):
        parts.append("full attention")
    return " and ".join(parts) or type(layer).__name__


def can_rewind(model: Any, cache: DynamicCache) -> bool:
    """Whether all that the model remembers can be taken back, token by token: a recurrent state holds no earlier ones.

    Layers say `is_croppable` of themselves before it is so, and compressed ones where it is not.
    """
    return all(type(layer) in REWINDABLE for layer in cache.layers) and not has_own_state(model)


def has_own_state(model: Any) -> bool:
    """Whether the model keeps what it remembers elsewhere than in a cache: its configuration lists no kind of layer."""
    listed = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return listed is None and bool(getattr(model, "_is_stateful", False))


def not_causal(name: str, config: Any) -> UnsupportedModelError | None:
    """What is told of a model that reads its text in both directions; None for others."""
    # Kinds that can also be encoders have both fields, and build as encoders unless told otherwise.
    if getattr(config, "is_decoder", True) or not hasattr(config, "add_cross_attention"):
        return None
    return UnsupportedModelError(
        f"`{name}` (model type `{config.model_type}`) reads its text in both directions, and so cannot go on with one",
        hint="use a causal language model, or set `is_decoder` in its config.json if it was trained as one",
    )


def not_rewindable(name: str, model: Any) -> UnsupportedModelError:
    """What is told of a model that remembers what cannot be taken back."""
    return UnsupportedModelError(
        f"`{name}` (model type `{model.config.model_type}`) has layers whose state cannot be rewound",
        hint="rejected tokens must leave the cache again; use a model with attention layers only",
    )
