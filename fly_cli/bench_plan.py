"""What a bench compares, on which prompts, in which order. Decided before any model is loaded."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .bench_rows import Key, to_json
from .config import convert, did_you_mean, parse
from .errors import PromptError, SettingsError, UsageError
from .prompts import JSONL_SUFFIXES, Prompt, Rows, read_jsonl, read_text
from .settings import DecodeSettings, check_range

OWN_ARMS = {  # name -> the mode it decodes in
    "target": "target",
    "exact": "exact",
    "fly": "fly",
    "lookup": "fly",  # without a draft model: drafts are copied from the text
}
PEERS = ("hf", "hf-assisted", "hf-lookup")  # transformers' own ways to decode
ARMS = (*OWN_ARMS, *PEERS)
DEFAULT_ARMS = "target,exact,fly"
STDIN = Path("-")
WARMUP_TOKENS = 16  # an arm's first runs pay for what later ones find ready
NEED_DRAFT = ("exact", "fly", "hf-assisted")  # exact and fly copy from the text where the draft is `lookup`
SHARED_SETTINGS = {"mode", "seed", "stop", "max_new_tokens", "temperature", "top_p", "top_k"}  # the same for all arms
SWEPT = tuple(field.name for field in fields(DecodeSettings) if field.name not in SHARED_SETTINGS)


# --- arms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared: how to decode, under a name."""

    name: str
    kind: str  # one of ARMS
    settings: DecodeSettings

    def as_json(self) -> dict[str, Any]:
        settings = self.settings.as_json()
        del settings["seed"]  # every prompt has its own
        return {"kind": self.kind, "settings": settings}


Build = Callable[..., DecodeSettings]  # settings with some values replaced


