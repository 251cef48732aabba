"""Pairs for benches, and a bench of scripted models as a process of its own:

python bench_helpers.py bench prompts.jsonl --out DIR        # as `fly`, on scripted models
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fly_cli.bench_plan import Arm
from fly_cli.prompts import Prompt
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings

VOCAB = 384


def raw_codec(*, raw: bool = True, end_ids: Sequence[int] = (), vocab_rows: int = VOCAB) -> Any:
    from models_for_tests import byte_tokenizer

    from fly_cli.text import Codec

    return Codec(byte_tokenizer(), settings=TextSettings(raw=raw), end_ids=end_ids, vocab_rows=vocab_rows)


def pair_of(target: Any, draft: Any = None, codec: Any = None) -> Any:
    from fly_cli.cached_model import CachedModel
    from fly_cli.models import Pair

    codec = codec or raw_codec()
    target_model, draft_model = (
        CachedModel(model, name="tiny", vocab_size=codec.vocab_size) if model is not None else None
        for model in (target, draft)
    )
    assert target_model is not None
    return Pair(target_model, draft_model, codec, ModelSettings(draft="draft" if draft is not None else LOOKUP))


def counting(sequence: list[int]) -> Mapping[int, float]:
    """The next token is one more than the last; every seventh sequence length leaves some doubt."""
    following = 97 + (sequence[-1] + len(sequence) // 7) % 20
    return {following: 1.0, 40 + following % 7: 0.9} if len(sequence) % 7 == 0 else {0: 0.0, following: 30.0}


def hasty(sequence: list[int]) -> Mapping[int, float]:
    """A drafter that is wrong at every fifth sequence length."""
    return {0: 0.0, 50: 30.0} if len(sequence) % 5 == 0 else counting(sequence)


def scripted_pair(codec: Any = None) -> Any:
    from models_for_tests import ScriptedModel

    models = [ScriptedModel(script, VOCAB) for script in (counting, hasty)]
    for model in models:
        model.name_or_path = "scripted"
    return pair_of(*models, codec)


def arms(*names: str, **settings: Any) -> list[Arm]:
    modes = {"exact": "exact", "fly": "fly", "lookup": "fly"}
    settings = {"max_new_tokens": 12, "draft_tokens": 5, "window_size": 2} | settings
    return [Arm(name, name, DecodeSettings(mode=modes.get(name, "target"), **settings)) for name in names]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{number}", text=f"prompt {number} ") for number in range(count)]


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what a clock or the machine put into it."""
    clocked = ("_s", "_ms", "_tps", "_bytes", "overhead_share")
    return {name: value for name, value in row.items() if not name.endswith(clocked)}


def main(arguments: Sequence[str]) -> int:
    """`fly` on scripted models. PAUSE: seconds that each forward takes."""
    from fly_cli.cli import main as fly
    from fly_cli.cli.process import quiet_imports

    quiet_imports()
    from fly_cli import models

    models.load_pair = lambda *_, **__: scripted_pair(raw_codec(raw=False))
    if pause := float(os.environ.get("PAUSE", "0")):
        from fly_cli.cached_model import CachedModel

        forward = CachedModel._forward

        def slowly(self: Any, *given: Any) -> Any:
            time.sleep(pause)
            return forward(self, *given)

        CachedModel._forward = slowly  # type: ignore[method-assign]
    return fly(arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
