"""What is said on a terminal breaks between words; a pipe gets whole lines."""

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.streams import MIN_FOLDED_COLUMNS, fold, write_line

CLOSING = "48 tokens (length), 14.6 tokens/s, 7.83 tokens a round, 0 deferred, first token after 1.30 s, draft 41%"
WORDS = st.lists(st.text("ab-/.%", min_size=1, max_size=60), min_size=1, max_size=30)


@given(WORDS, st.integers(MIN_FOLDED_COLUMNS, 120))
def test_a_folded_line_has_all_words_whole_and_only_a_longer_word_goes_over_the_edge(
    words: list[str], columns: int
) -> None:
    rows = fold(" ".join(words), columns).split("\n")
    assert [word for row in rows for word in row.split(" ")] == words
    assert all(len(row) <= columns or " " not in row for row in rows)


@given(WORDS, st.integers(1, MIN_FOLDED_COLUMNS - 1))
def test_a_narrow_terminal_breaks_lines_itself(words: list[str], columns: int) -> None:
    assert fold(" ".join(words), columns) == " ".join(words)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_a_terminal_gets_rows_and_a_pipe_one_line() -> None:
    import termios

    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 60))
    with open(slave, "w", encoding="utf-8") as terminal:
        write_line(terminal, CLOSING)
        shown = os.read(master, 1000).decode().splitlines()
    os.close(master)
    assert " ".join(shown) == CLOSING and len(shown) == 2 and max(map(len, shown)) <= 60
    pipe = io.StringIO()
    write_line(pipe, CLOSING)
    assert pipe.getvalue() == CLOSING + "\n"
