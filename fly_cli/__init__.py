"""fly: run a large language model faster with a small one, by training-free loosely speculative decoding.

    from fly_cli import load_pair, decode, DecodeSettings

    pair = load_pair()
    for event in decode(pair, "Write a haiku", DecodeSettings(max_new_tokens=64)):
        ...

Names load on first use, so that importing the package (and starting the command) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import decode
    from .errors import FlyError
    from .events import Drafted, Event, Finished, Origin, Round, Started, Token
    from .generate import Generation, generate
    from .models import Pair, load_pair
    from .prompts import Prompt
    from .settings import DecodeSettings, ModelSettings, TextSettings
    from .stats import Summary, summarize
    from .verify import Evidence, Verdict, judge

__all__ = [
    "DecodeSettings",
    "Drafted",
    "Event",
    "Evidence",
    "Finished",
    "FlyError",
    "Generation",
    "ModelSettings",
    "Origin",
    "Pair",
    "Prompt",
    "Round",
    "Started",
    "Summary",
    "TextSettings",
    "Token",
    "Verdict",
    "decode",
    "generate",
    "judge",
    "load_pair",
    "summarize",
]

_MODULES = {
    "decode": ["decode"],
    "errors": ["FlyError"],
    "events": ["Drafted", "Event", "Finished", "Origin", "Round", "Started", "Token"],
    "generate": ["Generation", "generate"],
    "models": ["Pair", "load_pair"],
    "prompts": ["Prompt"],
    "settings": ["DecodeSettings", "ModelSettings", "TextSettings"],
    "stats": ["Summary", "summarize"],
    "verify": ["Evidence", "Verdict", "judge"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
