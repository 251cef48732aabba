"""`fly pull` and `fly models`, and how progress is shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len
from typer.testing import CliRunner
from weights_helpers import Recorder

from fly_cli import hub
from fly_cli.catalog import load_catalog
from fly_cli.cli.models import format_table, models
from fly_cli.cli.progress import LineProgress, make_progress
from fly_cli.cli.pull import pull
from fly_cli.errors import ModelNotFoundError
from fly_cli.theme import NO_ESCAPES
from fly_cli.weights import converted_name


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command with a cache that holds the default draft. Nothing can be fetched."""
    app = typer.Typer(rich_markup_mode=None)
    app.command()(pull)
    app.command()(models)
    for name in [name for name in os.environ if name.startswith("FLY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fly_cli.cli.common.default_config_file", lambda: tmp_path / "config.yaml")
    monkeypatch.setattr(hub, "endpoint", lambda: "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "cache_location", lambda: tmp_path / "hub")
    draft = tmp_path / "cache" / "models" / converted_name(load_catalog().find("qwen-coder-0.5b"))
    draft.mkdir(parents=True)
    (draft / "fly.json").write_text("{}")
    return lambda *arguments: CliRunner().invoke(app, [str(item) for item in arguments])


def test_the_table_has_a_whole_line_for_each_alias(run, tmp_path):
    path = tmp_path / ("long " * 60) / "model"
    (tmp_path / "config.yaml").write_text(f"aliases: {{mine: '{path}'}}\npairs: {{mine: llama-1b}}")
    result = run("models")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and not result.stderr
    assert lines[0].split() == ["alias", "size", "cached", "licence", "gated", "draft", "source"]
    assert len(lines) == 1 + len(list(load_catalog())) + 1
    rows = {line.split()[0]: line for line in lines}
    assert rows["mine"].endswith(str(path)) and "llama-1b" in rows["mine"] and "…" not in result.stdout
    assert " 491.4 MB  yes " in rows["qwen-coder-0.5b"] and "Apache-2.0" in rows["qwen-coder-0.5b"]
    assert " 1.1 GB    no " in rows["qwen-coder-1.5b"]
    assert " yes " in rows["llama-8b"] and "meta-llama/Llama-3.1-8B-Instruct" in rows["llama-8b"]


def test_json_has_all_that_is_known(run, tmp_path):
    rows = {row["alias"]: row for row in json.loads(run("models", "--json").stdout)}
    draft = rows["qwen-coder-0.5b"]
    assert draft["cached"] and Path(draft["cached_path"]).is_dir() and draft["download_bytes"] == 491_400_064
    assert draft["wheels"]["parts"] == 6 and len(draft["sha256"]) == 64
    assert not rows["llama-8b"]["cached"] and rows["llama-8b"]["cached_path"] is None
    assert rows["llama-8b"]["gated"] and rows["llama-8b"]["draft"] == "llama-1b"
    assert rows["mistral-7b"]["gated"] is None


def test_pull_prints_the_folder_of_what_is_there(run, tmp_path):
    result = run("pull", "qwen-coder-0.5b")
    assert result.exit_code == 0 and not result.stderr
    assert Path(result.stdout.strip()).parent == tmp_path / "cache" / "models"


def test_pull_without_a_name_is_for_the_configured_pair(run, tmp_path, monkeypatch):
    asked = []
    located = type("Located", (), {"path": "x"})
    monkeypatch.setattr("fly_cli.weights.locate", lambda name, *_, **__: asked.append(name) or located)
    run("pull")
    (tmp_path / "config.yaml").write_text("target: llama-8b\ndraft: lookup")
    run("pull")
    assert asked == ["qwen-coder-1.5b", "qwen-coder-0.5b", "llama-8b"]


def test_pull_offline_fetches_nothing_and_says_what_to_do(run):
    result = run("pull", "--offline", "llama-8b")
    assert isinstance(result.exception, ModelNotFoundError) and not result.stdout
    assert "connections are off" in result.exception.message and "fly pull llama-8b" in result.exception.hint


def test_without_a_terminal_each_step_is_one_line(capsys):
    progress = make_progress(NO_ESCAPES)
    assert isinstance(progress, LineProgress)
    progress.start("fetching [bold]x", 2_000_000)
    progress.advance(1_000_000)
    progress.note("a note\nof two lines")
    progress.start("converting x", None)
    progress.finish()
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert err.splitlines()[0] == "note: fetching [bold]x (2.0 MB)" and len(err.splitlines()) == 3


def test_progress_that_tests_use_is_one():
    from fly_cli.progress import Progress, Silent

    def accepts(progress: Progress) -> None:
        progress.start("x", 1)
        progress.advance(1)
        progress.note("y")
        progress.finish()

    for progress in (Silent(), Recorder(), LineProgress()):
        accepts(progress)


BARS = """
from fly_cli.cli.progress import make_progress
from fly_cli.theme import ColorPolicy
import time
progress = make_progress(ColorPolicy(color=True, cues=True, live=True))
progress.start("fetching [bold]one[/nope]", 2_000_000)
progress.advance(1_000_000)
time.sleep(0.3)
progress.note("see [red]this[/red]")
progress.start("converting", None)
time.sleep(0.2)
try:
    raise KeyboardInterrupt
finally:
    progress.finish()
"""


TURNS = """
from fly_cli.bench_rows import failed_row
from fly_cli.cli.bench_view import make_view
from fly_cli.theme import ColorPolicy
keys = [(f"p{n}", "fly", 0, 0) for n in range(40)]
view = make_view(keys, ColorPolicy(color=True, cues=True, live=True), quiet=False)
view.note("see [red]this[/red]")
for key in keys:
    view.handle(failed_row(key, {}, "x"))
view.close()
"""


def on_a_terminal(program: str, columns: int, rows: int) -> tuple[int, str]:
    """Exit code of the program, and what its terminal of this size gets; it is resized meanwhile."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", program], stderr=follower, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    output = b""
    try:
        while chunk := os.read(leader, 4096):
            output += chunk
            if (columns, rows) != (80, 24):
                columns, rows = rows, columns
                fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    except OSError:  # the other end was closed
        pass
    os.close(leader)
    return process.wait(), output.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
@pytest.mark.parametrize("size", [(1, 1), (7, 2), (500, 200), (0, 0)])
@pytest.mark.parametrize("program", [BARS, TURNS], ids=["pull", "bench"])
def test_bars_bear_terminals_of_any_size(program: str, size: tuple[int, int]) -> None:
    code, text = on_a_terminal(program, *size)
    assert code == (-signal.SIGINT if program == BARS else 0)  # the first one ends as if interrupted
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s", "", text)
    assert shown.count("note:see[red]this[/red]") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_on_a_terminal_the_bar_goes_away_and_the_cursor_comes_back():
    import pyte

    _, text = on_a_terminal(BARS, 80, 24)
    assert "fetching [bold]one[/nope]" in text and "1.0/2.0 MB" in text and "note: see [red]this[/red]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(text)
    assert screen.display[0].strip() == "note: see [red]this[/red]"
    assert not any("fetching" in line or "converting" in line for line in screen.display)


def test_columns_line_up_where_names_are_wide():
    lines = format_table([("alias", "size"), ("한글", "1 GB"), ("❤️", "2 GB"), ("plain", "3 GB")]).splitlines()
    assert {cell_len(line[: line.index(size)]) for line, size in zip(lines, ("size", "1", "2", "3"), strict=True)} == {
        7
    }
