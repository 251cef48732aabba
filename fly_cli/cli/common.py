"""Options that commands share, and the way from them to checked settings."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..catalog import Catalog, load_catalog
from ..config import COLORS, DEFAULTS, TYPES, Config, Effective, Value, load_config, parse_max_memory, resolve
from ..errors import UsageError
from ..graphemes import visible_line
from ..machine import processor_name
from ..settings import COMPILE, DRAFT_QUANTIZATIONS, DTYPES, ENTROPY_KINDS, LOOKUP, MODES, QUANTIZATIONS, SCHEDULES
from ..tuned import read_tuned
from .process import is_same_file

NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")

MODELS, DECODING, SAMPLING, PROMPT, OUTPUT = "Models", "Decoding", "Sampling", "Prompt", "Output"


def shown(setting: str) -> str:
    """A setting's default, for the help."""
    return str(DEFAULTS[setting])


def option(
    *names: str,
    panel: str,
    help: str,
    default: str | None = None,
    metavar: str | None = None,
    completions: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """An option without a default of its own: not given is None, and `config` knows the `default` that help tells."""
    if default is not None:
        help = f"{help} [default: {default}]"

    def complete(incomplete: str) -> list[str]:
        return [word for word in completions() if word.startswith(incomplete)] if completions else []

    return typer.Option(
        *names,
        rich_help_panel=panel,
        help=help,
        show_default=False,
        metavar=metavar,
        autocompletion=complete if completions else None,
    )


def model_names() -> Iterable[str]:
    """The aliases of the catalog, the user's own included."""
    config = configure({}, None)
    return load_catalog(config.aliases).entries


# --- models ---------------------------------------------------------------------------------------------------------

Target = Annotated[
    str | None,
    option(
        "--target",
        completions=model_names,
        panel=MODELS,
        default=shown("target"),
        help="Target model: alias, folder, hub id or .gguf file.",
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        completions=lambda: [LOOKUP, *model_names()],
        panel=MODELS,
        default="the target's pair",
        help="Draft model, or 'lookup' to copy from the text instead of running one.",
    ),
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        completions=lambda: DTYPES,
        panel=MODELS,
        default=shown("dtype"),
        help=f"Weights: {', '.join(DTYPES)}.",
    ),
]
DeviceMap = Annotated[
    str | None,
    option(
        "--device-map",
        panel=MODELS,
        default=shown("device_map"),
        help="auto, a device such as cpu or cuda:0, or a YAML file that maps modules to devices.",
    ),
]
DraftDevice = Annotated[
    str | None,
    option("--draft-device", panel=MODELS, default="planned with the target", help="Device of the draft model."),
]
Quantize = Annotated[
    str | None,
    option(
        "--quantize",
        panel=MODELS,
        completions=lambda: QUANTIZATIONS,
        default=shown("quantize"),
        help=f"Weights of the target in fewer bits: {', '.join(QUANTIZATIONS)}. Changes its text. "
        "Needs bitsandbytes on CUDA, torchao elsewhere.",
    ),
]
DraftQuantize = Annotated[
    str | None,
    option(
        "--draft-quantize",
        panel=MODELS,
        completions=lambda: DRAFT_QUANTIZATIONS,
        default=shown("draft_quantize"),
        help=f"Weights of the draft model: {', '.join(DRAFT_QUANTIZATIONS)}. auto: on a CPU int4, or int8; else none.",
    ),
]
Compile = Annotated[
    str | None,
    option(
        "--compile",
        panel=MODELS,
        completions=lambda: COMPILE,
        default=shown("compile"),
        help=f"Compile the draft model's steps: {', '.join(COMPILE)}. auto: on a GPU, where it is faster.",
    ),
]
MaxMemory = Annotated[
    list[str] | None,
    option(
        "--max-memory", panel=MODELS, metavar="DEVICE=SIZE", help="Limit a device, as cpu=20GB,0=40GB. May be repeated."
    ),
]
OffloadFolder = Annotated[
    Path | None,
    option("--offload-folder", panel=MODELS, help="Keep weights that fit nowhere else in this folder (slow)."),
]
Offline = Annotated[bool | None, option("--offline/--no-offline", panel=MODELS, help="Use only what is cached.")]
TrustRemoteCode = Annotated[
    bool | None,
    option("--trust-remote-code/--no-trust-remote-code", panel=MODELS, help="Run Python code that comes with a model."),
]
AllowMissingWeights = Annotated[
    bool | None,
    option(
        "--allow-missing-weights/--no-allow-missing-weights",
        panel=MODELS,
        help="Go on when a model's files lack weights, which then are random.",
    ),
]

