"""JSON as this program writes and reads it.

Written: text as it is, and no character that a terminal could take for a command. Read: what any program's reader
would take, so that whatever is read can be written, compared and shown later.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

CONTROLS = re.compile("[\x7f-\x9f]")  # U+009B begins a command; JSON itself escapes what is below U+0020
MAX_INTEGER = 2**63 - 1  # what other programs hold in a whole number
MOST_NESTED = 100  # lists and objects in each other; what handles a value later must not run out of stack


def json_text(value: Any, indent: int | None = None) -> str:
    """The value as JSON. Raises `ValueError` for numbers that JSON has no way to write."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_json(text: str) -> Any:
    """The value of the text. Raises `ValueError` with one line of reason, also for numbers that are none elsewhere."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_whole_number, parse_float=_number)
        if text.count("[") + text.count("{") > MOST_NESTED and _is_deeper(value, MOST_NESTED):
            raise RecursionError
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise ValueError(f"more than one JSON value on the line, the second at column {error.colno}") from None
        raise ValueError(f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python's own limit
        raise ValueError(f"a number of {len(digits)} digits is too long") from None


def _number(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other more than so many levels deep."""
    if not isinstance(value, list | dict):
        return False
    return levels == 0 or any(
        _is_deeper(one, levels - 1) for one in (value.values() if isinstance(value, dict) else value)
    )
