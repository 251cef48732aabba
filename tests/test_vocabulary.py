"""What the ids of two models have in common."""

import json

import pytest
from models_for_tests import byte_tokenizer

from fly_cli.vocabulary import Match, compare_vocabularies, load_tokenizer, special_tokens

ROWS = (384, 384)


@pytest.fixture
def folders(tmp_path):
    """Two folders with the same tokenizer."""
    made = tmp_path / "target", tmp_path / "draft"
    for folder in made:
        byte_tokenizer().save_pretrained(folder)
    return made


def change(folder, edit):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def swap(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_equal_tokenizers_and_tables_are_the_same(folders):
    found = compare_vocabularies(*folders, rows=ROWS)
    assert found.kind is Match.SAME
    assert found.describe() == "their tokenizers agree, and both tables have 384 rows"


@pytest.mark.parametrize(("rows", "smaller"), [((384, 448), "target"), ((448, 384), "draft")])
def test_tables_of_another_size_are_padded_and_the_ids_that_one_lacks_are_named(folders, rows, smaller):
    found = compare_vocabularies(*folders, rows=rows)
    assert found.kind is Match.PADDED
    assert list(found.lacking) == list(range(384, 448))
    assert f"the {smaller}'s lacks the ids 384 to 447" in found.describe()


def test_a_tokenizer_that_is_only_written_otherwise_is_the_same(folders):
    change(folders[1], lambda content: content.update(truncation=None, padding=None))
    found = compare_vocabularies(*folders, rows=ROWS)
    assert found.kind is Match.SAME
    assert (found.tokens, found.num_shared_ids, found.num_shared_tokens) == ((384, 384), 384, 384)


def test_ids_that_mean_something_else_are_counted_and_the_first_are_shown(folders):
    change(folders[1], swap)
    found = compare_vocabularies(*folders, rows=ROWS)
    assert found.kind is Match.DIFFERENT
    assert (found.num_differing, found.num_shared_ids, found.num_shared_tokens) == (2, 384, 384)
    (one, mine, theirs), (other, *_) = found.differing
    assert (mine, theirs) == ("a", "b") and one < other
    assert "differ in 2 of 384 shared ids" in found.describe()


def test_only_the_first_of_many_differing_ids_are_kept(folders):
    def shift(content):
        vocabulary = content["model"]["vocab"]
        names = list(vocabulary)
        content["model"]["vocab"] = dict(zip(names, [*range(1, len(names)), 0], strict=True))

    change(folders[1], shift)
    found = compare_vocabularies(*folders, rows=ROWS)
    assert found.num_differing > 300 and len(found.differing) == 5
    assert [token_id for token_id, *_ in found.differing] == [0, 1, 2, 3, 4]


def test_special_tokens_that_differ_are_told_by_their_roles(folders):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<|im_start|>"
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(folders[1])
    target = special_tokens(load_tokenizer(folders[0]), [381, 383])
    draft = special_tokens(load_tokenizer(folders[1]), [381, 900])
    assert target.differences(target) == {}
    different = target.differences(draft)
    assert different["pad"] == ("<|endoftext|>", "<|im_start|>")
    assert different["special"] == ("-", "<extra>")
    assert different["end"][0].startswith(load_tokenizer(folders[0]).convert_ids_to_tokens(381))
    assert different["end"][1].endswith("900")  # an id without a token
    assert set(different) == {"pad", "special", "end"}
