"""`fly generate`: answer a prompt, and show how each token got there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..catalog import Catalog, load_catalog
from ..config import Config, Effective
from ..errors import FlyError, LostProcessError, OutOfMemoryError, PromptError, UsageError, memory_errors
from ..events import Started
from ..json_text import json_text
from ..processes import join
from ..progress import Progress
from ..prompts import JSONL_SUFFIXES, Gathered, Prompt, gather, read_stdin
from ..render import Sink, make_renderer
from ..requirements import refuse_other_releases
from ..storage import size_text
from ..streams import write
from ..theme import decide_color
from ..trace import TraceWriter
from . import common
from .as_one import as_one
from .process import interruption, is_same_file, quiet_imports, reader_is_gone, without_garbage_collection
from .results import Result
from .talk import Talk

if TYPE_CHECKING:
    from ..models import Pair


class Shape(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


def generate(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="The prompt; - is standard input. Piped text comes before it.", show_default=False
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        common.option(
            "--file",
            "-f",
            metavar="FILE",
            panel=common.PROMPT,
            help="Read prompts from a text or .jsonl file. May be repeated.",
        ),
    ] = None,
    system: common.System = None,
    raw: common.Raw = None,
    chat_template: common.ChatTemplate = None,
    no_stdin: Annotated[
        bool, common.option("--no-stdin", panel=common.PROMPT, help="Leave standard input unread.")
    ] = False,
    show_prompt_ids: Annotated[
        bool,
        common.option(
            "--show-prompt-ids", panel=common.PROMPT, help="Also show the prompt's token ids (stderr, JSON)."
        ),
    ] = False,
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
    mode: common.Mode = None,
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
    seed: common.Seed = None,
    color: common.Color = None,
    show_rejected: common.ShowRejected = None,
    show_special: common.ShowSpecial = None,
    as_json: Annotated[
        bool, common.option("--json", panel=common.OUTPUT, help="One JSON object: text, figures, tokens, settings.")
    ] = False,
    as_jsonl: Annotated[
        bool,
        common.option("--jsonl", panel=common.OUTPUT, help="One JSON line for each prompt (.jsonl files imply it)."),
    ] = False,
    trace: Annotated[
        Path | None,
        common.option("--trace", panel=common.OUTPUT, help="Record every event in this file, for 'fly replay'."),
    ] = None,
    quiet: common.Quiet = None,
    verbose: common.Verbose = None,
    config: common.ConfigFile = None,
) -> None:
    """Answer a prompt, faster: a draft model proposes tokens, the target checks them many at a time.

    FLy is lossy on purpose: where the target is unsure it may keep the draft's token, so the text can differ from
    the target's own. --mode exact is not lossy: it keeps only what the target would have chosen itself.

    Started by torchrun, its processes share the target: each holds a part of it (tensor parallelism).
    """
    processes = join(os.environ)
    with ExitStack() as stack:
        team = stack.enter_context(as_one(processes))
        layers, catalog, settings = team.tell(lambda: read_settings(context.params, config))
        if as_json and as_jsonl:
            raise UsageError("`--json` and `--jsonl` exclude each other", hint="`--jsonl` gives a row for each prompt")
        if trace:
            team.tell(lambda: common.check_output("--trace", trace, [*(file or []), *common.read_files(layers)]))
        if not processes.first:
            settings = replace(settings, output=replace(settings.output, quiet=True, verbose=False))
        settings = replace(settings, models=replace(settings.models, processes=processes.world))
        talk = Talk(settings.output)
        gathered = team.tell(lambda: gather_prompts(prompt, file or [], talk, raw=settings.text.raw, read=not no_stdin))
        shape = choose_shape(gathered.prompts, file or [], as_json=as_json, as_jsonl=as_jsonl)
        recorder = TraceWriter(trace) if trace and processes.first else None
        if recorder:
            stack.callback(recorder.close)
        for note in (*settings.notes, *gathered.notes):
            talk.note(note)
        stop_if_unheard()
        pair = load(settings, catalog, talk)
        job = Job(pair, settings, talk, recorder, show_prompt_ids, speaks=processes.first)
        if talk.verbose:
            talk.lines(job.describe_setup())
        match shape:
            case Shape.TEXT:
                job.show_text(gathered.prompts[0])
            case Shape.JSON:
                job.write_json(gathered.prompts[0], whole=True)
            case Shape.JSONL:
                job.write_rows(gathered.prompts)
        if job.speaks:
            pair.remember_costs()


def read_settings(parameters: Mapping[str, Any], file: Path | None) -> tuple[Config, Catalog, Effective]:
    """All layers of settings, the models that have a name, and what holds for this command."""
    layers = common.configure(parameters, file)
    catalog = load_catalog(layers.aliases, layers.pairs)
    return layers, catalog, common.effective(layers, catalog)


def gather_prompts(prompt: str | None, files: Sequence[Path], talk: Talk, *, raw: bool, read: bool) -> Gathered:
    """The prompts of argument, files and standard input. Raises `PromptError` where there is none."""
    if prompt == "-" and not read:
        raise UsageError("`-` and `--no-stdin` exclude each other", hint="drop one of them")
    named = [file for file in files if is_same_file(file, sys.stdin)]  # as /dev/stdin: it is read once, as that file
    if prompt == "-" and named:
        raise UsageError(f"`-` and `-f {named[0]}` are the same input", hint="drop one of them")
    piped = read_stdin(sys.stdin, talk.note, asked=prompt == "-") if read and not named else None
    return gather([] if prompt is None else [prompt], files, piped, raw=raw)


def choose_shape(prompts: Sequence[Prompt], files: Sequence[Path], *, as_json: bool, as_jsonl: bool) -> Shape:
    """What stdout gets. A .jsonl file asks for rows. Raises `UsageError` for several prompts in one object or text."""
    if as_jsonl or (not as_json and any(file.suffix.lower() in JSONL_SUFFIXES for file in files)):
        return Shape.JSONL
    if len(prompts) > 1:
        kind = "one JSON object" if as_json else "one text"
        raise PromptError(f"there are {len(prompts)} prompts for {kind}", hint="`--jsonl` gives a row for each")
    return Shape.JSON if as_json else Shape.TEXT


def load(settings: Effective, catalog: Catalog, talk: Talk) -> Pair:
    """The loaded pair. What takes seconds is imported here, after all checks that need no model."""
    with without_garbage_collection():
        with talk.status("starting"):
            refuse_other_releases()  # whose imports may fail already
            quiet_imports()
            from ..models import load_pair
        interruption.check()
        with memory_errors("loading the models"), closing_progress(talk.progress()) as progress:
            pair = load_pair(
                settings.models, settings.text, mode=settings.decode.mode, catalog=catalog, progress=progress
            )
    interruption.check()
    return pair


@contextmanager
def closing_progress(progress: Progress) -> Iterator[Progress]:
    """Give the terminal's cursor back, however the work ends."""
    try:
        yield progress
    finally:
        progress.finish()


