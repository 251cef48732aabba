"""One run of `fly bench`, from its settings to its table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .. import score
from ..bench_plan import NEED_DRAFT, WARMUP_TOKENS, Arm, Chosen, Plan
from ..bench_rows import (
    FORMAT,
    HEADER,
    Results,
    Row,
    begin,
    check_folder,
    key_of,
    make_folder,
    read_header,
    shortened,
    to_json,
    write_whole,
)
from ..catalog import Catalog
from ..config import Effective
from ..errors import FlyError, UsageError, memory_errors
from ..json_text import json_text
from ..processes import ENDED_EARLY, Processes
from ..prompts import Prompt
from ..settings import LOOKUP
from ..streams import write
from .bench_view import make_view
from .generate import closing_progress, load
from .process import interruption, reader_is_gone
from .talk import Talk

if TYPE_CHECKING:
    from ..models import Pair


class TurnsFailedError(FlyError):
    """Some turns failed; all others are measured and kept."""


@dataclass(frozen=True)
class Job:
    """What is measured, where the results go, and which process this is."""

    plan: Plan
    settings: Effective
    chosen: Chosen
    processes: Processes
    warmup: int
    run_code: bool
    folder: Path
    resume: bool
    talk: Talk
    table_to: TextIO | None = None  # the stream of the table, if not stdout

    def check(self) -> None:
        """Raise what stands against the folder, before anything is loaded."""
        check_folder(self.folder, self.header(), resume=self.resume)
        make_folder(self.folder)  # what cannot be kept is not worth the wait

    def run(
        self, catalog: Catalog, *, as_json: bool, keep: bool, plots: bool = False, pair: Pair | None = None
    ) -> None:
        """Measure, and show the result, also of a run that was interrupted. Raises `TurnsFailedError`.

        `pair` is what the settings name, where it is loaded already.
        """
        try:
            self.run_share(catalog, pair, as_json=as_json, keep=keep, plots=plots)
        except BaseException:
            with suppress(FlyError):
                self.processes.announce(ENDED_EARLY)  # nobody waits for this one
            raise

    def run_share(self, catalog: Catalog, pair: Pair | None, *, as_json: bool, keep: bool, plots: bool) -> None:
        """What this process does of the run."""
        first = self.processes.first
        if first:
            self.check()
        if self.processes.world == 1 and self.is_done():
            self.talk.note("all turns are done already")
            Results(self.folder).merge(self.plan.row_keys())
            return self.finish(as_json=as_json, keep=keep, plots=plots)
        pair = pair or load(self.settings, catalog, self.talk)
        if any(arm.kind == "hf-assisted" for arm in self.plan.arms):
            pair = self.with_assistant(pair)
        if first:
            pair = self.with_kept_costs(pair)
            self.prepare(pair)
        self.processes.announce("prepared")
        self.processes.wait_for("prepared", self.processes.world)
        pair = self.with_kept_costs(pair)
        try:
            self.measure(pair, keep=keep)
            if first:
                self.processes.wait_for("measured", self.processes.world)
                Results(self.folder).merge(self.plan.row_keys())
        except BaseException:
            if first:
                self.conclude(as_json=as_json, keep=keep, plots=plots)
            raise
        if first:
            self.finish(as_json=as_json, keep=keep, plots=plots)

    def is_done(self) -> bool:
        """Whether an earlier run left nothing to do."""
        if not (self.folder / HEADER).exists():
            return False
        return set(self.plan.row_keys()) <= {key_of(row) for row in Results(self.folder).rows()}

    def finish(self, *, as_json: bool, keep: bool, plots: bool) -> None:
        """Show the result of a whole run. Raises `TurnsFailedError`."""
        errors = self.conclude(as_json=as_json, keep=keep, plots=plots)
        if errors:
            raise TurnsFailedError(
                f"{len(errors)} of {len(self.plan.row_keys())} turns failed, first {errors[0]}",
                hint="their rows have `status` failed and the `error`; no figure counts them",
            )

    def with_assistant(self, pair: Pair) -> Pair:
        """The pair, and the draft model that transformers works with."""
        from ..models import with_assistant

        with memory_errors("loading the models"), closing_progress(self.talk.progress()) as progress:
            return with_assistant(pair, progress)

    def with_kept_costs(self, pair: Pair) -> Pair:
        """The pair with the cost table that the run began with: all its processes and sessions choose alike."""
        from ..schedule import CostTable

        if not (self.folder / HEADER).exists():
            return pair
        header = read_header(self.folder)
        try:
            return replace(pair, costs=CostTable.from_json(header["cost_table"]))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise UsageError(
                f"`{self.folder / HEADER}` has no cost table that makes sense",
                hint="that folder is damaged; use another",
            ) from None

    def header(self, pair: Pair | None = None) -> dict[str, Any]:
        """All that the rows depend on; without a pair what is known before it is loaded."""
        known = {
            "format": FORMAT,
            "arms": {arm.name: arm.as_json() for arm in self.plan.arms},
            "models": self.settings.models.as_json(),
            "text": asdict(self.settings.text),
            "prompts": self.chosen.as_json(),
            "seed": self.plan.seed,
            "repeat": self.plan.repeat,
            "warmup": self.warmup,
            "run_code": self.run_code,
        }
        if pair is None:
            return known
        from ..machine import describe_machine, identify_model

        with self.talk.status("identifying the models"):
            weights = [identify_model(model.path) for model in pair.models]
        session = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "processes": self.processes.world,
            "machine": describe_machine(),
        }
        return {**pair.describe(), **known, "weights": weights, "sessions": [session]}

    def prepare(self, pair: Pair) -> None:
        """Make the folder ready for all processes."""
        header = self.header(pair)
        begin(self.folder, header, resume=self.resume)
        Results(self.folder).merge(self.plan.row_keys())
        machines = [session.get("machine") for session in read_header(self.folder)["sessions"]]
        if machines[0] != machines[-1]:
            self.talk.note("the results so far come from another machine; the report names both")

    def measure(self, pair: Pair, *, keep: bool) -> None:
        """Run what is not done yet, and put each row on disk before the next turn begins.

        Raises `BrokenPipeError` as soon as the result would be neither kept nor read.
        """
        from ..bench import done_texts, run, warm_up

        share = self.plan.share(self.processes.rank, self.processes.world)
        results = Results(self.folder, self.processes.rank if self.processes.world > 1 else None)
        done = done_texts(results.rows())
        expected = [key for key in share.row_keys() if key not in done]
        if done:
            self.talk.note(f"{len(done)} turns are done already, {len(expected)} are left")
        if expected and self.warmup:
            with self.talk.status("warming up"):
                for note in warm_up(pair, share, self.warmup):
                    self.talk.note(note)
        view = make_view(expected, self.talk.policy, quiet=self.talk.quiet)
        try:
            for row in run(share, pair, done=done, grade=self.grade):
                with interruption.deferred():
                    results.append(row)
                    view.handle(row)
                if not keep and self.table_to is None and reader_is_gone(sys.stdout):
                    raise BrokenPipeError
        finally:
            view.close()
            results.close()
        self.processes.announce("measured")

    def grade(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """How good an answer is, as fields of its row."""
        graded = score.score(prompt.fields, text, run_code=self.run_code)
        return {"score": graded.value, "scorer": prompt.fields.get("scorer"), "score_reason": graded.reason}

    def conclude(self, *, as_json: bool, keep: bool, plots: bool) -> list[str]:
        """Show the result, also of a part; `keep` writes it into the folder as well. The errors of failed turns."""
        from .. import report

        errors: list[str] = []
        num_rows = 0

        def counted() -> Iterator[Row]:
            nonlocal num_rows
            for row in Results(self.folder).rows():
                num_rows += 1
                if row["status"] != "ok":
                    errors.append(f"`{shortened(row['prompt_id'])}` in `{row['arm']}`: {row['error']}")
                yield row

        summary = report.summarise(read_header(self.folder), counted())
        if not num_rows:
            return []
        expected = len(self.plan.row_keys())
        summary |= {"complete": num_rows == expected, "num_rows": num_rows, "num_expected_rows": expected}
        if self.warmup:
            summary["notes"].append(f"warm-up: {self.warmup} x {WARMUP_TOKENS} tokens with each arm, in no figure")
        if num_rows < expected:
            summary["notes"].insert(0, f"{num_rows} of {expected} turns are done, and the figures are of these alone")
        if keep:
            write_whole(self.folder / "summary.json", to_json(summary))
            drawn = report.write_plots(summary, self.folder) if plots else []
            write_whole(self.folder / "report.md", report.to_markdown(summary, drawn).encode())
        text = json_text(summary) if as_json else report.format_table(summary)
        write(self.table_to or sys.stdout, text.rstrip("\n") + "\n")
        return errors


def choose_models(arms: Sequence[Arm], settings: Effective, local_rank: int | None) -> Effective:
    """The settings for loading what the arms need: a draft model only for those that ask it, and a GPU each."""
    needed = any(arm.kind in NEED_DRAFT for arm in arms)
    if settings.models.draft in (None, LOOKUP) and any(arm.kind == "hf-assisted" for arm in arms):
        raise UsageError("the arm `hf-assisted` needs a draft model", hint="name one with `--draft`, or drop the arm")
    models = settings.models if needed else replace(settings.models, draft=LOOKUP)
    if local_rank is not None and models.device_map == "auto":
        import torch

        if torch.cuda.is_available():  # each process would otherwise plan for all GPUs
            models = replace(models, device_map=f"cuda:{local_rank}")
    return replace(settings, models=models, decode=replace(settings.decode, mode="fly"))


def show_comparison(a: Path, b: Path, *, as_json: bool) -> None:
    """Two results side by side. Needs neither models nor torch."""
    from .. import report

    both: list[Any] = []
    for folder in (a, b):
        header = read_header(folder)
        both += [report.summarise(header, Results(folder).rows()), Results(folder).rows()]
    comparison = report.compare(*both)
    text = json_text(comparison) if as_json else report.format_comparison(comparison, a.name, b.name)
    write(sys.stdout, text.rstrip("\n") + "\n")
