"""The results folder of a bench: a header of settings, and one row for each answered turn, safe on disk at once.

    settings.json      the header: everything that the rows depend on
    rows.jsonl         a row a line: (prompt, arm, repeat, turn), in the order of the plan
    rows.rank1.jsonl   rows of one of several processes, until they are merged

A process that is killed leaves at worst half a line at the end, which the next reader drops.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import FlyError, UsageError
from .files import written_whole
from .json_text import MAX_INTEGER, json_text, read_json
from .stats import Summary

FORMAT = 2
HEADER, ROWS = "settings.json", "rows.jsonl"
RANK_ROWS = "rows.rank*.jsonl"
UNCOMPARED = {"sessions"}  # parts of the header that may differ when a run goes on
FIGURES = tuple(field.name for field in fields(Summary))
NUMBERS = {*FIGURES, "score", "wall_s", "peak_memory_bytes"}  # what `fits` has no other rule for
LARGEST_ID = 2**31 - 1
LENGTH = re.compile("[0-9]{1,5}")  # of a draft, as the key of a histogram

Row = dict[str, Any]
Key = tuple[str, str, int, int]  # prompt id, arm, repeat, turn


@dataclass(frozen=True, slots=True)
class Answered:
    """What an arm made of one turn. `figures` are those of `Summary.as_json` that the arm can tell."""

    text: str
    ids: Sequence[int]
    figures: Mapping[str, Any] = field(default_factory=dict)


def ok_row(key: Key, labels: Mapping[str, Any], answered: Answered, **more: Any) -> Row:
    """The row of a turn that was answered; figures that the arm cannot tell are None."""
    figures = dict.fromkeys(FIGURES) | dict(answered.figures) | {"prompt_id": key[0]}
    return {
        **_start(key, labels, "ok", None),
        **figures,
        "text": answered.text,
        "ids": list(answered.ids),
        "score": None,
        "scorer": None,
        **more,
    }


def failed_row(key: Key, labels: Mapping[str, Any], error: str, **more: Any) -> Row:
    """The row of a turn that could not be answered."""
    return {**_start(key, labels, "failed", error), **more}


def _start(key: Key, labels: Mapping[str, Any], status: str, error: str | None) -> Row:
    prompt_id, arm, repeat, turn = key
    return {
        "prompt_id": prompt_id,
        **labels,
        "arm": arm,
        "repeat": repeat,
        "turn": turn,
        "status": status,
        "error": error,
    }


def key_of(row: Mapping[str, Any]) -> Key:
    """What a row is about; no two rows of a result share it."""
    return row["prompt_id"], row["arm"], row["repeat"], row["turn"]


# --- the folder -----------------------------------------------------------------------------------------------------


class Results:
    """A results folder that is being filled. Several processes may share it, each with a `rank` of its own."""

    def __init__(self, folder: Path, rank: int | None = None) -> None:
        self.folder = folder
        self._path = folder / (ROWS if rank is None else f"rows.rank{rank}.jsonl")
        self._descriptor: int | None = None

    def append(self, row: Row) -> None:
        """Put the row on disk before anything else happens."""
        if self._descriptor is None:
            cut_half_line(self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        write_all(self._descriptor, to_line(row))
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def rows(self) -> Iterator[Row]:
        """Every row in the folder once, whichever process wrote it."""
        seen: set[Key] = set()
        for path in [self.folder / ROWS, *rank_files(self.folder)]:
            for row in read_rows(path):
                if key_of(row) not in seen:
                    seen.add(key_of(row))
                    yield row

    def merge(self, order: Iterable[Key]) -> None:
        """Put the rows of all processes and sessions into one file, in `order`. The others must have closed theirs."""
        ranks = rank_files(self.folder)
        place = {key: number for number, key in enumerate(order)}
        places = [place.get(key_of(row), len(place)) for row in self.rows()]
        if not ranks and places == sorted(places):
            return
        self.close()
        rows = sorted(self.rows(), key=lambda row: place.get(key_of(row), len(place)))
        write_whole(self.folder / ROWS, b"".join(map(to_line, rows)))
        for path in ranks:  # a crash before this line leaves copies, which `rows` passes over
            path.unlink()


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(RANK_ROWS))


def begin(folder: Path, header: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder and its header, or take up what is there. Raises what `check_folder` raises."""
    check_folder(folder, header, resume=resume)
    make_folder(folder)
    before = read_header(folder) if (folder / HEADER).exists() else {}
    sessions = [*before.get("sessions", ()), *header.get("sessions", ())]
    write_whole(folder / HEADER, to_json({**before, **header, "sessions": sessions}))


