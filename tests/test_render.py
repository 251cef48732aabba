"""What is written where: pipes byte for byte, terminals in colours, each line once."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pyte
import pytest
from event_helpers import Block, answer, plain, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_cli.commentary import Commentary, draw_walk, format_closing_line, format_round
from fly_cli.events import Drafted, Event, FinishReason, Origin, Round
from fly_cli.graphemes import LINE_START, Span, clusters, visible
from fly_cli.render import PlainRenderer, TerminalRenderer, make_renderer
from fly_cli.settings import DecodeSettings
from fly_cli.stats import summarize
from fly_cli.theme import DRAFTED, LEGEND, NO_ESCAPES, REJECTED, THEME, ColorPolicy, codes, decide_color, format_legend

LIVE = ColorPolicy(color=True, cues=True, live=True)
COLORED = ColorPolicy(color=True, cues=True, live=False)
NO_COLORS = ColorPolicy(color=False, cues=True, live=True)


class Screen(pyte.HistoryScreen):
    """A terminal's screen that keeps each line that leaves it at the top, on resizing as well."""

    def erase_in_display(self, how: int = 0, *args: Any, **more: Any) -> None:
        """As terminals do it, also with what lies outside since the screen became smaller."""
        super().erase_in_display(how, *args, **more)
        if how == 0:
            line = self.buffer[self.cursor.y]
            for x in [x for x in line if x >= self.cursor.x]:
                del line[x]

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        lines = lines or self.lines
        while self.cursor.y >= lines:
            self.history.top.append(self.buffer[0])
            for y in range(self.lines):
                self.buffer[y] = self.buffer[y + 1]
            self.cursor.y -= 1
        for y in [y for y in self.buffer if y >= lines]:
            del self.buffer[y]
        self.lines, self.columns = lines, columns or self.columns


