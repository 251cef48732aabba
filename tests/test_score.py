"""Answers are graded by their row's rule, and model-written code runs only when asked, and within limits."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fly_cli.score import RUN_CODE_FLAG, Score, extract_code, extract_number, problem, run_tests, score

ADD = {"scorer": "python_tests", "entry_point": "add", "tests": "assert add(2, 3) == 5\n"}


def grade(fields, answer, *, run_code=False, timeout_s=10.0):
    return score(fields, answer, run_code=run_code, timeout_s=timeout_s)


# --- numbers


@pytest.mark.parametrize(
    "answer, number",
    [
        ("First 3, then 4, so 12", "12"),
        ("#### 7\nThe answer is 9, or 11", "7"),  # hashes win
        ("#### 7 ... #### 8", "8"),  # the last of a rule
        ("The final answer is 5. I checked it 3 times", "5"),
        ("the answer is **1,250**", "1250"),
        ("The answer is: $1,234.50.", "1234.50"),
        ("It costs $18.", "18"),
        ("below zero: -5", "-5"),
        ("\N{MINUS SIGN}5 degrees", "-5"),
        ("মোট ১৮", "18"),
        ("๑๒ ตัว", "12"),
        ("全部で１，２００円", "1200"),
        ("x² is a square", None),
        ("no number ... at all, $", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(answer, number):
    assert extract_number(answer) == number


def test_the_rows_own_phrase_comes_after_hashes_and_before_the_english_one():
    regex = r"Die Antwort lautet (\-?[0-9\.\,]+)"
    assert extract_number("The answer is 1. Die Antwort lautet 2. Oder 3", regex) == "2"
    assert extract_number("#### 4 Die Antwort lautet 2", regex) == "4"
    assert extract_number("The answer is 1, not 6", regex) == "1"


@pytest.mark.parametrize(
    "reference, answer, value",
    [
        ("18", "18.00", 1.0),
        ("1000", "1,000", 1.0),
        (18, "so 18", 1.0),
        ("18", "19", 0.0),
        ("0.5", "version 0.5.1", 0.0),
    ],
)
def test_numbers_are_equal_as_numbers(reference, answer, value):
    assert grade({"scorer": "number", "reference": reference}, answer).value == value


def test_a_wrong_number_is_named():
    assert grade({"scorer": "number", "reference": "18"}, "20") == Score(0.0, "answered 20")
    assert grade({"scorer": "number", "reference": "18"}, "many") == Score(0.0, "no number in the answer")


# --- contains_all


@pytest.mark.parametrize(
    "wanted, answer, value",
    [
        (["9539641", "9222447"], "They are 9539641 and 9,222,447.", 1.0),
        (["9539641", "9222447"], "9539641,9222447", 1.0),
        (["9539641", "9222447"], "only 9539641", 0.5),
        (["953964"], "9539641", 0.0),  # inside a longer number
        (["234"], "1,234,567", 0.0),
        (["1,234"], "that is 1234", 1.0),
        (["Paris"], "in PARIS2024", 1.0),
        (["a.c"], "abc", 0.0),
    ],
)
def test_the_share_of_wanted_texts_in_the_answer(wanted, answer, value):
    assert grade({"scorer": "contains_all", "reference": wanted}, answer).value == value


def test_what_is_missing_is_named():
    assert grade({"scorer": "contains_all", "reference": ["a", "b", "c"]}, "B") == Score(1 / 3, "missing: a, c")


# --- progression


@pytest.mark.parametrize(
    "answer, value",
    [
        ("[(at-ferry l0)] [(at-ferry l4), (empty)]", 1.0),
        ("Lists:\n[( AT-FERRY   L0 )]\n[(empty), (at-ferry l4)]\nand [(more)]", 1.0),
        ("**Positive Effects**: (at-ferry l0)\n**Negative Effects**: (at-ferry l4) (empty)", 1.0),
        ("[(at-ferry l4), (empty)] [(at-ferry l0)]", 0.0),
        ("[(at-ferry l0)]", 0.0),
        ("(at-ferry l0)", 0.0),
        ("", 0.0),
    ],
)
def test_both_lists_of_effects_must_be_equal_as_sets(answer, value):
    reference = {"pos": ["(at-ferry l0)"], "neg": ["(at-ferry l4)", "(empty)"]}
    assert grade({"scorer": "progression", "reference": reference}, answer).value == value


def test_a_missing_second_list_is_empty():
    assert grade({"scorer": "progression", "reference": {"pos": ["(a)"], "neg": []}}, "[(a)]").value == 1


# --- which code an answer stands for


@pytest.mark.parametrize(
    "answer, code",
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", "\ndef add(a, b):\n    return a + b\n"),
        ("```\nx = 1\n```\n```py\ndef add(a, b): ...\n```", "\ndef add(a, b): ...\n"),  # the block that defines it
        ("```\none\n```\n```\ntwo\n```", "one\n"),  # the first where none does
        ("Sure:\n```python\nadd = sum", "\nadd = sum"),  # unclosed
        ("def add(a, b): ...", "\ndef add(a, b): ..."),  # no block
        ("<think>```\ndef add(): bad\n```</think>```\ndef add(): good\n```", "\ndef add(): good\n"),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert extract_code(answer, "add") == code


def test_a_whole_function_gets_the_imports_and_helpers_of_the_prefix_and_a_body_gets_all_of_it():
    prefix = "import math\n\ndef add(a, b):\n    '''Sum.'''\n"
    assert extract_code("```\ndef add(a, b): return 1\n```", "add", prefix) == (
        "import math\n\n\ndef add(a, b): return 1\n"
    )
    assert extract_code("    return a + b\n", "add", prefix) == prefix + "    return a + b\n"


# --- running it


def test_code_runs_only_when_asked_and_the_reason_names_the_flag(tmp_path):
    mark = tmp_path / "ran"
    found = grade(ADD, f"```\nopen({str(mark)!r}, 'w')\ndef add(a, b): return a + b\n```")
    assert found.value is None
    assert RUN_CODE_FLAG == "--run-code" and RUN_CODE_FLAG in found.reason
    assert not mark.exists()


def test_right_code_scores_one_and_wrong_code_names_what_it_raised():
    assert grade(ADD, "```python\ndef add(a, b):\n    return a + b\n```", run_code=True) == Score(1.0)
    wrong = grade(ADD, "```python\ndef add(a, b):\n    return a - b\n```", run_code=True)
    assert wrong == Score(0.0, "the code or its tests raised AssertionError")


@pytest.mark.parametrize(
    "code, outcome",
    [
        ("def f(:", "raised SyntaxError"),
        ("import sys; sys.exit(0)", "raised SystemExit"),  # before the tests
        ("import os; os._exit(0)", "ended before its tests did"),
        ("import os; os.abort()", "ended before its tests did"),
        ("import atexit, os; atexit.register(os._exit, 3)", "ended with exit status 3"),
        ("input()", "raised EOFError"),  # nothing on standard input
        ("import subprocess; subprocess.run(['true'])", "raised PermissionError"),
        ("import os; os.fork()", "raised PermissionError"),
        ("import os; os.system('true')", "raised PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "raised PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "raised PermissionError"),
        ("x = bytearray(3 << 30)", "raised MemoryError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (1, 1))", "raised PermissionError"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "ended before its tests did"),  # a full file
        ("import sys; sys.stdout.write('no line end')", None),
        ("import sys; sys.stdout.close()", None),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: int = 1\nassert A().x == 1", None),
        ("if __name__ == '__main__': raise ValueError", None),
        ("open('mine', 'w').write('here'); assert open('mine').read() == 'here'", None),
        ("import tempfile; tempfile.TemporaryFile().write(b'x')", None),
        ("import os; open(os.devnull, 'w')", None),
    ],
)
def test_how_a_program_ends(code, outcome):
    found = run_tests(code, "assert True", timeout_s=10)
    assert found is None if outcome is None else outcome in found


def test_an_endless_program_is_stopped_in_time():
    started = time.monotonic()
    assert run_tests("while True: pass", "", timeout_s=0.5) == "still running after 0.5 s"
    assert time.monotonic() - started < 5


def test_files_outside_its_folder_cannot_be_written_removed_or_reached_by_leaving_it(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for code in (
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import pathlib; pathlib.Path({str(kept)!r}).rename('taken')",
        f"import os; os.chdir({str(tmp_path)!r}); open('kept', 'a')",
        f"import os; os.symlink({str(kept)!r}, 'link'); open('link', 'w')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ):
        assert "PermissionError" in run_tests(code, "", timeout_s=10), code
    assert kept.read_text() == "mine"


def test_the_program_sees_nothing_of_the_users_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    check = f"""
        import os, sys
        assert 'HF_TOKEN' not in os.environ
        assert os.path.realpath(os.environ['HOME']) == os.getcwd() != {os.getcwd()!r}
        assert not any('site-packages' in path for path in sys.path) and '' not in sys.path
        assert sys.argv == ['solution']
    """
    assert run_tests(textwrap.dedent(check), "", timeout_s=10) is None


def test_the_order_of_a_set_is_the_same_each_time():
    code = "order = ''.join({'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta'})\n"
    command = [sys.executable, "-c", f"{code}print(order, end='')"]
    seen = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert run_tests(code, f"assert order == {seen.stdout!r}", timeout_s=10) is None


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc")
def test_nothing_of_the_program_is_left_when_scoring_is_interrupted(monkeypatch):
    started = []
    real = subprocess.Popen.communicate

    def interrupted(process, *arguments, **options):
        started.append(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            real(process, *arguments, timeout=0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tests("while True: pass", "", timeout_s=10)
    assert not Path(f"/proc/{started[0]}").exists()


# --- rows that cannot be scored


def test_a_row_without_a_scorer_has_no_score_and_no_problem():
    assert problem({"category": "writing"}) is None
    assert grade({"category": "writing"}, "text") == Score(None, "the row has no `scorer`")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"scorer": "vibes"}, "unknown scorer `vibes`"),
        ({"scorer": ["number"]}, "unknown scorer"),
        ({"scorer": "number"}, "`reference` is not a number"),
        ({"scorer": "number", "reference": "many"}, "`reference` is not a number"),
        ({"scorer": "number", "reference": "1", "answer_regex": "("}, "`answer_regex` is no regular expression"),
        ({"scorer": "contains_all", "reference": []}, "`reference` is not a list of texts"),
        ({"scorer": "contains_all", "reference": "abc"}, "`reference` is not a list of texts"),
        ({"scorer": "progression", "reference": {"pos": []}}, "no list of texts `neg`"),
        ({"scorer": "python_tests", "tests": "assert f()"}, "`entry_point` is not text"),
        ({"scorer": "python_tests", "entry_point": "f", "tests": ""}, "`tests` is not text"),
    ],
)
def test_a_row_that_cannot_be_scored_says_why_before_any_answer_is_there(fields, words):
    assert words in problem(fields)
    found = grade(fields, "anything", run_code=True)
    assert found.value is None and words in found.reason
