"""Finds stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that was found, and how many characters of the text come before it."""

    stop: str
    end: int


class StopMatcher:
    """Finds stop strings in a text that comes in pieces.

    The first piece that completes a stop string ends the text. If it completes several, the one that begins first
    counts, and of those that begin together the longest. Each character costs one step for each stop string.
    """

    def __init__(self, stop: Iterable[str] = ()):
        self._stops = tuple((text, _fall_backs(text)) for text in dict.fromkeys(stop) if text)
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._length = 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        return max(self._matched, default=0)

    def peek(self, piece: str) -> StopMatch | None:
        """The match that this piece would complete; nothing is taken in."""
        state = self._matched.copy(), self._length
        match = self.push(piece)
        self._matched, self._length = state
        return match

    def push(self, piece: str) -> StopMatch | None:
        """The match that this piece completed, if any."""
        found: list[tuple[int, int, str]] = []
        for at, (stop, fall_backs) in enumerate(self._stops):
            matched = self._matched[at]
            for position, character in enumerate(piece, start=self._length + 1):
                while matched and stop[matched] != character:
                    matched = fall_backs[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    found.append((position - matched, -matched, stop))
                    matched = 0
                    break
            self._matched[at] = matched
        self._length += len(piece)
        if not found:
            return None
        self._matched = [0] * len(self._stops)
        start, _, stop = min(found)
        return StopMatch(stop, start)


def _fall_backs(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper prefix that it also ends with."""
    table = [0]
    for character in text[1:]:
        length = table[-1]
        while length and text[length] != character:
            length = table[length - 1]
        table.append(length + (text[length] == character))
    return table
