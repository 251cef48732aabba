"""A draft model on the CPU with int4 weights, run by ONNX Runtime, prepared once and kept in the cache.

A single step moves every weight once, and ONNX Runtime's kernels for 4-bit weights come near the memory's speed:
14 ms a step for 0.5B parameters, where PyTorch's int8 takes 45 (two cores, AVX2). What the draft model computes cannot
change what the target accepts. The graph is made by onnxruntime-genai's model builder: blocks of 32 weights share a
scale, rounded to nearest, inputs are quantised to 8 bits while running.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .cached_model import Timings
from .files import written_whole
from .lookup import common_prefix
from .rope import context_length
from .storage import default_cache_dir, prepared_name
from .tethered import environment, tether, tethered

if TYPE_CHECKING:
    import onnxruntime

PACKAGES = ("onnxruntime", "onnxruntime_genai", "onnx", "onnx_ir")  # the extra `cpu`
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "llama3")
OPTIONS = ("accuracy_level=4", "block_size=32", "prune_lm_head=true", "op_types_to_quantize=MatMul/Gather")
BYTES_PER_WEIGHT = 0.5 + 4 / 32
LEAST_PARAMETERS = 20_000_000  # of a model whose steps are slow enough for a minute of preparation to pay
FORMAT = "int4-1"
GRAPH, REFERENCE, FAILED = "model.onnx", "reference.safetensors", "failed.txt"
FIRST_CAPACITY = 512  # tokens in the cache at first; it doubles
CHUNK = 512  # tokens of a forward; bounds the memory of a long prompt's attention
REFERENCE_IDS = 12
REFERENCE_READS = (8, 9, 12)  # tokens of a text that are read one after another: a prompt, one row, some rows
LEAST_LIKENESS = 0.8  # cosine of the logits with the plain model's: 0.96 on the default draft, about 0 for garbage


class Int4Error(Exception):
    """The int4 form cannot be made, or is not right."""


class Int4Model:
    """A model in ONNX Runtime that remembers what it has read. It has the logits of one row a forward.

    Its cache is preallocated, and rewinding it is knowing a shorter length: the graph is told by its mask how much of
    the cache holds, and writes behind that.
    """

    reads_rows = False

    def __init__(self, session: onnxruntime.InferenceSession, config: Any, *, name: str, vocab_size: int | None = None):
        text = config.get_text_config(decoder=True)
        self.name = name
        self.session = session
        self.path = Path(config.name_or_path)
        self.max_length = context_length(text)
        self.vocab_rows = int(text.vocab_size)
        self.vocab_size = min(vocab_size or self.vocab_rows, self.vocab_rows)
        self.forward_seconds = 0.0
        self.timings = Timings()
        self._inputs = {one.name for one in session.get_inputs()}
        self._states = sorted(name for name in self._inputs if name.startswith("past_key_values."))
        heads = next(one.shape[1] for one in session.get_inputs() if one.name in self._states)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._shape = (1, int(heads), FIRST_CAPACITY, int(width))
        self.reset()

    def reset(self) -> None:
        """Forget everything read."""
        self._ids: list[int] = []
        self._allocate({name: np.zeros(self._shape, dtype=np.float32) for name in self._states})

    def settle(self, ids: Sequence[int]) -> None:
        """Nothing to do: what is cached beyond `ids` is written over."""

    def room_before_switch(self, length: int) -> float:
        """No limit: positions that change with the length of the text are not built."""
        return math.inf

    def read(self, ids: Sequence[int], last: int = 1) -> Tensor:
        """Logits that follow each of the last `last` ids of the whole sequence `ids`. [last, vocab_size] fp32.

        A forward has those of one row: more rows are as many forwards.
        """
        return torch.cat([self._read(list(ids[: len(ids) - behind])) for behind in reversed(range(last))])

    def _read(self, ids: list[int]) -> Tensor:
        """Logits behind `ids`, of which only what the cache lacks is fed. [1, vocab_size]."""
        kept = min(common_prefix(self._ids, ids), len(ids) - 1)
        self._ids = []  # an interrupted forward leaves the cache empty, not wrong
        self._make_room(len(ids), kept)
        for start in range(kept, len(ids), CHUNK):
            logits = self._forward(ids[start : start + CHUNK], start)
        self._ids = ids
        return logits

    def _forward(self, ids: list[int], start: int) -> Tensor:
        """One forward over `ids` at position `start`. [1, vocab_size]."""
        started = perf_counter()
        binding, end = self._binding, start + len(ids)
        binding.bind_cpu_input("input_ids", np.array([ids], dtype=np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, end), dtype=np.int64))
        if "position_ids" in self._inputs:
            binding.bind_cpu_input("position_ids", np.arange(start, end, dtype=np.int64)[None])
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        (logits,) = (one for one in binding.get_outputs() if one.shape()[-1] == self.vocab_rows)
        seconds = perf_counter() - started
        self.forward_seconds += seconds
        self.timings.add(len(ids), seconds)
        return torch.from_numpy(logits.numpy())[0, -1:, : self.vocab_size].float()

    def _make_room(self, length: int, kept: int) -> None:
        """See that the cache holds `length` tokens; the first `kept` stay."""
        capacity = self._shape[2]
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        self._shape = (*self._shape[:2], capacity, self._shape[3])
        states = {}
        for name, old in self._cache.items():
            states[name] = np.zeros(self._shape, dtype=np.float32)
            states[name][:, :, :kept] = old[:, :, :kept]
        self._allocate(states)

    def _allocate(self, states: dict[str, np.ndarray[Any, Any]]) -> None:
        """Make these the cache [1, heads, capacity, width] that the graph reads and writes."""
        from onnxruntime import OrtValue

        self._cache = states
        self._binding = self.session.io_binding()
        for name, state in states.items():
            value = OrtValue.ortvalue_from_numpy(state)  # of the same memory
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)


def no_int4(model: Any) -> str | None:
    """Why a model (perhaps without weights) cannot have an int4 form here; None if it can."""
    config = model.config
    architecture = type(model).__name__
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if architecture not in ARCHITECTURES or getattr(config, "sliding_window", None) or rope not in ROPE_TYPES:
        return f"that is built for plain {', '.join(name.removesuffix('ForCausalLM') for name in ARCHITECTURES)} models"
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        return f"{missing[0]} is not installed (the extra `cpu`: pip install 'fly-decode[cpu]')"
    failed = int4_folder(Path(config.name_or_path)) / FAILED
    return failed.read_text(encoding="utf-8") if failed.is_file() else None


def int4_bytes(model: Any) -> int:
    """What the model's int4 form takes: embedding and head are quantised apart, norms and biases are fp32."""
    sizes: dict[int, int] = {id(one): one.numel() for one in model.parameters() if one.dim() == 2}
    wide: int = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() != 2)
    looked_up, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    twice = sizes[id(head)] if head is looked_up else 0
    quantized: float = BYTES_PER_WEIGHT * (sum(sizes.values()) + twice)
    return int(quantized) + 4 * wide


