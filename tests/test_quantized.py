"""Int8 draft models: right logits, kept on disk whole or not at all, and never in the way of an answer."""

import copy

import pytest
import torch
from models_for_tests import QUANTIZABLE as SIZES
from models_for_tests import tiny_config, tiny_llama
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, Phi3Config, Qwen2Config

from fly_cli import quantized
from fly_cli.cached_model import CachedModel
from fly_cli.quantized import (
    Int8Linear,
    fill,
    int8_works,
    keep_prepared,
    prepared_file,
    quantize_weight,
    quantized_bytes,
    quantized_state,
    read_prepared,
    worth_quantizing,
)

FAMILIES = {
    "llama": tiny_config(initializer_range=0.1),
    "llama, tied": tiny_config(initializer_range=0.1, tie_word_embeddings=True),
    "qwen2, with biases": Qwen2Config(**SIZES),
    "gemma 3, scaled embedding": Gemma3TextConfig(**SIZES),
    "phi 3, merged layers": Phi3Config(**SIZES),
}


def empty(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    # as accelerate's `init_empty_weights` does it: only parameters are on the meta device
    real = AutoModelForCausalLM.from_config(config)
    for name, buffer in real.named_buffers():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    return model


def logits(model, ids, last=None):
    return CachedModel(model, name="model").read(ids, last=last or len(ids)).float()


def relative_error(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_model_gives_nearly_the_logits_of_the_plain_one_at_every_number_of_rows(family):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(FAMILIES[family]).bfloat16().eval()
    ids = list(range(5, 45))
    right = logits(copy.deepcopy(plain).float(), ids)
    model = fill(empty(FAMILIES[family]), quantized_state(plain))
    assert relative_error(logits(model, ids), right) < 0.06
    cached = CachedModel(model, name="int8")
    one_by_one = torch.cat([cached.read(ids[: i + 1]).float() for i in range(len(ids))])
    assert relative_error(one_by_one, right) < 0.06
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) >= 2 * 4 + 1


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_with_huge_values_does_not_blur_the_other_rows(rows, bias):
    torch.manual_seed(rows)
    layer = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    int8 = Int8Linear(*quantize_weight(layer.weight), layer.bias)
    inputs = torch.randn(1, rows, 64)
    inputs[:, 0] *= 1000
    for row in range(rows):
        assert relative_error(int8(inputs)[:, row], layer(inputs)[:, row]) < 0.03


def test_quantising_leaves_the_weights_alone_and_bears_rows_of_zeros():
    weight = torch.randn(300, 16)
    weight[7] = 0
    before = weight.clone()
    whole, scale = quantize_weight(weight)
    assert torch.equal(weight, before)
    assert (whole.float() * scale[:, None] - weight).abs().max() <= scale.max() * 0.51
    assert Int8Linear(whole, scale, None)(torch.zeros(1, 16)).abs().max() == 0


def test_wrong_kernels_are_found_out(monkeypatch):
    int8_works.cache_clear()
    assert int8_works()
    int8_works.cache_clear()
    for wrong in (0.0, float("nan")):
        monkeypatch.setattr(Int8Linear, "forward", lambda self, input, wrong=wrong: torch.full((len(input), 48), wrong))
        assert not int8_works()
        int8_works.cache_clear()


def test_models_without_linear_layers_are_not_worth_it():
    assert worth_quantizing(tiny_llama(0))
    assert not worth_quantizing(AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=2, n_head=2)))


def test_the_planned_size_is_that_of_the_file(tmp_path):
    model = tiny_llama(0, hidden_size=256, intermediate_size=512).bfloat16()
    file = tmp_path / "model.safetensors"
    assert keep_prepared(file, quantized_state(model))
    assert quantized_bytes(model) == pytest.approx(file.stat().st_size, rel=0.05)


def test_what_was_prepared_comes_back_and_what_is_damaged_does_not(tmp_path):
    state = quantized_state(tiny_llama(0))
    file = tmp_path / "deep" / "model.safetensors"
    assert read_prepared(file) is None
    assert keep_prepared(file, state)
    back = read_prepared(file)
    assert back.keys() == state.keys() == load_file(file).keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert read_prepared(file) is None
    assert [path.name for path in file.parent.iterdir()] == ["model.safetensors"]


def test_tensors_of_another_model_are_refused():
    state = quantized_state(tiny_llama(0))
    for damage in (
        lambda s: s.pop("model.layers.0.mlp.up_proj.int8"),
        lambda s: s.pop("model.norm.weight"),
        lambda s: s.update({"model.layers.9.norm.weight": torch.ones(3)}),
        lambda s: s.update({"model.norm.weight": torch.ones(3)}),
        lambda s: s.update({"lm_head.int8": torch.ones(3, 3, dtype=torch.int8)}),
        lambda s: s.update({"lm_head.int8": s["lm_head.int8"].float()}),
        lambda s: s.update({"lm_head.scale": s["lm_head.scale"] * float("nan")}),
        lambda s: s.update({"lm_head.scale": s["lm_head.scale"] * 0}),
        lambda s: s.update({"lm_head.scale": torch.ones(1)}),
    ):
        damaged = dict(state)
        damage(damaged)
        with pytest.raises(ValueError):
            fill(empty(tiny_config()), damaged)


@pytest.mark.parametrize("failure", [OSError("disk"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch, failure):
    def fail(state, path, metadata):
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(quantized, "save_file", fail)
    file = tmp_path / "model.safetensors"
    if isinstance(failure, OSError):
        assert not keep_prepared(file, {"a": torch.ones(1)})
    else:
        with pytest.raises(KeyboardInterrupt):
            keep_prepared(file, {"a": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not keep_prepared(tmp_path / "file" / "x" / "model.safetensors", {"a": torch.ones(1)})
    monkeypatch.setattr(quantized, "save_file", lambda *given, **more: (_ for _ in ()).throw(OSError("read-only")))
    monkeypatch.setattr("pathlib.Path.unlink", lambda *given, **more: (_ for _ in ()).throw(OSError("read-only")))
    assert not keep_prepared(tmp_path / "model.safetensors", {"a": torch.ones(1)})


def test_changed_weights_are_prepared_anew(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = prepared_file(tmp_path, tmp_path)
    assert before == prepared_file(tmp_path, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"another")
    assert before != prepared_file(tmp_path, tmp_path)
