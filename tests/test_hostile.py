"""Hostile text in every place where text is shown: nothing of it acts on a terminal, and nothing of it is lost."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import Fly
from event_helpers import Block, plain, run
from hostile_texts import IN_PATHS, MARKUP, NASTY, SHORT, acting, reordering
from rich.cells import cell_len

from fly_cli.bench_rows import failed_row
from fly_cli.cli import explain
from fly_cli.cli.bench_view import make_view
from fly_cli.cli.progress import make_progress
from fly_cli.errors import FlyError
from fly_cli.events import Event, Finished
from fly_cli.gguf_header import read_header
from fly_cli.graphemes import visible, visible_line
from fly_cli.json_text import json_text
from fly_cli.render import PlainRenderer, TerminalRenderer
from fly_cli.settings import DecodeSettings
from fly_cli.tables import format_comparison, format_table, to_markdown
from fly_cli.theme import NO_ESCAPES, THEME, ColorPolicy, codes
from fly_cli.trace import TraceWriter

LIVE = ColorPolicy(color=True, cues=True, live=True)
COLORED = ColorPolicy(color=True, cues=True, live=False)
PATIENCE = 30.0  # seconds for 100,000 characters, on a busy machine; what is quadratic takes minutes
OURS = {code for role in THEME for code in codes(role, LIVE)} - {""} | {"\x1b7", "\x1b8", "\x1b[J", "\x1bD", "\x1b[0m"}
OUR_CODES = re.compile("|".join([*map(re.escape, sorted(OURS, key=len, reverse=True)), r"\x1b\[[0-9]+A"]))

nasty = pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
short = pytest.mark.parametrize("text", SHORT.values(), ids=SHORT)
paths = pytest.mark.parametrize("text", IN_PATHS.values(), ids=IN_PATHS)


@pytest.fixture
def fly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    fly = Fly(monkeypatch, capsys, tmp_path)
    yield fly
    fly.close()


@pytest.fixture
def unscripted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    fly = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    yield fly
    fly.close()


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < PATIENCE


def drafted(text: str) -> list[Event]:
    """The text as a draft that is kept, as one that is rejected, cut in two between tokens, and as the target's own."""
    half = len(text) // 2
    blocks = [Block("==", texts=[text[:half], text[half:]], final=text), Block("=!", texts=["k", text], final="\n")]
    return run(*blocks, first="A", settings=DecodeSettings(seed=0))


# --- the answer -----------------------------------------------------------------------------------------------------


@nasty
@pytest.mark.parametrize("policy", [LIVE, COLORED, NO_ESCAPES], ids=["live", "coloured", "plain"])
def test_in_an_answer_on_a_terminal_nothing_acts(text: str, policy: ColorPolicy) -> None:
    stream = io.StringIO()
    sink = TerminalRenderer(stream, policy, show_rejected=policy is COLORED, size=lambda: (40, 10))
    for event in drafted(text):
        sink.handle(event)
    sink.close()
    shown = stream.getvalue() if policy is NO_ESCAPES else OUR_CODES.sub("", stream.getvalue())
    assert acting(shown, allowed="\n\t") == set()
    if policy is NO_ESCAPES:
        expected = "".join(event.text for event in drafted(text) if isinstance(event, Finished)).replace("\r\n", "\n")
        assert shown == "".join(map(visible, expected))


@nasty
def test_a_pipe_gets_the_answer_as_it_is(text: str) -> None:
    stream = io.StringIO()
    sink = PlainRenderer(stream)
    events = drafted(text)
    for event in events:
        sink.handle(event)
    sink.close()
    assert stream.getvalue() == events[-1].text  # type: ignore[union-attr]


def test_zero_width_tokens_behind_a_full_row_cost_no_more_than_others() -> None:
    stream = io.StringIO()
    sink = TerminalRenderer(stream, LIVE, size=lambda: (20, 10))
    times = []
    for part in (["x" * 20, *["\u200b"] * 300], ["\u200b"] * 2000, ["\u200b"] * 300):
        events = plain(["", *part])
        began = time.perf_counter()
        for event in events[2:-1] if times else events[:-1]:
            sink.handle(event)
        times.append(time.perf_counter() - began)
    assert times[2] < 3 * times[0] + 0.05


