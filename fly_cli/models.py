"""Loads a target and a draft model as a pair that can decode together."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from .cached_model import CachedModel, DraftModel
from .catalog import Catalog, load_catalog
from .costs import load_costs, measure_costs, store_costs
from .cpu_linear import speed_up_linears
from .descriptions import locate_description
from .errors import ModelError, SettingsError, out_of_memory
from .hub import is_offline
from .int4 import Int4Error, Int4Model, build, check, give_up, int4_folder, open_session, reference_reads
from .lowbit import NONE, OWN_INT4, OWN_INT8, form_of, quantization_config
from .pairing import Outlook, codec_of, examine, translation_of
from .placement import Placement, Skeleton, choose_dtype, gigabytes, place_draft, skeleton
from .processes import ALONE, Alone
from .progress import Progress, Silent
from .quantized import fill, keep_prepared, prepared_file, quantized_state, read_prepared
from .schedule import CostTable, guess_costs
from .settings import LOOKUP, ModelSettings, TextSettings
from .spelling import Translation
from .storage import exclusive, require_memory
from .team import join_team, lost_processes
from .text import Codec, one_line
from .vocabulary import Match
from .weights import Located, locate

INT4_BUILD = 10  # bytes of memory for each weight while the int4 form is made


@dataclass(frozen=True)
class Pair:
    """A target, perhaps a draft model, and the target's tokenizer."""

    target: CachedModel
    draft: DraftModel | None
    codec: Codec
    settings: ModelSettings
    placements: tuple[Placement, ...] = ()  # target, then draft
    costs: CostTable = field(default_factory=lambda: guess_costs(4, 1))  # of their forwards on this machine
    team: Alone = ALONE  # the processes that share the target
    assistant: Any = None  # the draft model as transformers would load it, where ours has other weights
    translation: Translation | None = None  # where the draft model has another tokenizer

    def describe(self) -> dict[str, Any]:
        """Settings, placement, stop ids and versions as JSON values."""
        return {
            "models": self.settings.as_json(),
            "placement": [place.describe() for place in self.placements],
            "stop_ids": sorted(self.codec.stop_ids),
            "vocab_size": self.codec.vocab_size,
            "cost_table": {"digest": self.costs.digest, **self.costs.as_json()},
            "versions": versions(form.library for place in self.placements if (form := form_of(place.quantize))),
        }

    @property
    def models(self) -> list[DraftModel]:
        """The target, and the draft model if there is one."""
        return [model for model in (self.target, self.draft) if model is not None]

    def remember_costs(self) -> None:
        """Keep what this run's forwards took, for the schedule of later runs."""
        store_costs(self.placements, self.models)

    def with_measured_costs(self, *, keep: bool = True) -> Pair:
        """The pair with a cost table that is measured now; `keep` stores it for later runs in the place of theirs."""
        costs = measure_costs(self.models)
        if keep:
            store_costs(self.placements, self.models, anew=True)
        return replace(self, costs=costs)


def load_pair(
    settings: ModelSettings | None = None,
    text_settings: TextSettings | None = None,
    *,
    mode: str = "fly",
    catalog: Catalog | None = None,
    progress: Progress | None = None,
) -> Pair:
    """The pair that `settings` names, fetched, converted, checked, planned and loaded.

    In mode `target` no draft model is loaded. Raises `ModelNotFoundError`, `DownloadError`, `UnsupportedModelError`,
    `OutOfMemoryError` or `SettingsError`; all that can be known without the weights is refused before they load.
    """
    settings = settings or ModelSettings()
    catalog = catalog or load_catalog()
    progress = progress or Silent()
    team = join_team(settings.processes) if settings.processes > 1 else ALONE
    with_draft = mode != "target" and settings.draft not in (None, LOOKUP)
    names = [settings.target, str(settings.draft)] if with_draft else [settings.target]
    with quiet_libraries(), lost_processes():
        refuse_before_fetching(names, catalog, settings, progress)
        folders = [locate(name, catalog, offline=settings.offline, progress=progress) for name in names]
        pair = assemble(folders, settings, text_settings or TextSettings(), progress)
    return replace(pair, team=team, costs=team.tell(lambda: pair.costs))


def refuse_before_fetching(names: Sequence[str], catalog: Catalog, settings: ModelSettings, progress: Progress) -> None:
    """Raise what stands against a pair, as far as it is told by small files, before gigabytes are fetched for it."""
    if settings.offline or is_offline():
        return  # nothing will be fetched
    found = [locate_description(name, catalog, progress=progress) for name in names]
    described = [one for one in found if one is not None]
    if len(described) == len(names) and not all(one.weights for one in described):
        examine(described, settings).refuse()


