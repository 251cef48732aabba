"""Laws of spelling: what ids say is what the text says, wherever in an answer it stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spelling_helpers import LOSSLESS, SPELLINGS, TEXTS, TOKENIZERS, said
from text_helpers import full_decode, words
from tokenizers import decoders

from fly_cli.errors import UnsupportedModelError
from fly_cli.settings import TextSettings
from fly_cli.spelling import LONGEST_TAIL, Retelling, Spelling
from fly_cli.text import Codec


@pytest.mark.parametrize("name", LOSSLESS)
@given(before=TEXTS, text=TEXTS)
def test_ids_spell_exactly_the_text_behind_a_seam_and_none_is_special(name, before, text):
    spelling = SPELLINGS[name]
    spelled = spelling.behind(before, text)
    assert said(spelling, spelled.ids) == text.encode()
    assert not spelling.codec.special_ids.intersection(spelled.ids)
    assert spelled.ends == [len(said(spelling, spelled.ids[: n + 1])) for n in range(len(spelled.ids))]


@pytest.mark.parametrize("name", LOSSLESS)
@given(before=TEXTS, text=TEXTS)
def test_the_tokenizer_itself_decodes_the_ids_to_the_text(name, before, text):
    spelling = SPELLINGS[name]
    first = spelling.ids_of("x" + before)  # a decoder may drop a space at the start of everything
    ids = [*first, *spelling.behind(before, text).ids]
    assert full_decode(TOKENIZERS[name], ids, show_special=True) == f"x{before}{text}"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(before=TEXTS, text=TEXTS, skip=st.integers(0, 4))
def test_what_cannot_be_spelled_is_left_out_and_never_said_otherwise(name, before, text, skip):
    spelling = SPELLINGS[name]
    spelled = spelling.behind(before, text, skip)
    assert text.encode()[skip:].startswith(said(spelling, spelled.ids))


def test_the_seam_of_a_word_is_spelled_as_the_tokenizer_spells_the_whole_word():
    spelling = SPELLINGS["bytes"]
    whole = TOKENIZERS["bytes"]("Hello world").input_ids
    assert TOKENIZERS["bytes"].convert_ids_to_tokens(whole)[-1] == "Ġworld"
    assert spelling.behind("Hello", " world").ids == whole[-1:]
    assert said(spelling, spelling.behind("Hello wor", "ld").ids) == b"ld"


@pytest.mark.parametrize("name", ["llama", "old llama", "bytes behind a space"])
def test_no_space_is_put_in_front_of_a_piece(name):
    spelling = SPELLINGS[name]
    for before, text in [
        ("", "hello"),
        ("x", "hello"),
        ("x\n", "hello"),
        ("x ", "hello"),
        ("x", " hello"),
        ("x ", "  y"),
    ]:
        assert said(spelling, spelling.behind(before, text).ids) == text.encode()


def test_a_space_that_belongs_to_a_word_stays_in_its_token():
    spelling = SPELLINGS["llama"]
    assert (
        spelling.behind("the", " model").ids == TOKENIZERS["llama"]("the model", add_special_tokens=False).input_ids[1:]
    )


def test_half_a_character_is_completed_by_the_bytes_that_are_missing():
    spelling = SPELLINGS["gemma"]
    data = "貓".encode()  # in no vocabulary: three byte tokens
    for skip in range(3):
        assert said(spelling, spelling.behind("x ", "貓 is", skip).ids) == data[skip:] + b" is"


def test_where_no_id_begins_inside_a_character_nothing_is_spelled():
    spelling = SPELLINGS["bytes"]
    (merged,) = spelling.ids_of("국")
    assert spelling.bytes_of(merged) == "국".encode()
    assert spelling.behind("", "국", 1).ids == []


def test_a_text_that_spells_a_special_token_is_plain_text():
    for name, special in [("bytes", "<|im_end|>"), ("llama", "</s>")]:
        spelling = SPELLINGS[name]
        ids = spelling.behind("a", f"{special} b").ids
        assert said(spelling, ids) == f"{special} b".encode()
        assert TOKENIZERS[name].convert_tokens_to_ids(special) not in ids


def test_special_tokens_end_tokens_and_unknown_ids_stand_for_nothing():
    codec = Codec(
        TOKENIZERS["bytes"], settings=TextSettings(raw=True, stop_token=["the"]), end_ids=None, vocab_rows=500
    )
    spelling = Spelling(codec, "bytes")
    for token in ("<|im_start|>", "<|im_end|>", "the"):
        assert spelling.bytes_of(TOKENIZERS["bytes"].convert_tokens_to_ids(token)) == b""
    assert spelling.bytes_of(499) == b""
    assert spelling.bytes_of(TOKENIZERS["bytes"].convert_tokens_to_ids("<think>")) == b"<think>"


def test_a_tokenizer_that_changes_characters_spells_up_to_the_first_that_it_changes():
    spelling = SPELLINGS["composed bytes"]
    assert said(spelling, spelling.behind("", "hello world cafe\u0301 world").ids) == b"hello world caf"
    assert said(spelling, spelling.behind("cafe\u0301", " world").ids) == b" world"


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused():
    for decoder in (decoders.WordPiece(), None):
        tokenizer = words(decoder)
        codec = Codec(tokenizer, settings=TextSettings(raw=True), end_ids=None, vocab_rows=len(tokenizer))
        with pytest.raises(UnsupportedModelError, match="`wordy` is of a kind that cannot be translated"):
            Spelling(codec, "wordy")


# A text that grows


@pytest.mark.parametrize("name", LOSSLESS)
@given(parts=st.lists(TEXTS, max_size=6))
def test_a_retold_text_says_what_was_added_and_its_settled_ids_stay(name, parts):
    spelling = SPELLINGS[name]
    retelling = Retelling(spelling, [5, 6])
    for number in range(len(parts)):
        settled = retelling.ids[: retelling.num_settled]
        retelling.add(parts[number])
        assert retelling.ids[:2] == [5, 6] and retelling.ids[: len(settled)] == settled
        assert said(spelling, retelling.ids[2:]) == "".join(parts[: number + 1]).encode()
        assert "".join(parts[: number + 1]).endswith(retelling.tail)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_comes_letter_by_letter_is_told_as_if_it_had_come_at_once(name):
    text = "Hello world, the model answers the user: return items.\n\n    What is the question? 한국어 좋아"
    spelling = SPELLINGS[name]
    retelling = Retelling(spelling, [])
    for letter in text:
        retelling.add(letter)
    assert retelling.ids == spelling.ids_of(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["hello world, ", "한국어", "x", "\n", "e\u0301"])
def test_only_a_short_tail_is_told_anew_however_long_the_text(name, text, monkeypatch):
    spelling, lengths = SPELLINGS[name], []
    usual = spelling.ids_of
    monkeypatch.setattr(spelling, "ids_of", lambda piece: lengths.append(len(piece.encode())) or usual(piece))
    retelling, times = Retelling(spelling, []), 3000 // len(text.encode())
    for _ in range(times):
        retelling.add(text)
    assert len(lengths) == times
    assert max(lengths) <= LONGEST_TAIL + len(text.encode())
    assert name == "composed bytes" or said(spelling, retelling.ids) == (text * times).encode()


def test_a_token_that_ends_the_answer_is_never_spelled():
    tokenizer = TOKENIZERS["bytes"]
    codec = Codec(tokenizer, settings=TextSettings(raw=True, stop_token=["the"]), end_ids=None, vocab_rows=500)
    spelled = Spelling(codec, "bytes").behind("", "x\nthe").ids
    assert tokenizer.convert_tokens_to_ids("the") in codec.piece_ids("x\nthe")
    assert b"".join(map(Spelling(codec, "bytes").bytes_of, spelled)) == b"x\n"
    assert not codec.special_ids.intersection(spelled)
