"""What `fly tune` found, kept in a file of the user's: one entry for each pair and machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import FlyError, SettingsError
from .files import written_whole
from .settings import DecodeSettings, ModelSettings
from .yaml_text import read_yaml

LOADING = ("dtype", "device_map", "draft_device", "quantize", "draft_quantize", "compile")
TUNABLE = ("draft_tokens", "window_size", "draft_lookup", "entropy_threshold")


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for a pair on a machine."""

    target: str
    draft: str
    machine: str
    models: Mapping[str, Any]  # how they were loaded: dtype, devices, the draft's weights
    date: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # those to change, and to what
    speedup_vs_target: float | None = None
    num_prompts: int = 0


def read_tuned(file: Path) -> list[Tuned]:
    """All that was found, [] where nothing was. Raises `SettingsError` for a file that is not ours."""
    try:
        content = read_yaml(file.read_text(encoding="utf-8"), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        raise unreadable(file) from error
    try:
        found = [Tuned(**{**entry, "models": how_loaded(entry["models"])}) for entry in content or []]
        if any(not isinstance(one.settings, dict) or not set(one.settings) <= set(TUNABLE) for one in found):
            raise TypeError("settings that are not tuned")
        for one in found:
            DecodeSettings(**one.settings)
    except (TypeError, KeyError, AttributeError, SettingsError) as error:
        raise unreadable(file) from error
    return found


def unreadable(file: Path) -> SettingsError:
    return SettingsError(f"`{file}` is not what `fly tune` writes", hint="remove it, and run `fly tune` again")


def keep_tuned(file: Path, tuned: Tuned) -> None:
    """Put the result among the others, in the place of an earlier one of the same pair and machine."""
    others = [one for one in read_tuned(file) if not same_case(one, tuned)]
    entries = yaml.safe_dump([asdict(one) for one in [*others, tuned]], sort_keys=False, allow_unicode=True)
    text = f"# by `fly tune`: without its entry a pair has the defaults again\n{entries}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FlyError(
            f"the result cannot be kept in `{file}`: {error.strerror}", hint="check the permissions of its folder"
        ) from None


def same_case(one: Tuned, other: Tuned) -> bool:
    """Whether both are about the same pair, loaded in the same way on the same machine."""
    return all(getattr(one, name) == getattr(other, name) for name in ("target", "draft", "machine", "models"))


def how_loaded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of all settings those that change what forwards cost; what an earlier version did not know has its default."""
    defaults = ModelSettings()
    return {name: values.get(name, getattr(defaults, name)) for name in LOADING}
