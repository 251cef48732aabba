"""Effective settings and where each came from: defaults < `fly tune` < YAML file < `FLY_*` environment < flags.

The YAML file is flat: setting names as the flags have them with underscores, and two tables of names:

    draft_tokens: 12
    stop: ["\\n\\n"]
    aliases: {my-model: /data/my-model}     # name -> folder, hub id, .gguf file, or a catalog entry
    pairs: {my-model: qwen-coder-0.5b}      # target -> its draft

The environment has one variable for each setting, `FLY_DRAFT_TOKENS` for `draft_tokens`; an empty one counts as
unset, a list may be written as a YAML list. Other `FLY_*` variables are left alone, unless they look like a slip.
Paths that a file names (`chat_template`, a `device_map` file) start at that file's folder.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from .errors import FlyError, SettingsError
from .settings import (
    LOOKUP,
    MAX_DRAFT_TOKENS,
    DecodeSettings,
    ModelSettings,
    TextSettings,
    check_choice,
    is_template_name,
)
from .tuned import Tuned, how_loaded
from .yaml_text import read_yaml

COLORS = ("auto", "always", "never")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu", "hpu")
OTHER_VARIABLES = ("FLY_CONFIG", "FLY_CACHE")
SLIPS = {"theta": "entropy_threshold", "k": "draft_tokens", "w": "window_size", "n": "max_new_tokens"}
TABLES = ("aliases", "pairs")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)", re.IGNORECASE)
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """What the user sees besides the answer."""

    color: str = "auto"
    show_rejected: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        check_choice("color", self.color, COLORS)
        if self.quiet and self.verbose:
            raise SettingsError("`quiet` and `verbose` exclude each other", hint="give one of them")


class Layer(IntEnum):
    """Where a value came from; a higher layer wins."""

    DEFAULT = 0
    TUNED = 1
    FILE = 2
    ENVIRONMENT = 3
    FLAG = 4


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value and its origin, such as `config.yaml:draft_tokens`, `FLY_SEED` or `--seed`."""

    value: Any
    layer: Layer
    origin: str


class Drafts(Protocol):
    """What is needed of a catalog, the user's own pairs included: the draft that goes with a target, if known."""

    def draft_for(self, target: str) -> str | None: ...