class Terminal(io.StringIO):
    """A stream that a terminal emulator reads, as a tty would pass it on."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__()
        self.screen = Screen(columns, rows, history=100_000, ratio=0.5)
        self._emulator = pyte.Stream(self.screen)
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        # The emulator loses the rest of a write behind these two; terminals that cannot join ignore them.
        self._emulator.feed(text.replace("\n", "\r\n").replace("\u200d", "").replace("\ufe0f", ""))
        return len(text)

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    @property
    def raw(self) -> str:
        return "".join(self.writes)

    def rows(self) -> list[str]:
        """All rows from the first, those that scrolled away too, without the blank ones at the end."""
        lines = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]
        rows = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in lines]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def characters(self) -> Iterator[str]:
        """All that can be seen, from the first row on, also what a narrower terminal no longer shows."""
        for line in [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]:
            yield from (line[x].data for x in sorted(line) if line[x].data.strip())

    def looks(self, text: str) -> tuple[str, bool, bool, bool]:
        """Colour, underline, strike and bold of the first place on the screen that shows the text."""
        for y, row in enumerate(self.screen.display):
            if text in row:
                char = self.screen.buffer[y][row.index(text)]
                return char.fg, char.underscore, char.strikethrough, char.bold
        raise AssertionError(f"{text!r} is not on the screen: {self.rows()}")


def renderer(terminal: Terminal, policy: ColorPolicy = LIVE, **more: Any) -> TerminalRenderer:
    return TerminalRenderer(terminal, policy, size=terminal.size, **more)


def show(events: Iterable[Event], terminal: Terminal, policy: ColorPolicy = LIVE, **more: Any) -> Terminal:
    sink = renderer(terminal, policy, **more)
    for event in events:
        sink.handle(event)
    sink.close()
    return terminal


def wrapped(text: str, columns: int) -> list[str]:
    """The rows that a terminal of this width shows for the text, written at once."""
    terminal = Terminal(columns)
    terminal.write("".join(visible(cluster) for cluster in clusters(text)))
    return terminal.rows()


def piped(events: Iterable[Event]) -> str:
    stream = io.StringIO()
    sink = PlainRenderer(stream)
    for event in events:
        sink.handle(event)
    sink.close()
    return stream.getvalue()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|.)", "", text)


# Pipes


def test_a_pipe_gets_the_answer_and_one_final_newline() -> None:
    assert piped(run("==", "!", first="Hi ")) == "Hi d0.0 d0.1 t0 t1 \n"
    assert piped(plain(["a", "\n"])) == "a\n"
    assert piped(plain(["a", "\n", "\n"])) == "a\n\n"
    assert piped(plain([""])) == "\n"


def test_nothing_is_written_for_a_run_that_never_started() -> None:
    assert piped([]) == ""
    assert show([], Terminal()).raw == ""


def test_a_pipe_gets_markup_wide_lines_and_controls_as_they_are() -> None:
    text = "x = a[bold] + b[i] [/x] \\[red] v 42 http://a.b \t\x1b[2J\x07\r\n" + "y" * 400
    assert piped(plain([text])) == text + "\n"


def test_each_round_reaches_a_pipe_at_once() -> None:
    stream = io.StringIO()
    sink = PlainRenderer(stream)
    seen = []
    for event in run("==", "=", first="A "):
        sink.handle(event)
        seen.append(stream.getvalue())
    assert seen == ["A ", "A ", "A d0.0 d0.1 t0 ", "A d0.0 d0.1 t0 ", "A d0.0 d0.1 t0 d1.0 t1 ", seen[-1]]


def test_text_that_may_become_a_stop_string_is_held_back_and_cut() -> None:
    events = plain(["AB", "CD", "EF"], stop="BCDE", reason=FinishReason.STOP)
    held = [1, 3, 5]  # the last one covers the stop string and what follows it
    for event, count in zip([events[0], events[2], events[4]], held, strict=True):
        object.__setattr__(event, "held", count)
    stream = io.StringIO()
    sink = PlainRenderer(stream)
    for event in events:
        sink.handle(event)
        assert stream.getvalue() == "A"
    sink.close()
    assert stream.getvalue() == "A\n"
    assert show(events, Terminal()).rows() == ["A"]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, None])
def test_held_text_that_became_no_stop_string_is_printed(reason: FinishReason | None) -> None:
    events = plain(["ple", "as"], held=0, reason=reason)
    object.__setattr__(events[2], "held", 2)
    assert piped(events) == "pleas\n"
    assert show(events, Terminal()).rows() == ["pleas"]


def test_incomplete_bytes_at_the_very_end_are_shown() -> None:
    assert piped(plain(["a", ""], tail="\ufffd")) == "a\ufffd\n"
    assert show(plain(["a", ""], tail="\ufffd"), Terminal()).rows() == ["a\ufffd"]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
def test_text_that_the_stream_cannot_encode_is_replaced(encoding: str) -> None:
    events = run(Block("=!", texts=["\ud800", "x"], final="→ 😀"), first="é")
    for policy in (None, LIVE, COLORED, NO_ESCAPES):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        sink = PlainRenderer(stream) if policy is None else TerminalRenderer(stream, policy, show_rejected=True)
        for event in events:
            sink.handle(event)
        sink.close()
        assert raw.getvalue().endswith(b"\n")
        if encoding == "utf-8":
            assert "→ 😀" in re.sub(r"\x1b(\[.*?[A-Za-z]|.)|(?<=→ )→ ", "", raw.getvalue().decode())


def test_only_a_pipe_without_colours_is_plain() -> None:
    assert isinstance(make_renderer(io.StringIO(), NO_ESCAPES), PlainRenderer)
    assert isinstance(make_renderer(io.StringIO(), COLORED), TerminalRenderer)
    assert isinstance(make_renderer(Terminal(), NO_ESCAPES), TerminalRenderer)


def test_a_coloured_pipe_gets_colours_but_no_cursor_movement() -> None:
    stream = io.StringIO()
    events = run("==x======!=", first="Hi\x07 ")
    sink = make_renderer(stream, COLORED)
    for event in events:
        sink.handle(event)
    sink.close()
    assert set(re.findall(r"\x1b(.[^m]*.)", stream.getvalue())) == {"[32m", "[4;33m", "[1;35m", "[0m"}
    assert without_codes(stream.getvalue()) == answer(events) + "\n"


# Colour policy


@pytest.mark.parametrize(
    ("flag", "is_tty", "environ", "expected"),
    [
        ("auto", True, {}, LIVE),
        ("auto", True, {"TERM": "xterm", "NO_COLOR": ""}, LIVE),
        ("auto", True, {"NO_COLOR": "1"}, NO_COLORS),
        ("auto", True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, NO_COLORS),
        ("auto", True, {"TERM": "dumb"}, NO_ESCAPES),
        ("auto", True, {"TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": "1"}, NO_ESCAPES),
        ("auto", True, {"TERM": "dumb", "FORCE_COLOR": "0"}, NO_ESCAPES),
        ("auto", True, {"TERM": "dumb", "FORCE_COLOR": "1"}, COLORED),
        ("auto", False, {}, NO_ESCAPES),
        ("auto", False, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "CLICOLOR_FORCE": "1"}, NO_ESCAPES),
        ("always", False, {"NO_COLOR": "1"}, COLORED),
        ("always", True, {"NO_COLOR": "1"}, LIVE),
        ("always", True, {"TERM": "dumb"}, COLORED),
        ("never", True, {"FORCE_COLOR": "1"}, NO_ESCAPES),
        ("never", False, {"FORCE_COLOR": "1"}, NO_ESCAPES),
    ],
)
def test_the_flag_wins_and_a_pipe_stays_plain(
    flag: str, is_tty: bool, environ: dict[str, str], expected: ColorPolicy
) -> None:
    assert decide_color(flag, is_tty, environ) == expected


def test_every_role_has_a_style_and_a_legend_word() -> None:
    assert set(THEME) == set(LEGEND) == {*Origin, DRAFTED, REJECTED}
    assert all(LEGEND.values())
    looks = [codes(role, LIVE) for role in THEME]
    assert len(set(looks)) == len(looks)


def test_what_is_not_the_targets_first_choice_differs_without_colour_too() -> None:
    looks = {role: codes(role, NO_COLORS)[0] for role in THEME}
    assert looks[Origin.EXACT] == looks[Origin.BONUS] == looks[Origin.TARGET] == ""
    assert len({looks[Origin.DEFERRED], looks[Origin.CORRECTED], looks[DRAFTED], looks[REJECTED], ""}) == 5
    assert not any(re.search(r"3[0-9]", look) for look in looks.values())


def test_the_legend_shows_each_role_in_its_style() -> None:
    legend = format_legend(LIVE)
    for role in LEGEND:
        before, after = codes(role, LIVE)
        assert f"{before}{role}{after}: {LEGEND[role]}" in legend
    assert "\n" not in legend
    assert format_legend(NO_ESCAPES) == ""


# Terminals: colours


def test_each_origin_has_its_look_on_the_screen() -> None:
    terminal = show(run("==x======!=", "==", "", first="Hi "), Terminal())
    assert terminal.looks("Hi")[:2] == ("default", False)
    assert terminal.looks("d0.0") == ("green", False, False, False)
    assert terminal.looks("d0.2") == ("brown", True, False, False)  # pyte's word for yellow
    assert terminal.looks("t0") == ("magenta", False, False, True)
    assert terminal.looks("t1") == ("cyan", False, False, False)
    assert terminal.looks("t2") == ("default", False, False, False)


def test_drafted_tokens_are_dim_then_judged_then_gone() -> None:
    terminal = Terminal()
    sink = renderer(terminal)
    started, drafted, judged, *_ = run("=!=", first="Hi ")
    sink.handle(started)
    sink.handle(drafted)
    assert terminal.rows() == ["Hi d0.0 d0.1 d0.2"]
    assert "\x1b[2md0.0 d0.1 d0.2 \x1b[0m" in terminal.writes[-1]
    sink.handle(judged)
    assert terminal.rows() == ["Hi d0.0 d0.1 d0.2 t0"]
    assert terminal.looks("d0.0")[0] == "green"
    assert terminal.looks("d0.1") == terminal.looks("d0.2") == ("red", False, True, False)
    assert terminal.looks("t0")[0] == "magenta"
    sink.handle(Drafted(1, ()))
    assert terminal.rows() == ["Hi d0.0 t0"]
    sink.close()
    assert terminal.rows() == ["Hi d0.0 t0"]


def test_without_colours_the_second_cues_stay() -> None:
    terminal = show(run("==x======!="), Terminal(), NO_COLORS)
    assert terminal.looks("d0.2") == ("default", True, False, False)
    assert terminal.looks("d0.0") == ("default", False, False, False)


def test_without_escapes_a_terminal_gets_text_alone() -> None:
    terminal = show(run("==x======!=", "=", first="Hi\x1b "), Terminal(), NO_ESCAPES, show_rejected=True)
    assert "\x1b" not in terminal.raw
    assert "Hi␛ d0.0 " in terminal.raw and "[-d0.9 d0.10 -]t0" in terminal.raw


def test_rejected_tokens_stay_in_brackets_when_asked_for() -> None:
    events = run(Block("=!=", texts=["a ", "b\n", "c"], final="X"), "=")
    terminal = show(events, Terminal(), show_rejected=True)
    assert terminal.rows() == ["First a [-b↵c-]Xd1.0 t1"]
    assert terminal.looks("[-b") == ("red", False, True, False)


def test_only_the_legends_colours_appear() -> None:
    events = run(Block("=x=!", texts=["v 42 ", "http://a.b ", "[bold]b[/bold] ", ":smile:"]), "==")
    allowed = {
        code for role in THEME for pair in [codes(role, LIVE)] for code in re.findall(r"\[[0-9;]*m", "".join(pair))
    }
    assert set(re.findall(r"\[[0-9;]*m", show(events, Terminal()).raw)) <= allowed | {"[0m"}


def test_markup_is_text() -> None:
    text = "x = a[bold] + b[i] see [/x] [\\] [red]r[/red]"
    assert show(plain([text]), Terminal()).rows() == [text]


def test_controls_from_the_model_are_shown_and_not_obeyed() -> None:
    text = "a\x1b[2J\x1b]52;c;aGk=\x07\x9b1m\x7f\x00\x08\x0b\x0c\rb"
    terminal = show(plain([text]), Terminal())
    assert terminal.rows() == ["a␛[2J␛]52;c;aGk=␇\\x9b1m␡␀␈␋␌␍b"]


def test_carriage_return_and_newline_are_one_line_end_though_tokens_split_them() -> None:
    assert show(plain(["a\r", "\nb"]), Terminal()).rows() == ["a", "b"]


@pytest.mark.parametrize("cluster", ["👩‍💻", "❤️", "🏳️‍🌈", "👍🏽", "🇩🇪", "e\u0301", "\u1112\u1161\u11ab", "각"])
def test_a_cluster_whose_tokens_differ_is_not_torn_apart(cluster: str) -> None:
    assert clusters(f"a{cluster}b") == ["a", cluster, "b"]
    blocks = [Block("=", texts=[character], final="") for character in cluster[1:]]
    blocks = [Block("!", texts=["z"], final=cluster[0]), *blocks, "="]
    terminal = show(run(*blocks, first="a"), Terminal())
    color = "magenta" if len(cluster) == 1 else "green"
    assert re.search(rf"\x1b\[[0-9;]*m{cluster}", terminal.raw)
    assert codes(Origin.EXACT if color == "green" else Origin.CORRECTED, LIVE)[0] + cluster in terminal.raw


def test_clusters_joined_are_the_text() -> None:
    text = "한국어 ﷽ 😀 👩‍💻\r\n\r\u0301a\u0301\u0302\ud800\u0301🇩🇪🇫🇷"
    assert "".join(clusters(text)) == text
    assert clusters("🇩🇪🇫🇷") == ["🇩🇪", "🇫🇷"]
    assert clusters("\n\u0301") == ["\n", "\u0301"]


@pytest.mark.parametrize(("cluster", "shown"), [("\x1b", "\\x1b"), ("\x7f", "\\x7f"), ("\ud800", "?"), ("a", "a")])
def test_controls_have_an_ascii_form(cluster: str, shown: str) -> None:
    assert visible(cluster, unicode=False) == shown


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("abc", (3, 3)),
        ("漢字", (4, 4)),
        ("한e\u0301", (3, 3)),
        ("👩\u200d💻", (2, 4)),
        ("❤\ufe0f", (1, 2)),
        ("a\tb", (9, 9)),
        ("x\ny", (1, 1)),
        ("123456789" + "漢", (10, 12)),  # the wide character may be cut off, or leave the row's last cell empty
        ("1234567890\t", (9, 10)),
    ],
)
def test_the_cursor_is_known_as_far_as_terminals_agree(text: str, cells: tuple[int, int]) -> None:
    span = LINE_START
    for cluster in clusters(text):
        span = span.after(cluster, 10)
    assert span == cells


@pytest.mark.parametrize(("span", "full"), [((0, 0), False), ((9, 9), False), ((10, 10), True), ((9, 12), True)])
def test_a_row_may_be_full_where_any_terminal_would_have_filled_it(span: tuple[int, int], full: bool) -> None:
    assert Span(*span).may_fill_row(10) is full


def test_nothing_is_drawn_ahead_where_terminals_disagree_too_much() -> None:
    terminal = Terminal(20)
    events = run(Block("=", texts=["👩\u200d💻" * 4]), Block("=", texts=["here\n"]), "=", first="A ")
    sink = renderer(terminal)
    drawn = []
    for event in events:
        sink.handle(event)
        if isinstance(event, Drafted):
            drawn.append("\x1b[2m" in terminal.writes[-1])
    assert drawn == [True, False, True]


# Terminals: every line once

WORDS = [
    "word ",
    "a",
    "\n",
    "\t",
    "漢字",
    "한",
    "x" * 9,
    "é",
    "y" * 30,
    "😀",
    "\n\n",
    "",
    " ",
    "👩\u200d💻",
    "❤\ufe0f",
    "\r",
    "\x1b",
]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("==x!"), st.sampled_from(WORDS)), min_size=1, max_size=9), max_size=9),
    st.integers(2, 40),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_a_live_terminal_shows_what_one_write_would_show(
    rounds: list[list[tuple[str, str]]], columns: int, rows: int
) -> None:
    blocks = [
        Block("".join(mark for mark, _ in block[1:]), texts=[word for _, word in block[1:]], final=block[0][1])
        for block in rounds
    ]
    events = run(*blocks, first="A", settings=DecodeSettings(window_size=1, seed=0))
    terminal = show(events, Terminal(columns, rows))
    assert terminal.rows() == wrapped(answer(events), columns)
    assert not terminal.screen.cursor.hidden


@pytest.mark.parametrize("columns", [20, 21, 80])
@pytest.mark.parametrize("policy", [LIVE, NO_COLORS, COLORED, NO_ESCAPES])
def test_a_long_answer_scrolls_with_every_line_once(columns: int, policy: ColorPolicy) -> None:
    blocks = [Block("===!==", texts=[f"line {n} of", " a long", f" answer {n}\n", "no\n", "x" * 99, "\n" * 9],
                    final=f"and {n}\n") for n in range(100)]  # fmt: skip
    events = run(*blocks, first="")
    terminal = show(events, Terminal(columns, 24), policy)
    assert terminal.rows() == wrapped(answer(events), columns)


def test_the_newest_line_is_visible_while_streaming() -> None:
    terminal = Terminal(40, 6)
    sink = renderer(terminal)
    for event in run(*[Block("==!", texts=["ab\n", f"n{n}", "\n" * 9], final=f" end {n}") for n in range(30)]):
        sink.handle(event)
        if isinstance(event, Round):
            assert any(f"n{event.index}" in row for row in terminal.screen.display)


def test_a_line_that_fills_the_row_is_followed_by_no_empty_row() -> None:
    events = run(Block("==", texts=["x" * 15, "\nnext"]), Block("=", texts=["\n"]), first="12345")
    assert show(events, Terminal(20)).rows() == ["12345" + "x" * 15, "nextt0 ".rstrip(), "t1"]


def test_a_preview_taller_than_the_screen_is_cut() -> None:
    terminal = Terminal(20, 5)
    sink = renderer(terminal)
    started, drafted, *rest = run(Block("=" * 9, texts=[f"row {n}\n" for n in range(9)]), first="top\n")
    sink.handle(started)
    sink.handle(drafted)
    assert terminal.rows()[-1] == "row 2…" and len(terminal.screen.history.top) == 0
    for event in rest:
        sink.handle(event)
    sink.close()
    assert terminal.rows() == ["top", *[f"row {n}" for n in range(9)], "t0"]


@pytest.mark.parametrize("resized", [(80, 10), (40, 24), (120, 40), (30, 8)])
def test_a_resize_half_way_loses_and_doubles_no_line(resized: tuple[int, int]) -> None:
    events = run(*[Block("==!=", texts=[f"line {n}", "\n", "rejected ", "x"], final=f"{n} more\n") for n in range(100)])
    terminal = Terminal(80, 24)
    sink = renderer(terminal)
    for at, event in enumerate(events):
        if at == len(events) // 2:
            terminal.screen.resize(columns=resized[0], lines=resized[1])
        sink.handle(event)
    sink.close()
    assert terminal.rows() == answer(events).splitlines()


SIZES = st.tuples(st.one_of(st.integers(1, 12), st.integers(1, 500)), st.one_of(st.integers(1, 4), st.integers(1, 200)))
PRINTED = st.sampled_from(["word", "a", "\n", "\n\n", "x" * 9, "y" * 30, "z" * 200, "line\n"])


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("==x!"), PRINTED), min_size=1, max_size=9), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 20), SIZES), min_size=1, max_size=6),
    st.sampled_from([LIVE, NO_COLORS, COLORED, NO_ESCAPES]),
)
@settings(max_examples=int(os.environ.get("TEST_EXAMPLES", "40")), deadline=None, derandomize=True)
def test_whatever_the_sizes_of_a_terminal_no_character_is_lost_or_doubled(
    rounds: list[list[tuple[str, str]]], sizes: list[tuple[int, tuple[int, int]]], policy: ColorPolicy
) -> None:
    blocks = [
        Block("".join(mark for mark, _ in block[1:]), texts=[word for _, word in block[1:]], final=block[0][1])
        for block in rounds
    ]
    events = run(*blocks, first="A", settings=DecodeSettings(window_size=1, seed=0))
    terminal = Terminal(*sizes[0][1])
    sink = renderer(terminal, policy)
    for number, event in enumerate(events):
        for at, (columns, lines) in sizes[1:]:
            if at == number:
                terminal.screen.resize(columns=columns, lines=lines)
        sink.handle(event)
    sink.close()
    assert "".join(terminal.characters()) == "".join(answer(events).split())
    assert not terminal.screen.cursor.hidden


def test_nothing_is_drawn_ahead_after_a_resize_until_the_line_ends() -> None:
    terminal = Terminal()
    sink = renderer(terminal)
    events = run(Block("=", texts=["on "]), Block("=", texts=["here\n"]), "=", first="A ")
    drawn = []
    for event in events:
        sink.handle(event)
        terminal.screen.resize(columns=50)
        if isinstance(event, Drafted):
            drawn.append("\x1b[2m" in terminal.writes[-1])
    assert drawn == [False, False, True]


def test_a_preview_waits_while_text_is_held_back() -> None:
    terminal = Terminal()
    sink = renderer(terminal)
    started, drafted, *_ = run("==", first="Human", held=3)
    sink.handle(started)
    sink.handle(drafted)
    assert terminal.rows() == ["Hu"]


def test_an_echoed_ctrl_c_is_written_over() -> None:
    terminal = Terminal()
    sink = renderer(terminal)
    for event in run("==", reason=None):
        sink.handle(event)
    terminal.write("^C")
    sink.close()
    assert terminal.rows() == ["First d0.0 d0.1 t0"]


@pytest.mark.parametrize("count", range(6))
def test_an_interrupted_run_keeps_its_text_and_leaves_the_terminal_clean(count: int) -> None:
    terminal = Terminal()
    sink = renderer(terminal)
    events = run("=!=", "==", first="Hi ")
    for event in events[:count]:
        sink.handle(event)
    sink.close()
    sink.close()
    text = ["", "Hi", "Hi", "Hi d0.0 t0", "Hi d0.0 t0", "Hi d0.0 t0 d1.0 d1.1 t1"][count]
    assert terminal.rows() == ([text] if text else [])
    if count:
        assert terminal.raw.endswith("\x1b[0m\n")
        assert terminal.screen.cursor.x == 0
    assert "?25l" not in terminal.raw


def test_the_cost_of_a_token_does_not_grow() -> None:
    terminal = io.StringIO()
    sink = TerminalRenderer(terminal, LIVE, size=lambda: (80, 24))
    texts = ["some ", "words ", "follow ", "each ", "other", "\n", "here ", "no "]
    events = run(*[Block("=======!", texts=texts) for _ in range(2500)])
    times = []
    for part in (events[:500], events[500:-500], events[-500:]):
        began = time.perf_counter()
        for event in part:
            sink.handle(event)
        times.append(time.perf_counter() - began)
    assert times[2] < 2 * times[0] + 0.05
    assert sum(times) < 8.0  # 20,000 tokens, which a real run takes minutes for


def test_a_long_line_costs_no_more_than_short_ones() -> None:
    sizes = []
    terminal = Terminal(80, 24)
    sink = renderer(terminal)
    for event in run(*[Block("===", texts=["no ", "line ", "end "]) for _ in range(300)]):
        sink.handle(event)
        sizes.append(len(terminal.writes[-1]))
    assert max(sizes[-100:]) <= max(sizes[:100]) + 20
    assert all(later - sooner < 200 for sooner, later in pairwise(sizes))


# The talk


def test_the_closing_line_tells_tokens_speed_acceptance_and_times() -> None:
    block = Block("==x======!=", draft_seconds=0.6, verify_seconds=0.3, other_seconds=0.1)
    summary = summarize(run(block, block, prefill_seconds=0.5))
    assert format_closing_line(summary) == (
        "21 tokens (length), 10.0 tokens/s, 10.00 tokens a round, 2 deferred, first token after 0.50 s, "
        "draft 60%, verify 30%, rest 10%"
    )
    assert format_closing_line(summarize(run(reason=None))).startswith("1 token (interrupted), first token after")
    assert format_closing_line(summarize([])) == "0 tokens (interrupted)"


@pytest.mark.parametrize(
    ("block", "walk", "told"),
    [
        (Block("==x======!=xx"), "==x======!...", "drafted 13, kept 9 (8 exact, 1 deferred), rejected: confident"),
        (Block("==="), "===", "drafted 3, kept 3 (3 exact, 0 deferred), 0.30 s draft + 0.20 s verify"),
        (Block("x"), "!", "drafted 1, kept 0 (0 exact, 0 deferred), rejected: first tokens"),
        (Block(""), "", "round 0: nothing drafted, 0.30 s draft"),
        (Block("=====", cut=2), "=====", "kept 5 (5 exact, 0 deferred), cut to 2 tokens"),
    ],
)
def test_a_round_is_told_in_one_line(block: Block, walk: str, told: str) -> None:
    event = run(block)[2]
    assert isinstance(event, Round)
    assert draw_walk(event) == walk
    line = format_round(event)
    assert line.startswith("round 0: ") and told in line and walk in line and "\n" not in line


def test_the_talk_is_legend_notes_rounds_and_the_closing_line() -> None:
    stream = io.StringIO()
    commentary = Commentary(stream, COLORED, verbose=True)
    for event in run(Block("=!", notes=("a note\x1b",)), notes=("first",)):
        commentary.handle(event)
    commentary.close()
    legend, first, round_, note, closing = stream.getvalue().splitlines()
    assert "deferred" in legend and "\x1b[" in legend
    assert (first, note) == ("note: first", "note: a note␛")
    assert round_.startswith("round 0: =!") and "tokens/s" in closing


def test_talk_about_rounds_waits_for_the_answer_on_the_same_terminal() -> None:
    stream = io.StringIO()
    commentary = Commentary(stream, NO_ESCAPES, verbose=True, delay=True)
    for event in run("==", "="):
        commentary.handle(event)
    assert stream.getvalue() == ""
    commentary.close()
    assert len(stream.getvalue().splitlines()) == 3


@pytest.mark.parametrize(
    ("mode", "named"),
    [("fly", set(Origin)), ("exact", set(Origin) - {Origin.DEFERRED}), ("target", set())],
)
def test_the_legend_names_what_the_mode_can_show(mode: str, named: set[Origin]) -> None:
    stream = io.StringIO()
    Commentary(stream, COLORED).handle(run(settings=DecodeSettings(mode=mode, seed=0))[0])
    legend = without_codes(stream.getvalue())
    assert {origin for origin in Origin if f"{origin}: {LEGEND[origin]}" in legend} == named
