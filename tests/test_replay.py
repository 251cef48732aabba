"""`fly replay`: a trace shown again, without any model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Fly
from event_helpers import Block, answer, run

from fly_cli.events import Event
from fly_cli.trace import TraceWriter

RECORDED = run("====", "==x======", "==!======", first="Hi ")


@pytest.fixture
def fly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    fly = Fly(monkeypatch, capsys, tmp_path)
    yield fly
    fly.close()


def write_trace(path: Path, events: list[Event]) -> Path:
    writer = TraceWriter(path)
    for event in events:
        writer.handle(event)
    writer.close()
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "run.jsonl", RECORDED)


def test_stdout_is_the_recorded_answer(fly: Fly, trace: Path) -> None:
    outcome = fly("replay", str(trace))
    assert (outcome.code, outcome.out) == (0, answer(RECORDED) + "\n")
    (line,) = outcome.err.splitlines()
    assert line.startswith("19 tokens (length), ")


def test_a_trace_without_events_is_no_answer_and_a_note(fly: Fly, tmp_path: Path) -> None:
    outcome = fly("replay", str(write_trace(tmp_path / "empty.jsonl", [])))
    assert (outcome.code, outcome.out) == (0, "") and "holds no event" in outcome.err


def test_the_colours_are_those_of_the_run(fly: Fly, trace: Path) -> None:
    outcome = fly("replay", str(trace), "--color", "always")
    assert "\x1b[4;33md1.2 \x1b[0m" in outcome.out
    assert "\x1b[32m" in outcome.out and "\x1b[J" not in outcome.out
    assert "deferred" in outcome.err.splitlines()[0]  # the legend


def test_rejected_tokens_are_shown_when_asked_for(fly: Fly, trace: Path) -> None:
    assert "[-d2.2 d2.3 " in fly("replay", str(trace), "--color", "always", "--show-rejected").out


def test_quiet_says_nothing_and_verbose_tells_each_round(fly: Fly, trace: Path) -> None:
    assert fly("replay", str(trace), "-q").err == ""
    assert [line.split()[2] for line in fly("replay", str(trace), "-v").err.splitlines()[:-1]] == [
        "====",
        "==x======",
        "==!......",
    ]


def test_another_threshold_is_judged_up_to_the_first_difference(fly: Fly, trace: Path) -> None:
    outcome = fly("replay", str(trace), "--theta", "2")
    assert outcome.out == "Hi d0.0 d0.1 d0.2 d0.3 t0 \n"
    assert "round 1 would keep 2 drafted tokens, not 9" in outcome.err.splitlines()[-1]
    assert outcome.code == 0 and "6 tokens (diverged)" in outcome.err


def test_another_window_that_changes_nothing_gives_the_whole_text(fly: Fly, trace: Path) -> None:
    outcome = fly("replay", str(trace), "-w", "3")
    assert outcome.out == answer(RECORDED) + "\n"
    assert "the same text, in all 3 rounds" in outcome.err


def test_json_is_one_object_with_the_figures(fly: Fly, trace: Path) -> None:
    value = json.loads(fly("replay", str(trace), "--json").out)
    assert value["text"] == answer(RECORDED)
    assert (value["num_new_tokens"], value["num_deferred_tokens"], value["finish_reason"]) == (19, 1, "length")
    assert value["settings"]["decode"]["window_size"] == 6
    assert len(value["tokens"]) == 19 and "rejudged" not in value


def test_json_tells_what_other_rules_would_do(fly: Fly, trace: Path) -> None:
    value = json.loads(fly("replay", str(trace), "--json", "--theta", "2").out)
    assert value["rejudged"]["divergence"]["index"] == 1
    assert value["rejudged"]["rounds_compared"] == 1
    assert value["finish_reason"] == "diverged"


def test_the_picture_has_the_answer_in_its_colours(fly: Fly, tmp_path: Path) -> None:
    events = run(Block("==x======", texts=["see ", "[bold] ", "odd ", *["漢 "] * 5, "\x1b[2J"]), first="A\tB ")
    trace, picture = write_trace(tmp_path / "run.jsonl", events), tmp_path / "answer.svg"
    assert fly("replay", str(trace), "--svg", str(picture)).code == 0
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    for word in ("[bold]", "odd", "漢", "␛[2J", "deferred", "tokens/s"):
        assert word in text
    assert "underline" in text and "[-" not in text
    assert "url(http" not in text and "\x1b" not in text
    fly("replay", str(trace), "--svg", str(picture))
    assert picture.read_text(encoding="utf-8") == text


def test_a_picture_that_cannot_be_written_is_an_error(fly: Fly, trace: Path, tmp_path: Path) -> None:
    outcome = fly("replay", str(trace), "--svg", str(tmp_path / "missing" / "x.svg"))
    assert outcome.code == 1 and "--svg" in outcome.err


def test_a_picture_never_overwrites_the_trace(fly: Fly, trace: Path) -> None:
    recorded = trace.read_bytes()
    outcome = fly("replay", str(trace), "--svg", str(trace))
    assert outcome.code == 2 and "would overwrite" in outcome.err
    assert trace.read_bytes() == recorded


def test_a_killed_run_is_shown_as_far_as_it_got(fly: Fly, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-600])
    outcome = fly("replay", str(trace))
    assert outcome.code == 0
    assert outcome.out.startswith("Hi d0.0 ") and outcome.out.endswith("\n")
    assert "note: line 8 of the trace is cut" in outcome.err and "(interrupted)" in outcome.err


def test_several_runs_are_shown_one_after_the_other(fly: Fly, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "runs.jsonl", [*run("==", first="A "), *run("=", first="B ")])
    assert fly("replay", str(trace)).out == "A d0.0 d0.1 t0 \nB d0.0 t0 \n"
    outcome = fly("replay", str(trace), "--json")
    assert outcome.code == 2 and "2 runs" in outcome.err


def test_the_recorded_pace_is_kept_when_asked_for(fly: Fly, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    fly("replay", str(trace))
    assert pauses == []
    fly("replay", str(trace), "--speed", "2")
    assert sum(pauses) == pytest.approx((0.5 + 3 * 0.51) / 2)


def test_a_pause_is_never_longer_than_sleep_can_take(fly: Fly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    trace = write_trace(tmp_path / "slow.jsonl", run("=", prefill_seconds=1e8))
    assert fly("replay", str(trace), "--speed", "1e-300").code == 0
    assert max(pauses) == 3600


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.jsonl"],
        ["{trace}", "--theta", "nan"],
        ["{trace}", "--theta", "-1"],
        ["{trace}", "--speed", "inf"],
        ["{trace}", "-w", "-1"],
        ["{trace}", "-w", "many"],
        ["{trace}", "--color", "mauve"],
        ["{trace}", "-q", "-v"],
        [],
    ],
)
def test_bad_use_is_refused_with_a_hint(fly: Fly, trace: Path, arguments: list[str]) -> None:
    outcome = fly("replay", *[argument.format(trace=trace) for argument in arguments])
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and "\nhint: " in outcome.err


def test_no_model_library_is_imported(trace: Path) -> None:
    code = (
        "import sys; from fly_cli.cli import main; assert main(['replay', sys.argv[1]]) == 0;"
        "assert not {'torch', 'transformers', 'accelerate', 'rich.console'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer(RECORDED) + "\n"
