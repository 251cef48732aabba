"""Int4 draft models in ONNX Runtime: right logits however they are read, prepared once, never in an answer's way."""

import shutil

import pytest
import torch
from models_for_tests import QUANTIZABLE, tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from fly_cli import int4, loading
from fly_cli.cached_model import CachedModel
from fly_cli.int4 import (
    FAILED,
    Int4Error,
    Int4Model,
    build,
    check,
    give_up,
    int4_bytes,
    int4_folder,
    no_int4,
    open_session,
    reference_reads,
)
from fly_cli.loading import Source
from fly_cli.progress import Silent
from fly_cli.settings import ModelSettings
from fly_cli.weights import Located

SIZES = QUANTIZABLE | {"max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
TIED = Qwen2Config(**SIZES, tie_word_embeddings=True)
OTHERS = {
    "llama 3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen 3": Qwen3Config(**SIZES),
}


def saved(config, folder):
    """A random model in a folder, with a tokenizer, as the builder wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return model


def built(config, folder):
    """The plain model of `config`, its folder and that of its int4 form."""
    plain = saved(config, folder / "plain")
    build(folder / "plain", folder / "int4", reference_reads(CachedModel(plain, name="plain")))
    return plain, folder / "plain", folder / "int4"


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """One int4 model for this file: making it takes some seconds."""
    return built(TIED, tmp_path_factory.mktemp("tied"))


def opened(tied, **more):
    return Int4Model(open_session(tied[2]), AutoConfig.from_pretrained(tied[1]), name="int4", **more)


def likeness(one, other):
    return float(torch.cosine_similarity(one, other, dim=-1).min())


def assert_alike(plain, model):
    """Prompt, single rows, some rows, taken back and read again, and past the first size of the cache."""
    right = CachedModel(plain, name="plain")
    ids = [(37 * i + 5) % 384 for i in range(700)]
    for length in (9, 10, 11, 16, 12, 13, 40, 5, 600, 601, 603, 500, 511, 512, 513, 700):
        assert likeness(model.read(ids[:length]), right.read(ids[:length])) > 0.75, length  # garbage is near 0
    other = [*ids[:20], 7, 8, 9]
    assert likeness(model.read(other), right.read(other)) > 0.75


def test_an_int4_model_gives_nearly_the_logits_of_the_plain_one_however_it_is_read(tied):
    assert_alike(tied[0], opened(tied))


@pytest.mark.pair
@pytest.mark.parametrize("family", OTHERS)
def test_the_other_families_are_built_right_too(family, tmp_path):
    plain, _, folder = built(OTHERS[family], tmp_path)
    model = Int4Model(open_session(folder), OTHERS[family], name=family)
    check(model, folder)
    assert_alike(plain, model)


def test_rows_are_read_one_by_one_and_padded_ids_are_left_out(tied):
    model = opened(tied, vocab_size=380)
    ids = list(range(5, 25))
    rows = model.read(ids, last=3)
    assert rows.shape == (3, 380)
    assert likeness(rows[1:2], opened(tied, vocab_size=380).read(ids[:-1])) > 0.99
    assert set(model.timings) == {18, 1}


def test_a_forward_that_is_interrupted_leaves_the_cache_empty_not_wrong(tied, monkeypatch):
    model = opened(tied)
    ids = list(range(5, 25))
    right = model.read(ids)
    run = model._forward
    monkeypatch.setattr(model, "_forward", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model.read([*ids, 30])
    monkeypatch.setattr(model, "_forward", run)
    assert torch.allclose(model.read(ids), right, atol=1e-4)


def test_the_planned_size_is_that_of_the_file(tied):
    positions = 2 * 2048 * 16 * 4  # sines and cosines, which are next to nothing beside the weights of a real model
    size = (tied[2] / "model.onnx.data").stat().st_size - positions
    assert 0.7 * int4_bytes(tied[0]) < size < 1.05 * int4_bytes(tied[0])  # tied weights are stored once or twice


def test_logits_that_are_not_the_models_own_are_found_out(tied, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tied[2], folder)
    check(opened(tied), folder)
    right = load_file(folder / "reference.safetensors")["logits"]
    for wrong in (torch.randn(right.shape), right * float("nan")):
        save_file({"logits": wrong}, folder / "reference.safetensors")
        with pytest.raises(Int4Error, match="not the model's"):
            check(opened(tied), folder)


def test_damaged_files_are_found_out(tied, tmp_path):
    for name in ("model.onnx", "model.onnx.data", "reference.safetensors"):
        folder = tmp_path / name
        shutil.copytree(tied[2], folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:1000])
        with pytest.raises(Int4Error):
            check(Int4Model(open_session(folder), TIED, name="damaged"), folder)


def test_a_builder_that_fails_leaves_no_half_made_model(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(Int4Error, match="builder failed"):
        build(tmp_path / "nothing", tmp_path / "int4" / "x", torch.zeros(3, 384))
    assert list((tmp_path / "int4").iterdir()) == []


def test_a_model_that_failed_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path))
    model = AutoModelForCausalLM.from_config(TIED)
    model.config.name_or_path = str(tmp_path / "model")
    assert no_int4(model) is None
    give_up(int4_folder(tmp_path / "model"), Int4Error("it is broken"))
    assert no_int4(model) == "it is broken"
    assert (int4_folder(tmp_path / "model") / FAILED).is_file()


def test_of_weights_that_may_be_missing_no_int4_form_is_made_and_none_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "prepare_int4", lambda *_: pytest.fail("prepared"))
    settings = ModelSettings(allow_missing_weights=True)
    source = Source(Located("m", tmp_path / "model", "m"), None, 384, settings, Silent(), alone=lambda: None)
    with pytest.raises(Int4Error, match="--allow-missing-weights"):
        loading.load_int4(source, None)
    assert not list(tmp_path.rglob(FAILED))


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=64),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2),
    ],
)
def test_models_with_other_layers_or_positions_are_not_built(config):
    assert "plain" in no_int4(AutoModelForCausalLM.from_config(config))


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(int4, "find_spec", lambda name: None if name == "onnx" else object())
    assert "onnx is not installed" in no_int4(AutoModelForCausalLM.from_config(tiny_config()))
