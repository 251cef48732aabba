"""`fly tune`: measure a pair with other settings, and keep those that pay."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench_plan import Build, Plan, changed_arm, choose_prompts
from ..bench_rows import Results, read_header
from ..catalog import Catalog, load_catalog
from ..commentary import count
from ..config import resolve
from ..errors import UsageError
from ..processes import Processes
from ..prompts import read_stdin
from ..settings import LOOKUP, DecodeSettings
from ..streams import write
from ..tune import BASE, recommend, trial_arms
from ..tuned import TUNABLE, Tuned, how_loaded, keep_tuned, read_tuned
from . import common
from .bench import tell_skipped, with_stdin_once
from .bench_job import Job, TurnsFailedError, choose_models
from .generate import load
from .talk import Talk

if TYPE_CHECKING:
    from ..models import Pair

TUNE = "Tune"
NEW_TOKENS = 128  # of an answer, where the user asks for no other number
FEWEST_PROMPTS = 4  # with an interval
TOGETHER = "together"  # the folder of the second run


def tune(
    context: typer.Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PROMPTS",
            help="Files of prompts like those to come: .jsonl rows or plain text; - is rows on standard input.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        list[int] | None,
        common.option("--limit", panel=TUNE, metavar="<int>", default="all", help="First prompts of each file."),
    ] = None,
    sample: Annotated[
        list[int] | None,
        common.option("--sample", panel=TUNE, metavar="<int>", default="all", help="Prompts of each file, at random."),
    ] = None,
    run_code: Annotated[
        bool,
        common.option(
            "--run-code", panel=TUNE, help="Score answers with tests: run the code in them, limited but not sandboxed."
        ),
    ] = False,
    dry_run: Annotated[
        bool, common.option("--dry-run", panel=TUNE, help="Measure and recommend, and keep nothing.")
    ] = False,
    out: Annotated[
        Path | None,
        common.option("--out", panel=TUNE, metavar="DIR", help="Keep rows, summary and report in this folder."),
    ] = None,
    resume: Annotated[
        bool, common.option("--resume", panel=TUNE, help="Go on where the run in --out stopped.")
    ] = False,
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
    max_new_tokens: common.MaxNewTokens = None,
    color: common.Color = None,
    quiet: common.Quiet = None,
    verbose: common.Verbose = None,
    config: common.ConfigFile = None,
) -> None:
    """Measure what forwards of the pair cost here, then your prompts with one setting changed at a time.

    A change is kept only where it is faster in two runs (the 95% interval of the ratio lies above 1) and the answers
    are as good: by their scores, or else by how many are the target's own. Later runs of the same pair on this machine
    use it wherever nothing else is asked for; 'fly config show' tells. Settings given by hand stay as they are.
    """
    layers = common.configure({**context.params, "mode": "fly"}, config)
    if resume and out is None:
        raise UsageError("`--resume` needs a folder of results", hint="name it with `--out DIR`")
    if not prompts:
        raise UsageError("no prompts", hint="name files with prompts of yours: `fly tune prompts.jsonl`")
    catalog = load_catalog(layers.aliases, layers.pairs)
    settings = resolve(layers, catalog)  # what was tuned before is found anew
    talk = Talk(settings.output)
    chosen = choose_prompts(
        with_stdin_once(prompts),
        limit=limit or (),
        sample=sample or (),
        raw=settings.text.raw,
        read_stdin=lambda: read_stdin(sys.stdin, talk.note, asked=True),
    )
    if not dry_run:
        read_tuned(common.tuned_file())  # a damaged file is told now, not when the result is to go there
    if len(chosen.prompts) < FEWEST_PROMPTS:
        raise UsageError(
            f"{count(len(chosen.prompts), 'prompt')} cannot tell a gain from noise",
            hint=f"give at least {FEWEST_PROMPTS}, better a dozen, of the kind that is to come",
        )
    for note in (*settings.notes, *chosen.notes):
        talk.note(note)
    tell_skipped(chosen, talk)
    new_tokens = settings.decode.max_new_tokens if layers.given("max_new_tokens") else NEW_TOKENS
    build = partial(layers.group, DecodeSettings, max_new_tokens=new_tokens)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fly-tune-")))
        arms = trial_arms(build, given=layers.given(*TUNABLE), draft_model=settings.models.draft not in (None, LOOKUP))
        job = Job(
            plan=Plan(chosen.prompts, arms),
            settings=choose_models(arms, settings, None),
            chosen=chosen,
            processes=Processes(),
            warmup=1,
            run_code=run_code,
            folder=folder,
            resume=resume,
            talk=talk,
            table_to=sys.stderr,
        )
        found = find(job, catalog, build, keep=out is not None, keep_costs=not dry_run)
        show(found, talk)
        if not dry_run:
            keep_tuned(common.tuned_file(), found)


def find(job: Job, catalog: Catalog, build: Build, *, keep: bool, keep_costs: bool) -> Tuned:
    """Measure each change alone, then those that pay together against the settings in effect."""
    job.check()
    arms, models = job.plan.arms, job.settings.models
    job.talk.note(f"{count(len(job.plan.prompts), 'prompt')}, each answered in {len(arms)} ways")
    pair = load(job.settings, catalog, job.talk)
    with job.talk.status("measuring forwards"):
        pair = pair.with_measured_costs(keep=keep_costs)
    summary = measure(job, catalog, pair, keep=keep)
    changes = recommend(arms, summary, Results(job.folder).rows())
    chosen = BASE
    if changes:
        together = changed_arm(build, changes)
        again = replace(job, plan=replace(job.plan, arms=[*arms[:2], together]), folder=job.folder / TOGETHER)
        summary = measure(again, catalog, pair, keep=keep)
        if recommend(again.plan.arms, summary, Results(again.folder).rows()):
            chosen = together.name
        else:
            job.talk.note("measured once more it does not pay, so nothing is changed")
            changes = {}
    speedup = summary["overall"][chosen]["speedup_vs_target"]
    return Tuned(
        target=models.target,
        draft=str(models.draft),
        machine=common.this_machine(),
        models=how_loaded(models.as_json()),
        date=date.today().isoformat(),
        settings=changes,
        speedup_vs_target=speedup and speedup["value"],
        num_prompts=len(job.plan.prompts),
    )


def measure(job: Job, catalog: Catalog, pair: Pair, *, keep: bool) -> dict[str, Any]:
    """One run over all prompts, and its summary. Turns that fail are told, and count for nothing."""
    from ..report import summarise

    try:
        job.run(catalog, as_json=False, keep=keep, pair=pair)
    except TurnsFailedError as error:
        job.talk.note(error.message)
    return summarise(read_header(job.folder), Results(job.folder).rows())


def show(found: Tuned, talk: Talk) -> None:
    """The recommendation, on stdout as lines of a config file."""
    if not found.settings:
        write(sys.stdout, "# nothing is faster for certain than the settings in effect\n")
        return
    lines = [f"{name}: {common.yaml_value(value)}\n" for name, value in found.settings.items()]
    write(sys.stdout, "".join(lines))
    if found.speedup_vs_target is not None:
        talk.note(f"with that {found.speedup_vs_target:.2f} times as fast as the target alone")
