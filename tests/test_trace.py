"""Traces: events to JSON lines and back, hostile files, and judging again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from event_helpers import Block, plain, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fly_cli.errors import FlyError, TraceError
from fly_cli.events import Event, Finished, FinishReason, Round
from fly_cli.settings import DecodeSettings
from fly_cli.trace import TraceWriter, dump_line, event_to_json, read_trace, rejudge


def write_trace(path: Path, events: list[Event]) -> Path:
    writer = TraceWriter(path)
    for event in events:
        writer.handle(event)
    writer.close()
    return path


def lines_of(events: list[Event]) -> list[str]:
    stream = io.StringIO()
    writer = TraceWriter(stream)
    for event in events:
        writer.handle(event)
    return stream.getvalue().splitlines(keepends=True)


texts = st.text(st.characters(), max_size=6)  # lone surrogates, controls and line separators too
seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    drawing = draw(st.text("=x!", max_size=9))
    return Block(
        drawing,
        texts=[draw(texts) for _ in drawing],
        final=draw(texts),
        held=draw(st.integers(0, 3)),
        draft_seconds=draw(seconds),
        verify_seconds=draw(seconds),
        notes=tuple(draw(st.lists(texts, max_size=2))),
    )


@given(st.lists(blocks(), max_size=4), texts, st.sampled_from([None, *FinishReason]))
@settings(max_examples=60, deadline=None)
def test_a_trace_gives_back_the_events_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[Block], first: str, reason: FinishReason | None
) -> None:
    events = run(*made, first=first, reason=reason, settings=DecodeSettings(window_size=2, seed=0))
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    write_trace(path, events)
    again = read_trace(path)
    assert list(again.events) == events
    assert write_trace(path, list(again.events)).read_bytes().decode("ascii") == "".join(lines_of(events))


def test_the_first_line_names_the_kind_and_the_version() -> None:
    assert json.loads(lines_of(run())[0]) == {"kind": "fly-trace", "version": 1}


def test_each_event_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)
    assert path.read_bytes().count(b"\n") == 1
    for number, event in enumerate(run("=="), start=2):
        writer.handle(event)
        assert path.read_bytes().count(b"\n") == number
    writer.close()


def test_a_trace_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened") as caught:
        TraceWriter(tmp_path / "missing" / "run.jsonl")
    assert "--trace" in caught.value.hint


def test_a_full_disk_is_an_error_the_user_can_act_on() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(FlyError, match="No space left on device"):
        TraceWriter(Full())


def test_numbers_that_are_no_json_are_not_written() -> None:
    with pytest.raises(ValueError):
        dump_line({"value": float("nan")})


def test_a_file_may_hold_several_runs(tmp_path: Path) -> None:
    first, second = run("==", prompt_id="one"), run("!", "=", prompt_id="two", reason=None)
    path = write_trace(tmp_path / "runs.jsonl", first + second + first)
    assert [list(events) for events in read_trace(path).runs()] == [first, second, first]


def test_a_byte_order_mark_blank_lines_and_crlf_do_no_harm(tmp_path: Path) -> None:
    events = run("==")
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(line.strip() for line in lines_of(events)).encode() + b"\r\n\r\n")
    assert list(read_trace(path).events) == events


@pytest.mark.parametrize("keep", range(1, 40, 7))
def test_a_last_line_that_was_cut_is_left_out_with_a_note(tmp_path: Path, keep: int) -> None:
    lines = lines_of(run("==", "="))
    path = tmp_path / "killed.jsonl"
    path.write_text("".join(lines[:-2]) + lines[-2][:-keep])
    trace = read_trace(path)
    assert len(trace.events) == len(lines) - (2 if keep == 1 else 3)
    assert any("cut" in note for note in trace.notes) == (keep > 1)
    assert any("interrupted" in note for note in trace.notes)


def test_a_bad_line_that_was_not_cut_is_an_error_with_its_place(tmp_path: Path) -> None:
    lines = lines_of(run("=="))
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(lines[:2]) + "{\n" + "".join(lines[2:]))
    with pytest.raises(TraceError, match=r"bad\.jsonl:3: not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"[]\n",
        b"{}\n",
        b"\x00\x01\xff\xfe" * 5000,
        b"[" * 100_000,
        b'{"kind": "fly-trace"}\n',
        b'{"kind": "fly-trace", "version": true}\n',
        b'{"kind": "fly-trace", "version": 2}\n',
        b'{"kind": "fly-trace", "version": {"a": [1e999]}}\n',
    ],
)
def test_another_file_is_refused_by_its_first_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"other\.jsonl:1: ") as caught:
        read_trace(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "nul\0.jsonl"])
def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(f"{tmp_path}/{name}")


def test_a_trace_without_events_says_so(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "empty.jsonl", []))
    assert trace.events == () and "no event" in trace.notes[0]


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("unknown key `surprise`", lambda row: row.update(surprise=1)),
    ("`verdict` is missing", lambda row: row.pop("verdict")),
    ("unknown key `evidence.more`", lambda row: row["evidence"].update(more=1)),
    ("`evidence` is not an object", lambda row: row.update(evidence=[])),
    ("`evidence.entropies` is not a list", lambda row: row["evidence"].update(entropies={})),
    ("rows", lambda row: row["evidence"].update(entropies=[])),
    ("`held` is '1'", lambda row: row.update(held="1")),
    ("`held` is True", lambda row: row.update(held=True)),
    ("`held` is out of range", lambda row: row.update(held=-1)),
    ("`index` is out of range", lambda row: row.update(index=10**30)),
    ("`draft_seconds` is out of range", lambda row: row.update(draft_seconds=10**400)),
    ("`draft_seconds` is out of range", lambda row: row.update(draft_seconds=-1.0)),
    ("`draft_seconds` is None", lambda row: row.update(draft_seconds=None)),
    ("`tokens.origin` is 'martian'", lambda row: row["tokens"][0].update(origin="martian")),
    ("`tokens.origin` is {}", lambda row: row["tokens"][0].update(origin={})),
    ("`tokens` are not what the verdict keeps", lambda row: row["tokens"][0].update(id=5)),
    ("`tokens` are not what the verdict keeps", lambda row: row.update(tokens=[])),
    ("`verdict` keeps 4 of 2", lambda row: row["verdict"].update(origins=["exact"] * 4)),
    ("`evidence.draft_ids` are not", lambda row: row["evidence"].update(draft_ids=[5, 6])),
    ("does not fit", lambda row: row.update(index=3)),
    ("does not fit", lambda row: row["drafted"][0].update(text="other")),
    ("not one of started", lambda row: row.update(event="exploded")),
    ("not one of started", lambda row: row.update(event=[1])),
]


@pytest.mark.parametrize(("reason", "spoil"), HOSTILE, ids=[f"{at} {reason}" for at, (reason, _) in enumerate(HOSTILE)])
def test_a_spoilt_round_is_refused_with_a_reason(
    tmp_path: Path, reason: str, spoil: Callable[[dict[str, Any]], object]
) -> None:
    events = run("==")
    row = event_to_json(events[2])
    row = json.loads(json.dumps(row))
    spoil(row)
    lines = lines_of(events)
    path = tmp_path / "spoilt.jsonl"
    path.write_text("".join([*lines[:3], json.dumps(row) + "\n", *lines[4:]]))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "spoilt.jsonl:4: " in caught.value.message and reason in caught.value.message


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "3",
        '"text"',
        "NaN",
        '{"event": "round", "held": NaN}',
        "[" * 100_000,
        "1" * 10_000,
        "{",
        "\\",
        "\x1b[2J",
    ],
)
def test_a_hostile_line_never_escapes_as_another_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_text(lines_of([])[0] + line + "\n")
    with pytest.raises(TraceError, match=r"hostile\.jsonl:2: ") as caught:
        read_trace(path)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("order", [[1], [3], [0, 2], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], [0, 1, 2, 3, 1]])
def test_events_out_of_order_are_refused(tmp_path: Path, order: list[int]) -> None:
    events = run("==")
    with pytest.raises(TraceError, match="does not fit"):
        read_trace(write_trace(tmp_path / "order.jsonl", [events[at] for at in order]))


# Judging again

OPEN_AND_SHUT = ["==x======", "==!======", "===="]  # kept 9, 2, 4


def test_the_recorded_rules_give_the_recorded_run() -> None:
    events = run(*OPEN_AND_SHUT)
    other = rejudge(events)
    assert list(other.events) == events
    assert (other.rounds_compared, other.num_rounds, other.divergence) == (3, 3, None)
    assert "the same text" in other.describe()


def test_a_higher_threshold_diverges_where_a_token_was_deferred() -> None:
    events = run("====", *OPEN_AND_SHUT)
    other = rejudge(events, entropy_threshold=2.0)
    assert other.divergence is not None
    assert (other.divergence.index, other.divergence.recorded.num_kept, other.divergence.other.num_kept) == (1, 9, 2)
    assert (other.rounds_compared, other.tokens_compared) == (1, 5)
    assert list(other.events) == events[:3]  # up to the round, its `Drafted` not included
    assert "round 1 would keep 2 drafted tokens, not 9" in other.describe()


def test_a_lower_threshold_diverges_where_the_gate_was_shut() -> None:
    other = rejudge(run(*OPEN_AND_SHUT), entropy_threshold=0.0)
    assert other.divergence is not None and other.divergence.index == 1
    assert other.divergence.other.num_kept == 9


def test_a_smaller_window_keeps_what_had_too_few_followers() -> None:
    other = rejudge(run("===", "x=="), window_size=2)
    assert other.divergence is not None
    assert (other.divergence.index, other.divergence.other.num_kept) == (1, 3)


def test_another_reason_for_the_same_tokens_is_no_divergence() -> None:
    events = run("=x=!=")  # no window for x; by a window of 1 it is kept
    assert rejudge(events, window_size=9, entropy_threshold=5.0).divergence is None
    assert rejudge(events, window_size=1).divergence is not None


def test_a_block_that_was_cut_before_the_difference_is_the_same() -> None:
    events = run(Block("==x======", cut=2), reason=FinishReason.STOP)
    other = rejudge(events, entropy_threshold=2.0)
    assert other.divergence is None and isinstance(other.events[-1], Finished)


def test_strict_first_may_be_changed_too() -> None:
    other = rejudge(run("x======"), strict_first=0, entropy_threshold=None)
    assert other.divergence is not None and other.divergence.other.num_kept == 7


def test_an_entropy_that_was_not_measured_ends_the_comparison() -> None:
    events = run("====", "x======", settings=DecodeSettings(mode="exact", seed=0))
    round_ = events[4]
    assert isinstance(round_, Round)
    evidence = round_.evidence
    object.__setattr__(evidence, "entropies", (None,) * 7)
    other = rejudge(events, entropy_threshold=0.1)
    assert (other.unmeasured, other.rounds_compared) == (1, 1)
    assert "lacks an entropy" in other.describe()


def test_plain_decoding_is_the_same_by_any_rules() -> None:
    assert rejudge(plain(["a", "b"]), entropy_threshold=0.1).divergence is None


@pytest.mark.parametrize("hostile", [{"window_size": None}, {"window_size": "6"}, {"entropy_threshold": "high"}])
def test_settings_that_do_not_say_the_rules_are_refused(hostile: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="by which rules"):
        rejudge(run("==", extra_settings=hostile))