# --- decoding -------------------------------------------------------------------------------------------------------

Mode = Annotated[
    str | None,
    option(
        "--mode",
        completions=lambda: MODES,
        panel=DECODING,
        default=shown("mode"),
        help=f"{', '.join(MODES)}: FLy is lossy on purpose; exact gives the target's own text; target drafts nothing.",
    ),
]
DraftTokens = Annotated[
    int | None,
    option(
        "--draft-tokens", "-k", panel=DECODING, default=shown("draft_tokens"), help="Tokens drafted a round at most."
    ),
]
WindowSize = Annotated[
    int | None,
    option(
        "--window-size",
        "-w",
        panel=DECODING,
        default=shown("window_size"),
        help="Drafted tokens that must all match after a mismatch for it to be kept.",
    ),
]
EntropyThreshold = Annotated[
    float | None,
    option(
        "--entropy-threshold",
        "--theta",
        panel=DECODING,
        default="0.3, normalized 0.05",
        help="Keep a mismatch only where the target's entropy is at least this.",
    ),
]
Entropy = Annotated[
    str | None,
    option(
        "--entropy",
        completions=lambda: ENTROPY_KINDS,
        panel=DECODING,
        default=shown("entropy"),
        help=f"{' or '.join(ENTROPY_KINDS)}: nats over the likeliest tokens, or a share of the greatest possible.",
    ),
]
EntropyTopK = Annotated[
    int | None,
    option(
        "--entropy-top-k",
        panel=DECODING,
        default=shown("entropy_top_k"),
        help="Likeliest tokens that topk entropy sums.",
    ),
]
StrictFirst = Annotated[
    int | None,
    option(
        "--strict-first", panel=DECODING, default=shown("strict_first"), help="First new tokens that keep no mismatch."
    ),
]
DraftSchedule = Annotated[
    str | None,
    option(
        "--draft-schedule",
        panel=DECODING,
        completions=lambda: SCHEDULES,
        default=shown("draft_schedule"),
        help="constant: always --draft-tokens; adaptive: as many as pay on this machine, from the model or the text.",
    ),
]
DraftLookup = Annotated[
    bool | None,
    option(
        "--draft-lookup/--no-draft-lookup",
        panel=DECODING,
        default="draft-lookup",
        help="Copy repeated text: for the draft model to check, or straight to the target.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    option(
        "--max-new-tokens", "-n", panel=DECODING, default=shown("max_new_tokens"), help="Length limit of the answer."
    ),
]
Stop = Annotated[
    list[str] | None,
    option("--stop", panel=DECODING, metavar="TEXT", help="Text that ends the answer. May be repeated."),
]
StopToken = Annotated[
    list[str] | None,
    option(
        "--stop-token",
        panel=DECODING,
        metavar="TOKEN",
        help="Further token, as text or id, that ends the answer. May be repeated.",
    ),
]

# --- sampling -------------------------------------------------------------------------------------------------------

Temperature = Annotated[
    float | None,
    option("--temperature", panel=SAMPLING, default="0, greedy", help="Randomness of the choice."),
]
TopP = Annotated[
    float | None,
    option("--top-p", panel=SAMPLING, default="1, off", help="Choose among the likeliest tokens of this total share."),
]
TopK = Annotated[
    int | None, option("--top-k", panel=SAMPLING, default="0, off", help="Choose among this many likeliest tokens.")
]
Seed = Annotated[
    int | None,
    option("--seed", panel=SAMPLING, default="drawn anew", help="The same seed and settings give the same text."),
]

# --- prompt ---------------------------------------------------------------------------------------------------------

