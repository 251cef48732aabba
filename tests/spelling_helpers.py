"""Tokenizers that spell the same text in different ids, and texts that are hard to spell."""

from hypothesis import strategies as st
from text_helpers import byte_level, sentencepiece_like
from tokenizers import decoders, normalizers

from fly_cli.cached_model import CachedModel
from fly_cli.models import Pair
from fly_cli.settings import ModelSettings, TextSettings
from fly_cli.spelling import Spelling, Translation
from fly_cli.text import Codec

OTHER_CORPUS = (
    "The world answers: hello hello world, wherever the models search the items of the questions",
    "return items; return x.answer() == 42\n\n\n        else:\n            return 'systematic' + y\n",
    "wörldwide 좋아요 한국 😀😀😀 naïve answers “ok” – systematically questioned",
)
GEMMA_DECODER = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
TOKENIZERS = {
    "bytes": byte_level(),
    "other bytes": byte_level(corpus=OTHER_CORPUS),
    "bytes behind a space": byte_level(add_prefix_space=True),
    "composed bytes": byte_level(normalizer=normalizers.NFC()),
    "llama": sentencepiece_like(),
    "old llama": sentencepiece_like(prepend="normalizer"),
    "gemma": sentencepiece_like(prepend="never", decoder=GEMMA_DECODER),
}
LOSSLESS = [name for name in TOKENIZERS if name != "composed bytes"]
WORDS = [
    "hello",
    "world",
    "answers",
    "return",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "    ",
    "한국어",
    "좋아",
    "😀",
    "👩\u200d💻",
]
WORDS += ["👩\u200d💻", "é", "e\u0301", "“ok”", "ﷺ", "\u00a0", "\u3000", "(x):", "42", "'s", "."]
WORDS += ["<|im_end|>", "</s>", "<think>", "<0x41>"]
# U+2581 is how SentencePiece writes a space: its tokenizers cannot say the character itself.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\u2581")
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(CHARACTERS, max_size=4), max_size=12).map("".join)


def codec_of(name: str, **text) -> Codec:
    tokenizer = TOKENIZERS[name]
    settings = TextSettings(**({"raw": True} | text))
    return Codec(tokenizer, settings=settings, end_ids=None, vocab_rows=len(tokenizer))


SPELLINGS = {name: Spelling(codec_of(name), name) for name in TOKENIZERS}


def said(spelling: Spelling, ids) -> bytes:
    return b"".join(map(spelling.bytes_of, ids))


def translating_pair(target_model, target: Spelling, draft_model, draft: Spelling) -> Pair:
    """Two models, and how each spells."""
    target_cached, draft_cached = (
        CachedModel(model, name="tiny", vocab_size=spelling.codec.vocab_size)
        for model, spelling in ((target_model, target), (draft_model, draft))
    )
    settings = ModelSettings(draft="draft")
    return Pair(target_cached, draft_cached, target.codec, settings, translation=Translation(target, draft))
