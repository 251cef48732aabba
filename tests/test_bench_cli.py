"""`fly bench` on scripted and tiny models: what it prints, keeps, refuses, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import raw_codec, scripted_pair, timeless
from cli_helpers import Fly, Outcome

from fly_cli.bench_rows import Results, read_header
from fly_cli.cached_model import CachedModel
from fly_cli.cli import bench_job
from fly_cli.cli.app import load_command
from fly_cli.schedule import CostTable

HELPERS = Path(__file__).with_name("bench_helpers.py")
PATIENCE = 60.0  # seconds, for a busy machine
QUICK = ["-n", "8", "-k", "5", "-w", "2", "--warmup", "0"]


@pytest.fixture
def fly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    """`fly` on scripted models, with a chat template."""
    made = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    made.loads = []  # type: ignore[attr-defined]
    pair = scripted_pair(raw_codec(raw=False))

    def load_pair(*given: Any, **more: Any) -> Any:
        made.loads.append(given[0])  # type: ignore[attr-defined]
        return pair

    monkeypatch.setattr("fly_cli.models.load_pair", load_pair)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> str:
    return prompts_in(tmp_path / "p.jsonl", 4)


def prompts_in(path: Path, count: int, **more: Any) -> str:
    rows = [{"id": f"p{n}", "prompt": f"prompt {n}", "category": "ab"[n % 2], **more} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return list(map(timeless, Results(folder).rows()))


def refused(outcome: Outcome, *fragments: str) -> None:
    assert (outcome.code, outcome.out) == (2, "")
    assert all(fragment in outcome.err for fragment in fragments), outcome.err
    assert "Traceback" not in outcome.err


# --- what comes out -------------------------------------------------------------------------------------------------


def test_a_table_goes_to_stdout_and_a_line_a_prompt_to_stderr(fly: Fly, file: str) -> None:
    outcome = fly("bench", file, *QUICK)
    assert outcome.code == 0
    assert all(word in outcome.out for word in ("target", "exact", "fly"))
    lines = [line for line in outcome.err.splitlines() if line.startswith("[")]
    assert [line.split(":")[0] for line in lines] == [f"[{n + 1}/4] p{n}" for n in range(4)]
    assert "tokens/s" in lines[0] and " left" in lines[0] and " left" not in lines[-1]


def test_json_is_one_object_and_quiet_says_nothing_else(fly: Fly, file: str) -> None:
    outcome = fly("bench", file, *QUICK, "--json", "-q", "--arms", "target,fly")
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads(outcome.out, parse_constant=lambda word: pytest.fail(word))
    assert summary["arms"] == ["target", "fly"] and summary["complete"]
    assert (summary["num_rows"], summary["num_expected_rows"]) == (8, 8)
    assert summary["overall"]["fly"]["num_new_tokens"] == 32
    assert summary["header"]["prompts"]["count"] == 4


def test_a_folder_keeps_rows_summary_report_and_all_that_they_depend_on(fly: Fly, file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fly("bench", file, *QUICK, "--out", str(out), "--seed", "3").code == 0
    assert {path.name for path in out.iterdir()} == {"settings.json", "rows.jsonl", "summary.json", "report.md"}
    header = read_header(out)
    assert header["arms"]["fly"]["settings"]["draft_tokens"] == 5 and header["seed"] == 3
    assert header["versions"]["torch"] and header["sessions"][0]["machine"]["cores"] >= 1
    assert [model["source"] for model in header["weights"]] == ["scripted", "scripted"]
    assert json.loads((out / "summary.json").read_text())["complete"] is True
    assert [row["prompt_id"] for row in rows_in(out)] == [f"p{n}" for n in range(4) for _ in range(3)]


def test_each_file_may_have_a_count_of_its_own_and_resume_wants_the_same(fly: Fly, tmp_path: Path) -> None:
    files = [prompts_in(tmp_path / f"{name}.jsonl", 5) for name in "ab"]
    asked = ["bench", *files, *QUICK, "--arms", "target", "--out", str(tmp_path / "out"), "--limit"]
    assert fly(*asked, "1", "--limit", "3").code == 0
    assert len(rows_in(tmp_path / "out")) == 4
    refused(fly(*asked, "3", "--limit", "1", "--resume"), "prompts.limits [1, 3], now [3, 1]")


def test_without_a_folder_nothing_is_left_behind(fly: Fly, file: str, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert fly("bench", file, *QUICK).code == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_scores_come_with_the_rows_that_can_be_scored(fly: Fly, tmp_path: Path) -> None:
    file = prompts_in(tmp_path / "p.jsonl", 2, scorer="contains_all", reference=["no such words"])
    assert fly("bench", file, *QUICK, "--out", str(tmp_path / "out"), "--arms", "target").code == 0
    assert [(row["score"], row["scorer"]) for row in rows_in(tmp_path / "out")] == [(0.0, "contains_all")] * 2


def test_a_sweep_runs_its_grid_and_marks_the_front(fly: Fly, file: str) -> None:
    swept = ["--arms", "target,fly", "--sweep", "draft-tokens=3,5", "--sweep", "window-size=1,2"]
    summary = json.loads(fly("bench", file, "-n", "8", "--warmup", "0", "--json", *swept).out)
    assert summary["arms"] == ["target", *(f"fly[draft_tokens={k},window_size={w}]" for k in (3, 5) for w in (1, 2))]
    assert any(summary["overall"][arm]["pareto_front"] for arm in summary["arms"])


def test_two_results_are_compared_without_models(fly: Fly, file: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert fly("bench", file, *QUICK, "--out", str(tmp_path / name)).code == 0
    code = (
        "import sys; from fly_cli.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    for more in ([], ["--json"]):
        asked = ["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), *more]
        done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True)
        assert "fly" in done.stdout and done.stderr == ""
    assert json.loads(done.stdout)["num_common_prompts"] == 4


# --- what is refused before a model loads ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["no prompts", "fly bench prompts.jsonl"]),
        (["no.jsonl"], ["cannot read `no.jsonl`"]),
        (["FILE", "--arms", "flu"], ["no arm `flu`"]),
        (["FILE", "--resume"], ["`--resume` needs a folder", "--out DIR"]),
        (["FILE", "--plots"], ["`--plots` needs a folder"]),
        (["FILE", "--repeat", "0"], ["`repeat` is 0"]),
        (["FILE", "--repeat", "99999999999"], ["`repeat` is 99999999999", "at most 1000"]),
        (["FILE", "--warmup", "99999999999"], ["`warmup` is 99999999999", "at most 1000"]),
        (["FILE", "--limit", "0"], ["`limit` is 0"]),
        (["FILE", "FILE", "--sample", "2", "--sample", "0"], ["`sample` is 0"]),
        (["FILE", "--sample", "2", "--sample", "2"], ["`--sample` is given 2 times, and the number of files is 1"]),
        (["FILE", "--arms", "hf-assisted", "--draft", "lookup"], ["`hf-assisted` needs a draft model"]),
        (["FILE", "--arms", "hf", "--temperature", "1"], ["greedy"]),
        (["--compare", "x", "y"], ["`x` holds no results"]),
        (["FILE", "--mode", "fly"], ["no such option: --mode"]),
    ],
)
def test_what_makes_no_sense_is_refused(fly: Fly, file: str, arguments: list[str], fragments: list[str]) -> None:
    refused(fly("bench", *[file if word == "FILE" else word for word in arguments]), *fragments)
    assert fly.loads == []  # type: ignore[attr-defined]


def test_bad_rows_are_refused_before_loading_or_listed(fly: Fly, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('\ufeff{"prompt": "hi"}\n{bad\n\n[1]\n')
    refused(fly("bench", str(path), *QUICK), "bad.jsonl:2: not JSON")
    assert fly.loads == []  # type: ignore[attr-defined]
    outcome = fly("bench", str(path), *QUICK, "--skip-invalid", "--json")
    assert "bad.jsonl:2" in outcome.err and "bad.jsonl:4" in outcome.err
    assert "3 rows read, 2 skipped, 1 prompts taken" in outcome.err
    header = json.loads(outcome.out)["header"]["prompts"]
    assert (header["read"], len(header["skipped"]), header["count"]) == (3, 2, 1)


def test_rows_may_come_from_standard_input(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two\xe2\x80\xa8three"}', tmp_path)
    outcome = fly("bench", "-", *QUICK, "--json", "--arms", "target")
    assert outcome.code == 0, outcome.err
    prompts = json.loads(outcome.out)["header"]["prompts"]
    assert (prompts["count"], prompts["files"][0]["name"]) == (2, "-")
    fly.stdin(b"", tmp_path)
    refused(fly("bench", "-", *QUICK), "no prompts in `standard input`")


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="needs /dev/stdin")
@pytest.mark.parametrize(
    ("names", "piped"),
    [("- /dev/stdin", True), ("- /dev/stdin", False), ("- -", True), ("/dev/stdin /dev/stdin", True), ("p.jsonl -", 0)],
)
def test_standard_input_named_twice_is_refused(tmp_path: Path, names: str, piped: bool) -> None:
    prompts_in(tmp_path / "p.jsonl", 1)
    refused(fly_in_shell(tmp_path, f"bench {names} -q", piped=piped), "` are the same input")


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="needs /dev/stdin")
@pytest.mark.parametrize("piped", [True, False])
def test_standard_input_holds_rows_under_its_other_name_too(tmp_path: Path, piped: bool) -> None:
    prompts_in(tmp_path / "p.jsonl", 3)
    done = fly_in_shell(tmp_path, "bench /dev/stdin -q --json -n 2 --arms target --warmup 0", piped=piped)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["header"]["prompts"]["count"] == 3


def fly_in_shell(folder: Path, arguments: str, *, piped: bool) -> Outcome:
    """`fly` with p.jsonl on standard input, through a pipe or as a file."""
    command = f'"{sys.executable}" "{HELPERS}" {arguments}'
    command = f"cat p.jsonl | {command}" if piped else f"{command} <p.jsonl"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=folder)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_every_option_that_shapes_an_answer_of_generate_is_there() -> None:
    generate, bench = (
        {name for parameter in load_command(command).params for name in parameter.opts}
        for command in ("generate", "bench")
    )
    only_one_answer = {
        "prompt",
        "--file",
        "-f",
        "--no-stdin",
        "--show-prompt-ids",
        "--mode",
        "--show-rejected",
        "--jsonl",
    }
    assert generate - bench == only_one_answer | {"--trace"}


def test_a_folder_with_something_in_it_is_refused_before_loading(fly: Fly, file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fly("bench", file, *QUICK, "--out", str(out)).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused(fly("bench", file, *QUICK, "--out", str(out)), "is not empty", "--resume")
    refused(
        fly("bench", file, *QUICK, "--out", str(out), "--resume", "-n", "9"),
        "arms.target.settings.max_new_tokens 8, now 9",
        "another `--out`",
    )
    assert len(fly.loads) == 1  # type: ignore[attr-defined]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_told_before_loading(fly: Fly, file: str) -> None:
    outcome = fly("bench", file, *QUICK, "--out", f"{file}/out")
    assert (outcome.code, outcome.out) == (1, "") and f"the folder `{file}/out` cannot be made" in outcome.err
    assert fly.loads == []  # type: ignore[attr-defined]


def test_an_id_of_any_length_is_told_in_few_words(fly: Fly, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a" * 5000, "prompt": "x"}))
    outcome = fly("bench", str(path), *QUICK, "--arms", "target")
    assert "aaa" in outcome.err and max(map(len, outcome.err.splitlines())) < 200


def test_no_draft_model_is_loaded_for_arms_that_need_none(fly: Fly, file: str) -> None:
    assert fly("bench", file, *QUICK, "--arms", "target,lookup").code == 0
    assert fly("bench", file, *QUICK, "--arms", "target,exact").code == 0
    assert [models.draft for models in fly.loads] == ["lookup", "qwen-coder-0.5b"]  # type: ignore[attr-defined]


# --- runs that fail, stop and go on ---------------------------------------------------------------------------------


def test_failed_turns_are_kept_the_run_goes_on_and_the_exit_code_tells(fly: Fly, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "one", "prompt": "x"}\n{"id": "none", "prompt": ""}\n{"id": "two", "prompt": "y"}\n')
    out = tmp_path / "out"
    outcome = fly("bench", str(path), *QUICK, "--out", str(out), "--arms", "target,fly")
    assert outcome.code == 1 and "target" in outcome.out
    assert "error: 2 of 6 turns failed, first `none` in " in outcome.err
    assert [row["status"] for row in rows_in(out)] == ["ok"] * 2 + ["failed"] * 2 + ["ok"] * 2


def test_a_finished_run_resumes_to_the_same_result_without_a_model(
    fly: Fly, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["bench", file, *QUICK, "--out", str(tmp_path / "out")]
    first = fly(*asked)
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    monkeypatch.setattr(bench_job, "load", lambda *_: pytest.fail("loaded the models"))
    again = fly(*asked, "--resume")
    assert again.out == first.out and "all turns are done already" in again.err
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows
    assert len(read_header(tmp_path / "out")["sessions"]) == 1


def test_a_resumed_run_goes_on_with_the_costs_that_it_began_with(
    fly: Fly, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked = ["bench", file, *QUICK, "--out", str(out)]
    assert fly(*asked).code == 0
    began = read_header(out)["cost_table"]
    assert began["target"] != {"1": 9.0}
    lines = (out / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(lines[:5]))
    other = CostTable({1: 9.0}, {1: 1.0})
    header = read_header(out) | {"cost_table": {"digest": other.digest, **other.as_json()}}
    (out / "settings.json").write_text(json.dumps(header))
    seen = []
    monkeypatch.setattr("fly_cli.bench.run", lambda plan, pair, **_: seen.append(pair.costs) or iter(()))
    outcome = fly(*asked, "--resume")
    assert outcome.code == 0, outcome.err
    assert seen == [other]


def test_rows_that_several_processes_left_are_taken_over(fly: Fly, file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["bench", file, *QUICK, "--out", str(out)]
    assert fly(*asked).code == 0
    whole = rows_in(out)
    lines = (out / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rows.jsonl").unlink()
    (out / "rows.rank0.jsonl").write_bytes(b"".join(lines[:2]) + b'{"prompt')
    (out / "rows.rank1.jsonl").write_bytes(b"".join(lines[3:5]))
    outcome = fly(*asked, "--resume")
    assert outcome.code == 0 and "4 turns are done already, 8 are left" in outcome.err
    assert rows_in(out) == whole
    assert [path.name for path in out.glob("rows*")] == ["rows.jsonl"]


class Process:
    """`fly bench` on scripted models, as a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FLY_")}
        self.process = subprocess.Popen(
            [sys.executable, str(HELPERS), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | environment,
        )

    def end_after(self, rows: int, folder: Path, number: int, name: str = "rows.jsonl") -> None:
        """Send the signal as soon as so many rows are on disk."""
        end = time.monotonic() + PATIENCE
        path = folder / name
        while not path.exists() or path.read_bytes().count(b"\n") < rows:
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        self.process.send_signal(number)

    def finish(self) -> Outcome:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Outcome(self.process.returncode, out, err)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_killed_and_resumed_it_gives_the_rows_of_an_unbroken_run(fly: Fly, tmp_path: Path) -> None:
    file = prompts_in(tmp_path / "p.jsonl", 6)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"question_id": 81, "turns": ["one", "two"], "category": "chat"}\n')
    asked = ["bench", str(chats), file, *QUICK]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert fly(*asked, "--out", str(whole)).code == 0
    process = Process(*asked, "--out", str(broken), PAUSE="0.01")
    process.end_after(3, broken, signal.SIGKILL)
    assert process.finish().code == -signal.SIGKILL
    assert 3 <= len(rows_in(broken)) < 24
    with (broken / "rows.jsonl").open("ab") as rows:
        rows.write(b'{"prompt_id": "p3", "arm": "ta')  # what a kill in the middle of a write leaves
    assert fly(*asked, "--out", str(broken), "--resume").code == 0
    assert rows_in(broken) == rows_in(whole) and len(rows_in(whole)) == 24


