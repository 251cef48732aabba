"""A model without weights: what is known of it from its configuration alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME

from .errors import UnsupportedModelError
from .lowbit import Form, parameter_bytes
from .rope import LengthRope, context_length
from .text import one_line

MOST_OF = ((("layers", "layer", "experts"), 4096), (("_size", "_dim", "heads", "n_embd"), 2**24))  # ends of names
PLANNED_TOKENS = 4096  # cache that a plan leaves room for


@dataclass(frozen=True)
class Skeleton:
    """A model without weights: what is needed to plan for it."""

    name: str
    model: Any  # parameters on the meta device
    cache_bytes_per_value: int  # cached numbers a token

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def weight_bytes(self, dtype: torch.dtype, form: Form | None = None) -> int:
        return sum(parameter_bytes(self.model, dtype, form).values())

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the cache of `PLANNED_TOKENS` tokens."""
        return self.cache_bytes_per_value * dtype.itemsize * PLANNED_TOKENS


def skeleton(name: str, folder: Path, *, trust_remote_code: bool = False) -> Skeleton:
    """The model of a local folder, without weights. Raises `UnsupportedModelError` for what cannot be built."""
    try:
        refuse_absurd_sizes(json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
        text = config.get_text_config(decoder=True)
        context_length(text), LengthRope(model, text)  # read only later, and told of here where they make no sense
        return Skeleton(name, model, cached_numbers(text))
    except MemoryError:
        raise
    except Exception as error:  # a config may hold anything, and a model class may raise anything about it
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"`{name}` needs code of its own to run, and that code is not run unless you say so",
                hint=f"read the code in `{folder}` first, then add `--trust-remote-code`",
            ) from error
        raise UnsupportedModelError(
            f"`{name}` is not a causal language model that this version of transformers can build from its "
            f"{CONFIG_NAME}: {one_line(error)}",
            hint=f"check `{folder / CONFIG_NAME}`, or use another model",
        ) from error


def refuse_absurd_sizes(config: Any) -> None:
    """Raise `ValueError` for a config of more layers than can be built in seconds, or sizes that no model has."""
    for name, value in config.items() if isinstance(config, dict) else ():
        refuse_absurd_sizes(value)
        most = next((most for ends, most in MOST_OF if name.endswith(ends)), None)
        if most is not None and isinstance(value, int | float) and value > most:
            raise ValueError(f"`{name}` is {value}, and {most} is the most that is known here")


def cached_numbers(text: Any) -> int:
    """Keys and values that a model of this text config caches for each token."""
    numbers = 0
    for layer in text.per_layer_config:
        heads = getattr(layer, "num_attention_heads", 1)
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        numbers += int(2 * (getattr(layer, "num_key_value_heads", None) or heads) * width)
    return numbers
