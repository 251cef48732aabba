"""`fly tune`: what is tried, what is recommended, and how it reaches later runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import raw_codec, scripted_pair
from cli_helpers import Fly
from test_config import configure

from fly_cli import bench
from fly_cli.bench_plan import changed_arm
from fly_cli.bench_rows import read_header
from fly_cli.config import Layer, resolve
from fly_cli.errors import FlyError, SettingsError
from fly_cli.models import Pair
from fly_cli.report import summarise
from fly_cli.settings import DecodeSettings
from fly_cli.tune import BASE, changes_of, recommend, trial_arms
from fly_cli.tuned import TUNABLE, Tuned, how_loaded, keep_tuned, read_tuned

LOADED = how_loaded({})
FOUND = Tuned("qwen-coder-1.5b", "qwen-coder-0.5b", "here", LOADED, "2026-11-30", {"draft_tokens": 24}, 3.0, 7)
build = partial(DecodeSettings)


def rows_of(arm: str, seconds: float, *, right: bool = True, noise: float = 0.01, count: int = 12) -> list[dict]:
    """An arm's rows: `seconds` for the 100 tokens of each answer, equal to the target's answer where `right`."""
    dice = random.Random(arm)
    return [
        {
            "prompt_id": f"p{n}",
            "arm": arm,
            "repeat": 0,
            "turn": 0,
            "status": "ok",
            "category": "all",
            "num_new_tokens": 101,
            "num_first_tokens": 1,
            "decode_s": seconds * (1 + noise * dice.uniform(-1, 1)),
            "ttft_s": 0.1,
            "ids": [1, 2] if right else [1, n],
        }
        for n in range(count)
    ]


def recommended(**seconds_of: Any) -> dict[str, Any]:
    """What is recommended where the arms named by their change take so long; all others are as the defaults."""
    arms = trial_arms(build)
    given = {name.replace("__", "="): value for name, value in seconds_of.items()}
    rows = []
    for arm in arms:
        seconds, more = given.get(arm.name.removeprefix("fly[").removesuffix("]"), 10.0), {}
        if isinstance(seconds, tuple):
            seconds, more = seconds
        rows += rows_of(arm.name, 30.0 if arm.kind == "target" else seconds, **more)
    return recommend(arms, summarise({"arms": [arm.name for arm in arms]}, rows), rows)


# --- what is tried --------------------------------------------------------------------------------------------------


def test_each_arm_changes_one_setting_of_those_in_effect():
    arms = trial_arms(build)
    assert [arm.name for arm in arms[:2]] == ["target", BASE]
    changes = [changes_of(arm, arms[1].settings) for arm in arms[2:]]
    assert all(len(change) == 1 for change in changes)
    assert {name for change in changes for name in change} == set(TUNABLE)
    assert len({arm.name for arm in arms}) == len(arms)


def test_what_cannot_be_is_not_tried():
    arms = trial_arms(partial(DecodeSettings, draft_tokens=8, window_size=4, draft_lookup=False, entropy="normalized"))
    names = [arm.name for arm in arms[2:]]
    assert names == ["fly[draft_tokens=24]", "fly[draft_lookup=true]"]  # a window of 8 does not fit


def test_settings_given_by_hand_stay_and_without_a_draft_model_only_lengths_are_tried():
    given = trial_arms(build, given=["draft_tokens", "window_size"])
    assert not any("draft_tokens" in arm.name or "window_size" in arm.name for arm in given)
    alone = trial_arms(build, draft_model=False)
    assert [arm.name for arm in alone[2:]] == ["fly[draft_tokens=8]", "fly[draft_tokens=24]"]


def test_changes_go_together_in_one_arm():
    arm = changed_arm(build, {"draft_tokens": 24, "draft_lookup": False})
    assert (arm.settings.draft_tokens, arm.settings.draft_lookup) == (24, False)
    assert arm.name == "fly[draft_tokens=24,draft_lookup=false]"


# --- what is recommended --------------------------------------------------------------------------------------------


def test_nothing_is_recommended_where_nothing_is_faster():
    assert recommended() == {}


def test_a_change_that_is_faster_beyond_doubt_is_recommended_and_the_faster_of_two():
    assert recommended(draft_tokens__24=9.0) == {"draft_tokens": 24}
    assert recommended(draft_tokens__24=9.0, draft_tokens__8=8.0) == {"draft_tokens": 8}
    assert recommended(draft_tokens__24=9.0, window_size__4=8.0) == {"draft_tokens": 24, "window_size": 4}


def test_a_gain_within_the_noise_is_none():
    assert recommended(draft_tokens__24=(9.8, {"noise": 0.3})) == {}


def test_a_faster_change_with_worse_answers_is_not_recommended():
    for name in ("window_size=4", "entropy_threshold=0.15"):
        assert recommended(**{name: (5.0, {"right": False})}) == {}
        assert recommended(**{name: 5.0}) != {}


def test_a_window_that_does_not_fit_the_recommended_draft_is_left_out():
    assert recommended(draft_tokens__8=9.0, window_size__8=8.0) == {"draft_tokens": 8}


def test_an_arm_that_failed_is_not_recommended():
    arms = trial_arms(build)
    rows = [row for arm in arms[:2] for row in rows_of(arm.name, 10.0)]
    assert recommend(arms, summarise({"arms": [arm.name for arm in arms]}, rows), rows) == {}


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_a_result_comes_back_and_replaces_the_earlier_one_of_its_pair(tmp_path):
    file = tmp_path / "deep" / "tuned.yaml"
    assert read_tuned(file) == []
    keep_tuned(file, FOUND)
    other = replace(FOUND, machine="elsewhere")
    keep_tuned(file, other)
    newer = replace(FOUND, settings={"window_size": 4})
    keep_tuned(file, newer)
    assert read_tuned(file) == [other, newer]
    assert [path.name for path in file.parent.iterdir()] == ["tuned.yaml"]
    assert file.read_text().count("#") == 1


@pytest.mark.parametrize(
    "content",
    ["[", "- 3", "a: b", "- {target: x}", "3", b"\xff\xfe\x00", "- []"],
)
def test_a_file_that_is_not_ours_is_refused_with_what_to_do(tmp_path, content):
    file = tmp_path / "tuned.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match="not what `fly tune` writes"):
        read_tuned(file)


def test_settings_that_are_not_tuned_are_refused(tmp_path):
    file = tmp_path / "tuned.yaml"
    for settings in ({"trust_remote_code": True}, {"draft_tokens": 99999}, {"draft_tokens": "x"}):
        file.unlink(missing_ok=True)
        keep_tuned(file, replace(FOUND, settings=settings))
        with pytest.raises(SettingsError, match="not what `fly tune` writes"):
            read_tuned(file)


def test_a_damaged_file_is_told_before_anything_is_measured(fly, tmp_path):
    (tmp_path / "tuned.yaml").write_text("xx")
    assert fly("tune", str(four_prompts(tmp_path))).code == 2
    assert fly.kept == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlyError, match="cannot be kept"):
        keep_tuned(tmp_path / "file" / "tuned.yaml", FOUND)


# --- how it reaches later runs --------------------------------------------------------------------------------------


def test_what_was_tuned_stands_in_for_defaults_and_for_nothing_else(tmp_path):
    class Book:
        def draft_for(self, target: str) -> str:
            return "qwen-coder-0.5b"

    found = [replace(FOUND, settings={"draft_tokens": 24, "window_size": 4, "entropy_threshold": 0.6})]
    result = resolve(configure(tmp_path, "window_size: 5\n"), Book(), found)
    assert (result.decode.draft_tokens, result.decode.window_size) == (24, 5)
    assert result.decode.entropy_threshold == 0.6
    assert result.values["draft_tokens"].origin == "fly tune, 2026-11-30"
    assert result.values["draft_tokens"].layer is Layer.TUNED
    assert result.values["entropy_threshold"].value == 0.6
    for other in (
        {"target": "llama-70b"},
        {"draft_quantize": "none"},
        {"quantize": "int4"},
        {"dtype": "float32"},
        {"window_size": 30},
    ):
        assert resolve(configure(tmp_path, "", **other), Book(), found).decode.draft_tokens == 15
    fitting = resolve(configure(tmp_path, "", draft_tokens=4), Book(), found)
    assert fitting.values["window_size"].layer is Layer.DEFAULT  # 4 of 4 would leave nothing to forgive
    normalized = resolve(configure(tmp_path, "", entropy="normalized"), Book(), found)
    assert normalized.decode.entropy_threshold == 0.05
    exact = resolve(configure(tmp_path, "", mode="exact"), Book(), found)
    assert exact.decode.entropy_threshold is None


def test_a_tuning_of_a_version_with_fewer_settings_still_holds_for_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    keep_tuned(file, replace(FOUND, models={"dtype": "float32", "device_map": "cpu"}))
    (found,) = read_tuned(file)
    assert found.models == how_loaded({"dtype": "float32", "device_map": "cpu"})


@pytest.fixture
def fly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    """`fly` on scripted models."""
    made = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    pair = scripted_pair(raw_codec(raw=False))
    monkeypatch.setattr("fly_cli.models.load_pair", lambda *given, **more: pair)
    made.kept = []  # type: ignore[attr-defined]
    monkeypatch.setattr(Pair, "with_measured_costs", lambda self, keep: made.kept.append(keep) or self)
    yield made
    made.close()


def four_prompts(folder: Path) -> Path:
    file = folder / "p.jsonl"
    file.write_text("".join(f'{{"id": "p{n}", "prompt": "hello {n}"}}\n' for n in range(4)))
    return file


def test_a_tuning_shows_the_trade_off_and_keeps_what_was_found(fly, tmp_path, monkeypatch):
    prompt = four_prompts(tmp_path)
    monkeypatch.setattr("fly_cli.cli.tune.recommend", lambda arms, summary, rows: {"draft_tokens": 24})
    outcome = fly("tune", str(prompt), "-n", "6")
    assert outcome.code == 0, outcome.err
    assert "fly[draft_tokens=8]" in outcome.err and outcome.out == "draft_tokens: 24\n"
    assert fly.kept == [True]
    (found,) = read_tuned(tmp_path / "tuned.yaml")
    assert (found.target, found.settings, found.num_prompts) == ("qwen-coder-1.5b", {"draft_tokens": 24}, 4)
    shown = fly("config", "show").out
    line = next(line for line in shown.splitlines() if line.startswith("draft_tokens"))
    assert line.split() == ["draft_tokens:", "24", "#", "fly", "tune,", found.date]


def test_a_tuning_reaches_a_bench_of_the_same_pair(fly, tmp_path, monkeypatch):
    prompt = four_prompts(tmp_path)
    monkeypatch.setattr("fly_cli.cli.common.this_machine", lambda: "here")
    keep_tuned(tmp_path / "tuned.yaml", FOUND)
    assert fly("bench", str(prompt), "-n", "4", "--out", str(tmp_path / "out")).code == 0
    assert read_header(tmp_path / "out")["arms"]["fly"]["settings"]["draft_tokens"] == 24


def test_a_prompt_that_fails_does_not_end_the_tuning(fly, tmp_path, monkeypatch):
    four_prompts(tmp_path)
    usual = bench.answer

    def sometimes(pair, prompt, kind, settings):
        if prompt.id == "p1":
            raise ValueError("no")
        return usual(pair, prompt, kind, settings)

    monkeypatch.setattr(bench, "answer", sometimes)
    outcome = fly("tune", str(tmp_path / "p.jsonl"), "-n", "4")
    assert outcome.code == 0, outcome.err
    assert "turns failed" in outcome.err and read_tuned(tmp_path / "tuned.yaml")


def test_a_folder_that_holds_something_is_refused_before_anything_is_measured(fly, tmp_path):
    prompt = four_prompts(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    outcome = fly("tune", str(prompt), "--out", str(tmp_path / "out"))
    assert outcome.code == 2 and "is not empty" in outcome.err and fly.kept == []


def test_changes_that_do_not_pay_together_are_dropped(fly, tmp_path, monkeypatch):
    prompt = four_prompts(tmp_path)
    answers = iter([{"draft_tokens": 24, "window_size": 4}, {}])
    monkeypatch.setattr("fly_cli.cli.tune.recommend", lambda arms, summary, rows: next(answers))
    outcome = fly("tune", str(prompt), "-n", "6", "--out", str(tmp_path / "out"))
    assert outcome.code == 0 and "measured once more it does not pay" in outcome.err
    assert outcome.out == "# nothing is faster for certain than the settings in effect\n"
    assert read_tuned(tmp_path / "tuned.yaml")[0].settings == {}
    assert (tmp_path / "out" / "together" / "rows.jsonl").exists()


def test_a_dry_run_keeps_nothing(fly, tmp_path, monkeypatch):
    prompt = four_prompts(tmp_path)
    assert fly("tune", str(prompt), "-n", "4", "--dry-run", "-q").code == 0
    assert fly.kept == [False]
    assert not (tmp_path / "tuned.yaml").exists()


def test_too_few_prompts_are_refused_at_once(fly, tmp_path):
    (tmp_path / "p.txt").write_text("hello")
    outcome = fly("tune", str(tmp_path / "p.txt"))
    assert outcome.code == 2 and "1 prompt cannot tell a gain from noise" in outcome.err and fly.kept == []


@pytest.mark.parametrize(
    "arguments, message",
    [([], "no prompts"), (["nowhere.txt"], "cannot read"), (["p.txt", "--resume"], "needs a folder")],
)
def test_bad_input_is_refused_before_anything_is_loaded(fly, arguments, message):
    outcome = fly("tune", *arguments)
    assert (outcome.code, outcome.out) == (2, "") and message in outcome.err