def stop_if_unheard() -> None:
    """Raise what ends the run where it would go on for nobody: a lost signal, a reader that is gone."""
    interruption.check()
    if reader_is_gone(sys.stdout):
        raise BrokenPipeError


@dataclass(frozen=True)
class Job:
    """A loaded pair and how its answers are to be shown.

    Of several processes that share a target one speaks; the others decode the same prompts, and show nothing.
    """

    pair: Pair
    settings: Effective
    talk: Talk
    recorder: TraceWriter | None
    show_prompt_ids: bool
    speaks: bool = True

    def show_text(self, prompt: Prompt) -> None:
        """Stream the answer to stdout."""
        if not self.speaks:
            return self.run(prompt, [])
        output = self.settings.output
        policy = decide_color(output.color, sys.stdout.isatty(), os.environ)
        if output.show_rejected and not policy.cues:
            self.talk.note("rejected tokens are shown only where the text is coloured")
        renderer = make_renderer(sys.stdout, policy, show_rejected=output.show_rejected)
        commentary = self.talk.commentary(plain=not policy.cues)
        try:
            self.run(prompt, [*commentary, renderer])
        finally:
            with interruption.deferred():
                renderer.close()  # also of a run that did not finish: its text is kept
        for sink in commentary:
            sink.close()

    def write_rows(self, prompts: Sequence[Prompt]) -> None:
        """Print a JSON line for each prompt. One that fails has an `error` in its line, and the next ones run."""
        failures = []
        for prompt in prompts:
            try:
                self.write_json(prompt, whole=False)
            except FlyError as error:
                if isinstance(error, LostProcessError | OutOfMemoryError) and self.settings.models.processes > 1:
                    raise  # this process is out of step with the others, or alone
                failures.append(error)
        if failures:
            raise FlyError(f"{len(failures)} of {len(prompts)} prompts failed: {failures[0].message}", failures[0].hint)

    def write_json(self, prompt: Prompt, *, whole: bool) -> None:
        """Print the run as JSON, also one that did not finish; `whole` adds tokens, settings and versions."""
        if not self.speaks:
            return self.run(prompt, [])
        result = Result()
        commentary = self.talk.commentary(plain=True)
        failure: BaseException | None = None
        try:
            self.run(prompt, [*commentary, result])
        except BaseException as error:
            failure = error
            raise
        finally:
            if not isinstance(failure, BrokenPipeError):
                with interruption.deferred():
                    result.close()
                    value = self.describe_run(prompt, result, failure) | (
                        self.describe_all(prompt, result) if whole else {}
                    )
                    write(sys.stdout, json_text(value) + "\n")
        for sink in commentary:
            sink.close()

    def run(self, prompt: Prompt, sinks: Sequence[Sink]) -> None:
        """Decode one prompt into the sinks."""
        from ..decode import decode

        if self.recorder:
            sinks = [*sinks, self.recorder]
        events = decode(self.pair, prompt, self.settings.decode, record=self.recorder is not None)
        beside = f"beside {self.pair.sizes()}"
        with memory_errors(f"reading the prompt {beside}"), self.talk.status("reading the prompt"):
            started = next(events)
        if self.show_prompt_ids and isinstance(started, Started):
            self.talk.lines([f"prompt ids: {list(started.prompt_ids)}"])
        with memory_errors(f"decoding {beside}"):
            for event in chain([started], events):
                stop_if_unheard()
                with interruption.deferred():
                    for sink in sinks:
                        sink.handle(event)

    def describe_run(self, prompt: Prompt, result: Result, failure: BaseException | None) -> dict[str, Any]:
        """Text, reasons and figures as JSON values."""
        value = result.as_json(prompt.id, unfinished="error" if isinstance(failure, Exception) else "interrupted")
        if isinstance(failure, FlyError):
            value["error"] = failure.message
        if self.show_prompt_ids:
            value["prompt_ids"] = result.prompt_ids
        return value

    def describe_all(self, prompt: Prompt, result: Result) -> dict[str, Any]:
        """Tokens, and all that the text depends on, as JSON values."""
        description = self.pair.describe()
        return {
            "tokens": result.tokens,
            "template_source": self.pair.codec.encode(prompt).template_source if result.prompt_ids else None,
            "settings": {
                "decode": result.settings or self.settings.decode.as_json(),
                "models": description.pop("models"),
                "text": asdict(self.settings.text),
            },
            **description,
        }

    def describe_setup(self) -> list[str]:
        """Where the models are, and every setting with its origin, one line each."""
        rows = zip(("target", "draft"), self.pair.describe()["placement"], strict=False)
        return [format_place(role, row) for role, row in rows] + common.format_values(self.settings.values)


def format_place(role: str, row: Mapping[str, Any]) -> str:
    """One line: which model, in which dtype, how big, on which devices."""
    size = size_text(row["weight_bytes"])
    form = row.get("quantize", "none")
    weights = row["dtype"] if form == "none" else f"{form} and {row['dtype']}"
    return f"placement: {role} {row['model']}, {weights}, {size} on {', '.join(row['devices'])}"
