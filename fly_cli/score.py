"""Graders: how right an answer is, by the rule that its prompt's row names in `scorer`.

| scorer | the row has | score |
|---|---|---|
| `number` | `reference`: a number; `answer_regex`: how an answer announces it | 1 if equal as numbers |
| `python_tests` | `tests`, `entry_point`, `code_prefix` | 1 if the answer's code and the tests run through |
| `contains_all` | `reference`: a list of texts | the share of them in the answer |
| `progression` | `reference`: {"pos": [...], "neg": [...]} | 1 if both sets of atoms are equal |

`python_tests` runs code that a model wrote, and only where `run_code` says so: in a process of its own with limits on
time, memory, file size and processes, an empty environment, a temporary folder, and no starting of programs, network
or writing elsewhere. That stops accidents. It is no sandbox: code that means harm can get around it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import chain
from typing import Any
from unicodedata import digit

RUN_CODE_FLAG = "--run-code"


@dataclass(frozen=True, slots=True)
class Score:
    """0 to 1, or None where the answer was not graded; `reason` says why not, or why it failed."""

    value: float | None
    reason: str | None = None


def score(fields: Mapping[str, Any], answer: str, *, run_code: bool, timeout_s: float = 10.0) -> Score:
    """The score of an answer to the row with these fields."""
    if fields.get("scorer") is None:
        return Score(None, "the row has no `scorer`")
    if reason := problem(fields):
        return Score(None, reason)
    match fields["scorer"]:
        case "number":
            return _score_number(answer, str(fields["reference"]), fields.get("answer_regex"))
        case "contains_all":
            return _score_contains(answer, fields["reference"])
        case "progression":
            return _score_progression(answer, fields["reference"])
    if not run_code:
        return Score(None, f"runs code that the model wrote: needs `{RUN_CODE_FLAG}`")
    if os.name != "posix":
        return Score(None, "the limits for model-written code need Linux or macOS")
    code = extract_code(answer, fields["entry_point"], fields.get("code_prefix") or "")
    failure = run_tests(code, fields["tests"], timeout_s)
    return Score(0.0, failure) if failure else Score(1.0)


def problem(fields: Mapping[str, Any]) -> str | None:
    """Why the row cannot be scored as its `scorer` says; None where it can, or names no scorer."""
    scorer = fields.get("scorer")
    if scorer is None:
        return None
    if not isinstance(scorer, str) or scorer not in CHECKS:
        return f"unknown scorer `{scorer}`; there are {', '.join(CHECKS)}"
    if reason := CHECKS[scorer](fields):
        return f"scorer `{scorer}`: {reason}"
    return None


# --- numbers

NUMBER = r"(-?[$0-9.,]{2,}|-?[0-9]+)"  # with thousands separators and currency, or plain
AFTER_HASHES = re.compile(r"####\s*" + NUMBER)
AFTER_PHRASE = re.compile(r"The (?:final )?answer is:?\s*\**" + NUMBER, re.IGNORECASE)
ANYWHERE = re.compile(NUMBER)
SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{FULLWIDTH COMMA}": ","})


def _check_number(fields: Mapping[str, Any]) -> str | None:
    reference, regex = fields.get("reference"), fields.get("answer_regex")
    if isinstance(reference, bool) or not isinstance(reference, str | int | float) or not _has_digit(str(reference)):
        return "`reference` is not a number"
    if regex is not None:
        if not isinstance(regex, str):
            return "`answer_regex` is not text"
        try:
            re.compile(regex)
        except re.error as error:
            return f"`answer_regex` is no regular expression: {error}"
    return None


def _score_number(answer: str, reference: str, answer_regex: str | None) -> Score:
    found = extract_number(answer, answer_regex)
    if found is None:
        return Score(0.0, "no number in the answer")
    right = _same_number(found, _clean_number(_ascii_digits(reference)))
    return Score(1.0) if right else Score(0.0, f"answered {found}")


def extract_number(answer: str, answer_regex: str | None = None) -> str | None:
    """The number that the answer ends on: the last match of the first rule that finds one.

    Rules in order: `#### 5`, the row's own `answer_regex`, "The (final) answer is 5", any number.
    """
    text = _ascii_digits(answer)
    own = re.compile(answer_regex) if answer_regex else None
    for rule in filter(None, (AFTER_HASHES, own, AFTER_PHRASE, ANYWHERE)):
        found = [_first_group(match) for match in rule.finditer(text)]
        if numbers := [_clean_number(text) for text in found if _has_digit(text)]:
            return numbers[-1]
    return None


def _first_group(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group is not None), match.group())


def _ascii_digits(text: str) -> str:
    """The text with the decimal digits of other scripts as 0 to 9, and their minus and comma as ASCII ones."""
    if text.isascii():
        return text
    return "".join(str(digit(char)) if char.isdecimal() else char for char in text).translate(SIGNS)


def _clean_number(text: str) -> str:
    return text.replace("$", "").replace(",", "").strip().rstrip(".")


def _has_digit(text: str) -> bool:
    return any(char.isdecimal() for char in text)


def _same_number(one: str, other: str) -> bool:
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:  # such as 1.2.3
        return one == other


# --- texts that must be in the answer

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def _check_contains(fields: Mapping[str, Any]) -> str | None:
    wanted = fields.get("reference")
    if not isinstance(wanted, list) or not wanted or not all(isinstance(text, str) and text for text in wanted):
        return "`reference` is not a list of texts"
    return None


def _score_contains(answer: str, wanted: list[str]) -> Score:
    text = THOUSANDS.sub("", answer.lower())
    missing = [one for one in wanted if not re.search(_whole(THOUSANDS.sub("", one.lower())), text)]
    return Score((len(wanted) - len(missing)) / len(wanted), f"missing: {', '.join(missing)}" if missing else None)


def _whole(wanted: str) -> str:
    """A pattern for the text that does not match inside a longer run of digits."""
    before = r"(?<!\d)" if wanted[0].isdecimal() else ""
    after = r"(?!\d)" if wanted[-1].isdecimal() else ""
    return before + re.escape(wanted) + after


# --- the two lists of what an action changes

LIST = re.compile(r"\[([^\[\]]*)\]")
ATOM = re.compile(r"\(([^()]*)\)")


def _check_progression(fields: Mapping[str, Any]) -> str | None:
    reference = fields.get("reference")
    if not isinstance(reference, dict):
        return '`reference` is not an object with "pos" and "neg"'
    for key in ("pos", "neg"):
        atoms = reference.get(key)
        if not isinstance(atoms, list) or not all(isinstance(atom, str) for atom in atoms):
            return f"`reference` has no list of texts `{key}`"
    return None


def _score_progression(answer: str, reference: Mapping[str, list[str]]) -> Score:
    found = extract_progression(answer)
    if found is None:
        return Score(0.0, "no list in the answer")
    wanted = [{_spaced(atom.lower().strip("()")) for atom in reference[key]} for key in ("pos", "neg")]
    return Score(1.0) if list(found) == wanted else Score(0.0, "other effects than the reference")


def extract_progression(answer: str) -> tuple[set[str], set[str]] | None:
    """The positive and negative effects in the answer: its first two lists of atoms; None where it has no list.

    Lists stand in brackets, or behind the headings "Positive Effects" and "Negative Effects". A missing second
    list is empty.
    """
    text = answer.lower()
    lists = LIST.findall(text)
    if not lists and "[" not in text:
        _, positive, rest = text.partition("positive effects")
        first, negative, second = rest.partition("negative effects")
        lists = [first, second] if positive and negative else []
    if not lists:
        return None
    atoms = [{_spaced(atom) for atom in ATOM.findall(part)} for part in lists[:2]]
    return atoms[0], atoms[1] if len(atoms) > 1 else set()


def _spaced(atom: str) -> str:
    return " ".join(atom.split())


# --- Python code and its tests

THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
# A block ends at its fence, or with the text.
FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
MEMORY_BYTES = 2 << 30
FILE_BYTES = 16 << 20


def _check_python(fields: Mapping[str, Any]) -> str | None:
    for key in ("tests", "entry_point"):
        if not isinstance(fields.get(key), str) or not fields[key].strip():
            return f"`{key}` is not text"
    if not isinstance(fields.get("code_prefix") or "", str):
        return "`code_prefix` is not text"
    return None


def extract_code(answer: str, entry_point: str, code_prefix: str = "") -> str:
    """The program, without tests, that an answer stands for.

    Taken is the first fenced block (an unclosed last one counts) that defines `entry_point`, else the first block,
    else the whole answer. Where it defines the function, only what `code_prefix` has before that function (imports,
    helpers) goes before it; else it is the function's body, and all of `code_prefix` goes before it.
    """
    name = re.escape(entry_point)
    definition = re.compile(rf"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*=)", re.MULTILINE)
    answer = THOUGHT.sub("", answer)
    blocks: list[str] = FENCED.findall(answer)
    code = next(chain(filter(definition.search, blocks), blocks, [answer]))
    if not definition.search(code):
        return code_prefix + code
    own = definition.search(code_prefix)
    return (code_prefix[: own.start()] if own else "") + "\n" + code


# What runs in the other process. It reads a secret word and the program from standard input, takes its limits upon
# itself (here, not between fork and exec: that is unsafe in a program with threads), and prints the word with how the
# program ended. A program that leaves early, however it does, cannot print it.
RUNNER = r"""
import os, resource, sys, types

