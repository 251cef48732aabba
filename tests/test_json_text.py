"""JSON for terminals and programs: the same values, no control character."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.json_text import json_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text('\x07\x1b\x7f\x9b\x9c\n\\"u'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("a\x9b\x1b"), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_values_come_back_and_no_character_is_a_command_to_a_terminal(value, indent):
    text = json_text(value, indent)
    assert json.loads(text) == value
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_other_text_stays_readable():
    assert json_text({"é": "한글"}) == '{"é": "한글"}'


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_write_are_errors(number):
    with pytest.raises(ValueError):
        json_text([number])
