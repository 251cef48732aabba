"""How many tokens to draft in a round."""

from __future__ import annotations


def constant(draft_tokens: int, room: int) -> int:
    """The constant schedule: `draft_tokens`, as far as it fits.

    `room` is how many more tokens the sequence may take (max new tokens and context length alike); a round
    of n drafted tokens commits up to n + 1.
    """
    return max(0, min(draft_tokens, room - 1))
