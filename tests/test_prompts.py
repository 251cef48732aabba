import io
import json
import os
import socket
import threading
import time

import pytest

from fly_cli.errors import PromptError
from fly_cli.prompts import Prompt, decode_text, gather, read_jsonl, read_stdin


def texts(gathered):
    return [prompt.text for prompt in gathered.prompts]


def rows_of(*lines, **options):
    return read_jsonl("\n".join(lines).encode(), "dir/p.jsonl", **options)


# --- arguments, files and standard input


def test_each_argument_and_each_file_is_a_prompt_in_order(tmp_path):
    (tmp_path / "notes.txt").write_text("from a file\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "from a row"}\n')
    gathered = gather(["one", "- two"], [tmp_path / "notes.txt", tmp_path / "rows.jsonl"])
    assert texts(gathered) == ["one", "- two", "from a file", "from a row"]
    assert [prompt.id for prompt in gathered.prompts] == ["argument-1", "argument-2", "notes.txt", "rows:1"]
    assert gathered.notes == ()


@pytest.mark.parametrize("stdin", [b"hi\n", b"hi", b"hi\r\n", b"\xef\xbb\xbfhi", "hi\n".encode("utf-16")])
def test_echo_printf_and_an_argument_give_the_same_prompt(stdin):
    assert texts(gather([], stdin=stdin)) == texts(gather(["hi"])) == ["hi"]


def test_only_one_final_newline_is_dropped_and_none_when_raw():
    assert texts(gather([], stdin=b"hi\n\n")) == ["hi\n"]
    assert texts(gather([], stdin=b"a\r\nb\r\n")) == ["a\r\nb"]
    assert texts(gather([], stdin=b"hi\n", raw=True)) == ["hi\n"]


def test_an_argument_keeps_its_newline():
    assert texts(gather(["hi\n"])) == ["hi\n"]


def test_piped_text_comes_before_the_argument(tmp_path):
    (tmp_path / "question.txt").write_text("what?\n")
    assert texts(gather(["Summarise:"], stdin=b"notes\n")) == ["notes\n\nSummarise:"]
    assert texts(gather(["a", "-", "b"], stdin=b"x")) == ["x\n\na", "x\n\nb"]
    assert texts(gather([], [tmp_path / "question.txt"], b"notes\n")) == ["notes\n\nwhat?"]
    assert texts(gather(["def f("], stdin=b"import re\n", raw=True)) == ["import re\ndef f("]


def test_blank_piped_text_is_no_prompt():
    assert texts(gather(["hi"], stdin=b"\n")) == ["hi"]
    with pytest.raises(PromptError, match="no prompt"):
        gather([], stdin=b" \n")


def test_a_dash_stands_for_standard_input_and_needs_it():
    assert texts(gather(["-"], stdin=b"hi\n")) == ["hi"]
    for stdin in (None, b"", b"\n"):
        with pytest.raises(PromptError, match="standard input"):
            gather(["-"], stdin=stdin)


def test_piped_text_has_no_place_before_rows(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}')
    with pytest.raises(PromptError, match=r"p\.jsonl") as error:
        gather([], [tmp_path / "p.jsonl"], b"notes")
    assert "--no-stdin" in error.value.hint


def test_a_missing_or_empty_prompt_is_a_usage_error(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": ""}')
    with pytest.raises(PromptError, match="no prompt"):
        gather([])
    for arguments, files in [([""], []), ([" \n"], []), ([], [tmp_path / "p.jsonl"])]:
        with pytest.raises(PromptError, match="is empty") as error:
            gather(arguments, files)
        assert error.value.exit_code == 2


def test_an_explicit_empty_raw_prompt_is_left_to_the_tokenizer():
    assert texts(gather([""], raw=True)) == [""]
    assert texts(gather([" \n"], raw=True)) == [" \n"]


def test_a_chat_cannot_be_raw(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(PromptError, match="--raw"):
        gather([], [tmp_path / "p.jsonl"], raw=True)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(PromptError, match=f"cannot read `{path}`"):
            gather([], [path])


def test_several_turns_are_announced(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"question_id": 81, "turns": ["a", "b"]}\n{"turns": ["c", "d"]}\n{"turns": ["e"]}'
    )
    gathered = gather([], [tmp_path / "p.jsonl"])
    assert texts(gathered) == ["a", "c", "e"]
    assert gathered.notes == ("`81` and 1 more has several turns; only the first is sent",)


# --- odd bytes


def test_bytes_that_are_not_utf8_are_replaced_with_one_note_that_names_the_first():
    gathered = gather([], stdin=b"caf\xe9 \xff")
    assert texts(gathered) == ["caf\ufffd \ufffd"]
    assert len(gathered.notes) == 1
    assert "standard input" in gathered.notes[0] and "byte 3" in gathered.notes[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_names_the_encoding_and_is_no_text(encoding):
    assert decode_text("héllo 😀".encode(encoding), "x") == ("héllo 😀", ())


@pytest.mark.parametrize("order", ["le", "be"])
def test_utf16_of_either_byte_order_is_read(order):
    assert decode_text("\ufeffhi".encode(f"utf-16-{order}"), "x") == ("hi", ())


def test_the_offset_counts_the_byte_order_mark():
    text, notes = decode_text(b"\xff\xfeh\x00\x00\xd8", "x")
    assert text == "h\ufffd"
    assert "byte 4" in notes[0]


def test_lone_surrogates_of_an_argument_are_replaced():
    gathered = gather(["caf\udce9"])
    assert texts(gathered) == ["caf\ufffd"]
    assert "argument 1" in gathered.notes[0]


# --- rows


def test_the_three_kinds_of_rows():
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": None}]
    rows = rows_of(
        '{"prompt": "hi", "id": "first", "category": "code", "reference": [1]}',
        json.dumps({"messages": chat}),
        '{"question_id": 81, "turns": ["a", "b"], "category": "writing"}',
    )
    first, second, third = rows.prompts
    assert first == Prompt("first", text="hi", fields={"id": "first", "category": "code", "reference": [1]})
    assert second == Prompt("p:2", messages=(chat[0], {"role": "user", "content": "hi"}))
    assert (third.id, third.text, third.fields["turns"]) == ("81", "a", ["a", "b"])


def test_a_byte_order_mark_crlf_blank_lines_and_no_last_newline_are_fine():
    rows = read_jsonl(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}', "p.jsonl")
    assert [(prompt.id, prompt.text) for prompt in rows.prompts] == [("p:1", "a"), ("p:4", "b")]


def test_rows_in_utf16_are_read():
    rows = read_jsonl('{"prompt": "é"}\r\n{"prompt": "b"}\r\n'.encode("utf-16"), "p.jsonl")
    assert [prompt.text for prompt in rows.prompts] == ["é", "b"]


def test_only_a_line_feed_ends_a_row():
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf"
    row = json.dumps({"prompt": text}, ensure_ascii=False)
    assert "\u2028" in row
    assert [prompt.text for prompt in rows_of(row, row).prompts] == [text, text]


def test_glued_rows_are_an_error_with_their_line():
    with pytest.raises(PromptError, match=r"^dir/p\.jsonl:2: more than one JSON value"):
        rows_of('{"prompt": "a"}', '{"prompt": "a"}{"prompt": "b"}')


BAD = {
    "{bad": "not JSON: ",
    "[1]": "this is a list",
    "null": "this is null",
    '{"prompt": 5}': "`prompt` is a number, not text",
    '{"prompt": null}': "`prompt` is null, not text",
    '{"messages": []}': "`messages` is empty",
    '{"messages": {}}': "`messages` is an object, not a list",
    '{"messages": ["hi"]}': "message 1 is text, not an object",
    '{"messages": [{"role": "user"}]}': "message 1 has no `content`",
    '{"messages": [{"role": "user", "content": null}]}': "`content` of message 1 is null, not text",
    '{"turns": ["a", 2]}': "turn 2 is a number, not text",
    '{"turns": []}': "`turns` is empty",
    '{"id": "x"}': "has no `prompt`, `messages` or `turns`",
    '{"prompt": "a", "turns": ["b"]}': "has `prompt` and `turns`, and can have only one",
    '{"prompt": "a", "id": [1]}': "the id is a list",
    '{"prompt": "a", "score": NaN}': "NaN is not JSON",
    '{"prompt": "a", "x": -1e999}': "the number -1e999 is too large",
    '{"prompt": "a", "x": ' + "9" * 5000 + "}": "a number of 5000 digits is too long",
    '{"prompt": ' + "[" * 100_000: "nested too deeply",
    '{"prompt": "a", "x": ' + '[{"y": ' * 50 + "0" + "}]" * 50 + "}": "nested too deeply",
    '{"prompt": "\\ud83d", "x": ' + "[" * 700 + "]" * 700 + "}": "nested too deeply",
}


def test_a_row_may_hold_many_lists_and_some_in_each_other():
    rows_of('{"prompt": "a", "x": [' + "[], " * 1000 + "0]}", '{"prompt": "a", "x": ' + "[" * 99 + "]" * 99 + "}")


@pytest.mark.parametrize("row, reason", BAD.items(), ids=range(len(BAD)))
def test_a_bad_row_is_named_by_file_line_and_reason(row, reason):
    with pytest.raises(PromptError) as error:
        rows_of('{"prompt": "good"}', "", row)
    assert error.value.message.startswith("dir/p.jsonl:3: ")
    assert reason in error.value.message
    assert error.value.exit_code == 2


def test_bad_rows_can_be_skipped_and_are_listed():
    bad = list(BAD)[:5]
    rows = rows_of('{"prompt": "first"}', *bad, '{"prompt": "last"}', skip_invalid=True)
    assert [prompt.text for prompt in rows.prompts] == ["first", "last"]
    assert [row.where for row in rows.skipped] == [f"dir/p.jsonl:{line}" for line in range(2, 7)]
    assert rows.read == 7


def test_the_first_bad_row_is_shown_and_the_others_counted():
    with pytest.raises(PromptError, match=r"p\.jsonl:1: .*; 2 more rows are bad$"):
        rows_of("[1]", "[2]", '{"prompt": "a"}', "[3]")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf", b"[1]\n"])
def test_a_file_without_prompts_is_an_error(data):
    with pytest.raises(PromptError, match=r"no prompts in `p\.jsonl`"):
        read_jsonl(data, "p.jsonl", skip_invalid=True)


def test_an_empty_prompt_is_a_row_that_fails_later():
    assert rows_of('{"prompt": ""}').prompts[0].is_blank()


def test_half_of_a_surrogate_pair_is_replaced_everywhere_with_one_note():
    rows = rows_of('{"prompt": "a\\ud83d", "note": {"\\ud83d": ["\\ude00"]}}', '{"prompt": "\\ud83d\\ude00"}')
    assert rows.prompts[0].text == "a\ufffd"
    assert rows.prompts[0].fields == {"note": {"\ufffd": ["\ufffd"]}}
    assert rows.prompts[1].text == "😀"
    assert len(rows.notes) == 1 and "p.jsonl:1" in rows.notes[0]


def test_a_prompt_is_a_text_or_a_chat():
    for both in ({}, {"text": "a", "messages": ()}):
        with pytest.raises(PromptError, match="`p`"):
            Prompt("p", **both)


# --- reading standard input


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as reader, open(write_end, "wb", buffering=0) as writer:
        yield reader, writer


def test_a_pipe_is_read_to_its_end(pipe):
    reader, writer = pipe
    data = os.urandom(300_000)
    thread = threading.Thread(target=lambda: (writer.write(data), writer.close()))
    thread.start()
    assert read_stdin(reader) == data
    thread.join()


def test_a_file_is_read_to_its_end(tmp_path):
    (tmp_path / "p").write_bytes(b"hi\n")
    with open(tmp_path / "p") as stream:  # a text stream, as sys.stdin is one
        assert read_stdin(stream) == b"hi\n"


def test_a_silent_pipe_is_announced_once(pipe):
    reader, writer = pipe
    notes = []

    def write():
        for _ in range(3):
            time.sleep(0.05)
            writer.write(b"x")
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    assert read_stdin(reader, notes.append, wait_seconds=0.01) == b"xxx"
    thread.join()
    assert len(notes) == 1 and "--no-stdin" in notes[0]


def test_a_pipe_that_speaks_in_time_is_not_announced(pipe):
    reader, writer = pipe
    notes = []
    writer.write(b"x")
    writer.close()
    assert read_stdin(reader, notes.append) == b"x"
    assert notes == []


def test_a_pipe_in_non_blocking_mode_is_read_too(pipe):
    reader, writer = pipe
    os.set_blocking(reader.fileno(), False)
    writer.write(b"x")
    writer.close()
    assert read_stdin(reader) == b"x"


def test_terminals_devices_sockets_and_closed_streams_are_not_read():
    leader, follower = os.openpty()
    ours, theirs = socket.socketpair()
    with ours, theirs, open(leader, "rb", buffering=0), open(follower, "rb", buffering=0) as terminal:
        assert read_stdin(terminal) is None
        with ours.makefile("rb") as stream:
            assert read_stdin(stream) is None
    with open(os.devnull, "rb") as device:
        assert read_stdin(device) is None
    assert read_stdin(device) is None  # closed
    assert read_stdin(None) is None


def test_a_descriptor_that_is_closed_behind_our_back_is_not_read(pipe):
    _, writer = pipe
    stream = open(os.dup(writer.fileno()), "rb", closefd=False, buffering=0)  # noqa: SIM115
    os.close(stream.fileno())
    assert read_stdin(stream) is None


def test_a_terminal_is_read_when_asked_for():
    leader, follower = os.openpty()
    with open(leader, "wb", buffering=0) as keyboard, open(follower, "rb", buffering=0) as terminal:
        keyboard.write(b"hi\n\x04")
        assert read_stdin(terminal, asked=True) == b"hi\n"


def test_a_stream_in_memory_is_read():
    assert read_stdin(io.BytesIO(b"hi")) == b"hi"
    assert read_stdin(io.TextIOWrapper(io.BytesIO(b"hi"))) == b"hi"