def refuse(event, arguments, here=os.getcwd() + os.sep):
    group = event.partition(".")[0]
    if event in REFUSED or group in ("socket", "ctypes"):
        raise PermissionError(event + " is not allowed here")
    if event == "open":
        path, mode, flags = arguments
        changed = [path] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) else []
    elif event in CHANGES:
        changed = arguments[:2]
    else:
        return
    for path in changed:
        if not isinstance(path, (str, bytes)) or os.fsdecode(path) == os.devnull:
            continue
        if not (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(here):
            raise PermissionError("writing outside the temporary folder is not allowed here")

CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree", "shutil.move"}
REFUSED = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.killpg",
           "subprocess.Popen", "pty.spawn", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit"}
word, cpu_s, memory, file_size = sys.stdin.readline().split()
source, output = sys.stdin.read(), os.dup(1)
for limit, value in (("CPU", cpu_s), ("AS", memory), ("FSIZE", file_size), ("CORE", 0), ("NPROC", 0)):
    kind = getattr(resource, "RLIMIT_" + limit)
    hard = resource.getrlimit(kind)[1]
    value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(kind, (value, value))
module = types.ModuleType("solution")
sys.modules["solution"] = module
sys.argv[:] = ["solution"]
sys.addaudithook(refuse)
try:
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    outcome = "passed"
except BaseException as error:
    outcome = type(error).__name__
os.write(output, ("\n" + word + " " + outcome + "\n").encode())
"""


def run_tests(code: str, tests: str, timeout_s: float) -> str | None:
    """None where the code and then its tests run through in time, else what went wrong."""
    word = secrets.token_hex(16)
    head = f"{word} {int(timeout_s) + 1} {MEMORY_BYTES} {FILE_BYTES}\n"
    program = f"{head}{code}\n\n{tests}\n".encode("utf-8", "replace")
    with tempfile.TemporaryDirectory(prefix="fly-score-") as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", RUNNER],
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.PIPE,
            stdout=output,  # a file: its size is limited, and nothing waits for a reader
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(program, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"still running after {timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nothing left of the group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        outcome = _outcome(output.read().decode("utf-8", "replace"), word)
    if outcome is None:
        return "ended before its tests did"
    if outcome != "passed":
        return f"the code or its tests raised {outcome}"
    return None if process.returncode == 0 else f"ended with exit status {process.returncode}"


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the user's, and a fixed order of sets, so that a score is the same each time."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python itself may need it
    return {"PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder, **kept}


def _outcome(output: str, word: str) -> str | None:
    """What stands behind the word, on the line that begins with it."""
    return next((line.removeprefix(word).strip() for line in output.splitlines() if line.startswith(word)), None)


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "number": _check_number,
    "python_tests": _check_python,
    "contains_all": _check_contains,
    "progression": _check_progression,
}
