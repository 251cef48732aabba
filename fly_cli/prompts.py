"""Prompts from arguments, files, standard input and JSON lines, as records; knows no tokenizer.

Text rules, the same for standard input and for `-f` files:
- UTF-8, or UTF-16/UTF-32 with a byte-order mark; the mark is no part of the text. Bytes that cannot be read
  become U+FFFD, with a note that names the first one's offset.
- With a chat template, exactly one final newline (LF or CRLF) is dropped: `echo hi |`, `printf hi |` and the
  argument `hi` are the same prompt. Raw prompts keep every byte. Other line ends stay as they are.
- Piped text comes before the argument: with a blank line between in a chat, with nothing between when raw.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .errors import PromptError
from .json_text import read_json

WAIT_NOTE = "waiting for standard input to end (`--no-stdin` leaves it unread)"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PROMPT_KEYS = ("prompt", "messages", "turns")
BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark begins with the one of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a plain `text` (one user turn, or raw text) or the `messages` of a chat, never both.

    `fields` keeps what else a JSON row had (`turns` included).
    """

    id: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise PromptError(f"prompt `{self.id}` needs a text or messages, one of the two")

    def is_blank(self) -> bool:
        """True where no character but white space is left to answer."""
        contents = [self.text or ""] if self.messages is None else [message["content"] for message in self.messages]
        return not any(content.strip() for content in contents)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The prompts of one command, in order, and what the user should know about them."""

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is no prompt: where it is (`file:line`), and why not."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one JSON lines file; blank lines count as none."""

    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def read(self) -> int:
        """Rows read, kept or skipped."""
        return len(self.prompts) + len(self.skipped)


def gather(
    arguments: Sequence[str],
    files: Sequence[Path | str] = (),
    stdin: bytes | None = None,
    *,
    raw: bool = False,
) -> Gathered:
    """The prompts of a command line: each argument and each file is one, a JSON lines file is one a row.

    `stdin` is what was read from standard input (None: nothing). The argument `-` stands for it, and is an error
    where there is none. Raises `PromptError` for a prompt that is missing, empty or unreadable.
    """
    notes: list[str] = []
    piped = _read_text(stdin or b"", "standard input", notes, raw=raw)
    if not raw and not piped.strip():
        piped = ""
    if "-" in arguments and not piped:
        raise PromptError("`-` asks for a prompt on standard input, and nothing came", hint="pipe a text into `fly`")
    prompts = []
    for number, argument in enumerate((one for one in arguments if one != "-"), start=1):
        text = replace_surrogates(argument)
        if text != argument:
            notes.append(f"argument {number} has bytes that are not UTF-8; they became U+FFFD")
        prompts.append(Prompt(f"argument-{number}", text=_join(piped, text, raw=raw)))
    for file in map(Path, files):
        if file.suffix.lower() in JSONL_SUFFIXES:
            if piped:
                raise PromptError(
                    f"text on standard input has no place before the rows of `{file}`",
                    hint="`--no-stdin` leaves standard input unread",
                )
            rows = read_jsonl(file, str(file))
            prompts += rows.prompts
            notes += rows.notes
        else:
            text = _read_text(_read_file(file), str(file), notes, raw=raw)
            prompts.append(Prompt(file.name, text=_join(piped, text, raw=raw)))
    if not prompts and piped:
        prompts.append(Prompt("stdin", text=piped))
    _check(prompts, raw=raw)
    return Gathered(tuple(prompts), (*notes, *_turn_notes(prompts)))


def read_text(data: bytes, file: Path, *, raw: bool = False) -> Gathered:
    """The bytes of a text file as one prompt. Raises `PromptError` for an empty one."""
    notes: list[str] = []
    prompts = [Prompt(file.name, text=_read_text(data, str(file), notes, raw=raw))]
    _check(prompts, raw=raw)
    return Gathered(tuple(prompts), tuple(notes))


def read_jsonl(source: Path | str | bytes, name: str, *, skip_invalid: bool = False) -> Rows:
    """The prompts of a JSON lines file (a path, or its bytes); `name` is what messages call it.

    Rows are `{"prompt"}`, `{"messages"}` or `{"turns"}` (its first turn is the text); `id`, else `question_id`,
    else `<stem>:<line>` names the prompt. All rows are checked. Raises `PromptError` with `name:line` and the
    reason of the first bad row, unless `skip_invalid` lists such rows instead, and where no prompt is left.
    """
    data = source if isinstance(source, bytes) else _read_file(Path(source))
    text, notes = decode_text(data, name)
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    mended: list[int] = []  # lines with a lone surrogate
    for number, line in _lines(text):
        try:
            row, changed = _parse(line)
            mended += [number] * changed
            prompts.append(_prompt_of(row, f"{Path(name).stem}:{number}"))
        except ValueError as error:
            skipped.append(Skipped(f"{name}:{number}", str(error)))
    if skipped and not skip_invalid:
        more = f"; {len(skipped) - 1} more rows are bad" if len(skipped) > 1 else ""
        raise PromptError(
            f"{skipped[0].where}: {skipped[0].reason}{more}",
            hint='a row is an object with "prompt", "messages" or "turns"',
        )
    if not prompts:
        raise PromptError(f"no prompts in `{name}`", hint='write one JSON object a line, such as {"prompt": "hi"}')
    if mended:
        notes = (*notes, f"{name}:{mended[0]} has half of a surrogate pair; such halves became U+FFFD")
    return Rows(tuple(prompts), tuple(skipped), notes)


