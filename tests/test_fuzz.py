"""Whatever a file holds, its reader gives what it stands for or one error that names the place: never a traceback."""

import json
import struct

import pytest
from cli_helpers import Fly
from event_helpers import Block, run
from fuzz_helpers import damaged, fuzz, spoilt, spoilt_line
from hypothesis import given
from hypothesis import strategies as st
from weights_helpers import write_gguf

from fly_cli.bench_rows import FORMAT, Answered, Results, begin, ok_row, to_line
from fly_cli.catalog import load_catalog
from fly_cli.config import Layer, Value, load_config, read_device_map, resolve
from fly_cli.errors import PromptError, SettingsError, UnsupportedModelError, UsageError
from fly_cli.gguf_header import read_header
from fly_cli.prompts import read_jsonl
from fly_cli.settings import DecodeSettings, check_range
from fly_cli.stats import summarize
from fly_cli.stops import StopMatcher
from fly_cli.trace import HEADER, dump_line, event_to_json
from fly_cli.tuned import read_tuned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def fly(monkeypatch, capsys, tmp_path):
    fly = Fly(monkeypatch, capsys, tmp_path)
    yield fly
    fly.close()


def is_refusal(error):
    """Whether this is one line of what, perhaps one of what to do, for a user who gave something wrong."""
    return error.exit_code == 2 and bool(error.message) and "\n" not in error.message + error.hint


# --- prompts

ROWS = [
    {"prompt": "Say hi", "id": "a", "score": 0.5, "tags": ["x", {"y": None}]},
    {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "😀"}]},
    {"question_id": 81, "turns": ["one", "two"], "category": "writing"},
]
JSONL = [json.dumps(row).encode() + b"\n" for row in ROWS]


@fuzz(150)
@given(spoilt_line(JSONL), st.booleans())
def test_any_bytes_are_prompts_or_an_error_with_line_and_reason(content, skip):
    try:
        rows = read_jsonl(content, "dir/p.jsonl", skip_invalid=skip)
    except PromptError as error:
        assert is_refusal(error)
        assert error.message.startswith(("dir/p.jsonl:", "no prompts in `dir/p.jsonl`"))
        return
    assert rows.prompts and (skip or not rows.skipped)
    assert all(one.where.startswith("dir/p.jsonl:") and one.reason for one in rows.skipped)
    for prompt in rows.prompts:
        said = [prompt.text or "", *(text for message in prompt.messages or () for text in message.values())]
        "".join(said).encode()  # no half of a surrogate pair is left
        json.dumps(dict(prompt.fields), allow_nan=False)


