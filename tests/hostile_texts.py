"""Texts that want to be more than text: one list for every place that shows what comes from a model, file or user."""

from __future__ import annotations

from unicodedata import category

MARKUP = "[bold]b[/bold] [/] [/nope] [link=file:///etc/passwd]x[/link] [red :boom: \\[x] {0} %s"
NASTY = {
    "clear": "a\x1b[2J\x1b[H\x1b[31;5mb\x1b[?25l\x1b[?1049h\x1bc",
    "clipboard": "a\x1b]52;c;aGk=\x07b\x1b]52;c;aGk=\x1b\\",
    "link": "\x1b]8;;http://a.b\x1b\\text\x1b]8;;\x1b\\",
    "title": "\x1b]0;title\x07\x1b]2;title",
    "device": "a\x1bP1$r0m\x1b\\b\x1b_apc\x1b\\\x1b^pm\x1b\\\x1b[6n\x1b[c\x1bZ",
    "c1": "a\x9b2J\x9b31m\x9d52;c;aGk=\x9c\x90q\x9c\x85b\x8d",
    "joined c1": "a\u200d\x9b2J\u0301\x9b31m\u200d\u200d\x9d52;c;aGk=\x9c\U0001f469\u200d\x1b[2J",
    "controls": "".join(map(chr, range(32))) + "\x7f",
    "moves": "abc\r\b\b\bxyz\x0b\x0c\x0e\x0f",
    "markup": MARKUP,
    "tabs and lines": "a\tb\nc\r\nd\u2028e\u2029f\x85g",
    "backwards": "user\u202e\u2066// admin\u2069 \u2066begin\u202d\u202b\u202ax",
    "zero width": "a\u200b\u200c\u200d\u2060\ufeffb\u200e\u200f\u00ad",
    "piled": "z" + "\u0301\u0489\u20dd" * 200 + "\ufe0f\U0001f3fb\u200d" * 50,
    "wide": "漢字\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\u1100\u1161\u11a8\u3164\ufdfd",
    "not unicode": "\ufffe\uffff\U0010ffff\ue000\U000e0001\U000e0020",
    "table": "a|b\n| --- |\n```\n</text><script>&lt;$x$",
    "long": "x" * 100_000,
    "long pile": "a" + "\u0301" * 100_000,
    "long nothing": "\u200b" * 100_000,
}
SHORT = {name: text for name, text in NASTY.items() if len(text) < 1000}
IN_PATHS = {name: text.replace("\0", "").replace("/", "")[:60] for name, text in SHORT.items()}


def acting(text: str, *, allowed: str = "\n") -> set[str]:
    """The characters that a terminal would obey, save those allowed."""
    return {one for one in text if (category(one) == "Cc" or one in "\u202d\u202e") and one not in allowed}


def reordering(line: str) -> set[str]:
    """The characters that end a line, or move what stands beside them in it."""
    return acting(line) | {one for one in line if one in "\u2028\u2029\u202a\u202b\u202c\u2066\u2067\u2068\u2069"}