GROUPS: tuple[type, ...] = (ModelSettings, DecodeSettings, TextSettings, OutputSettings)
NOT_SET = ("processes",)  # by any layer: the launcher says how many there are
DEFAULTS: dict[str, Any] = {
    field.name: field.default for group in GROUPS for field in fields(group) if field.name not in NOT_SET
}
TYPES: dict[str, Any] = {
    name: kind for group in GROUPS for name, kind in get_type_hints(group).items() if name in DEFAULTS
}


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting's value with its origin, and the user's own names."""

    values: Mapping[str, Value]
    aliases: Mapping[str, Any]
    pairs: Mapping[str, str]
    file: Path | None  # the file that was read

    def given(self, *names: str, least: Layer = Layer.FILE) -> list[str]:
        """Those of `names` that were set by hand, at layer `least` or above."""
        return [name for name in names if self.values[name].layer >= least]

    def group(self, kind: type, **replaced: Any) -> Any:
        """The settings object of class `kind`. An error in it says where the bad value came from."""
        names = [field.name for field in fields(kind) if field.name in DEFAULTS]
        chosen = {name: self.values[name].value for name in names} | replaced
        try:
            return kind(**chosen)
        except SettingsError as error:
            raise self.blame(error) from None

    def blame(self, error: FlyError) -> SettingsError:
        """The same error, with settings called what the user called them."""

        def user_name(match: re.Match[str]) -> str:
            value = self.values.get(match[1])
            if value is None or value.layer <= Layer.TUNED:
                return match[0]
            return f"`{match[1]}` ({value.origin})" if value.layer is Layer.FILE else f"`{value.origin}`"

        return SettingsError(re.sub(r"`(\w+)`", user_name, error.message), error.hint)


@dataclass(frozen=True, slots=True)
class Effective:
    """The checked settings of one command."""

    decode: DecodeSettings
    models: ModelSettings
    text: TextSettings
    output: OutputSettings
    values: Mapping[str, Value]  # as in `Config`, dependent defaults filled in
    notes: tuple[str, ...]  # things the user should know, one line each
    layers: Config  # what they were made from, with what was tuned


def load_config(
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    default_file: Path,
    file: Path | None = None,
) -> Config:
    """All layers put together. `flags` holds those that were given, `file` is `--config`.

    Raises `SettingsError` for a missing `file`, an unknown key, and a value of the wrong type.
    """
    values = {name: Value(default, Layer.DEFAULT, "default") for name, default in DEFAULTS.items()}
    path, origin = file, "--config"
    if path is None and environment.get("FLY_CONFIG"):
        path, origin = Path(environment["FLY_CONFIG"]), "FLY_CONFIG"
    path = Path(os.path.expanduser(path or default_file))
    content: dict[str, Any] = {}
    found = os.path.isfile(path)
    if found:
        content = read_file(path)
    elif path != default_file:
        raise SettingsError(f"`{origin}` names {path}, and there is no such file", hint="check the path")
    tables = {name: read_table(path, name, content.pop(name, None)) for name in TABLES}
    values |= file_values(path, content)
    values |= environment_values(environment)
    values |= {
        name: Value(convert(name, flag, flag_name(name)), Layer.FLAG, flag_name(name)) for name, flag in flags.items()
    }
    return Config(values, tables["aliases"], tables["pairs"], path if found else None)


def resolve(config: Config, catalog: Drafts, tuned: Sequence[Tuned] = ()) -> Effective:
    """The settings objects, checked alone and together, with notes on what will have no effect.

    `tuned` is what `fly tune` found on this machine.
    """
    output = config.group(OutputSettings)
    device_map = read_device_map(config.values["device_map"])
    max_memory = check_max_memory(config.values["max_memory"])
    draft, note = choose_draft(config, catalog)
    config = replace(config, values=with_tuned(config.values, str(draft.value), tuned))
    decode = config.group(DecodeSettings)
    models = config.group(ModelSettings, device_map=device_map, max_memory=max_memory, draft=draft.value)
    check_device("draft_device", config.values["draft_device"])
    text = config.group(TextSettings, chat_template=read_template(config.values["chat_template"]))
    notes = [*note, *window_notes(config, decode, models), *idle_notes(config, decode, models)]
    values = {**config.values, "draft": draft}
    if decode.entropy_threshold is not None and is_default(config.values["entropy_threshold"]):
        values["entropy_threshold"] = Value(decode.entropy_threshold, Layer.DEFAULT, f"default of {decode.entropy}")
    return Effective(decode, models, text, output, values, tuple(notes), config)


# --- layers ---------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file ({} for an empty one)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not YAML: {error}", hint="save it as UTF-8 text") from None
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", hint="check the path and its permissions"
        ) from None
    content = read_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}", hint="write one `name: value` a line")
    return content


def read_table(path: Path, name: str, content: object) -> dict[str, Any]:
    """`aliases` or `pairs` of a config file."""
    if content is None:
        return {}
    kinds = (str, dict) if name == "aliases" else (str,)
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, kinds) for key, value in content.items()
    ):
        example = "my-model: /path/or/hub-id" if name == "aliases" else "my-model: its-draft"
        raise SettingsError(f"{path}: `{name}` is not a table of names", hint=f"write it as `{name}: {{{example}}}`")
    return content


def file_values(path: Path, content: Mapping[Any, Any]) -> dict[str, Value]:
    """The settings of a config file; a key without a value leaves the default."""
    values = {}
    for key, raw in content.items():
        if key not in TYPES:
            raise SettingsError(f"{path} has an unknown key `{key}`", hint=did_you_mean(str(key), (*TYPES, *TABLES)))
        if raw is not None:
            value = convert(key, raw, f"{path}: `{key}`")
            if key == "chat_template" or (key == "device_map" and is_file_name(value)):
                beside = path.parent / os.path.expanduser(value)
                value = value if is_template_name(value) and not os.path.isfile(beside) else str(beside)
            values[key] = Value(value, Layer.FILE, f"{path}:{key}")
    return values


def environment_values(environment: Mapping[str, str]) -> dict[str, Value]:
    """The settings that `FLY_*` variables give."""
    known = {f"FLY_{name.upper()}": name for name in TYPES}
    values = {}
    for variable, text in environment.items():
        if variable in known and text:
            name = known[variable]
            values[name] = Value(convert(name, parse(name, text), f"`{variable}`"), Layer.ENVIRONMENT, variable)
        elif variable.startswith("FLY_") and variable not in (*known, *OTHER_VARIABLES):
            refuse_slip(variable, (*known, *OTHER_VARIABLES))
    return values


def refuse_slip(variable: str, known: Iterable[str]) -> None:
    """Raise for a variable that is nearly one of ours; others may belong to another program."""
    slip = SLIPS.get(variable.removeprefix("FLY_").lower())
    near = [f"FLY_{slip.upper()}"] if slip else difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
    if near:
        raise SettingsError(f"`{variable}` is no variable of fly", hint=f"did you mean `{near[0]}`?")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest of `known`, or all of them."""
    known = tuple(known)
    name = name.lower().replace("-", "_")
    near = [SLIPS[name]] if name in SLIPS else difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known are {', '.join(sorted(known))}"


