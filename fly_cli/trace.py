"""Events as JSON lines, one an event, both ways; and recorded evidence judged again by other rules.

The first line says what the file is: `{"kind": "fly-trace", "version": 1}`. Every other line has the event's name in
`event` and the event's own fields. A file holds one run or several, one after the other.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO, Union, get_args, get_origin, get_type_hints

from .errors import FlyError, TraceError
from .events import Drafted, Event, Finished, Origin, Round, Started
from .json_text import MAX_INTEGER, read_json
from .verify import Evidence, Verdict, judge

KIND, VERSION = "fly-trace", 1
HEADER = {"kind": KIND, "version": VERSION}
EVENTS: Mapping[str, type[Event]] = {"started": Started, "drafted": Drafted, "round": Round, "finished": Finished}
NAMES = {event: name for name, event in EVENTS.items()}
MAX_SECONDS = 1e9  # for sums and rates of them to be numbers
MAX_HEADER_BYTES = 4096


# Writing


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as JSON values: its name in `event`, then its fields."""
    return {"event": NAMES[type(event)], **asdict(event)}


def dump_line(value: Mapping[str, Any]) -> str:
    """One line of JSON in ASCII, so that any text survives any encoding. Raises `ValueError` for NaN and infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


class TraceWriter:
    """A sink that writes each event as a line, at once. A path is opened now, before anything expensive runs.

    Raises `TraceError` where the file cannot be opened and `FlyError` where it cannot be written.
    """

    def __init__(self, target: TextIO | str | Path) -> None:
        self._owned = isinstance(target, str | Path)
        self._name = str(target) if self._owned else getattr(target, "name", "the trace")
        if isinstance(target, str | Path):
            try:
                self._stream: TextIO = open(target, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
            except (OSError, ValueError) as error:
                raise TraceError(
                    f"the trace `{target}` cannot be opened: {reason_of(error)}", hint="choose another `--trace` file"
                ) from error
        else:
            self._stream = target
        self._write(HEADER)

    def handle(self, event: Event) -> None:
        self._write(event_to_json(event))

    def close(self) -> None:
        if self._owned:
            self._stream.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        try:
            self._stream.write(dump_line(value))
            self._stream.flush()
        except OSError as error:
            raise FlyError(
                f"the trace `{self._name}` cannot be written: {reason_of(error)}",
                hint="free some space, or choose another `--trace` file",
            ) from error


# Reading


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds."""

    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()  # what the reader should know, such as a last line that was cut

    def runs(self) -> list[tuple[Event, ...]]:
        """The events of each run; the last run may be cut."""
        starts = [index for index, event in enumerate(self.events) if isinstance(event, Started)]
        ends = [*starts, len(self.events)][1:]
        return [self.events[start:end] for start, end in zip(starts, ends, strict=True)]


def read_trace(path: str | Path) -> Trace:
    """All events of a trace file. Raises `TraceError` that names the file and the line for anything else.

    A last line that was cut by the end of the process is left out, with a note.
    """
    try:
        with open(path, "rb") as file:
            return _read(file, str(path))
    except (OSError, ValueError) as error:
        raise TraceError(
            f"the trace `{path}` cannot be read: {reason_of(error)}", hint="give a file that `--trace` wrote"
        ) from error


def _read(file: BinaryIO, name: str) -> Trace:
    check_header(file.readline(MAX_HEADER_BYTES), f"{name}:1")
    events: list[Event] = []
    notes: list[str] = []
    order = Order()
    for number, line in enumerate(file, start=2):
        where = f"{name}:{number}"
        if not line.strip():
            continue
        try:
            event = parse_event(line)
            order.check(event)
        except ValueError as error:
            if not line.endswith(b"\n"):
                notes.append(f"line {number} of the trace is cut and was left out: the run that wrote it was ended")
                break
            raise TraceError(f"{where}: {error}", hint="give a file that `--trace` wrote, unchanged") from error
        events.append(event)
    if not events:
        notes.append("the trace holds no event: the run ended before its first token")
    elif not isinstance(events[-1], Finished):
        notes.append("the last run of the trace was interrupted")
    return Trace(tuple(events), tuple(notes))


