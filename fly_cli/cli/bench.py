"""`fly bench`: the same prompts, decoded in several ways, measured and compared."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..bench_plan import ARMS, DEFAULT_ARMS, STDIN, Chosen, Plan, choose_arms, choose_prompts
from ..catalog import load_catalog
from ..errors import UsageError
from ..processes import join
from ..prompts import read_stdin
from ..score import problem
from ..settings import DecodeSettings, check_range
from . import common
from .bench_job import Job, choose_models, show_comparison
from .process import is_same_file
from .talk import Talk

BENCH = "Bench"
SKIPPED_SHOWN = 20  # lines
MOST_RUNS = 1000  # of everything: more is a slip of the finger, and a plan that fills the memory


def bench(
    context: typer.Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PROMPTS",
            help="Files of prompts: .jsonl rows or plain text; - (or a pipe) is rows on standard input.",
            show_default=False,
        ),
    ] = None,
    arms: Annotated[
        str,
        common.option("--arms", panel=BENCH, default=DEFAULT_ARMS, help=f"What to compare: {', '.join(ARMS)}."),
    ] = DEFAULT_ARMS,
    limit: Annotated[
        list[int] | None,
        common.option(
            "--limit",
            panel=BENCH,
            metavar="<int>",
            default="all",
            help="Take so many first prompts of each file. Repeated: one count for each file, in their order.",
        ),
    ] = None,
    sample: Annotated[
        list[int] | None,
        common.option(
            "--sample",
            panel=BENCH,
            metavar="<int>",
            default="all",
            help="Draw so many prompts of each file at random, evenly over its subtasks. Repeated: one count for each.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        common.option("--seed", panel=BENCH, default="0", help="For --sample, and for each prompt's own seed."),
    ] = None,
    repeat: Annotated[
        int, common.option("--repeat", panel=BENCH, default="1", help="Run everything so many times.")
    ] = 1,
    warmup: Annotated[
        int,
        common.option("--warmup", panel=BENCH, default="1", help="Short runs of each arm that are not measured."),
    ] = 1,
    sweep: Annotated[
        list[str] | None,
        common.option(
            "--sweep",
            panel=BENCH,
            metavar="SETTING=V1,V2",
            help="Run fly with each of these values, as draft-tokens=5,10. Repeated: with all combinations.",
        ),
    ] = None,
    run_code: Annotated[
        bool,
        common.option(
            "--run-code", panel=BENCH, help="Score answers with tests: run the code in them, limited but not sandboxed."
        ),
    ] = False,
    skip_invalid: Annotated[
        bool, common.option("--skip-invalid", panel=BENCH, help="List rows that are no prompts, and leave them out.")
    ] = False,
    out: Annotated[
        Path | None,
        common.option("--out", panel=BENCH, metavar="DIR", help="Keep rows, summary and report in this folder."),
    ] = None,
    resume: Annotated[
        bool, common.option("--resume", panel=BENCH, help="Go on where the run in --out stopped.")
    ] = False,
    plots: Annotated[
        bool, common.option("--plots", panel=BENCH, help="Also draw plots into --out (needs matplotlib).")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        common.option("--compare", panel=BENCH, metavar="A B", help="Show two result folders side by side, and stop."),
    ] = None,
    system: common.System = None,
    raw: common.Raw = None,
    chat_template: common.ChatTemplate = None,
    target: common.Target = None,
    draft: common.Draft = None,
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
    allow_missing_weights: common.AllowMissingWeights = None,
    draft_tokens: common.DraftTokens = None,
    window_size: common.WindowSize = None,
    entropy_threshold: common.EntropyThreshold = None,
    entropy: common.Entropy = None,
    entropy_top_k: common.EntropyTopK = None,
    strict_first: common.StrictFirst = None,
    draft_schedule: common.DraftSchedule = None,
    draft_lookup: common.DraftLookup = None,
    max_new_tokens: common.MaxNewTokens = None,
    stop: common.Stop = None,
    stop_token: common.StopToken = None,
    temperature: common.Temperature = None,
    top_p: common.TopP = None,
    top_k: common.TopK = None,
    as_json: Annotated[
        bool, common.option("--json", panel=common.OUTPUT, help="One JSON object: the summary.")
    ] = False,
    color: common.Color = None,
    show_special: common.ShowSpecial = None,
    quiet: common.Quiet = None,
    verbose: common.Verbose = None,
    config: common.ConfigFile = None,
) -> None:
    """Measure the same prompts decoded in several ways, and what speed costs in quality.

    Arms are target (the target model alone), exact (standard speculative decoding), fly, lookup (fly that copies its
    drafts from the text) and transformers' own hf, hf-assisted and hf-lookup. They take turns prompt by prompt.

    Started by torchrun or 'accelerate launch', the prompts are split over the processes; --out is needed then.
    """
    layers = common.configure({**context.params, "mode": "fly"}, config)
    if compare is not None:
        show_comparison(*compare, as_json=as_json)
        return
    check_range("repeat", repeat, 1, MOST_RUNS)
    check_range("warmup", warmup, 0, MOST_RUNS)
    if plots and find_spec("matplotlib") is None:
        raise UsageError("`--plots` needs matplotlib", hint="pip install 'fly-decode[plots]'")
    for flag, given in (("--resume", resume), ("--plots", plots)):
        if given and out is None:
            raise UsageError(f"`{flag}` needs a folder of results", hint="name it with `--out DIR`")
    catalog = load_catalog(layers.aliases, layers.pairs)
    settings = common.effective(layers, catalog)
    chosen_arms, notes = choose_arms(arms, partial(settings.layers.group, DecodeSettings), sweep or ())
    processes = join(os.environ)
    if processes.world > 1 and out is None:
        raise UsageError("several processes need a folder to meet in", hint="name it with `--out DIR`")
    if not prompts:
        raise UsageError("no prompts", hint="name files: `fly bench prompts.jsonl`")
    files = with_stdin_once(prompts)
    own_seed = settings.decode.seed or 0
    talk = Talk(replace(settings.output, quiet=settings.output.quiet or not processes.first))
    chosen = choose_prompts(
        files,
        limit=limit or (),
        sample=sample or (),
        seed=own_seed,
        skip_invalid=skip_invalid,
        raw=settings.text.raw,
        read_stdin=lambda: read_stdin(sys.stdin, talk.note, asked=True),
    )
    for note in (*settings.notes, *notes, *chosen.notes):
        talk.note(note)
    tell_skipped(chosen, talk)
    with ExitStack() as stack:
        job = Job(
            plan=Plan(chosen.prompts, chosen_arms, repeat, own_seed),
            settings=choose_models(chosen_arms, settings, processes.local_rank if processes.world > 1 else None),
            chosen=chosen,
            processes=processes,
            warmup=warmup,
            run_code=run_code,
            folder=out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fly-bench-"))),
            resume=resume,
            talk=talk,
        )
        job.run(catalog, as_json=as_json, keep=out is not None, plots=plots)


def with_stdin_once(files: Sequence[Path]) -> list[Path]:
    """The files, with `-` for standard input under other names. Raises `UsageError` where it is named twice."""
    named = [file for file in files if file == STDIN or is_same_file(file, sys.stdin)]
    if len(named) > 1:
        raise UsageError(f"`{named[0]}` and `{named[1]}` are the same input", hint="drop one of them")
    return [STDIN if file in named and not file.suffix else file for file in files]


def tell_skipped(chosen: Chosen, talk: Talk) -> None:
    """Which rows were left out, and how many of how many; and which cannot be scored as they say."""
    unusable = [(prompt.id, reason) for prompt in chosen.prompts if (reason := problem(prompt.fields))]
    if unusable:
        talk.note(f"{len(unusable)} prompts cannot be scored, first `{unusable[0][0]}`: {unusable[0][1]}")
    if not chosen.skipped:
        return
    talk.lines(f"skipped: {line}" for line in chosen.skipped[:SKIPPED_SHOWN])
    if len(chosen.skipped) > SKIPPED_SHOWN:
        talk.lines([f"skipped: and {len(chosen.skipped) - SKIPPED_SHOWN} more"])
    talk.note(f"{chosen.read} rows read, {len(chosen.skipped)} skipped, {len(chosen.prompts)} prompts taken")
