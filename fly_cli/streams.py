"""Writing text to streams: what an encoding lacks is replaced, and a terminal's lines break between words.

The caller makes its streams take UTF-8. What a stream still cannot encode is never an error.
"""

from __future__ import annotations

import os
import textwrap
from typing import TextIO

MIN_FOLDED_COLUMNS = 40  # on a narrower terminal folded lines would be mostly ragged edge


def write(stream: TextIO, text: str) -> None:
    """Write and flush; what the stream's encoding lacks (a lone surrogate, for one) becomes `?`."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, errors="replace").decode(encoding))
    stream.flush()


def write_line(stream: TextIO, line: str) -> None:
    """Write a line about a run. A pipe gets one line; on a terminal it breaks between words, never inside one."""
    write(stream, (fold(line, terminal_size(stream)[0]) if stream.isatty() else line) + "\n")


def fold(line: str, columns: int) -> str:
    """The line in rows of at most so many characters; a longer word (a path) stays whole, to be copied."""
    if len(line) <= columns or columns < MIN_FOLDED_COLUMNS:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def can_encode(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has all characters of the text."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the stream's terminal; 80 x 24 where it does not say."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # not a terminal, or no file at all
        columns = rows = 0
    return columns or 80, rows or 24
