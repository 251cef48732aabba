"""The runner: who runs when, what a row holds, and what happens when a turn fails or the process dies."""

import gc
import json
import resource
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from bench_helpers import arms, pair_of, prompts, raw_codec, scripted_pair, timeless
from models_for_tests import noisy_copy, tiny_llama

from fly_cli import bench, peers
from fly_cli.bench import answer, describe_failure, done_texts, run, warm_up
from fly_cli.bench_plan import Plan, prompt_seed
from fly_cli.bench_rows import FIGURES, key_of, to_line
from fly_cli.errors import DecodeError
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings


@pytest.fixture(scope="module")
def pair():
    return scripted_pair()


def turns(*said):
    return Prompt("chat", text=said[0], fields={"turns": list(said), "category": "chat"})


# --- order ----------------------------------------------------------------------------------------------------------


def test_arms_take_turns_prompt_by_prompt_and_another_one_goes_first_each_time(pair):
    plan = Plan(prompts(3), arms("target", "exact", "fly"), repeat=2)
    order = [(row["repeat"], row["prompt_id"], row["arm"]) for row in run(plan, pair)]
    assert [arm for _, _, arm in order[:9]] == [
        *("target", "exact", "fly"),
        *("exact", "fly", "target"),
        *("fly", "target", "exact"),
    ]
    assert [arm for repeat, _, arm in order if repeat == 1][:3] == ["exact", "fly", "target"]
    assert [row[:2] for row in order] == sorted(row[:2] for row in order)
    assert order == [(repeat, name, arm) for name, arm, repeat, _ in plan.row_keys()]


def test_a_row_has_all_figures_of_the_run_and_its_labels(pair):
    prompt = Prompt("one", text="prompt ", fields={"category": "code", "subtask": "python"})
    target, fly = run(Plan([prompt], arms("target", "fly")), pair)
    assert (fly["category"], fly["subtask"], fly["status"], fly["error"]) == ("code", "python", "ok", None)
    assert fly["num_new_tokens"] == len(fly["ids"]) == 12 and fly["num_draft_tokens"] > 0
    assert target["mean_acceptance_length"] == 1 and target["num_draft_tokens"] == 0
    assert set(FIGURES) < set(fly) and fly["wall_s"] > 0 and fly["peak_memory_bytes"] > 0
    json.loads(to_line(fly))


def test_exact_and_lookup_and_fly_are_what_their_names_say(pair):
    names = ("target", "exact", "fly", "lookup")
    rows = {row["arm"]: row for row in run(Plan(prompts(1), arms(*names, entropy_threshold=None)), pair)}
    assert rows["exact"]["ids"] == rows["target"]["ids"]
    assert rows["exact"]["num_deferred_tokens"] == 0
    assert all(rows[name]["num_draft_tokens"] > 0 for name in ("exact", "fly"))


def test_the_lookup_arm_asks_no_draft_model():
    pair = scripted_pair()
    before = pair.draft.model.num_forwards
    answer(pair, Prompt("p", text="abcabcabc"), "lookup", DecodeSettings(seed=0, max_new_tokens=12))
    assert pair.draft.model.num_forwards == before


def test_every_turn_starts_with_empty_caches(pair, monkeypatch):
    fed = []
    real = pair.target._forward
    monkeypatch.setattr(pair.target, "_forward", lambda *given: fed.append(given[2] - given[1]) or real(*given))
    same = [Prompt(name, text="the very same text") for name in "ab"]
    list(run(Plan(same, arms("target", "exact"), repeat=2), pair))
    whole = len(pair.codec.encode(same[0]).ids)
    assert [count for count in fed if count > 10] == [whole] * 8


def test_times_come_from_the_decoders_clock(pair, monkeypatch):
    now = [0.0]
    real = pair.target._forward

    def forward(ids, start, end, last):
        now[0] += 2.0 if end - start > 5 else 0.5
        return real(ids, start, end, last)

    monkeypatch.setattr(pair.target, "_forward", forward)
    for module in (sys.modules["fly_cli.decode"], bench):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    (row,) = run(Plan(prompts(1), arms("target", max_new_tokens=5)), pair)
    assert (row["ttft_s"], row["decode_s"], row["decode_tps"], row["wall_s"]) == (2.0, 2.0, 2.0, 4.0)


