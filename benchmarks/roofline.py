"""How near the forwards of a pair are to what this machine's memory allows.

python benchmarks/roofline.py [--target ...] [--draft ...]

A forward over few rows must read every weight of the layers once, and the keys and values of the text so far; its
floor is these bytes over the memory's bandwidth, which is measured here by adding up a large array. Prints a Markdown
table: rows, milliseconds (median), the floor, and the share of it that is reached.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch
from torch import nn
from transformers import AutoConfig

from fly_cli import ModelSettings, load_pair
from fly_cli.cached_model import CachedModel, DraftModel
from fly_cli.costs import CONTEXT, MEASURED_ROWS, measure_costs
from fly_cli.cpu_linear import PackedLinear
from fly_cli.int4_decoder import Int4Decoder
from fly_cli.int4_onnx import BYTES_PER_WEIGHT
from fly_cli.machine import processor_name
from fly_cli.panels import PanelLinear
from fly_cli.placement import Placement
from fly_cli.quantized import Int8Linear
from fly_cli.skeleton import PLANNED_TOKENS

BUFFER_BYTES = 1_600_000_000
REPEATS = 7


def bandwidth() -> float:
    """Bytes per second that a plain sum reads: the best of some tries."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    best = float("inf")
    for _ in range(REPEATS):
        began = perf_counter()
        buffer.sum()
        best = min(best, perf_counter() - began)
    return BUFFER_BYTES / best


def bytes_read(model: DraftModel, place: Placement) -> int:
    """Bytes of weights that a forward reads."""
    if isinstance(model, CachedModel):
        return weight_bytes(model.model)
    if isinstance(model, Int4Decoder):
        looked_up = "embedding" if "head" in model.state else ""
        return sum(one.nbytes for name, one in model.state.items() if name != looked_up)
    config = AutoConfig.from_pretrained(model.path).get_text_config()
    return place.weight_bytes - int(BYTES_PER_WEIGHT * config.vocab_size * config.hidden_size)  # all but a table


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights that a forward reads whole: embeddings are looked up, a row a token."""
    looked_up = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    head = getattr(model.get_output_embeddings(), "weight", None)  # packed and int8 heads have none
    tied = head is not None and id(head) in looked_up
    plain = sum(p.nbytes for p in model.parameters() if id(p) not in looked_up)
    packed = sum(
        layer.weight_bytes for layer in model.modules() if isinstance(layer, Int8Linear | PackedLinear | PanelLinear)
    )
    return plain + packed + (head.nbytes if tied else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=ModelSettings().target)
    parser.add_argument("--draft", default=ModelSettings().draft)
    pair = load_pair(ModelSettings(**vars(parser.parse_args())))
    if {str(device) for place in pair.placements for device in place.device_map.values()} != {"cpu"}:
        raise SystemExit("this measures the memory of the CPU, and the models are not there alone")
    speed = bandwidth()
    print(f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}: {speed / 1e9:.1f} GB/s\n")
    measure_costs(pair.models)
    print("| model | bytes | " + " | ".join(f"{rows} rows" for rows in MEASURED_ROWS) + " | floor | reached at 1 |")
    print("|--" * (len(MEASURED_ROWS) + 4) + "|")
    for model, place in zip(pair.models, pair.placements, strict=True):
        times = [median(model.timings[rows]) for rows in MEASURED_ROWS]
        size = bytes_read(model, place) + place.cache_bytes * CONTEXT // PLANNED_TOKENS
        cells = [f"{1000 * seconds:.0f} ms" for seconds in times]
        share = size / speed / times[0]
        print(
            f"| {model.name} | {size / 1e9:.2f} GB | {' | '.join(cells)} | {1000 * size / speed:.0f} ms | {share:.0%} |"
        )


if __name__ == "__main__":
    main()