@pytest.mark.parametrize("kept", [False, True], ids=["nowhere", "in a folder"])
def test_a_reader_that_goes_away_ends_a_run_that_nobody_keeps(tmp_path: Path, kept: bool) -> None:
    file, out = prompts_in(tmp_path / "p.jsonl", 12), tmp_path / "out"
    flags = ["--out", str(out)] if kept else []
    process = Process("bench", file, *QUICK, "--arms", "target", *flags, PAUSE="0.01")
    stdout, stderr = process.process.stdout, process.process.stderr
    assert stdout is not None and stderr is not None
    assert stderr.readline().startswith("[1/12]")
    stdout.close()
    told = stderr.read()
    stderr.close()
    assert process.process.wait(PATIENCE) == 141
    assert all(line.startswith("[") for line in told.splitlines()), told
    assert (told.count("\n") == 11) == kept
    if kept:
        assert len(rows_in(out)) == 12 and json.loads((out / "summary.json").read_text())["complete"]


def test_ctrl_c_shows_and_keeps_what_is_done(fly: Fly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    file = prompts_in(tmp_path / "p.jsonl", 10)
    asked = ["bench", file, *QUICK, "--out", str(out), "--json"]
    interrupt_after(15, monkeypatch)
    outcome = fly(*asked, "-q")
    assert (outcome.code, outcome.err) == (130, "interrupted\n")
    summary = json.loads(outcome.out)
    assert summary["complete"] is False and 1 <= summary["num_rows"] < 30 == summary["num_expected_rows"]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert len(rows_in(out)) == summary["num_rows"]


def interrupt_after(forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a turn."""
    real, left = CachedModel._forward, [forwards]

    def forward(self: Any, *given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return real(self, *given)

    monkeypatch.setattr(CachedModel, "_forward", forward)


def test_ctrl_c_before_the_first_turn_is_done_shows_nothing(
    fly: Fly, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(1, monkeypatch)
    outcome = fly("bench", file, *QUICK, "-q")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


# --- with models, and several processes -----------------------------------------------------------------------------


@pytest.fixture
def tiny(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_pair_dirs: Any
) -> Iterator[Fly]:
    made = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    for name, value in tiny_settings(tiny_pair_dirs).items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def tiny_settings(folders: Any) -> dict[str, str]:
    return {"FLY_TARGET": str(folders[0]), "FLY_DRAFT": str(folders[1]), "FLY_DTYPE": "float32"}


def test_all_arms_run_on_a_real_pair_and_exact_ones_agree(tiny: Fly, file: str, tmp_path: Path) -> None:
    arms = "target,exact,fly,lookup,hf,hf-assisted,hf-lookup"
    outcome = tiny("bench", file, "-n", "12", "--arms", arms, "--out", str(tmp_path / "out"), "--json")
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    for arm in ("exact", "hf", "hf-assisted", "hf-lookup"):
        assert summary["overall"][arm]["agreement_vs_target"]["identical_share"] == 1
    weights = read_header(tmp_path / "out")["weights"]
    assert len({model["sha256"] for model in weights}) == 2 and len(weights[0]["sha256"]) == 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_share_the_prompts_and_merge_their_rows_in_order(fly: Fly, file: str, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    asked = ["bench", file, *QUICK, "--json"]
    assert fly(*asked, "--out", str(alone)).code == 0
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [Process(*asked, "--out", str(shared), RANK=str(rank), **place) for rank in range(2)]
    first, second = (process.finish() for process in both)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert json.loads(first.out)["complete"] and (second.out, second.err) == ("", "")
    key = [(row["prompt_id"], row["arm"]) for row in rows_in(alone)]
    assert [(row["prompt_id"], row["arm"]) for row in rows_in(shared)] == key
    assert rows_in(shared) == rows_in(alone)
    assert [path.name for path in shared.glob("rows*")] == ["rows.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_ends_early_keeps_no_other_waiting(file: str, tmp_path: Path, rank: int) -> None:
    out = tmp_path / "out"
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PAUSE": "0.02"}
    asked = ["bench", file, *QUICK, "--json", "-q", "--out", str(out)]
    both = [Process(*asked, RANK=str(number), **place) for number in range(2)]
    both[rank].end_after(2, out, signal.SIGTERM, f"rows.rank{rank}.jsonl")
    ended, other = both[rank].finish(), both[1 - rank].finish()
    assert (ended.code, other.code) == (143, 1) and "Traceback" not in ended.err + other.err
    assert ("the first process of this run is gone" if rank == 0 else "another process of this run ended") in other.err
    assert 2 <= json.loads((ended, other)[rank == 1].out)["num_rows"] < 12


def test_several_processes_need_a_folder(fly: Fly, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fly_cli.cli.bench.join", lambda environment: type("P", (), {"world": 2, "first": True})())
    refused(fly("bench", file), "several processes need a folder", "--out DIR")
