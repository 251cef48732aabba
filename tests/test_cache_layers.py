"""What layers remember is told by configurations, as it turns out when the models run."""

import pytest
import torch
from models_for_tests import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    FalconH1Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    RwkvConfig,
    xLSTMConfig,
)

from fly_cli.cache_layers import cache_layers
from fly_cli.cached_model import CachedModel
from fly_cli.errors import UnsupportedModelError

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
SLIDING = Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
ATTENTION_ALONE = GraniteMoeHybridConfig(**SMALL, layer_types=["attention", "attention"])
REWINDABLE = {
    "llama": (tiny_llama(0).config, {"full attention": 2}),
    "gemma3": (SLIDING, {"sliding window of 16": 1, "full attention": 1}),
    "llama4": (
        Llama4TextConfig(**SMALL, head_dim=16, attention_chunk_size=32, num_local_experts=2),
        {"sliding window of 32": 2},
    ),
    "hybrid kind without recurrent layers": (ATTENTION_ALONE, {"full attention": 2}),
}
RECURRENT = {
    "mamba": (MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2), {"recurrent state": 2}),
    "jamba": (JambaConfig(**SMALL, attn_layer_offset=1, attn_layer_period=2), None),
    "falcon_h1": (FalconH1Config(**SMALL), {"recurrent state and full attention": 2}),
    "lfm2": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), {"recurrent state": 1, "full attention": 1}),
    "rwkv": (RwkvConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2), {"state of its own": 2}),
    "xlstm": (xLSTMConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_heads=2), {"state of its own": 2}),
    "deepseek_v4": (DeepseekV4Config(**(SMALL | {"num_key_value_heads": 1})), None),  # compressed, and a sliding window
}


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", REWINDABLE)
def test_layers_that_can_be_rewound_are_told_without_weights_and_run(name):
    config, counts = REWINDABLE[name]
    layers = cache_layers("some/model", build(config))
    assert layers.rewindable
    assert layers.counts == counts
    CachedModel(AutoModelForCausalLM.from_config(config).float().eval(), name="some/model")


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_that_cannot_be_rewound_are_told_without_weights(name):
    config, counts = RECURRENT[name]
    layers = cache_layers("some/model", build(config))
    assert not layers.rewindable
    assert counts is None or layers.counts == counts
    assert sum(layers.counts.values()) == config.num_hidden_layers


def test_a_kind_that_no_cache_knows_is_refused():
    model = build(SLIDING)
    model.config.layer_types = ["sliding_attention", "telepathy"]
    with pytest.raises(UnsupportedModelError, match=r"`some/model` \(model type `gemma3_text`\)"):
        cache_layers("some/model", model)