def test_a_clock_that_stands_still_gives_nulls_and_no_nonsense(pair, monkeypatch):
    for module in (sys.modules["fly_cli.decode"], bench, peers):
        monkeypatch.setattr(module, "perf_counter", lambda: 1.0)
    (row,) = run(Plan(prompts(1), arms("target", max_new_tokens=5)), pair)
    assert (row["decode_tps"], row["tpot_ms"], row["end_to_end_tps"], row["decode_s"]) == (None, None, None, 0.0)
    json.loads(to_line(row))


# --- several turns --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_pair():
    return scripted_pair(raw_codec(raw=False))


def test_each_arm_goes_on_with_its_own_conversation(chat_pair, monkeypatch):
    seen = []
    real = type(chat_pair.codec).encode
    monkeypatch.setattr(
        type(chat_pair.codec), "encode", lambda self, prompt: seen.append(prompt.messages) or real(self, prompt)
    )
    rows = list(run(Plan([turns("one", "two", "three")], arms("target", "exact")), chat_pair))
    assert [key_of(row) for row in rows] == [("chat", arm, 0, turn) for arm in ("target", "exact") for turn in range(3)]
    assert seen[0] is None
    assert [message["content"] for message in seen[2]] == ["one", rows[0]["text"], "two", rows[1]["text"], "three"]
    assert [message["role"] for message in seen[2]] == ["user", "assistant"] * 2 + ["user"]


def test_only_the_last_turn_is_graded(chat_pair):
    graded = []
    rows = run(
        Plan([turns("one", "two")], arms("target")),
        chat_pair,
        grade=lambda prompt, text: graded.append(text) or {"score": 0.5, "scorer": "mine"},
    )
    assert [row["score"] for row in rows] == [None, 0.5] and len(graded) == 1


def test_a_conversation_is_taken_up_in_the_middle(chat_pair):
    plan = Plan([turns("one", "two", "three")], arms("target", "fly"))
    whole = list(run(plan, chat_pair))
    rest = list(run(plan, chat_pair, done=done_texts(whole[:4])))
    assert list(map(timeless, rest)) == list(map(timeless, whole[4:]))


def test_after_a_failed_turn_the_rest_of_the_conversation_fails_too(chat_pair, monkeypatch):
    real = type(chat_pair.codec).encode

    def encode(self, prompt):
        if prompt.messages and len(prompt.messages) == 3:
            raise DecodeError("broken")
        return real(self, prompt)

    monkeypatch.setattr(type(chat_pair.codec), "encode", encode)
    rows = list(run(Plan([turns("one", "two", "three")], arms("target")), chat_pair))
    assert [row["status"] for row in rows] == ["ok", "failed", "failed"]
    assert [row["error"] for row in rows[1:]] == ["broken", "turn 1 of the conversation failed"]
    again = list(run(Plan([turns("one", "two", "three")], arms("target")), chat_pair, done=done_texts(rows[:2])))
    assert list(map(timeless, again)) == list(map(timeless, rows[2:]))


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_empty_or_too_long_fails_alone():
    pair = pair_of(tiny_llama(0, max_position_embeddings=32), noisy_copy(tiny_llama(0, max_position_embeddings=32), 1))
    texts = {"good": "abc", "empty": "", "long": "a" * 40, "also good": "abc"}
    plan = Plan([Prompt(name, text=text) for name, text in texts.items()], arms("target", "fly", "hf", "hf-assisted"))
    rows = list(run(plan, pair))
    failed = {row["prompt_id"] for row in rows if row["status"] == "failed"}
    assert failed == {"empty", "long"} and len(rows) == 16
    assert any("40 tokens" in (row["error"] or "") and "32" in row["error"] for row in rows)
    target, after = (
        [row["ids"] for row in rows if row["prompt_id"] == name and row["arm"] == "target"]
        for name in texts
        if name.endswith("good")
    )
    assert target == after


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), RuntimeError("can't allocate memory")],
)
def test_memory_that_runs_out_is_told_with_what_to_do_and_the_run_goes_on(pair, monkeypatch, error):
    real, calls = pair.target._forward, Counter()

    def forward(*given):
        calls["forward"] += 1
        if calls["forward"] == 20:
            raise error
        return real(*given)

    monkeypatch.setattr(pair.target, "_forward", forward)
    rows = list(run(Plan(prompts(3), arms("target")), pair))
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert "memory ran out while answering beside " in rows[1]["error"] and "--draft lookup" in rows[1]["error"]
    assert rows[1]["wall_s"] > 0


