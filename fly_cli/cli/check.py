"""`fly check`: whether a pair can run here, before anything large is fetched or loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..catalog import load_catalog
from ..config import OutputSettings
from ..errors import ExitCode
from ..graphemes import visible_line
from ..json_text import json_text
from ..requirements import refuse_other_releases
from ..storage import size_text
from ..streams import write
from ..theme import ColorPolicy, decide_color
from . import common
from .generate import closing_progress
from .process import quiet_imports
from .talk import Talk

if TYPE_CHECKING:
    from ..check import Check, ModelFacts

Row = tuple[str, str]
LEAST_COLUMNS = 20  # of the report; a narrower terminal wraps its lines, where the library would drop their text
STYLES = {"can run": "green", "cannot run": "red"}  # of a verdict, by its first words


def check(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Target model: alias, folder, hub id or .gguf file. Without one: the configured pair.",
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Argument(help="Draft model, or 'lookup'. Without one: the target's pair.", show_default=False),
    ] = None,
    dtype: common.Dtype = None,
    device_map: common.DeviceMap = None,
    draft_device: common.DraftDevice = None,
    quantize: common.Quantize = None,
    draft_quantize: common.DraftQuantize = None,
    compile: common.Compile = None,
    max_memory: common.MaxMemory = None,
    offload_folder: common.OffloadFolder = None,
    offline: common.Offline = None,
    trust_remote_code: common.TrustRemoteCode = None,
    as_json: Annotated[
        bool, common.option("--json", panel=common.OUTPUT, help="One JSON object: all that is known of the pair.")
    ] = False,
    color: common.Color = None,
    quiet: common.Quiet = None,
    config: common.ConfigFile = None,
) -> None:
    """Tell whether two models can decode together here: vocabularies, caches, context, memory, cost.

    Only configurations and tokenizers are read; of models that are not on this machine only those are fetched. The
    exit code is 0 for a pair that can run and 1 for one that cannot.
    """
    layers = common.configure({**context.params, "mode": "fly"}, config)
    catalog = load_catalog(layers.aliases, layers.pairs)
    settings = common.effective(layers, catalog)
    talk = Talk(settings.output)
    with talk.status("starting"):
        refuse_other_releases()  # whose imports may fail already
        quiet_imports()
        from ..check import check_pair
    with closing_progress(talk.progress()) as progress:
        if talk.policy.live:
            progress.start("reading configurations and tokenizers", None)
        found = check_pair(settings.models, catalog, progress)
    if as_json:
        write(sys.stdout, json_text(found.as_json()) + "\n")
    else:
        show(list(rows_of(found)), settings.output)
    if not found.runs:
        raise typer.Exit(ExitCode.FAILED)


def rows_of(found: Check) -> Iterator[Row]:
    """The report, a label and a text in each row."""
    target, draft = found.target, found.draft
    yield "target", describe_model(target)
    yield "draft", describe_model(draft) if draft else "copies from the text"
    if found.vocabularies:
        yield "vocabulary", f"{found.vocabularies.kind}: {found.vocabularies.describe()}"
        for token_id, one, other in found.vocabularies.differing:
            yield "", f"id {token_id}: target {one!r}; draft {other!r}"
        if found.vocabularies.differing:
            yield "", f"{found.vocabularies.num_shared_tokens} token strings are in both, whatever their ids"
    for at, (role, (one, other)) in enumerate(found.special_tokens.items()):
        yield "" if at else "tokens", f"{role}: target {one}; draft {other}"
    yield "caches", by_model(found, describe_cache)
    yield "context", by_model(found, lambda model: f"{model.max_length} tokens" if model.max_length else "no limit")
    yield "memory", by_model(found, describe_memory)
    free = ", ".join(f"{size_text(size)} on {device}" for device, size in found.free_bytes.items())
    yield "", f"{'fits into' if found.fits else 'does not fit into'} what is free: {free}"
    if found.cost_ratio is not None:
        basis = "measured here" if found.cost_measured else "guessed from their bytes"
        yield "cost", f"a step of the draft model takes {found.cost_ratio:.2f} of a forward of the target ({basis})"
    for note in found.notes:
        yield "note", note
    yield "verdict", found.verdict
    for problem in found.problems[1:]:
        yield "", f"and {problem.message}"
    for problem in found.problems:
        yield "hint", problem.hint


def by_model(found: Check, describe: Callable[[ModelFacts], str]) -> str:
    """What is to be told of each model, the target first."""
    both = (("target", found.target), ("draft", found.draft))
    return "; ".join(f"{role} {describe(model)}" for role, model in both if model)


def describe_model(model: ModelFacts) -> str:
    """Name, kind and size."""
    weights = model.dtype if model.quantize == "none" else model.quantize
    parameters = f"{model.num_parameters / 1e9:.2f}B" if model.num_parameters >= 1e8 else f"{model.num_parameters:,}"
    return f"{model.name} ({model.model_type}), {parameters} parameters, {size_text(model.weight_bytes)} in {weights}"


def describe_cache(model: ModelFacts) -> str:
    """As `15 x sliding window of 512, 3 x full attention`."""
    layers = ", ".join(f"{count} x {kind}" for kind, count in model.cache_layers.items())
    return layers if model.rewindable else f"{layers} (cannot be rewound)"


def describe_memory(model: ModelFacts) -> str:
    weights = ", ".join(f"{size_text(size)} on {device}" for device, size in model.devices.items())
    return f"{weights} and {size_text(model.cache_bytes)} of cache"


def show(rows: Iterable[Row], output: OutputSettings) -> None:
    """Print the report: wrapped and coloured on a terminal, a line for each row elsewhere."""
    rows = [(label, visible_line(text)) for label, text in rows]
    policy = decide_color(output.color, sys.stdout.isatty(), os.environ)
    if policy.cues:
        show_styled(rows, policy)
    else:
        write(sys.stdout, "".join(f"{label:<12}{text}\n" for label, text in rows))


def show_styled(rows: Iterable[Row], policy: ColorPolicy) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Colours in a pipe are for a pager or a file, which has no width to wrap to.
    width = None if sys.stdout.isatty() else 16 + max(cell_len(text) for _, text in rows)
    table = Table.grid(padding=(0, 2))
    for label, text in rows:
        style = STYLES.get(text.partition(":")[0], "") if label == "verdict" else ""
        table.add_row(Text(label, style="bold", overflow="fold"), Text(text, style=style, overflow="fold"))
    console = Console(no_color=not policy.color, force_terminal=True, highlight=False, width=width)
    console.width = max(console.width, LEAST_COLUMNS)
    console.print(table)
