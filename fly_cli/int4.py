"""The int4 form of a draft model on the CPU, prepared once and kept in the cache.

A single step moves every weight once, so a quarter of the bytes are almost four times the steps; and what the draft
model computes cannot change what the target accepts. Where there is AVX2 and a C compiler a kernel of ours runs it
(`int4_decoder`), elsewhere ONNX Runtime (`int4_onnx`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from . import int4_decoder, int4_onnx
from .files import written_whole
from .int4_model import Int4Error, Int4Model, check
from .storage import default_cache_dir, prepared_name

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "llama3")
LEAST_PARAMETERS = 20_000_000  # of a model whose steps are slow enough for its preparation to pay
REFERENCE, FAILED = "reference.safetensors", "failed.txt"


@dataclass(frozen=True)
class Engine:
    """What runs a model of `ARCHITECTURES` with int4 weights."""

    why_not: Callable[[Any], str | None]  # why it cannot run a model (perhaps without weights) here
    form: tuple[Any, ...]  # of its files
    build_bytes: int  # of memory for each weight while they are made
    build_time: str
    weight_bytes: Callable[[Any], int]
    build: Callable[[Any, Path], None]  # (loaded model, the folder to make); raises `Int4Error`
    opened: Callable[..., Int4Model]  # (folder, config, name=, vocab_size=); raises `Int4Error`


KERNEL = Engine(
    int4_decoder.no_decoder,
    int4_decoder.FORM,
    int4_decoder.BUILD_BYTES,
    "some seconds",
    int4_decoder.weight_bytes,
    int4_decoder.build,
    int4_decoder.opened,
)
ONNX = Engine(
    lambda _: int4_onnx.no_packages(),
    int4_onnx.FORM,
    int4_onnx.BUILD_BYTES,
    "a minute or so",
    int4_onnx.weight_bytes,
    int4_onnx.build,
    int4_onnx.opened,
)


def engine_of(model: Any) -> Engine | None:
    """The fastest that runs a model (perhaps without weights) of `ARCHITECTURES` here."""
    return next((engine for engine in (KERNEL, ONNX) if why_not(engine, model) is None), None)


def why_not(engine: Engine, model: Any) -> str | None:
    """Why it does not run the model here: it cannot, or has failed before; None if it does."""
    if reason := engine.why_not(model):
        return reason
    failed = int4_folder(engine, Path(model.config.name_or_path)) / FAILED
    return failed.read_text(encoding="utf-8") if failed.is_file() else None


def no_int4(model: Any) -> str | None:
    """Why a model (perhaps without weights) cannot have an int4 form here; None if it can."""
    config = model.config
    architecture = type(model).__name__
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if architecture not in ARCHITECTURES or getattr(config, "sliding_window", None) or rope not in ROPE_TYPES:
        return f"that is built for plain {', '.join(name.removesuffix('ForCausalLM') for name in ARCHITECTURES)} models"
    return None if engine_of(model) else f"{why_not(KERNEL, model)}, and {why_not(ONNX, model)}"


def int4_bytes(model: Any) -> int:
    """What the int4 form takes of a model that can have one."""
    return (engine_of(model) or ONNX).weight_bytes(model)


def int4_folder(engine: Engine, folder: Path, cache_dir: Path | None = None) -> Path:
    """Where the int4 form of a model folder is kept."""
    return (cache_dir or default_cache_dir()) / "int4" / prepared_name(folder, *engine.form)


def open_int4(engine: Engine, folder: Path, config: Any, *, name: str, vocab_size: int | None = None) -> Int4Model:
    """The model of a prepared folder, compared with the plain one. Raises `Int4Error`."""
    model = engine.opened(folder, config, name=name, vocab_size=vocab_size)
    try:
        reference = load_file(folder / REFERENCE)["logits"]
    except Exception as error:  # not there, or cut short
        raise Int4Error(str(error)) from error
    check(model, reference)
    return model


def build(engine: Engine, model: Any, folder: Path, reference: Tensor) -> None:
    """Make the int4 form of a loaded model, whole or not at all; `reference` are its own logits.

    Only one process at a time may do so for a folder.
    Raises `Int4Error` where the engine cannot do it, `OSError` where it cannot be kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{escape(folder.name)}.*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as unfinished:
        made = Path(unfinished) / "model"
        engine.build(model, made)
        save_file({"logits": reference.contiguous()}, made / REFERENCE)
        made.rename(folder)


def give_up(folder: Path, why: Int4Error) -> None:
    """Keep in mind that this model has no int4 form that works."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.mkdir(parents=True)
        with written_whole(folder / FAILED) as unfinished:
            unfinished.write_text(str(why), encoding="utf-8")