def decode_text(data: bytes, name: str) -> tuple[str, tuple[str, ...]]:
    """The text of `data` without its byte-order mark, and a note if some bytes could not be read."""
    mark, encoding = next((pair for pair in BYTE_ORDER_MARKS if data.startswith(pair[0])), (b"", "utf-8"))
    body = data[len(mark) :]
    try:
        return body.decode(encoding), ()
    except UnicodeDecodeError as error:
        offset = len(mark) + error.start
        note = f"{name} is not valid {encoding.upper()} at byte {offset}; what cannot be read became U+FFFD"
        return body.decode(encoding, "replace"), (note,)


def replace_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate (odd bytes in an argument, half of a pair in JSON)."""
    return LONE_SURROGATE.sub("\ufffd", text)


# --- standard input


def read_stdin(
    stream: IO[Any] | None,
    on_wait: Callable[[str], None] = lambda note: None,
    *,
    asked: bool = False,
    wait_seconds: float = 2.0,
) -> bytes | None:
    """All bytes of a pipe or file on standard input; None for anything else, which is left unread.

    Terminals, sockets, devices and closed descriptors count as anything else unless `asked` (the argument `-`).
    After `wait_seconds` of silence `on_wait` gets one note that names `--no-stdin`.
    """
    if stream is None or stream.closed:
        return None
    stream = getattr(stream, "buffer", stream)
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return bytes(stream.read())  # in memory: it has an end
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return None
    if not (asked or stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    return b"".join(_chunks(descriptor, on_wait, wait_seconds))


def _chunks(descriptor: int, on_wait: Callable[[str], None], wait_seconds: float) -> Iterator[bytes]:
    silent_for: float | None = wait_seconds
    while True:
        if not _readable(descriptor, silent_for):
            on_wait(WAIT_NOTE)
            silent_for = None  # one note is enough
            continue
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:  # a descriptor in non-blocking mode, taken by someone else between select and read
            continue
        if not chunk:
            return
        yield chunk


def _readable(descriptor: int, seconds: float | None) -> bool:
    if sys.platform == "win32":  # select takes only sockets there: read without the note
        return True
    return bool(select.select([descriptor], [], [], seconds)[0])


# --- texts and files


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(
            f"cannot read `{path}`: {(error.strerror or str(error)).lower()}", hint="check the path"
        ) from None


def _read_text(data: bytes, name: str, notes: list[str], *, raw: bool) -> str:
    text, new_notes = decode_text(data, name)
    notes += new_notes
    if raw or not text.endswith("\n"):
        return text
    return text[:-2] if text.endswith("\r\n") else text[:-1]


def _join(piped: str, text: str, *, raw: bool) -> str:
    if raw:
        return piped + text
    return "\n\n".join(part for part in (piped, text) if part.strip())


def _check(prompts: Sequence[Prompt], *, raw: bool) -> None:
    if not prompts:
        raise PromptError("no prompt", hint='give one: `fly generate "your prompt"`, `-f FILE`, or pipe a text in')
    for prompt in prompts:
        if raw and prompt.messages is not None:
            raise PromptError(f"`{prompt.id}` is a chat, which `--raw` cannot send", hint="drop `--raw`")
        if not raw and prompt.is_blank():
            raise PromptError(f"the prompt `{prompt.id}` is empty", hint="give at least one visible character")


def _turn_notes(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    several = [prompt for prompt in prompts if len(prompt.fields.get("turns", ())) > 1]
    if not several:
        return ()
    others = f" and {len(several) - 1} more" if len(several) > 1 else ""
    return (f"`{several[0].id}`{others} has several turns; only the first is sent",)


# --- rows


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Only LF ends a line: JSON strings may hold U+2028 and its like."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line := line.strip(" \t\r\ufeff"):
            yield number, line


def _parse(line: str) -> tuple[Mapping[str, Any], bool]:
    """The object on the line, and whether lone surrogates were replaced in it. Raises `ValueError` with the reason."""
    row = read_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, this is {_kind(row)}")
    clean = _clean(row) if "\\ud" in line.lower() else row  # bytes decode to no surrogate: only an escape makes one
    return clean, clean != row


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _prompt_of(row: Mapping[str, Any], default_id: str) -> Prompt:
    """The prompt of a row. Raises `ValueError` with the reason where it is none."""
    given = [key for key in PROMPT_KEYS if key in row]
    if len(given) != 1:
        both = " and ".join(f"`{key}`" for key in given)
        raise ValueError(f"has {both}, and can have only one" if given else "has no `prompt`, `messages` or `turns`")
    name = next((row[key] for key in ("id", "question_id") if row.get(key) is not None), default_id)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"the id is {_kind(name)}, not text or a whole number")
    fields = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    match given[0]:
        case "prompt":
            return Prompt(str(name), text=_text(row["prompt"], "`prompt`"), fields=fields)
        case "turns":
            turns = [_text(turn, f"turn {at}") for at, turn in enumerate(_filled_list(row, "turns"), start=1)]
            return Prompt(str(name), text=turns[0], fields=fields)
        case _:
            messages = [_message(item, at) for at, item in enumerate(_filled_list(row, "messages"), start=1)]
            return Prompt(str(name), messages=tuple(messages), fields=fields)


def _message(item: Any, at: int) -> Message:
    if not isinstance(item, dict):
        raise ValueError(f"message {at} is {_kind(item)}, not an object")
    for key in ("role", "content"):
        if key not in item:
            raise ValueError(f"message {at} has no `{key}`")
    return {
        key: _text(value, f"`{key}` of message {at}")
        for key, value in item.items()
        if value is not None or key in ("role", "content")
    }


def _filled_list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row[key]
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is {_kind(value)}, not a list")
    if not value:
        raise ValueError(f"`{key}` is empty")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {_kind(value)}, not text")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
