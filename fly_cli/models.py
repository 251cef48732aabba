"""Loads a target and a draft model as a pair that can decode together."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from .cached_model import CachedModel
from .catalog import Catalog, load_catalog
from .costs import load_costs, measure_costs, store_costs
from .cpu_linear import speed_up_linears
from .errors import ModelError, SettingsError, UnsupportedModelError, out_of_memory
from .placement import Placement, Skeleton, choose_dtype, gigabytes, plan, skeleton
from .processes import ALONE, Alone
from .progress import Progress, Silent
from .quantized import fill, keep_prepared, prepared_file, quantized_state, read_prepared
from .schedule import CostTable, guess_costs
from .settings import LOOKUP, ModelSettings, TextSettings
from .storage import require_memory
from .team import join_team, lost_processes
from .text import Codec, one_line
from .vocabulary import load_tokenizer, vocabulary_difference
from .weights import Located, locate


@dataclass(frozen=True)
class Pair:
    """A target, perhaps a draft model, and the tokenizer that both share."""

    target: CachedModel
    draft: CachedModel | None
    codec: Codec
    settings: ModelSettings
    placements: tuple[Placement, ...] = ()  # target, then draft
    costs: CostTable = field(default_factory=lambda: guess_costs(4, 1))  # of their forwards on this machine
    team: Alone = ALONE  # the processes that share the target
    assistant: Any = None  # the draft model as transformers would load it, where ours has other weights

    def describe(self) -> dict[str, Any]:
        """Settings, placement, stop ids and versions as JSON values."""
        return {
            "models": self.settings.as_json(),
            "placement": [place.describe() for place in self.placements],
            "stop_ids": sorted(self.codec.stop_ids),
            "vocab_size": self.codec.vocab_size,
            "cost_table": {"digest": self.costs.digest, **self.costs.as_json()},
            "versions": versions(),
        }

    @property
    def models(self) -> list[CachedModel]:
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
    names = [settings.target, settings.draft] if with_draft else [settings.target]
    folders = [locate(str(name), catalog, offline=settings.offline, progress=progress) for name in names]
    with quiet_libraries(), lost_processes():
        pair = assemble(folders, settings, text_settings or TextSettings(), progress)
    return replace(pair, team=team, costs=team.tell(lambda: pair.costs))


def assemble(
    folders: Sequence[Located], settings: ModelSettings, text_settings: TextSettings, progress: Progress
) -> Pair:
    """The pair of models in these folders: the target's, then perhaps the draft's."""
    paths = [place.path for place in folders]
    with_draft = len(paths) > 1
    names = [str(settings.target), str(settings.draft)][: len(paths)]
    trust = settings.trust_remote_code
    if with_draft and (difference := vocabulary_difference(paths[0], paths[1], trust_remote_code=trust)):
        raise UnsupportedModelError(
            f"`{settings.draft}` cannot draft for `{settings.target}`: {difference}",
            hint="choose a draft model of the same family, or `--draft lookup`, which needs none",
        )
    skeletons = [skeleton(name, path, trust_remote_code=trust) for name, path in zip(names, paths, strict=True)]
    ends = [end_ids(name, path, one.model.config) for name, path, one in zip(names, paths, skeletons, strict=True)]
    codec = Codec(
        load_tokenizer(paths[0], trust_remote_code=trust),
        settings=text_settings,
        end_ids=ends[0],
        vocab_rows=skeletons[0].model.config.get_text_config(decoder=True).vocab_size,
    )
    with_shaped = place_and_load(folders, skeletons, codec, settings, progress)
    if with_shaped is None:
        gc.collect()  # what was loaded goes before the same is loaded again
        if settings.draft_quantize == "int8":
            raise SettingsError(
                f"`{settings.draft}` cannot run with int8 weights: its code looks at the weights of its layers",
                hint="use `--draft-quantize none`",
            )
        progress.note(f"{' or '.join(names)} looks at the weights of its layers, and so runs without the faster ones")
        skeletons = [skeleton(name, path, trust_remote_code=trust) for name, path in zip(names, paths, strict=True)]
        plain = replace(settings, draft_quantize="none")
        with_shaped = place_and_load(folders, skeletons, codec, plain, progress, plain_layers=True)
        assert with_shaped is not None
    cached, places = with_shaped
    return Pair(cached[0], cached[1] if with_draft else None, codec, settings, places, load_costs(places))


def place_and_load(
    folders: Sequence[Located],
    skeletons: Sequence[Skeleton],
    codec: Codec,
    settings: ModelSettings,
    progress: Progress,
    *,
    plain_layers: bool = False,
) -> tuple[list[CachedModel], tuple[Placement, ...]] | None:
    """The models, the target first, each run once to see that it can be; and where they are.

    None where a model's own code does not leave the weights of its layers to the layers: with `plain_layers` it may.
    """
    target_place, draft_place = plan(skeletons[0], skeletons[1] if len(skeletons) > 1 else None, settings)
    places = tuple(place for place in (target_place, draft_place) if place is not None)
    models = load_models(folders, places, skeletons, settings, progress, plain_layers=plain_layers)
    try:
        cached = [
            CachedModel(model, name=place.name, vocab_size=codec.vocab_size)
            for model, place in zip(models, places, strict=True)
        ]
    except AttributeError:
        if plain_layers:
            raise
        return None
    return cached, places


def load_models(
    folders: Sequence[Located],
    places: Sequence[Placement],
    skeletons: Sequence[Skeleton],
    settings: ModelSettings,
    progress: Progress,
    *,
    plain_layers: bool = False,
) -> list[Any]:
    """The models of these folders, placed. The target's layers are brought into shape while the draft is read."""
    models: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        shaping = []
        for located, place, empty in zip(folders, places, skeletons, strict=True):
            if place.quantize == "none":
                models.append(load_model(located, place, settings, progress))
                if not plain_layers:
                    shaping.append(pool.submit(speed_up_linears, models[-1]))
                continue
            model = read_int8(located, place, empty, progress)
            if model is None:
                wait(shaping)  # making skeletons changes how all threads make layers
                model = prepare_int8(located, place, settings, progress)
            models.append(model)
        for one in shaping:
            one.result()
    return models


