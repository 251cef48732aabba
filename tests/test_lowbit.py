"""Weights in fewer bits: right logits at every number of rows, sizes as planned, and refusals before anything loads."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from models_for_tests import saved_pair, tiny_config, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from fly_cli import lowbit, placement
from fly_cli.api import generate
from fly_cli.cached_model import CachedModel
from fly_cli.errors import OutOfMemoryError, SettingsError
from fly_cli.lowbit import BITSANDBYTES, TORCHAO, Form, choose_form, form_of, quantization_config, quantized_layers
from fly_cli.models import load_pair
from fly_cli.placement import plan
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings
from fly_cli.skeleton import skeleton

CPU = torch.device("cpu")
FORMS = [Form(library, kind) for library in (TORCHAO, BITSANDBYTES) for kind in ("int8", "int4")]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MB = 1_000_000


def installed(library):
    try:
        lowbit.require_library(library, "this test")
    except SettingsError:
        return False
    return True


needs = {name: pytest.mark.skipif(not installed(name), reason=f"needs {name}") for name in (TORCHAO, BITSANDBYTES)}
ALL_FORMS = pytest.mark.parametrize("form", [pytest.param(f, marks=needs[f.library], id=f.name) for f in FORMS])
ON_CPUS = pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs[TORCHAO]) for kind in ("int8", "int4")])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, draft): models whose layers are large enough to be quantised."""
    target = tiny_llama(0, initializer_range=0.1, eos_token_id=383, **SIZES)
    return saved_pair(target, tmp_path_factory.mktemp("lowbit"))


@pytest.fixture
def works(monkeypatch):
    """As if every library were there, and right."""
    monkeypatch.setattr(placement, "choose_form", lambda kind, device, *_: Form(lowbit.library_for(device), kind))


def load(folder, form, dtype):
    config = quantization_config(form, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": CPU}, quantization_config=config, ignore_mismatched_sizes=True
    )
    return model.eval()


def effective(layer, dtype):
    """The weight that a layer multiplies with: what it makes of unit vectors, one at a time. [out, in]"""
    with torch.no_grad():
        return torch.stack([layer(row[None])[0] for row in torch.eye(layer.in_features, dtype=dtype)], dim=1).float()


def logits(model, rows):
    cached = CachedModel(model, name="model")
    ids = list(range(5, 45))
    cached.read(ids[:20])
    return cached.read(ids[: 20 + rows], last=rows).float()


def relative_error(one, other):
    return float((one - other).norm() / other.norm())


def plain_copy(folder, model, form, dtype):
    """The model in fp32 with the weights that the quantised one stands for."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name in quantized_layers(plain, form):
        plain.get_submodule(name).weight.data = effective(model.get_submodule(name), dtype)
    return plain


@ALL_FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_quantised_model_computes_with_its_rounded_weights_at_every_number_of_rows(folders, form, dtype):
    model = load(folders[0], form, dtype)
    right = plain_copy(folders[0], model, form, dtype)
    original = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    for rows in (1, 2, 16):
        got = logits(model, rows)
        assert relative_error(got, logits(right, rows)) < 0.05
        assert relative_error(got, logits(original, rows)) < {"int8": 0.1, "int4": 0.8}[form.kind]


@ALL_FORMS
def test_output_layer_and_embedding_stay_as_they_are(folders, form):
    model = load(folders[0], form, torch.float32)
    original = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)
    assert len(quantized_layers(original, form)) == 2 * 7


@ALL_FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planned_sizes_are_those_that_are_loaded(folders, form, dtype):
    model = load(folders[0], form, dtype)
    planned = skeleton("tiny", folders[0]).weight_bytes(dtype, form)
    assert planned == pytest.approx(sum(map(stored_bytes, model.modules())), rel=0.02)


def stored_bytes(module):
    """Bytes of a module's own parameters, with the scales that the libraries keep beside them."""
    total = 0
    for parameter in module.parameters(recurse=False):
        parts = parameter.__tensor_flatten__()[0] if hasattr(parameter, "__tensor_flatten__") else None
        tensors = [getattr(parameter, part) for part in parts] if parts else [parameter]
        scales = (getattr(parameter, "SCB", None), getattr(getattr(parameter, "quant_state", None), "absmax", None))
        total += sum(tensor.nbytes for tensor in [*tensors, *scales] if tensor is not None)
    return total


