"""A draft model on the CPU with int8 weights, prepared once and kept in the cache.

A single step moves every weight once, so half the bytes are twice the steps; and what the draft model computes cannot
change what the target accepts. Weights have a scale for each output channel, inputs are quantised to 8 bits row by row
while running, and everything between the linear layers is fp32.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .files import written_whole
from .storage import default_cache_dir, has_room, prepared_name

LEAST_SHARE = 0.8  # of the weights outside the embeddings that must be in linear layers for int8 to pay
LARGEST_ERROR = 0.05  # of the self-test's result, relative; 8-bit rounding makes 0.01
FORMAT = "int8-1"
WEIGHT, SCALE = ".int8", ".scale"  # what a layer's tensors are called in the file


class Int8Linear(nn.Module):
    """A linear layer with int8 weights [out, in], a scale for each output [out] and an fp32 bias [out] or None.

    PyTorch's kernel has one scale for all of its input. The first token of a text has activations a thousand times
    larger than the others, which in a block with it would all round to zero: so rows are brought to one size first.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight_bytes = weight.numel() + 4 * scale.numel()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors are deprecated, their kernels are not
            zeros = torch.zeros(len(scale), dtype=torch.long)
            quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        # Without VNNI instructions products are summed in 16 bits, and inputs of 8 bits overflow them.
        self.reduce_range = not torch.cpu._is_vnni_supported()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] fp32 -> [..., out] fp32."""
        size = None
        if input.numel() != input.shape[-1]:
            size = input.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12)
            input = input / size
        output: Tensor = torch.ops.quantized.linear_dynamic(input, self.packed, self.reduce_range)
        if size is not None:
            output = output * size
        return output if self.bias is None else output + self.bias


class WideningEmbedding(nn.Embedding):
    """A 16-bit embedding whose rows come out in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        """[...] ids -> [..., width] fp32."""
        return super().forward(input).float()


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] and fp32 scales [out], each row's largest entry at 127."""
    result = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], 256):  # pieces that stay in the processor's cache
        rows = weight[start : start + 256].float()
        scale[start : start + 256] = row_scale = rows.abs().amax(dim=1).clamp_(min=1e-12) / 127
        result[start : start + 256] = (rows / row_scale[:, None]).round_()
    return result, scale


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that are quantised, by name."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def embeddings(model: nn.Module) -> dict[str, nn.Embedding]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}


def worth_quantizing(model: nn.Module) -> bool:
    """Whether most of the weights are in linear layers (not so where experts or convolutions hold them)."""
    looked_up = {id(layer.weight) for layer in embeddings(model).values()}  # perhaps tied to the head
    rest = {id(parameter): parameter.numel() for parameter in model.parameters() if id(parameter) not in looked_up}
    linear = sum(rest.get(id(layer.weight), 0) for layer in linear_layers(model).values())
    return linear >= LEAST_SHARE * sum(rest.values()) > 0


def quantized_bytes(model: nn.Module) -> int:
    """What the model's int8 form takes."""
    looked_up = {
        id(layer.weight): layer.weight.numel() * (2 if type(layer) is nn.Embedding else 4)
        for layer in embeddings(model).values()
    }
    quantized = {id(layer.weight): layer.weight.numel() for layer in linear_layers(model).values()}
    counted = looked_up.keys() | quantized.keys()
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in counted)
    return sum(quantized.values()) + sum(looked_up.values()) + 4 * rest


@cache
def int8_works() -> bool:
    """Whether PyTorch's int8 kernels are right on this CPU: tried on a small layer, at one row and more."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    try:
        layer = Int8Linear(*quantize_weight(weight), None)
        for rows in (1, 7):
            input = torch.randn(rows, 64, generator=generator)
            right = input @ weight.T
            if not (layer(input) - right).norm() <= LARGEST_ERROR * right.norm():  # a NaN is no less wrong
                return False
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def quantized_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's int8 form by name, from a loaded model. Raises `ValueError` for NaN or infinity."""
    linear = linear_layers(model)
    state = {}
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".")
        if layer in linear and part == "weight":
            if not tensor.isfinite().all():
                raise ValueError(f"{name} has values that are NaN or infinite")
            state[layer + WEIGHT], state[layer + SCALE] = quantize_weight(tensor)
        else:
            state[name] = tensor.contiguous().clone()  # tied tensors would share memory in the file
    return state


def fill(skeleton: Any, state: dict[str, Tensor]) -> Any:
    """The int8 model: `skeleton` (its parameters on the meta device) with its linear layers replaced, and all filled.

    Raises `ValueError` when the tensors are not this model's.
    """
    state = dict(state)
    for name, layer in linear_layers(skeleton).items():
        try:
            weight, scale = state.pop(name + WEIGHT), state.pop(name + SCALE)
        except KeyError as error:
            raise ValueError(f"no weights for {name}") from error
        if weight.shape != layer.weight.shape or weight.dtype != torch.int8:
            raise ValueError(f"{name} is {weight.dtype} {list(weight.shape)} and should be {list(layer.weight.shape)}")
        if scale.shape != weight.shape[:1] or not (scale.isfinite() & (scale > 0)).all():
            raise ValueError(f"the scales of {name} make no sense")
        skeleton.set_submodule(name, Int8Linear(weight, scale, state.pop(f"{name}.bias", None)))
    narrow = set()
    for name, embedding in embeddings(skeleton).items():
        if type(embedding) is nn.Embedding:
            embedding.__class__ = WideningEmbedding
            narrow.add(f"{name}.weight")
    wide = {name: t if name in narrow or not t.is_floating_point() else t.float() for name, t in state.items()}
    try:
        missing, unknown = skeleton.load_state_dict(wide, strict=False, assign=True)
    except RuntimeError as error:  # another shape
        raise ValueError(str(error)) from error
    if unknown or any(not name.endswith(".bias") for name in missing) or still_empty(skeleton):
        raise ValueError(f"the tensors do not fit the model: {[*unknown, *missing, *still_empty(skeleton)][:3]}")
    return skeleton.requires_grad_(False).eval()


def still_empty(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


def prepared_file(folder: Path, cache_dir: Path | None = None) -> Path:
    """Where the int8 form of a model folder is kept."""
    return (cache_dir or default_cache_dir()) / "int8" / f"{prepared_name(folder, FORMAT)}.safetensors"


def read_prepared(file: Path) -> dict[str, Tensor] | None:
    """The tensors of an earlier run; None where there are none that can be read."""
    try:
        state: dict[str, Tensor] = load_file(file)
        return state
    except Exception:  # not there, or cut short: it is made again
        return None


def keep_prepared(file: Path, state: dict[str, Tensor]) -> bool:
    """Put the tensors on disk, whole or not at all. False where they cannot be kept."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not has_room(file.parent, sum(tensor.nbytes for tensor in state.values())):
            return False
        with written_whole(file) as unfinished:
            save_file(state, unfinished, metadata={"format": FORMAT})
    except Exception:
        return False
    return True
