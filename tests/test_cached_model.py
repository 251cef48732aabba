import random

import pytest
import torch
from models_for_tests import tiny_llama
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from fly_cli import cached_model
from fly_cli.cached_model import CachedModel
from fly_cli.errors import UnsupportedModelError

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: tiny_llama(0, vocab_size=100),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
    "gemma3, mixed": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, layer_types=MIXED)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    ),
}
RECURRENT = {
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=None)
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL,
            num_experts=0,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    ),
}


def uncached(model, ids, last):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -last:]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_an_uncached_forward_through_drafts_and_rejections_at_every_place(name):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    cached = CachedModel(model, name=name)
    dice = random.Random(1)
    ids = [dice.randrange(100) for _ in range(5)]
    for rejected_at in [0, 1, 2, 3, 4, 5] * 4:  # 5 is none
        cached.settle(ids[:-1])
        drafted = [dice.randrange(100) for _ in range(5)]
        for n in range(6):  # token by token, as a drafter reads
            cached.read(ids + drafted[:n], last=1)
        cached.read(ids + drafted[:2] + [3, 4], last=2)  # copied tokens that are not taken
        rows = cached.read(ids + drafted, last=6)  # as a target verifies
        torch.testing.assert_close(rows, uncached(model, ids + drafted, 6), atol=1e-4, rtol=1e-3)
        ids += [*drafted[:rejected_at], dice.randrange(100)]
    assert len(ids) > 8 * 8  # far past the sliding windows


@pytest.mark.parametrize("name", ["mistral, sliding", "gemma3, mixed"])
def test_another_prompt_after_a_long_one_starts_from_a_clean_window(name):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    cached = CachedModel(model, name=name)
    first = list(range(60))
    cached.read(first)
    cached.settle(first[:-1])
    second = [*first[:30], 99, 98]
    torch.testing.assert_close(cached.read(second), uncached(model, second, 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["mistral, sliding", "gemma3, mixed"])
@pytest.mark.parametrize("back", range(1, 12))
def test_a_window_settled_further_back_than_it_remembers_is_read_anew(name, back):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    cached = CachedModel(model, name=name)
    ids = list(range(40))
    cached.read(ids)
    cached.settle(ids[:-1])
    cached.settle(ids[: 40 - back])
    shorter = [*ids[: 40 - back], 98, 99]
    torch.testing.assert_close(cached.read(shorter), uncached(model, shorter, 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_block_sees_all_that_is_cached_and_nothing_of_the_future(attention):
    model = tiny_llama(0, attn_implementation=attention)
    ids = list(range(40, 68))
    cached = CachedModel(model, name="tiny")
    cached.read(ids[:20])
    rows = cached.read(ids, last=8)
    torch.testing.assert_close(rows, uncached(model, ids, 8), atol=1e-4, rtol=1e-4)
    changed = cached.read([*ids[:-1], 200], last=8)
    torch.testing.assert_close(changed[:-1], rows[:-1], atol=1e-4, rtol=1e-3)


def test_only_what_the_cache_lacks_is_fed():
    model = tiny_llama(0)
    cached = CachedModel(model, name="tiny")
    fed = []
    model.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    cached.read([1, 2, 3, 4])
    cached.read([1, 2, 3, 4, 5])
    cached.read([1, 2, 3, 9, 8], last=2)
    cached.read([1, 2, 3, 9, 8], last=1)
    assert fed == [4, 1, 2, 1]


def test_positions_count_the_committed_tokens():
    model = tiny_llama(0)
    cached = CachedModel(model, name="tiny")
    positions = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, inputs, named: positions.append(named["position_ids"].flatten().tolist()), with_kwargs=True
    )
    cached.read([1, 2, 3])
    cached.read([1, 2, 3, 4, 5], last=2)
    cached.read([1, 2, 3, 4, 9, 9], last=2)
    assert positions == [[0, 1, 2], [3, 4], [4, 5]]


def test_prefill_asks_for_one_logit_row():
    model = tiny_llama(0)
    cached = CachedModel(model, name="tiny")
    rows = []
    model.lm_head.register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    cached.read(list(range(100)))
    assert rows == [1]


def test_a_long_prompt_is_read_in_chunks_to_the_same_logits(monkeypatch):
    model = tiny_llama(0)
    ids = list(range(100))
    whole = CachedModel(model, name="tiny").read(ids, last=3)
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 16)
    fed = []
    cached = CachedModel(model, name="tiny")
    model.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    torch.testing.assert_close(cached.read(ids, last=3), whole, atol=1e-4, rtol=1e-3)
    assert max(fed) <= 16 + 3
    assert sum(fed) == 100


def test_an_interrupted_forward_leaves_an_empty_cache_and_right_logits():
    model = tiny_llama(0)
    cached = CachedModel(model, name="tiny")
    cached.read([1, 2, 3])

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached.read([1, 2, 3, 4])
    handle.remove()
    torch.testing.assert_close(cached.read([1, 2, 3, 4]), uncached(model, [1, 2, 3, 4], 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_model_that_cannot_be_rewound_is_refused_by_its_type(name):
    with pytest.raises(UnsupportedModelError, match=name):
        CachedModel(RECURRENT[name]().float().eval(), name="some/model")


def test_padded_rows_of_the_vocabulary_are_cut_off():
    cached = CachedModel(tiny_llama(0), name="tiny", vocab_size=300)
    assert cached.read([1, 2]).shape == (1, 300)