@ON_CPUS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantised_target_writes_its_own_text_with_any_drafter(folders, kind, temperature):
    target, draft = map(str, folders)
    settings = {"target": target, "dtype": "float32", "device_map": "cpu", "quantize": kind}
    sampled = {"max_new_tokens": 24, "temperature": temperature, "seed": 1}
    plain = load_pair(ModelSettings(**settings, draft=LOOKUP), TextSettings(raw=True), mode="target")
    own = [token.id for token in generate(plain, "the an", DecodeSettings(mode="target", **sampled)).tokens]
    for draft_quantize in ("none", "int8"):
        pair = load_pair(ModelSettings(**settings, draft=draft, draft_quantize=draft_quantize), TextSettings(raw=True))
        exact = generate(pair, "the an", DecodeSettings(mode="exact", draft_schedule="constant", **sampled))
        assert [token.id for token in exact.tokens] == own
        assert exact.summary.num_draft_tokens > 0
        assert pair.describe()["placement"][0]["quantize"] == f"torchao {kind}"
        assert pair.describe()["models"]["quantize"] == kind
        assert pair.describe()["versions"]["torchao"].startswith("0.18")


@ON_CPUS
def test_layers_that_a_library_quantised_are_left_to_it(folders, kind):
    pair = load_pair(
        ModelSettings(target=str(folders[0]), draft=LOOKUP, dtype="bfloat16", device_map="cpu", quantize=kind)
    )
    weights = [pair.target.model.get_submodule(name).weight for name in quantized_layers(pair.target.model, FORMS[0])]
    assert weights and all(type(weight) is not nn.Parameter for weight in weights)


@needs[TORCHAO]
def test_what_a_library_says_when_it_is_imported_is_not_shown(folders):
    command = [sys.executable, "-m", "fly_cli", "check", str(folders[0]), "lookup", "--quantize", "int8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "in torchao int8" in done.stdout


# Refusals


@pytest.mark.parametrize("found", [None, "0.17.0", "0.180.0", "1.0"])
def test_a_library_that_is_missing_or_of_another_release_is_named_with_its_extra(monkeypatch, found):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(lowbit, "version", version)
    with pytest.raises(SettingsError, match=r"`--quantize int8` on cpu needs torchao 0\.18") as caught:
        choose_form("int8", CPU, torch.bfloat16, "--quantize")
    assert caught.value.hint == "pip install 'fly-decode[torchao]'"
    assert found is None or found in caught.value.message


@ALL_FORMS
@pytest.mark.parametrize("wrong_at", [1, 2, 16])
def test_kernels_that_are_wrong_at_some_number_of_rows_are_found_out(monkeypatch, form, wrong_at):
    lowbit.form_works.cache_clear()
    assert lowbit.form_works(form, CPU, torch.bfloat16)
    usual = lowbit.quantized_layer

    class Wrong(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, input):
            return self.layer(input) * (float("nan") if input.shape[1] == wrong_at else 1)

    monkeypatch.setattr(lowbit, "quantized_layer", lambda *given: Wrong(usual(*given)))
    monkeypatch.setattr(lowbit, "library_for", lambda device: form.library)
    lowbit.form_works.cache_clear()
    try:
        with pytest.raises(SettingsError, match=f"gives no right result on cpu with {form.library}"):
            choose_form(form.kind, CPU, torch.bfloat16, "--quantize")
    finally:
        lowbit.form_works.cache_clear()


def test_whatever_a_library_raises_about_a_device_is_told_in_one_line(monkeypatch):
    def fail(*_):
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(lowbit, "require_library", lambda *_: None)
    monkeypatch.setattr(lowbit, "version", lambda _: "0.18.0")
    monkeypatch.setattr(lowbit, "form_works", fail)
    with pytest.raises(SettingsError, match=r"does not work on cpu with torchao 0\.18\.0: no kernel for this"):
        choose_form("int4", CPU, torch.bfloat16, "--quantize")


def save_config(folder, config):
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=384), "int8", "not in linear layers"),
        (tiny_config(), "none", None),
        (tiny_config(**SIZES), "int4", None),
        (tiny_config(**(SIZES | {"intermediate_size": 296})), "int4", "not in linear layers"),
        (tiny_config(**(SIZES | {"num_attention_heads": 16, "num_key_value_heads": 1})), "int4", "multiple of 16"),
        (tiny_config(**SIZES, quantization_config={"quant_method": "fp8"}), "int8", "come quantised already"),
    ],
    ids=["no linear layers", "none", "int4", "group size", "outputs", "quantised"],
)
def test_a_model_that_a_library_cannot_quantise_is_refused_before_it_loads(tmp_path, works, config, kind, reason):
    save_config(tmp_path, config)
    model = skeleton("tiny", tmp_path)
    settings = ModelSettings(quantize=kind, dtype="float32", device_map="cpu")
    if reason is None:
        assert plan(model, None, settings)[0].quantize == ("none" if kind == "none" else f"torchao {kind}")
        return
    with pytest.raises(SettingsError, match=reason) as caught:
        plan(model, None, settings)
    assert caught.value.hint == "use `--quantize none`"


