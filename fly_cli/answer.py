"""The answer so far: new tokens and their text, cut at end tokens, stop strings and length limits."""

from __future__ import annotations

from collections.abc import Sequence

from .events import DraftToken, Finished, FinishReason, Origin, Source, Token
from .settings import DecodeSettings
from .stops import StopMatcher
from .text import Codec


class Answer:
    """Collects what the rounds commit, and knows when to stop."""

    def __init__(self, codec: Codec, prompt_ids: Sequence[int], settings: DecodeSettings, max_length: int | None):
        self.stop_ids = codec.stop_ids
        self.token_text = codec.token_text
        self.limit = settings.max_new_tokens
        if max_length is not None:
            self.limit = min(self.limit, max_length - len(prompt_ids))
        self.num_tokens = 0
        self._detokenizer = codec.detokenizer(prompt_ids)
        self._stops = StopMatcher(settings.stop)
        self._pieces: list[str] = []
        self._length = 0  # characters in them
        self._reason: FinishReason | None = None
        self._stop: str | None = None
        self._stop_id: int | None = None
        self._end: int | None = None  # characters kept before a stop string

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self.limit - self.num_tokens

    @property
    def held(self) -> int:
        """How many of the last characters may still become a stop string, or are one and what came with it."""
        return self._stops.held if self._end is None else max(0, self._length - self._end)

    @property
    def finished(self) -> bool:
        return self._reason is not None

    def add(self, ids: Sequence[int], origins: Sequence[Origin]) -> tuple[Token, ...]:
        """The tokens that were taken: all of them, or up to the one at which the answer ends."""
        taken: list[Token] = []
        for token, origin in zip(ids, origins, strict=True):
            piece = self._detokenizer.push(token)
            taken.append(Token(token, piece, origin))
            self.num_tokens += 1
            self._check(token, piece)
            if self.finished:
                break
        return tuple(taken)

    def _check(self, token: int, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        # Bytes that do not yet make up text for sure may already spell a stop string.
        if match := self._stops.push(piece) or self._stops.peek(self._pending_text()):
            self._reason, self._stop, self._end = FinishReason.STOP, match.stop, match.end
        elif token in self.stop_ids:
            self._reason, self._stop, self._stop_id = FinishReason.STOP, self.token_text(token), token
        elif self.room <= 0:
            self._reason = FinishReason.LENGTH

    def _pending_text(self) -> str:
        return self._detokenizer.fork().flush() if self._stops else ""

    def preview(self, ids: Sequence[int], sources: Sequence[Source]) -> tuple[DraftToken, ...]:
        """Drafted tokens with the text that each would add."""
        detokenizer = self._detokenizer.fork()
        return tuple(
            DraftToken(token, detokenizer.push(token), source) for token, source in zip(ids, sources, strict=True)
        )

    def finish(self, seconds: float) -> Finished:
        """The closing event. `seconds` is the time since the run began."""
        assert self._reason is not None, "the answer has not ended"
        tail = self._detokenizer.flush()
        text = "".join(self._pieces) + tail
        return Finished(
            reason=self._reason,
            text=text[: self._end],
            tail=tail,
            stop=self._stop,
            stop_id=self._stop_id,
            seconds=seconds,
        )
