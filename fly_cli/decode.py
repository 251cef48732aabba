"""The round loop: draft, verify, judge, commit (FLy, ICLR 2026, section 3; design section 2)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

from .answer import Answer
from .draft import COPIED_TOKENS, AdaptiveDrafter, Draft, Drafter, LookupDrafter, ModelDrafter
from .errors import PromptError
from .events import Drafted, Event, Round, Source, Started, Token
from .evidence import measure
from .prompts import Prompt
from .sampling import Chooser
from .schedule import Adaptive, room_for_draft
from .settings import DecodeSettings
from .translate import TranslatingDrafter
from .verify import Evidence, Verdict, judge

if TYPE_CHECKING:
    from .models import Pair

DEAR = 2.5  # a draft model's forward over copied tokens that takes more single steps than this does not pay


def decode(
    pair: Pair, prompt: Prompt | str, settings: DecodeSettings | None = None, *, record: bool = False
) -> Iterator[Event]:
    """Events of one answer: `Started` after prefill, `Drafted` and `Round` for each round, `Finished`.

    `record` measures the entropy of every row (for a trace), not only of mismatches. Times are wall clock in
    seconds, whatever the consumer does between two events included. Raises `PromptError` for a prompt that the
    model cannot take and `DecodeError` for logits that are not finite.
    """
    watch = Stopwatch()
    settings = settings or DecodeSettings()
    if settings.seed is None:
        settings = replace(settings, seed=pair.team.tell(lambda: secrets.randbits(32)))
    if isinstance(prompt, str):
        prompt = Prompt(id="prompt", messages=None, text=prompt)
    codec, target = pair.codec, pair.target
    for model in pair.models:
        model.reset()  # what an earlier prompt left would be other blocks of rows, and so other rounding
    encoded = codec.encode(prompt)
    ids = list(encoded.ids)
    room_for_prompt(len(ids), target.max_length)
    chooser = Chooser(settings, codec.vocab_size, settings.seed or 0)
    drafter = make_drafter(pair, chooser, settings, prompt, len(ids))
    answer = Answer(codec, encoded.ids, settings, target.max_length)

    def verify(draft: Draft) -> Evidence:
        return pair.team.agree(
            lambda: measure(
                target.read(ids + draft.ids, last=len(draft.ids) + 1),
                draft.ids,
                position=len(ids),
                num_new_tokens=answer.num_tokens,
                chooser=chooser,
                settings=settings,
                protected_ids=codec.protected_ids,
                copied=[source is Source.COPY for source in draft.sources],
                record=record,
            )
        )

    def commit(draft_ids: Sequence[int], verdict: Verdict) -> tuple[Token, ...]:
        tokens = answer.add(
            [*draft_ids[: verdict.num_kept], verdict.final_id], [*verdict.origins, verdict.final_origin]
        )
        ids.extend(token.id for token in tokens)
        return tokens

    (first,) = commit([], judge(verify(Draft()), settings))
    yield Started(
        prompt_id=prompt.id,
        prompt_ids=encoded.ids,
        first=first,
        held=answer.held,
        prefill_seconds=watch.lap(),
        settings=settings.as_json(),
        notes=encoded.notes,
        cost_table=pair.costs.digest,
    )
    for index in count():
        if answer.finished:
            break
        draft_forward, verify_forward = drafter.forward_seconds, target.forward_seconds
        target.settle(ids[:-1])
        other_seconds = watch.lap()

        limit = room_for_draft(settings.draft_tokens, answer.room)
        limit = int(min(limit, target.room_before_switch(len(ids))))
        draft = pair.team.agree(partial(drafter.propose, ids, limit)) if limit else Draft()
        drafted = answer.preview(draft.ids, draft.sources)
        draft_seconds = watch.lap()
        yield Drafted(index, drafted)
        other_seconds += watch.lap()

        evidence = verify(draft)
        verify_seconds = watch.lap()
        verdict = judge(evidence, settings)
        if limit:  # what it offered in an earlier round is no news
            drafter.learn(draft, verdict)
        tokens = commit(draft.ids, verdict)
        yield Round(
            index=index,
            drafted=drafted,
            evidence=evidence,
            verdict=verdict,
            tokens=tokens,
            held=answer.held,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            other_seconds=other_seconds + watch.lap(),
            draft_forward_seconds=drafter.forward_seconds - draft_forward,
            verify_forward_seconds=target.forward_seconds - verify_forward,
            notes=draft.notes,
        )
    yield answer.finish(watch.total())


class Stopwatch:
    """Laps of wall clock, in seconds; together they are the total."""

    def __init__(self) -> None:
        self._began = self._last = perf_counter()

    def lap(self) -> float:
        """Time since the last lap."""
        before, self._last = self._last, perf_counter()
        return self._last - before

    def total(self) -> float:
        return perf_counter() - self._began


def make_drafter(
    pair: Pair, chooser: Chooser, settings: DecodeSettings, prompt: Prompt, num_prompt_tokens: int
) -> Drafter:
    """The drafter that pair and settings ask for. Where nothing is to be drafted it is never asked."""
    stop_ids, costs, lookup = pair.codec.stop_ids, pair.costs, settings.draft_lookup
    adaptive = settings.draft_schedule == "adaptive"
    copier = LookupDrafter(stop_ids)
    window = None if settings.entropy_threshold is None else settings.window_size
    if pair.draft is None:
        return AdaptiveDrafter(copier, None, Adaptive(replace(costs, draft=None), window)) if adaptive else copier
    if pair.translation is not None:
        translating = TranslatingDrafter(pair.draft, pair.translation, prompt, num_prompt_tokens, fallback=lookup)
        policy = Adaptive(costs, window, translated=True)
        return AdaptiveDrafter(copier if lookup else None, translating, policy) if adaptive else translating
    dear = adaptive and costs.step_seconds(COPIED_TOKENS + 1) > DEAR * costs.step_seconds()
    inside = lookup and pair.draft.reads_rows and not dear
    model = ModelDrafter(pair.draft, chooser, stop_ids, lookup=inside, fallback=lookup)
    return AdaptiveDrafter(copier if lookup else None, model, Adaptive(costs, window)) if adaptive else model


def room_for_prompt(num_prompt_tokens: int, max_length: int | None) -> None:
    """Raise `PromptError` when the prompt leaves no room for a new token in the model's context."""
    if max_length is not None and num_prompt_tokens >= max_length:
        raise PromptError(
            f"the prompt has {num_prompt_tokens} tokens, and the target's context is {max_length}",
            hint="shorten the prompt, or use a target with a longer context",
        )
