"""A draft model with int4 weights in ONNX Runtime, for CPUs that the kernel of `int4_decoder` is not for.

The graph is made by onnxruntime-genai's model builder: blocks of 32 weights share a scale, rounded to nearest, inputs
are quantised to 8 bits while running.
"""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .int4_model import Int4Error, Int4Model, head_width
from .tethered import environment, tether, tethered

if TYPE_CHECKING:
    import onnxruntime

PACKAGES = ("onnxruntime", "onnxruntime_genai", "onnx", "onnx_ir")  # the extra `cpu`
OPTIONS = ("accuracy_level=4", "block_size=32", "prune_lm_head=true", "op_types_to_quantize=MatMul/Gather")
FORM = ("int4-1", OPTIONS)
BUILD_BYTES = 12  # of memory for each weight while it is made
BYTES_PER_WEIGHT = 0.5 + 4 / 32
GRAPH = "model.onnx"


class OnnxModel(Int4Model):
    """A model whose forwards are a graph's, which tells the logits of one row.

    The graph is told by its mask how much of the cache holds, and writes behind that.
    """

    reads_rows = False

    def __init__(self, session: onnxruntime.InferenceSession, config: Any, **more: Any):
        self.session = session
        self._inputs = {one.name for one in session.get_inputs()}
        self._states = sorted(name for name in self._inputs if name.startswith("past_key_values."))
        self._heads = int(next(one.shape[1] for one in session.get_inputs() if one.name in self._states))
        self._width = head_width(config.get_text_config(decoder=True))
        super().__init__(config, **more)

    def _forward(self, ids: list[int], start: int, last: int) -> Tensor:
        binding, end = self._binding, start + len(ids)
        binding.bind_cpu_input("input_ids", np.array([ids], dtype=np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, end), dtype=np.int64))
        if "position_ids" in self._inputs:
            binding.bind_cpu_input("position_ids", np.arange(start, end, dtype=np.int64)[None])
        binding.bind_output("logits", "cpu")
        self.session.run_with_iobinding(binding)
        (logits,) = (one for one in binding.get_outputs() if one.shape()[-1] == self.vocab_rows)
        return torch.from_numpy(logits.numpy())[0, -1:].float()[:last]

    def _allocate(self, capacity: int, kept: int) -> None:
        """Make states [1, heads, capacity, width] that the graph reads and writes."""
        from onnxruntime import OrtValue

        before = self._cache if kept else {}
        self._cache: dict[str, np.ndarray[Any, Any]] = {}
        self._binding = self.session.io_binding()
        for name in self._states:
            self._cache[name] = state = np.zeros((1, self._heads, capacity, self._width), dtype=np.float32)
            if kept:
                state[:, :, :kept] = before[name][:, :, :kept]
            value = OrtValue.ortvalue_from_numpy(state)  # of the same memory
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)


def no_packages() -> str | None:
    """What is missing of the packages; None where all are installed."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    return f"{missing[0]} is not installed (the extra `cpu`: pip install 'fly-decode[cpu]')" if missing else None


def weight_bytes(model: Any) -> int:
    """What the model's int4 form takes: embedding and head are quantised apart, norms and biases are fp32."""
    sizes: dict[int, int] = {id(one): one.numel() for one in model.parameters() if one.dim() == 2}
    wide: int = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() != 2)
    looked_up, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    twice = sizes[id(head)] if head is looked_up else 0
    quantized: float = BYTES_PER_WEIGHT * (sum(sizes.values()) + twice)
    return int(quantized) + 4 * wide


def opened(folder: Path, config: Any, **more: Any) -> OnnxModel:
    """The model of a prepared graph. Raises `Int4Error` where there is none that can be run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    # Two pools of threads that spin while they wait, PyTorch's and this one, would take the cores from each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(folder / GRAPH, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # not there, cut short, or of another version
        raise Int4Error(str(error)) from error
    return OnnxModel(session, config, **more)


def build(model: Any, made: Path) -> None:
    """Make the graph of a model that came from a folder. Raises `Int4Error` where the builder cannot do it."""
    with tether() as line:
        options = ["-p", "int4", "-e", "cpu", "-i", str(Path(model.config.name_or_path).resolve()), "-o", str(made)]
        options += ["-c", str(made.with_name("parts")), "--extra_options", *OPTIONS, "hf_token=false"]
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
