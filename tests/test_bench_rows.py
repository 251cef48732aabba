"""The results folder: what is on disk after a crash, and when a run may go on."""

import json
from unittest.mock import Mock

import pytest

from fly_cli.bench_rows import (
    FORMAT,
    Answered,
    Results,
    begin,
    check_folder,
    differences,
    failed_row,
    key_of,
    make_folder,
    ok_row,
    read_header,
    read_rows,
    to_line,
    write_whole,
)
from fly_cli.errors import FlyError, UsageError

LABELS = {"category": "code", "subtask": None}
HEADER = {"format": FORMAT, "arms": {"fly": {"draft_tokens": 15}}, "seed": 0, "sessions": [{"started": "monday"}]}


def row(prompt="p", arm="fly", repeat=0, turn=0, text="hi"):
    return ok_row((prompt, arm, repeat, turn), LABELS, Answered(text, [1, 2], {"num_new_tokens": 2}), wall_s=1.5)


def test_a_row_has_every_figure_and_those_that_the_arm_cannot_tell_are_null():
    value = json.loads(to_line(row()))
    assert (value["prompt_id"], value["category"], value["arm"], value["status"]) == ("p", "code", "fly", "ok")
    assert value["num_new_tokens"] == 2 and value["decode_tps"] is None and value["acceptance_histogram"] is None
    assert (value["text"], value["ids"], value["score"], value["scorer"]) == ("hi", [1, 2], None, None)


def test_a_failed_row_tells_its_error_and_has_the_same_key():
    value = failed_row(("p", "fly", 0, 1), LABELS, "no memory", wall_s=0.1)
    assert (value["status"], value["error"], key_of(value)) == ("failed", "no memory", ("p", "fly", 0, 1))


def test_rows_are_read_back_as_they_were_whatever_the_text(tmp_path):
    results = Results(tmp_path)
    texts = ["one\u2028two\u0085three\x0b\x0c\r\n", "\ud83d", 'quote " and \\', ""]
    for number, text in enumerate(texts):
        results.append(row(turn=number, text=text))
    assert [value["text"] for value in read_rows(tmp_path / "rows.jsonl")] == texts
    assert (tmp_path / "rows.jsonl").read_bytes().count(b"\n") == len(texts)


@pytest.mark.parametrize("rest", [b"", b"{", b'{"prompt_id": "half', b"x" * 200_000, "é".encode()[:1]])
def test_half_a_line_at_the_end_is_dropped_and_overwritten(tmp_path, rest):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(to_line(row("a")) + rest)
    assert [value["prompt_id"] for value in read_rows(path)] == ["a"]
    Results(tmp_path).append(row("b"))
    assert [value["prompt_id"] for value in read_rows(path)] == ["a", "b"]


def test_a_file_of_nothing_but_half_a_line_starts_anew(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt_id": "half')
    Results(tmp_path).append(row("b"))
    assert [value["prompt_id"] for value in read_rows(tmp_path / "rows.jsonl")] == ["b"]


@pytest.mark.parametrize(
    "line",
    [
        b"{bad\n",
        b"[1]\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        to_line({"prompt_id": "p", "arm": "fly", "repeat": 0, "turn": 0}),
        to_line({"prompt_id": "p", "arm": "fly", "repeat": 0, "turn": 0, "status": "ok"}),
        to_line(row() | {"prompt_id": ["p"]}),
        to_line(row() | {"turn": None}),
        to_line({name: value for name, value in row().items() if name != "decode_s"}),
    ],
    ids=range(9),
)
def test_a_whole_line_that_is_no_row_is_an_error_that_names_it(tmp_path, line):
    (tmp_path / "rows.jsonl").write_bytes(to_line(row()) + line)
    with pytest.raises(UsageError, match=r"rows.jsonl:2 is no row"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_the_rows_of_several_processes_are_merged_in_order_and_once(tmp_path):
    for rank, names in ((0, "ac"), (1, "bd")):
        results = Results(tmp_path, rank)
        for name in names:
            results.append(row(name))
        results.close()
    together = Results(tmp_path)
    together.append(row("c", text="copy of an interrupted merge"))
    together.merge([key_of(row(name)) for name in "dcba"])
    assert [value["prompt_id"] for value in together.rows()] == ["d", "c", "b", "a"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_a_kill_left_of_a_header_is_no_result(tmp_path):
    (tmp_path / ".settings.json.4242").write_text("{")
    begin(tmp_path, HEADER, resume=False)
    assert read_header(tmp_path) == HEADER


def test_a_new_folder_gets_its_header_and_a_full_one_is_left_alone(tmp_path):
    folder = tmp_path / "new" / "out"
    begin(folder, HEADER, resume=False)
    assert read_header(folder) == HEADER
    with pytest.raises(UsageError, match="is not empty") as caught:
        begin(folder, HEADER, resume=False)
    assert "--resume" in caught.value.hint


def test_an_empty_folder_is_as_good_as_none_also_for_resume(tmp_path):
    begin(tmp_path, HEADER, resume=True)
    assert read_header(tmp_path) == HEADER


def test_resume_adds_its_session_and_takes_parts_that_were_unknown_before(tmp_path):
    begin(tmp_path, HEADER, resume=False)
    begin(tmp_path, HEADER | {"models": {"target": "x"}, "sessions": [{"started": "tuesday"}]}, resume=True)
    header = read_header(tmp_path)
    assert [session["started"] for session in header["sessions"]] == ["monday", "tuesday"]
    assert header["models"] == {"target": "x"}


def test_resume_with_other_settings_is_refused_and_says_which(tmp_path):
    begin(tmp_path, HEADER, resume=False)
    other = {"arms": {"fly": {"draft_tokens": 5}}, "seed": 1}
    with pytest.raises(UsageError) as caught:
        check_folder(tmp_path, other, resume=True)
    assert "arms.fly.draft_tokens 15, now 5; seed 0, now 1" in caught.value.message


def test_in_a_list_of_records_the_field_that_differs_is_named():
    before, now = ({"weights": [{"source": "t", "sha256": "1"}, {"source": "d", "sha256": one}]} for one in "23")
    assert differences(before, now) == ['weights.1.sha256 "2", now "3"']
    assert differences(before, {"weights": [{"source": "t"}]})[0].startswith("weights [")


def test_only_what_both_headers_have_is_compared_and_an_added_arm_counts():
    assert differences({"a": 1, "b": (1, 2)}, {"b": [1, 2], "c": 3}) == []
    assert differences({"arms": {"fly": {"k": 1}}}, {"arms": {"fly": {"k": 1}, "hf": {"k": 2}}}) == [
        'arms.hf null, now {"k": 2}'
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no settings.json"),
        ("{", "is not JSON"),
        *((f'{{"format": {other}}}', "another format") for other in (FORMAT - 1, FORMAT + 1)),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, content, message):
    (tmp_path / "else.txt").touch()
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        begin(tmp_path, HEADER, resume=True)


def test_a_folder_that_nothing_can_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(FlyError, match="cannot be made: not a directory"):
        make_folder(tmp_path / "file" / "out")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FlyError, match="cannot be written to"):
        make_folder(tmp_path)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "summary.json"
    write_whole(path, b"old")
    monkeypatch.setattr(f"os.{broken}", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        begin(tmp_path / "file", HEADER, resume=False)
