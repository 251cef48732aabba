"""Attention on CPUs: what transformers' own gives, for one row and for blocks, through every kind of layer."""

import random

import pytest
import torch
import transformers as t
from architectures import ALL, CONTEXT, LATENT, made
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fly_cli import cpu_attention
from fly_cli.cached_model import CachedModel
from fly_cli.cpu_attention import MOST_ROWS, NAME, attend, is_ours, kernel_for, speed_up_attention, visible_spans
from fly_cli.models import load_pair
from fly_cli.settings import LOOKUP, ModelSettings


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 50), (4, 50), (MOST_ROWS, 50), (MOST_ROWS + 1, 50), (20, 20)])
def test_it_is_what_transformers_own_gives(dtype, mask, rows, length):
    torch.manual_seed(rows)
    shapes = ((6, rows), (2, length), (2, length))
    query, key, value = (torch.randn(1, heads, count, 16).to(dtype) for heads, count in shapes)
    if mask is not None:
        seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)[None, None]
        mask = seen if mask is torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -1e4)
    elif 1 < rows < length:
        pytest.skip("such a block has a mask")
    wide = sdpa_attention_forward(Layer(), query.float(), key.float(), value.float(), mask, scaling=0.3)[0]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    output, _ = attend(Layer(), query, key, value, mask, scaling=0.3, dropout=0.0)
    assert (output.dtype, output.shape) == (dtype, wide.shape)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(output.float(), wide, atol=tolerance, rtol=tolerance)


@pytest.fixture
def kernel():
    """Skips where there is none."""
    if cpu_attention.row_attention() is None:
        pytest.skip("needs a C compiler and AVX2")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("rows", "length", "width"), [(2, 3, 64), (5, 40, 16), (16, 600, 128), (MOST_ROWS, 33, 64)])
def test_a_row_of_a_block_gets_bit_for_bit_what_it_gets_alone(window, rows, length, width):
    torch.manual_seed(rows)
    query, key, value = (
        torch.randn(1, heads, n, width).bfloat16() for heads, n in ((6, rows), (2, length), (2, length))
    )
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    if window:
        seen &= torch.ones_like(seen).triu(length - rows - window + 1)
    block, _ = attend(Layer(), query, key, value, seen[None, None])
    for row in range(rows):
        known = length - rows + row + 1
        first = max(0, known - window) if window else 0
        alone, _ = attend(Layer(), query[:, :, row : row + 1], key[:, :, first:known], value[:, :, first:known], None)
        assert torch.equal(block[:, row : row + 1], alone)


NOT_FOR_IT = {  # what is changed in a query [1, 6, 3, 16] and keys and values [1, 2, 9, 16]
    "fp32": lambda q, k, v: (q.float(), k.float(), v.float()),
    "keys in fp32": lambda q, k, v: (q, k.float(), v),
    "values in fp32": lambda q, k, v: (q, k, v.float()),
    "widths of 12": lambda q, k, v: (q[..., :12], k[..., :12], v),
    "values of 12": lambda q, k, v: (q, k, v[..., :12]),
    "two texts": lambda q, k, v: (x.expand(2, -1, -1, -1) for x in (q, k, v)),
    "keys of two texts": lambda q, k, v: (q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),
    "five heads": lambda q, k, v: (q[:, :5], k, v),
    "fewer values": lambda q, k, v: (q, k, v[:, :, :8]),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "wider keys": lambda q, k, v: (q[..., :8], k, v),
    "gradients": lambda q, k, v: (q.requires_grad_(), k, v),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("change", NOT_FOR_IT)
def test_the_kernel_takes_what_it_was_made_for_and_no_more(change):
    given = (torch.zeros(1, 6, 3, 16).bfloat16(), *torch.zeros(2, 1, 2, 9, 16).bfloat16())
    assert kernel_for(*given)
    assert kernel_for(*NOT_FOR_IT[change](*given)) is None


@pytest.mark.usefixtures("kernel")
def test_gradients_that_nobody_asks_for_do_not_matter():
    given = torch.zeros(3, 1, 2, 1, 16, requires_grad=True).bfloat16()
    with torch.no_grad():
        assert kernel_for(*given)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [(1, 1, 1, 40), (1, 1, 5, 1), (1, 6, 5, 40)], ids=str)
def test_masks_that_stand_for_several_rows_keys_or_heads_are_left_to_pytorch(shape):
    query, key = torch.randn(1, 6, 5, 16).bfloat16(), torch.randn(1, 2, 40, 16).bfloat16()
    mask = torch.ones(shape, dtype=torch.bool)
    right = sdpa_attention_forward(Layer(), query.float(), key.float(), key.float(), mask)[0]
    torch.testing.assert_close(attend(Layer(), query, key, key, mask)[0].float(), right, atol=3e-2, rtol=3e-2)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [(1, 1, 5, 48), (1, 1, 5, 4000), (1, 1, 7, 40)], ids=str)
def test_masks_of_other_rows_or_keys_are_an_error_and_no_crash(shape):
    query, key = torch.randn(1, 6, 5, 16).bfloat16(), torch.randn(1, 2, 40, 16).bfloat16()
    with pytest.raises(RuntimeError):
        attend(Layer(), query, key, key, torch.ones(shape, dtype=torch.bool))


