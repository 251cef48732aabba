"""Ctrl-C, SIGTERM, readers that go away, closed streams and odd encodings, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")

HELPERS = Path(__file__).with_name("cli_helpers.py")
PATIENCE = 60.0  # seconds, for a busy machine
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Process:
    """`fly` on a scene, with pipes or on a terminal, of `size` (columns, rows) if that is given."""

    def __init__(
        self,
        tmp_path: Path,
        scene: str,
        *arguments: str,
        terminal: bool = False,
        size: tuple[int, int] | None = None,
        command: Sequence[str] | None = None,  # another than the scene
        **environment: str,
    ) -> None:
        self.marker = tmp_path / "marker"
        self.marker.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FLY_")}
        ours = {"MARKER": str(self.marker), "XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm"}
        variables = clean | ours | {"PYTHONPATH": str(HELPERS.parent)} | environment
        self.master: int | None = None
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if terminal:
            self.master, slave = os.openpty()
            if size is not None:
                self.resize(*size)
            output = {"stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", HELPERS.stem, scene, *arguments],
            stdin=subprocess.DEVNULL,
            env=variables,
            **output,
        )
        if terminal:
            os.close(slave)
        self.screen = b""

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size; the process is told by a signal."""
        import fcntl
        import termios

        assert self.master is not None
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for_marker(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.marker.exists():
            assert time.monotonic() < end, "the scene never got there"
            assert self.process.poll() is None, "the process ended early"
            self._drain(0.01)

    def _drain(self, seconds: float) -> bool:
        """Read what the terminal has; False at its end."""
        if self.master is None:
            time.sleep(seconds)
            return True
        if select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # the other side is closed
                return False
            self.screen += data
            return bool(data)
        return True

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.wait_for_marker()
        time.sleep(0.05)
        self.process.send_signal(number)

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr (the screen and "" on a terminal)."""
        if self.master is not None:
            end = time.monotonic() + PATIENCE
            while self._drain(0.1):
                assert time.monotonic() < end, "the process did not end"
            os.close(self.master)
            return self.process.wait(PATIENCE), self.screen.decode(), ""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out.decode(), err.decode()


def run_scene(tmp_path: Path, scene: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    return Process(tmp_path, scene, *arguments, **environment).finish()


SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
WAITING = [
    ("importing", signal.SIGINT),
    ("loading", signal.SIGINT),
    ("loading", signal.SIGTERM),
    ("prefill", signal.SIGINT),
    ("swallowing", signal.SIGINT),
    ("executing", signal.SIGINT),
]


@pytest.mark.parametrize("scene, number", WAITING)
def test_a_signal_before_the_first_token_ends_the_run_with_one_line(
    tmp_path: Path, scene: str, number: signal.Signals
) -> None:
    code, word = SIGNALS[number]
    process = Process(tmp_path, scene, "generate", "hi")
    process.interrupt(number)
    assert process.finish() == (code, "", f"{word}\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_streaming_keeps_the_text_and_ends_it_with_a_newline(
    tmp_path: Path, number: signal.Signals
) -> None:
    code, word = SIGNALS[number]
    process = Process(tmp_path, "streaming", "generate", "hi")
    process.interrupt(number)
    returned, out, err = process.finish()
    assert (returned, err) == (code, f"{word}\n")
    words = out.removesuffix("\n").split()
    assert 2 <= len(words) < 500 and words == [f"w{i}" for i in range(len(words))]
    assert out.endswith(" \n")


def test_text_held_back_for_a_stop_string_is_printed_when_interrupted(tmp_path: Path) -> None:
    process = Process(tmp_path, "holding", "generate", "--stop", "please", "hi")
    process.interrupt()
    assert process.finish() == (130, "one pleas\n", "interrupted\n")


def test_an_interrupted_json_run_is_a_valid_object_with_the_text_so_far(tmp_path: Path) -> None:
    process = Process(tmp_path, "streaming", "generate", "--json", "hi")
    process.interrupt()
    code, out, err = process.finish()
    value = json.loads(out)
    assert code == 130 and err.splitlines()[-1] == "interrupted"
    assert value["finish_reason"] == "interrupted" and value["text"].startswith("w0 w1 w2 ")


def test_an_interrupted_trace_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    process = Process(tmp_path, "drafted", "generate", "--trace", str(path), "hi")
    process.interrupt()
    _, out, _ = process.finish()
    code, again, _ = run_scene(tmp_path, "drafted", "replay", str(path))
    assert (code, again) == (0, out)


@pytest.mark.parametrize("scene, number", [*WAITING[:4], ("streaming", signal.SIGINT), ("drafted", signal.SIGTERM)])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path: Path, scene: str, number: signal.Signals) -> None:
    code, word = SIGNALS[number]
    process = Process(tmp_path, scene, "generate", "hi", terminal=True)
    process.interrupt(number)
    returned, screen, _ = process.finish()
    assert returned == code
    assert cursor_is_visible(screen) and colours_are_reset(screen)
    assert screen.endswith(f"{word}\r\n")


@pytest.mark.parametrize("scene", ["failing", "out_of_memory"])
def test_an_error_leaves_the_terminal_as_it_was(tmp_path: Path, scene: str) -> None:
    code, screen, _ = Process(tmp_path, scene, "generate", "hi", terminal=True).finish()
    assert code == 1
    assert cursor_is_visible(screen) and colours_are_reset(screen)


SIZES = [(1, 1), (9, 3), (40, 2), (500, 200), (0, 0)]


@pytest.mark.parametrize("size", SIZES)
def test_a_terminal_of_any_size_gets_the_whole_answer_and_its_cursor_back(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    process = Process(tmp_path, "brisk", "generate", "hi", terminal=True, size=size)
    process.wait_for_marker()
    for other in [size[::-1], (11, 1), size]:
        process.resize(*other)
        time.sleep(0.05)
    code, screen, _ = process.finish()
    assert code == 0 and "Traceback" not in screen
    assert cursor_is_visible(screen) and colours_are_reset(screen)
    shown = settled(screen)
    assert "First" + "".join(f"d0.{n}" for n in range(9)) + "t0" in shown
    assert shown.count("t24") == 1 and "tokens(length)" in shown


@pytest.mark.parametrize("size", [(23, 6)])
def test_a_small_terminal_shows_the_answer_of_a_model_as_it_was_decoded(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], size: tuple[int, int]
) -> None:
    from test_render import Terminal, wrapped

    trace = tmp_path / "run.jsonl"
    flags = ["-q", "-n", "80", "-k", "6", "-w", "1", "--theta", "0", "--dtype", "float32", "--device-map", "cpu"]
    pair = ["--target", str(tiny_pair_dirs[0]), "--draft", str(tiny_pair_dirs[1]), "--trace", str(trace)]
    command = [sys.executable, "-m", "fly_cli", "generate", *flags, *pair, "hi"]
    code, screen, _ = Process(tmp_path, "", terminal=True, size=size, command=command).finish()
    assert code == 0
    terminal = Terminal(*size)
    terminal.write(screen)
    finished = json.loads(trace.read_text().splitlines()[-1])
    assert len(finished["text"]) > 80
    assert terminal.rows() == wrapped(finished["text"], size[0])


def settled(screen: str) -> str:
    """The visible characters that stay: what is drafted is dim, and drawn over."""
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|.)|\s", "", re.sub(r"\x1b\[2m.*?\x1b\[0m", "", screen))


@pytest.mark.parametrize("size", [(1, 1), (30, 3), (0, 0)])
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["models"], ["replay", "{trace}"]])
def test_nothing_is_cut_off_on_a_terminal_of_any_size(
    tmp_path: Path, trace: Path, arguments: list[str], size: tuple[int, int]
) -> None:
    asked = [argument.format(trace=trace) for argument in arguments]
    code, screen, _ = Process(tmp_path, "echo", *asked, terminal=True, size=size).finish()
    piped = run_scene(tmp_path, "echo", *asked)[1]
    assert code == 0 and cursor_is_visible(screen)
    assert "".join(piped.split()) in settled(screen)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from event_helpers import run

    from fly_cli.trace import TraceWriter

    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    writer = TraceWriter(path)
    for event in run("==x======", "=", first="Hi "):
        writer.handle(event)
    writer.close()
    return path


def cursor_is_visible(screen: str) -> bool:
    return screen.rfind(HIDE_CURSOR) <= screen.rfind(SHOW_CURSOR)


def colours_are_reset(screen: str) -> bool:
    codes = [part.split("m")[0] for part in screen.split("\x1b[")[1:] if part.split("m")[0].replace(";", "").isdigit()]
    return not codes or codes[-1] == "0"


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    process = Process(tmp_path, "stubborn", "generate", "hi")
    process.interrupt()
    time.sleep(0.3)
    assert process.process.poll() is None
    process.process.send_signal(signal.SIGINT)
    assert process.finish()[0] == -signal.SIGINT


def test_failure_in_the_loop_ends_the_process_with_the_text_so_far(tmp_path: Path) -> None:
    began = time.monotonic()
    code, out, err = run_scene(tmp_path, "out_of_memory", "generate", "-q", "hi")
    assert (code, out) == (1, "one two \n")
    assert err.startswith("error: memory ran out while decoding beside ")
    assert time.monotonic() - began < PATIENCE


# --- pipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_the_run_in_silence(tmp_path: Path, unbuffered: str) -> None:
    process = Process(tmp_path, "streaming", "generate", "hi", PYTHONUNBUFFERED=unbuffered)
    stdout, stderr = process.pipes()
    assert stdout.read(5) == b"w0 w1"
    stdout.close()
    assert process.process.wait(PATIENCE) == 141
    assert stderr.read() == b""
    stderr.close()


def test_a_json_run_whose_reader_goes_away_ends_before_its_answer_is_complete(tmp_path: Path) -> None:
    process = Process(tmp_path, "streaming", "generate", "-q", "--json", "hi")
    process.wait_for_marker()
    stdout, stderr = process.pipes()
    stdout.close()
    assert process.process.wait(PATIENCE) == 141
    assert stderr.read() == b""
    stderr.close()


def test_stdout_closed_from_the_start_is_a_reader_that_is_gone(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    command = f'"{sys.executable}" "{HELPERS}" at_once generate hi >&-'
    done = subprocess.run(
        ["sh", "-c", command], env=os.environ | {"MARKER": str(marker)}, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (141, b"")
    assert not marker.exists()


@pytest.mark.parametrize("closed", ["2>&-", "<&-"])
def test_closed_stderr_or_stdin_changes_nothing(tmp_path: Path, closed: str) -> None:
    command = f'"{sys.executable}" "{HELPERS}" echo generate hi {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"'hi'\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    command = f'"{sys.executable}" "{HELPERS}" echo generate -q hi >/dev/full'
    done = subprocess.run(["sh", "-c", command], capture_output=True, stdin=subprocess.DEVNULL, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device\n\nhint: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "scene, flags, code, out",
    [
        ("echo", ["-v", "--seed", "3"], 0, "'hi'\n"),
        ("out_of_memory", [], 1, "one two \n"),
        ("failing", [], 1, "one two \n"),
        ("echo", ["-n", "0"], 2, ""),
        ("echo", ["--no-such-flag"], 2, ""),
    ],
)
def test_a_stderr_that_takes_nothing_does_not_keep_the_answer_back(
    scene: str, flags: list[str], code: int, out: str
) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, str(HELPERS), scene, "generate", *flags, "hi"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env=os.environ | {"MARKER": os.devnull},
        )
    assert (done.returncode, done.stdout) == (code, out)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.parametrize("name, called", [("/dev/stdout", "output"), ("/dev/stderr", "error"), ("out", "output")])
def test_a_trace_does_not_mix_with_what_is_shown(tmp_path: Path, name: str, called: str) -> None:
    arguments = [sys.executable, str(HELPERS), "echo", "generate", "--trace", name, "hi"]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
    assert (done.returncode, (tmp_path / "out").read_bytes()) == (2, b"")
    assert done.stderr.startswith(f"error: `--trace` names standard {called}: {name}\n")


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="needs /dev/stdin")
@pytest.mark.parametrize("piped", [True, False])
def test_standard_input_named_as_a_file_is_read_once(tmp_path: Path, piped: bool) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"hello\n")
    command = f'"{sys.executable}" "{HELPERS}" echo generate -q -f /dev/stdin'
    command = f"cat prompt.txt | {command}" if piped else f"{command} <prompt.txt"
    done = subprocess.run(["sh", "-c", command], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"'hello'\n", b"")


def test_the_answer_arrives_in_the_pipe_while_the_run_goes_on(tmp_path: Path) -> None:
    process = Process(tmp_path, "streaming", "generate", "-q", "hi")
    assert process.pipes()[0].read(3) == b"w0 "
    assert process.process.poll() is None
    process.process.kill()
    process.finish()


def test_a_row_is_in_the_pipe_before_the_next_prompt_is_answered(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    process = Process(tmp_path, "second_waits", "generate", "-q", "--jsonl", "-f", str(rows))
    assert json.loads(process.pipes()[0].readline())["text"] == "one →"
    process.wait_for_marker()
    process.interrupt()
    code, out, err = process.finish()
    assert (code, err) == (130, "interrupted\n")
    assert json.loads(out)["finish_reason"] == "interrupted"


NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "flags, environment",
    [([], {"PYTHONIOENCODING": "cp1252"}), (["--json"], NO_UTF8), (["--color", "always"], NO_UTF8)],
    ids=["text", "json", "colour"],
)
def test_output_is_utf8_whatever_the_locale(tmp_path: Path, flags: list[str], environment: Mapping[str, str]) -> None:
    code, out, _ = run_scene(tmp_path, "unicode", "generate", *flags, "hi", **environment)
    assert code == 0
    assert "😀" in out and "한" in out


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "cp1252"}, NO_UTF8], ids=["cp1252", "C"])
@pytest.mark.parametrize("arguments", [["generate", "--help"], ["models"], ["bench", "--compare", "{a}", "{b}"]])
def test_help_and_tables_are_utf8_whatever_the_locale(
    tmp_path: Path, arguments: list[str], environment: Mapping[str, str]
) -> None:
    (tmp_path / "fly").mkdir()
    (tmp_path / "fly" / "config.yaml").write_text("aliases: {“mödel” →: ./한}\n", encoding="utf-8")
    for name in "äß":
        results_in(tmp_path / name, "“kätegory” → 😀")
    asked = [argument.format(a=tmp_path / "ä", b=tmp_path / "ß") for argument in arguments]
    code, out, err = run_scene(tmp_path, "echo", *asked, **environment)
    assert (code, err) == (0, "")
    expected = {"generate": "FLy is lossy on purpose", "models": "“mödel” →", "bench": "ß against ä"}
    assert expected[arguments[0]] in out and "\ufffd" not in out and "?" * 2 not in out


def results_in(folder: Path, category: str) -> None:
    """The results of a bench, as far as a comparison reads them."""
    from fly_cli.bench_rows import FORMAT, Answered, Results, begin, ok_row

    begin(folder, {"format": FORMAT, "arms": {"target": {}}}, resume=False)
    figures = {"num_new_tokens": 10, "num_first_tokens": 1, "decode_s": 1.0}
    results = Results(folder)
    results.append(ok_row(("p", "target", 0, 0), {"category": category}, Answered("→", [1], figures)))
    results.close()


def test_an_argument_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    assert run_scene(tmp_path, "echo", "generate", "-q", "→ é", **NO_UTF8) == (0, "'→ é'\n", "")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_paths_work_and_are_shown_as_they_are_whatever_the_locale(tmp_path: Path, locale: str) -> None:
    prompt, trace, config = tmp_path / "é.txt", tmp_path / "naïve.trace", tmp_path / "ü.yaml"
    prompt.write_text("hello", encoding="utf-8")
    (tmp_path / "ñ.jinja").write_text("{{ x }}", encoding="utf-8")
    config.write_text("target: ./té\nchat_template: ñ.jinja\n", encoding="utf-8")
    flags = ["-f", str(prompt), "--trace", str(trace), "--config", str(config)]
    environment = NO_UTF8 | {"LC_ALL": locale}
    code, out, err = run_scene(tmp_path, "echo", "generate", *flags, **environment)
    assert (code, out) == (0, "'hello'\n") and "no draft model is known for ./té" in err
    assert run_scene(tmp_path, "echo", "replay", "-q", str(trace), **environment) == (0, "'hello'\n", "")
    _, _, err = run_scene(tmp_path, "echo", "generate", "-f", str(tmp_path / "ö.txt"), **environment)
    assert "ö.txt`: no such file" in err


def test_a_path_that_is_not_utf8_works_all_the_same(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/odd\xff.txt"
    try:
        with open(path, "wb") as file:
            file.write(b"hello")
    except OSError:
        pytest.skip("this file system takes only names in UTF-8")
    for environment in ({}, NO_UTF8):
        assert run_scene(tmp_path, "echo", "generate", "-q", "-f", os.fsdecode(path), **environment)[1] == "'hello'\n"


def test_little_is_imported_before_signals_are_handled() -> None:
    code = "import sys; before = set(sys.modules); import fly_cli.cli; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("fly_cli")}
    assert ours == {"fly_cli", "fly_cli.cli", "fly_cli.cli.process", "fly_cli.errors"}
    assert not {"typer", "traceback", "dataclasses", "pathlib", "json", "rich", "yaml"} & set(done.stdout.split())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_from_the_start_stays_ignored(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # as a shell without job control has it for `fly … &`
    try:
        process = Process(tmp_path, "paused", "generate", "-q", "hi")
    finally:
        signal.signal(number, before)
    process.interrupt(number)
    assert process.finish() == (0, "one two \n", "")


def test_the_help_needs_less_than_half_a_second_of_computing() -> None:
    best = min(cpu_seconds([sys.executable, "-m", "fly_cli", "--help"]) for _ in range(3))
    assert best < 0.5


def cpu_seconds(command: list[str]) -> float:
    """User and system time, which a busy machine does not change as it does the wall clock."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime
