"""Tiny tokenizers, built in code: byte-level BPE, and SentencePiece-like BPE with byte tokens."""

import json
from collections.abc import Sequence
from functools import cache

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fly_cli.text import Codec

CORPUS = [
    "Hello world, hello there! The answer is 42. What is the question?",
    "def search(items, x):\n    return x != y, z ?  'a'\n",
    "한국어 한국어 한국 좋아 😀😀 héllo wörld\n\n",
    "user assistant system you are the model and the model answers the user",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box start|>")
ORDINARY = ("<think>", "</think>", "<tool_call>", "\u2581odd\u00e9")


def byte_level(
    *,
    template: str | dict[str, str] | None = CHAT_TEMPLATE,
    corpus: tuple[str, ...] = tuple(CORPUS),
    add_prefix_space: bool = False,
    normalizer: normalizers.Normalizer | None = None,
    **options,
) -> PreTrainedTokenizerFast:
    """About 384 entries: 256 bytes, merges of the corpus, four special and four ordinary added tokens."""
    tokenizer = Tokenizer.from_str(_byte_level_json(corpus))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        **options,
    )


def sentencepiece_like(
    *,
    template: str | None = LLAMA2_TEMPLATE,
    decoder: decoders.Decoder | None = None,
    add_bos: bool = True,
    add_eos: bool = False,
    prepend: str = "first",
    **options,
) -> PreTrainedTokenizerFast:
    """Llama-2 style: a word's space is part of its token, unknown characters are byte tokens, <s> comes first."""
    tokenizer = Tokenizer.from_str(_sentencepiece_json())
    if prepend == "normalizer":  # the older way
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoder or llama_decoder()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> " * add_bos + "$A" + " </s>" * add_eos, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        **options,
    )


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def words(decoder: decoders.Decoder | None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer, whose decoder is none that the detokenizers model."""
    vocab = {word: at for at, word in enumerate(["[UNK]", "the", "cat", "##s", "sat", ".", ",", "do", "n't"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def full_decode(tokenizer: PreTrainedTokenizerFast, ids: list[int], *, show_special: bool = False) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not show_special, clean_up_tokenization_spaces=False)


@cache
def _byte_level_json(corpus: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus * 3, trainers.BpeTrainer(vocab_size=376, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY])
    return tokenizer.to_str()


@cache
def _sentencepiece_json() -> str:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [line.replace("😀", "").replace("\n", "") for line in CORPUS] * 3,
        trainers.BpeTrainer(vocab_size=160, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*first, *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer.to_str()


def stream(codec: Codec, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    """The pieces of text that the ids give, and what is left at their end."""
    detokenizer = codec.detokenizer(prompt_ids)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.flush()]


def raw_bytes_as_ids(tokenizer: PreTrainedTokenizerBase, data: bytes) -> list[int]:
    """The bytes, each as the token that stands for it alone."""
    return [ids_of_bytes(tokenizer)[byte] for byte in data]


@cache
def ids_of_bytes(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "<0x00>" in tokenizer.get_vocab():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in range(256)]


@st.composite
def id_sequences(draw, codec: Codec) -> list[int]:
    """Any ids, mixed with real text and bytes of it, all of which may be cut or damaged anywhere."""
    tokenizer = codec.tokenizer

    def of(data: bytes) -> list[int]:
        return raw_bytes_as_ids(tokenizer, data)

    parts = st.one_of(
        st.lists(st.integers(0, codec.vocab_size - 1), max_size=6),
        st.text(max_size=4).map(lambda text: of(text.encode("utf-8", "replace"))),
        st.text(st.characters(codec="utf-8"), max_size=8).map(lambda text: codec.piece_ids(text)[1:]),
        st.binary(max_size=5).map(of),
        st.sampled_from("한﷽😀▁ \n").flatmap(
            lambda character: st.integers(0, 4).map(lambda end: of(character.encode()[:end]))
        ),
    )
    return [token_id for part in draw(st.lists(parts, max_size=8)) for token_id in part]
