"""Characters as a reader and a terminal see them: grapheme clusters, their widths, and visible controls."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from unicodedata import category

from rich.cells import cell_len

ZERO_WIDTH_JOINER, EMOJI_VARIATION = "\u200d", "\ufe0f"
OVERRIDES = "\u202d\u202e"  # text behind these reads backwards where a terminal obeys them
DISORDER = re.compile("[\u2028-\u202e\u2066-\u2069]")  # ends a line, or lets text reorder what stands behind it
MAX_CLUSTER = 32  # characters; a longer pile of accents is cut, so that the cost of one cluster is bounded


def clusters(text: str) -> list[str]:
    """The text's grapheme clusters in order; joined they are the text.

    The rules of Unicode's UAX 29 that matter on a terminal: accents and signs, joined emoji, skin tones, flags,
    Hangul letters, CR LF.
    """
    if text.isascii() and "\r" not in text:
        return list(text)
    parts: list[str] = []
    for character in text:
        if parts and len(parts[-1]) < MAX_CLUSTER and extends(parts[-1], character):
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def extends(cluster: str, character: str) -> bool:
    """Whether the character belongs to the cluster before it."""
    last = cluster[-1]
    if character.isascii():
        return last == "\r" and character == "\n"
    if is_control(last) or is_control(character):
        return False
    if is_extender(character) or last == ZERO_WIDTH_JOINER:
        return True
    if is_flag_half(character):
        return len(cluster) == 1 and is_flag_half(last)
    return joins_hangul(last, character)


@lru_cache(4096)
def is_extender(character: str) -> bool:
    code = ord(character)
    return (
        category(character) in ("Mn", "Me", "Mc")  # accents, vowel signs, variation selectors
        or character in ("\u200c", ZERO_WIDTH_JOINER)
        or 0x1F3FB <= code <= 0x1F3FF  # skin tones
        or 0xE0020 <= code <= 0xE007F  # tags of regional flags
    )


@lru_cache(4096)
def is_control(character: str) -> bool:
    """Whether the character stands alone, whatever is before and behind it."""
    return category(character) in ("Cc", "Cs", "Cf", "Zl", "Zp") and not is_extender(character)


def is_flag_half(character: str) -> bool:
    return 0x1F1E6 <= ord(character) <= 0x1F1FF


def joins_hangul(last: str, character: str) -> bool:
    before, code = ord(last), ord(character)
    is_leading = 0x1100 <= before <= 0x115F or 0xA960 <= before <= 0xA97C
    if 0x1160 <= code <= 0x11FF or 0xD7B0 <= code <= 0xD7FB:  # a vowel or a final consonant
        return is_leading or 0x1160 <= before <= 0x11FF or 0xAC00 <= before <= 0xD7FB
    return is_leading and (0x1100 <= code <= 0x115F or 0xAC00 <= code <= 0xD7A3)


@lru_cache(4096)
def visible(cluster: str, unicode: bool = True) -> str:
    """The cluster with nothing in it that a terminal would obey, save newline and tab.

    A control character becomes its picture (␛), or an escape such as \\x1b where `unicode` is False; what
    reverses text becomes an escape always.
    """
    if cluster in ("\n", "\t"):
        return cluster
    if cluster == "\r\n":
        return "\n"
    if category(cluster[0]) == "Cs":
        return "\N{REPLACEMENT CHARACTER}" if unicode else "?"
    if cluster in OVERRIDES:
        return escape(cluster)
    if category(cluster[0]) != "Cc":
        return cluster
    code = ord(cluster[0])
    if not unicode or code >= 0x80:
        return f"\\x{code:02x}"
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else chr(0x2400 + code)


def visible_line(text: str) -> str:
    """Text from elsewhere (a note, a path) as one line that is safe to show, and leaves what is beside it in place."""
    line = "".join(visible(character) for character in text.replace("\n", " ").replace("\t", " "))
    return DISORDER.sub(lambda found: escape(found[0]), line)


def visible_lines(text: str) -> str:
    """Text from elsewhere that may have several lines, safe to show."""
    return "".join(visible(character) for character in text)


def escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


# Where a terminal's cursor goes


class Span(NamedTuple):
    """How many cells lie between a line's beginning and the cursor, at least and at most.

    Terminals differ: a joined emoji may take the cells of one or of its parts, a heart one or two, and a wide
    character that does not fit in a row may leave its last cell empty, or take no more than that.
    """

    low: int
    high: int

    def after(self, cluster: str, width: int) -> Span:
        """The span behind the cluster, on a terminal with rows of this width."""
        if cluster == "\n":
            return LINE_START
        if cluster == "\t":
            return Span(tabbed(self.low, width, steps_back=True), tabbed(self.high, width, steps_back=False))
        if cluster.isascii():
            return Span(self.low + 1, self.high + 1)
        least, most = least_cells(cluster), most_cells(cluster)
        least = min(least, -self.low % width or least)  # what does not fit may be cut off at the row's end,
        rest = -self.high % width  # or go to the next row and leave these cells empty
        return Span(self.low + least, self.high + most + (rest if rest < most else 0))

    def may_fill_row(self, width: int) -> bool:
        """Whether the cursor may stand behind a full row, where it waits for more before it goes to the next."""
        return self.high // width > max(self.low - 1, 0) // width

    def is_vague(self, width: int) -> bool:
        """Whether too little is known to wait for a place that is certain."""
        return self.high - self.low > width // 4

    def last_row(self, width: int) -> int:
        """The last row, from 0, that the line may have reached."""
        return max(self.high - 1, 0) // width


LINE_START = Span(0, 0)


def tabbed(cells: int, width: int, *, steps_back: bool) -> int:
    """Cells behind the next tab stop, of which a row's last cell is one. Behind a full row some terminals step back."""
    if cells and cells % width == 0:
        return cells - steps_back
    start = cells // width * width
    return start + min((cells - start) // 8 * 8 + 8, width - 1)


@lru_cache(4096)
def least_cells(cluster: str) -> int:
    """Cells that the cluster takes at least."""
    return min(cell_len(cluster), max(cell_len(character) for character in cluster))


@lru_cache(4096)
def most_cells(cluster: str) -> int:
    """Cells that the cluster takes at most."""
    parts = sum(cell_len(character) for character in cluster) + cluster.count(EMOJI_VARIATION)
    return max(cell_len(cluster), parts)