def choose_arms(names: str, build: Build, sweep: Iterable[str] = ()) -> tuple[list[Arm], list[str]]:
    """The arms that `--arms` and `--sweep` ask for, and what the user should know about them."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in ARMS:
            raise UsageError(f"no arm `{name}`", hint=f"choose among {', '.join(ARMS)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"`--arms` is {names!r}", hint=f"name each arm once, as --arms {DEFAULT_ARMS}")
    grid, notes = sweep_arms(sweep, build)
    if grid and "fly" not in chosen:
        chosen.append("fly")
    arms = [
        arm
        for name in chosen
        for arm in (grid if grid and name == "fly" else [Arm(name, name, build(mode=OWN_ARMS.get(name, "target")))])
    ]
    if any(arm.kind in PEERS and arm.settings.temperature > 0 for arm in arms):
        raise UsageError(
            "the arms of transformers are greedy, and `--temperature` is above 0",
            hint=f"drop the temperature, or compare {DEFAULT_ARMS} only",
        )
    return arms, notes


def sweep_arms(sweep: Iterable[str], build: Build) -> tuple[list[Arm], list[str]]:
    """An arm of `fly` for each point of the grid, [] without one, and a note on points that make no sense."""
    axes: dict[str, list[Any]] = {}
    for item in sweep:
        name, equals, values = item.partition("=")
        setting = name.strip().lstrip("-").replace("-", "_")
        if setting not in SWEPT:
            raise UsageError(f"`--sweep` cannot vary `{name.strip()}`", hint=did_you_mean(setting, SWEPT))
        if setting in axes:
            raise UsageError(f"`--sweep` names `{setting}` twice", hint=f"give --sweep {setting}=1,2")
        texts = [text.strip() for text in values.split(",") if text.strip()]
        where = f"`--sweep {name.strip()}`"
        axes[setting] = [convert(setting, parse(setting, text), where) for text in texts]
        if not equals or not texts or len(set(axes[setting])) < len(texts):
            raise UsageError(f"`--sweep` is {item!r}", hint="give different values, as --sweep draft-tokens=5,10")
    if not axes:
        return [], []
    arms, idle = [], []
    for point in itertools.product(*axes.values()):
        given = dict(zip(axes, point, strict=True))
        arm = changed_arm(build, given)
        if arm.settings.window_size >= arm.settings.draft_tokens:
            idle.append(arm.name)
        else:
            arms.append(arm)
    if not arms:
        raise SettingsError(
            "no point of the sweep has a window smaller than its draft", hint="sweep smaller windows or longer drafts"
        )
    notes = [f"left out, for no window fits in the draft: {', '.join(idle)}"] if idle else []
    return arms, notes


def changed_arm(build: Build, changes: Mapping[str, Any]) -> Arm:
    """Fly with these settings replaced, under a name that tells them."""
    text = ",".join(f"{name}={show(value)}" for name, value in changes.items())
    return Arm(f"fly[{text}]", "fly", build(mode="fly", **changes))


def show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """The prompts of a bench, each with an id of its own, and how they came about."""

    prompts: tuple[Prompt, ...]
    files: tuple[dict[str, str], ...]  # name and sha256 of each
    read: int  # rows in the files, bad ones included
    limits: Sequence[int | None]  # of each file: its first prompts that may be taken
    samples: Sequence[int | None]  # of each file: how many of these at random
    skipped: tuple[str, ...] = ()  # where and why, a line each
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        contents = to_json([asdict(prompt) for prompt in self.prompts])
        return {
            "files": list(self.files),
            "limits": list(self.limits),
            "samples": list(self.samples),
            "read": self.read,
            "skipped": list(self.skipped),
            "count": len(self.prompts),
            "sha256": hashlib.sha256(contents).hexdigest(),
        }


def choose_prompts(
    files: Sequence[Path],
    *,
    limit: Sequence[int] = (),
    sample: Sequence[int] = (),
    seed: int = 0,
    skip_invalid: bool = False,
    raw: bool = False,
    read_stdin: Callable[[], bytes | None] = lambda: None,
) -> Chosen:
    """The prompts of all files, checked; of each file at most the first `limit`, of these `sample` at random.

    Both are one count for all files, or one for each of them; none takes everything.
    The file `-` stands for rows on standard input, which `read_stdin` gives.
    Raises `UsageError` for another number of counts, and `PromptError` for a file that cannot be read, for the first
    bad row (unless `skip_invalid` lists such rows instead), and for chats where `raw` sends plain text.
    """
    limits = each_file("limit", limit, len(files))
    samples = each_file("sample", sample, len(files))
    prompts: list[Prompt] = []
    notes: list[str] = []
    skipped: list[str] = []
    read = 0
    facts = []
    for file, first, count in zip(files, limits, samples, strict=True):
        content = (read_stdin() or b"") if file == STDIN else read_bytes(file)
        rows = read_rows(file, content, skip_invalid=skip_invalid, raw=raw)
        read += rows.read
        skipped += [f"{row.where}: {row.reason}" for row in rows.skipped]
        notes += rows.notes
        facts.append({"name": file.name, "sha256": hashlib.sha256(content).hexdigest()})
        chosen = list(rows.prompts[:first])
        prompts += chosen if count is None else sample_evenly(chosen, count, random.Random(f"{seed}:{file.name}"))
    for prompt in prompts:
        if raw and (prompt.messages is not None or len(turns_of(prompt)) > 1):
            raise PromptError(f"`{prompt.id}` is a chat, which `--raw` cannot send", hint="drop `--raw`")
    unique, repeated = with_unique_ids(prompts)
    if repeated:
        notes.append(f"{len(repeated)} prompts share an id with an earlier one, as {repeated[0]}; they got #2, #3 ...")
    return Chosen(tuple(unique), tuple(facts), read, limits, samples, tuple(skipped), tuple(notes))


def each_file(name: str, counts: Sequence[int], num_files: int) -> Sequence[int | None]:
    """The count of each file, from one for all files or one for each; None where nothing was given."""
    for count in counts:
        check_range(name, count, 1)
    if len(counts) <= 1:
        return [*counts, None][:1] * num_files
    if len(counts) != num_files:
        raise UsageError(
            f"`--{name}` is given {len(counts)} times, and the number of files is {num_files}",
            hint="give it once for all files, or once for each file, in their order",
        )
    return counts


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PromptError(f"cannot read `{file}`: {reason}", hint="check the path") from None


def read_rows(file: Path, content: bytes, *, skip_invalid: bool, raw: bool) -> Rows:
    """The rows of JSON lines, or a text file as one prompt. A pipe has no name that could tell: it holds rows.

    Nothing is read again: a pipe can be read only once.
    """
    if file == STDIN or file.suffix.lower() in JSONL_SUFFIXES or not file.is_file():
        name = "standard input" if file == STDIN else str(file)
        return read_jsonl(content, name, skip_invalid=skip_invalid)
    text = read_text(content, file, raw=raw)
    return Rows(text.prompts, (), text.notes)


def sample_evenly(prompts: Sequence[Prompt], count: int, chance: random.Random) -> list[Prompt]:
    """`count` prompts at random, as evenly over the subtasks as they go, in their order."""
    groups: dict[str | None, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        labels = labels_of(prompt)
        groups[labels["subtask"] or labels["category"]].append(number)
    for group in groups.values():
        chance.shuffle(group)
    rounds = itertools.zip_longest(*groups.values())
    drawn = [number for each in rounds for number in each if number is not None]
    return [prompts[number] for number in sorted(drawn[:count])]


def with_unique_ids(prompts: Iterable[Prompt]) -> tuple[list[Prompt], list[str]]:
    """The prompts, those whose id was there before renamed, and the ids that they had."""
    used: set[str] = set()
    unique, repeated = [], []
    for prompt in prompts:
        name, copy = prompt.id, 1
        while name in used:
            copy += 1
            name = f"{prompt.id}#{copy}"
        if name != prompt.id:
            repeated.append(prompt.id)
        used.add(name)
        unique.append(replace(prompt, id=name))
    return unique, repeated


def labels_of(prompt: Prompt) -> dict[str, str | None]:
    """What a prompt's rows are grouped by."""
    values = {name: prompt.fields.get(name) for name in ("category", "subtask", "task")}
    given = {name: value for name, value in values.items() if isinstance(value, str) and value}
    return {"category": next(iter(given.values()), "all"), "subtask": given.get("subtask")}