def flag_name(setting: str) -> str:
    """What the command line calls a setting."""
    return "--" + setting.replace("_", "-")


# --- types ----------------------------------------------------------------------------------------------------------


def parse(name: str, text: str) -> object:
    """The value that a variable's text stands for, or the text itself where it stands for nothing of that type."""
    kinds = members(TYPES[name])
    if bool in kinds:
        return TRUTH.get(text.strip().lower(), text)
    if dict in kinds and str not in kinds:
        return parse_max_memory([text])
    if tuple in kinds and text.lstrip().startswith("["):
        try:
            return read_yaml(text, f"`FLY_{name.upper()}`")
        except SettingsError:
            return text
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                return text
    return text


def convert(name: str, value: Any, where: str) -> Any:
    """`value` as the setting's type has it. Raises `SettingsError`, which names `where`, for another type."""
    kinds = members(TYPES[name])
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, int) and int in kinds:
        return value
    elif isinstance(value, int | float) and float in kinds:
        return float(value)
    elif isinstance(value, str) and str in kinds:
        return value
    elif isinstance(value, str | int) and tuple in kinds:
        return (str(value),)
    elif isinstance(value, list | tuple) and tuple in kinds and all(type(item) in (str, int) for item in value):
        return tuple(str(item) for item in value)
    elif isinstance(value, dict) and dict in kinds and all(type(item) in (str, int) for item in value.values()):
        return {str(key): item for key, item in value.items()}
    wanted = " or ".join(WANTED[kind] for kind in kinds if kind in WANTED)
    raise SettingsError(f"{where} is {value!r}, which is not {wanted}", hint=f"give {wanted}")


WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
    dict: "a table",
}


def members(kind: Any) -> tuple[type, ...]:
    """The plain types that a setting may have: `dict[str, str] | None` gives dict and NoneType."""
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(get_origin(option) or option for option in options)


def parse_max_memory(items: Iterable[str]) -> dict[str, str]:
    """`["cpu=20GB,0=40GB"]` as `{"cpu": "20GB", "0": "40GB"}`."""
    sizes = {}
    for item in ",".join(items).split(","):
        device, equals, size = item.partition("=")
        if not equals:
            raise SettingsError(f"`max_memory` is {item!r}", hint="give device=size, such as cpu=20GB or 0=40GB")
        sizes[device.strip()] = size.strip()
    return sizes


def check_max_memory(value: Value) -> dict[str, str] | None:
    """Device -> size, each written as `20GB` or `20GiB` (a small `b` would be read as bits)."""
    if value.value is None:
        return None
    sizes = {}
    for device, size in value.value.items():
        match = SIZE.fullmatch(str(size).strip())
        if not match or not re.fullmatch(r"cpu|disk|mps|\d+", device):
            raise SettingsError(
                f"`max_memory` ({value.origin}) has {device}={size}",
                hint="give cpu or a GPU's number, and a size such as 20GB or 500MiB",
            )
        sizes[device] = match[1] + match[2][:-1].upper().replace("I", "i") + "B"
    return sizes


def is_file_name(device_map: object) -> bool:
    return isinstance(device_map, str) and Path(device_map).suffix in (".yaml", ".yml", ".json")


def read_device_map(value: Value) -> str | dict[str, str | int]:
    """A device's name, or the map module -> device, read from its file where a file is named."""
    device_map: Any = value.value
    if is_file_name(device_map):
        path = Path(os.path.expanduser(device_map))
        if not os.path.isfile(path):  # of any text: pathlib raises for a name too long
            raise SettingsError(
                f"`device_map` ({value.origin}) names {path}, and there is no such file", hint="check the path"
            )
        device_map = read_file(path)
    if isinstance(device_map, str):
        check_device("device_map", value)
        return device_map
    bad = [f"{module}: {device}" for module, device in device_map.items() if type(device) not in (str, int)]
    if bad or not device_map:
        raise SettingsError(
            f"`device_map` ({value.origin}) has {bad[0] if bad else 'no line'}",
            hint="write a line such as `model.layers.0: cpu` for each module; the empty name stands for all",
        )
    return {str(module): device for module, device in device_map.items()}


def check_device(name: str, value: Value) -> None:
    if value.value is None or not isinstance(value.value, str):
        return
    kind, colon, number = value.value.partition(":")
    if kind not in DEVICES or (colon and not number.isdigit()) or (name == "draft_device" and kind == "auto"):
        raise SettingsError(
            f"`{name}` ({value.origin}) is {value.value!r}",
            hint="give a device such as cpu or cuda:0" + (", auto, or a YAML file" if name == "device_map" else ""),
        )