def int4_folder(folder: Path, cache_dir: Path | None = None) -> Path:
    """Where the int4 form of a model folder is kept."""
    return (cache_dir or default_cache_dir()) / "int4" / prepared_name(folder, FORMAT, OPTIONS)


def open_session(folder: Path) -> onnxruntime.InferenceSession:
    """The prepared graph. Raises `Int4Error` where there is none that can be run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    # Two pools of threads that spin while they wait, PyTorch's and this one, would take the cores from each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(folder / GRAPH, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # not there, cut short, or of another version
        raise Int4Error(str(error)) from error


def check(model: Int4Model, folder: Path) -> None:
    """Compare the model's logits with the plain model's. Raises `Int4Error` where they are not alike."""
    try:
        right = load_file(folder / REFERENCE)["logits"][:, : model.vocab_size]
    except Exception as error:
        raise Int4Error(str(error)) from error
    likeness = torch.cosine_similarity(reference_reads(model), right, dim=-1).min().item()
    model.reset()
    if not likeness >= LEAST_LIKENESS:  # a NaN is no less wrong
        raise Int4Error(f"its logits are not the model's (cosine {likeness:.2f})")


def reference_reads(model: Any) -> Tensor:
    """Logits [len(REFERENCE_READS), vocab_size] of anything with `read`, behind texts of some lengths."""
    ids = [(7919 * j + 11) % model.vocab_size for j in range(1, REFERENCE_IDS + 1)]
    return torch.cat([model.read(ids[:length]) for length in REFERENCE_READS]).float()


def build(source: Path, folder: Path, reference: Tensor) -> None:
    """Make the int4 form of the model in `source`, whole or not at all; `reference` are its own logits.

    Only one process at a time may do so for a folder.
    Raises `Int4Error` where the builder cannot do it, `OSError` where it cannot be kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{escape(folder.name)}.*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as unfinished, tether() as line:
        made = Path(unfinished) / "model"
        options = ["-p", "int4", "-e", "cpu", "-i", str(source.resolve()), "-o", str(made)]
        options += ["-c", str(Path(unfinished) / "parts"), "--extra_options", *OPTIONS, "hf_token=false"]
        done = subprocess.run(
            tethered("onnxruntime_genai.models.builder", *options),
            stdin=line,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(HF_HUB_OFFLINE="1"),
        )
        if done.returncode or not (made / GRAPH).is_file():
            lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            raise Int4Error(f"onnxruntime-genai's builder failed: {lines[-1][:300]}")
        save_file({"logits": reference.contiguous()}, made / REFERENCE)
        made.rename(folder)


def give_up(folder: Path, why: Int4Error) -> None:
    """Keep in mind that this model has no int4 form that works."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.mkdir(parents=True)
        with written_whole(folder / FAILED) as unfinished:
            unfinished.write_text(str(why), encoding="utf-8")
