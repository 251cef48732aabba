"""The ways of transformers to decode, as arms of a bench: the same weights, prompt ids and stop rules as ours.

Greedy, without penalties, and otherwise with transformers' own defaults: what a checkpoint's generation config asks
for is left out, on both models, as it is in our own arms. `hf` is plain `generate`, `hf-assisted` has the draft model
as `assistant_model`, `hf-lookup` has `prompt_lookup_num_tokens` 10.

The prefill ends with the first forward of the target. With an assistant or with lookup a first draft has gone into
it, and several tokens may come with it; none of them counts as decoded, so that no speed profits from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .answer import Answer
from .bench_rows import Answered
from .decode import room_for_prompt
from .errors import DecodeError, UsageError
from .events import Origin
from .models import Pair, quiet_libraries
from .prompts import Prompt
from .settings import DecodeSettings
from .stats import ratio

LOOKUP_TOKENS = 10  # transformers has no default of its own; its documentation uses 10


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Hands every new token to the answer, notes when the first ones came, and ends the run where the answer ends."""

    def __init__(self, answer: Answer, num_prompt_tokens: int, vocab_size: int) -> None:
        self.answer = answer
        self.vocab_size = vocab_size
        self.ids: list[int] = []
        self.first_at: float | None = None
        self.num_first_tokens = 0
        self._seen = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        new = input_ids[0, self._seen :].tolist()  # waits for the device, so the clock read next is true
        now = perf_counter()
        self._seen += len(new)
        if (highest := max(new, default=0)) >= self.vocab_size:
            raise DecodeError(
                f"transformers chose id {highest}, a padded row of the model that the tokenizer has no token for",
                hint="compare without the `hf` arms; the others never choose such rows",
            )
        if not self.answer.finished:  # a block may go on behind a stop string
            self.ids += [token.id for token in self.answer.add(new, [Origin.TARGET] * len(new))]
        if self.first_at is None:
            self.first_at, self.num_first_tokens = now, len(self.ids)
        return torch.full((1,), self.answer.finished, dtype=torch.bool, device=input_ids.device)


def answer_with(kind: str, pair: Pair, prompt: Prompt, settings: DecodeSettings) -> Answered:
    """What transformers' `generate` makes of the prompt, in the way `kind`.

    Raises `PromptError` as our own arms do, and `DecodeError` where a row of the model was chosen that pads its table
    and stands for no token. Our own arms cut such rows off. Here that would change what is measured, and trained
    models do not choose them.
    """
    began = perf_counter()
    model, max_length = pair.target.model, pair.target.max_length
    ids = pair.codec.encode(prompt).ids
    room_for_prompt(len(ids), max_length)
    answer = Answer(pair.codec, ids, settings, max_length)
    watch = Watch(answer, len(ids), pair.codec.vocab_size)
    extra, models = extras(kind, pair)
    inputs = torch.tensor([ids], dtype=torch.long, device=input_device(model))
    with quiet_libraries(), plain_configs(models):
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=greedy_config(sorted(pair.codec.stop_ids), answer.room),
            stopping_criteria=StoppingCriteriaList([watch]),
            **extra,
        )
    seconds = perf_counter() - began
    finished = answer.finish(seconds)
    figures = timings(len(ids), len(watch.ids), watch.num_first_tokens, (watch.first_at or began) - began, seconds)
    return Answered(finished.text, watch.ids, figures | {"finish_reason": finished.reason})


def extras(kind: str, pair: Pair) -> tuple[dict[str, Any], list[Any]]:
    """What this way to decode wants besides, and the models that take part."""
    model = pair.target.model
    match kind:
        case "hf":
            return {}, [model]
        case "hf-lookup":
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, [model]
        case "hf-assisted" if pair.draft is not None:
            assistant = pair.assistant or pair.draft.model  # type: ignore[attr-defined]  # int4 comes with an assistant
            extra: dict[str, Any] = {"assistant_model": assistant}
            draft_codec = pair.translation.draft.codec if pair.translation is not None else pair.codec
            sizes = {one.config.get_text_config().vocab_size for one in (model, assistant)}
            if pair.translation is not None or len(sizes) > 1:
                # transformers wants both tokenizers, and goes by way of text: also where only the padding differs.
                extra |= {"tokenizer": pair.codec.tokenizer, "assistant_tokenizer": draft_codec.tokenizer}
            return extra, [model, assistant]
        case "hf-assisted":
            raise UsageError("`hf-assisted` needs a draft model", hint="name one with `--draft`")
        case _:
            raise ValueError(kind)


def greedy_config(stop_ids: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """All that is set for every peer."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,  # one sequence is never padded; unset it would warn
    )


@contextmanager
def plain_configs(models: Sequence[Any]) -> Iterator[None]:
    """`generate` fills what is unset from the models' own generation configs: meanwhile they have none."""
    before = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config


def input_device(model: Any) -> torch.device:
    """Where ids go. With accelerate's hooks, offloaded embeddings live on "meta" between forwards."""
    device: torch.device = model.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def timings(
    num_prompt_tokens: int, num_new_tokens: int, num_first_tokens: int, ttft_s: float, seconds: float
) -> dict[str, Any]:
    """The figures that can be told from outside, by the counting rules of `stats`."""
    decode_s, after_first = seconds - ttft_s, num_new_tokens - num_first_tokens
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": num_new_tokens,
        "num_first_tokens": num_first_tokens,
        "ttft_s": ttft_s,
        "decode_s": decode_s,
        "decode_tps": ratio(after_first, decode_s) if after_first > 0 else None,
        "end_to_end_tps": ratio(num_new_tokens, seconds),
        "tpot_ms": ratio(1000 * decode_s, after_first) if decode_s > 0 else None,
    }
