"""Ids to text with the tokenizers of real models of three kinds. `pytest -m pair`; no weights are loaded."""

import pytest
from fuzz_helpers import fuzz
from hypothesis import given
from hypothesis import strategies as st
from real_models import gemma_gguf
from text_helpers import full_decode, id_sequences, stream

from fly_cli.catalog import load_catalog
from fly_cli.detokenize import ByteDetokenizer, PieceDetokenizer
from fly_cli.settings import TextSettings
from fly_cli.text import Codec
from fly_cli.vocabulary import load_tokenizer
from fly_cli.weights import locate

pytestmark = pytest.mark.pair
KINDS = {"qwen-coder-1.5b": ByteDetokenizer, "smollm2-135m": ByteDetokenizer, "gemma": PieceDetokenizer}


@pytest.fixture(scope="module", params=KINDS)
def codec(request):
    name = str(gemma_gguf()) if request.param == "gemma" else request.param
    tokenizer = load_tokenizer(locate(name, load_catalog()).path)
    codec = Codec(tokenizer, settings=TextSettings(raw=True), end_ids=None, vocab_rows=len(tokenizer))
    assert isinstance(codec.detokenizer(), KINDS[request.param])
    return codec


@fuzz(150)
@given(st.data())
def test_joined_pieces_of_a_real_tokenizer_are_one_full_decode(codec, data):
    ids = data.draw(id_sequences(codec))
    joined = "".join(stream(codec, ids))
    seen = [token_id for token_id in ids if token_id not in codec.hidden_ids]
    assert joined == full_decode(codec.tokenizer, seen, show_special=True)
    joined.encode()  # no half of a surrogate pair
    prompt_ids = codec.piece_ids(
        data.draw(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=9))
    )
    before, full = ("".join(stream(codec, some)) for some in (prompt_ids, prompt_ids + ids))
    if full.startswith(before):  # where broken bytes take the prompt's last character with them, nothing is asked
        assert before + "".join(stream(codec, ids, prompt_ids)) == full