# Plans


@pytest.fixture
def big(tmp_path):
    """Without weights: 4 layers of 1 M weights each, two tables of 0.26 M."""
    config = tiny_config(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    return skeleton("big", save_config(tmp_path, config))


def machine(monkeypatch, free):
    monkeypatch.setattr(placement, "get_max_memory", lambda: {key: int(size) for key, size in free.items()})
    monkeypatch.setattr(placement, "HEADROOM", 0.0)
    monkeypatch.setattr(placement, "checked_device", lambda name: torch.device(placement.device_name(name)))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)


def devices(place):
    return {placement.device_name(device) for device in place.device_map.values()}


@pytest.mark.parametrize(("device", "library"), [(0, BITSANDBYTES), ("cpu", TORCHAO)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_plan_counts_the_quantised_sizes(big, works, monkeypatch, device, library, kind):
    form = Form(library, kind)
    needed = big.weight_bytes(torch.bfloat16, form) + big.cache_bytes(torch.bfloat16)
    assert form.kind == "int4" or big.weight_bytes(torch.bfloat16, form) < 0.7 * big.weight_bytes(torch.bfloat16)
    machine(monkeypatch, {device: needed * 1.3, "cpu": needed * 1.3 if device == "cpu" else 0})
    place, _ = plan(big, None, ModelSettings(quantize=kind))
    assert place.quantize == form.name
    assert place.weight_bytes == big.weight_bytes(torch.bfloat16, form)
    assert sum(placement.bytes_by_device(big, place).values()) == place.weight_bytes
    machine(monkeypatch, {device: needed * 0.9, "cpu": needed * 0.9 if device == "cpu" else 0})
    with pytest.raises(OutOfMemoryError, match=form.name):
        plan(big, None, ModelSettings(quantize=kind))


def test_quantised_weights_are_not_spilled_to_devices_that_the_library_does_not_serve(big, works, monkeypatch):
    machine(monkeypatch, {0: 4 * MB, "cpu": 100 * MB})
    with pytest.raises(OutOfMemoryError, match="bitsandbytes int8"):
        plan(big, None, ModelSettings(quantize="int8", offload_folder="off"))
    half = {"model": 0, "lm_head": "cpu"}
    with pytest.raises(SettingsError, match="puts a part of `big` on cpu"):
        plan(big, None, ModelSettings(quantize="int8", device_map=half))
    machine(monkeypatch, {"cpu": 100 * MB})
    with pytest.raises(SettingsError, match="on disk"):
        plan(
            big,
            None,
            ModelSettings(quantize="int8", device_map={"model": "cpu", "lm_head": "disk"}, offload_folder="off"),
        )


def test_an_accelerator_that_may_not_be_used_chooses_no_library(big, works, monkeypatch):
    machine(monkeypatch, {0: 100 * MB, "cpu": 100 * MB})
    place, _ = plan(big, None, ModelSettings(quantize="int8", max_memory={"cpu": "90MB"}))
    assert (place.quantize, devices(place)) == ("torchao int8", {"cpu"})


@pytest.mark.parametrize(
    ("draft_device", "kind", "form"),
    [
        ("cpu", "auto", "int8"),
        ("cpu", "int8", "int8"),
        ("cpu", "int4", "int4"),
        ("cuda:0", "auto", "none"),
        ("cuda:0", "int8", "bitsandbytes int8"),
        ("cuda:0", "int4", "bitsandbytes int4"),
    ],
)
def test_the_draft_takes_our_own_forms_on_cpus_and_a_library_elsewhere(
    big, works, monkeypatch, draft_device, kind, form
):
    monkeypatch.setattr(placement, "no_int4", lambda _: None)
    machine(monkeypatch, {0: 100 * MB, "cpu": 100 * MB})
    target, draft = plan(big, big, ModelSettings(draft_device=draft_device, draft_quantize=kind))
    assert (target.quantize, draft.quantize) == ("none", form)
    if draft_device != "cpu":
        assert draft.weight_bytes == big.weight_bytes(torch.bfloat16, form_of(form))
