"""JSON as this program writes it: text as it is, and no character that a terminal could take for a command."""

from __future__ import annotations

import json
import re
from typing import Any

CONTROLS = re.compile("[\x7f-\x9f]")  # U+009B begins a command; JSON itself escapes what is below U+0020


def json_text(value: Any, indent: int | None = None) -> str:
    """The value as JSON. Raises `ValueError` for numbers that JSON has no way to write."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
