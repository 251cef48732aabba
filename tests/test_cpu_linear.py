import pytest
import torch
from models_for_tests import tiny_llama
from torch import nn

from fly_cli import cpu_linear
from fly_cli.cached_model import CachedModel
from fly_cli.cpu_linear import FEW_ROWS, WideningLinear, widen_linears


@pytest.fixture(autouse=True)
def cpu_without_16_bit_products(monkeypatch):
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 16, 17, 40])
def test_a_widened_layer_is_as_close_to_the_true_product_as_the_plain_one(dtype, bias, rows, monkeypatch):
    monkeypatch.setattr(cpu_linear, "PIECE", 64 * 10)  # 10 rows a piece: the last piece of 37 is not full
    torch.manual_seed(rows)
    layer = nn.Linear(64, 37, bias=bias).to(dtype)
    layer.requires_grad_(False)
    inputs = torch.randn(1, rows, 64).to(dtype)
    true = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double() if bias else None)
    plain_error = (layer(inputs).double() - true).abs().max()
    assert widen_linears(nn.Sequential(layer)) == 1
    widened = layer(inputs)
    assert (widened.dtype, widened.shape) == (dtype, true.shape)
    assert (widened.double() - true).abs().max() <= 2 * plain_error


def test_a_widened_model_gives_the_logits_of_the_plain_one():
    ids = list(range(5, 45))
    plain = CachedModel(tiny_llama(0, initializer_range=0.1).bfloat16(), name="plain").read(ids, last=20).float()
    model = tiny_llama(0, initializer_range=0.1).bfloat16()
    assert widen_linears(model) == 2 * 7 + 1
    widened = CachedModel(model, name="widened").read(ids, last=20).float()
    true = CachedModel(tiny_llama(0, initializer_range=0.1).bfloat16().float(), name="true").read(ids, last=20)
    assert (widened - true).abs().max() <= 2 * (plain - true).abs().max()


def test_layers_that_are_wide_hooked_or_of_another_class_stay_as_they_are(monkeypatch):
    class Quantised(nn.Linear):
        pass

    offloaded = nn.Linear(4, 4).bfloat16()
    offloaded._hf_hook = object()
    model = nn.Sequential(nn.Linear(4, 4), Quantised(4, 4).bfloat16(), offloaded, nn.Linear(4, 4).bfloat16())
    assert widen_linears(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, Quantised, nn.Linear, WideningLinear]


def test_a_cpu_with_16_bit_products_keeps_its_own_kernels(monkeypatch):
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: True)
    assert widen_linears(nn.Sequential(nn.Linear(4, 4).bfloat16())) == 0
