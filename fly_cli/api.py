"""One call for one answer, for those who do not need the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .decode import decode
from .events import Event, Finished, Round, Started, Token
from .models import Pair
from .prompts import Prompt
from .settings import DecodeSettings
from .stats import Summary, summarize


@dataclass(frozen=True)
class Generation:
    """An answer: its text, its tokens, its figures, and the events that both come from."""

    text: str
    tokens: tuple[Token, ...]
    summary: Summary
    events: tuple[Event, ...]


def generate(
    pair: Pair,
    prompt: Prompt | str,
    settings: DecodeSettings | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Generation:
    """The whole answer to `prompt`. `on_event` sees each event as it happens. Raises what `decode` raises."""
    events: list[Event] = []
    tokens: list[Token] = []
    text = ""
    for event in decode(pair, prompt, settings):
        events.append(event)
        if on_event is not None:
            on_event(event)
        match event:
            case Started():
                tokens.append(event.first)
            case Round():
                tokens.extend(event.tokens)
            case Finished():
                text = event.text
    return Generation(text, tuple(tokens), summarize(events), tuple(events))
