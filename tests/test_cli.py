"""The command line on scripted events: what goes to stdout and stderr, exit codes, refusals before any model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Fly, Outcome
from event_helpers import plain, run

from fly_cli.cli.process import quiet_imports
from fly_cli.errors import DecodeError, OutOfMemoryError
from fly_cli.events import Event
from fly_cli.prompts import Prompt

ANSWER = "First d0.0 d0.1 d0.2 d0.3 d0.4 d0.5 d0.6 d0.7 d0.8 t0 a t1 "
NEVER_IMPORTED = ("torch", "transformers", "accelerate")


@pytest.fixture
def fly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Fly]:
    fly = Fly(monkeypatch, capsys, tmp_path)
    yield fly
    fly.close()


def refused(outcome: Outcome, says: str, hint: str) -> None:
    assert outcome.out == ""
    assert outcome.code == 2
    first, blank, second, *rest = outcome.err.splitlines()
    assert first.startswith("error: ") and says in first
    assert blank == ""
    assert second.startswith("hint: ") and hint in second
    assert not first.endswith(".") and not second.endswith(".") and not rest


# --- the answer -----------------------------------------------------------------------------------------------------


def test_stdout_is_the_answer_and_one_final_newline(fly: Fly) -> None:
    outcome = fly("generate", "hi")
    assert outcome.out == ANSWER + "\n"
    assert outcome.code == 0


def test_no_newline_is_added_where_the_answer_ends_in_one(fly: Fly) -> None:
    fly.answers(lambda prompt: plain(["one\n", "two\n"]))
    assert fly("generate", "hi").out == "one\ntwo\n"


def test_stderr_gets_one_closing_line(fly: Fly) -> None:
    (line,) = fly("generate", "hi").err.splitlines()
    assert line.startswith("13 tokens (length), ") and "1 deferred" in line


def test_quiet_silences_stderr_but_not_errors(fly: Fly) -> None:
    assert fly("generate", "-q", "--target", "./none", "--seed", "3", "hi").err == ""
    assert fly("generate", "-q", "-n", "0", "hi").err.startswith("error: ")


def test_verbose_tells_placement_settings_with_origins_and_rounds(fly: Fly) -> None:
    lines = fly("generate", "-v", "-n", "40", "hi").err.splitlines()
    assert "placement: target tiny, float32, 12.0 MB on cpu" in lines
    assert any(line.startswith("max_new_tokens: 40 ") and line.endswith("# --max-new-tokens") for line in lines)
    assert any(line.startswith("window_size: 6 ") and line.endswith("# default") for line in lines)
    assert [line[:8] for line in lines if line.startswith("round ")] == ["round 0:", "round 1:"]


def test_notes_go_to_stderr_one_line_each(fly: Fly) -> None:
    def notes(*flags: str) -> list[str]:
        return [line for line in fly("generate", *flags, "hi").err.splitlines() if line.startswith("note: ")]

    assert notes("-k", "4", "--seed", "3") == [
        "note: a window of 6 does not fit in a draft of 4, so nothing can be deferred; `--window-size 2` fits",
        "note: `--seed` does nothing at temperature 0",
    ]
    assert notes("--target", "./none", "-k", "4", "--theta", "0.6") == [
        "note: no draft model is known for ./none, so drafts are copied from the text; name one with `--draft`",
        "note: `--entropy-threshold` does nothing without a draft model",
    ]
    assert fly("generate", "--seed", "3", "hi").out == ANSWER + "\n"


def test_text_that_was_held_back_is_printed_when_the_run_ends(fly: Fly) -> None:
    fly.answers(lambda prompt: plain(["ple", "as"], held=3))
    assert fly("generate", "--stop", "assistant", "hi").out == "pleas\n"


# --- flags reach the decoder ----------------------------------------------------------------------------------------

FLAGS: list[tuple[list[str], str, str, Any]] = [
    (["--target", "llama-70b"], "models", "target", "llama-70b"),
    (["--draft", "llama-8b"], "models", "draft", "llama-8b"),
    (["--dtype", "float32"], "models", "dtype", "float32"),
    (["--device-map", "cpu"], "models", "device_map", "cpu"),
    (["--draft-device", "cuda:1"], "models", "draft_device", "cuda:1"),
    (["--quantize", "int8"], "models", "quantize", "int8"),
    (["--draft-quantize", "none"], "models", "draft_quantize", "none"),
    (["--compile", "off"], "models", "compile", "off"),
    (["--max-memory", "cpu=20GB,0=40GB"], "models", "max_memory", {"cpu": "20GB", "0": "40GB"}),
    (["--max-memory", "cpu=20GB", "--max-memory", "0=1GiB"], "models", "max_memory", {"cpu": "20GB", "0": "1GiB"}),
    (["--offload-folder", "spill"], "models", "offload_folder", "spill"),
    (["--offline"], "models", "offline", True),
    (["--trust-remote-code"], "models", "trust_remote_code", True),
    (["--allow-missing-weights"], "models", "allow_missing_weights", True),
    (["--mode", "exact"], "decode", "mode", "exact"),
    (["--draft-tokens", "9"], "decode", "draft_tokens", 9),
    (["-k", "9"], "decode", "draft_tokens", 9),
    (["--window-size", "4"], "decode", "window_size", 4),
    (["-w", "4"], "decode", "window_size", 4),
    (["--entropy-threshold", "0.2"], "decode", "entropy_threshold", 0.2),
    (["--theta", "0.2"], "decode", "entropy_threshold", 0.2),
    (["--entropy", "normalized"], "decode", "entropy", "normalized"),
    (["--entropy-top-k", "5"], "decode", "entropy_top_k", 5),
    (["--strict-first", "7"], "decode", "strict_first", 7),
    (["--draft-schedule", "constant"], "decode", "draft_schedule", "constant"),
    (["--no-draft-lookup"], "decode", "draft_lookup", False),
    (["--max-new-tokens", "3"], "decode", "max_new_tokens", 3),
    (["-n", "3"], "decode", "max_new_tokens", 3),
    (["--temperature", "0.5"], "decode", "temperature", 0.5),
    (["--temperature", "1e-9"], "decode", "temperature", 1e-9),
    (["--top-p", "0.5"], "decode", "top_p", 0.5),
    (["--top-k", "5"], "decode", "top_k", 5),
    (["--seed", "5"], "decode", "seed", 5),
    (["--stop", "a,b", "--stop", "c"], "decode", "stop", ("a,b", "c")),
    (["--stop-token", "7"], "text", "stop_token", ("7",)),
    (["--system", "Be brief"], "text", "system", "Be brief"),
    (["-s", "Be brief"], "text", "system", "Be brief"),
    (["--raw"], "text", "raw", True),
    (["--show-special"], "text", "show_special", True),
]


@pytest.mark.parametrize("flags, group, name, value", FLAGS, ids=[" ".join(flags) for flags, *_ in FLAGS])
def test_a_flag_reaches_the_models_or_the_decoder(
    fly: Fly, flags: list[str], group: str, name: str, value: Any
) -> None:
    assert fly("generate", *flags, "hi").code == 0
    assert getattr(getattr(fly.calls, group)[0], name) == value


def test_a_chat_template_is_read_from_its_file(fly: Fly, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ x }}")
    fly("generate", "--chat-template", str(tmp_path / "t.jinja"), "hi")
    assert fly.calls.text[0].chat_template == "{{ x }}"


def test_the_environment_and_the_config_file_reach_the_decoder(
    fly: Fly, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("draft_tokens: 9\nwindow_size: 3\n")
    monkeypatch.setenv("FLY_WINDOW_SIZE", "5")
    fly("generate", "--config", str(tmp_path / "mine.yaml"), "hi")
    assert (fly.calls.decode[0].draft_tokens, fly.calls.decode[0].window_size) == (9, 5)


def test_a_users_alias_and_pair_are_known(fly: Fly, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("aliases: {mine: ./somewhere}\npairs: {mine: qwen-coder-0.5b}\n")
    fly("generate", "--target", "mine", "hi")
    assert fly.calls.models[0].draft == "qwen-coder-0.5b"


def test_a_false_flag_overrules_the_config_file(fly: Fly, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("raw: true\n")
    fly("generate", "--no-raw", "hi")
    assert fly.calls.text[0].raw is False


# --- prompts --------------------------------------------------------------------------------------------------------


def test_piped_text_comes_before_the_argument(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b"some notes\n", tmp_path)
    fly("generate", "Summarise")
    assert fly.calls.prompts[0].text == "some notes\n\nSummarise"


def test_no_stdin_leaves_piped_text_alone(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b"some notes\n", tmp_path)
    fly("generate", "--no-stdin", "Summarise")
    assert fly.calls.prompts[0].text == "Summarise"


def test_a_file_that_is_standard_input_is_read_once(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b"some notes\n", tmp_path)
    assert fly("generate", "-f", str(tmp_path / "stdin")).code == 0
    assert fly.calls.prompts[0].text == "some notes"
    refused(fly("generate", "-f", str(tmp_path / "stdin"), "-"), "are the same input", "drop one")


def test_a_prompt_behind_two_dashes_may_begin_with_a_dash(fly: Fly) -> None:
    assert fly("generate", "--", "-1+1=?").code == 0
    assert fly.calls.prompts[0].text == "-1+1=?"


def test_piped_text_is_never_taken_for_options(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b"-n 5", tmp_path)
    assert fly("generate").code == 0
    assert fly.calls.prompts[0].text == "-n 5"


def test_prompt_ids_are_shown_on_stderr_and_the_answer_goes_on(fly: Fly) -> None:
    outcome = fly("generate", "--show-prompt-ids", "hi")
    assert "prompt ids: [1, 2, 3]" in outcome.err.splitlines()
    assert outcome.out == ANSWER + "\n"


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, says, hint",
    [
        (["generate"], "no prompt", "give one: `fly generate"),
        (["generate", ""], "is empty", "visible character"),
        (["generate", " \n"], "is empty", "visible character"),
        (["generate", "two", "words"], "unexpected extra argument", 'fly generate "two words"'),
        (
            ["generate", "- buy milk"],
            "no such option",
            "`--` before a prompt that begins with a dash: fly generate -- ",
        ),
        (["generate", "-1+1=?"], "no such option", "fly generate -- '-1+1=?'"),
        (["generate", "--help me"], "no such option", "fly generate -- '--help me'"),
        (["generate", "--draft-token", "3", "hi"], "no such option: --draft-token", "did you mean `--draft-tokens`"),
        (["generate", "--quantize", "int3", "hi"], "`--quantize` is 'int3'", "none, int8, int4"),
        (["generate", "--temperature"], "'--temperature' requires an argument", "`fly generate --help`"),
        (["generate", "-k", "many", "hi"], "'--draft-tokens' / '-k'", "`fly generate --help`"),
        (["generate", "-n", "0", "hi"], "`--max-new-tokens` is 0", "at least 1"),
        (["generate", "--temperature", "-0.5", "hi"], "`--temperature` is -0.5", "at least 0"),
        (["generate", "--temperature", "nan", "hi"], "`--temperature` is nan", "at least 0"),
        (["generate", "--top-p", "1.5", "hi"], "`--top-p` is 1.5", "at most 1"),
        (["generate", "--mode", "fast", "hi"], "`--mode` is 'fast'", "fly, exact, target"),
        (["generate", "--entropy", "full", "hi"], "`--entropy` is 'full'", "topk, normalized"),
        (["generate", "--draft-schedule", "fast", "hi"], "`--draft-schedule` is 'fast'", "adaptive, constant"),
        (["generate", "--color", "red", "hi"], "`--color` is 'red'", "auto, always, never"),
        (["generate", "--stop", "", "hi"], "`--stop` has an empty string", "one character"),
        (["generate", "-k", "4", "-w", "4", "hi"], "`--window-size` 4 leaves nothing", "--draft-tokens 15"),
        (["generate", "--raw", "-s", "x", "hi"], "`--raw`", "drop `--raw`"),
        (["generate", "--max-memory", "cpu", "hi"], "`max_memory` is 'cpu'", "cpu=20GB"),
        (["generate", "--device-map", "gpu", "hi"], "`device_map` (--device-map) is 'gpu'", "cuda:0"),
        (["generate", "--chat-template", "/nope", "hi"], "/nope", "Jinja"),
        (["generate", "--config", "/nope", "hi"], "`--config` names /nope", "check the path"),
        (["generate", "--json", "--jsonl", "hi"], "exclude each other", "`--jsonl` gives a row for each prompt"),
        (["generate", "-q", "-v", "hi"], "`--quiet` and `--verbose`", "one of them"),
        (["generate", "-f", "/nope", "hi"], "/nope", "check the path"),
        (["generate", "--trace", "/nope/x", "hi"], "/nope/x", "`--trace`"),
        (["generate", "-"], "`-` asks for a prompt on standard input", "pipe a text"),
        (["generate", "-", "--no-stdin"], "exclude each other", "drop one"),
        (["gen", "hi"], "no such command 'gen'", "`fly --help`"),
        (["--bogus"], "no such option: --bogus", "`fly --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_before_anything_is_loaded(fly: Fly, arguments: list[str], says: str, hint: str) -> None:
    refused(fly(*arguments), says, hint)
    assert not fly.calls.models


def test_a_misspelt_variable_is_refused(fly: Fly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_DRAFT_TOKEN", "3")
    refused(fly("generate", "hi"), "`FLY_DRAFT_TOKEN`", "`FLY_DRAFT_TOKENS`")


def test_square_brackets_and_control_characters_in_an_error_are_shown_as_they_are_or_visible(fly: Fly) -> None:
    outcome = fly("generate", "--mode", "a[bold]b[/x]\x1b[2J", "hi")
    assert "a[bold]b[/x]" in outcome.err
    assert "\x1b" not in outcome.err


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_text_figures_tokens_settings_and_versions(fly: Fly) -> None:
    value = json.loads(fly("generate", "--json", "-n", "40", "hi").out)
    assert value["text"] == ANSWER
    assert value["finish_reason"] == "length"
    assert value["num_prompt_tokens"] == 3 and value["num_new_tokens"] == 13
    assert value["num_deferred_tokens"] == 1 and value["num_spec_steps"] == 2
    assert "".join(token["text"] for token in value["tokens"]) == ANSWER
    assert [token["origin"] for token in value["tokens"]][:4] == ["target", "exact", "exact", "deferred"]
    assert value["settings"]["models"]["target"] == "qwen-coder-1.5b"
    assert value["settings"]["decode"]["seed"] == 0
    assert value["settings"]["text"]["raw"] is False
    assert value["placement"][0]["dtype"] == "float32"
    assert value["stop_ids"] == [2] and set(value["versions"]) >= {"fly", "torch", "transformers", "python"}
    assert value["template_source"] == "chat_template.jinja"
    assert "prompt_ids" not in value


def test_json_has_the_prompt_ids_when_asked(fly: Fly) -> None:
    assert json.loads(fly("generate", "--json", "--show-prompt-ids", "-q", "hi").out)["prompt_ids"] == [1, 2, 3]


def test_json_figures_without_meaning_are_null_and_never_nan(fly: Fly) -> None:
    fly.answers(lambda prompt: plain(["only"], prefill_seconds=0.0, seconds=0.0))
    value = json.loads(fly("generate", "--json", "hi").out, parse_constant=lambda name: pytest.fail(name))
    assert value["draft_acceptance_rate"] is None and value["decode_tps"] is None


def test_several_prompts_give_json_lines_in_order(fly: Fly, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "b", "prompt": "x"}\n{"question_id": 81, "turns": ["y"]}\n{"prompt": "z"}\n')
    rows = [json.loads(line) for line in fly("generate", "-f", str(path)).out.split("\n")[:-1]]
    assert [row["id"] for row in rows] == ["b", "81", "p:3"]
    assert all(row["text"] == ANSWER and row["finish_reason"] == "length" for row in rows)
    assert [prompt.text for prompt in fly.calls.prompts] == ["x", "y", "z"]


def test_line_separators_in_an_answer_stay_in_one_row(fly: Fly) -> None:
    fly.answers(lambda prompt: plain(["a\u2028b", "c\nd"]))
    (line,) = fly("generate", "--jsonl", "hi").out.split("\n")[:-1]
    assert json.loads(line)["text"] == "a\u2028bc\nd"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_several_prompts_need_jsonl(fly: Fly, tmp_path: Path, flags: list[str]) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    refused(fly("generate", *flags, "-f", f"{tmp_path}/a.txt", "-f", f"{tmp_path}/b.txt"), "2 prompts", "`--jsonl`")


def test_a_prompt_that_fails_has_an_error_row_and_the_next_ones_run(fly: Fly, tmp_path: Path) -> None:
    def events(prompt: Prompt) -> Iterator[Event]:
        if prompt.text == "bad":
            raise DecodeError("the logits are not finite", "try float32")
        yield from plain(["fine"])

    fly.answers(events)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "bad"}\n{"prompt": "z"}\n')
    outcome = fly("generate", "-f", str(path), "-q")
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert rows[1]["error"] == "the logits are not finite"
    assert outcome.code == 1
    assert outcome.err == "error: 1 of 3 prompts failed: the logits are not finite\n\nhint: try float32\n"


# --- trace ----------------------------------------------------------------------------------------------------------


def test_a_trace_records_the_run_and_replays_as_the_same_text(fly: Fly, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    first = fly("generate", "--trace", str(path), "hi")
    assert fly.calls.record == [True]
    again = fly("replay", str(path))
    assert (again.code, again.out) == (0, first.out)


def test_without_a_trace_only_mismatches_are_measured(fly: Fly) -> None:
    fly("generate", "hi")
    assert fly.calls.record == [False]


@pytest.mark.parametrize("read", ["prompt", "rows", "config", "template", "link"])
def test_a_trace_never_overwrites_what_the_command_reads(fly: Fly, tmp_path: Path, read: str) -> None:
    contents = {"prompt": "hi", "rows": '{"prompt": "hi"}', "config": "draft_tokens: 9", "template": "{{ x }}"}
    flags = {"prompt": "-f", "rows": "-f", "config": "--config", "template": "--chat-template", "link": "-f"}
    path = tmp_path / f"{read}.txt"
    path.write_text(content := contents.get(read, "hi"))
    trace = path
    if read == "link":
        trace = tmp_path / "link"
        trace.symlink_to(path)
    prompt = [] if flags[read] == "-f" else ["hi"]
    refused(
        fly("generate", "--trace", str(trace), flags[read], str(path), *prompt), "would overwrite", "file of its own"
    )
    assert path.read_text() == content and not fly.calls.models


def test_a_trace_does_not_overwrite_the_file_on_standard_input(fly: Fly, tmp_path: Path) -> None:
    fly.stdin(b"hi", tmp_path)
    refused(fly("generate", "--trace", str(tmp_path / "stdin")), "standard input", "file of its own")
    assert (tmp_path / "stdin").read_bytes() == b"hi"


def test_a_trace_may_replace_an_older_one_or_go_nowhere(fly: Fly, tmp_path: Path) -> None:
    for path in (tmp_path / "run.trace", tmp_path / "run.trace", Path(os.devnull)):
        assert fly("generate", "--trace", str(path), "hi").code == 0


# --- failures -------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Any:
    def events(prompt: Prompt) -> Iterator[Event]:
        yield from run("=!=", reason=None)
        raise error

    return events


def test_an_error_keeps_the_text_so_far(fly: Fly) -> None:
    fly.answers(failing(DecodeError("the logits of step 2 are not finite", "try `--dtype float32`")))
    outcome = fly("generate", "-q", "hi")
    assert outcome.out == "First d0.0 t0 \n"
    assert outcome.err == "error: the logits of step 2 are not finite\n\nhint: try `--dtype float32`\n"
    assert outcome.code == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError(
            "memory ran out while decoding", "use a smaller draft or `--draft lookup`, `--dtype bfloat16`, or"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
    ids=["python", "fly", "torch on the CPU", "torch on a GPU"],
)
def test_running_out_of_memory_is_an_error_with_three_options(fly: Fly, error: Exception) -> None:
    fly.answers(failing(error))
    outcome = fly("generate", "-q", "hi")
    assert outcome.out == "First d0.0 t0 \n"
    first, _, hint = outcome.err.splitlines()
    assert first.startswith("error: memory ran out while decoding")
    assert isinstance(error, OutOfMemoryError) or "decoding beside 1.0 MB of `a/target`" in first
    assert hint.startswith("hint: use a smaller draft or `--draft lookup`, `--dtype bfloat16`, or")
    assert outcome.code == 1


def test_memory_that_runs_out_in_the_prefill_is_told_with_the_sizes_of_the_weights(fly: Fly) -> None:
    def events(prompt: Prompt) -> Iterator[Event]:
        raise MemoryError
        yield

    fly.answers(events)
    outcome = fly("generate", "-q", "hi")
    assert outcome.out == ""
    assert outcome.err.startswith("error: memory ran out while reading the prompt beside 1.0 MB of `a/target`\n")
    assert outcome.code == 1


def test_a_fault_of_ours_keeps_its_traceback_without_local_values(fly: Fly) -> None:
    def events(prompt: Prompt) -> Iterator[Event]:
        token = "hf_" + "secret"
        yield from run("=!=", reason=None)
        raise RuntimeError(f"broken at {len(token)}")

    fly.answers(events)
    outcome = fly("generate", "-q", "hi")
    assert outcome.out == "First d0.0 t0 \n"
    assert "Traceback" in outcome.err and "RuntimeError: broken at 9" in outcome.err
    assert "hf_secret" not in outcome.err
    assert outcome.code == 1


def test_a_failed_json_run_is_still_valid_json(fly: Fly) -> None:
    fly.answers(failing(DecodeError("broken", "mend it")))
    outcome = fly("generate", "--json", "-q", "hi")
    value = json.loads(outcome.out)
    assert (value["finish_reason"], value["error"], value["text"]) == ("error", "broken", "First d0.0 t0 ")
    assert outcome.code == 1


# --- help, version, config ------------------------------------------------------------------------------------------


def test_help_says_what_is_lossy_and_groups_the_flags(fly: Fly) -> None:
    text = fly("generate", "--help").out
    assert "lossy on purpose" in text and "--mode exact is not" in text
    for panel in ("Models:", "Decoding:", "Sampling:", "Prompt:", "Output:"):
        assert f"\n{panel}\n" in text
    assert "lossy on purpose" in fly("--help").out


def test_the_version_is_one_line(fly: Fly) -> None:
    outcome = fly("--version")
    assert outcome.code == 0 and outcome.out.startswith("fly ") and outcome.out.count("\n") == 1


def test_no_command_shows_the_help_and_is_a_usage_error(fly: Fly) -> None:
    outcome = fly()
    assert (outcome.code, outcome.out) == (2, "") and "Usage: fly" in outcome.err


def test_config_show_prints_every_value_with_its_origin_as_yaml(
    fly: Fly, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import yaml

    path = tmp_path / "config.yaml"
    path.write_text("draft_tokens: 9\nstop: ['a\\nb']\naliases: {mine: ./x}\n")
    monkeypatch.setenv("FLY_SEED", "5")
    outcome = fly("config", "show")
    lines = outcome.out.splitlines()
    assert lines[0] == f"# file: {path}"
    assert any(line.startswith("draft_tokens: 9 ") and line.endswith(f"# {path}:draft_tokens") for line in lines)
    assert any(line.startswith("seed: 5 ") and line.endswith("# FLY_SEED") for line in lines)
    assert any(line.startswith("entropy_threshold: 0.3 ") and line.endswith("# default of topk") for line in lines)
    shown = yaml.safe_load(outcome.out)
    assert shown["aliases"] == {"mine": "./x"} and shown["draft_tokens"] == 9
    path.write_text(outcome.out)
    assert fly("config", "show").code == 0


def test_config_show_is_yaml_whatever_characters_the_settings_have(fly: Fly, tmp_path: Path) -> None:
    import yaml

    odd = "é \x7f\x80\x85\u2028\u2029\ufeff\x1b\t\n😀 \\ \"'#"
    path = tmp_path / "odd\x85\u2028\n.yaml"
    path.write_text(yaml.safe_dump({"system": odd, "stop": [odd], "aliases": {odd: "./x"}}), encoding="utf-8")
    outcome = fly("config", "show", "--config", str(path))
    shown = yaml.safe_load(outcome.out)
    assert (shown["system"], shown["stop"], shown["aliases"]) == (odd, [odd], {odd: "./x"})
    assert "é" in outcome.out and "😀" in outcome.out and not set("\x7f\x85\u2028\x1b") & set(outcome.out)


def test_an_alias_with_control_characters_is_shown_on_one_line_without_them(fly: Fly, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('aliases: {"a\\e[2J\\nb": "./x\\e[2J"}\npairs: {"a\\e[2J\\nb": "y\\n"}\n')
    outcome = fly("models")
    assert outcome.code == 0 and "\x1b" not in outcome.out
    assert sum("␛[2J b" in line and "./x␛[2J" in line for line in outcome.out.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["generate", "--help"], ["generate", "--bad"], ["config", "show"], ["replay", "/nope"]],
    ids=" ".join,
)
def test_what_needs_no_model_imports_no_model_library(arguments: list[str]) -> None:
    code = (
        "import sys; from fly_cli.cli import main; main(sys.argv[1:]); "
        f"print([name for name in {NEVER_IMPORTED} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "typed, word, offered",
    [
        ("fly gen", 1, ["generate"]),
        ("fly generate --mode ", 3, ["fly", "exact", "target"]),
        ("fly generate --draft-schedule ", 3, ["adaptive", "constant"]),
        ("fly generate --target qwen-coder", 3, ["qwen-coder-1.5b", "qwen-coder-0.5b"]),
    ],
)
def test_the_shell_completes_commands_choices_and_model_names(typed: str, word: int, offered: list[str]) -> None:
    variables = {"_FLY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(word)}
    command = [sys.executable, "-m", "fly_cli"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert set(offered) <= set(done.stdout.split())


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_do_not_take_the_cores_from_others_unless_asked(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    quiet_imports()
    assert os.environ["OMP_WAIT_POLICY"] == kept


def test_running_the_package_is_running_fly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fly_cli", "generate", "-n", "0", "hi"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: `--max-new-tokens` is 0\n\nhint: ")


UNCONNECTED = """
import socket, sys

