"""`fly tune`: measure a pair with other settings, and keep those that pay."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench_plan import Arm, Chosen, Plan, choose_prompts
from ..bench_rows import Results, read_header
from ..catalog import Catalog, load_catalog
from ..config import Effective, resolve
from ..errors import UsageError
from ..processes import Processes
from ..prompts import read_stdin
from ..render import write
from ..settings import DecodeSettings
from ..tuned import Tuned, keep_tuned
from . import common
from .bench import tell_skipped, with_stdin_once
from .bench_job import Job, choose_models
from .generate import load
from .talk import Talk

if TYPE_CHECKING:
    from ..models import Pair

TUNE = "Tune"
NEW_TOKENS = 128  # of an answer, where the user asks for no other number
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
    draft_quantize: common.DraftQuantize = None,
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

    A change is kept only where it is faster beyond doubt (the 95% interval of the ratio lies above 1) and the answers
    are as good: by their scores, or else by how many are the target's own. Later runs of the same pair on this machine
    use it wherever nothing else is asked for; 'fly config show' tells.
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
    for note in (*settings.notes, *chosen.notes):
        talk.note(note)
    tell_skipped(chosen, talk)
    new_tokens = settings.decode.max_new_tokens if layers.given("max_new_tokens") else NEW_TOKENS
    build = partial(layers.group, DecodeSettings, max_new_tokens=new_tokens)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fly-tune-")))
        trial = Trial(
            catalog, settings, chosen, folder, keep=out is not None, resume=resume, run_code=run_code, talk=talk
        )
        found = trial.run(build)
        show(found, talk)
        if not dry_run:
            keep_tuned(common.tuned_file(), found)


class Trial:
    """The runs of one tuning, over one loaded pair."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Effective,
        chosen: Chosen,
        folder: Path,
        *,
        keep: bool,
        resume: bool,
        run_code: bool,
        talk: Talk,
    ):
        self.catalog, self.settings, self.chosen, self.folder = catalog, settings, chosen, folder
        self.keep, self.resume, self.run_code, self.talk = keep, resume, run_code, talk

    def run(self, build: partial[Any]) -> Tuned:
        """Measure each change alone, then those that pay together. The result has the settings to change."""
        from ..tune import combined_arm, recommend, trial_arms

        arms = trial_arms(build)
        self.talk.note(f"{len(self.chosen.prompts)} prompts, each answered in {len(arms)} ways")
        pair = load(choose_models(arms, self.settings, None), self.catalog, self.talk)
        with self.talk.status("measuring forwards"):
            pair = pair.with_measured_costs()
        summary = self.measure(pair, arms, self.folder)
        changes = recommend(arms, summary, Results(self.folder).rows())
        chosen = "fly"
        if changes:
            together = combined_arm(build, changes)
            chosen = together.name
            if together.name not in summary["overall"]:
                arms = [*arms[:2], together]
                folder = self.folder / TOGETHER
                summary = self.measure(pair, arms, folder)
                if not recommend(arms, summary, Results(folder).rows()):
                    self.talk.note("together they do not pay, so nothing is changed")
                    changes, chosen = {}, "fly"
        speedup = summary["overall"][chosen]["speedup_vs_target"]
        return Tuned(
            target=self.settings.models.target,
            draft=str(self.settings.models.draft),
            machine=common.this_machine(),
            date=date.today().isoformat(),
            settings=changes,
            speedup_vs_target=speedup and speedup["value"],
            num_prompts=len(self.chosen.prompts),
        )

    def measure(self, pair: Pair, arms: Sequence[Arm], folder: Path) -> dict[str, Any]:
        """One run over all prompts, and its summary."""
        from ..report import summarise

        job = Job(
            plan=Plan(self.chosen.prompts, arms),
            settings=choose_models(arms, self.settings, None),
            chosen=self.chosen,
            processes=Processes(),
            warmup=1,
            run_code=self.run_code,
            folder=folder,
            resume=self.resume,
            talk=self.talk,
        )
        job.run(self.catalog, as_json=False, keep=self.keep, pair=pair)
        return summarise(read_header(folder), Results(folder).rows())


def show(found: Tuned, talk: Talk) -> None:
    """The recommendation, on stdout as lines of a config file."""
    if not found.settings:
        write(sys.stdout, "# nothing is faster beyond doubt than the settings in effect\n")
        return
    lines = [f"{name}: {common.yaml_value(value)}\n" for name, value in found.settings.items()]
    write(sys.stdout, "".join(lines))
    if found.speedup_vs_target is not None:
        talk.note(f"with that {found.speedup_vs_target:.2f} times as fast as the target alone")
