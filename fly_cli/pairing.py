"""What stands against a pair before any weight is read: the rules that `fly check` tells and that loading goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from .cache_layers import CacheLayers, cache_layers, not_rewindable
from .errors import FlyError, OutOfMemoryError, UnsupportedModelError
from .placement import Placement, Skeleton, free_memory, plan, skeleton
from .settings import ModelSettings
from .text import one_line
from .vocabulary import Match, Vocabularies, compare_vocabularies
from .weights import Located

# How a draft model works where its ids match the target's so; a kind that is not here is refused.
DRAFTS = {
    Match.SAME: "drafts with the ids of the target",
    Match.PADDED: "drafts with the ids that both have",
}


@dataclass(frozen=True)
class Outlook:
    """What is known of a target, and perhaps a draft, without their weights. Sequences have the target first."""

    skeletons: tuple[Skeleton, ...]
    end_ids: tuple[frozenset[int], ...]
    layers: tuple[CacheLayers, ...]
    vocabularies: Vocabularies | None  # None: no draft model
    places: tuple[Placement, ...]  # where they do not fit: as if memory had no end
    free: dict[int | str, int]  # bytes of each device that the plan could take
    problems: tuple[FlyError, ...]  # why the pair cannot run

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the embedding tables."""
        return tuple(rows_of(one) for one in self.skeletons)

    def refuse(self) -> None:
        """Raise the first problem, if there is one."""
        if self.problems:
            raise self.problems[0]


def examine(folders: Sequence[Located], settings: ModelSettings) -> Outlook:
    """What is known of the models in these folders: the target's, then perhaps the draft's.

    Raises for a folder that makes no model, and for settings that fit no device or model; what stands against the
    pair is told in `problems`.
    """
    trust = settings.trust_remote_code
    names = [settings.target, str(settings.draft)][: len(folders)]
    named = [(name, folder.path) for name, folder in zip(names, folders, strict=True)]
    skeletons = [skeleton(name, path, trust_remote_code=trust) for name, path in named]
    ends = [end_ids(name, path, one.model.config) for (name, path), one in zip(named, skeletons, strict=True)]
    layers = [cache_layers(one.name, one.model) for one in skeletons]
    problems: list[FlyError] = [
        not_rewindable(one.name, one.model)
        for one, kinds in zip(skeletons, layers, strict=True)
        if not kinds.rewindable
    ]
    vocabularies = None
    if len(folders) > 1:
        rows = (rows_of(skeletons[0]), rows_of(skeletons[1]))
        vocabularies = compare_vocabularies(folders[0].path, folders[1].path, rows=rows, trust_remote_code=trust)
        if vocabularies.kind not in DRAFTS:
            problems.append(cannot_draft(names[1], names[0], vocabularies))
    free = free_memory(settings.max_memory)
    places, shortage = plan_anyway(skeletons, settings, free)
    problems += [shortage] if shortage else []
    return Outlook(tuple(skeletons), tuple(ends), tuple(layers), vocabularies, places, free, tuple(problems))


def plan_anyway(
    skeletons: Sequence[Skeleton], settings: ModelSettings, free: dict[int | str, int]
) -> tuple[tuple[Placement, ...], OutOfMemoryError | None]:
    """The places, and why they do not do: then they are those that a machine with memory without end would have."""
    target, draft = skeletons[0], skeletons[1] if len(skeletons) > 1 else None
    shortage = None
    try:
        places = plan(target, draft, settings, free)
    except OutOfMemoryError as error:
        shortage = error
        places = plan(target, draft, settings, dict.fromkeys(free, 2**60))
    return tuple(place for place in places if place is not None), shortage


def cannot_draft(draft: str, target: str, vocabularies: Vocabularies) -> UnsupportedModelError:
    """What is told of a draft whose ids are others than the target's."""
    return UnsupportedModelError(
        f"`{draft}` cannot draft for `{target}`: {vocabularies.describe()}",
        hint="choose a draft model of the same family, or `--draft lookup`, which needs none",
    )


def rows_of(model: Skeleton) -> int:
    """The rows of a model's embedding table."""
    return int(model.model.config.get_text_config(decoder=True).vocab_size)


def end_ids(name: str, folder: Path, config: Any) -> frozenset[int]:
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
    return frozenset(found)
