"""Attention on CPUs: what transformers' own gives, for one row and for blocks, through every kind of layer."""

import random

import pytest
import torch
from architectures import ALL, CONTEXT
from models_for_tests import tiny_llama
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fly_cli import cpu_attention
from fly_cli.cached_model import CachedModel
from fly_cli.cpu_attention import MOST_ROWS, OURS, attend, speed_up_attention


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


@pytest.mark.parametrize("name", ALL)
def test_models_give_the_logits_that_they_gave_before(name):
    model, dice = ALL[name](), random.Random(1)
    ids = [dice.randrange(256) for _ in range(CONTEXT + 30)]
    reads = [(CONTEXT - 5, 1), (CONTEXT - 4, 1), (CONTEXT, 3), (CONTEXT + 1, 1), (CONTEXT + 8, 7), (CONTEXT + 30, 2)]

    def logits():
        cached = CachedModel(model, name=name)
        return [cached.read(ids[:end], last) for end, last in reads]

    before = logits()
    changed = speed_up_attention(model)
    assert changed is (model.config.get_text_config(decoder=True)._attn_implementation == OURS)
    for one, other in zip(before, logits(), strict=True):
        torch.testing.assert_close(other, one, atol=1e-3, rtol=1e-3)


def test_most_models_have_it():
    assert sum(speed_up_attention(make()) for make in ALL.values()) >= len(ALL) / 2


@pytest.mark.parametrize("multiplies", [False, True])
def test_sixteen_bit_models_keep_their_own_where_the_cpu_has_instructions_for_them(monkeypatch, multiplies):
    monkeypatch.setattr(cpu_attention, "cpu_multiplies_16_bit", lambda: multiplies)
    assert speed_up_attention(tiny_llama(0).bfloat16()) is not multiplies
    assert speed_up_attention(tiny_llama(0))


def test_what_was_asked_to_attend_otherwise_stays_so():
    assert not speed_up_attention(tiny_llama(0, attn_implementation="eager"))
