"""Roles and how they look: one theme, the legend's words, and when colours are used at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from rich.color import ColorSystem
from rich.style import Style

from .events import Origin

DRAFTED = "drafted"  # in flight: not judged yet
REJECTED = "rejected"  # judged, and not part of the answer

# What is not the target's own first choice differs without colour too: deferred (underlined), rejected (struck),
# drafted (dim). Exact, bonus and target tokens are all the target's own; a corrected one is bold.
THEME: Mapping[str, str] = {
    Origin.EXACT: "green",
    Origin.DEFERRED: "yellow underline",
    Origin.CORRECTED: "bold magenta",
    Origin.BONUS: "cyan",
    Origin.TARGET: "none",
    DRAFTED: "dim",
    REJECTED: "red strike",
}

LEGEND: Mapping[str, str] = {
    Origin.EXACT: "both agree",
    Origin.DEFERRED: "draft kept, target unsure",
    Origin.CORRECTED: "target's instead",
    Origin.BONUS: "target's on top",
    Origin.TARGET: "no draft",
    DRAFTED: "not judged yet",
    REJECTED: "dropped",
}


class Piece(NamedTuple):
    """A stretch of text and the role that it plays."""

    text: str
    role: str


@dataclass(frozen=True, slots=True)
class ColorPolicy:
    """What may be sent to a stream besides text."""

    color: bool  # colour codes
    cues: bool  # style codes of any kind: underline, strike, bold, dim
    live: bool  # cursor movement: the round in flight is redrawn


NO_ESCAPES = ColorPolicy(color=False, cues=False, live=False)


def decide_color(flag: str, is_tty: bool, environ: Mapping[str, str]) -> ColorPolicy:
    """What a stream may be sent, from `--color auto|always|never`, the kind of stream, and the environment.

    The flag wins: `always` colours a pipe too (the cursor is moved on a terminal only), `never` drops every escape.
    With `auto` a pipe gets none, whatever the environment says. On a terminal NO_COLOR (not empty) drops colours
    and keeps the second cues; otherwise FORCE_COLOR (not empty, not 0) colours even where TERM is `dumb`, which
    else drops every escape.
    """
    dumb = environ.get("TERM", "") in ("dumb", "unknown")
    if flag == "never":
        return NO_ESCAPES
    if flag == "always":
        return ColorPolicy(color=True, cues=True, live=is_tty and not dumb)
    if not is_tty:
        return NO_ESCAPES
    no_color = bool(environ.get("NO_COLOR"))
    if dumb and (no_color or environ.get("FORCE_COLOR", "") in ("", "0")):
        return NO_ESCAPES
    return ColorPolicy(color=not no_color, cues=True, live=not dumb)


@lru_cache(64)
def codes(role: str, policy: ColorPolicy) -> tuple[str, str]:
    """The escape codes before and after text of this role."""
    if not policy.cues:
        return "", ""
    style = Style.parse(THEME[role])
    if not policy.color:
        style = style.without_color
    before, after = style.render("x", color_system=ColorSystem.STANDARD).split("x")
    return before, after


def paint(pieces: Iterable[Piece], policy: ColorPolicy) -> str:
    """The pieces' text with the codes of their roles; neighbours of one role share theirs."""
    out: list[str] = []
    for role, run in groupby(pieces, key=lambda piece: piece.role):
        before, after = codes(role, policy)
        out += [before, *(piece.text for piece in run), after]
    return "".join(out)


def format_legend(policy: ColorPolicy, roles: Iterable[str] = tuple(LEGEND)) -> str:
    """One line that shows each role in its style, with a word on what it means; "" where nothing is styled."""
    if not policy.cues:
        return ""
    return ", ".join(f"{paint([Piece(str(role), role)], policy)}: {LEGEND[role]}" for role in roles)
