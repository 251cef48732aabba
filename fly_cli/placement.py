"""Where the layers of both models go, decided before any weight is read."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import check_device_map, get_max_memory
from accelerate.utils.modeling import convert_file_size_to_int

from .errors import OutOfMemoryError, SettingsError, UnsupportedModelError
from .int4 import LEAST_PARAMETERS, int4_bytes, no_int4
from .lowbit import (
    NONE,
    OWN_INT4,
    OWN_INT8,
    Form,
    choose_form,
    form_of,
    library_for,
    parameter_bytes,
    quantized_layers,
    why_not,
)
from .processes import place_of
from .quantized import int8_works, quantized_bytes, worth_quantizing
from .settings import ModelSettings
from .skeleton import Skeleton
from .text import one_line

HEADROOM = 0.05  # share of each device's free memory that is left alone (activations, fragmentation)
WHOLE = {
    "replicate",
    "replicated_with_grad_allreduce",
    "all_reduce",
    "mla_kv_a_proj",
    "local_params",
}  # styles of plans
DeviceMap = dict[str, int | str | torch.device]


@dataclass(frozen=True)
class Placement:
    """One model's place: module -> device, the dtype, and the sizes in bytes."""

    name: str
    device_map: DeviceMap
    dtype: torch.dtype
    weight_bytes: int
    cache_bytes: int
    quantize: str = NONE  # or the name of a form: int8 and int4 (our own), torchao int4 and the like
    processes: int = 1  # that share the model; the sizes are of one's part
    compiled: bool = False  # whether its steps are

    @property
    def weights(self) -> str:
        """What the weights are in: the form, or the dtype."""
        return str(self.dtype).removeprefix("torch.") if self.quantize == NONE else self.quantize

    def describe(self) -> dict[str, Any]:
        """The placement as JSON values."""
        devices: dict[str, int] = {}
        for device in self.device_map.values():
            devices[str(device)] = devices.get(str(device), 0) + 1
        return {
            "model": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantize": self.quantize,
            "weight_bytes": self.weight_bytes,
            "devices": devices,  # device -> number of modules (1 when the whole model is on one)
            **({"processes": self.processes} if self.processes > 1 else {}),
            **({"compiled": True} if self.compiled else {}),
        }


def plan(
    target: Skeleton, draft: Skeleton | None, settings: ModelSettings, free: Mapping[int | str, int] | None = None
) -> tuple[Placement, Placement | None]:
    """Places for target and draft that fit together, into the `free` bytes of each device (default: of this machine).

    The draft goes whole onto one device (the accelerator with most room, if it fits there), the target over what
    is left. Raises `OutOfMemoryError` with the sizes when they do not fit, `SettingsError` for a device not there and
    for weights that cannot be quantised as asked.
    """
    free = free_memory(settings.max_memory) if free is None else dict(free)
    if settings.processes > 1:
        free = own_share(free)
    draft_place = None
    if draft is not None:
        device = checked_device(settings.draft_device) if settings.draft_device else roomiest(draft, free, settings)
        draft_place = place_draft(draft, device, settings)
        take(draft_place, device, free)
    target_place = place_target(target, free, settings)
    return target_place, draft_place


def free_memory(limits: Mapping[str, str] | None) -> dict[int | str, int]:
    """Free bytes of each device (accelerators by index, then "cpu"), less some headroom, capped by `limits`."""
    free = {device: int(size * (1 - HEADROOM)) for device, size in get_max_memory().items()}
    for key, size in (limits or {}).items():
        device: int | str = int(key) if key.isascii() and key.isdigit() and len(key) < 6 else key
        try:
            limit = convert_file_size_to_int(size)
        except ValueError as error:
            raise SettingsError(f"`max_memory` of {key} is {size!r}", hint="write sizes as 20GB or 800MB") from error
        if device not in free:
            raise SettingsError(
                f"`max_memory` names a device that is not there: {key}", hint=f"there are {', '.join(map(str, free))}"
            )
        free[device] = min(limit, free[device])
    if limits:  # devices not named are not to be used, as in accelerate
        free = {device: size if str(device) in limits else 0 for device, size in free.items()}
        if "cpu" not in limits:
            free["cpu"] = 0
    return free