def read_template(value: Value) -> str | None:
    """The text of a chat template's file, or the name of one of the model's own templates."""
    if value.value is None:
        return None
    path = Path(os.path.expanduser(value.value))
    if is_template_name(value.value) and not os.path.isfile(path):
        return str(value.value)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError(
            f"`chat_template` ({value.origin}) names {path}: {reason}",
            hint="give a file with a Jinja template, or the name of one of the model's own",
        ) from None


# --- settings that depend on each other -----------------------------------------------------------------------------


def choose_draft(config: Config, catalog: Drafts) -> tuple[Value, list[str]]:
    """The draft, and a note where none is known for the target."""
    target, draft = config.values["target"], config.values["draft"]
    if draft.layer > Layer.DEFAULT or config.values["mode"].value == "target":
        return draft, []
    known = catalog.draft_for(target.value)
    if known:
        origin = "default" if target.layer is Layer.DEFAULT else f"pair of {target.value}"
        return Value(known, Layer.DEFAULT, origin), []
    note = f"no draft model is known for {target.value}, so drafts are copied from the text; name one with `--draft`"
    return Value(LOOKUP, Layer.DEFAULT, f"no draft known for {target.value}"), [note]


def with_tuned(values: Mapping[str, Value], draft: str, tuned: Sequence[Tuned]) -> dict[str, Value]:
    """The values, with what was tuned for this pair, loaded so, in the place of defaults.

    A tuned window or draft length that does not fit what is given by hand stays out.
    """
    loaded = how_loaded({name: value.value for name, value in values.items()})
    changed = dict(values)
    for one in tuned:
        if (one.target, one.draft, one.models) != (values["target"].value, draft, loaded):
            continue
        for name, value in one.settings.items():
            if is_default(values[name]) and (name != "entropy_threshold" or is_default(values["entropy"])):
                changed[name] = Value(convert(name, value, "`fly tune`"), Layer.TUNED, f"fly tune, {one.date}")
    if changed["window_size"].value >= changed["draft_tokens"].value:
        changed |= {name: values[name] for name in ("window_size", "draft_tokens")}
    return changed


def is_default(value: Value) -> bool:
    return value.layer is Layer.DEFAULT


def window_notes(config: Config, decode: DecodeSettings, models: ModelSettings) -> list[str]:
    """A note where no window fits in a draft. Raises `SettingsError` where both were given so by hand."""
    k, window = decode.draft_tokens, decode.window_size
    if decode.mode != "fly" or window < k or k == 0 or models.draft == LOOKUP:
        return []
    if len(config.given("draft_tokens", "window_size")) == 2:
        raise config.blame(
            SettingsError(
                f"`window_size` {window} leaves nothing to forgive in {k} draft tokens (`draft_tokens`)",
                hint="use `--draft-tokens 15 --window-size 6`, or any window smaller than the draft",
            )
        )
    if config.given("window_size") and window < MAX_DRAFT_TOKENS:
        fits = f"`--draft-tokens {min(MAX_DRAFT_TOKENS, max(window + 1, round(window * 2.5)))}`"
    else:
        fits = f"`--window-size {min(k - 1, max(1, round(k * 0.4)))}`"
    return [f"a window of {window} does not fit in a draft of {k}, so nothing can be deferred; {fits} fits"]


def idle_notes(config: Config, decode: DecodeSettings, models: ModelSettings) -> list[str]:
    """One note for each reason why flags given by hand have no effect."""
    relaxed = ("window_size", "entropy", "entropy_top_k", "entropy_threshold", "strict_first")
    of_model = ("draft_lookup", "draft_device", "draft_quantize", "compile")
    drafting = ("draft", "draft_tokens", *of_model)
    idle = [
        (decode.mode == "target", "in mode target", (*drafting, *relaxed)),
        (decode.mode == "exact", "in mode exact", relaxed),
        (decode.mode == "fly" and decode.entropy == "normalized", "with normalized entropy", ("entropy_top_k",)),
        (decode.mode != "target" and models.draft == LOOKUP, "without a draft model", (*of_model, *relaxed)),
        (decode.temperature == 0, "at temperature 0", ("top_p", "top_k", "seed")),
    ]
    notes = []
    for applies, reason, names in idle:
        flags = config.given(*names, least=Layer.FLAG) if applies else []
        if flags:
            verb = "does" if len(flags) == 1 else "do"
            notes.append(f"{', '.join(f'`{flag_name(name)}`' for name in flags)} {verb} nothing {reason}")
    return notes
