"""Loads a target and a draft model as a pair that can decode together."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from .cached_model import CachedModel, DraftModel
from .catalog import Catalog, load_catalog
from .compiled import CompileError, compiled
from .costs import load_costs, measure_costs, store_costs
from .cpu_attention import speed_up_attention
from .cpu_linear import keep_fast_linears, speed_up_linears
from .descriptions import locate_description
from .errors import SettingsError
from .hub import is_offline
from .int4_model import Int4Model
from .loading import Source, load_model, load_placed, unquantized
from .lowbit import NONE, OWN_INT4, OWN_INT8, form_of
from .pairing import Outlook, codec_of, examine, translation_of
from .placement import Placement, choose_dtype
from .processes import ALONE, Alone
from .progress import Progress, Silent
from .requirements import PACKAGE, refuse_other_releases
from .schedule import CostTable, guess_costs
from .settings import LOOKUP, ModelSettings, TextSettings
from .skeleton import skeleton
from .spelling import Translation
from .storage import size_text
from .team import join_team, lost_processes
from .text import Codec
from .vocabulary import Match
from .weights import Located, locate


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

    def sizes(self) -> str:
        """What the weights of each model take, for people."""
        return " and ".join(f"{size_text(place.weight_bytes)} of `{place.name}`" for place in self.placements)

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
    refuse_other_releases()
    settings = settings or ModelSettings()
    catalog = catalog or load_catalog()
    progress = progress or Silent()
    team = join_team(settings.processes)
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
    names = [settings.target, str(settings.draft)]
    outlook = examine(folders, settings)
    outlook.refuse()
    codec, translation = codec_of(outlook, folders, 0, text_settings, settings), None
    if outlook.vocabularies is not None and outlook.vocabularies.kind is Match.DIFFERENT:
        translation = translation_of(outlook, folders, codec, settings)
        difference = outlook.vocabularies.describe()
        progress.note(f"`{settings.draft}` drafts for `{settings.target}` by way of the text: {difference}")
    elif outlook.vocabularies is not None and (extra := outlook.vocabularies.describe_extra(*names)):
        progress.note(extra)
    sizes = [codec.vocab_size, translation.draft.codec.vocab_size if translation else codec.vocab_size]
    loaded = load_and_try(folders, outlook, sizes, settings, progress)
    if loaded is None:
        gc.collect()  # what was loaded goes before the same is loaded again
        if settings.draft_quantize != "auto" and outlook.places[-1].quantize == OWN_INT8:
            raise SettingsError(
                f"`{names[1]}` cannot run with int8 weights: its code looks at the weights of its layers",
                hint="use `--draft-quantize none`",
            )
        looks = " or ".join(names[: len(folders)])
        progress.note(f"{looks} looks at the weights of its layers, and so runs without the faster ones")
        plain = settings if settings.draft_quantize != "auto" else replace(settings, draft_quantize="none")
        outlook = examine(folders, plain)
        outlook.refuse()
        loaded = load_and_try(folders, outlook, sizes, plain, progress, whole_weights=True)
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
    whole_weights: bool = False,
) -> tuple[list[Any], tuple[Placement, ...]] | None:
    """The models, the target first, each run once to see that it can be; and where they are.

    A draft model whose int4 form cannot be had gets another place. While it is read the target is tried.
    None where a model's own code does not leave the weights of its layers to the layers: with `whole_weights` it may.
    """
    places = list(outlook.places)
    compiler_reads_it = settings.compile == "on"  # and cannot see into layers of ours
    trying: list[Future[Any]] = []
    speed_up_attention()
    with ThreadPoolExecutor(1) as pool:
        for index, (located, empty) in enumerate(zip(folders, outlook.skeletons, strict=True)):
            # Making skeletons, as preparing weights does, changes how all threads make layers.
            source = Source(located, empty, vocab_sizes[index], settings, progress, alone=lambda: wait(trying))
            model, places[index] = load_placed(source, places[index])
            if has_own_layers(model, places[index]) or (index == 1 and compiler_reads_it):
                faster = None
            else:
                folder = None if whole_weights else folder_of_all(located, settings)
                if folder is not None:
                    keep_fast_linears(model, folder, located.name, progress)
                faster = partial(speed_up_linears, folder=folder, whole_weights=whole_weights)
            trying.append(pool.submit(tried, model, places[index].name, vocab_sizes[index], faster))
    try:
        cached = [one.result() for one in trying]
    except AttributeError:
        if whole_weights:
            raise
        return None
    if len(cached) > 1:
        cached[1], places[1] = with_compiled_steps(cached[1], places[1], settings, progress)
    return cached, tuple(places)


def with_compiled_steps(
    draft: Any, place: Placement, settings: ModelSettings, progress: Progress
) -> tuple[Any, Placement]:
    """The draft model with compiled steps where they are wanted and pay; and its place. Raises `SettingsError`."""
    wanted = settings.compile
    if wanted == "off" or (wanted == "auto" and draft_device(place).type != "cuda"):
        return draft, place
    own = place.quantize if place.quantize in (OWN_INT4, OWN_INT8) else ""
    try:
        if own:
            raise CompileError(f"its {own} weights have kernels of their own")
        progress.start(f"compiling the steps of {place.name} (a minute or two the first time)", None)
        return compiled(draft, faster=wanted == "auto"), replace(place, compiled=True)
    except CompileError as error:
        if wanted == "on":
            raise SettingsError(
                f"`{place.name}` cannot draft with compiled steps: {error}",
                hint="use `--compile auto`" + (own and ", or `--draft-quantize none`"),
            ) from error
        progress.note(f"`{place.name}` drafts without compiled steps: {error}")
        draft.reset()
        return draft, place
    finally:
        progress.finish()


def draft_device(place: Placement) -> torch.device:
    """The one device of a draft model."""
    (device,) = place.device_map.values()
    return torch.device(device)


def has_own_layers(model: Any, place: Placement) -> bool:
    """Whether a model came with faster layers of ours."""
    return isinstance(model, Int4Model) or place.quantize == OWN_INT8


def folder_of_all(located: Located, settings: ModelSettings) -> Path | None:
    """The folder that has all that is in memory; None with parts that other processes share, or random weights."""
    return None if settings.processes > 1 or settings.allow_missing_weights else located.path


def tried(model: Any, name: str, vocab_size: int, faster: Callable[[Any], object] | None) -> Any:
    """A model that has run once, with its layers made `faster` if they can be."""
    if isinstance(model, Int4Model):
        return model
    if faster is not None:
        faster(model)
    return CachedModel(model, name=name, vocab_size=vocab_size)


def with_assistant(pair: Pair, progress: Progress | None = None) -> Pair:
    """The pair with its draft model as it is without quantisation, for transformers' own assisted generation."""
    if pair.draft is None or pair.placements[1].quantize == NONE:
        return pair
    place = pair.placements[1]
    located = Located(place.name, pair.draft.path, place.name)
    settings = replace(pair.settings, draft_quantize="none")
    empty = skeleton(place.name, located.path, trust_remote_code=settings.trust_remote_code)
    plain = unquantized(place, empty, choose_dtype(settings.dtype, draft_device(place)))
    with quiet_libraries():
        assistant = load_model(located, plain, settings, progress or Silent())
    speed_up_linears(assistant)
    return replace(pair, assistant=assistant)


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
    packages = {"fly": PACKAGE, "torch": "torch", "transformers": "transformers", "accelerate": "accelerate"}
    packages |= {name: name for name in libraries}
    return {name: version(package) for name, package in packages.items()} | {"python": python_version()}