def roomiest(draft: Skeleton, free: Mapping[int | str, int], settings: ModelSettings) -> torch.device:
    """The accelerator with most room if the draft fits, else the CPU; the target's own device if that is fixed."""
    if isinstance(settings.device_map, str) and settings.device_map != "auto":
        return checked_device(settings.device_map)
    accelerators = {device: size for device, size in free.items() if isinstance(device, int)}
    if accelerators:
        best = max(accelerators, key=lambda device: accelerators[device])
        device, kind = accelerator(best), settings.draft_quantize
        dtype = choose_dtype(settings.dtype, device)
        form = None if kind in ("auto", NONE) else Form(library_for(device), kind)
        if draft.weight_bytes(dtype, form) + draft.cache_bytes(dtype) <= accelerators[best]:
            return device
    return torch.device("cpu")


def place_whole(
    model: Skeleton, device: torch.device, settings: ModelSettings, kind: str = NONE, flag: str = "--quantize"
) -> Placement:
    dtype = choose_dtype(settings.dtype, device)
    return placed(model, {"": device}, dtype, quantized_form(model, kind, device, dtype, flag))


def placed(model: Skeleton, device_map: DeviceMap, dtype: torch.dtype, form: Form | None) -> Placement:
    sizes = model.weight_bytes(dtype, form), model.cache_bytes(dtype)
    return Placement(model.name, device_map, dtype, *sizes, form.name if form else NONE)


def quantized_form(model: Skeleton, kind: str, device: torch.device, dtype: torch.dtype, flag: str) -> Form | None:
    """How a library is to quantise the model there; None for "none". Raises `SettingsError` where it cannot."""
    if kind == NONE:
        return None
    form = choose_form(kind, device, dtype, flag)
    if reason := why_not(model.model, form):
        raise SettingsError(f"`{model.name}` cannot run with {kind} weights: {reason}", hint=f"use `{flag} none`")
    return form


def place_draft(
    model: Skeleton, device: torch.device, settings: ModelSettings, without: Set[str] = frozenset()
) -> Placement:
    """The draft whole on its device. On a CPU int8 and int4 are our own forms, and "auto" takes the fastest that works.

    `without` are forms that turned out not to work. Raises `SettingsError` for one that is asked for and not possible.
    """
    kind = settings.draft_quantize
    if device.type != "cpu":
        return place_whole(model, device, settings, NONE if kind == "auto" else kind, "--draft-quantize")
    dtype = torch.float32  # of what lies between the layers
    for form in own_forms(kind, model):
        reason = no_int4(model.model) if form == OWN_INT4 else no_int8(model)
        if reason and kind != "auto":
            raise SettingsError(
                f"`{model.name}` cannot draft with {form} weights: {reason}",
                hint="use `--draft-quantize none` or `auto`",
            )
        if not reason and form not in without:
            size = int4_bytes(model.model) if form == OWN_INT4 else quantized_bytes(model.model)
            return Placement(model.name, {"": device}, dtype, size, model.cache_bytes(dtype), form)
    return place_whole(model, device, settings)


def own_forms(kind: str, model: Skeleton) -> tuple[str, ...]:
    """The forms of our own to try, the fastest first."""
    if kind == "auto":
        return (OWN_INT4, OWN_INT8) if model.num_parameters >= LEAST_PARAMETERS else (OWN_INT8,)
    return () if kind == NONE else (kind,)


def no_int8(model: Skeleton) -> str | None:
    """Why the model cannot run with int8 weights of our own on the CPU; None if it can."""
    if not worth_quantizing(model.model):
        return "most of its weights are not in linear layers"
    return None if int8_works() else "PyTorch's int8 kernels give no right result on this CPU"


def take(place: Placement, device: torch.device, free: dict[int | str, int]) -> None:
    """Book a whole model on its device. Raises `OutOfMemoryError` when it does not fit."""
    book(place, device, place.weight_bytes, place.cache_bytes, free)


