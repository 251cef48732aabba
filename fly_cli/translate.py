"""A draft model with a tokenizer of its own: it goes on with the text, and the target's ids of that are the draft."""

from __future__ import annotations

import codecs
import sys
from bisect import bisect_right
from collections.abc import Sequence

from .cached_model import DraftModel
from .draft import Draft, GoesOn, ModelDrafter, probability_of
from .errors import PromptError
from .events import Source
from .evidence import to_host
from .prompts import Prompt
from .sampling import Chooser
from .settings import DecodeSettings
from .spelling import Retelling, Spelled, Translation
from .text import Codec

MOST_STEPS = 8  # of the draft model for one of the target's tokens: a character may take several


class TranslatingDrafter(ModelDrafter):
    """Drafts in the target's ids what a model says in its own.

    The model reads the prompt as its own chat template writes it, and behind it the text of the answer so far, never
    the target's special tokens. It is greedy at every temperature: target and drafter share their noise by ids, and
    here an id is not the same token to both.
    """

    def __init__(
        self,
        model: DraftModel,
        translation: Translation,
        prompt: Prompt,
        num_prompt_tokens: int,
        *,
        fallback: bool = True,
    ):
        self.target, self.own = translation.target, translation.draft
        greedy = Chooser(DecodeSettings(), self.own.codec.vocab_size)
        super().__init__(model, greedy, self.target.codec.stop_ids, lookup=False, fallback=fallback)
        self._text = Retelling(self.own, draft_prompt_ids(self.target.codec, self.own.codec, prompt))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_read = num_prompt_tokens  # of the target's ids

    def out_of_reach(self, ids: Sequence[int]) -> str | None:
        """Why the model cannot draft behind these ids of the target; None if it can."""
        self._follow(ids)
        return self._why_too_long(len(self._text.ids))

    def _follow(self, ids: Sequence[int]) -> None:
        """Take in the text of what was committed since the last time."""
        new = b"".join(map(self.target.bytes_of, ids[self._num_read :]))
        self._num_read = len(ids)
        self._text.add(self._decoder.decode(new))

    def _draft(self, ids: list[int], limit: int, goes_on: GoesOn | None) -> Draft:
        """Up to `limit` of the target's ids: the model's continuation, as far as they spell it.

        The last one may be a part of what the target would make one token of. It is drafted all the same: by then it
        costs a row of the target's forward, and another step of the model only to make sure costs more (measured).
        """
        draft, known, speech = Draft(), self._text.ids, Speech(self._decoder.getstate()[0])
        spelled = Spelled([], [])
        room = (self.model.max_length or sys.maxsize) - len(known)
        # No `settle` here: the last ids of the text may become others when it goes on.
        while known and len(draft.steps) < min(room, MOST_STEPS * limit):
            rows = min(len(known), 1 if draft.steps else 2)
            draft.steps.append(rows)
            if not speech.add(*self._say(known, rows, speech.held)):
                break
            spelled = self.target.behind(self._text.tail, speech.text, len(speech.held))
            whole = spelled.ends[-1:] == [len(speech.text.encode())]
            if len(spelled.ids) >= limit or (speech.text and not whole):
                break
            if goes_on is not None and not goes_on(speech.confidences(spelled.ends), limit):
                break
        draft.confidences = speech.confidences(spelled.ends)[:limit]
        for token in spelled.ids[:limit]:
            draft.add(token, Source.MODEL)
        return draft

    def _say(self, known: list[int], rows: int, held: bytes) -> tuple[bytes, float]:
        """Let the model say a token behind `known`, and append it: the bytes that it adds, and its probability.

        With two rows the token before is asked for as well. The text may end in the middle of what the model would
        say in one token: then that one takes the place of its last (token healing).
        """
        logits = self.model.read(known, last=rows)
        chosen = self.chooser.choose(logits, len(known))
        tokens, probabilities = to_host([chosen, probability_of(chosen, logits)])
        last, longer = self.own.bytes_of(known[-1]), self.own.bytes_of(int(tokens[0]))
        if rows == 2 and last and longer.startswith(last) and longer != last and agree(longer[len(last) :], held):
            known[-1] = int(tokens[0])
            return longer[len(last) :], probabilities[0]
        known.append(int(tokens[-1]))
        return self.own.bytes_of(known[-1]), probabilities[-1]


class Speech:
    """What the draft model says behind the text.

    `held` are the first bytes of a character whose other bytes the target has not chosen yet. The text ends before
    it, so the model has to begin with them.
    """

    def __init__(self, held: bytes):
        self.held = held
        self.text = ""  # whole characters, the held one included
        self._said = b""
        self._tokens: list[tuple[int, float]] = []  # the byte that each token begins at, and its probability

    def add(self, said: bytes, probability: float) -> bool:
        """Take in a token. False where it is no text, or no text that can follow."""
        data = self._said + said
        if not said or not agree(data, self.held):
            return False
        try:
            self.text = codecs.utf_8_decode(data, "strict", False)[0]
        except UnicodeDecodeError:
            return False
        self._tokens.append((max(len(self._said), len(self.held)), probability))
        self._said = data
        return True

    def confidences(self, ends: Sequence[int]) -> list[float]:
        """The probability of what is said up to each of these bytes, from the end before it on.

        A token of the model counts where it begins, so that all of them multiply to the probability of the whole.
        """
        found = [1.0] * len(ends)
        for begin, probability in self._tokens:
            at = bisect_right(ends, begin)
            if at < len(found):
                found[at] *= probability
        return found


def agree(one: bytes, other: bytes) -> bool:
    """Whether one of the two begins with the other."""
    return one.startswith(other) or other.startswith(one)


def draft_prompt_ids(target: Codec, draft: Codec, prompt: Prompt) -> tuple[int, ...]:
    """The prompt as the draft model should see it: as a chat where both models chat, and otherwise as plain text."""
    if not target.chats:
        return draft.plain_ids(prompt.text or "")
    messages = [dict(message) for message in prompt.messages or [{"role": "user", "content": prompt.text or ""}]]
    if target.settings.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": target.settings.system})
    if draft.chats:
        try:
            return draft.encode(Prompt(prompt.id, messages=tuple(messages))).ids
        except PromptError:  # its template may refuse what the target's takes
            pass
    return draft.plain_ids("".join(f"{message['content']}\n\n" for message in messages))
