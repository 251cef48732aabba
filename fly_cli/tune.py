"""Which settings suit a pair on this machine: what is tried, and what is recommended.

A change is recommended only where the 95% interval of its paired ratio to the settings in effect lies above 1, and the
answers are as good: differences within the noise of a machine change nothing. Among many changes one may look better by
chance, so what is recommended is measured once more, against the settings in effect alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from . import figures
from .bench_plan import Arm, Build, changed_arm
from .report import quality
from .settings import DecodeSettings
from .tuned import TUNABLE

TRIED: Mapping[str, Sequence[Any]] = {  # one change at a time
    "draft_tokens": (8, 24),
    "window_size": (4, 8),
    "draft_lookup": (True, False),
    "entropy_threshold": (0.15, 0.6),  # of topk entropy
}
BASE = "fly"  # the arm with the settings in effect
DEFAULT_ENTROPY = DecodeSettings().entropy


def trial_arms(build: Build, *, given: Iterable[str] = (), draft_model: bool = True) -> list[Arm]:
    """The target alone, fly with the settings in effect, and fly with each change.

    `build` replaces settings; those `given` by hand are not changed. Without a draft model nothing can be deferred.
    """
    base = build(mode="fly")
    arms = [Arm("target", "target", build(mode="target")), Arm(BASE, "fly", base)]
    for name, values in TRIED.items():
        if name in given or not (draft_model or name == "draft_tokens"):
            continue
        if name == "entropy_threshold" and base.entropy != DEFAULT_ENTROPY:
            continue  # its scale is another one, and the default's is what is kept
        for value in values:
            arm = changed_arm(build, {name: value})
            if arm.settings != base and arm.settings.window_size < arm.settings.draft_tokens:
                arms.append(arm)
    return arms


def changes_of(arm: Arm, base: DecodeSettings) -> dict[str, Any]:
    """The settings in which an arm differs from those in effect."""
    before, after = asdict(base), asdict(arm.settings)
    return {name: after[name] for name in TUNABLE if after[name] != before[name]}


def recommend(arms: Sequence[Arm], summary: Mapping[str, Any], rows: Iterable[figures.Row]) -> dict[str, Any]:
    """The change of each setting that pays, from a run over `trial_arms`: the fastest of those that pay.

    `summary` is that of the `rows`. Nothing is recommended against an arm without answers.
    """
    by_arm: dict[str, list[figures.Row]] = {arm.name: [] for arm in arms}
    for row in rows:
        by_arm[row["arm"]].append(row)
    overall = summary["overall"]
    base = next(arm for arm in arms if arm.name == BASE)
    best: dict[str, tuple[float, Any]] = {}
    for arm in arms:
        if arm.kind != "fly" or arm.name == BASE or not (by_arm[arm.name] and by_arm[BASE]):
            continue
        ratio = figures.speedup(by_arm[arm.name], by_arm[BASE])
        if not ratio or ratio["low"] is None or ratio["low"] <= 1 or worse(overall[arm.name], overall[BASE]):
            continue
        changes = changes_of(arm, base.settings)
        name = ",".join(changes)
        if name not in best or ratio["value"] > best[name][0]:
            best[name] = (ratio["value"], changes)
    found = {name: value for _, changes in best.values() for name, value in changes.items()}
    together = replace(base.settings, **found)
    if together.window_size >= together.draft_tokens:  # each pays alone, and together nothing can be deferred
        del found["window_size"]
    return found


def worse(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the answers of one arm are worse than the other's, as far as that is known."""
    mine, theirs = quality(one), quality(other)
    return mine is not None and theirs is not None and mine < theirs
