"""Model doubles: a scripted model with a real cache, and tiny random models with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)  # tiny matrices: a second thread costs more than it brings

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Script = Callable[[list[int]], Mapping[int, float]]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer of 384 entries: 256 bytes, some merges of letters, three specials, filler words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("Ġ", "the")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fillers = 384 - len(SPECIALS) - len(vocab)
    vocab |= {f"Ġw{i:03d}": len(vocab) + i for i in range(fillers)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**(settings | changes))


QUANTIZABLE = {  # sizes of a model whose weights are as wide as groups of quantised ones
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.1,
    "pad_token_id": None,
}


def tiny_llama(seed: int, **changes: Any) -> LlamaForCausalLM:
    """A 2-layer random Llama in fp32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes)).float().eval()


def noisy_copy(model: PreTrainedModel, seed: int, scale: float = 0.05) -> PreTrainedModel:
    """The same model with perturbed weights: a drafter that is right most of the time."""
    copy = type(model)(model.config).float().eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return copy


def saved_pair(target: PreTrainedModel, parent: Path) -> tuple[Path, ...]:
    """(target folder, draft folder): the model and a noisy copy of it, with a byte-level chat tokenizer."""
    folders = []
    for name, model in {"target": target, "draft": noisy_copy(target, 1)}.items():
        folders.append(parent / name)
        model.save_pretrained(folders[-1])
        byte_tokenizer().save_pretrained(folders[-1])
    return tuple(folders)


class ScriptedModel(torch.nn.Module):
    """A causal model whose logits come from a function of the sequence, which it reads back from a real cache."""

    def __init__(self, script: Script, vocab_size: int, *, max_length: int = 100_000):
        super().__init__()
        self.script = script
        self.embedding = torch.nn.Embedding(vocab_size, 1)
        self.config = tiny_config(
            vocab_size=vocab_size,
            hidden_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=max_length,
        )
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.num_forwards = 0

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, ids: torch.Tensor, cache: Any, use_cache: bool = True, logits_to_keep: int = 0) -> Any:
        self.num_forwards += 1
        states = ids.double()[:, None, :, None]
        keys, _ = cache.update(states, states, 0)
        sequence = keys[0, 0, :, 0].long().tolist()
        first = len(sequence) - (logits_to_keep or ids.shape[1])
        rows = [self.row(self.script(sequence[: end + 1])) for end in range(first, len(sequence))]
        return SimpleNamespace(logits=torch.stack(rows)[None])

    def row(self, weights: Mapping[int, float]) -> torch.Tensor:
        row = torch.full((self.config.vocab_size,), -torch.inf)
        for token, weight in weights.items():
            row[token] = weight
        return row


def sure(token: int) -> dict[int, float]:
    """A row that leaves no doubt; token 0 is barely possible."""
    return {0: 0.0, token: 30.0} if token else {0: 30.0, 1: 0.0}


def unsure(token: int, *others: int) -> dict[int, float]:
    """A row whose argmax is `token`, with `others` nearly as likely."""
    return {token: 1.0} | dict.fromkeys(others, 0.9)


def says(ids: Sequence[int], prompt_length: int, otherwise: int = 0) -> Script:
    """A script that continues any prompt of that length with `ids`, whatever was fed."""

    def script(sequence: list[int]) -> Mapping[int, float]:
        index = len(sequence) - prompt_length
        return sure(ids[index] if 0 <= index < len(ids) else otherwise)

    return script
