"""bf16 linear layers with their weights in the order of `bf16_gemm`, which large models keep in a file.

The order is made once per machine and model: later runs map the file into memory, which takes no time and, as with
the model's own files, no memory that the system cannot take back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .bf16_gemm import PANEL, STEP, Gemm, bf16_gemm
from .files import written_whole
from .progress import Progress
from .storage import HEADROOM_BYTES, default_cache_dir, prepared_name, size_text

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
        """[..., in] bf16 -> [..., out] bf16. Raises `RuntimeError` for another dtype, as `nn.Linear` does."""
        if input.dtype != torch.bfloat16:
            raise RuntimeError(f"the weights are bf16, and the input is {input.dtype}")
        rows = input.reshape(-1, self.in_features).contiguous()
        output = self.gemm.multiply(rows, self.packed, self.bias, self.out_features)
        return output.view(*input.shape[:-1], self.out_features)


def use_panels(model: nn.Module, layers: Mapping[str, nn.Linear], folder: Path | None) -> set[str]:
    """Replace those of the layers that fit, where there is a kernel; their names.

    What `keep_panels` has kept for a model folder is mapped. Otherwise one layer after the other is brought into order,
    so that no two copies of the model are in memory.
    """
    fit = fitting(layers)
    gemm = bf16_gemm() if fit else None
    if gemm is None:
        return set()
    kept = None if folder is None else mapped(panels_file(folder, fit), fit)
    for name, layer in fit.items():
        packed = gemm.pack(layer.weight.detach()) if kept is None else kept[name]
        model.set_submodule(name, PanelLinear(layer, packed, gemm))
    return set(fit)


def keep_panels(layers: Mapping[str, nn.Linear], folder: Path, name: str, progress: Progress) -> None:
    """Put a model's panels on disk if it is a large one, they are not there, and there is room. Notes what fails."""
    fit = fitting(layers)
    size = ITEM * sum(map(elements, fit.values()))
    gemm = bf16_gemm() if size >= KEPT_FROM else None
    file = panels_file(folder, fit)
    if gemm is None or mapped(file, fit) is not None:
        return
    progress.start(f"preparing {name} for this CPU, once", size)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < 2 * size + HEADROOM_BYTES:  # half of it stays free
            raise OSError(f"it takes {size_text(size)}, and the disk has too little room")
        with written_whole(file) as unfinished, unfinished.open("wb") as stream:
            for layer in fit.values():
                packed: Any = gemm.pack(layer.weight.detach()).view(torch.uint8).numpy()
                progress.advance(stream.write(packed))
    except OSError as error:
        reason = error.strerror or error
        progress.note(f"`{name}` is prepared for this CPU again in each run: `{file.parent}`: {reason}")
    finally:
        progress.finish()


def fitting(layers: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The layers that the kernel can multiply."""
    return {
        name: layer
        for name, layer in layers.items()
        if layer.weight.dtype == torch.bfloat16 and layer.in_features % STEP == 0 and layer.weight.is_contiguous()
    }


def elements(layer: nn.Linear) -> int:
    """How many numbers the panels of a layer have."""
    return -(-layer.out_features // PANEL) * PANEL * layer.in_features


def panels_file(folder: Path, layers: Mapping[str, nn.Linear]) -> Path:
    """Where the panels of a model folder are kept: layer after layer, without anything between."""
    shapes = [(name, *layer.weight.shape) for name, layer in layers.items()]
    return default_cache_dir() / "panels" / f"{prepared_name(folder, FORMAT, shapes)}.bin"


def mapped(file: Path, layers: Mapping[str, nn.Linear]) -> dict[str, Tensor] | None:
    """The panels by layer, as they are on disk; None where they are not."""
    sizes = {name: elements(layer) for name, layer in layers.items()}
    total = sum(sizes.values())
    try:
        if os.stat(file).st_size != ITEM * total or total == 0:
            return None
        everything = torch.from_file(str(file), shared=False, size=total, dtype=torch.bfloat16)
    except (OSError, RuntimeError):
        return None
    return dict(zip(sizes, torch.split(everything, list(sizes.values())), strict=True))
