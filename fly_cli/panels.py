"""bf16 linear layers with their weights in the order of `bf16_gemm`, which large models keep in a file.

The order is made once per machine and model: later runs map the file into memory, which takes no time and, as with
the model's own files, no memory that the system cannot take back. A file that is not of these weights is not used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .bf16_gemm import STEP, Gemm, bf16_gemm
from .errors import is_out_of_memory
from .files import remove_leftovers, written_whole
from .progress import Progress
from .storage import default_cache_dir, exclusive, has_room, prepared_name, size_text

FORMAT = "1"
KEPT_FROM = 100_000_000  # bytes; fewer are in order before a file is found
ITEM = 2  # bytes of a weight


class PanelLinear(nn.Module):
    """A bf16 linear layer whose weight [out, in] is kept in panels. For inference only."""

    def __init__(self, layer: nn.Linear, packed: Tensor, gemm: Gemm):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed, self.gemm = packed, gemm
        self.bias = None if layer.bias is None else layer.bias.detach().float()
        self.weight_bytes = layer.weight.nbytes

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] bf16 -> [..., out] bf16. Raises `RuntimeError` for another input, as `nn.Linear` does."""
        if input.dtype != torch.bfloat16 or input.device.type != "cpu":
            raise RuntimeError(f"the weights are bf16 on the CPU, and the input is {input.dtype} on {input.device}")
        rows = input.reshape(-1, self.in_features).contiguous()
        output = self.gemm.multiply(rows, self.packed, self.bias, self.out_features)
        return output.view(*input.shape[:-1], self.out_features)


def use_panels(model: nn.Module, layers: dict[str, nn.Linear], folder: Path | None) -> int:
    """Replace those of the layers that fit, where there is a kernel, and take them out of `layers`; how many.

    What `keep_panels` has kept for a model folder is mapped. Otherwise one layer after the other is brought into order,
    so that no two copies of the model are in memory.
    """
    fit = fitting(layers)
    gemm = bf16_gemm() if fit else None
    if gemm is None:
        return 0
    kept = None if folder is None else mapped(folder, fit, gemm)
    names = list(fit)
    for name in names:
        del layers[name]
        layer = fit.pop(name)
        packed = gemm.pack(layer.weight.detach()) if kept is None else kept[name]
        model.set_submodule(name, PanelLinear(layer, packed, gemm))
    return len(names)


def keep_panels(layers: Mapping[str, nn.Linear], folder: Path, name: str, progress: Progress) -> None:
    """Put a model's panels on disk if it is a large one, they are not there, and there is room. Notes what fails."""
    fit = fitting(layers)
    gemm = bf16_gemm() if fit else None
    if gemm is None or file_size(fit, gemm) < KEPT_FROM:
        return
    try:
        file = panels_file(folder, fit, gemm)
        if not has_size(file, fit, gemm):
            file.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(file.parent / "lock", f"the weights of {name}", progress):
                if not has_size(file, fit, gemm):  # another process may have been faster
                    write_panels(file, fit, gemm, name, progress)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or error
        place = default_cache_dir() / "panels"
        progress.note(f"`{name}` is prepared for this CPU at each start, nothing can be kept in `{place}`: {reason}")


def write_panels(file: Path, layers: Mapping[str, nn.Linear], gemm: Gemm, name: str, progress: Progress) -> None:
    """Write the panels of all layers, in the place of what earlier weights of this folder had. Raises `OSError`."""
    size = file_size(layers, gemm)
    remove_leftovers(file.parent)
    if not has_room(file.parent, 2 * size):  # as much again stays free
        raise OSError(f"that takes {size_text(size)}, and the disk has too little room")
    progress.start(f"preparing {name} for this CPU, once", size)
    try:
        with written_whole(file) as unfinished, unfinished.open("wb") as stream:
            for layer in layers.values():
                packed: Any = gemm.pack(layer.weight.detach()).view(torch.uint8).numpy()
                progress.advance(stream.write(packed))
    finally:
        progress.finish()
    for other in file.parent.glob("*.bin"):
        if other != file:
            other.unlink(missing_ok=True)


def fitting(layers: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The layers that the kernel can multiply."""
    return {
        name: layer
        for name, layer in layers.items()
        if layer.weight.dtype == torch.bfloat16
        and layer.in_features % STEP == 0 < layer.in_features
        and layer.weight.is_contiguous()
    }


def lengths(layers: Mapping[str, nn.Linear], gemm: Gemm) -> list[int]:
    """How many numbers the panels of each layer have."""
    return [gemm.packed_length(layer.out_features, layer.in_features) for layer in layers.values()]


def file_size(layers: Mapping[str, nn.Linear], gemm: Gemm) -> int:
    return ITEM * sum(lengths(layers, gemm))


def has_size(file: Path, layers: Mapping[str, nn.Linear], gemm: Gemm) -> bool:
    return file.is_file() and file.stat().st_size == file_size(layers, gemm)


def panels_file(folder: Path, layers: Mapping[str, nn.Linear], gemm: Gemm) -> Path:
    """Where the panels of a model folder are kept: layer after layer, without anything between. Raises `OSError`."""
    shapes = [(name, *layer.weight.shape) for name, layer in layers.items()]
    key = prepared_name(folder, FORMAT, gemm.form.panel, transformers.__version__, shapes)
    place = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return default_cache_dir() / "panels" / f"{folder.name}-{place}" / f"{key[-12:]}.bin"


def mapped(folder: Path, layers: Mapping[str, nn.Linear], gemm: Gemm) -> dict[str, Tensor] | None:
    """The panels that are kept, by layer; None where there are none of these weights.

    Some panels of each layer are compared: a file whose weights are others goes.
    """
    sizes = lengths(layers, gemm)
    try:
        file = panels_file(folder, layers, gemm)
        if not has_size(file, layers, gemm):
            return None
        everything = torch.from_file(str(file), shared=False, size=sum(sizes), dtype=torch.bfloat16)
    except (OSError, RuntimeError):
        return None
    kept = dict(zip(layers, torch.split(everything, sizes), strict=True))
    if all(is_of(kept[name], layer, gemm) for name, layer in layers.items()):
        return kept
    with suppress(OSError):
        os.unlink(file)
    return None


def is_of(packed: Tensor, layer: nn.Linear, gemm: Gemm) -> bool:
    """Whether the first, the middle and the last panel are those of the layer's weight."""
    height = gemm.form.panel
    last, length = (layer.out_features - 1) // height, height * layer.in_features
    for panel in {0, last // 2, last}:
        own = gemm.pack(layer.weight.detach()[panel * height : (panel + 1) * height])
        kept = packed[panel * length : (panel + 1) * length]
        if not torch.equal(own.view(torch.int16), kept.view(torch.int16)):
            return False
    return True
