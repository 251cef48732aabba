"""Target and draft in different dtypes, as on a GPU without bf16 beside a CPU: every pair of them decodes."""

import copy

import pytest
import torch
from models_for_tests import byte_tokenizer, noisy_copy, tiny_llama

from fly_cli.api import generate
from fly_cli.cached_model import CachedModel
from fly_cli.models import Pair
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
