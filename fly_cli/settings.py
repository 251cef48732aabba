"""Settings of a run: frozen, validated when made.

`DecodeSettings` says how tokens are drafted, judged and chosen; `ModelSettings` which models, and where they run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import SettingsError
from .json_text import MAX_INTEGER

MODES = ("fly", "exact", "target")
ENTROPY_KINDS = ("topk", "normalized")
SCHEDULES = ("adaptive", "constant")
QUANTIZATIONS = ("none", "int8", "int4")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
COMPILE = ("auto", "on", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_THRESHOLDS = {"topk": 0.3, "normalized": 0.05}
DEFAULT_TARGET = "qwen-coder-1.5b"
DEFAULT_DRAFT = "qwen-coder-0.5b"
MAX_DRAFT_TOKENS = 1024
TEMPLATE_NAME = re.compile(r"[\w-]+")
LOOKUP = "lookup"  # the drafter that needs no draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How to decode one prompt.

    Modes are settings: `exact` is `fly` with the gate off (`entropy_threshold` None), `target` is a draft
    of 0 tokens. In mode `fly` an `entropy_threshold` of None means the default of the entropy kind.

    Raises `SettingsError` for a value out of its range.
    """

    mode: str = "fly"
    draft_tokens: int = 15  # K, tokens drafted a round at most
    window_size: int = 6  # W, drafted tokens after a mismatch that must all match
    entropy: str = "topk"
    entropy_top_k: int = 3
    entropy_threshold: float | None = None  # theta: nats for `topk`, a share of ln V for `normalized`
    strict_first: int = 2  # first new tokens in which every mismatch is rejected
    draft_schedule: str = "adaptive"  # as many as pay, `draft_tokens` at most; or constant: always so many
    draft_lookup: bool = True  # copy repeated text: inside the draft model's drafting, and straight to the target
    max_new_tokens: int = 512
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    seed: int | None = None  # None: drawn anew for each run, and reported
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("mode", self.mode, MODES)
        check_choice("entropy", self.entropy, ENTROPY_KINDS)
        check_choice("draft_schedule", self.draft_schedule, SCHEDULES)
        check_range("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        check_range("window_size", self.window_size, 0, 1024)
        check_range("entropy_top_k", self.entropy_top_k, 1, 1024)
        check_range("strict_first", self.strict_first, 0)
        check_range("max_new_tokens", self.max_new_tokens, 1)
        check_range("temperature", self.temperature, 0.0)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("top_k", self.top_k, 0)
        if self.seed is not None:
            check_range("seed", self.seed, 0, MAX_INTEGER)
        if self.entropy_threshold is not None:
            check_range("entropy_threshold", self.entropy_threshold, 0.0)
        if "" in self.stop:
            raise SettingsError("`stop` has an empty string", hint="give each stop string at least one character")
        threshold, draft_tokens = self.entropy_threshold, self.draft_tokens
        if self.mode != "fly":
            threshold = None
        elif threshold is None:
            threshold = DEFAULT_THRESHOLDS[self.entropy]
        if self.mode == "target":
            draft_tokens = 0
        object.__setattr__(self, "entropy_threshold", threshold)
        object.__setattr__(self, "draft_tokens", draft_tokens)

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON values, names unchanged."""
        return {**asdict(self), "stop": list(self.stop)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which models, and where they run. Raises `SettingsError` for a value out of its range."""

    target: str = DEFAULT_TARGET  # alias, folder, hub id or .gguf file
    draft: str | None = DEFAULT_DRAFT  # the same, or "lookup"; None: no drafter (mode `target`)
    dtype: str = "auto"
    device_map: str | dict[str, str | int] = "auto"  # auto, a device, or a map module -> device
    draft_device: str | None = None  # None: planned together with the target
    quantize: str = "none"  # weights of the target, never in fewer bits unless asked
    draft_quantize: str = "auto"  # weights of the draft model; auto: the fastest form on a CPU
    compile: str = "auto"  # the steps of the draft model; auto: on a GPU, where it is right and faster
    max_memory: dict[str, str] | None = None  # device -> size such as "20GB"
    offload_folder: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    allow_missing_weights: bool = False
    processes: int = 1  # that share the target, each with a part of it; not the user's to set, but the launcher's

    def __post_init__(self) -> None:
        for name in ("target", "draft", "offload_folder"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_types(self)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("quantize", self.quantize, QUANTIZATIONS)
        check_choice("draft_quantize", self.draft_quantize, DRAFT_QUANTIZATIONS)
        check_choice("compile", self.compile, COMPILE)
        check_range("processes", self.processes, 1)
        for name in ("target", "draft"):
            if getattr(self, name) == "":
                raise SettingsError(
                    f"`{name}` is empty", hint="give an alias (`fly models` lists them), a path or a hub id"
                )

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON values, names unchanged."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How prompts become ids and ids become text."""

    system: str | None = None
    raw: bool = False  # no chat template: the prompt's bytes as they are
    chat_template: str | None = None  # a Jinja template's text, or None for the model's own
    stop_token: tuple[str, ...] = ()  # further tokens (text or id) that end the answer
    show_special: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.raw and (self.system is not None or self.chat_template is not None):
            raise SettingsError(
                "`raw` sends the prompt without a chat template, so `system` and `chat_template` have no place",
                hint="drop `--raw`, or drop `--system` and `--chat-template`",
            )


def check_types(settings: Any) -> None:
    """Raise `SettingsError` for a value that its field's type does not allow.

    A field of many strings takes any iterable of them, and one string as itself alone; it becomes a tuple.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if get_origin(hint) is tuple and isinstance(value, Iterable):
            value = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(settings, name, value)
        if not fits(value, hint):
            raise SettingsError(f"`{name}` is {value!r}", hint=f"give {in_words(hint)}")


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a field's type: ints are floats too, but no bool is a number."""
    match get_origin(hint):
        case origin if origin is Union or origin is UnionType:
            return any(fits(value, one) for one in get_args(hint))
        case origin if origin is tuple:
            return isinstance(value, tuple) and all(fits(one, get_args(hint)[0]) for one in value)
        case origin if origin is dict:
            of_key, of_value = get_args(hint)
            return isinstance(value, dict) and all(fits(k, of_key) and fits(v, of_value) for k, v in value.items())
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", NoneType: "None"}


def in_words(hint: Any) -> str:
    """What values a field's type allows."""
    match get_origin(hint):
        case origin if origin is Union or origin is UnionType:
            return " or ".join(map(in_words, get_args(hint)))
        case origin if origin is tuple:
            return "a sequence of strings"
        case origin if origin is dict:
            key, value = map(in_words, get_args(hint))
            return f"a dict from {key} to {value}"
    return WORDS[hint]


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"`{name}` is {value!r}", hint=f"choose one of {', '.join(choices)}")


def check_range(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        value = math.copysign(math.inf, value > 0 or -1)  # a float cannot hold it, and perhaps no text shows it
    too_low = value <= low if open_low else value < low
    if math.isnan(value) or math.isinf(value) or too_low or value > high:
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise SettingsError(
            f"`{name}` is {value}", hint=f"give a number {'above' if open_low else 'of at least'} {low:g}{upper}"
        )


def is_template_name(text: str) -> bool:
    """Whether the text is a bare word: the name of a chat template, never a template itself."""
    return TEMPLATE_NAME.fullmatch(text) is not None
