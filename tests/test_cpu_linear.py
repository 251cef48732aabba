import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from models_for_tests import tiny_llama
from torch import nn

from fly_cli import cpu_linear, panels
from fly_cli.cached_model import CachedModel
from fly_cli.cpu_linear import FEW_ROWS, PackedLinear, WideningLinear, packing_works, speed_up_linears


@pytest.fixture
def cpu_without_16_bit_products(monkeypatch):
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: False)


@pytest.mark.usefixtures("cpu_without_16_bit_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 16, 17, 40])
@pytest.mark.parametrize("height", [36, 37])
def test_a_widened_layer_is_as_close_to_the_true_product_as_the_plain_one(
    dtype, bias, rows, height, compiler, monkeypatch
):
    if not compiler:
        monkeypatch.setattr(panels, "bf16_gemm", lambda: None)
    monkeypatch.setattr(cpu_linear, "PIECE", 64 * 10)  # 10 rows a piece: the last piece is not full
    torch.manual_seed(rows)
    layer = nn.Linear(64, height, bias=bias).to(dtype)
    layer.requires_grad_(False)
    inputs = torch.randn(1, rows, 64).to(dtype)
    true = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double() if bias else None)
    plain_error = (layer(inputs).double() - true).abs().max()
    assert speed_up_linears(nn.Sequential(layer)) == 1
    widened = layer(inputs)
    assert (widened.dtype, widened.shape) == (dtype, true.shape)
    assert (widened.double() - true).abs().max() <= 2 * plain_error


@pytest.mark.usefixtures("cpu_without_16_bit_products")
def test_a_widened_model_gives_the_logits_of_the_plain_one():
    ids = list(range(5, 45))
    plain = CachedModel(tiny_llama(0, initializer_range=0.1).bfloat16(), name="plain").read(ids, last=20).float()
    model = tiny_llama(0, initializer_range=0.1).bfloat16()
    assert speed_up_linears(model) == 2 * 7 + 1
    widened = CachedModel(model, name="widened").read(ids, last=20).float()
    true = CachedModel(tiny_llama(0, initializer_range=0.1).bfloat16().float(), name="true").read(ids, last=20)
    assert (widened - true).abs().max() <= 2 * (plain - true).abs().max()


@pytest.mark.usefixtures("cpu_without_16_bit_products")
def test_layers_that_are_wide_hooked_or_of_another_class_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(panels, "bf16_gemm", lambda: None)

    class Quantised(nn.Linear):
        pass

    offloaded = nn.Linear(4, 4).bfloat16()
    add_hook_to_module(offloaded, ModelHook())
    model = nn.Sequential(nn.Linear(4, 4), Quantised(4, 4).bfloat16(), offloaded, nn.Linear(4, 4).bfloat16())
    assert speed_up_linears(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, Quantised, nn.Linear, WideningLinear]


# --- a CPU with 16-bit products and no kernel of ours: packed weights


@pytest.fixture
def cpu_with_16_bit_products(monkeypatch):
    if not packing_works():
        pytest.skip("this build or CPU has no packed bf16 kernel")
    monkeypatch.setattr(panels, "bf16_gemm", lambda: None)
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: True)


@pytest.mark.usefixtures("cpu_with_16_bit_products")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 40])
def test_a_packed_layer_is_as_close_to_the_true_product_as_the_plain_one(bias, rows):
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(64, 37, bias=bias)).bfloat16().requires_grad_(False)
    inputs = torch.randn(1, rows, 64).bfloat16()
    weight, offset = model[0].weight.double(), model[0].bias.double() if bias else None
    true = nn.functional.linear(inputs.double(), weight, offset)
    plain_error = (model(inputs).double() - true).abs().max()
    assert speed_up_linears(model) == 1
    packed = model(inputs)
    assert (packed.dtype, packed.shape) == (torch.bfloat16, true.shape)
    assert (packed.double() - true).abs().max() <= 2 * plain_error


@pytest.mark.usefixtures("cpu_with_16_bit_products")
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_gives_the_logits_of_the_plain_one(tied):
    ids = list(range(5, 45))
    config = {"initializer_range": 0.1, "tie_word_embeddings": tied}
    plain = CachedModel(tiny_llama(0, **config).bfloat16(), name="plain").read(ids, last=20).float()
    model = tiny_llama(0, **config).bfloat16()
    assert speed_up_linears(model) == 2 * 7 + 1
    packed = CachedModel(model, name="packed").read(ids, last=20).float()
    true = CachedModel(tiny_llama(0, **config).bfloat16().float(), name="true").read(ids, last=20)
    assert (packed - true).abs().max() <= 2 * (plain - true).abs().max()
    assert model.get_input_embeddings().weight.shape == (384, 32)


@pytest.mark.usefixtures("cpu_with_16_bit_products")
def test_only_plain_bf16_layers_are_packed():
    offloaded = nn.Linear(4, 4).bfloat16()
    add_hook_to_module(offloaded, ModelHook())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half(), offloaded, nn.Linear(4, 4).bfloat16())
    assert speed_up_linears(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, nn.Linear, PackedLinear]


def test_a_wrong_packed_kernel_is_not_used(monkeypatch):
    monkeypatch.setattr(panels, "bf16_gemm", lambda: None)
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: True)
    for wrong in (0.0, float("nan")):
        full = torch.full((1, 1, 48), wrong)
        monkeypatch.setattr(PackedLinear, "forward", lambda self, input, full=full: full.expand(1, input.shape[1], 48))
        packing_works.cache_clear()
        assert speed_up_linears(nn.Sequential(nn.Linear(4, 4).bfloat16())) == 0
    packing_works.cache_clear()
