import random

import pytest
import torch
from architectures import ALL, CONTEXT, DYNAMIC, EXACT, RECURRENT, WINDOW, OneByOne, Uncached
from models_for_tests import tiny_config, tiny_llama
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM

from fly_cli import cached_model
from fly_cli.cached_model import CachedModel
from fly_cli.errors import UnsupportedModelError


def uncached(model, ids, last):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -last:]


def reference(name, model):
    """What a model of that name should say, read without our cache."""
    return (OneByOne if name in DYNAMIC else Uncached)(model, name=name)


@pytest.mark.parametrize("prompt_length", [CONTEXT - 8, CONTEXT + 8])
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_without_our_cache_through_drafts_and_rejections_at_every_place(name, prompt_length):
    model = ALL[name]()
    cached, plain = CachedModel(model, name=name), reference(name, model)
    dice = random.Random(1)
    ids = [dice.randrange(256) for _ in range(prompt_length)]
    for rejected_at in [0, 1, 2, 3, 4, 5]:  # 5 is none
        cached.settle(ids[:-1])
        drafted = [dice.randrange(256) for _ in range(5)]
        for n in range(6):  # token by token, as a drafter reads
            cached.read(ids + drafted[:n], last=1)
        cached.read(ids + drafted[:2] + [3, 4], last=2)  # copied tokens that are not taken
        rows = cached.read(ids + drafted, last=6)  # as a target verifies
        plain.prompt_length = prompt_length
        torch.testing.assert_close(rows, plain.read(ids + drafted, 6), atol=1e-3, rtol=1e-3)
        ids += [*drafted[:rejected_at], dice.randrange(256)]
    assert len(ids) > prompt_length + 2 * WINDOW


@pytest.mark.parametrize("name", ALL)
def test_a_long_prompt_is_read_in_chunks_to_the_same_logits(name, monkeypatch):
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 16)
    model = ALL[name]()
    ids = [random.Random(2).randrange(256) for _ in range(100)]
    cached = CachedModel(model, name=name)
    fed = []
    model.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    rows = cached.read(ids)
    assert max(fed) == 16
    assert sum(fed) == 100
    torch.testing.assert_close(rows, reference(name, model).read(ids), atol=1e-3, rtol=1e-3)
    for n in range(1, 4):  # and what is cached then goes on alike
        cached.settle(ids)
        plain = reference(name, model)
        plain.prompt_length = 100
        longer = [*ids, *range(n)]
        torch.testing.assert_close(cached.read(longer, last=n), plain.read(longer, n), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["mistral, sliding", "gemma3, mixed"])
def test_another_prompt_after_a_long_one_starts_from_a_clean_window(name):
    model = EXACT[name]()
    cached = CachedModel(model, name=name)
    first = list(range(60))
    cached.read(first)
    cached.settle(first[:-1])
    second = [*first[:30], 99, 98]
    torch.testing.assert_close(cached.read(second), uncached(model, second, 1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["mistral, sliding", "gemma3, mixed"])
@pytest.mark.parametrize("back", range(1, 12))
def test_a_window_settled_further_back_than_it_remembers_is_read_anew(name, back):
    model = EXACT[name]()
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


class Memory(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prompt_of_any_length_is_read_in_the_same_memory_beside_its_cache(attention, monkeypatch):
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 64)
    monkeypatch.setattr(cached_model, "PREFILL_LEAST", 8)
    monkeypatch.setattr(cached_model, "PREFILL_CELLS", 64 * 256)
    used = []
    for length in (512, 2048):
        cached = CachedModel(tiny_llama(0, attn_implementation=attention), name="tiny")
        with Memory() as memory:
            cached.read([i % 256 for i in range(length)])
        states = 2 * sum(layer.keys.nbytes for layer in cached._cache.layers)
        longer = cached._cache.layers[0].keys.nbytes  # one tensor of the cache is copied to grow
        used.append(memory.most - states - longer)
    assert used[1] <= used[0]


@pytest.mark.parametrize(("length", "rows"), [(1, 2048), (8192, 2048), (16_384, 1024), (10**6, 256)])
def test_the_longer_a_text_the_fewer_of_its_tokens_are_read_at_once(length, rows):
    assert cached_model.prefill_rows(length) == rows


def test_sliding_layers_keep_no_more_of_a_long_prompt_than_their_window(monkeypatch):
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 16)
    cached = CachedModel(EXACT["mistral, sliding"](), name="mistral")
    cached.read(list(range(200)))
    assert cached._cache.layers[0].keys.shape[-2] < WINDOW + 16


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


@pytest.mark.parametrize("swallows", [False, True], ids=["unknown argument", "ignored argument"])
def test_a_model_whose_code_is_of_another_release_is_refused_for_that_reason(swallows):
    """Models used to be handed `past_key_values`, and code that comes with a model may still want it."""

    class Old(LlamaForCausalLM):
        if swallows:

            def forward(self, input_ids, past_key_values=None, use_cache=True, **others):
                return super().forward(input_ids, use_cache=False)

        else:

            def forward(self, input_ids, past_key_values=None, use_cache=True):
                return super().forward(input_ids, use_cache=False)

    with pytest.raises(UnsupportedModelError, match="code of `some/model` is for another release"):
        CachedModel(Old(tiny_config()).eval(), name="some/model")


def test_a_model_that_reads_in_both_directions_is_refused():
    model = BertLMHeadModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=100))
    with pytest.raises(UnsupportedModelError, match="both directions"):
        CachedModel(model, name="some/model")


def test_padded_rows_of_the_vocabulary_are_cut_off():
    cached = CachedModel(tiny_llama(0), name="tiny", vocab_size=300)
    assert cached.read([1, 2]).shape == (1, 300)
