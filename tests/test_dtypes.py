"""Target and draft in different dtypes, as on a GPU without bf16 beside a CPU: every pair of them decodes."""

import copy

import pytest
import torch
from models_for_tests import byte_tokenizer, noisy_copy, tiny_llama

from fly_cli.api import generate
from fly_cli.cached_model import CachedModel
from fly_cli.models import Pair
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings, ModelSettings, TextSettings
from fly_cli.text import Codec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGET = tiny_llama(0)
DRAFT = noisy_copy(TARGET, 1)


def pair_of(target_dtype, draft_dtype):
    codec = Codec(byte_tokenizer(), settings=TextSettings(raw=True), end_ids=None, vocab_rows=384)
    target, draft = (
        CachedModel(copy.deepcopy(model).to(dtype), name="tiny", vocab_size=codec.vocab_size)
        for model, dtype in ((TARGET, target_dtype), (DRAFT, draft_dtype))
    )
    return Pair(target, draft, codec, ModelSettings())


@pytest.mark.parametrize("draft_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_mix_of_dtypes_decodes_and_the_drafts_dtype_does_not_show(target_dtype, draft_dtype, temperature):
    pair = pair_of(target_dtype, draft_dtype)
    settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 1, "draft_schedule": "constant"}
    exact = generate(pair, "the an in", DecodeSettings(mode="exact", **settings))
    assert exact.summary.num_accepted_draft_tokens > 0
    if target_dtype is torch.float32:  # in 16 bits a block of rows may round another way
        plain = generate(pair, "the an in", DecodeSettings(mode="target", **settings))
        assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]
    fly = generate(pair, "the an in", DecodeSettings(mode="fly", window_size=1, **settings))
    assert fly.summary.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_exact_leaves_the_targets_text_only_where_two_tokens_are_as_good_as_equal(dtype):
    """A block of rows may be summed in another order than a single row, and near ties then go either way."""
    pair = pair_of(dtype, dtype)
    settings = {"max_new_tokens": 40, "draft_schedule": "constant"}
    same = 0
    for text in (f"{word} {number}" for word in ("the", "an", "in a", "th", "er") for number in range(10)):
        exact = generate(pair, text, DecodeSettings(mode="exact", **settings))
        plain = generate(pair, text, DecodeSettings(mode="target", **settings))
        one, other = ([token.id for token in answer.tokens] for answer in (exact, plain))
        if one == other:
            same += 1
            continue
        at = next(at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
        pair.target.reset()
        row = pair.target.read([*pair.codec.encode(Prompt(id="p", messages=None, text=text)).ids, *other[:at]])[0]
        ulp = torch.finfo(dtype).eps * row.max().abs().item()
        assert (row[other[at]] - row[one[at]]).abs().item() <= 8 * ulp
    assert same >= 10