def make_folder(folder: Path) -> None:
    """Make the folder if there is none. Raises `FlyError` where that fails, or where nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FlyError(f"the folder `{folder}` cannot be made: {reason}", hint="choose another `--out`") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FlyError(f"the folder `{folder}` cannot be written to", hint="choose another `--out`")


def check_folder(folder: Path, header: Mapping[str, Any], *, resume: bool) -> None:
    """Raise `UsageError` where the folder holds something, unless `resume` is to go on with the same settings.

    Of the header only the parts that are given are compared: some are known before a model is loaded, some after.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"`{folder}` is no folder", hint="give another `--out`")
    if not folder.exists() or not any(not path.name.startswith(f".{HEADER}.") for path in folder.iterdir()):
        return  # at most what a kill left of a header that was being written
    if not resume:
        raise UsageError(
            f"`{folder}` is not empty", hint="`--resume` goes on where it stopped; or give another `--out`"
        )
    changes = differences(read_header(folder), header)
    if changes:
        raise UsageError(
            f"`{folder}` was made with other settings: {'; '.join(changes)}",
            hint="use the same settings, or another `--out`",
        )


def read_header(folder: Path) -> dict[str, Any]:
    """The header of a results folder. Raises `UsageError` where there is none."""
    try:
        header = read_json((folder / HEADER).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"`{folder}` holds no results: it has no {HEADER}", hint="check the path") from None
    except ValueError:
        raise UsageError(f"`{folder / HEADER}` is not JSON", hint="that folder is damaged; use another") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(f"`{folder}` has another format", hint=f"this version of fly reads format {FORMAT}")
    sessions = header.get("sessions", [])
    if not isinstance(header.get("arms", {}), dict) or not isinstance(sessions, list) or not all_records(sessions):
        raise UsageError(f"`{folder / HEADER}` is no header of a bench", hint="that folder is damaged; use another")
    return header


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, as `arms.fly.settings.draft_tokens 15, now 5`, in the parts that both headers have."""
    shared = [name for name in now if name in before and name not in UNCOMPARED]
    return [line for name in shared for line in _differences(name, before[name], now[name])]


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    before, now = json.loads(to_json(before)), json.loads(to_json(now))  # tuples as lists, numbers as keys as texts
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before and all_records(before) and all_records(now) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(f"{name}.{place}", *pair)
    elif before != now:
        yield f"{name} {_short(before)}, now {_short(now)}"


def all_records(value: Any) -> bool:
    """Whether this is a list of objects, whose differing fields say more than the beginnings of both lists."""
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _short(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


def shortened(text: str) -> str:
    """Text from elsewhere as a part of a message."""
    return text if len(text) <= 40 else text[:37] + "..."


# --- files ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, if there is one. Half a line at the end is no row. Raises `UsageError` for a bad line."""
    if not path.exists():
        return
    with path.open("rb") as lines:  # in bytes: only LF ends a line, and answers may hold U+2028
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            if (row := parse_row(line)) is None:
                raise UsageError(f"{path}:{number} is no row of a bench", hint="remove that line")
            yield row


def parse_row(line: bytes) -> Row | None:
    """The row on a line; None where something that the figures need is missing, as in a damaged or edited file."""
    try:
        row = read_json(line.decode("utf-8"))
        named, numbered = (row["prompt_id"], row["arm"]), (row["repeat"], row["turn"])
        needed = FIGURES if row["status"] == "ok" else ("error",)
    except (ValueError, KeyError, TypeError):
        return None
    sound = all(isinstance(one, str) for one in named) and all(type(one) is int for one in numbered)
    return row if sound and row.keys() >= set(needed) and all(fits(name, row[name]) for name in row) else None


def fits(name: str, value: Any) -> bool:
    """Whether a field of a row has a value that can be counted with; None can, and any in fields that nobody counts."""
    if value is None:
        return True
    match name:
        case "prompt_id" | "arm" | "finish_reason" | "text":
            return isinstance(value, str)
        case "ids":
            return isinstance(value, list) and all(type(one) is int and abs(one) <= LARGEST_ID for one in value)
        case "acceptance_by_position":
            return isinstance(value, list) and all(map(is_number, value))
        case "acceptance_histogram" | "draft_length_histogram":
            return is_counts(value) and all(LENGTH.fullmatch(key) for key in value)
        case "origins":
            return is_counts(value)
        case _:
            return is_number(value) or name not in NUMBERS


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER


def is_counts(value: Any) -> bool:
    """Whether this is an object of how often there was what."""
    return isinstance(value, dict) and all(type(one) is int and 0 <= one <= MAX_INTEGER for one in value.values())


def cut_half_line(path: Path) -> None:
    """Take away what a killed process left behind the last whole line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            position = start
        file.truncate(0)


def to_line(row: Mapping[str, Any]) -> bytes:
    return json_text(row).encode("utf-8", "backslashreplace") + b"\n"


def to_json(value: Any) -> bytes:
    return json_text(value, indent=2).encode("utf-8", "backslashreplace") + b"\n"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step as others see it."""
    with written_whole(path) as unfinished:
        unfinished.write_bytes(content)


def write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