def assemble(
    folders: Sequence[Located], settings: ModelSettings, text_settings: TextSettings, progress: Progress
) -> Pair:
    """The pair of models in these folders: the target's, then perhaps the draft's."""
    outlook = examine(folders, settings)
    outlook.refuse()
    codec, translation = codec_of(outlook, folders, 0, text_settings, settings), None
    if outlook.vocabularies is not None and outlook.vocabularies.kind is Match.DIFFERENT:
        translation = translation_of(outlook, folders, codec, settings)
        difference = outlook.vocabularies.describe()
        progress.note(f"`{settings.draft}` drafts for `{settings.target}` by way of the text: {difference}")
    sizes = [codec.vocab_size, translation.draft.codec.vocab_size if translation else codec.vocab_size]
    loaded = load_and_try(folders, outlook, sizes, settings, progress)
    if loaded is None:
        gc.collect()  # what was loaded goes before the same is loaded again
        names = [place.name for place in outlook.places]
        if settings.draft_quantize != "auto" and outlook.places[-1].quantize == OWN_INT8:
            raise SettingsError(
                f"`{names[-1]}` cannot run with int8 weights: its code looks at the weights of its layers",
                hint="use `--draft-quantize none`",
            )
        progress.note(f"{' or '.join(names)} looks at the weights of its layers, and so runs without the faster ones")
        plain = settings if settings.draft_quantize != "auto" else replace(settings, draft_quantize="none")
        outlook = examine(folders, plain)
        outlook.refuse()
        loaded = load_and_try(folders, outlook, sizes, plain, progress, plain_layers=True)
        assert loaded is not None
    cached, places = loaded
    draft = cached[1] if len(cached) > 1 else None
    return Pair(cached[0], draft, codec, settings, places, load_costs(places), translation=translation)


def load_and_try(
    folders: Sequence[Located],
    outlook: Outlook,
    vocab_sizes: Sequence[int],
    settings: ModelSettings,
    progress: Progress,
    *,
    plain_layers: bool = False,
) -> tuple[list[Any], tuple[Placement, ...]] | None:
    """The models, the target first, each run once to see that it can be; and where they are.

    None where a model's own code does not leave the weights of its layers to the layers: with `plain_layers` it may.
    """
    places = list(outlook.places)
    models = load_models(folders, places, outlook, vocab_sizes, settings, progress, plain_layers=plain_layers)
    try:
        cached = [
            model if isinstance(model, Int4Model) else CachedModel(model, name=place.name, vocab_size=size)
            for model, place, size in zip(models, places, vocab_sizes, strict=False)
        ]
    except AttributeError:
        if plain_layers:
            raise
        return None
    return cached, tuple(places)


def load_models(
    folders: Sequence[Located],
    places: list[Placement],
    outlook: Outlook,
    vocab_sizes: Sequence[int],
    settings: ModelSettings,
    progress: Progress,
    *,
    plain_layers: bool = False,
) -> list[Any]:
    """The models of these folders, placed. The target's layers are brought into shape while the draft is read.

    A draft model whose int4 form cannot be had gets another place.
    """
    models: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        shaping: list[Future[int]] = []
        for index, (located, empty) in enumerate(zip(folders, outlook.skeletons, strict=True)):
            # Making skeletons, as preparing weights does, changes how all threads make layers.
            source = Source(located, empty, vocab_sizes[index], settings, progress, alone=lambda: wait(shaping))
            model, places[index] = load_placed(source, places[index])
            models.append(model)
            if places[index].quantize not in (OWN_INT8, OWN_INT4) and not plain_layers:
                shaping.append(pool.submit(speed_up_linears, model))
        for one in shaping:
            one.result()
    return models


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
    if place.quantize not in (OWN_INT4, OWN_INT8):
        return load_model(source.located, place, source.settings, source.progress), place
    with join_team(source.settings.processes).in_turn():  # what one has prepared, others only read
        if place.quantize == OWN_INT4:
            try:
                return load_int4(source, place), place
            except Int4Error as error:
                place = place_without_int4(source, place, error)
        if place.quantize == OWN_INT8:
            model = read_int8(source.located, place, source.empty, source.progress)
            if model is None:
                source.alone()
                model = prepare_int8(source.located, place, source.settings, source.progress)
            return model, place
        return load_model(source.located, place, source.settings, source.progress), place


