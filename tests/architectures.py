"""Tiny random models of many architectures, and what they say without our cache: a reference to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as t
from models_for_tests import byte_tokenizer, tiny_llama

from fly_cli.cached_model import CachedModel
from fly_cli.settings import TextSettings
from fly_cli.text import Codec

VOCAB = 384
WINDOW = 8
CONTEXT = 32  # the original one, of frequencies that change with the length
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,  # tied, a random model says its last token again
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"]
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [float(2 + i) for i in range(8)]}
LONG |= {"rope_theta": 10_000.0, "original_max_position_embeddings": CONTEXT}
STRETCHED = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": CONTEXT}


LATENT = {
    "first_k_dense_replace": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def llama(**changes: Any) -> t.PreTrainedModel:
    return tiny_llama(0, **changes)


def made(model: type, config: type, **changes: Any) -> t.PreTrainedModel:
    torch.manual_seed(0)
    return model(config(**(SMALL | changes))).float().eval()


FULL: dict[str, Callable[[], t.PreTrainedModel]] = {
    "llama": llama,
    "qwen2": lambda: made(t.Qwen2ForCausalLM, t.Qwen2Config),
    "qwen3": lambda: made(t.Qwen3ForCausalLM, t.Qwen3Config, head_dim=16),
    "phi3": lambda: made(t.Phi3ForCausalLM, t.Phi3Config),
    "gpt2, learned positions": lambda n_positions=256: made(
        t.GPT2LMHeadModel, t.GPT2Config, n_positions=n_positions, bos_token_id=0, eos_token_id=0
    ),
    "opt, learned positions with an offset": lambda: made(
        t.OPTForCausalLM,
        t.OPTConfig,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
        init_std=0.5,
        pad_token_id=1,
    ),
    "bloom, alibi": lambda: made(t.BloomForCausalLM, t.BloomConfig, n_layer=2, n_head=2),
    "gpt-neox, partial rotary": lambda: made(t.GPTNeoXForCausalLM, t.GPTNeoXConfig, rotary_pct=0.25),
    "mixtral, experts": lambda: made(
        t.MixtralForCausalLM, t.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "deepseek-v3, latent attention": lambda: made(t.DeepseekV3ForCausalLM, t.DeepseekV3Config, **LATENT),
    "deepseek-v3.2, indexed": lambda: made(
        t.DeepseekV32ForCausalLM,
        t.DeepseekV32Config,
        **LATENT,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=256,  # more than are there: in shorter texts ties decide which are taken
    ),
}
SLIDING: dict[str, Callable[[], t.PreTrainedModel]] = {
    "mistral, sliding": lambda: made(t.MistralForCausalLM, t.MistralConfig, sliding_window=WINDOW),
    "qwen2, mixed": lambda: made(
        t.Qwen2ForCausalLM, t.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "phi3, sliding": lambda: made(t.Phi3ForCausalLM, t.Phi3Config, sliding_window=WINDOW),
    "gemma2, mixed": lambda: made(
        t.Gemma2ForCausalLM, t.Gemma2Config, head_dim=16, sliding_window=WINDOW, layer_types=MIXED
    ),
    "gemma3, mixed": lambda: made(
        t.Gemma3ForCausalLM, t.Gemma3TextConfig, head_dim=16, sliding_window=WINDOW, layer_types=MIXED
    ),
    "gemma4, mixed with shared layers": lambda: made(
        t.Gemma4ForCausalLM,
        t.Gemma4TextConfig,
        num_hidden_layers=4,
        head_dim=16,
        global_head_dim=32,
        sliding_window=WINDOW,
        layer_types=MIXED * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2,
    ),
    "gpt-oss, mixed with sinks": lambda: made(
        t.GptOssForCausalLM,
        t.GptOssConfig,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "llama4, chunked": lambda: made(
        t.Llama4ForCausalLM,
        t.Llama4TextConfig,
        head_dim=16,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        moe_layers=[],
    ),
}
ROPE: dict[str, Callable[[], t.PreTrainedModel]] = {
    "llama, llama3 rope": lambda: llama(
        rope_parameters={**STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "llama, yarn": lambda: llama(rope_parameters={**STRETCHED, "rope_type": "yarn"}),
    "llama, linear rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "phi3, longrope": lambda: made(
        t.Phi3ForCausalLM,
        t.Phi3Config,
        max_position_embeddings=256,
        original_max_position_embeddings=CONTEXT,
        rope_parameters=dict(LONG),
    ),
    "phi3, longrope and sliding": lambda: made(
        t.Phi3ForCausalLM,
        t.Phi3Config,
        max_position_embeddings=256,
        original_max_position_embeddings=CONTEXT,
        rope_parameters=dict(LONG),
        sliding_window=WINDOW,
    ),
    "phimoe, longrope": lambda: made(
        t.PhimoeForCausalLM,
        t.PhimoeConfig,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=None,
        max_position_embeddings=256,
        original_max_position_embeddings=CONTEXT,
        rope_parameters={**LONG, "short_mscale": 1.0, "long_mscale": 1.3},
    ),
    "llama, longrope": lambda: llama(rope_parameters=dict(LONG)),
}
DYNAMIC: dict[str, Callable[[], t.PreTrainedModel]] = {
    "llama, dynamic ntk": lambda: llama(
        max_position_embeddings=CONTEXT, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}
EXACT = FULL | SLIDING | ROPE  # a cached forward gives what an uncached one gives
ALL = EXACT | DYNAMIC
TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ATTENTION = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
RECURRENT: dict[str, Callable[[], t.PreTrainedModel]] = {
    "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(**TINY, state_size=4)),
    "mamba2": lambda: t.Mamba2ForCausalLM(t.Mamba2Config(**TINY, num_heads=4, head_dim=16, state_size=4, n_groups=1)),
    "jamba": lambda: t.JambaForCausalLM(
        t.JambaConfig(
            **TINY,
            **ATTENTION,
            num_experts=2,
            mamba_d_state=4,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            use_mamba_kernels=False,
        )
    ),
    "bamba": lambda: t.BambaForCausalLM(t.BambaConfig(**TINY, **ATTENTION, **MAMBA2, attn_layer_indices=[1])),
    "falcon_h1": lambda: t.FalconH1ForCausalLM(
        t.FalconH1Config(**TINY, **ATTENTION, **MAMBA2, mamba_d_ssm=64, head_dim=16)
    ),
    "qwen3_next": lambda: t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(
            **TINY,
            **ATTENTION,
            num_experts=0,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    ),
    "lfm2": lambda: t.Lfm2ForCausalLM(t.Lfm2Config(**TINY, **ATTENTION, layer_types=["conv", "full_attention"])),
    "recurrent_gemma": lambda: t.RecurrentGemmaForCausalLM(
        t.RecurrentGemmaConfig(
            **(TINY | {"num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}), **ATTENTION
        )
    ),
    "rwkv": lambda: t.RwkvForCausalLM(t.RwkvConfig(**TINY, attention_hidden_size=32)),
}


def codec() -> Codec:
    """A codec without end tokens: random models would come upon one before anything can be seen."""
    made = Codec(byte_tokenizer(), settings=TextSettings(raw=True), end_ids=(), vocab_rows=VOCAB)
    made.stop_ids = frozenset()
    return made


class Uncached(CachedModel):
    """A model that remembers nothing: each row of logits is a forward over all that is before it."""

    def read(self, ids: Sequence[int], last: int = 1) -> torch.Tensor:
        ends = range(len(ids) - last + 1, len(ids) + 1)
        with torch.inference_mode():
            rows = [self.model(torch.tensor([list(ids[:end])]), use_cache=False).logits[0, -1] for end in ends]
        return torch.stack(rows)[:, : self.vocab_size]

    def settle(self, ids: Sequence[int]) -> None:
        pass


class OneByOne(CachedModel):
    """A model that reads as `generate` of transformers does: the prompt at once, then token by token."""

    def reset(self) -> None:
        self.prompt_length: int | None = None

    def read(self, ids: Sequence[int], last: int = 1) -> torch.Tensor:
        if self.prompt_length is None:
            self.prompt_length = len(ids)
        model = copy.deepcopy(self.model)  # what it remembers of longer texts is left out
        cache = t.DynamicCache(config=model.config)
        rows, start = [], 0
        with torch.inference_mode():
            for end in range(self.prompt_length, len(ids) + 1):
                fed = torch.tensor([list(ids[start:end])])
                rows.append(model(fed, cache=cache, use_cache=True).logits[0, -1])
                start = end
        return torch.stack(rows[-last:])[:, : self.vocab_size]

    def settle(self, ids: Sequence[int]) -> None:
        pass

    def _probe(self) -> None:
        pass