@fuzz(80)
@given(
    st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n", b" \n\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_prompts_come_back_as_they_were_written(texts, escaped, end, mark):
    lines = [json.dumps({"prompt": text}, ensure_ascii=escaped).encode() + end for text in texts]
    assert [prompt.text for prompt in read_jsonl(mark + b"".join(lines), "p.jsonl").prompts] == texts


# --- settings

YAML = """\
# mine
target: my-model
draft: qwen-coder-0.5b
draft_tokens: 12
entropy_threshold: 0.4
stop: ["a", 'b c', "\\n"]
max_memory: {cpu: 20GB, 0: 40GB}
device_map: cpu
chat_template: chatml
raw: no
seed: 7
aliases:
  my-model: /data/my-model
  other: {hub: owner/name, file: a.gguf, bytes: 5, wheels: {package: "p{part}", parts: 2, version: "1"}}
pairs: {my-model: other}
"""
TUNED = """\
- target: a
  draft: b
  machine: m
  models: {dtype: auto, device_map: cpu}
  date: 2026-01-31
  settings: {draft_tokens: 8, entropy_threshold: 0.2}
  speedup_vs_target: 1.5
  num_prompts: 9
"""
YAML_JUNK = """&a |*a|<<: *a|- |[|]|{|}|? |: |!!int |!!float |!!bool |!!null
!!timestamp |!!binary |!!set |!!omap |!!pairs
!!python/name:os.system |!x |2001-02-31|0b_|0x_|0o7|09|1:70:3|.inf|.nan|1e400|~
null|yes|| |>-|'|"|\\x00|\\ud800|---|...|%YAML 1.1
%TAG ! x|@|`|#|\t|~no-such-user/x|\x07|\x85|\u2028|\ufeff|\ud7ff|a\0b|draft_tokens|theta|7|é|auto|cpu|map.yaml"""
YAML_JUNK = [piece.encode() for line in YAML_JUNK.split("\n") for piece in line.split("|")]
YAML_JUNK += [
    b"[" * 2000,
    b"- " * 300,
    b"{a: " * 300,
    b"9" * 400,
    b"0x" + b"f" * 5000,
    b"190:" * 3000 + b"1",
    b"x" * 5000,
]


@fuzz(150)
@given(st.sampled_from([YAML, TUNED]).flatmap(lambda text: damaged(text.encode(), (*YAML_JUNK, b"\n", b" "))))
def test_any_yaml_gives_settings_or_one_error(folder, content):
    file = folder / "any.yaml"
    file.write_bytes(content)
    named = Value(str(file), Layer.FLAG, "--device-map")
    stop = {"FLY_STOP": content.decode("utf-8", "replace").replace("\0", "")}
    for read in (
        lambda: configured(load_config({}, environment={}, default_file=file)),
        lambda: configured(load_config({}, environment=stop, default_file=folder / "none")),
        lambda: read_device_map(named),
        lambda: read_tuned(file),
    ):
        try:
            repr(read())
        except SettingsError as error:
            assert is_refusal(error)


def configured(config):
    return resolve(config, load_catalog(config.aliases, config.pairs))


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b}\n  <<: [*{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        (LAUGHS, ":2 is not YAML: a list or table is used again"),
        (MERGES, ":3 is not YAML: a list or table is used again"),
        ("stop: &a [*a]", ":1 is not YAML: a list or table is used again"),
        ("stop: " + "[" * 2000, ":1 is not YAML: nested too deeply"),
        ("seed: 1\nstop: 2001-02-31", ":2 is not YAML: timestamp that is none"),
        ("seed: !!int x", ":1 is not YAML: int that is none"),
        ("raw: !!bool x", ":1 is not YAML: bool that is none"),
        ("temperature: " + "9" * 400, ":1 is not YAML: int that is none, or too large"),
        ("seed: 0x" + "f" * 5000, ":1 is not YAML: int that is none, or too large"),
        ("seed: 1\ntemperature: 1\nseed: 2", ":3 is not YAML: `seed` is there twice"),
        ("? [a]\n: 1", "unhashable"),
        ("chat_template: ~no-such-user/x", "~no-such-user/x: No such file"),
        ("chat_template: " + "x" * 5000 + "/y", "File name too long"),
        ('chat_template: "a\\0b"', "names "),
        ('device_map: "a\\0b.yaml"', "no such file"),
        ("device_map: " + "x" * 5000 + ".yaml", "no such file"),
    ],
    ids=range(16),
)
def test_hostile_yaml_is_refused_with_line_and_reason(folder, yaml, says):
    file = folder / "hostile.yaml"
    file.write_text(yaml)
    with pytest.raises(SettingsError) as caught:
        configured(load_config({}, environment={}, default_file=file))
    assert says in caught.value.message and is_refusal(caught.value)


def test_a_scalar_may_be_named_and_used_again(folder):
    file = folder / "scalars.yaml"
    file.write_text("stop: [&end 'END', *end]\nmax_memory: {cpu: &size 20GB, 0: *size}")
    assert configured(load_config({}, environment={}, default_file=file)).decode.stop == ("END", "END")


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "strict_first", "temperature", "seed", "draft_tokens"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=range(3))
def test_a_number_that_no_computer_holds_is_refused(name, value):
    with pytest.raises(SettingsError, match=f"`{name}` is -?inf"):
        DecodeSettings(**{name: value})
    with pytest.raises(SettingsError, match=name):
        check_range(name, value, 1)


# --- traces

RUNS = [run("==x======", Block("=!=", ["a ", "b ", "c "], held=2), first="First "), run("==", reason=None)]
TRACE = [dump_line(HEADER).encode()]
TRACE += [dump_line(event_to_json(event)).encode() for events in RUNS for event in events]


