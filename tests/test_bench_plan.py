"""What is compared, on which prompts: all that is settled before a model loads."""

import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from fly_cli.bench_plan import (
    Arm,
    Plan,
    choose_arms,
    choose_prompts,
    labels_of,
    sample_evenly,
    turn_prompt,
    turns_of,
)
from fly_cli.bench_rows import differences
from fly_cli.errors import FlyError, PromptError, UsageError
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings


def build(**given):
    return DecodeSettings(**{"max_new_tokens": 9, **given})


def named(arms):
    return [arm.name for arm in arms]


# --- arms -----------------------------------------------------------------------------------------------------------


def test_each_arm_has_the_settings_of_its_mode():
    arms, notes = choose_arms("target, exact,fly,lookup,hf-lookup", build)
    assert named(arms) == ["target", "exact", "fly", "lookup", "hf-lookup"] and notes == []
    assert [arm.settings.mode for arm in arms] == ["target", "exact", "fly", "fly", "target"]
    assert all(arm.settings.max_new_tokens == 9 for arm in arms)


@pytest.mark.parametrize("names", ["", " , ", "fly,fly"])
def test_arms_must_be_named_once_each(names):
    with pytest.raises(UsageError, match="--arms"):
        choose_arms(names, build)


def test_an_unknown_arm_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="no arm `vllm`") as caught:
        choose_arms("target,vllm", build)
    assert "hf-assisted" in caught.value.hint


def test_transformers_arms_are_greedy_so_a_temperature_is_refused():
    with pytest.raises(UsageError, match="greedy"):
        choose_arms("target,hf", lambda **given: build(temperature=1.0, **given))


def test_a_sweep_puts_a_grid_in_the_place_of_fly():
    arms, _ = choose_arms("target,fly,hf", build, ["draft-tokens=5,10", "--window-size=2,4"])
    assert named(arms) == [
        "target",
        *(f"fly[draft_tokens={k},window_size={w}]" for k in (5, 10) for w in (2, 4)),
        "hf",
    ]
    assert [(arm.settings.draft_tokens, arm.settings.window_size) for arm in arms[1:-1]] == [
        *((5, 2), (5, 4), (10, 2), (10, 4))
    ]
    assert all(arm.kind == "fly" for arm in arms[1:-1])


def test_a_sweep_brings_fly_along_and_leaves_out_points_where_nothing_can_be_deferred():
    arms, notes = choose_arms("target", build, ["draft_tokens=4,8", "window_size=3,6"])
    assert named(arms) == [
        "target",
        *(f"fly[draft_tokens={k},window_size={w}]" for k, w in ((4, 3), (8, 3), (8, 6))),
    ]
    assert len(notes) == 1 and "fly[draft_tokens=4,window_size=6]" in notes[0]


def test_a_swept_entropy_brings_its_own_threshold():
    arms, _ = choose_arms("fly", build, ["entropy=topk,normalized", "draft_lookup=true,false"])
    assert {arm.settings.entropy: arm.settings.entropy_threshold for arm in arms} == {"topk": 0.3, "normalized": 0.05}
    assert arms[1].name == "fly[entropy=topk,draft_lookup=false]" and arms[1].settings.draft_lookup is False


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("draft-token=5", "cannot vary `draft-token`"),
        ("temperature=0,1", "cannot vary `temperature`"),
        ("draft-tokens", "--sweep"),
        ("draft-tokens=", "--sweep"),
        ("draft-tokens=5,5", "different"),
        ("draft-tokens=9,09", "different"),
        ("entropy-threshold=0.3,0.30", "different"),
        ("draft-lookup=true,True", "different"),
        ("draft-tokens=5,many", "whole number"),
        ("draft-tokens=5,-1", "draft_tokens"),
        ("window-size=15,20", "no point of the sweep"),
    ],
)
def test_a_bad_sweep_is_refused(item, message):
    with pytest.raises(UsageError) as caught:
        choose_arms("fly", build, [item])
    assert message in caught.value.message + caught.value.hint


# --- prompts --------------------------------------------------------------------------------------------------------