def with_assistant(pair: Pair, progress: Progress | None = None) -> Pair:
    """The pair with its draft model as it is without quantisation, for transformers' own assisted generation."""
    if pair.draft is None or pair.placements[1].quantize == "none":
        return pair
    place = pair.placements[1]
    located = Located(place.name, Path(pair.draft.model.name_or_path), place.name)
    settings = replace(pair.settings, draft_quantize="none")
    (device,) = place.device_map.values()
    plain = replace(place, dtype=choose_dtype(settings.dtype, torch.device(device)), quantize="none")
    with quiet_libraries():
        assistant = load_model(located, plain, settings, progress or Silent())
    speed_up_linears(assistant)
    return replace(pair, assistant=assistant)


def load_model(located: Located, place: Placement, settings: ModelSettings, progress: Progress) -> Any:
    """The model of a local folder, placed. Raises `ModelError` for weights that are missing or of another shape."""
    progress.start(f"loading {place.name} ({gigabytes(place.weight_bytes)})", None)
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
    model = load_model(located, replace(place, dtype=torch.bfloat16, quantize="none"), settings, progress)
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


def end_ids(name: str, folder: Path, config: Any) -> set[int]:
    """End-of-sequence ids of the folder's generation config and of the model's config.

    Raises `UnsupportedModelError` for a file that cannot be read or names something other than ids.
    """
    file = folder / GENERATION_CONFIG_NAME
    listed = [(folder / CONFIG_NAME, getattr(config.get_text_config(decoder=True), "eos_token_id", None))]
    if file.is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except MemoryError:
            raise
        except Exception as error:  # the file may hold anything
            raise UnsupportedModelError(
                f"the {GENERATION_CONFIG_NAME} of `{name}` cannot be read: {one_line(error)}",
                hint=f"mend or remove `{file}`",
            ) from error
        listed.append((file, generation.eos_token_id))
    found: set[int] = set()
    for source, value in listed:
        ids = [one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None]
        if any(type(one) is not int for one in ids):
            raise UnsupportedModelError(
                f"the {source.name} of `{name}` has an `eos_token_id` of {value!r}",
                hint=f"write an id or a list of ids in `{source}`",
            )
        found.update(ids)
    return found


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


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    packages = {"fly": "fly-decode", "torch": "torch", "transformers": "transformers", "accelerate": "accelerate"}
    return {name: version(package) for name, package in packages.items()} | {"python": python_version()}
