"""Runs a plan: prompts x arms, one row for each answered turn. A loop over `decode`; who takes the rows keeps them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from .bench_plan import PEERS, WARMUP_TOKENS, Arm, Plan, labels_of, prompt_seed, turn_prompt, turns_of
from .bench_rows import Answered, Key, Row, failed_row, ok_row
from .decode import decode
from .errors import FlyError, is_out_of_memory, out_of_memory
from .events import Finished, Round, Started
from .peers import answer_with
from .prompts import Prompt
from .settings import DecodeSettings
from .stats import Tally

if TYPE_CHECKING:
    from .models import Pair

Grader = Callable[[Prompt, str], Mapping[str, Any]]  # the row's `score` and `scorer`


def run(
    plan: Plan, pair: Pair, *, done: Mapping[Key, str | None] | None = None, grade: Grader | None = None
) -> Iterator[Row]:
    """A row for each turn of the plan, as it is finished.

    `done` has what an earlier run did: the text of each turn, None where it failed. A turn that fails gives a failed
    row, and the run goes on. Every turn starts with empty caches, so that no arm profits from what another has read.
    """
    done = done or {}
    for repeat, prompt, arm in plan.conversations():
        yield from converse(pair, prompt, arm, repeat, plan.seed, done, grade)


def converse(
    pair: Pair,
    prompt: Prompt,
    arm: Arm,
    repeat: int,
    seed: int,
    done: Mapping[Key, str | None],
    grade: Grader | None,
) -> Iterator[Row]:
    """The rows of one conversation that are not done yet. Each turn goes on from the arm's own answers."""
    turns = turns_of(prompt)
    texts: list[str] = []
    for turn in range(len(turns)):
        key = (prompt.id, arm.name, repeat, turn)
        if key in done:
            text = done[key]
        elif len(texts) < turn:
            text = None
            yield failed_row(key, labels_of(prompt), f"turn {len(texts)} of the conversation failed")
        else:
            settings = replace(arm.settings, seed=prompt_seed(seed, prompt.id))
            last = grade if turn == len(turns) - 1 else None
            row = measure(pair, turn_prompt(prompt, texts), arm.kind, settings, key, last)
            text = row["text"] if row["status"] == "ok" else None
            yield row
        if text is not None and len(texts) == turn:
            texts.append(text)


def measure(pair: Pair, prompt: Prompt, kind: str, settings: DecodeSettings, key: Key, grade: Grader | None) -> Row:
    """The row of one turn."""
    labels = labels_of(prompt)
    forget(pair)
    memory = PeakMemory()
    failure = None
    began = perf_counter()
    try:
        answered = answer(pair, prompt, kind, settings)
    except Exception as error:  # what one turn cannot do says nothing about the others
        failure = describe_failure(error, pair)
    costs = {"peak_memory_bytes": memory.read(), "wall_s": perf_counter() - began}
    if failure is not None:
        forget(pair)
        release_memory()
        return failed_row(key, labels, failure, **costs)
    row = ok_row(key, labels, answered, **costs)
    return row | dict(grade(prompt, answered.text)) if grade else row


def answer(pair: Pair, prompt: Prompt, kind: str, settings: DecodeSettings) -> Answered:
    """What an arm of this kind makes of the prompt."""
    if kind in PEERS:
        return answer_with(kind, pair, prompt, settings)
    tally, ids, text = Tally(), list[int](), ""
    for event in decode(replace(pair, draft=None) if kind == "lookup" else pair, prompt, settings):
        tally.handle(event)
        match event:
            case Started():
                ids.append(event.first.id)
            case Round():
                ids += [token.id for token in event.tokens]
            case Finished():
                text = event.text
    return Answered(text, ids, tally.summary().as_json())


def warm_up(pair: Pair, plan: Plan, times: int) -> Iterator[str]:
    """Run the first prompt a few tokens long on every arm, `times` times; what failed is told.

    None of it is in the rows: first runs pay for what later ones find ready.
    """
    for _ in range(times if plan.prompts else 0):
        for arm in plan.arms:
            forget(pair)
            few = min(WARMUP_TOKENS, arm.settings.max_new_tokens)
            try:
                answer(pair, plan.prompts[0], arm.kind, replace(arm.settings, max_new_tokens=few, seed=0))
            except Exception as error:
                yield f"the warm-up of `{arm.name}` failed: {describe_failure(error, pair)}"
    forget(pair)


def forget(pair: Pair) -> None:
    """Empty both caches."""
    for model in pair.models:
        model.reset()


def release_memory() -> None:
    """Give back what a failed turn held, for the next one to use."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def describe_failure(error: Exception, pair: Pair) -> str:
    """What went wrong, and what to do about it, on one line."""
    if is_out_of_memory(error):
        error = out_of_memory(f"answering beside {pair.sizes()}", error)
    if isinstance(error, FlyError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class PeakMemory:
    """The most memory that was in use since it was made: of all GPUs where there are any, else of the process."""

    def __init__(self) -> None:
        self._devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            with suppress(OSError):  # Linux; elsewhere the peak is that of the process so far
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def read(self) -> int | None:
        """Bytes, or None where nobody knows."""
        if self._devices:
            return sum(torch.cuda.max_memory_allocated(device) for device in self._devices)
        with suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return process_peak()


def process_peak() -> int | None:
    """The peak of the process so far."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def done_texts(rows: Iterator[Row] | Sequence[Row]) -> dict[Key, str | None]:
    """What `run` needs to know of earlier rows."""
    return {
        (row["prompt_id"], row["arm"], row["repeat"], row["turn"]): row.get("text") if row["status"] == "ok" else None
        for row in rows
    }