def write(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_all_files_are_read_limited_and_named_with_their_hash(tmp_path):
    one = write(tmp_path / "one.jsonl", *({"id": f"a{n}", "prompt": "x"} for n in range(5)))
    two = write(tmp_path / "two.jsonl", *({"question_id": n, "turns": ["x", "y"]} for n in range(5)))
    text = tmp_path / "poem.txt"
    text.write_text("a poem\n")
    chosen = choose_prompts([one, two, text], limit=[2])
    assert [prompt.id for prompt in chosen.prompts] == ["a0", "a1", "0", "1", "poem.txt"]
    assert chosen.prompts[-1].text == "a poem" and chosen.read == 11
    assert [file["name"] for file in chosen.files] == ["one.jsonl", "two.jsonl", "poem.txt"]
    assert all(len(file["sha256"]) == 64 for file in chosen.files)


def numbered(tmp_path, *counts):
    return [
        write(tmp_path / f"{name}.jsonl", *({"id": f"{name}{n}", "prompt": "x"} for n in range(count)))
        for name, count in zip("abc", counts, strict=False)
    ]


def test_each_file_may_have_a_count_of_its_own(tmp_path):
    files = numbered(tmp_path, 5, 5, 5)
    chosen = choose_prompts(files, limit=[1, 9, 4], sample=[3, 2, 3])
    assert ["".join(prompt.id[0] for prompt in chosen.prompts), chosen.prompts[0].id] == ["abbccc", "a0"]
    assert "c4" not in {prompt.id for prompt in chosen.prompts}
    one_by_one = [prompt for file in files for prompt in choose_prompts([file], sample=[2]).prompts]
    assert list(choose_prompts(files, sample=[2]).prompts) == one_by_one
    assert list(choose_prompts(files, sample=[2, 2, 2]).prompts) == one_by_one


@pytest.mark.parametrize("name", ["limit", "sample"])
@pytest.mark.parametrize(("counts", "num_files"), [([1, 2], 3), ([1, 2, 3, 4], 3), ([1, 2], 1)])
def test_counts_are_one_or_as_many_as_files(tmp_path, name, counts, num_files):
    files = numbered(tmp_path, *[5] * num_files)
    with pytest.raises(UsageError, match=f"`--{name}` is given {len(counts)} times.* files is {num_files}") as caught:
        choose_prompts(files, **{name: counts})
    assert "once for all files, or once for each" in caught.value.hint


def test_the_counts_are_recorded_file_by_file(tmp_path):
    files = numbered(tmp_path, 5, 5)
    once, each, other = (choose_prompts(files, sample=counts).as_json() for counts in ([2], [2, 2], [2, 3]))
    assert once == each and once["samples"] == [2, 2] and once["limits"] == [None, None]
    assert differences({"prompts": once}, {"prompts": other})[0] == "prompts.samples [2, 2], now [2, 3]"


def test_the_same_prompts_have_the_same_hash_wherever_they_are_and_others_do_not(tmp_path):
    rows = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y", "reference": "1"}]
    (tmp_path / "else").mkdir()
    first, second = (choose_prompts([write(folder / "p.jsonl", *rows)]) for folder in (tmp_path, tmp_path / "else"))
    assert first.as_json() == second.as_json()
    rows[1]["reference"] = "2"
    assert choose_prompts([write(tmp_path / "p.jsonl", *rows)]).as_json()["sha256"] != first.as_json()["sha256"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_holds_rows_and_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=('{"prompt": "x"}\n{"prompt": "y"}\n',)).start()
    assert [prompt.text for prompt in choose_prompts([pipe]).prompts] == ["x", "y"]


def test_a_text_file_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "poem.txt"
    path.write_bytes(b"\xef\xbb\xbfa \xffpoem\n")
    reads = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or real(self))
    chosen = choose_prompts([path])
    assert chosen.prompts[0].text == "a \ufffdpoem" and "not valid UTF-8" in chosen.notes[0] and reads == [path]


def test_a_bad_row_stops_everything_or_is_listed(tmp_path):
    path = write(
        tmp_path / "p.jsonl", {"prompt": "good"}, "{bad", "[1]", {"prompt": 5}, {"messages": []}, {"prompt": "ok"}
    )
    with pytest.raises(PromptError, match=r"p\.jsonl:2: not JSON"):
        choose_prompts([path])
    chosen = choose_prompts([path], skip_invalid=True)
    assert [prompt.text for prompt in chosen.prompts] == ["good", "ok"]
    assert (chosen.read, len(chosen.skipped)) == (6, 4) and "p.jsonl:2: not JSON" in chosen.skipped[0]