@fuzz(150)
@given(spoilt_line(TRACE), st.sampled_from([[], ["--json"], ["--color", "always"], ["--theta", "2", "--json"]]))
def test_any_trace_is_shown_or_an_error_names_its_line(fly, folder, content, flags):
    file = folder / "any.trace.jsonl"
    file.write_bytes(content)
    outcome = fly("replay", str(file), *flags)
    assert outcome.code in (0, 2) and "Traceback" not in outcome.err
    if outcome.code == 2:
        assert "error: the trace" in outcome.err or f"{file}:" in outcome.err


# --- results of a bench

SUMMARY = summarize(RUNS[0]).as_json()
LABELS = {"category": "code", "subtask": None}
HEADERS = {
    "format": FORMAT,
    "arms": {"target": {}, "fly": {"draft_tokens": 15}},
    "seed": 0,
    "sessions": [{"machine": 1}],
}
RESULTS = [
    to_line(
        ok_row((prompt, arm, 0, 0), LABELS, Answered("text", [1, 2, 3], SUMMARY), score=1.0, wall_s=1.0)
        | {"scorer": "x"}
    )
    for arm in ("target", "fly")
    for prompt in "abc"
]


def results_folder(folder, rows, header):
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_bytes(header)
    (folder / "rows.jsonl").write_bytes(rows)
    return folder


@fuzz(120)
@given(
    st.tuples(spoilt_line(RESULTS), st.just(json.dumps(HEADERS).encode()))
    | st.tuples(st.just(b"".join(RESULTS)), damaged(json.dumps(HEADERS).encode()))
    | st.tuples(st.just(b"".join(RESULTS)), spoilt(HEADERS).map(lambda header: json.dumps(header).encode())),
    st.sampled_from([[], ["--json"]]),
)
def test_any_results_are_compared_and_taken_up_or_an_error_names_the_place(fly, folder, files, flags):
    other = results_folder(folder / "whole", b"".join(RESULTS), json.dumps(HEADERS).encode())
    spoilt_one = results_folder(folder / "spoilt", *files)
    for pair in ([other, spoilt_one], [spoilt_one, other]):
        outcome = fly("bench", "--compare", *map(str, pair), *flags)
        assert outcome.code in (0, 2) and "Traceback" not in outcome.err
        assert outcome.code == 0 or str(spoilt_one) in outcome.err
    try:
        begin(spoilt_one, HEADERS, resume=True)
        Results(spoilt_one).merge([("b", "fly", 0, 0), ("a", "target", 0, 0)])
    except UsageError as error:
        assert str(spoilt_one) in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"num_new_tokens": "5"},
        {"decode_s": 10**30},
        {"decode_s": True},
        {"ids": [2**40]},
        {"ids": "abc"},
        {"ids": [1.5]},
        {"acceptance_histogram": {"x": 1}},
        {"acceptance_histogram": {"1": -1}},
        {"draft_length_histogram": {"9999999999": 1}},
        {"origins": ["exact"]},
        {"acceptance_by_position": [None]},
        {"score": "high"},
        {"text": 5},
        {"repeat": True},
    ],
    ids=str,
)
def test_a_row_with_a_value_that_cannot_be_counted_is_named(fly, folder, change):
    row = to_line(json.loads(RESULTS[0]) | change)
    spoilt_one = results_folder(folder / "one", RESULTS[1] + row, json.dumps(HEADERS).encode())
    outcome = fly("bench", "--compare", str(spoilt_one), str(spoilt_one))
    assert outcome.code == 2 and "rows.jsonl:2 is no row of a bench" in outcome.err


