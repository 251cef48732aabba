"""Int4 draft models, whatever runs them: right logits however they are read, prepared once, never in the way."""

import errno
import shutil

import pytest
import torch
from models_for_tests import QUANTIZABLE, tiny_config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from fly_cli import int4, int4_decoder, int4_onnx, loading
from fly_cli.c_kernels import AVX2, AVX512_VNNI
from fly_cli.cached_model import CachedModel
from fly_cli.int4 import FAILED, KERNEL, ONNX, build, engine_of, give_up, int4_bytes, int4_folder, no_int4, open_int4
from fly_cli.int4_kernel import BLOCK, CONSTANTS, OUTS, SOURCE, int4_kernel, load
from fly_cli.int4_model import Int4Error, check, reference_reads
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
    "biases everywhere": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "other sizes": Qwen2Config(**SIZES | {"vocab_size": 389, "num_attention_heads": 6, "num_key_value_heads": 3}),
}
ENGINES = {"kernel": KERNEL, "onnx": ONNX}
WEIGHTS = {"kernel": int4_decoder.WEIGHTS, "onnx": "model.onnx.data"}
ALIKE, DIFFERENT = 0.98, 0.95  # cosines of logits: inputs are rounded to 8 bits, keys and values to bf16
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def need(name):
    if name == "kernel" and int4_kernel() is None:
        pytest.skip("needs a C compiler and AVX2")


