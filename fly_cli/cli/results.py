"""A run as one JSON object."""

from __future__ import annotations

from typing import Any

from ..events import Drafted, Event, Finished, Round, Started, Token
from ..render import Released
from ..stats import Tally


class Result:
    """A sink that keeps what the object needs. It may be asked at any time, also for a run that did not finish."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._released = Released()
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._notes: list[str] = []
        self._started: Started | None = None
        self._finished: Finished | None = None

    def handle(self, event: Event) -> None:
        self._tally.handle(event)
        self._text += [piece.text for piece in self._released.take(event)]
        match event:
            case Started():
                self._started = event
                self._tokens.append(event.first)
                self._notes += event.notes
            case Round():
                self._tokens += event.tokens
                self._notes += event.notes
            case Finished():
                self._finished = event
            case Drafted():
                pass

    def close(self) -> None:
        """Take the text that an interrupted run still held back: no stop string came of it."""
        self._text += [piece.text for piece in self._released.rest()]

    def as_json(self, prompt_id: str, unfinished: str = "interrupted") -> dict[str, Any]:
        """Text, reasons, figures. `unfinished` is the finish reason of a run without `Finished`."""
        figures = self._tally.summary().as_json()
        reason = figures.pop("finish_reason") or unfinished
        del figures["prompt_id"]
        return {
            "id": prompt_id,
            "text": "".join(self._text),
            "finish_reason": reason,
            "stop": self._finished.stop if self._finished else None,
            "stop_id": self._finished.stop_id if self._finished else None,
            "seed": self._started.settings.get("seed") if self._started else None,
            "cost_table_digest": self._started.cost_table if self._started else None,
            **figures,
            "notes": self._notes,
        }

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Every new token's id, text and origin."""
        return [{"id": token.id, "text": token.text, "origin": token.origin} for token in self._tokens]

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._started.prompt_ids) if self._started else []

    @property
    def settings(self) -> dict[str, Any]:
        """The decode settings as they were in effect, the seed included."""
        return dict(self._started.settings) if self._started else {}