@nasty
@pytest.mark.parametrize("shape", ["--json", "--jsonl"])
def test_json_has_no_raw_controls_and_all_of_the_text(fly: Fly, text: str, shape: str) -> None:
    fly.answers(lambda prompt: plain(["A", text], stop=None, notes=(text,), prompt_id=text))
    outcome = fly("generate", shape, "-q", "--stop", text, "--system", text, "hi")
    assert outcome.code == 0 and acting(outcome.out) <= {"\u202d", "\u202e"} and outcome.out.count("\n") == 1
    value = json.loads(outcome.out)
    assert value["text"] == "A" + text and value["notes"] == [text]


# --- what is said about it ------------------------------------------------------------------------------------------


@nasty
def test_notes_and_errors_are_one_harmless_line_each(fly: Fly, text: str) -> None:
    fly.answers(lambda prompt: plain(["A", "B"], notes=(text, text)))
    outcome = fly("generate", "hi")
    notes = outcome.err.splitlines()
    assert notes[:2] == [f"note: {visible_line(text)}"] * 2 and len(notes) == 3 and not reordering(notes[0])

    def failing(prompt: object) -> Iterator[Event]:
        yield from plain(["A"], reason=None)
        raise FlyError(text, hint=text)

    fly.answers(failing)
    lines = fly("generate", "-q", "hi").err.splitlines()
    assert lines == [f"error: {visible_line(text)}", "", f"hint: {visible_line(text)}"]