def book(place: Placement, device: torch.device, weights: int, cache: int, free: dict[int | str, int]) -> None:
    """Book that many bytes of a model on a device. Raises `OutOfMemoryError` when they do not fit."""
    key = device.type if device.type in free else (device.index or 0)  # as accelerate counts: cpu, or an index
    if weights + cache > free.get(key, 0):
        raise OutOfMemoryError(
            f"`{place.name}` needs {gigabytes(weights + cache)} on {device} ({gigabytes(weights)} weights in "
            f"{place.weights}, {gigabytes(cache)} cache), and "
            f"{gigabytes(free.get(key, 0))} are free",
            hint="use a smaller model or `--draft lookup`, `--dtype bfloat16`, or another device",
        )
    free[key] -= weights + cache


def place_target(target: Skeleton, free: dict[int | str, int], settings: ModelSettings) -> Placement:
    if settings.processes > 1:
        return place_part(target, free, settings)
    if isinstance(settings.device_map, str) and settings.device_map != "auto":
        device = checked_device(settings.device_map)
        place = place_whole(target, device, settings, settings.quantize)
        take(place, device, free)
        return place
    accelerators = [accelerator(device) for device, size in free.items() if isinstance(device, int) and size]
    main = accelerators[0] if accelerators else torch.device("cpu")
    dtype = choose_dtype(settings.dtype, main)
    if isinstance(settings.device_map, dict):
        return place_by_map(target, dict(settings.device_map), dtype, free, settings)
    form = quantized_form(target, settings.quantize, main, dtype, "--quantize")
    place = placed(target, spread(target, dtype, form, free), dtype, form)
    spilled = form is not None and part_elsewhere(place.device_map, main) is not None
    if spilled or ("disk" in place.device_map.values() and not settings.offload_folder):
        weights, cache = gigabytes(place.weight_bytes), gigabytes(place.cache_bytes)
        room = ", ".join(f"{gigabytes(size)} on {device}" for device, size in free.items())
        more = "" if form else ", or keep the rest on disk (slow) with `--offload-folder DIR`"
        raise OutOfMemoryError(
            f"`{target.name}` needs {gigabytes(place.weight_bytes + place.cache_bytes)} ({weights} weights in "
            f"{place.weights}, {cache} cache), and what is left is {room}",
            hint=f"use a smaller model, `--dtype bfloat16`, `--draft lookup`{more}",
        )
    return place


def place_by_map(
    target: Skeleton, device_map: DeviceMap, dtype: torch.dtype, free: dict[int | str, int], settings: ModelSettings
) -> Placement:
    """The target where the user's map puts it. Raises `OutOfMemoryError` when it does not fit."""
    devices = check_map(target, device_map, settings)
    main = next((device for device in devices.values() if device and device.type != "cpu"), torch.device("cpu"))
    form = quantized_form(target, settings.quantize, main, dtype, "--quantize")
    if form and (stray := part_elsewhere(device_map, main)) is not None:
        raise SettingsError(
            f"the device map puts a part of `{target.name}` on {stray}, and {form.name} weights work on {main.type}",
            hint="name devices of one kind, or use `--quantize none`",
        )
    place = placed(target, device_map, dtype, form)
    take_map(target, place, devices, free)
    return place