@pytest.mark.usefixtures("kernel")
def test_the_default_device_of_the_moment_does_not_matter():
    query, key = torch.randn(1, 6, 1, 16).bfloat16(), torch.randn(1, 2, 11, 16).bfloat16()
    right = attend(Layer(), query, key, key, None)[0]
    cpu_attention.all_of.cache_clear()
    with torch.device("meta"):  # as while a model is laid out
        assert torch.equal(attend(Layer(), query, key, key, None)[0], right)


def test_layers_of_two_kinds_look_at_each_mask_once(monkeypatch):
    looks = []
    monkeypatch.setattr(cpu_attention, "stretches", lambda seen: looks.append(1) or torch.zeros(3, 2))
    full, window = torch.ones(2, 1, 1, 3, 9, dtype=torch.bool)
    for _ in range(3):
        for mask in (full, window):
            assert visible_spans(mask, 3, 9) is not None
    assert len(looks) == 2


def test_a_scale_of_zero_is_a_scale():
    query, key = torch.randn(1, 6, 1, 16), torch.randn(1, 2, 11, 16)
    mean = key.mean(2).repeat_interleave(3, dim=1)
    torch.testing.assert_close(attend(Layer(), query, key, key, None, scaling=0.0)[0][:, 0], mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_kernel_rows_are_computed_together(monkeypatch, dtype):
    monkeypatch.setattr(cpu_attention, "multiplies_16_bit", False)
    monkeypatch.setattr(cpu_attention, "row_attention", lambda: None)
    query, key = torch.randn(1, 6, 3, 16).to(dtype), torch.randn(1, 2, 9, 16).to(dtype)
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)[None, None]
    right = sdpa_attention_forward(Layer(), query.float(), key.float(), key.float(), mask)[0].to(dtype)
    torch.testing.assert_close(attend(Layer(), query, key, key, mask)[0], right)


def test_rows_that_see_keys_here_and_there_are_computed_together():
    query, key = torch.randn(1, 6, 3, 16), torch.randn(1, 2, 9, 16)
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 1]).bool().expand(1, 1, 3, 9)
    assert visible_spans(mask, 3, 9) is None and visible_spans(torch.zeros_like(mask), 3, 9) is None
    right = sdpa_attention_forward(Layer(), query, key, key, mask)[0]
    torch.testing.assert_close(attend(Layer(), query, key, key, mask)[0], right)


@pytest.fixture
def usual(monkeypatch):
    """A process in which nobody has changed how models attend; it is one again in the end."""
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, sdpa_attention_forward)


SPARSE = {
    "deepseek-v3.2, few indexed": lambda: made(
        t.DeepseekV32ForCausalLM, t.DeepseekV32Config, **LATENT, index_n_heads=2, index_head_dim=16, index_topk=8
    )
}


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("name", ALL | SPARSE)
def test_models_give_the_logits_that_they_gave_before(name):
    model, dice = (ALL | SPARSE)[name](), random.Random(1)
    ids = [dice.randrange(256) for _ in range(CONTEXT + 30)]
    reads = [(CONTEXT - 5, 3), (CONTEXT - 4, 1), (CONTEXT, 3), (CONTEXT + 1, 1), (CONTEXT + 8, 7), (CONTEXT + 30, 2)]

    def logits():
        cached = CachedModel(model, name=name)
        return [cached.read(ids[:end], last) for end, last in reads]

    before = logits()
    speed_up_attention()
    for one, other in zip(before, logits(), strict=True):
        torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("usual")
def test_a_pair_that_is_loaded_has_it(tiny_pair_dirs, monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_attention, "is_ours", lambda *given: calls.append(1) or is_ours(*given))
    load_pair(ModelSettings(target=str(tiny_pair_dirs[0]), draft=LOOKUP, device_map="cpu"))
    assert calls


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_kernel", [False, True])
def test_sixteen_bit_rows_go_the_usual_way_where_the_cpu_has_instructions_and_there_is_no_kernel(
    monkeypatch, multiplies, dtype, has_kernel
):
    calls = []
    usual = lambda *given, **more: calls.append(1) or sdpa_attention_forward(*given, **more)  # noqa: E731
    monkeypatch.setattr(cpu_attention, "sdpa_attention_forward", usual)
    monkeypatch.setattr(cpu_attention, "multiplies_16_bit", multiplies)
    if not has_kernel:
        monkeypatch.setattr(cpu_attention, "row_attention", lambda: None)
    elif cpu_attention.row_attention() is None:
        pytest.skip("needs a C compiler and AVX2")
    row = torch.zeros(1, 2, 1, 16).to(dtype)
    attend(Layer(), row, row, row, None)
    assert bool(calls) is (multiplies and not (has_kernel and dtype == torch.bfloat16))


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"softcap": 30.0}, {"indices": [3]}, {"position_bias": 1}], ids=str)
def test_what_else_a_model_asks_for_is_left_to_the_library(more):
    row = torch.zeros(1, 2, 1, 16)
    assert not is_ours(row, None, more)
    assert is_ours(
        row, None, {"dropout": 0.0, "scaling": 0.1, "softcap": None, "sliding_window": 8, "output_router_logits": False}
    )
    assert not is_ours(row.expand(-1, -1, 5, -1), None, {})  # a block without a mask
    assert not is_ours(torch.zeros(1, 2, MOST_ROWS + 1, 16), torch.ones(1), {})
    assert not is_ours(row.to("meta"), None, {})