def test_prompts_that_share_an_id_are_told_apart(tmp_path):
    one = write(
        tmp_path / "one.jsonl", {"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}, {"id": "a#2", "prompt": "3"}
    )
    chosen = choose_prompts([one, one])
    ids = [prompt.id for prompt in chosen.prompts]
    assert ids[:2] == ["a", "a#2"] and len(set(ids)) == 6
    assert len(chosen.notes) == 1 and "share an id" in chosen.notes[0]


def test_a_sample_is_even_over_subtasks_reproducible_and_in_order():
    asked = [Prompt(str(n), text="x", fields={"category": "c", "subtask": "ab"[n % 4 == 0]}) for n in range(40)]
    drawn = sample_evenly(asked, 10, random.Random("seed"))
    numbers = [int(prompt.id) for prompt in drawn]
    assert numbers == sorted(numbers) and sum(number % 4 == 0 for number in numbers) == 5
    assert drawn == sample_evenly(asked, 10, random.Random("seed")) != sample_evenly(asked, 10, random.Random("other"))
    assert sample_evenly(asked, 100, random.Random(0)) == asked


def test_a_sample_has_as_many_of_each_subtask_as_go_evenly():
    sizes = {"one": 80, "two": 6, "three": 40, "four": 4}
    asked = [
        Prompt(f"{name}{n}", text="x", fields={"subtask": name}) for name, size in sizes.items() for n in range(size)
    ]
    drawn = sample_evenly(asked, 16, random.Random(0))
    assert Counter(prompt.fields["subtask"] for prompt in drawn) == dict.fromkeys(sizes, 4)


def test_a_sample_of_few_groups_takes_the_rest_from_where_there_is_more():
    asked = [Prompt(str(n), text="x", fields={"category": "rare" if n == 7 else "frequent"}) for n in range(20)]
    assert "7" in {prompt.id for prompt in sample_evenly(asked, 6, random.Random(1))}


@pytest.mark.parametrize("row", [{"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}])
def test_a_chat_cannot_be_sent_raw(tmp_path, row):
    with pytest.raises(PromptError, match="--raw"):
        choose_prompts([write(tmp_path / "p.jsonl", row)], raw=True)


def test_an_empty_row_is_kept_for_it_fails_alone_later(tmp_path):
    assert len(choose_prompts([write(tmp_path / "p.jsonl", {"prompt": ""}, {"prompt": "x"})]).prompts) == 2


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for name in ("no.jsonl", "no.txt"):
        with pytest.raises(FlyError, match="cannot read"):
            choose_prompts([tmp_path / name])


def test_labels_fall_back_from_category_to_subtask_to_task_to_all():
    def labels(**fields):
        return tuple(labels_of(Prompt("p", text="x", fields=fields)).values())

    assert labels(category="code", subtask="python", task="humaneval") == ("code", "python")
    assert labels(subtask="python", task="humaneval") == ("python", "python")
    assert labels(task="humaneval") == ("humaneval", None)
    assert labels(category=5) == labels() == ("all", None)


# --- turns and order ------------------------------------------------------------------------------------------------


def test_a_later_turn_is_the_conversation_so_far():
    prompt = Prompt("p", text="one", fields={"turns": ["one", "two", "three"]})
    assert turn_prompt(prompt, []) is prompt
    contents = [(message["role"], message["content"]) for message in turn_prompt(prompt, ["first", "second"]).messages]
    assert contents == [
        *(("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"), ("user", "three"))
    ]


def test_a_row_of_one_turn_is_an_ordinary_prompt():
    assert (
        len(turns_of(Prompt("p", text="one", fields={"turns": ["one"]}))) == len(turns_of(Prompt("p", text="x"))) == 1
    )


def test_processes_share_the_prompts_and_together_do_the_whole_plan():
    arms = [Arm(name, name, build()) for name in ("target", "exact")]
    plan = Plan([Prompt(str(n), text="x", fields={"turns": ["x", "y"]}) for n in range(5)], arms, repeat=2)
    shares = [plan.share(rank, 2).row_keys() for rank in range(2)]
    assert sorted([*shares[0], *shares[1]]) == sorted(plan.row_keys()) and len(plan.row_keys()) == 40
    assert len(set(shares[0]) & set(shares[1])) == 0
