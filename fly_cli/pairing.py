"""What stands against a pair before any weight is read: the rules that `fly check` tells and that loading goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from .cache_layers import CacheLayers, cache_layers, not_causal, not_rewindable
from .errors import FlyError, OutOfMemoryError, UnsupportedModelError
from .placement import Placement, free_memory, plan
from .settings import ModelSettings, TextSettings
from .skeleton import Skeleton, skeleton
from .spelling import Spelling, Translation
from .text import Codec, one_line
from .vocabulary import Match, Vocabularies, compare_vocabularies, load_tokenizer
from .weights import Located

# How a draft model works where its ids match the target's so.
DRAFTS = {
    Match.SAME: "drafts with the ids of the target",
    Match.PADDED: "drafts with the ids that both have",
    Match.DIFFERENT: "drafts by way of the text, greedily: the tokenizers differ",
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
    tokenizers: tuple[Any, ...] = ()  # where they had to be loaded

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
    problems: list[FlyError] = [error for one in skeletons if (error := not_causal(one.name, one.model.config))]
    problems += [
        not_rewindable(one.name, one.model)
        for one, kinds in zip(skeletons, layers, strict=True)
        if not kinds.rewindable
    ]
    vocabularies = None
    if len(folders) > 1:
        rows = (rows_of(skeletons[0]), rows_of(skeletons[1]))
        vocabularies = compare_vocabularies(folders[0].path, folders[1].path, rows=rows, trust_remote_code=trust)
    free = free_memory(settings.max_memory)
    places, shortage = plan_anyway(skeletons, settings, free)
    problems += [shortage] if shortage else []
    outlook = Outlook(tuple(skeletons), tuple(ends), tuple(layers), vocabularies, places, free, tuple(problems))
    if vocabularies is not None and vocabularies.kind is Match.DIFFERENT:
        outlook = replace(outlook, tokenizers=tuple(load_tokenizer(at.path, trust_remote_code=trust) for at in folders))
        try:
            translation_of(outlook, folders, codec_of(outlook, folders, 0, TextSettings(), settings), settings)
        except UnsupportedModelError as error:
            return replace(outlook, problems=(*problems, error))
    return outlook


def codec_of(
    outlook: Outlook, folders: Sequence[Located], at: int, text: TextSettings, settings: ModelSettings
) -> Codec:
    """The tokenizer of the target (0) or the draft (1), with its prompts and end tokens."""
    loaded = outlook.tokenizers
    tokenizer = loaded[at] if loaded else load_tokenizer(folders[at].path, trust_remote_code=settings.trust_remote_code)
    return Codec(tokenizer, settings=text, end_ids=outlook.end_ids[at], vocab_rows=outlook.rows[at])


def translation_of(outlook: Outlook, folders: Sequence[Located], target: Codec, settings: ModelSettings) -> Translation:
    """How two models with different tokenizers talk. Raises `UnsupportedModelError` where they cannot."""
    draft = codec_of(outlook, folders, 1, TextSettings(raw=not target.chats), settings)
    target_name, draft_name = (one.name for one in outlook.skeletons)
    return Translation(Spelling(target, target_name), Spelling(draft, draft_name))


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


def rows_of(model: Skeleton) -> int:
    """The rows of a model's embedding table."""
    return int(model.model.config.get_text_config(decoder=True).vocab_size)


def end_ids(name: str, folder: Path, config: Any) -> frozenset[int]:
    """End-of-sequence ids of the folder's generation config and of the model's config.

    Raises `UnsupportedModelError` for a file that cannot be read or names something other than ids.
    """
    file = folder / GENERATION_CONFIG_NAME
    # Models that take more than text have a config for it within their own: either may name the ids.
    configs = (config, config.get_text_config(decoder=True))
    listed = [(folder / CONFIG_NAME, getattr(one, "eos_token_id", None)) for one in configs]
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
