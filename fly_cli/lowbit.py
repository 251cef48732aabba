"""Weights in fewer bits through transformers' quantisation: by bitsandbytes on CUDA, by torchao elsewhere.

A form is named by its library and its kind, as `torchao int8`. Linear layers are quantised; embeddings, the output
layer and what is tied to them stay as they are. A form is used only where a small layer of it gives right results on
the device, at one row and at more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from accelerate.utils import CustomDtype
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .errors import SettingsError

NONE = "none"
OWN_INT8, OWN_INT4 = "int8", "int4"  # of a draft model on the CPU: the forms of `quantized` and `int4`
TORCHAO, BITSANDBYTES = "torchao", "bitsandbytes"
KNOWN_TO_WORK = {TORCHAO: "0.18", BITSANDBYTES: "0.50"}  # their interfaces change: other releases are not taken
INT4_GROUP = 32  # weights with a scale and a zero point of their own (torchao)
INT4_OUTPUTS = 16  # the outputs of a layer are a multiple of this (torchao)
NF4_GROUP = 64  # weights with a scale of their own (bitsandbytes)
LEAST_SHARE = 0.8  # of the weights outside embeddings and output layer that must be quantised
ROWS_TRIED = (1, 2, 16)
LARGEST_ERROR = {"int8": 0.05, "int4": 0.25}  # relative, of the self-test; rounding makes 0.01 and 0.1


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are quantised."""

    library: str
    kind: str  # int8 or int4

    @property
    def name(self) -> str:
        return f"{self.library} {self.kind}"

    @property
    def planned_dtype(self) -> Any:
        """What accelerate's planning counts for a quantised weight."""
        return torch.int8 if self.kind == "int8" else CustomDtype.INT4

    def weight_bytes(self, layer: nn.Linear) -> int:
        """Bytes of a quantised weight [out, in] without its scales."""
        return layer.in_features * layer.out_features // (1 if self.kind == "int8" else 2)

    def scale_bytes(self, layer: nn.Linear, dtype: torch.dtype) -> int:
        """Bytes of a quantised weight's scales and zero points."""
        if self.kind == "int8":
            return 4 * layer.out_features
        weights = layer.in_features * layer.out_features
        return 2 * dtype.itemsize * (weights // INT4_GROUP) if self.library == TORCHAO else 4 * (weights // NF4_GROUP)


def form_of(name: str) -> Form | None:
    """The form of that name; None for weights that no library quantises."""
    library, _, kind = name.partition(" ")
    return Form(library, kind) if kind else None


def library_for(device: torch.device) -> str:
    return BITSANDBYTES if device.type == "cuda" else TORCHAO


def choose_form(kind: str, device: torch.device, dtype: torch.dtype, flag: str) -> Form:
    """The form of that kind for a device, tried there. Raises `SettingsError`, which names the flag that asked."""
    form = Form(library_for(device), kind)
    require_library(form.library, f"`{flag} {kind}` on {device.type}")
    try:
        works = form_works(form, device, dtype)
    except Exception as error:  # a library may raise anything about a device that it does not know
        raise SettingsError(
            f"`{flag} {kind}` does not work on {device} with {form.library} {version(form.library)}: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}",
            hint=f"use another kind, or `{flag} none`",
        ) from error
    if not works:
        raise SettingsError(
            f"`{flag} {kind}` gives no right result on {device} with {form.library} {version(form.library)}",
            hint=f"use another kind, or `{flag} none`",
        )
    return form


def require_library(library: str, what: str) -> None:
    """Raise `SettingsError` unless a release of the library is installed that is known to work."""
    known = KNOWN_TO_WORK[library]
    try:
        found = version(library)
    except PackageNotFoundError:
        found = ""
    if found != known and not found.startswith(f"{known}."):
        raise SettingsError(
            f"{what} needs {library} {known}, and {f'{found} is' if found else 'it is not'} installed",
            hint=f"pip install 'fly-decode[{library}]'",
        )


def quantization_config(form: Form, dtype: torch.dtype) -> Any:
    """What `from_pretrained` is given."""
    if form.library == TORCHAO:
        return TorchAoConfig(torchao_config(form.kind))
    if form.kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def torchao_config(kind: str) -> Any:
    """Inputs stay as they are in both kinds: torchao's forms with 8-bit inputs are slower on CPUs, or wrong."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig(set_inductor_config=False)
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, set_inductor_config=False)


@cache
def form_works(form: Form, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a small layer of this form gives right results on the device, at every number of rows that is tried."""
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(256, 128, bias=False, dtype=dtype).requires_grad_(False)
    plain.weight.copy_(torch.randn(plain.weight.shape, generator=generator))
    weight = plain.weight.float().clone()
    layer = quantized_layer(plain, form, device)
    for rows in ROWS_TRIED:
        input = torch.randn(1, rows, 256, generator=generator).to(dtype)
        right = input.float() @ weight.T
        error = (layer(input.to(device)).cpu().float() - right).norm()
        if not error <= LARGEST_ERROR[form.kind] * right.norm():  # a NaN is no less wrong
            return False
    return True


def quantized_layer(plain: nn.Linear, form: Form, device: torch.device) -> nn.Module:
    """The layer in that form, on the device, without a bias."""
    if form.library == TORCHAO:
        from torchao.quantization import quantize_

        quantize_(plain.to(device), torchao_config(form.kind))
        return plain
    import bitsandbytes as bnb

    size, dtype = (plain.in_features, plain.out_features, False), plain.weight.dtype
    layer: nn.Module
    if form.kind == "int8":
        layer = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
        layer.weight = bnb.nn.Int8Params(plain.weight, requires_grad=False, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(*size, compute_dtype=dtype, quant_type="nf4", compress_statistics=False)
        layer.weight = bnb.nn.Params4bit(
            plain.weight, requires_grad=False, quant_type="nf4", compress_statistics=False, blocksize=NF4_GROUP
        )
    return layer.to(device)


def quantized_layers(model: Any, form: Form) -> dict[str, nn.Linear]:
    """The layers of a model, loaded or not, that transformers quantises in this form, by name."""
    left_out = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, left_out)
    }
    if form == Form(TORCHAO, "int4"):  # the others stay plain
        layers = {name: layer for name, layer in layers.items() if layer.in_features % INT4_GROUP == 0}
    return layers


def why_not(model: Any, form: Form) -> str | None:
    """Why a model is not worth quantising; None if it is."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights come quantised already"
    kept = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    rest = {id(parameter): parameter.numel() for parameter in model.parameters() if id(parameter) not in kept}
    layers = quantized_layers(model, form)
    quantized = sum(rest.get(id(layer.weight), 0) for layer in layers.values())
    if quantized < LEAST_SHARE * sum(rest.values()):
        return f"most of its weights are not in linear layers that {form.library} quantises"
    if form == Form(TORCHAO, "int4") and any(layer.out_features % INT4_OUTPUTS for layer in layers.values()):
        return f"it has linear layers whose outputs are no multiple of {INT4_OUTPUTS}, which {form.library} needs"
    return None


def parameter_bytes(model: nn.Module, dtype: torch.dtype, form: Form | None = None) -> dict[str, int]:
    """Bytes of each parameter of a model that is loaded so; tied ones count once."""
    layers = quantized_layers(model, form) if form else {}
    quantized = {
        f"{name}.weight": form.weight_bytes(layer) + form.scale_bytes(layer, dtype)
        for name, layer in layers.items()
        if form
    }
    return {
        name: quantized.get(name, parameter.numel() * dtype.itemsize) for name, parameter in model.named_parameters()
    }