def spread(target: Skeleton, dtype: torch.dtype, form: Form | None, free: Mapping[int | str, int]) -> DeviceMap:
    """The target over the free memory, accelerators first, and on the disk what does not fit."""
    layers = quantized_layers(target.model, form) if form else {}
    planned = {f"{name}.weight": form.planned_dtype for name in layers} if form else None
    scales = sum(form.scale_bytes(layer, dtype) for layer in layers.values()) if form else 0
    # The cache lives where the layers do, and so do scales: leave their share on each accelerator, or all on the CPU.
    share = (target.cache_bytes(dtype) + scales) // max(1, sum(isinstance(device, int) for device in free))
    limits = {device: max(0, size - share) for device, size in free.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about buffers of offloaded layers: a few bytes
        device_map: DeviceMap = infer_auto_device_map(
            target.model,
            max_memory=limits,
            dtype=dtype,
            special_dtypes=planned,
            no_split_module_classes=target.model._no_split_modules,
        )
    return device_map


def part_elsewhere(device_map: Mapping[str, Any], main: torch.device) -> str | None:
    """A device in a map that is not of the main one's kind: the libraries' weights lie on one kind alone."""
    for device in map(device_name, device_map.values()):
        if device.partition(":")[0] != main.type:
            return device
    return None


def own_share(free: Mapping[int | str, int]) -> dict[int | str, int]:
    """What this process may use of the free bytes of its machine: its own accelerator, its part of the CPU's memory."""
    place = place_of(os.environ)
    own: dict[int | str, int] = {device: size for device, size in free.items() if device == place.local_rank}
    return {**own, "cpu": free.get("cpu", 0) // place.local_world}


def place_part(target: Skeleton, free: dict[int | str, int], settings: ModelSettings) -> Placement:
    """The place of this process's part of a target that several processes share (tensor parallelism).

    Raises `SettingsError` for settings that would place it otherwise, `UnsupportedModelError` for a model that cannot
    be split so, `OutOfMemoryError` for a part that does not fit.
    """
    for name, value, default in (
        ("device_map", settings.device_map, "auto"),
        ("offload_folder", settings.offload_folder, None),
        ("quantize", settings.quantize, NONE),
    ):
        if value != default:
            raise SettingsError(
                f"`{name}` has no place where {settings.processes} processes share the target: each has its own part",
                hint="drop it, or use one process",
            )
    check_split(target, settings.processes)
    device = next((accelerator(index) for index in free if isinstance(index, int)), torch.device("cpu"))
    dtype = choose_dtype(settings.dtype, device)
    plan = target.model.tp_plan
    weights = sum(
        parameter.numel() // (settings.processes if is_split(name, plan) else 1)
        for name, parameter in target.model.named_parameters()
    )
    cache = target.cache_bytes(dtype) // settings.processes
    place = Placement(target.name, {"": device}, dtype, weights * dtype.itemsize, cache, processes=settings.processes)
    take(place, device, free)
    return place


def check_split(target: Skeleton, processes: int) -> None:
    """Raise `UnsupportedModelError` for a model that transformers has no plan to split, or not into so many parts."""
    config = target.model.config
    if not target.model.tp_plan:
        raise UnsupportedModelError(
            f"`{target.name}` (model type `{config.model_type}`) cannot be shared by several processes: transformers "
            "has no plan to split it",
            hint="use one process: the same command without torchrun",
        )
    text = config.get_text_config(decoder=True)
    for layer in text.per_layer_config:
        heads = layer.num_attention_heads
        groups = getattr(layer, "num_key_value_heads", None) or heads
        if heads % processes or groups % processes:
            raise UnsupportedModelError(
                f"`{target.name}` has {heads} attention heads and {groups} key and value heads, which cannot be shared "
                f"evenly by {processes} processes",
                hint="use a number of processes that divides both",
            )


def is_split(parameter: str, plan: Mapping[str, str]) -> bool:
    """Whether a plan such as `{"layers.*.mlp.up_proj": "colwise"}` gives each process a part of this parameter."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", parameter)
    styles = {plan.get(name), plan.get(name.rpartition(".")[0])} - {None}
    return bool(styles) and not styles <= WHOLE


def check_map(target: Skeleton, device_map: DeviceMap, settings: ModelSettings) -> dict[str, torch.device | None]:
    """The device of each name in a map, None for the disk.

    Raises `SettingsError` for unknown, missing or twice placed modules, and for a device that is not there.
    """
    known = {name for name, _ in target.model.named_modules()} | {name for name, _ in target.model.named_parameters()}
    if unknown := [module for module in device_map if module not in known]:
        raise SettingsError(
            f"the device map names {unknown[0]!r}, and `{target.name}` has no such module",
            hint=f"name {', '.join(name for name, _ in target.model.named_children())} or parts of them, or use `auto`",
        )
    if nested := [name for name in device_map if name and outer_entry(name, device_map) is not None]:
        outer = outer_entry(nested[0], device_map) or "the whole model"
        raise SettingsError(
            f"the device map names {nested[0]} beside {outer}, which it is part of",
            hint=f"name the other parts of {outer} in its place, or use `auto`",
        )
    try:
        check_device_map(target.model, device_map)
    except ValueError as error:
        raise SettingsError(
            f"the device map does not fit `{target.name}`: {one_line(error)}", hint="name every module, or use `auto`"
        ) from error
    on_disk = [module or "the whole model" for module, device in device_map.items() if device == "disk"]
    if on_disk and not settings.offload_folder:
        raise SettingsError(
            f"the device map puts {on_disk[0]} on disk, and there is no folder for it",
            hint="add `--offload-folder DIR`, or name another device",
        )
    return {module: None if device == "disk" else checked_device(device) for module, device in device_map.items()}


def take_map(
    target: Skeleton,
    place: Placement,
    devices: Mapping[str, torch.device | None],
    free: dict[int | str, int],
) -> None:
    """Book what a device map puts on each device. Raises `OutOfMemoryError` when it does not fit."""
    weights: dict[torch.device, int] = {}
    for name, size in parameter_bytes(target.model, place.dtype, form_of(place.quantize)).items():
        device = devices[entry_of(name, devices)]
        if device is not None:
            weights[device] = weights.get(device, 0) + size
    holders = [device for device in weights if device.type != "cpu"] or [torch.device("cpu")]  # of the cache
    for device in {**weights, **dict.fromkeys(holders)}:
        cache = place.cache_bytes // len(holders) if device in holders else 0
        book(place, device, weights.get(device, 0), cache, free)


def entry_of(parameter: str, device_map: Mapping[str, Any]) -> str:
    """The name in a map that says where a parameter goes: itself, or what it is part of."""
    return parameter if parameter in device_map else outer_entry(parameter, device_map) or ""


def outer_entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """The name in a map of what a module or parameter is part of, "" for the whole model; None if there is none."""
    while name:
        name = name.rpartition(".")[0]
        if name in device_map:
            return name
    return None


def bytes_by_device(model: Skeleton, place: Placement) -> dict[str, int]:
    """How many bytes of the model's weights lie on each device, by its name."""
    if len(place.device_map) == 1:
        return {device_name(device): place.weight_bytes for device in place.device_map.values()}
    found: dict[str, int] = {}
    for name, size in parameter_bytes(model.model, place.dtype, form_of(place.quantize)).items():
        device = device_name(place.device_map[entry_of(name, place.device_map)])
        found[device] = found.get(device, 0) + size
    return found


def device_name(device: int | str | torch.device) -> str:
    return str(accelerator(device) if isinstance(device, int) else device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype asked for, or for "auto" the 16-bit type that suits the device.

    CPUs take bf16 even where they cannot multiply it: half the bytes is twice the tokens a second in plain decoding,
    and `cpu_linear` looks after blocks of rows.
    """
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16


def checked_device(name: str | int | torch.device) -> torch.device:
    """The device of that name. Raises `SettingsError` when this machine has none."""
    try:
        device = accelerator(name) if isinstance(name, int) else torch.device(name)
        same = device.index == name if isinstance(name, int) else str(device) == str(name)
        if not same or device.type == "meta":  # torch wraps indices (cuda:256 becomes cuda:0), and meta holds nothing
            raise ValueError(f"{name!r} names {device}")
        torch.empty(1, device=device)
    except Exception as error:  # each backend has its own way to say that it is not there
        raise SettingsError(
            f"there is no device {str(name)!r} here",
            hint=f"devices: {', '.join(str(accelerator(d)) if isinstance(d, int) else d for d in get_max_memory())}",
        ) from error
    return device


def accelerator(index: int) -> torch.device:
    current = torch.accelerator.current_accelerator()
    return torch.device(current.type if current is not None else "cuda", index)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