def check_header(line: bytes, where: str) -> None:
    """Raise `TraceError` unless the line is the first line of a trace that this version reads."""
    try:
        header = load_json(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise TraceError(f"{where}: this is not a trace of `fly`", hint="give a file that `--trace` wrote")
    if header.get("version") != VERSION or isinstance(header["version"], bool):
        raise TraceError(
            f"{where}: the trace has version {header.get('version')!r:.40}, and this `fly` reads version {VERSION}",
            hint="read it with the `fly` that wrote it, or record it anew",
        )


def load_json(line: bytes) -> Any:
    """The line's value. Raises `ValueError` with one line of reason."""
    try:
        return read_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from error


def parse_event(line: bytes) -> Event:
    """The event of one line. Raises `ValueError` with one line of reason."""
    value = load_json(line)
    if not isinstance(value, dict):
        raise ValueError("a line is an object with the event's fields")
    name = value.pop("event", None)
    event = EVENTS.get(name) if isinstance(name, str) else None
    if event is None:
        raise ValueError(f"`event` is {name!r:.40}, and not one of {', '.join(EVENTS)}")
    built: Event = build(event, value, "")
    if isinstance(built, Round):
        check_round(built)
    return built


class Order:
    """Knows which event may come next: Started, (Drafted, Round)*, Finished, and so on."""

    def __init__(self) -> None:
        self._last: Event | None = None
        self._index = 0  # of the next round

    def check(self, event: Event) -> None:
        """Raise `ValueError` where the event has no place after the ones before it."""
        last = self._last
        match event:
            case Started():
                self._index = 0
                fits = True  # also after a run that was interrupted
            case Drafted():
                fits = isinstance(last, Started | Round) and event.index == self._index
            case Round():
                fits = isinstance(last, Drafted) and event.index == self._index and event.drafted == last.tokens
                self._index += 1
            case Finished():
                fits = isinstance(last, Started | Round)
        if not fits:
            before = f"after `{NAMES[type(last)]}`" if last else "at the start"
            raise ValueError(f"`{NAMES[type(event)]}` does not fit {before}, round {self._index} of the run")
        self._last = event


def check_round(event: Round) -> None:
    """Raise `ValueError` where the parts of a round contradict each other."""
    drafted = tuple(token.id for token in event.drafted)
    verdict = event.verdict
    if event.evidence.draft_ids != drafted:
        raise ValueError("`evidence.draft_ids` are not the drafted tokens")
    if verdict.num_kept > len(drafted):
        raise ValueError(f"`verdict` keeps {verdict.num_kept} of {len(drafted)} drafted tokens")
    tokens = tuple((token.id, token.origin) for token in event.tokens)
    if not tokens or tokens != committed(event.evidence, verdict)[: len(tokens)]:
        raise ValueError("`tokens` are not what the verdict keeps")


def build(kind: Any, value: Any, where: str) -> Any:
    """The value as the annotated type. Raises `ValueError` that names the field."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        return build_record(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        return build(next(part for part in get_args(kind) if part is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"`{where}` is not a list")
        part = get_args(kind)[0]
        return tuple(build(part, item, where) for item in value)
    if origin is not None:  # Mapping[str, Any]
        if not isinstance(value, dict):
            raise ValueError(f"`{where}` is not an object")
        return value
    if issubclass(kind, Enum):
        return build_choice(kind, value, where)
    return build_scalar(kind, value, where)


def build_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"`{where}` is not an object")
    hints = hints_of(kind)
    prefix = f"{where}." if where else ""
    if unknown := set(value) - set(hints):
        raise ValueError(f"unknown key `{prefix}{min(unknown)[:40]}`")
    required = (field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING)
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"`{prefix}{missing[0]}` is missing")
    return kind(**{name: build(hints[name], item, prefix + name) for name, item in value.items()})


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Evidence": Evidence, "Verdict": Verdict})


def build_choice(kind: type[Enum], value: Any, where: str) -> Enum:
    for choice in kind:
        if choice.value == value:
            return choice
    raise ValueError(f"`{where}` is {value!r:.40}, and not one of {', '.join(str(choice.value) for choice in kind)}")


def build_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= MAX_INTEGER else math.inf
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ValueError(f"`{where}` is {value!r:.40}, and not {names[kind]}")
    if kind is int and not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"`{where}` is out of range")
    if kind is float and not (0 <= value <= MAX_SECONDS if where.endswith("seconds") else math.isfinite(value)):
        raise ValueError(f"`{where}` is out of range")
    return value


def reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# Judging again


@dataclass(frozen=True, slots=True)
class OtherRules:
    """The rules of the walk, taken from a run's settings or changed."""

    entropy_threshold: float | None
    window_size: int
    strict_first: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first round that other rules would end differently."""

    index: int
    recorded: Verdict
    other: Verdict


@dataclass(frozen=True, slots=True)
class Rejudged:
    """What other rules say about a recorded run: nothing, beyond the first round in which they differ."""

    rules: OtherRules
    events: tuple[Event, ...]  # the run with the other verdicts, up to the divergence
    num_rounds: int  # in the recording
    rounds_compared: int  # that commit the same tokens by both rules
    tokens_compared: int  # in those rounds
    divergence: Divergence | None
    unmeasured: int | None  # the round at which a needed entropy is missing

    def as_json(self) -> dict[str, Any]:
        """What came out, without the events, as JSON values."""
        return {
            **asdict(self.rules),
            "num_rounds": self.num_rounds,
            "rounds_compared": self.rounds_compared,
            "tokens_compared": self.tokens_compared,
            "divergence": asdict(self.divergence) if self.divergence else None,
            "unmeasured": self.unmeasured,
        }

    def describe(self) -> str:
        """One line on what came out."""
        rules = self.rules
        gate = "the gate shut" if rules.entropy_threshold is None else f"entropy threshold {rules.entropy_threshold:g}"
        head = f"judged again with {gate}, window {rules.window_size}, strict first {rules.strict_first}: "
        if self.unmeasured is not None:
            return head + f"round {self.unmeasured} lacks an entropy that this needs, so it ends there"
        if self.divergence is None:
            return head + f"the same text, in all {self.num_rounds} rounds"
        was, now = self.divergence.recorded.num_kept, self.divergence.other.num_kept
        return head + (
            f"the same {self.tokens_compared} tokens in {self.rounds_compared} of {self.num_rounds} rounds; "
            f"round {self.divergence.index} would keep {now} drafted tokens, not {was}, "
            "and what was recorded after it no longer applies"
        )


def recorded_rules(started: Started) -> OtherRules:
    """The rules that a run was judged by. Raises `TraceError` where its settings do not say."""
    try:
        return build(OtherRules, {name: started.settings[name] for name in hints_of(OtherRules)}, "settings")  # type: ignore[no-any-return]
    except (KeyError, ValueError) as error:
        raise TraceError(
            f"the trace does not say by which rules it was judged: {error}", hint="record the run again with `--trace`"
        ) from error


def rejudge(
    events: Sequence[Event],
    *,
    entropy_threshold: float | None = None,
    window_size: int | None = None,
    strict_first: int | None = None,
) -> Rejudged:
    """What a recorded run would have been by other rules (None: as recorded), as far as its evidence goes.

    The drafts are taken as recorded. From the first round that commits other tokens on, the models would have
    seen another text, so the recording says nothing more. Raises `TraceError` for a run without its rules.
    """
    started = next((event for event in events if isinstance(event, Started)), None)
    if started is None:
        raise TraceError("there is no run to judge again", hint="record one with `--trace`")
    changes: dict[str, Any] = {
        "entropy_threshold": entropy_threshold,
        "window_size": window_size,
        "strict_first": strict_first,
    }
    rules = replace(recorded_rules(started), **{name: value for name, value in changes.items() if value is not None})
    agreed: list[Event] = []
    rounds = [event for event in events if isinstance(event, Round)]
    compared = tokens = 0
    divergence: Divergence | None = None
    unmeasured: int | None = None
    for event in events:
        if isinstance(event, Round):
            try:
                other = judge(event.evidence, rules)
            except ValueError:
                unmeasured = event.index
            else:
                if not commits_the_same(event, other):
                    divergence = Divergence(event.index, event.verdict, other)
            if divergence or unmeasured is not None:
                agreed.pop()  # the round's `Drafted`
                break
            event = replace(event, verdict=other)
            compared, tokens = compared + 1, tokens + len(event.tokens)
        agreed.append(event)
    return Rejudged(rules, tuple(agreed), len(rounds), compared, tokens, divergence, unmeasured)


def commits_the_same(event: Round, other: Verdict) -> bool:
    """Whether the verdict commits the round's tokens, as they were cut."""
    recorded, changed = committed(event.evidence, event.verdict), committed(event.evidence, other)
    return changed[: len(event.tokens)] == recorded[: len(event.tokens)] and (
        changed == recorded or len(event.tokens) < len(recorded)
    )


def committed(evidence: Evidence, verdict: Verdict) -> tuple[tuple[int, Origin], ...]:
    """Id and origin of every token that the verdict keeps, and of the target's own."""
    kept = zip(evidence.draft_ids, verdict.origins, strict=False)
    return (*kept, (verdict.final_id, verdict.final_origin))
