"""fly: run a large language model faster with a small one, by training-free loosely speculative decoding.

    from fly_cli import load_pair, decode, DecodeSettings

    pair = load_pair()
    for event in decode(pair, "Write a haiku", DecodeSettings(max_new_tokens=64)):
        ...

Names load on first use, so that importing the package (and starting the command) does not import torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Generation, generate
    from .decode import decode
    from .errors import FlyError
    from .events import Drafted, Event, Finished, Origin, Round, Started, Token
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
    "api": ["Generation", "generate"],
    "decode": ["decode"],
    "errors": ["FlyError"],
    "events": ["Drafted", "Event", "Finished", "Origin", "Round", "Started", "Token"],
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


class _Package(ModuleType):
    """Keeps the import of a submodule (`fly_cli.decode`) from hiding the public name that it shares (`decode`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