def turns_of(prompt: Prompt) -> Sequence[str | None]:
    """What the user says, turn by turn; [None] for a prompt that is one turn, or a chat of its own."""
    turns = prompt.fields.get("turns")
    return turns if isinstance(turns, list) and len(turns) > 1 else [None]


def turn_prompt(prompt: Prompt, answers: Sequence[str]) -> Prompt:
    """The prompt of the turn after those `answers`: the conversation so far."""
    if not answers:
        return prompt
    messages: list[Mapping[str, str]] = []
    turns = turns_of(prompt)
    for said, answer in zip(turns, answers, strict=False):
        messages += [{"role": "user", "content": said or ""}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": turns[len(answers)] or ""})
    return Prompt(prompt.id, messages=tuple(messages), fields=prompt.fields)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The seed of one prompt: the same wherever it stands, and whichever arm answers it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:4])


# --- order ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Every prompt with every arm, `repeat` times.

    Arms take turns prompt by prompt, so that a machine that drifts hits them alike, and the one that goes first changes
    with the prompt.
    """

    prompts: Sequence[Prompt]
    arms: Sequence[Arm]
    repeat: int = 1
    seed: int = 0

    def conversations(self) -> Iterator[tuple[int, Prompt, Arm]]:
        """(repeat, prompt, arm) in the order in which they run."""
        for repeat in range(self.repeat):
            for index, prompt in enumerate(self.prompts):
                first = (index + repeat) % len(self.arms)
                for arm in (*self.arms[first:], *self.arms[:first]):
                    yield repeat, prompt, arm

    def row_keys(self) -> list[Key]:
        """Every row that there will be, in order."""
        return [
            (prompt.id, arm.name, repeat, turn)
            for repeat, prompt, arm in self.conversations()
            for turn in range(len(turns_of(prompt)))
        ]

    def share(self, rank: int, world: int) -> Plan:
        """The part of one of `world` processes."""
        return replace(self, prompts=self.prompts[rank::world])
