"""Devices that are not there: tensors say that they live on `fake:0` or `fake:1`, and are computed on the CPU.

As on a real accelerator, tensors of two devices do not mix, and each transfer is seen: `transfers` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

KIND = "fake"
_setup_privateuseone_for_python_backend(KIND)
transfers: list[tuple[str, str, int]] = []  # from, to, numbers

aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten._local_scalar_dense.default}


class FakeTensor(torch.Tensor):
    """A tensor on a fake device; `raw` has its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: Any, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes parameters of the class that they had
            return torch.nn.Parameter(raw, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device
        )
        made.raw = raw
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


@cache
def is_made_of_others(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def tensors_in(args: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in args:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += tensors_in(one)
    return found


def bare(one: Any) -> Any:
    """The argument with the numbers of fake tensors in their place."""
    if isinstance(one, FakeTensor):
        return one.raw
    return [bare(each) for each in one] if isinstance(one, list | tuple) else one


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, on the device of its inputs or on the one that it was asked for."""
    if is_made_of_others(func):  # in inference mode they come whole
        with Factories():
            return func.decompose(*args, **kwargs)
    values = tensors_in((*args, *kwargs.values()))
    homes = {one.device for one in values if one.dim() or isinstance(one, FakeTensor)}
    if func not in MOVES and len(homes) > 1:
        raise RuntimeError(f"{func} was given tensors on {sorted(map(str, homes))}")
    source = (values[1] if func is aten.copy_.default else values[0]).device if values else torch.device("cpu")
    asked = kwargs.get("device")
    target = values[0].device if values else source
    if func is aten._local_scalar_dense.default:
        target = torch.device("cpu")
    elif func not in MOVES and homes:
        (target,) = homes
    if asked is not None:
        target = torch.device(asked)
    if target.type == KIND:
        target = torch.device(KIND, target.index or 0)
        if asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
    if func in MOVES and source != target:
        transfers.append((str(source), str(target), values[-1].numel()))
    result = func(*map(bare, args), **{name: bare(one) for name, one in kwargs.items()})
    if target.type != KIND:
        return result
    name = func._schema.name
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    if isinstance(result, torch.Tensor):
        return FakeTensor(result, target)
    return type(result)(FakeTensor(one, target) for one in result) if isinstance(result, list | tuple) else result


# What comes past the Python modes: the making of `torch.tensor(..., device=...)`.
library = torch.library.Library("aten", "IMPL")
for packet in (aten.empty_strided.default, aten.empty.memory_format):
    library.impl(packet, partial(lambda func, *args, **kwargs: compute(func, args, kwargs), packet), "PrivateUse1")
library.impl("_copy_from", lambda source, to, *_: compute(aten.copy_.default, (to, source), {}), "PrivateUse1")


class Factories(TorchDispatchMode):
    """Makes new tensors on fake devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        fake = asked is not None and torch.device(asked).type == KIND
        if fake or any(isinstance(one, FakeTensor) for one in tensors_in((*args, *kwargs.values()))):
            return compute(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def fake_devices() -> Iterator[list[tuple[str, str, int]]]:
    """Inside, there are fake devices; the list grows with each transfer."""
    transfers.clear()
    with Factories():
        yield transfers
