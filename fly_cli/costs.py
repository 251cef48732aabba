"""What forwards cost on this machine: learned from every run, used by the next one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .c_kernels import digest_of_sources
from .cached_model import DraftModel
from .files import written_whole
from .json_text import read_json
from .placement import Placement
from .schedule import CostTable, guess_costs
from .storage import default_cache_dir

MOST_ROWS = 64  # more rows are prefill
MEASURED_ROWS = (1, 2, 4, 6, 7, 8, 12, 16, 24, 32)
CONTEXT = 192  # tokens before a measured block
REPEATS = 5
BUSY = 2.0  # times as long as can be: another process had the cores


def load_costs(placements: Sequence[Placement], cache_dir: Path | None = None) -> CostTable:
    """The stored table of these models, placed so, on this machine; a guess from their sizes before the first run."""
    target, *draft = placements
    guess = guess_costs(target.weight_bytes, draft[0].weight_bytes if draft else None)
    return stored_costs(placements, cache_dir) or guess


def stored_costs(placements: Sequence[Placement], cache_dir: Path | None = None) -> CostTable | None:
    """What earlier runs of these models, placed so, took on this machine; None before the first one."""
    stored = read(costs_file(placements, cache_dir))
    with_draft = len(placements) > 1
    if not stored.get("target") or (with_draft and not stored.get("draft")):
        return None
    return CostTable(stored["target"], stored["draft"] if with_draft else None)


def measure_costs(models: Sequence[DraftModel]) -> CostTable:
    """Run each model over blocks of the sizes that rounds have, behind a text of some length: the median times."""
    for model in models:
        model.timings.clear()
        text = [index % model.vocab_size for index in range(CONTEXT)]
        for repeat in range(REPEATS):
            for rows in MEASURED_ROWS:
                block = [(repeat + index) % model.vocab_size for index in range(rows)]
                model.read(text)  # an earlier block leaves the cache here
                model.read(text + block, last=rows if model.reads_rows else 1)
        model.reset()
    tables = [{rows: median(model.timings[rows]) for rows in MEASURED_ROWS} for model in models]
    return CostTable(tables[0], tables[1] if len(tables) > 1 else None)


def store_costs(
    placements: Sequence[Placement],
    models: Sequence[DraftModel],
    cache_dir: Path | None = None,
    *,
    anew: bool = False,
) -> None:
    """Mix what the models took in this run into the stored table, half and half; `anew` forgets what was stored.

    Times far beyond those of more rows are of a busy moment, and are forgotten. An unwritable cache is no error.
    """
    file = costs_file(placements, cache_dir)
    table = {} if anew else read(file)
    for name, model in zip(("target", "draft"), models, strict=False):
        known = table.setdefault(name, {})
        for rows, seconds in model.timings.items():
            if rows <= MOST_ROWS:
                known[rows] = (known.get(rows, median(seconds)) + median(seconds)) / 2
        table[name] = without_outliers(known)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as unfinished:
            unfinished.write_text(json.dumps(table), encoding="utf-8")
    except OSError:
        return


def without_outliers(known: Mapping[int, float]) -> dict[int, float]:
    """The times but for those of rows that take `BUSY` times as long as a larger number of rows, or for each row more
    than `BUSY` times what a single row takes."""
    ceilings = {rows: BUSY * rows * known.get(1, math.inf) for rows in known}
    for rows in known:
        ceilings[rows] = min([ceilings[rows], *(BUSY * known[more] for more in known if more > rows)])
    return {rows: seconds for rows, seconds in known.items() if seconds <= ceilings[rows]}


def costs_file(placements: Sequence[Placement], cache_dir: Path | None) -> Path:
    """Where the table is kept: a name for machine, libraries, kernels, models and places."""
    machine = [platform.machine(), platform.processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__]
    machine += [torch.backends.cpu.get_cpu_capability(), digest_of_sources()]
    if torch.cuda.is_available():
        machine.append(torch.cuda.get_device_name())
    key = json.dumps([machine, [place.describe() for place in placements]])
    return (cache_dir or default_cache_dir()) / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(file: Path) -> dict[str, dict[int, float]]:
    """The stored table, empty where there is none that makes sense."""
    try:
        content: Mapping[str, Any] = read_json(file.read_text(encoding="utf-8"))
        return {
            name: {
                int(rows): float(seconds) for rows, seconds in content[name].items() if 0 < float(seconds) < math.inf
            }
            for name in ("target", "draft")
            if name in content
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
