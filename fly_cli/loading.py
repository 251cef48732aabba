"""Loads one model, in the form that its place says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from .cached_model import CachedModel
from .errors import ModelError, SettingsError, is_out_of_memory, memory_errors
from .int4 import Engine, build, engine_of, give_up, int4_folder, open_int4
from .int4_model import Int4Error, Int4Model, reference_reads
from .lowbit import NONE, OWN_INT4, OWN_INT8, form_of, quantization_config
from .placement import Placement, gigabytes, place_draft
from .progress import Progress
from .quantized import fill, keep_prepared, prepared_file, quantized_state, read_prepared
from .settings import ModelSettings
from .skeleton import Skeleton, skeleton
from .storage import exclusive, require_memory
from .team import join_team
from .text import one_line
from .weights import Located


@dataclass(frozen=True)
class Source:
    """What a model is loaded from, and how."""

    located: Located
    empty: Skeleton
    vocab_size: int  # ids that may be chosen
    settings: ModelSettings
    progress: Progress
    alone: Callable[[], object]  # returns when no other thread works on a model


def load_placed(source: Source, place: Placement) -> tuple[Any, Placement]:
    """The model in the form that its place says, or in another where its int4 form cannot be had; and where it is."""
    with memory_errors(f"loading `{place.name}` ({gigabytes(place.weight_bytes)})"):
        return load_in_form(source, place)


def load_in_form(source: Source, place: Placement) -> tuple[Any, Placement]:
    """As `load_placed`; memory errors are those of the libraries."""
    if place.quantize != OWN_INT4:
        source.alone()  # loaders change the default dtype of all threads
    if place.quantize not in (OWN_INT4, OWN_INT8):
        return load_model(source.located, place, source.settings, source.progress), place
    with join_team(source.settings.processes).in_turn():  # what one has prepared, others only read
        if place.quantize == OWN_INT4:
            try:
                return load_int4(source, place), place
            except Int4Error as error:
                place = place_without_int4(source, place, error)
                source.alone()
        if place.quantize == OWN_INT8:
            model = read_int8(source, place)
            if model is None:
                model = prepare_int8(source, place)
            return model, place
        return load_model(source.located, place, source.settings, source.progress), place


def load_model(located: Located, place: Placement, settings: ModelSettings, progress: Progress) -> Any:
    """The model of a local folder, placed. Raises `ModelError` for weights that are missing or of another shape."""
    progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)})", None)
    form = form_of(place.quantize)
    quantized = {"quantization_config": quantization_config(form, place.dtype)} if form else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            located.path,
            dtype=place.dtype,
            **where(place, settings),
            local_files_only=True,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **quantized,
        )
    except Exception as error:  # files may hold anything, and their readers raise anything about it
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"`{place.name}` cannot be loaded: {one_line(error)}", hint=f"check or remove the folder `{located.path}`"
        ) from error
    finally:
        progress.finish()
    if not settings.allow_missing_weights:
        refuse_missing_weights(place.name, info)
    if unused := sorted(info["unexpected_keys"]):  # without those that the model's class expects to be unused
        progress.note(
            f"`{place.name}` has {len(unused)} weights that its config.json has no place for: {a_few(unused)}"
        )
    return model.eval()


def unquantized(place: Placement, empty: Skeleton, dtype: torch.dtype) -> Placement:
    """The place of a model whose weights are quantised there, before they are."""
    return replace(place, dtype=dtype, quantize=NONE, weight_bytes=empty.weight_bytes(dtype))


def where(place: Placement, settings: ModelSettings) -> dict[str, Any]:
    """What the loader is told about the place of a model."""
    if place.processes > 1:
        return {"distributed_config": DistributedConfig(tp_size=place.processes, tp_plan="auto")}
    return {"device_map": place.device_map, "offload_folder": settings.offload_folder}


def read_int8(source: Source, place: Placement) -> Any | None:
    """The model with the int8 weights that an earlier run prepared, None where there are none that fit."""
    source.progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)}, int8)", None)
    try:
        state = read_prepared(prepared_file(source.located.path))
        return None if state is None else fill(source.empty.model, state)
    except ValueError:  # of another version of the library, or of the model's config
        return None
    finally:
        source.progress.finish()


def prepare_int8(source: Source, place: Placement) -> Any:
    """The model with int8 weights, made now and kept for later runs."""
    located, settings, progress = source.located, source.settings, source.progress
    needed = 4 * place.weight_bytes  # as it is stored (16 bits), and its int8 form twice
    require_memory(needed, f"preparing int8 weights of `{place.name}`")
    model = load_model(located, unquantized(place, source.empty, torch.bfloat16), settings, progress)
    progress.start(f"preparing int8 weights of {place.name}, once", None)
    try:
        state = quantized_state(model)
        del model
        file = prepared_file(located.path)
        # Weights that stay random because the user allows it would pass for the model's own in later runs.
        if not settings.allow_missing_weights and not keep_prepared(file, state):
            progress.note(f"the int8 weights cannot be kept in `{file.parent}`: they are prepared again in each run")
        empty = skeleton(place.name, located.path, trust_remote_code=settings.trust_remote_code)
        return fill(empty.model, state)
    except ValueError as error:
        raise ModelError(
            f"`{place.name}` cannot be loaded with int8 weights: {one_line(error)}",
            hint=f"check or remove the folder `{located.path}`",
        ) from error
    finally:
        progress.finish()


def load_int4(source: Source, place: Placement) -> Int4Model:
    """The model with the int4 weights that an earlier run prepared, or that are made now and kept.

    Raises `Int4Error` where they cannot be made or are not right on this machine.
    """
    engine = engine_of(source.empty.model)
    if engine is None:  # it has failed since this place was planned
        raise Int4Error("nothing runs it here")
    folder = int4_folder(engine, source.located.path)
    if (model := kept_int4(source, place, engine, folder)) is not None:
        return model
    if source.settings.allow_missing_weights:  # those that stay random are not the same twice
        raise Int4Error("with `--allow-missing-weights` none are made")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f"{folder.name}.lock"), f"int4 weights of {place.name}", source.progress):
            if (model := kept_int4(source, place, engine, folder)) is not None:
                return model  # another process was faster
            source.alone()
            prepare_int4(source, place, engine, folder)
            return read_int4(source, place, engine, folder)
    except Int4Error as error:
        give_up(folder, error)
        raise
    except OSError as error:
        raise Int4Error(f"`{folder.parent}` cannot be written: {error.strerror}") from error


def kept_int4(source: Source, place: Placement, engine: Engine, folder: Path) -> Int4Model | None:
    """The model that an earlier run prepared; None where there is none that works: it is made again."""
    try:
        return read_int4(source, place, engine, folder) if folder.is_dir() else None
    except Int4Error:
        return None


def read_int4(source: Source, place: Placement, engine: Engine, folder: Path) -> Int4Model:
    """The model of a prepared folder, compared with the plain one. Raises `Int4Error`."""
    source.progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)}, int4)", None)
    try:
        config = source.empty.model.config
        return open_int4(engine, folder, config, name=place.name, vocab_size=source.vocab_size)
    finally:
        source.progress.finish()


def prepare_int4(source: Source, place: Placement, engine: Engine, folder: Path) -> None:
    """Make and keep the int4 form of a model, with the plain model's logits to check it by. Raises `Int4Error`."""
    plain = unquantized(place, source.empty, torch.bfloat16)
    require_memory(engine.build_bytes * source.empty.num_parameters, f"preparing int4 weights of `{place.name}`")
    model = load_model(source.located, plain, source.settings, source.progress)
    reference = reference_reads(CachedModel(model, name=place.name))
    source.progress.start(f"preparing int4 weights of {place.name}, once ({engine.build_time})", None)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        build(engine, model, folder, reference)
    finally:
        source.progress.finish()


def place_without_int4(source: Source, place: Placement, error: Int4Error) -> Placement:
    """Another place for a draft model whose int4 form cannot be had. Raises `SettingsError` where it was asked for."""
    if source.settings.draft_quantize == OWN_INT4:
        raise SettingsError(
            f"`{place.name}` cannot draft with int4 weights: {one_line(error)}", hint="use `--draft-quantize auto`"
        ) from error
    source.progress.note(f"`{place.name}` drafts without int4 weights: {one_line(error)}")
    (device,) = place.device_map.values()
    return place_draft(source.empty, torch.device(device), source.settings, without={OWN_INT4})


def refuse_missing_weights(name: str, info: Mapping[str, Any]) -> None:
    """Raise `ModelError` when some weights did not come from the model's files; `info` is the loader's report."""
    hint = "the files do not fit their config.json; `--allow-missing-weights` goes on all the same"
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"`{name}` lacks {len(missing)} weights, which would stay random: {a_few(missing)}", hint=hint)
    other = [
        f"{key} is {list(stored)} and should be {list(own)}" for key, stored, own in sorted(info["mismatched_keys"])
    ]
    if other:
        raise ModelError(f"`{name}` has {len(other)} weights of another shape: {a_few(other)}", hint=hint)


def a_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