def saved(config, folder):
    """A random model in a folder, with a tokenizer, as ONNX Runtime's builder wants one.

    Its weights are those that int4 weights can be: whole steps of which the largest of a block is 8, of either sign.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() == 2:
                steps = torch.randint(-7, 8, one.shape).view(len(one), -1, BLOCK)
                steps[:, :, 0] = -8
                signs = 2 * torch.randint(0, 2, (*steps.shape[:2], 1)) - 1
                sharp = 2 if "q_proj" in name or "k_proj" in name else 1  # attention that chooses
                one.copy_((steps * signs).view(one.shape) * sharp / 64)
            else:
                one.add_(torch.randn(one.shape) / 8)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def built(engine, config, folder):
    """The plain model of `config`, and the folder of its int4 form."""
    plain = saved(config, folder / "plain")
    build(ENGINES[engine], plain, folder / "int4", reference_reads(CachedModel(plain, name="plain")))
    return plain, folder / "int4"


@pytest.fixture(scope="module", params=ENGINES)
def made(request, tmp_path_factory):
    """(name of an engine, plain model, folder): one of each for this file, as the graph takes seconds."""
    need(request.param)
    return request.param, *built(request.param, TIED, tmp_path_factory.mktemp("tied"))


def opened(made, **more):
    engine, plain, folder = made
    return open_int4(ENGINES[engine], folder, plain.config, name="int4", **more)


def likeness(one, other):
    return float(torch.cosine_similarity(one, other, dim=-1).min())


def assert_alike(plain, model):
    """Prompt, single rows, some rows, taken back and read again, and past the first size of the cache."""
    right = CachedModel(plain, name="plain")
    ids = [(37 * i * i + 5 * i + 5) % 384 for i in range(700)]
    for length in (9, 10, 11, 16, 12, 13, 40, 5, 600, 601, 603, 500, 511, 512, 513, 700):
        assert likeness(model.read(ids[:length]), right.read(ids[:length])) > ALIKE, length
    other = [*ids[:20], 7, 8, 9]
    assert likeness(model.read(other), right.read(other)) > ALIKE
    # What attention and positions bring: the same tokens in another order have other logits.
    turned = [*reversed(ids[:39]), ids[39]]
    assert likeness(right.read(turned), right.read(ids[:40])) < DIFFERENT
    assert likeness(model.read(turned), right.read(ids[:40])) < DIFFERENT


def test_an_int4_model_gives_the_logits_of_a_plain_one_with_such_weights_however_it_is_read(made):
    assert_alike(made[1], opened(made))


@pytest.mark.parametrize("family", OTHERS)
def test_the_kernel_runs_the_other_families_right_too(family, tmp_path):
    need("kernel")
    plain, folder = built("kernel", OTHERS[family], tmp_path)
    assert_alike(plain, opened(("kernel", plain, folder)))


@pytest.mark.parametrize("rows", [1, 3, 4, 37])
def test_every_cpu_gives_the_same_products_bit_for_bit(compiled_kernel, rows):
    kernels = [compiled_kernel(SOURCE, CONSTANTS, load, instructions) for instructions in (AVX2, AVX512_VNNI)]
    torch.manual_seed(0)
    weight, input = torch.randn(5 * OUTS + 3, 6 * BLOCK), torch.randn(rows, 6 * BLOCK)
    weight[0, :BLOCK], input[0, :BLOCK] = -8, 127  # the largest sums
    one, other = (kernel.product(input, kernel.pack(weight), len(weight)) for kernel in kernels)
    assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.pair
@pytest.mark.parametrize("family", ["llama 3", "mistral", "qwen 3"])
def test_graphs_of_the_other_families_are_built_right_too(family, tmp_path):
    plain, folder = built("onnx", OTHERS[family], tmp_path)
    assert_alike(plain, opened(("onnx", plain, folder)))


def test_some_rows_are_what_each_would_be_alone_and_padded_ids_are_left_out(made):
    model = opened(made, vocab_size=380)
    ids = [(37 * i + 5) % 380 for i in range(300)]
    rows = model.read(ids, last=9)
    assert rows.shape == (9, 380)
    alone = opened(made, vocab_size=380)
    each = torch.cat([alone.read(ids[: len(ids) - behind]) for behind in reversed(range(9))])
    if model.reads_rows:
        assert torch.equal(rows, each)
    assert likeness(rows, each) > 0.99


def test_forwards_are_timed_by_their_rows_but_for_the_first_ones_that_check_the_model(made):
    model = opened(made)
    assert not model.timings
    model.read(list(range(5, 25)))
    model.read(list(range(5, 28)), last=2)
    assert set(model.timings) == ({20, 3} if model.reads_rows else {20, 2, 1})
    assert model.forward_seconds > 0


def test_a_forward_that_is_interrupted_leaves_the_cache_empty_not_wrong(made, monkeypatch):
    model = opened(made)
    ids = list(range(5, 25))
    right = model.read(ids)
    run = model._forward
    monkeypatch.setattr(model, "_forward", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model.read([*ids, 30])
    monkeypatch.setattr(model, "_forward", run)
    assert torch.allclose(model.read(ids), right, atol=1e-4)


def test_the_planned_size_is_that_of_the_file(made):
    engine, plain, folder = made
    planned = ENGINES[engine].weight_bytes(plain)
    size = (folder / WEIGHTS[engine]).stat().st_size
    if engine == "onnx":
        size -= 2 * 2048 * 16 * 4  # sines and cosines, next to nothing beside the weights of a real model
    assert 0.7 * planned < size < 1.1 * planned  # tied weights are stored once or twice


@pytest.mark.parametrize("vocab_size", [384, 383, 200])
def test_a_model_of_whose_ids_some_may_not_be_chosen_is_compared_behind_the_same_texts(made, vocab_size):
    assert opened(made, vocab_size=vocab_size).read([5, 6, 7]).shape == (1, vocab_size)


@pytest.mark.parametrize(("ids", "last"), [([], 1), ([5, 6], 3), ([5, 6], 0)])
def test_rows_that_a_text_does_not_have_are_an_error_and_no_crash(made, ids, last):
    with pytest.raises(ValueError, match="last"):
        opened(made).read(ids, last=last)


def test_a_cache_that_cannot_grow_stays_as_it_was(made, monkeypatch):
    model, ids = opened(made), [(37 * i + 5) % 384 for i in range(600)]
    right = model.read(ids[:300])
    allocate = model._allocate
    monkeypatch.setattr(model, "_allocate", lambda *given, **more: (_ for _ in ()).throw(MemoryError()))
    for _ in range(2):
        with pytest.raises(MemoryError):
            model.read(ids)
        assert torch.equal(model.read(ids[:300]), right)
    monkeypatch.setattr(model, "_allocate", allocate)
    assert likeness(model.read(ids), opened(made).read(ids)) > 0.99


def test_logits_that_are_not_the_models_own_are_found_out(made):
    model = opened(made)
    right = load_file(made[2] / "reference.safetensors")["logits"]
    check(model, right)
    for wrong in (torch.randn(right.shape), right * float("nan")):
        with pytest.raises(Int4Error, match="not the model's"):
            check(model, wrong)


def test_damaged_files_are_found_out(made, tmp_path):
    engine, plain, folder = made
    names = {one.name for one in folder.iterdir() if one.suffix in (".onnx", ".data", ".safetensors")}
    assert WEIGHTS[engine] in names
    for name in names:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:1000])
        with pytest.raises(Int4Error):
            opened((engine, plain, copy))


def test_weights_of_another_model_are_refused_by_name(made, tmp_path):
    if made[0] == "onnx":
        pytest.skip("a graph has its weights")
    state = load_file(made[2] / int4_decoder.WEIGHTS)
    config = made[1].config
    assert all(f"{name}.{part}" in state for name in "01" for part in ("qkv", "qkv.bias", "o", "down", "input_norm"))
    for name, one in state.items():
        wrong = {"shorter": one[:-1], "another type": one.view(torch.int8)}
        wrong |= {} if name.endswith("bias") else {"not there": None}
        for how, tensor in wrong.items():
            changed = {key: value for key, value in (state | {name: tensor}).items() if value is not None}
            with pytest.raises(Int4Error, match=f"{name} does not fit the model"):
                pytest.fail(how) if int4_decoder.Int4Decoder(changed, config, name="wrong") else None


def test_an_id_that_the_embedding_lacks_is_an_error_and_no_crash(made):
    if made[0] == "onnx":
        pytest.skip("ONNX Runtime's own business")
    for wrong in (384, -1, 10**9):
        with pytest.raises(IndexError, match="ids below 384"):
            opened(made).read([5, wrong, 7])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 32), (OUTS + 3, 96), (1, 64)])
def test_products_are_those_of_the_weights_to_eight_bits_of_the_inputs(rows, outputs, inputs):
    need("kernel")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=generator)
    blocks = weight.bfloat16().float().view(outputs, -1, BLOCK)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = (largest / -8).half().float()
    rounded = ((blocks / scales).round().clamp(-8, 7) * scales).view(outputs, inputs)
    assert (rounded - weight).abs().max() < 0.6  # the largest of a block is at 2 or 3, and a step is an eighth of it
    input = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    right = input @ rounded.T
    error = int4_kernel().product(input, int4_kernel().pack(weight), outputs) - right
    assert (error.norm(dim=1) <= 0.02 * input.norm(dim=1) * outputs**0.5).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(wrong):
    need("kernel")
    packed = int4_kernel().pack(torch.ones(OUTS, 2 * BLOCK))
    for place in (0, 3, 31, 40):
        input = torch.ones(2, 2 * BLOCK)
        input[0, place] = wrong
        output = int4_kernel().product(input, packed, OUTS)
        assert not output[0].isfinite().any() and torch.allclose(output[1], torch.full((OUTS,), 2.0 * BLOCK))


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    need("kernel")
    model = AutoModelForCausalLM.from_config(TIED)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(Int4Error, match=r"layers\.1\.mlp\.up_proj\.weight has values"):
        build(KERNEL, model, tmp_path / "int4" / "x", torch.zeros(3, 384))
    assert list((tmp_path / "int4").iterdir()) == []


def test_blocks_of_zeros_and_the_largest_inputs_are_exact():
    need("kernel")
    weight = torch.full((OUTS, 2 * BLOCK), -1.0)
    weight[:, BLOCK:] = 0
    input = torch.full((2, 2 * BLOCK), 127.0)  # sums that just fit into 16 bits
    input[1] = 0
    input[1, 0] = 1e-40
    packed = int4_kernel().pack(weight)
    assert torch.equal(int4_kernel().product(input, packed, OUTS)[1], torch.zeros(OUTS))
    assert torch.allclose(int4_kernel().product(input, packed, OUTS)[0], torch.tensor(-127.0 * BLOCK))
    assert torch.allclose(int4_kernel().product(-input, packed, OUTS)[0], torch.tensor(127.0 * BLOCK))


def test_a_builder_that_fails_leaves_no_half_made_model(tmp_path):
    model = AutoModelForCausalLM.from_config(TIED)
    model.config.name_or_path = str(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(Int4Error, match="builder failed"):
        build(ONNX, model, tmp_path / "int4" / "x", torch.zeros(3, 384))
    assert list((tmp_path / "int4").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind_and_is_not_the_models_fault(tmp_path, monkeypatch):
    need("kernel")
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError) as caught:
        build(KERNEL, AutoModelForCausalLM.from_config(TIED), tmp_path / "int4" / "x", torch.zeros(3, 384))
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "int4").iterdir()) == []


def test_a_model_that_failed_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path))
    model = AutoModelForCausalLM.from_config(TIED)
    model.config.name_or_path = str(tmp_path / "model")
    assert no_int4(model) is None
    for engine in (KERNEL, ONNX):
        give_up(int4_folder(engine, tmp_path / "model"), Int4Error("it is broken"))
        assert (int4_folder(engine, tmp_path / "model") / FAILED).is_file()
        assert engine_of(model) is not engine
    assert no_int4(model).endswith("and it is broken")


def test_of_weights_that_may_be_missing_no_int4_form_is_made_and_none_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "prepare_int4", lambda *_: pytest.fail("prepared"))
    monkeypatch.setattr(loading, "engine_of", lambda _: KERNEL)
    settings = ModelSettings(allow_missing_weights=True)
    empty = type("Empty", (), {"model": None})
    source = Source(Located("m", tmp_path / "model", "m"), empty, 384, settings, Silent(), alone=lambda: None)
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


def test_the_kernel_has_the_model_where_it_can_and_onnx_runtime_elsewhere(monkeypatch):
    need("kernel")
    plain = AutoModelForCausalLM.from_config(TIED)
    assert engine_of(plain) is KERNEL and int4_bytes(plain) == KERNEL.weight_bytes(plain)
    for other in ({"intermediate_size": 144}, {"head_dim": 36, "hidden_size": 72}, {"hidden_act": "gelu"}):
        assert engine_of(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES | other))) is ONNX, other
    monkeypatch.setattr(int4_decoder, "int4_kernel", lambda: None)
    assert engine_of(plain) is ONNX and int4_bytes(plain) == ONNX.weight_bytes(plain)


def test_without_a_kernel_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(int4_decoder, "int4_kernel", lambda: None)
    monkeypatch.setattr(int4_onnx, "find_spec", lambda name: None if name == "onnx" else object())
    reason = no_int4(AutoModelForCausalLM.from_config(tiny_config()))
    assert "C compiler" in reason and "onnx is not installed" in reason
    monkeypatch.setattr(int4_onnx, "find_spec", lambda name: object())
    assert int4.no_int4(AutoModelForCausalLM.from_config(TIED)) is None