@nasty
def test_a_message_of_a_library_in_a_traceback_does_not_act(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert explain(RuntimeError(text)) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: " in err and not acting(err, allowed="\n\t")


@short
@pytest.mark.parametrize("flag", ["--mode", "--config", "--target", "--stop-token", "--device-map", "--nope", "-f"])
def test_what_was_typed_wrong_is_told_harmlessly(fly: Fly, text: str, flag: str) -> None:
    outcome = fly("generate", flag, text, "hi")
    assert not acting(outcome.err) and "Traceback" not in outcome.err
    assert "generate" not in outcome.out and not acting(outcome.out)


@pytest.mark.parametrize("live", [False, True], ids=["lines", "bar"])
@nasty
def test_progress_shows_names_harmlessly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, live: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    progress = make_progress(LIVE if live else NO_ESCAPES)
    progress.start(f"fetching {text}", 1000)
    progress.note(f"about {text}")
    progress.finish()
    out, err = capsys.readouterr()
    assert out == "" and f"note: about {visible_line(text)}" in err.replace("\r", "")
    assert not acting(re.sub(r"\x1b\[(\?25[lh]|2K|1A|[0-9;]*m)", "", err), allowed="\n\r")


def test_no_part_of_a_note_is_taken_for_the_name_of_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(LIVE)
    progress.start("fetching :boom:", 1)
    progress.note(MARKUP)
    progress.finish()
    view = make_view([("p", "fly", 0, 0)], LIVE, quiet=False)
    view.note(MARKUP)
    view.close()
    assert capsys.readouterr().err.count(f"note: {MARKUP}") == 2


@nasty
def test_a_bench_tells_prompt_ids_on_one_short_harmless_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    key = (text, "fly", 0, 0)
    view = make_view([key], NO_ESCAPES, quiet=False)
    view.handle(failed_row(key, {}, text))
    view.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[1/1] ") and len(line) < 300 and not reordering(line)


# --- names ----------------------------------------------------------------------------------------------------------


def configured(tmp_path: Path, content: Mapping[str, Any]) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


@short
def test_the_models_are_a_line_each_whatever_their_names(fly: Fly, tmp_path: Path, text: str) -> None:
    entry = {"path": f"./{text}", "licence": text}
    configured(tmp_path, {"aliases": {text: entry, "mine": dict(entry)}, "pairs": {"mine": text}})
    outcome = fly("models")
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and not any(map(reordering, lines))
    assert len(lines) == 1 + len(json.loads(fly("models", "--json").out))
    ours = [line for line in lines if line.endswith(visible_line(f"./{text}").rstrip())]
    assert len(ours) == 2
    if "\u200b" not in text and "\u0301" not in text:
        assert len({cell_len(line[: line.rindex("./")]) for line in ours}) == 1  # the columns stand below each other
    assert not acting(fly("models", "--json").out) - set("\u202d\u202e")


def test_a_path_below_the_home_of_nobody_is_listed_too(fly: Fly, tmp_path: Path) -> None:
    configured(tmp_path, {"aliases": {"mine": "~nobody-here/model"}})
    outcome = fly("models")
    assert outcome.code == 0 and "~nobody-here/model" in outcome.out


@short
def test_the_settings_are_yaml_that_reads_back_and_does_not_act(fly: Fly, tmp_path: Path, text: str) -> None:
    configured(tmp_path, {"target": f"./{text}", "stop": [text], "system": text, "aliases": {"mine": f"./{text}"}})
    outcome = fly("config", "show")
    assert outcome.code == 0 and not any(map(reordering, outcome.out.split("\n")))
    shown = yaml.safe_load(outcome.out)
    assert (shown["target"], shown["stop"], shown["system"]) == (f"./{text}", [text], text)
    outcome = fly("generate", "-v", "hi")
    assert outcome.code == 0 and not acting(outcome.err)


@paths
def test_pull_prints_a_path_as_it_is_in_a_pipe_and_harmless_on_a_terminal(
    fly: Fly, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"m{text}"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    outcome = fly("pull", f"{folder}/")
    assert (outcome.code, outcome.out) == (0, f"{folder}\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    outcome = fly("pull", f"{folder}/")
    assert (outcome.code, outcome.out) == (0, f"{visible_line(str(folder))}\n") and not reordering(outcome.out[:-1])
    (folder / "config.json").unlink()
    outcome = fly("pull", f"{folder}/")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 3 and not acting(outcome.err)


@short
def test_what_a_gguf_file_says_of_itself_does_not_act(tmp_path: Path, text: str, fly: Fly) -> None:
    from weights_helpers import write_gguf

    from fly_cli import convert

    path = write_gguf(tmp_path / "m.gguf", architecture=f"a{text}")
    assert read_header(path).architecture == f"a{text}"
    with pytest.raises(FlyError) as caught:
        convert.check_architecture(path)
    assert explain(caught.value) == 2
    err = fly.capsys.readouterr().err
    assert len(err.splitlines()) == 3 and not acting(err)


CONFIGS = {
    "kind": lambda text: {"model_type": text},
    "class": lambda text: {"architectures": [text]},
    "activation": lambda text: {"hidden_act": text},
    "dtype": lambda text: {"dtype": text},
    "positions": lambda text: {"rope_parameters": {"rope_type": text, "rope_theta": 1.0}},
    "code": lambda text: {"auto_map": {"AutoConfig": text}, "model_type": text},
}


@pytest.mark.parametrize("name", ["clear", "joined c1", "markup", "controls", "backwards"])
@pytest.mark.parametrize("field", CONFIGS)
def test_what_a_configuration_says_does_not_act(
    unscripted: Fly, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], field: str, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_pair_dirs[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CONFIGS[field](NASTY[name])))
    outcome = unscripted("check", str(folder), "lookup", "--device-map", "cpu")
    assert "Traceback" not in outcome.err, outcome.err
    assert not acting(outcome.out) and not acting(outcome.err)


@nasty
def test_what_a_chat_template_complains_of_is_told_on_one_short_line(text: str) -> None:
    from text_helpers import byte_level

    from fly_cli.errors import PromptError
    from fly_cli.prompts import Prompt
    from fly_cli.settings import TextSettings
    from fly_cli.text import Codec

    template = "{{ raise_exception(messages[-1].content) }}"
    codec = Codec(byte_level(), settings=TextSettings(chat_template=template), end_ids=(), vocab_rows=384)
    with pytest.raises(PromptError) as caught:
        codec.encode(Prompt("p", messages=({"role": "user", "content": text},)))
    line = visible_line(caught.value.message)
    assert len(line) < 2500 and not reordering(line)


# --- results --------------------------------------------------------------------------------------------------------


def summary_of(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from test_report import HEADER, make_row

    from fly_cli.report import summarise

    rows = [
        make_row(f"{category}{number}", arm, category=category)
        for category in (text, "b")
        for number in range(2)
        for arm in ("target", "fly")
    ]
    rows.append(failed_row((text, "fly", 0, 1), {"category": text}, text))
    return summarise({**HEADER, "template": text, "models": {text: text}}, rows), rows


@short
def test_tables_keep_their_shape(text: str) -> None:
    summary, _ = summary_of(text)
    summary["notes"].append(text)
    shown = format_table(summary)
    table = shown.split("Speed-up over target by category\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 3 and not any(map(reordering, shown.splitlines()))
    assert len({cell_len(line.replace("\u200d ", " ")) for line in table}) == 1
    report = to_markdown(summary)
    assert not acting(report) - set("\u202d\u202e")
    assert json.loads(re.search(r"(`{3,})json\n(.*)\n\1", report, re.DOTALL)[2])["template"] == text  # type: ignore[index]
    assert len(re.findall(r"^\| ", report.split("by category")[1].split("\n\n")[1], re.MULTILINE)) == 4


@short
def test_two_results_are_compared_whatever_their_names(text: str) -> None:
    from fly_cli.report import compare, summarise

    summary, rows = summary_of(text)
    other = {**summary, "arms": [*summary["arms"], text], "header": {**summary["header"], "template": "x"}}
    nothing = summarise({}, [])
    for both in (compare(summary, rows, other, rows[:2]), compare(nothing, [], summary, rows)):
        shown = format_comparison(both | {"arms_only_a": [text]}, text, text)
        assert not any(map(reordering, shown.split("\n")))


@pytest.mark.parametrize("name", ["joined c1", "controls", "backwards", "not unicode", "table", "long", "long nothing"])
def test_plots_are_whole_svg_files_of_a_sane_size(tmp_path: Path, name: str) -> None:
    from fly_cli.plots import write_plots

    for path in write_plots(summary_of(NASTY[name])[0], tmp_path):
        drawn = path.read_text(encoding="utf-8")
        ElementTree.fromstring(drawn)
        assert not acting(drawn) and len(drawn) < 200_000


# --- recordings -----------------------------------------------------------------------------------------------------


@nasty
def test_a_recording_is_shown_as_the_run_was(fly: Fly, tmp_path: Path, text: str) -> None:
    events = run(
        Block("==", texts=[text, "x"], final=text, notes=(text,)),
        first="A",
        notes=(text,),
        prompt_id=text,
        extra_settings={"mode": text},
    )
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)
    for event in events:
        writer.handle(event)
    writer.close()
    assert not acting(path.read_text(encoding="ascii")) - {"\x7f"}
    outcome = fly("replay", str(path), "--svg", str(tmp_path / "answer.svg"))
    assert outcome.code == 0 and not acting(outcome.err)
    assert outcome.out.removesuffix("\n") == f"A{text}x{text}".removesuffix("\n")
    picture = (tmp_path / "answer.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(picture)
    assert not acting(picture)
    outcome = fly("replay", str(path), "--json")
    assert json.loads(outcome.out)["text"] == f"A{text}x{text}" and not acting(outcome.out) - set("\u202d\u202e")


@paths
def test_a_recording_may_have_any_name(fly: Fly, tmp_path: Path, text: str) -> None:
    path = tmp_path / f"t{text}"
    outcome = fly("generate", "--trace", str(path), "hi")
    assert outcome.code == 0 and not acting(outcome.err)
    outcome = fly("replay", str(path), "--svg", str(tmp_path / "answer.svg"))
    assert outcome.code == 0 and not acting(outcome.err)
    ElementTree.parse(tmp_path / "answer.svg")
    path.write_text("no trace")
    outcome = fly("replay", str(path))
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 3 and not acting(outcome.err)


# --- the rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*range(32), *range(0x7F, 0xA0), 0x202D, 0x202E])
def test_nothing_that_acts_hides_behind_another_character(code: int) -> None:
    for before in ("", "a", "\u200d", "a\u200d", "\u0301", "\U0001f1e9", "\u1100", "\r", "\ue000", "\u202e"):
        for behind in ("", "\u0301", "\u200d", "\n"):
            text = before + chr(code) + behind
            stream = io.StringIO()
            sink = TerminalRenderer(stream, NO_ESCAPES)
            for event in plain(["x", text]):
                sink.handle(event)
            sink.close()
            assert not acting(stream.getvalue(), allowed="\n\t")
            assert not reordering(visible_line(text))


@nasty
def test_json_text_reads_back(text: str) -> None:
    written = json_text({text: [text]})
    assert json.loads(written) == {text: [text]} and not acting(written) - set("\u202d\u202e")
    assert os.linesep not in written
