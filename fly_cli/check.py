"""Whether a pair can run here, and what to expect of it, told by configurations and tokenizers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .catalog import Catalog
from .costs import load_costs, stored_costs
from .descriptions import locate_description
from .errors import FlyError, ModelError, OutOfMemoryError
from .models import quiet_libraries
from .pairing import DRAFTS, Outlook, examine
from .placement import bytes_by_device
from .progress import Progress
from .requirements import refuse_other_releases
from .rope import context_length
from .settings import LOOKUP, ModelSettings
from .skeleton import PLANNED_TOKENS
from .vocabulary import Vocabularies, load_tokenizer, special_tokens
from .weights import Located, check_folder


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model, as it would be loaded. Sizes are in bytes."""

    name: str
    source: str
    on_disk: bool  # the weights as well
    model_type: str
    num_parameters: int
    dtype: str
    quantize: str
    weight_bytes: int
    cache_bytes: int  # of `PLANNED_TOKENS` tokens
    devices: Mapping[str, int]  # device -> bytes of weights
    cache_layers: Mapping[str, int]  # what layers remember -> how many of them
    rewindable: bool
    max_length: int | None  # tokens of context


@dataclass(frozen=True, slots=True)
class Check:
    """What is known of a pair before any of its weights is read."""

    settings: ModelSettings
    target: ModelFacts
    draft: ModelFacts | None  # None: no draft model
    vocabularies: Vocabularies | None
    special_tokens: Mapping[str, tuple[str, str]]  # what differs: role -> the target's, the draft's
    free_bytes: Mapping[str, int]  # device -> what the plan could take
    cost_ratio: float | None  # a step of the draft model to a forward of the target
    cost_measured: bool  # on this machine; else it is the ratio of their bytes
    problems: tuple[FlyError, ...]  # why the pair cannot run

    @property
    def runs(self) -> bool:
        return not self.problems

    @property
    def fits(self) -> bool:
        """Whether there is memory for both."""
        return not any(isinstance(problem, OutOfMemoryError) for problem in self.problems)

    @property
    def verdict(self) -> str:
        """In one line."""
        if self.problems:
            return f"cannot run: {self.problems[0].message}"
        if self.draft is None or self.vocabularies is None:
            return "can run: drafts are copied from the text"
        return f"can run: `{self.draft.name}` {DRAFTS[self.vocabularies.kind]}"

    @property
    def notes(self) -> list[str]:
        """What is to be known of a pair that runs."""
        models = [model for model in (self.target, self.draft) if model]
        notes = [f"the weights of `{model.name}` are not on this machine yet" for model in models if not model.on_disk]
        limit = self.draft.max_length if self.draft else None
        if limit and limit < (self.target.max_length or limit + 1):
            notes.append(f"behind {limit} tokens the draft model steps aside, and drafts are copied from the text")
        return notes

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "runs": self.runs,
            "verdict": self.verdict,
            "problems": [{"message": problem.message, "hint": problem.hint} for problem in self.problems],
            "notes": self.notes,
            "target": asdict(self.target),
            "draft": asdict(self.draft) if self.draft else None,
            "vocabularies": asdict(self.vocabularies) if self.vocabularies else None,
            "special_tokens": {role: list(both) for role, both in self.special_tokens.items()},
            "memory": {"fits": self.fits, "free_bytes": dict(self.free_bytes), "planned_tokens": PLANNED_TOKENS},
            "cost": {"ratio": self.cost_ratio, "measured": self.cost_measured},
            "settings": self.settings.as_json(),
        }


def check_pair(settings: ModelSettings, catalog: Catalog, progress: Progress) -> Check:
    """What is known of the pair that `settings` names; of its files only small ones are fetched.

    Raises what `refuse_other_releases`, `locate_description` and `examine` raise, and `ModelError` for a GGUF file
    that is not converted yet.
    """
    refuse_other_releases()
    names = [settings.target] if settings.draft in (None, LOOKUP) else [settings.target, str(settings.draft)]
    with quiet_libraries():
        folders = [described(name, catalog, settings, progress) for name in names]
        outlook = examine(folders, settings)
        specials = differing_specials(folders, outlook, settings) if len(folders) > 1 else {}
    facts = [model_facts(at, folder, outlook) for at, folder in enumerate(folders)]
    costs = load_costs(outlook.places)
    return Check(
        settings=settings,
        target=facts[0],
        draft=facts[1] if len(facts) > 1 else None,
        vocabularies=outlook.vocabularies,
        special_tokens=specials,
        free_bytes={str(device): size for device, size in outlook.free.items()},
        cost_ratio=costs.step_seconds() / costs.verify_seconds(0) if costs.draft else None,
        cost_measured=stored_costs(outlook.places) is not None,
        problems=(*outlook.problems, *(problem for folder in folders if (problem := why_incomplete(folder)))),
    )


def described(name: str, catalog: Catalog, settings: ModelSettings, progress: Progress) -> Located:
    """Where the model's configuration and tokenizer are."""
    found = locate_description(name, catalog, offline=settings.offline, progress=progress)
    if found is None:
        raise ModelError(
            f"`{name}` comes as a GGUF file, and what it is like is not known before that is fetched and converted",
            hint=f"run `fly pull {name}` first",
        )
    return found


def why_incomplete(folder: Located) -> FlyError | None:
    """What a folder of the user's lacks; what the hub has can still be fetched."""
    if folder.weights or folder.source != str(folder.path):
        return None
    try:
        check_folder(folder.path)
    except FlyError as error:
        return error
    return None


def differing_specials(
    folders: Sequence[Located], outlook: Outlook, settings: ModelSettings
) -> dict[str, tuple[str, str]]:
    """The roles in which end and other special tokens differ."""
    target, draft = (
        special_tokens(load_tokenizer(folder.path, trust_remote_code=settings.trust_remote_code), ends)
        for folder, ends in zip(folders, outlook.end_ids, strict=True)
    )
    return target.differences(draft)


def model_facts(at: int, folder: Located, outlook: Outlook) -> ModelFacts:
    """The facts of one model, the target (0) or the draft (1)."""
    model, place, layers = outlook.skeletons[at], outlook.places[at], outlook.layers[at]
    config = model.model.config
    return ModelFacts(
        name=model.name,
        source=folder.source,
        on_disk=folder.weights,
        model_type=config.model_type,
        num_parameters=model.num_parameters,
        dtype=str(place.dtype).removeprefix("torch."),
        quantize=place.quantize,
        weight_bytes=place.weight_bytes,
        cache_bytes=place.cache_bytes,
        devices=bytes_by_device(model, place),
        cache_layers=layers.counts,
        rewindable=layers.rewindable,
        max_length=context_length(config.get_text_config(decoder=True)),
    )
