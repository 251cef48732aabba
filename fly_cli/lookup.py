"""Prompt lookup: what followed the last few tokens the last time they occurred."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

MAX_NGRAM = 4
LONGEST_ENDING = 16


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids the two sequences share."""
    shared = min(len(a), len(b))
    if a[:shared] == b[:shared]:
        return shared
    return next(i for i in range(shared) if a[i] != b[i])


class NgramIndex:
    """Where each n-gram of a growing (and sometimes shrinking) sequence ends. Updates cost O(changed ids)."""

    def __init__(self, max_ngram: int = MAX_NGRAM):
        self.max_ngram = max_ngram
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> indices just behind it, ascending

    def match(self, ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """How long an ending of `ids` occurred earlier, and up to `limit` ids that followed it there.

        The longest n-gram (max_ngram down to 1) counts, and of equal ones the latest; the length is that of the whole
        common ending, up to `LONGEST_ENDING`. (0, []) when nothing matches; the ending never matches itself.
        """
        self._follow(ids)
        for n in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            ends = self._ends.get(tuple(ids[-n:]), [])
            if len(ends) > 1:  # the last one is the ending itself
                end = ends[-2]
                while n < min(LONGEST_ENDING, end) and ids[end - n - 1] == ids[-n - 1]:
                    n += 1
                return n, list(ids[end : end + limit])
        return 0, []

    def find(self, ids: Sequence[int], limit: int) -> list[int]:
        """The ids of `match`."""
        return self.match(ids, limit)[1]

    def _follow(self, ids: Sequence[int]) -> None:
        """Make the index one of `ids`."""
        kept = common_prefix(self._ids, ids)
        while len(self._ids) > kept:
            for ngram in self._endings():
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
            self._ids.pop()
        for token in ids[kept:]:
            self._ids.append(token)
            for ngram in self._endings():
                self._ends[ngram].append(len(self._ids))

    def _endings(self) -> list[tuple[int, ...]]:
        return [tuple(self._ids[-n:]) for n in range(1, min(self.max_ngram, len(self._ids)) + 1)]