def test_other_errors_are_named_with_their_type(pair):
    assert describe_failure(ValueError("a\n b"), pair) == "ValueError: a b"
    assert describe_failure(DecodeError("broken", "mend it"), pair) == "broken (mend it)"


def test_an_interrupt_is_no_failed_row(pair, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.target, "_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run(Plan(prompts(1), arms("target")), pair))


# --- what must not matter -------------------------------------------------------------------------------------------


def test_sampled_texts_do_not_depend_on_the_order_of_prompts_nor_on_what_ran_before():
    target = tiny_llama(0)
    pair = pair_of(target, noisy_copy(target, 1))
    chosen = arms("target", "exact", temperature=1.0)

    def texts(names, seed=7):
        asked = [Prompt(name, text="the ") for name in names]
        return {(row["prompt_id"], row["arm"]): row["ids"] for row in run(Plan(asked, chosen, seed=seed), pair)}

    forth = texts("abc")
    assert texts("cab") == forth and texts("b") == {key: ids for key, ids in forth.items() if key[0] == "b"}
    assert all(forth[name, "target"] == forth[name, "exact"] for name in "abc")
    assert forth["a", "target"] != forth["b", "target"] != texts("abc", seed=8)["b", "target"]


def test_seeds_differ_between_prompts_and_between_seeds():
    assert len({prompt_seed(seed, name) for seed in range(10) for name in map(str, range(100))}) == 1000


def test_warm_up_runs_every_arm_briefly_and_leaves_no_row(pair, monkeypatch):
    seen = []
    monkeypatch.setattr(
        bench, "answer", lambda pair, prompt, kind, settings: seen.append((kind, settings.max_new_tokens))
    )
    assert list(warm_up(pair, Plan(prompts(2), arms("target", "fly", max_new_tokens=50)), 2)) == []
    assert seen == [("target", 16), ("fly", 16)] * 2


def test_a_warm_up_that_fails_is_told_and_ends_nothing(pair):
    notes = list(warm_up(pair, Plan([Prompt("empty", text="")], arms("target")), 1))
    assert len(notes) == 1 and "warm-up of `target` failed" in notes[0]


def test_an_answer_that_ends_early_leaves_nothing_behind_for_the_next_prompt(pair):
    stop = answer(pair, prompts(1)[0], "target", arms("target")[0].settings).text[4]
    chosen = arms("exact", stop=(stop,))
    both = list(run(Plan(prompts(4), chosen), pair))
    alone = [row for prompt in prompts(4) for row in run(Plan([prompt], chosen), pair)]
    assert list(map(timeless, both)) == list(map(timeless, alone))
    assert any(row["num_new_tokens"] < 12 for row in both)
    assert all(row["num_accepted_draft_tokens"] <= row["num_new_tokens"] for row in both)


def test_a_thousand_prompts_take_no_more_memory_than_a_few(pair, tmp_path):
    from fly_cli.bench_rows import Results

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    results = Results(tmp_path)
    before = None
    for number, row in enumerate(run(Plan(prompts(1000), arms("fly", max_new_tokens=3)), pair)):
        results.append(row)
        if number == 100:
            before = resident()
    assert before is not None and resident() - before < 50_000_000
    assert sum(1 for _ in results.rows()) == 1000
