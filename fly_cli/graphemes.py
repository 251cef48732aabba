"""Characters as a reader and a terminal see them: grapheme clusters, their widths, and visible controls."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from unicodedata import category

from rich.cells import cell_len

ZERO_WIDTH_JOINER = "\u200d"
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
    if category(last) in ("Cc", "Cs"):
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

    A control character becomes its picture (␛), or an escape such as \\x1b where `unicode` is False.
    """
    if cluster in ("\n", "\t"):
        return cluster
    if cluster == "\r\n":
        return "\n"
    if category(cluster[0]) == "Cs":
        return "\N{REPLACEMENT CHARACTER}" if unicode else "?"
    if category(cluster[0]) != "Cc":
        return cluster
    code = ord(cluster[0])
    if not unicode or code >= 0x80:
        return f"\\x{code:02x}"
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else chr(0x2400 + code)


def visible_line(text: str) -> str:
    """Text from elsewhere (a note, a path) as one line that is safe to show."""
    return "".join(visible(character) for character in text.replace("\n", " "))


# Where a terminal's cursor goes


class Cursor(NamedTuple):
    """A place in rows below a start and columns from 0. Behind a full row the column is the width, until more comes."""

    row: int
    column: int

    def after(self, columns: int, width: int, early: bool = True) -> Cursor:
        """The place behind something of so many columns. `early`: what does not fit in a row goes to the next."""
        if self.column + columns > width and (early or self.column == width):
            return Cursor(self.row + 1, min(columns, width))
        return Cursor(self.row, min(self.column + columns, width))

    def tabbed(self, width: int) -> Cursor:
        """The place at the next tab stop, of which the last column is one."""
        return Cursor(self.row, min(self.column // 8 * 8 + 8, width - 1))


class Place(NamedTuple):
    """The cursor's place for each way of terminals to draw what they disagree about (joined emoji, wide characters)."""

    by_cluster: Cursor  # a joined emoji takes the columns of one
    by_character: Cursor  # its parts are drawn side by side
    overlapping: Cursor  # the same, and a wide character may begin in the last column

    def after(self, cluster: str, width: int) -> Place:
        """The place behind the cluster, on a terminal of this width."""
        if cluster == "\n":
            return Place(*(Cursor(at.row + 1, 0) for at in self))
        if cluster == "\t":
            # Behind a full row terminals differ: some stay there, some step back into it.
            first, second = (at if at.column == width else at.tabbed(width) for at in self[:2])
            return Place(first, second, self.overlapping.tabbed(width))
        by_cluster = self.by_cluster.after(cells(cluster), width)
        if len(cluster) == 1 and len(set(self)) == 1 and by_cluster.row == self.by_cluster.row:
            return Place(by_cluster, by_cluster, by_cluster)
        by_character, overlapping = self.by_character, self.overlapping
        for character in cluster:
            by_character = by_character.after(cells(character), width)
            overlapping = overlapping.after(cells(character), width, early=False)
        return Place(by_cluster, by_character, overlapping)

    def fills_row(self, width: int) -> bool:
        """Whether the cursor may stand behind a full row."""
        return any(at.column >= width for at in self)

    @property
    def row(self) -> int:
        """The lowest row it may be in."""
        return max(at.row for at in self)


@lru_cache(4096)
def cells(text: str) -> int:
    """Columns of a cluster or a character."""
    return cell_len(text)
