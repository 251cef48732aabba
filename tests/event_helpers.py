"""Builds valid lists of events from drawings of the walk, for tests that need no model.

run("==x======", "=!=", first="Hi")       # = match   x open gate   ! closed gate
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fly_cli.events import (
    Drafted,
    DraftToken,
    Event,
    Finished,
    FinishReason,
    Origin,
    Round,
    Source,
    Started,
    Token,
)
from fly_cli.settings import DecodeSettings
from fly_cli.verify import Evidence, judge

OPEN_GATE, CLOSED_GATE = 1.0, 0.01  # entropies


@dataclass
class Block:
    """One round: the drawing, the texts of the drafted tokens, and the text of the target's own token.

    `cut` keeps only so many of the committed tokens, `held` is the round's `held`.
    """

    drawing: str
    texts: Sequence[str] | None = None  # default: `d0.0 `, `d0.1 `, ...
    final: str | None = None  # default: `t0 `
    cut: int | None = None
    held: int = 0
    draft_seconds: float = 0.3
    verify_seconds: float = 0.2
    other_seconds: float = 0.01
    draft_forward_seconds: float = 0.29
    verify_forward_seconds: float = 0.19
    notes: tuple[str, ...] = field(default=())


def run(
    *blocks: Block | str,
    first: str = "First ",
    settings: DecodeSettings | None = None,
    prefill_seconds: float = 0.5,
    held: int = 0,
    reason: FinishReason | None = FinishReason.LENGTH,  # None: interrupted, without `Finished`
    tail: str = "",
    stop: str | None = None,
    seconds: float | None = None,
    notes: tuple[str, ...] = (),
    prompt_id: str = "prompt",
    extra_settings: dict[str, Any] | None = None,
) -> list[Event]:
    """The events of one run. With `stop` the text is cut at its first occurrence."""
    settings = settings or DecodeSettings(seed=0)
    token = Token(7, first, Origin.TARGET)
    as_json = settings.as_json() | (extra_settings or {})
    events: list[Event] = [Started(prompt_id, (1, 2, 3), token, held, prefill_seconds, as_json, notes)]
    text, new, duration = first, 1, prefill_seconds
    for index, block in enumerate(blocks):
        made = make_round(index, Block(block) if isinstance(block, str) else block, new, settings)
        events += [Drafted(index, made.drafted), made]
        text += "".join(token.text for token in made.tokens)
        new += len(made.tokens)
        duration += made.draft_seconds + made.verify_seconds + made.other_seconds
    if reason is not None:
        text += tail
        end = text.index(stop) if stop is not None else None
        events.append(Finished(reason, text[:end], tail, stop, None, duration if seconds is None else seconds))
    return events


def make_round(index: int, block: Block, num_new_tokens: int, settings: DecodeSettings) -> Round:
    """The round that the drawing shows, judged by the settings."""
    n = len(block.drawing)
    draft_ids = tuple(1000 * index + 100 + j for j in range(n))
    target_ids = tuple(
        draft_ids[j] if block.drawing[j : j + 1] == "=" else 1000 * index + 500 + j for j in range(n + 1)
    )
    evidence = Evidence(
        draft_ids=draft_ids,
        target_ids=target_ids,
        top_ids=target_ids,
        entropies=tuple(OPEN_GATE if mark == "x" else CLOSED_GATE for mark in block.drawing),
        allowed=(True,) * n,
        protected=(False,) * n,
        num_new_tokens=num_new_tokens,
    )
    verdict = judge(evidence, settings)
    texts = [f"d{index}.{j} " for j in range(n)] if block.texts is None else block.texts
    drafted = tuple(DraftToken(id, text, Source.MODEL) for id, text in zip(draft_ids, texts, strict=True))
    kept = [Token(d.id, d.text, origin) for d, origin in zip(drafted, verdict.origins, strict=False)]
    final = Token(verdict.final_id, f"t{index} " if block.final is None else block.final, verdict.final_origin)
    return Round(
        index=index,
        drafted=drafted,
        evidence=evidence,
        verdict=verdict,
        tokens=tuple([*kept, final][: block.cut]),
        held=block.held,
        draft_seconds=block.draft_seconds,
        verify_seconds=block.verify_seconds,
        other_seconds=block.other_seconds,
        draft_forward_seconds=block.draft_forward_seconds,
        verify_forward_seconds=block.verify_forward_seconds,
        notes=block.notes,
    )


def plain(texts: Iterable[str], **more: Any) -> list[Event]:
    """A run without drafts: each text is one token of the target."""
    first, *rest = texts
    blocks = [Block("", texts=[], final=text) for text in rest]
    return run(*blocks, first=first, settings=DecodeSettings(mode="target", seed=0), **more)


def answer(events: Iterable[Event]) -> str:
    """The text of a finished run."""
    return next(event.text for event in events if isinstance(event, Finished))