def test_figures_that_an_arm_cannot_tell_are_left_out(fly, folder):
    row = json.loads(RESULTS[0]) | {"num_first_tokens": None}
    one = results_folder(folder / "null", to_line(row), json.dumps(HEADERS).encode())
    outcome = fly("bench", "--compare", str(one), str(one), "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["arms"]["target"]["mean_acceptance_length"] is None


# --- stop strings

LETTERS = st.text("ab\u0301한😀\n", max_size=5)


@fuzz(200)
@given(st.lists(LETTERS.filter(bool), min_size=1, max_size=4), st.lists(LETTERS, max_size=12))
def test_what_is_shown_is_the_text_before_the_first_stop_string_in_any_splitting(stops, pieces):
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        foreseen = matcher.peek(piece)
        match = matcher.push(piece)
        text += piece
        assert match == foreseen
        places = [text.find(stop) for stop in stops if stop in text]
        end = min(places, default=len(text) - matcher.held)
        assert (match is not None) == bool(places) and (match is None or match.end == end)
        assert text[:end].startswith(shown)  # nothing is taken back
        shown = text[:end]
        assert not any(stop in shown for stop in stops)
        if match:
            return
    assert all(not stop.startswith(text[at:]) for stop in stops for at in range(len(shown)))


# --- GGUF headers


@pytest.fixture(scope="module")
def gguf(folder):
    file = write_gguf(folder / "whole.gguf", fields={"tiny.number": 3})
    return file.read_bytes()


WORDS = [struct.pack("<Q", number) for number in (0, 1, 8, 9, 2**31, 2**60, 2**63, 2**64 - 1)]
WORDS += [struct.pack("<IQ", 9, 1) * 2000, struct.pack("<f", float("nan")), b"\xff\xfe", b"\0" * 4]


@fuzz(200)
@given(st.data())
def test_any_gguf_header_is_read_or_refused_in_one_line(folder, gguf, data):
    content = bytearray(gguf)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(4, len(content)))
        word = data.draw(st.sampled_from(WORDS))
        content[at : at + len(word)] = word
    else:
        content = data.draw(damaged(gguf, tuple(WORDS)))
    file = folder / "any.gguf"
    file.write_bytes(content)
    try:
        header = read_header(file)
    except UnsupportedModelError as error:
        assert is_refusal(error)
    else:
        assert header.data_bytes <= len(content) and header.memory_bytes > 0


def header_of(*parts):
    return b"GGUF" + struct.pack("<I", 3) + b"".join(parts)


def text_of(content):
    return struct.pack("<Q", len(content)) + content


def number(value, code="Q"):
    return struct.pack("<" + code, value)


ARRAY_OF_ARRAYS = number(9, "I") + (number(9, "I") + number(1)) * 5000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (header_of(number(2**63), number(0)), "promises 9,223,372,036,854,775,808 tensors"),
        (header_of(number(0), number(2**63)), "promises 9,223,372,036,854,775,808 fields"),
        (header_of(number(0), number(1), number(2**60)), "promises 1,152,921,504,606,846,976 bytes of a text"),
        (header_of(number(0), number(1), text_of(b"a"), ARRAY_OF_ARRAYS), "an array of type 9"),
        (
            header_of(number(0), number(1), text_of(b"a"), number(9, "I"), number(8, "I"), number(2**62)),
            "strings or arrays",
        ),
        (header_of(number(0), number(2), text_of(b"a"), number(9, "I"), number(4, "I"), number(2**62)), "cut short"),
        (header_of(number(1), number(0), text_of(b"a"), number(2**31, "I")), "dimensions of a tensor"),
        (
            header_of(number(0), number(1), text_of(b"general.alignment"), number(4, "I"), number(0, "I")),
            "architecture",
        ),
    ],
    ids=range(8),
)
def test_absurd_counts_are_refused_at_once(folder, content, says):
    file = folder / "absurd.gguf"
    with file.open("wb") as stream:
        stream.write(content)
        stream.truncate(2**33)  # zeros that take no room: much to read for whoever believes the counts
    with pytest.raises(UnsupportedModelError) as caught:
        read_header(file)
    assert says in caught.value.message and is_refusal(caught.value)
    file.unlink()


@pytest.mark.parametrize("field", [b"general.alignment", b"split.count"])
@pytest.mark.parametrize(
    "value", [number(0, "I") + b"\0", number(8, "I") + text_of(b"x"), number(6, "I") + number(0.5, "f")]
)
def test_a_field_of_another_kind_is_refused(folder, field, value):
    named = text_of(b"general.architecture") + number(8, "I") + text_of(b"llama")
    if field == b"split.count" and value[:1] == b"\0":
        pytest.skip("no parts is as good as one")
    file = folder / "field.gguf"
    file.write_bytes(header_of(number(0), number(2), named, text_of(field), value))
    with pytest.raises(UnsupportedModelError, match="no whole number"):
        read_header(file)
