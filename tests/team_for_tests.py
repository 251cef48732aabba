"""One of several processes that share a target: decodes in many ways, and prints what it did, as JSON.

RANK=0 ... python team_for_tests.py TARGET DRAFT
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from torch import nn

from fly_cli import models
from fly_cli.cpu_linear import PackedLinear, WideningLinear
from fly_cli.decode import decode
from fly_cli.errors import DecodeError
from fly_cli.events import Finished, Round, Started
from fly_cli.models import Pair, load_pair
from fly_cli.panels import PanelLinear
from fly_cli.prompts import Prompt
from fly_cli.schedule import CostTable
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings

TEXT = "the an in the an in the"
WAYS: dict[str, dict[str, Any]] = {
    "target": {"mode": "target"},
    "exact": {"mode": "exact", "draft_schedule": "constant"},
    "adaptive": {"mode": "exact"},
    "sampled": {"mode": "exact", "temperature": 1.0, "top_p": 0.9, "seed": 3},
    "fly": {"mode": "fly", "entropy_threshold": 0.0, "window_size": 1, "strict_first": 0, "draft_schedule": "constant"},
}
UNSEEDED = {"mode": "exact", "temperature": 1.0}  # the first process draws the seed
CHEAP = CostTable({1: 1.0, 16: 1.2}, {1: 0.1, 8: 0.1})  # drafting pays
DEAR = CostTable({1: 1.0, 16: 9.0}, {1: 2.0, 8: 4.0})  # it does not


def run(pair: Pair, settings: dict[str, Any]) -> dict[str, Any]:
    """The ids of an answer, and how many tokens each round drafted."""
    ids: list[int] = []
    drafted: list[int] = []
    used: Any = None
    prompt = Prompt(id="p", messages=None, text=TEXT)
    for event in decode(pair, prompt, DecodeSettings(max_new_tokens=24, draft_tokens=5, **settings)):
        match event:
            case Started():
                ids.append(event.first.id)
                used = event.settings["seed"]
            case Round():
                ids += [token.id for token in event.tokens]
                drafted.append(len(event.drafted))
            case Finished():
                pass
    return {"ids": ids, "drafted": drafted, "seed": used if settings.get("temperature") else None}


def facts(target: str, draft: str, processes: int, rank: int) -> dict[str, Any]:
    """What each way to decode gives in this process."""
    # Each process has found other costs: those of the first one count.
    models.load_costs = lambda *_: CHEAP if rank == 0 else DEAR  # type: ignore[assignment]
    settings = ModelSettings(target=target, draft=draft, dtype="float32", processes=processes, draft_quantize="none")
    pair = load_pair(settings, TextSettings(raw=True))
    found: dict[str, Any] = {name: run(pair, way) for name, way in WAYS.items()}
    found["unseeded"] = run(pair, UNSEEDED)
    found["placement"] = pair.describe()["placement"]
    found["lookup"] = run(replace(pair, draft=None), {"mode": "exact"})
    if rank == 0:  # what is not finite here alone is an error of all
        read = pair.target.read
        pair.target.read = lambda *given, **named: read(*given, **named) * float("nan")  # type: ignore[method-assign]
    try:
        run(pair, WAYS["target"])
    except DecodeError as error:
        found["error"] = error.message
    half = load_pair(replace(settings, dtype="bfloat16", draft=LOOKUP), TextSettings(raw=True))
    kinds = {type(layer) for layer in half.target.model.modules()}
    found["layers"] = sorted(kind.__name__ for kind in kinds & {nn.Linear, PackedLinear, PanelLinear, WideningLinear})
    found["bfloat16"] = len(run(half, WAYS["target"])["ids"])
    return found


if __name__ == "__main__":
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    print(json.dumps(facts(sys.argv[1], sys.argv[2], world, rank)))
