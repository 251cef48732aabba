"""What a kill at any moment leaves: the old or the new, never half, and nothing that stays for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_helpers import run as recorded_run

from fly_cli import files, int4
from fly_cli.bench_rows import FORMAT, Answered, Results, begin, key_of, ok_row, read_header, write_whole
from fly_cli.files import written_whole
from fly_cli.progress import Silent
from fly_cli.trace import TraceWriter, read_trace
from fly_cli.tuned import Tuned, how_loaded, keep_tuned, read_tuned

PATIENCE = 60.0  # seconds, for a busy machine
TESTS = Path(__file__).parent


class Kill(BaseException):
    """The process ends here, and nothing of it runs any more."""


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@contextmanager
def killed_at(point: int, process: int) -> Iterator[list[str]]:
    """Inside, the call number `point` of those that change a file is the last: a write is done by half.

    Yields what was called. Behind the kill nothing changes any file: also not what cleans up after an exception.
    """
    calls: list[str] = []
    alive = [True]

    def dying(name: str, real: Callable[..., Any], by_half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            if not alive[0]:
                raise Kill
            calls.append(name)
            if len(calls) - 1 == point:
                alive[0] = False
                if by_half is not None:
                    by_half(*given, **more)
                raise Kill
            return real(*given, **more)

        return call

    write, write_bytes = os.write, Path.write_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process)
        for name in ("replace", "fsync", "unlink", "mkdir"):
            patch.setattr(os, name, dying(name, getattr(os, name)))
        patch.setattr(os, "write", dying("write", write, lambda fd, data: write(fd, bytes(data)[: len(data) // 2])))
        half = lambda path, data, **_: write_bytes(path, data[: len(data) // 2])  # noqa: E731
        patch.setattr(Path, "write_bytes", dying("write_bytes", write_bytes, half))
        half_text = lambda path, text, **_: write_bytes(path, text.encode()[: len(text) // 2])  # noqa: E731
        patch.setattr(Path, "write_text", dying("write_text", Path.write_text, half_text))
        yield calls


def every_kill(gone: int, job: Callable[[], object], between: Callable[[int], object]) -> int:
    """Run the job again and again, killed one call later each time; `between` checks. How many kills there were."""
    for point in range(1000):
        try:
            with killed_at(point, gone):
                job()
        except Kill:
            between(point)
        else:
            return point
    raise AssertionError("the job never ends")


def test_a_file_is_the_old_or_the_new_one_wherever_the_writer_was_killed(tmp_path: Path, gone: int) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    seen = set()

    def between(point: int) -> None:
        seen.add(path.read_bytes())
        write_whole(path, b"old")  # the next writer
        assert list(tmp_path.iterdir()) == [path]

    assert every_kill(gone, lambda: write_whole(path, b"new one"), between) == 3
    assert seen == {b"old"} and path.read_bytes() == b"new one"


def test_what_was_tuned_is_whole_wherever_the_tuner_was_killed(tmp_path: Path, gone: int) -> None:
    file = tmp_path / "fly" / "tuned.yaml"
    old, new = (Tuned("t", name, "m", how_loaded({}), "2026-01-01", {"window_size": 3}) for name in ("one", "two"))

    def between(point: int) -> None:
        assert read_tuned(file) in ([], [old])
        keep_tuned(file, old)
        assert list(file.parent.iterdir()) == [file]

    assert every_kill(gone, lambda: keep_tuned(file, new), between) >= 4
    assert new in read_tuned(file)


HEADER = {"format": FORMAT, "arms": {"fly": {}}, "sessions": [{"processes": 1}]}
ROWS = [ok_row((f"p{n}", "fly", 0, 0), {}, Answered(f"text {n}\u2028é", [n])) for n in range(3)]
KEYS = [key_of(row) for row in ROWS]


def bench(folder: Path, rank: int | None = None) -> None:
    """A bench that goes on where an earlier one stopped, and puts the rows of all processes together."""
    begin(folder, HEADER, resume=True)
    Results(folder).merge(KEYS)
    results = Results(folder, rank)
    done = {key_of(row) for row in results.rows()}
    for row in ROWS:
        if key_of(row) not in done:
            results.append(row)
    results.close()
    Results(folder).merge(KEYS)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_bench_that_was_killed_anywhere_has_every_row_once_in_the_end(
    tmp_path: Path, gone: int, rank: int | None
) -> None:
    kills = 0
    for start in range(20):
        folder = tmp_path / str(start)
        try:
            with killed_at(start, gone):
                bench(folder, rank)
        except Kill:
            kills += 1
        for point in (0, 3, 5):  # and killed again while it goes on
            with pytest.MonkeyPatch.context(), killed_at(point, gone):
                try:
                    bench(folder, rank)
                except Kill:
                    kills += 1
        bench(folder, rank)
        assert list(Results(folder).rows()) == json.loads(json.dumps(ROWS))
        assert read_header(folder)["sessions"][0] == {"processes": 1}
        assert sorted(path.name for path in folder.iterdir()) == ["rows.jsonl", "settings.json"]
    assert kills > 20


def test_a_recording_that_was_cut_anywhere_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    events = recorded_run("=!=", "", first="é→")
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path)
    for event in events:
        writer.handle(event)
    writer.close()
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    for end in [header, *range(header + 1, len(content), 11), len(content)]:
        path.write_bytes(content[:end])
        found = read_trace(path)
        whole = content[:end].count(b"\n") - 1
        assert list(found.events)[:whole] == events[:whole] and len(found.events) in (whole, whole + 1)
        assert bool(found.notes) == (len(found.events) < len(events))


# --- weights --------------------------------------------------------------------------------------------------------


def test_int8_weights_are_whole_or_not_there_wherever_the_run_was_killed(tmp_path: Path, gone: int) -> None:
    import torch

    from fly_cli import quantized

    file = tmp_path / "int8" / "model.safetensors"
    state = {"a": torch.arange(2000)}
    save = quantized.save_file

    def save_by_half(state: Any, path: Path, metadata: Any) -> None:
        save(state, path, metadata=metadata)
        path.write_bytes(path.read_bytes())  # a write that can be cut

    def between(point: int) -> None:
        assert quantized.read_prepared(file) is None
        if point == 2:  # the largest of all leftovers goes with the next model that is prepared
            assert quantized.keep_prepared(file.with_name("other.safetensors"), state)
            assert [path.name for path in file.parent.iterdir()] == ["other.safetensors"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "save_file", save_by_half)
        assert every_kill(gone, lambda: quantized.keep_prepared(file, state), between) >= 4
    assert quantized.read_prepared(file) is not None
    assert not [path for path in file.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("panels_folder")
def test_panels_are_whole_or_not_there_wherever_the_run_was_killed(tmp_path: Path, gone: int) -> None:
    from models_for_tests import tiny_llama

    from fly_cli import panels
    from fly_cli.cpu_linear import plain_linears

    gemm = panels.bf16_gemm()
    assert gemm is not None
    layers = plain_linears(tiny_llama(0).bfloat16())
    (tmp_path / "model").mkdir()

    def job() -> None:
        panels.keep_panels(layers, tmp_path / "model", "tiny", Silent())

    def between(point: int) -> None:
        assert panels.mapped(tmp_path / "model", layers, gemm) is None

    assert every_kill(gone, job, between) >= 4
    assert panels.mapped(tmp_path / "model", layers, gemm) is not None
    assert sorted(path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()) == ["", ".bin"]


def test_the_file_of_a_process_that_is_at_work_stays(
    tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(where: str, process: int) -> Path:
        path = tmp_path / f".weights.{where}-{process}.unfinished"
        path.write_text("half")
        return path

    ours, dead, elsewhere, old = (
        left(files.realm(), os.getppid()),
        left(files.realm(), gone),
        left("0" * 8, gone),
        left("1" * 8, gone),
    )
    os.utime(old, (0, 0))
    (tmp_path / ".weights.of-the.user.unfinished").write_text("")
    with written_whole(tmp_path / "weights") as unfinished:
        unfinished.write_text("new")
        assert unfinished.exists() and not dead.exists() and not old.exists()
    assert ours.exists() and elsewhere.exists()
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_kill_left_of_int4_weights_goes_with_the_next_attempt(tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "int4" / "model [1]-0123"
    left = folder.parent / f".{folder.name}.abcdef"
    (left / "model").mkdir(parents=True)
    (left / "model" / "model.onnx").write_bytes(b"half")

    def failing(model: object, made: Path) -> None:
        raise int4.Int4Error("no")

    with pytest.raises(int4.Int4Error, match="no"):
        int4.build(replace(int4.KERNEL, build=failing), None, folder, torch.zeros(1))
    assert list(folder.parent.iterdir()) == []


SLOW = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
assert sys.stdin.read() == ""
(place / "started").write_text(str(os.getpid()))
time.sleep(float(sys.argv[2]))
(place / "finished").touch()
"""
PARENT = """
import subprocess, sys
from fly_cli.tethered import environment, tether, tethered
with tether() as line:
    sys.exit(subprocess.run(tethered("slow", *sys.argv[1:]), stdin=line, env=environment()).returncode)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("killed", [True, False])
def test_a_child_ends_with_a_parent_that_is_killed_and_not_before(tmp_path: Path, killed: bool) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), str(TESTS.parent)])
    seconds = "60" if killed else "0.2"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), seconds], env={**os.environ, "PYTHONPATH": path}
    )
    started = tmp_path / "started"
    wait_until(lambda: started.exists() and started.read_text() != "")
    if not killed:
        assert parent.wait(PATIENCE) == 0 and (tmp_path / "finished").exists()
        return
    parent.send_signal(signal.SIGKILL)
    parent.wait(PATIENCE)
    child = int(started.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "finished").exists()


def wait_until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


KILLED_WRITER = """
import sys, time, torch
from pathlib import Path
from fly_cli import quantized

def slowly(state, path, metadata):
    path.write_bytes(b"half")
    print("half", flush=True)
    time.sleep(60)

quantized.save_file = slowly
quantized.keep_prepared(Path(sys.argv[1]), {"a": torch.ones(9)})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_the_next_run_removes_the_int8_weights_that_a_killed_one_left(tmp_path: Path) -> None:
    import torch

    from fly_cli.quantized import keep_prepared, read_prepared

    file = tmp_path / "model.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WRITER, str(file)], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stdout.readline() == b"half\n"
    process.kill()
    process.communicate()
    assert len(list(tmp_path.iterdir())) == 1 and read_prepared(file) is None
    assert keep_prepared(file, {"a": torch.ones(9)})
    assert list(tmp_path.iterdir()) == [file]