def with_assistant(pair: Pair, progress: Progress | None = None) -> Pair:
    """The pair with its draft model as it is without quantisation, for transformers' own assisted generation."""
    if pair.draft is None or pair.placements[1].quantize == NONE:
        return pair
    place = pair.placements[1]
    located = Located(place.name, pair.draft.path, place.name)
    settings = replace(pair.settings, draft_quantize="none")
    (device,) = place.device_map.values()
    plain = replace(place, dtype=choose_dtype(settings.dtype, torch.device(device)), quantize=NONE)
    with quiet_libraries():
        assistant = load_model(located, plain, settings, progress or Silent())
    speed_up_linears(assistant)
    return replace(pair, assistant=assistant)


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
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(f"loading `{place.name}` ({gigabytes(place.weight_bytes)})") from error
    except Exception as error:  # files may hold anything, and their readers raise anything about it
        if "can't allocate memory" in str(error):
            raise out_of_memory(f"loading `{place.name}` ({gigabytes(place.weight_bytes)})") from error
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


def where(place: Placement, settings: ModelSettings) -> dict[str, Any]:
    """What the loader is told about the place of a model."""
    if place.processes > 1:
        return {"distributed_config": DistributedConfig(tp_size=place.processes, tp_plan="auto")}
    return {"device_map": place.device_map, "offload_folder": settings.offload_folder}


def read_int8(located: Located, place: Placement, empty: Skeleton, progress: Progress) -> Any | None:
    """The model with the int8 weights that an earlier run prepared, None where there are none that fit."""
    progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)}, int8)", None)
    try:
        state = read_prepared(prepared_file(located.path))
        return None if state is None else fill(empty.model, state)
    except ValueError:  # of another version of the library, or of the model's config
        return None
    finally:
        progress.finish()


def prepare_int8(located: Located, place: Placement, settings: ModelSettings, progress: Progress) -> Any:
    """The model with int8 weights, made now and kept for later runs."""
    needed = 4 * place.weight_bytes  # as it is stored (16 bits), and its int8 form twice
    require_memory(needed, f"preparing int8 weights of `{place.name}`")
    model = load_model(located, replace(place, dtype=torch.bfloat16, quantize=NONE), settings, progress)
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
    finally:
        progress.finish()


def load_int4(source: Source, place: Placement) -> Int4Model:
    """The model with the int4 weights that an earlier run prepared, or that are made now and kept.

    Raises `Int4Error` where they cannot be made or are not right on this machine.
    """
    folder = int4_folder(source.located.path)
    if (model := kept_int4(source, place, folder)) is not None:
        return model
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f"{folder.name}.lock"), f"int4 weights of {place.name}", source.progress):
            if (model := kept_int4(source, place, folder)) is not None:
                return model  # another process was faster
            source.alone()
            prepare_int4(source, place, folder)
            return read_int4(source, place, folder)
    except Int4Error as error:
        give_up(folder, error)
        raise
    except OSError as error:
        raise Int4Error(f"`{folder.parent}` cannot be written: {error.strerror}") from error


def kept_int4(source: Source, place: Placement, folder: Path) -> Int4Model | None:
    """The model that an earlier run prepared; None where there is none that works: it is made again."""
    try:
        return read_int4(source, place, folder) if folder.is_dir() else None
    except Int4Error:
        return None


def read_int4(source: Source, place: Placement, folder: Path) -> Int4Model:
    """The model of a prepared folder, compared with the plain one. Raises `Int4Error`."""
    source.progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)}, int4)", None)
    try:
        config = source.empty.model.config
        model = Int4Model(open_session(folder), config, name=place.name, vocab_size=source.vocab_size)
        check(model, folder)
        return model
    finally:
        source.progress.finish()


def prepare_int4(source: Source, place: Placement, folder: Path) -> None:
    """Make and keep the int4 form of a model, with the plain model's logits to check it by. Raises `Int4Error`."""
    plain = replace(place, dtype=torch.bfloat16, quantize=NONE)
    require_memory(INT4_BUILD * source.empty.num_parameters, f"preparing int4 weights of `{place.name}`")
    reference = reference_reads(
        CachedModel(load_model(source.located, plain, source.settings, source.progress), name=place.name)
    )
    source.progress.start(f"preparing int4 weights of {place.name}, once (a minute or so)", None)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        build(source.located.path, folder, reference)
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


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps the libraries' progress bars and warnings off the terminal: what matters is checked here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    accelerate = logging.getLogger("accelerate")
    level = accelerate.level
    accelerate.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        accelerate.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def versions(libraries: Iterable[str] = ()) -> dict[str, str]:
    """Versions of what the result depends on, the libraries that quantised its weights included."""
    packages = {"fly": "fly-decode", "torch": "torch", "transformers": "transformers", "accelerate": "accelerate"}
    packages |= {name: name for name in libraries}
    return {name: version(package) for name, package in packages.items()} | {"python": python_version()}