def refuse(*given, **named):
    raise AssertionError(f"a connection was made: {given}")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from fly_cli.cli import main

main(sys.argv[1:])
"""


@pytest.mark.parametrize("offline, kept", [("--offline", "folders"), ("HF_HUB_OFFLINE", "hub cache")])
def test_offline_cached_models_answer_without_a_connection_or_a_warning(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, offline: str, kept: str
) -> None:
    names = [str(folder) for folder in tiny_pair_dirs]
    if kept == "hub cache":
        names = ["owner/target", "owner/draft"]
        for name, folder in zip(names, tiny_pair_dirs, strict=True):
            repository = tmp_path / f"models--{name.replace('/', '--')}"
            shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("a" * 40)
    command = [sys.executable, "-c", UNCONNECTED, "generate", "-n", "8", "--target", names[0], "--draft", names[1]]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    if offline == "--offline":
        command.append(offline)
    else:
        environment[offline] = "1"
    done = subprocess.run([*command, "abc"], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert [
        line for line in done.stderr.splitlines() if not line.startswith(("note: ", "8 tokens"))
    ] == []  # no warnings


# --- with models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_pair_dirs: tuple[Path, Path],
) -> Iterator[Fly]:
    """`fly generate` on a tiny random pair; `FLY_*` variables name it."""
    import torch

    fly = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    for name, value in zip(("TARGET", "DRAFT"), tiny_pair_dirs, strict=True):
        monkeypatch.setenv(f"FLY_{name}", str(value))
    monkeypatch.setenv("FLY_DTYPE", "float32")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fly
    torch.set_num_threads(threads)
    fly.close()


def answered(fly: Fly, *arguments: str) -> Any:
    outcome = fly("generate", "--json", "-q", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def ids(value: Any) -> list[int]:
    return [token["id"] for token in value["tokens"]]


def test_exact_mode_gives_the_targets_own_ids_and_fly_mode_says_what_it_deferred(tiny: Fly) -> None:
    target = answered(tiny, "--mode", "target", "-n", "30", "abc")
    exact = answered(tiny, "--mode", "exact", "-n", "30", "abc")
    relaxed = ["-w", "0", "--theta", "0", "--strict-first", "0", "--draft-schedule", "constant"]
    lossy = answered(tiny, "-n", "30", *relaxed, "abc")
    assert ids(exact) == ids(target)
    assert target["num_draft_tokens"] == 0 and target["mean_acceptance_length"] == 1
    assert exact["num_deferred_tokens"] == 0
    assert lossy["num_deferred_tokens"] > 0 and ids(lossy) != ids(target)


def test_never_more_than_the_asked_number_of_tokens(tiny: Fly) -> None:
    whole = ids(answered(tiny, "--mode", "exact", "-k", "8", "-n", "9", "abc"))
    for n in (1, 2, 5):
        value = answered(tiny, "--mode", "exact", "-k", "8", "-n", str(n), "abc")
        assert ids(value) == whole[:n] and value["finish_reason"] == "length"


def test_piped_text_with_or_without_a_newline_and_an_argument_are_the_same_prompt(tiny: Fly, tmp_path: Path) -> None:
    asked = ["--show-prompt-ids", "-n", "1"]
    as_argument = answered(tiny, *asked, "hi")["prompt_ids"]
    for content in (b"hi", b"hi\n", b"\xef\xbb\xbfhi\r\n"):
        tiny.stdin(content, tmp_path)
        assert answered(tiny, *asked)["prompt_ids"] == as_argument
    tiny.stdin(b"hi\n", tmp_path)
    assert answered(tiny, *asked, "--raw")["prompt_ids"] == [71, 72, 198]


def test_a_seed_gives_the_same_text_again_and_is_told_when_it_was_drawn(tiny: Fly) -> None:
    asked = ["--temperature", "1", "-n", "12", "x"]
    drawn = answered(tiny, *asked)
    again = answered(tiny, "--seed", str(drawn["seed"]), *asked)
    assert ids(again) == ids(drawn)
    assert ids(answered(tiny, "--seed", str(drawn["seed"] + 1), *asked)) != ids(drawn)


def test_lookup_drafts_without_a_draft_model(tiny: Fly) -> None:
    value = answered(tiny, "--draft", "lookup", "--mode", "exact", "-n", "30", "abc abc abc")
    assert value["settings"]["models"]["draft"] == "lookup" and len(value["placement"]) == 1
    assert ids(value) == ids(answered(tiny, "--mode", "target", "-n", "30", "abc abc abc"))


def test_a_trace_of_models_replays_as_the_same_text(tiny: Fly, tmp_path: Path) -> None:
    path = str(tmp_path / "run.trace")
    first = tiny("generate", "-q", "--trace", path, "-n", "20", "abc")
    assert tiny("replay", "-q", path).out == first.out


def test_a_folder_that_is_not_there_is_refused(tiny: Fly) -> None:
    refused(tiny("generate", "--target", "./modles/x", "hi"), "modles/x", "check the path")


def test_a_prompt_that_does_not_fit_is_an_error_and_no_traceback(tiny: Fly) -> None:
    outcome = tiny("generate", "-q", "--raw", "a" * 3000)
    assert outcome.code == 2 and outcome.out == ""
    assert "3000" in outcome.err and "2048" in outcome.err