System = Annotated[str | None, option("--system", "-s", panel=PROMPT, help="System message of the chat.")]
Raw = Annotated[bool | None, option("--raw/--no-raw", panel=PROMPT, help="Send the prompt without a chat template.")]
ChatTemplate = Annotated[
    Path | None,
    option("--chat-template", panel=PROMPT, help="File with a Jinja chat template, or the name of one of the model's."),
]

# --- output ---------------------------------------------------------------------------------------------------------

Color = Annotated[
    str | None,
    option(
        "--color",
        completions=lambda: COLORS,
        panel=OUTPUT,
        default=shown("color"),
        help="Colours: auto, always or never.",
    ),
]
ShowRejected = Annotated[
    bool | None,
    option("--show-rejected/--no-show-rejected", panel=OUTPUT, help="Keep rejected tokens on the screen, struck out."),
]
ShowSpecial = Annotated[
    bool | None, option("--show-special/--no-show-special", panel=OUTPUT, help="Show special tokens in the text.")
]
Quiet = Annotated[bool | None, option("--quiet/--no-quiet", "-q", panel=OUTPUT, help="Only the answer, and errors.")]
Verbose = Annotated[
    bool | None,
    option("--verbose/--no-verbose", "-v", panel=OUTPUT, help="Also placement, settings and a line for each round."),
]
ConfigFile = Annotated[
    Path | None,
    option(
        "--config", panel=OUTPUT, default="FLY_CONFIG, else the user's config folder", help="YAML file of settings."
    ),
]


def configure(parameters: Mapping[str, Any], file: Path | None) -> Config:
    """All layers of configuration under the flags among a command's `parameters`."""
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in parameters.items()
        if name in TYPES and value not in (None, [], ())
    }
    if "max_memory" in flags:
        flags["max_memory"] = parse_max_memory(flags["max_memory"])
    return load_config(flags, environment=os.environ, default_file=default_config_file(), file=file)


def effective(layers: Config, catalog: Catalog) -> Effective:
    """The settings of a command, with what `fly tune` found on this machine."""
    tuned = [one for one in read_tuned(tuned_file()) if one.machine == this_machine()]
    return resolve(layers, catalog, tuned)


def tuned_file() -> Path:
    return default_config_file().with_name("tuned.yaml")


def this_machine() -> str:
    """What a tuning holds for: the processor, as far as it can be told without importing torch."""
    return f"{processor_name()}, {os.cpu_count()} cores"


def check_output(flag: str, path: Path, inputs: Iterable[Path | str | None]) -> None:
    """Raise `UsageError` where `path` is one of the command's inputs, or goes where its output goes."""
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output"), (sys.stderr, "error")):
        if is_same_file(path, stream):
            raise UsageError(f"`{flag}` names standard {name}: {path}", hint="give it a file of its own")
    for file in inputs:
        if file is not None and is_same_file(path, os.path.expanduser(file)):
            raise UsageError(f"`{flag}` would overwrite {file}, which is read", hint="give it a file of its own")


def read_files(config: Config) -> list[Path | str | None]:
    """Files that the settings name: they are read, and must not be written over."""
    named = (config.values[name].value for name in ("chat_template", "device_map", "target", "draft"))
    return [config.file, *(name for name in named if isinstance(name, str))]


def default_config_file() -> Path:
    return Path(typer.get_app_dir("fly")) / "config.yaml"


def format_values(values: Mapping[str, Value]) -> list[str]:
    """A line for each setting, in the form of a config file, with its origin as a comment."""
    lines = {name: f"{name}: {yaml_value(value.value)}" for name, value in values.items()}
    width = min(40, max(len(line) for line in lines.values()))
    return [f"{line:{width}}  # {yaml_comment(values[name].origin)}" for name, line in lines.items()]


def yaml_value(value: Any) -> str:
    """The value as JSON that is YAML as well: YAML forbids some characters, and ends lines at others."""
    return escape_for_yaml(json.dumps(value, ensure_ascii=False))


def yaml_comment(text: str) -> str:
    """The text on one line that YAML can pass over."""
    return escape_for_yaml(visible_line(text))


def escape_for_yaml(text: str) -> str:
    return NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
