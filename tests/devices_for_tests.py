"""Decodes with models on fake devices, in a process of its own: a device, once made, is there for all of its tests.

python devices_for_tests.py         # prints what happened, as JSON: place -> way to decode -> facts
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from accelerate import dispatch_model
from models_for_tests import byte_tokenizer, noisy_copy, tiny_llama

from fly_cli import cached_model
from fly_cli.cached_model import CachedModel
from fly_cli.decode import decode
from fly_cli.events import Drafted, Round
from fly_cli.models import Pair
from fly_cli.prompts import Prompt
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings
from fly_cli.text import Codec

SPLIT = {"model.embed_tokens": "fake:0", "model.rotary_emb": "fake:0", "model.layers.0": "fake:0"}
SPLIT |= {"model.layers.1": "fake:1", "model.norm": "fake:1", "lm_head": "fake:1"}
PLACES: dict[str, tuple[Any, str | None]] = {  # where the target is, and the draft
    "one device": ("cpu", "cpu"),
    "each on its own": ("fake:0", "fake:1"),
    "the draft on the other": ("cpu", "fake:0"),
    "the target on the other": ("fake:0", "cpu"),
    "the target over two": (SPLIT, "fake:1"),
    "the target over two, in part offloaded": (SPLIT | {"model.layers.0": "cpu"}, "cpu"),
    "the target over two, its ends offloaded": (SPLIT | {"model.embed_tokens": "cpu", "lm_head": "cpu"}, "fake:0"),
    "lookup alone": (SPLIT, None),
}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact"},
    "fly": {"mode": "fly", "entropy_threshold": 0.0, "window_size": 1, "strict_first": 0},
    "sampled": {"mode": "exact", "temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3},
}
TEXT = "the an in the an in the"
DRAFT_TOKENS, COUNT = 5, 16
CODEC = Codec(byte_tokenizer(), settings=TextSettings(raw=True), end_ids=(), vocab_rows=384)


class Clock:
    """A clock on which nothing takes time but waiting for a device, a second each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, device: torch.device) -> None:
        assert device.type == "fake"
        self.now += 1.0


clock = Clock()


def placed(model: Any, place: Any) -> CachedModel:
    """A copy of the model at its place."""
    model = copy.deepcopy(model)
    if isinstance(place, str):
        model = model.to(place)
    else:
        model = dispatch_model(
            model, {name: home if home == "cpu" else torch.device(home) for name, home in place.items()}
        )
    return CachedModel(model, name="tiny", vocab_size=CODEC.vocab_size)


def facts(pair: Pair, settings: dict[str, Any], transfers: list[tuple[str, str, int]]) -> dict[str, Any]:
    """The ids of an answer, the transfers of its rounds (while drafting, while verifying), and a forward's seconds."""
    ids, drafting, verifying = [], [], []
    transfers.clear()
    for model in pair.models:
        model.forward_seconds = 0.0
        model.timings.clear()
    made = DecodeSettings(max_new_tokens=COUNT, draft_tokens=DRAFT_TOKENS, draft_schedule="constant", **settings)
    for event in decode(pair, Prompt(id="p", messages=None, text=TEXT), made):
        match event:
            case Drafted():
                drafting += transfers
            case Round():
                verifying.append(list(transfers))
                ids += [token.id for token in event.tokens]
        transfers.clear()
    seconds = [model.forward_seconds / sum(map(len, model.timings.values())) for model in pair.models]
    return {"ids": ids, "drafting": drafting, "verifying": verifying, "seconds": seconds}


def main() -> None:
    from fake_device import fake_devices  # here: from then on torch takes the fake device for its accelerator

    torch.accelerator.synchronize = clock.wait  # type: ignore[assignment]
    torch.accelerator.empty_cache = lambda: None  # type: ignore[assignment]  # it keeps none; accelerate 1.16 asks
    cached_model.perf_counter = clock  # type: ignore[assignment]
    target = tiny_llama(0, attn_implementation="eager")
    draft = noisy_copy(target, 1)
    found: dict[str, dict[str, Any]] = {}
    with fake_devices() as transfers:
        for name, (target_place, draft_place) in PLACES.items():
            cached = placed(target, target_place)
            small = None if draft_place is None else placed(draft, draft_place)
            pair = Pair(cached, small, CODEC, ModelSettings(draft=LOOKUP if small is None else "draft"))
            found[name] = {way: facts(pair, settings, transfers) for way, settings in WAYS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
