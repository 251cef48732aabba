"""The round loop: draft, verify, judge, commit (FLy, ICLR 2026, section 3; design section 2)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from .answer import Answer
from .draft import COPIED_TOKENS, AdaptiveDrafter, Draft, Drafter, LookupDrafter, ModelDrafter
from .errors import PromptError
from .events import Drafted, Event, Origin, Round, Started
from .evidence import measure
from .prompts import Prompt
from .sampling import Chooser
from .schedule import Adaptive, room_for_draft
from .settings import DecodeSettings
from .verify import Evidence, judge

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
    began = now = perf_counter()
    if settings is None:
        settings = DecodeSettings()
    if settings.seed is None:
        settings = replace(settings, seed=secrets.randbits(32))
    if isinstance(prompt, str):
        prompt = Prompt(id="prompt", messages=None, text=prompt)
    codec, target = pair.codec, pair.target
    encoded = codec.encode(prompt)
    ids = list(encoded.ids)
    room_for_prompt(len(ids), target.max_length)
    chooser = Chooser(settings, codec.vocab_size, settings.seed or 0)
    drafter = make_drafter(pair, chooser, settings)
    answer = Answer(codec, encoded.ids, settings, target.max_length)

    def verify(draft_ids: Sequence[int]) -> Evidence:
        logits = target.read(ids + list(draft_ids), last=len(draft_ids) + 1)
        return measure(
            logits,
            draft_ids,
            position=len(ids),
            num_new_tokens=answer.num_tokens,
            chooser=chooser,
            settings=settings,
            protected_ids=codec.protected_ids,
            record=record,
        )

    first = judge(verify([]), settings)
    tokens = answer.add([first.final_id], [Origin.TARGET])
    ids += [token.id for token in tokens]
    now = perf_counter()
    yield Started(prompt.id, encoded.ids, tokens[0], answer.held, now - began, settings.as_json(), encoded.notes)

    index = 0
    while not answer.finished:
        round_began = now
        draft_forward, verify_forward = drafter.forward_seconds, target.forward_seconds
        target.settle(len(ids) - 1)

        draft_began = perf_counter()
        limit = room_for_draft(settings.draft_tokens, answer.room)
        draft = drafter.propose(ids, limit) if limit else Draft()
        drafted = answer.preview(draft.ids, draft.sources)
        draft_seconds = perf_counter() - draft_began
        yield Drafted(index, drafted)

        verify_began = perf_counter()
        evidence = verify(draft.ids)
        verify_seconds = perf_counter() - verify_began
        verdict = judge(evidence, settings)
        drafter.learn(draft, verdict.num_kept)
        kept = draft.ids[: verdict.num_kept]
        tokens = answer.add([*kept, verdict.final_id], [*verdict.origins, verdict.final_origin])
        ids += [token.id for token in tokens]

        now = perf_counter()
        yield Round(
            index=index,
            drafted=drafted,
            evidence=evidence,
            verdict=verdict,
            tokens=tokens,
            held=answer.held,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            other_seconds=now - round_began - draft_seconds - verify_seconds,
            draft_forward_seconds=drafter.forward_seconds - draft_forward,
            verify_forward_seconds=target.forward_seconds - verify_forward,
            notes=draft.notes,
        )
        index += 1
    yield answer.finish(perf_counter() - began)


def make_drafter(pair: Pair, chooser: Chooser, settings: DecodeSettings) -> Drafter:
    """The drafter that pair and settings ask for. Where nothing is to be drafted it is never asked."""
    stop_ids, costs, lookup = pair.codec.stop_ids, pair.costs, settings.draft_lookup
    adaptive = settings.draft_schedule == "adaptive"
    copier = LookupDrafter(stop_ids)
    if pair.draft is None:
        return AdaptiveDrafter(copier, None, Adaptive(replace(costs, draft=None))) if adaptive else copier
    inside = lookup and not (adaptive and costs.step_seconds(COPIED_TOKENS + 1) > DEAR * costs.step_seconds())
    model = ModelDrafter(pair.draft, chooser, stop_ids, lookup=inside)
    return AdaptiveDrafter(copier if lookup else None, model, Adaptive(costs)) if adaptive else model


def room_for_prompt(num_prompt_tokens: int, max_length: int | None) -> None:
    """Raise `PromptError` when the prompt leaves no room for a new token in the model's context."""
    if max_length is not None and num_prompt_tokens >= max_length:
        raise PromptError(
            f"the prompt has {num_prompt_tokens} tokens, and the target's context is {max_length}",
            hint="shorten the prompt, or use a target with a longer context",
        )
