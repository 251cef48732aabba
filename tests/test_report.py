"""Every figure of a report, against numbers worked out by hand; and what people see of it."""

import json
import random
import re
import sys
import tracemalloc
import xml.etree.ElementTree as ElementTree

import pytest
from event_helpers import Block, run
from rich.cells import cell_len

from fly_cli.errors import FlyError
from fly_cli.figures import first_divergence
from fly_cli.report import compare, format_comparison, format_table, pareto, summarise, to_markdown, write_plots
from fly_cli.stats import summarize

HEADER = {"format": 1, "arms": ["target", "fly"], "machine": {"cpu": "2 cores"}}


def make_row(prompt_id, arm, *, tokens=11, decode_s=10.0, **fields):
    """An ok row of plain decoding: one round a token after the first, 1 s of prefill."""
    return {
        "prompt_id": prompt_id,
        "category": "all",
        "subtask": None,
        "arm": arm,
        "repeat": 0,
        "turn": 0,
        "status": "ok",
        "error": None,
        "num_prompt_tokens": 5,
        "num_new_tokens": tokens,
        "num_first_tokens": 1,
        "num_spec_steps": tokens - 1,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "num_deferred_tokens": 0,
        "acceptance_histogram": {"0": tokens - 1},
        "draft_length_histogram": {"0": tokens - 1},
        "acceptance_by_position": [],
        "origins": {"exact": 0, "deferred": 0, "corrected": 0, "bonus": 0, "target": tokens},
        "ttft_s": 1.0,
        "tpot_ms": 1000 * decode_s / (tokens - 1) if tokens > 1 else None,
        "decode_s": decode_s,
        "draft_s": 0.0,
        "verify_s": decode_s,
        "other_s": 0.0,
        "overhead_share": 0.1,
        "text": "text",
        "ids": list(range(tokens)),
        "score": None,
        "scorer": None,
        "peak_memory_bytes": None,
        "wall_s": 1.0 + decode_s,
        **fields,
    }


def failed_row(prompt_id, arm, **fields):
    place = {"category": "all", "subtask": None, "repeat": 0, "turn": 0}
    return {"prompt_id": prompt_id, "arm": arm, "status": "failed", "error": "out of memory", **place, **fields}


# Two prompts. target: 10 + 20 tokens after the first in 10 + 10 s, 1.5 a second; fly: 10 + 20 in 2 + 8 s, 3 a second.
TARGET_ROWS = [
    make_row("a", "target", tokens=11, decode_s=10.0, score=1.0, scorer="number", peak_memory_bytes=100),
    make_row("b", "target", tokens=21, decode_s=10.0, score=0.5, scorer="number", peak_memory_bytes=300, ttft_s=3.0),
]
FLY_ROWS = [
    make_row(
        "a",
        "fly",
        tokens=11,
        decode_s=2.0,
        num_spec_steps=3,
        num_draft_tokens=10,
        num_accepted_draft_tokens=8,
        num_deferred_tokens=2,
        acceptance_histogram={"2": 2, "4": 1},
        draft_length_histogram={"3": 2, "4": 1},
        acceptance_by_position=[1.0, 1.0, 1 / 3, 1.0],
        origins={"exact": 6, "deferred": 2, "corrected": 1, "bonus": 1, "target": 1},
        draft_s=1.0,
        verify_s=0.75,
        other_s=0.25,
        score=1.0,
        scorer="number",
    ),
    make_row(
        "b",
        "fly",
        tokens=21,
        decode_s=8.0,
        num_spec_steps=7,
        num_draft_tokens=20,
        num_accepted_draft_tokens=13,
        num_deferred_tokens=0,
        acceptance_histogram={"1": 4, "3": 3},
        draft_length_histogram={"2": 4, "4": 3},
        acceptance_by_position=[1.0, 3 / 7, 1.0, 0.0],
        origins={"exact": 13, "deferred": 0, "corrected": 7, "bonus": 0, "target": 1},
        draft_s=3.0,
        verify_s=4.0,
        other_s=1.0,
        score=0.0,
        scorer="number",
        ids=[*range(15), 99, *range(16, 21)],
    ),
]
ROWS = [*TARGET_ROWS, *FLY_ROWS]


def overall(rows, arm="fly", header=HEADER):
    return summarise(header, rows)["overall"][arm]


# --- one arm


def test_speeds_are_all_tokens_over_all_seconds_without_and_with_the_prefill():
    target, fly = overall(ROWS, "target"), overall(ROWS)
    assert target["decode_tps"] == 30 / 20
    assert fly["decode_tps"] == 30 / 10
    assert target["end_to_end_tps"] == 32 / 24  # 1 + 3 s of prefill
    assert fly["end_to_end_tps"] == 32 / 12


def test_tokens_that_came_with_the_prefill_are_not_decoded_ones():
    """A decoder that drafts before its first forward is not faster for the tokens that this forward gives."""
    rows = [make_row("a", "target"), make_row("a", "hf-assisted", num_first_tokens=6, decode_s=5.0)]
    hf = overall(rows, "hf-assisted")
    assert hf["decode_tps"] == 5 / 5 and hf["speedup_vs_target"]["value"] == 1
    assert hf["end_to_end_tps"] == 11 / 6


def test_counts_times_and_memory_are_added_up_or_the_middle_or_the_most():
    target, fly = overall(ROWS, "target"), overall(ROWS)
    assert (fly["num_prompt_tokens"], fly["num_new_tokens"], fly["num_spec_steps"]) == (10, 32, 10)
    assert (fly["num_draft_tokens"], fly["num_accepted_draft_tokens"], fly["num_deferred_tokens"]) == (30, 21, 2)
    assert (fly["draft_s"], fly["verify_s"], fly["other_s"], fly["decode_s"]) == (4.0, 4.75, 1.25, 10.0)
    assert (target["ttft_s"], target["prefill_s"]) == (2.0, 4.0)
    assert fly["tpot_ms"] == (200 + 400) / 2
    assert (target["peak_memory_bytes"], fly["peak_memory_bytes"]) == (300, None)


def test_the_mean_acceptance_length_is_tokens_after_the_first_over_target_forwards():
    assert overall(ROWS)["mean_acceptance_length"] == 30 / 10
    assert overall(ROWS, "target")["mean_acceptance_length"] == 1


def test_acceptance_rate_histogram_and_positions_are_pooled_over_rounds():
    fly = overall(ROWS)
    assert fly["draft_acceptance_rate"] == 21 / 30
    assert fly["acceptance_histogram"] == {"1": 4, "2": 2, "3": 3, "4": 1}
    assert fly["draft_length_histogram"] == {"2": 4, "3": 2, "4": 4}
    # position 0: 3 + 7 of 3 + 7; 1: 3 + 3 of 3 + 7; 2: 1 + 3 of 3 + 3; 3: 1 + 0 of 1 + 3
    assert fly["acceptance_by_position"] == [1.0, 6 / 10, 4 / 6, 1 / 4]
    assert overall(ROWS, "target")["acceptance_by_position"] == []


def test_positions_that_never_kept_a_token_are_pooled_by_how_many_rounds_reached_them():
    never = make_row("a", "fly", acceptance_histogram={"1": 4}, draft_length_histogram={"1": 1, "2": 2, "4": 1})
    whole = make_row("b", "fly", acceptance_histogram={"4": 1}, draft_length_histogram={"4": 1})
    assert overall([never, whole])["acceptance_by_position"] == [5 / 5, 1 / 4, 1 / 2, 1 / 2]


def test_the_share_of_mismatches_deferred_is_over_deferred_and_corrected():
    assert overall(ROWS)["deferred_mismatch_share"] == 2 / (2 + 8)
    assert overall(ROWS, "target")["deferred_mismatch_share"] is None
    assert overall(ROWS)["origins"] == {"exact": 19, "deferred": 2, "corrected": 8, "bonus": 1, "target": 2}


def test_the_score_is_the_mean_of_the_rows_that_have_one():
    assert overall([*ROWS, make_row("c", "target")], "target")["score"] == {
        "value": 0.75,
        "low": None,
        "high": None,
        "num_rows": 2,
    }
    assert overall([make_row("c", "fly")])["score"] is None


def test_a_mean_says_of_how_many_answers_it_is():
    rows = [make_row("a", "fly"), make_row("b", "fly", tokens=1, decode_s=0.0), make_row("c", "fly", tokens=21)]
    summary = summarise(HEADER, rows)
    assert summary["overall"]["fly"]["num_timed_rows"] == 2
    assert summary["overall"]["fly"]["tpot_ms"] == (1000 + 500) / 2
    note = "fly: the time per token is that of 2 of 3 answers; the others ended with the tokens that came first"
    assert summary["notes"] == [note]
    assert summarise(HEADER, [rows[0]])["notes"] == []


def test_repeats_have_a_median_and_a_spread_over_what_all_of_them_answered():
    rows = [make_row("a", "fly", decode_s=seconds, repeat=repeat) for repeat, seconds in enumerate([10.0, 5.0, 4.0])]
    rows.append(make_row("b", "fly", decode_s=100.0, repeat=0))  # the others did not come to it
    fly = overall(rows)
    assert fly["decode_tps"] == pytest.approx(40 / 119)
    assert fly["decode_tps_repeats"] == {
        "median": 2.0,
        "min": 1.0,
        "max": 2.5,
        "stdev": pytest.approx((7 / 12) ** 0.5),
        "num_repeats": 3,
    }
    assert overall(ROWS)["decode_tps_repeats"] is None


def test_a_row_written_by_an_older_run_of_the_same_turn_is_replaced():
    rows = [failed_row("a", "fly"), *ROWS]
    assert overall(rows)["num_failed_prompts"] == 0


# --- two arms


def test_speedups_are_micro_and_macro():
    found = overall(ROWS)["speedup_vs_target"]
    assert found["value"] == (30 / 10) / (30 / 20)
    assert found["macro"] == (10 / 2 + 10 / 8) / 2  # 5 and 1.25 times on the two prompts
    assert (found["low"], found["num_prompts"], found["num_unpaired_prompts"]) == (None, 2, 0)
    assert overall(ROWS)["end_to_end_speedup_vs_target"]["value"] == (32 / 12) / (32 / 24)
    assert overall(ROWS)["speedup_vs_exact"] is None  # not measured


def test_speedups_over_exact_are_measured_against_that_arm():
    rows = [*ROWS, make_row("a", "exact", decode_s=5.0), make_row("b", "exact", tokens=21, decode_s=15.0)]
    assert overall(rows)["speedup_vs_exact"]["value"] == (30 / 10) / (30 / 20)
    assert overall(rows, "target")["speedup_vs_exact"]["value"] == 1
    assert overall(rows, "exact")["speedup_vs_target"]["value"] == 1


def test_a_speedup_has_an_interval_that_holds_it():
    rows = []
    for number in range(8):
        rows += [make_row(f"p{number}", "target"), make_row(f"p{number}", "fly", decode_s=2.0 + number % 3)]
    found = overall(rows)["speedup_vs_target"]
    assert 2.5 < found["low"] < found["value"] < found["high"] < 5  # 2, 3 and 4 s against 10 s
    assert 2.5 < found["macro_low"] < found["macro"] < found["macro_high"] < 5


def test_turns_and_repeats_of_a_prompt_are_added_up_before_its_ratio_is_taken():
    rows = [
        *(make_row("a", "target", decode_s=seconds, turn=turn) for turn, seconds in ((0, 10.0), (1, 30.0))),
        *(make_row("a", "fly", decode_s=seconds, turn=turn) for turn, seconds in ((0, 2.0), (1, 8.0))),
    ]
    found = overall(rows)["speedup_vs_target"]
    assert found["value"] == found["macro"] == 4
    assert found["num_prompts"] == 1


def test_failed_rows_are_counted_and_their_prompts_are_out_of_paired_ratios():
    rows = [*ROWS, make_row("c", "target", decode_s=1.0), failed_row("c", "fly")]
    summary = summarise(HEADER, rows)
    fly = summary["overall"]["fly"]
    assert (fly["num_ok_prompts"], fly["num_failed_prompts"], fly["num_failed_rows"]) == (2, 1, 1)
    assert fly["speedup_vs_target"]["value"] == 2
    assert (fly["speedup_vs_target"]["num_prompts"], fly["speedup_vs_target"]["num_unpaired_prompts"]) == (2, 1)
    assert "fly: 1 of 3 prompts failed; what failed is in no figure" in summary["notes"]
    assert "fly: compared with target on 2 prompts; answered by one of them only: 1" in summary["notes"]


def test_recovery_is_the_sum_of_scores_over_that_of_the_target():
    assert overall(ROWS)["recovery_vs_target"] == {"value": 1.0 / 1.5, "low": None, "high": None, "num_prompts": 2}
    assert overall(ROWS, "target")["recovery_vs_target"]["value"] == 1
    assert overall([make_row("a", "target"), make_row("a", "fly")])["recovery_vs_target"] is None


def test_recovery_from_a_target_that_scores_nothing_is_none():
    rows = [make_row("a", "target", score=0.0), make_row("a", "fly", score=1.0)]
    assert overall(rows)["recovery_vs_target"]["value"] is None


def test_agreement_counts_equal_answers_and_finds_where_the_others_leave():
    rows = [*ROWS, make_row("c", "target"), make_row("c", "fly", ids=[0, 1, 2, 7])]
    assert overall(rows)["agreement_vs_target"] == {
        "identical_share": 1 / 3,
        "num_identical": 1,
        "num_answers": 3,
        "median_first_divergence": (15 + 3) / 2,
    }


def test_turns_behind_one_that_differs_answer_another_conversation():
    rows = [make_row("a", arm, turn=turn) for arm in ("target", "fly") for turn in (0, 1, 2)]
    rows[4]["ids"] = [9]  # fly, turn 1
    rows[5]["ids"] = [8]
    found = overall(rows)["agreement_vs_target"]
    assert (found["num_answers"], found["num_identical"], found["median_first_divergence"]) == (2, 1, 0)


@pytest.mark.parametrize("one, other, place", [("abc", "abc", None), ("abc", "axc", 1), ("abc", "ab", 2), ("", "a", 0)])
def test_where_two_answers_part(one, other, place):
    assert first_divergence(one, other) == first_divergence(other, one) == place


def test_an_arm_that_cannot_tell_its_rounds_has_nothing_made_up():
    """transformers' own ways to decode: tokens and times only."""
    unknown = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_deferred_tokens", "draft_s")
    unknown += ("verify_s", "other_s", "acceptance_histogram", "draft_length_histogram", "acceptance_by_position")
    unknown += ("origins", "overhead_share")
    rows = [make_row("a", "target"), make_row("a", "hf", decode_s=5.0, **dict.fromkeys(unknown))]
    hf = overall(rows, "hf")
    assert hf["speedup_vs_target"]["value"] == 2
    for name in ("num_draft_tokens", "mean_acceptance_length", "draft_acceptance_rate", "draft_s", "verify_s"):
        assert hf[name] is None
    assert hf["acceptance_histogram"] == hf["draft_length_histogram"] == {} and hf["acceptance_by_position"] == []


# --- the summary


def test_categories_are_subtasks_where_there_are_some_and_each_has_figures_of_its_own():
    rows = [
        make_row("a", "target", category="code"),
        make_row("a", "fly", category="code", decode_s=2.0),
        make_row("b", "target", category="writing", subtask="mt_bench"),
        make_row("b", "fly", category="writing", subtask="mt_bench", decode_s=20.0),
    ]
    summary = summarise(HEADER, rows)
    assert summary["categories"] == ["code", "mt_bench"]
    assert summary["by_category"]["code"]["fly"]["speedup_vs_target"]["value"] == 5
    assert summary["by_category"]["mt_bench"]["fly"]["speedup_vs_target"]["value"] == 0.5
    assert summary["overall"]["fly"]["speedup_vs_target"]["value"] == 20 / 22


def test_arms_come_in_the_order_of_the_header_and_others_behind():
    rows = [make_row("a", arm) for arm in ("lookup", "fly", "target")]
    assert summarise(HEADER, rows)["arms"] == ["target", "fly", "lookup"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [failed_row("a", "fly"), failed_row("a", "target")],
        [make_row("a", arm, tokens=1, decode_s=0.0, ttft_s=0.0) for arm in ("target", "fly")],  # ends at once
        ROWS,
    ],
)
def test_a_summary_is_strict_json_whatever_there_is(rows, tmp_path):
    summary = summarise(HEADER, rows)
    assert json.loads(json.dumps(summary, allow_nan=False))["header"] == HEADER
    assert format_table(summary).endswith("\n")
    assert to_markdown(summary).startswith("# fly bench")
    write_plots(summary, tmp_path)


def test_the_same_rows_in_another_order_give_the_same_summary():
    rows = [
        make_row(f"p{number}", arm, decode_s=1.0 + number * (arm == "fly"))
        for number in range(9)
        for arm in ("target", "fly")
    ]
    shuffled = random.Random(1).sample(rows, len(rows))
    assert summarise(HEADER, shuffled)["overall"] == summarise(HEADER, rows)["overall"]


def test_scores_that_were_not_given_are_told_with_the_flag():
    rows = [make_row("a", "fly", scorer="python_tests")]
    (note,) = summarise(HEADER, rows)["notes"]
    assert note == "fly: answers that could be scored and were not: 1 (`--run-code` runs what they wrote)"


def test_figures_of_real_runs_are_those_of_all_their_rounds():
    """Two runs by their events, of which the rows know only each run's own figures."""
    first = summarize(run("==x======!==", "===", Block("==!", cut=1), prefill_seconds=0.5))
    second = summarize(run("=!=", "!==", "====", prefill_seconds=1.5))
    labels = {"arm": "fly", "repeat": 0, "turn": 0, "status": "ok", "ids": [1]}
    fly = overall([{**one.as_json(), **labels, "prompt_id": name} for name, one in (("a", first), ("b", second))])
    # Kept of drafted: 9 of 12, 3 of 3 and 1 of 3; then 1 of 3, 0 of 3 and 4 of 4.
    assert fly["draft_acceptance_rate"] == 18 / 28
    assert fly["acceptance_histogram"] == {"0": 1, "1": 2, "3": 1, "4": 1, "9": 1}
    assert fly["draft_length_histogram"] == {"3": 4, "4": 1, "12": 1}
    assert fly["acceptance_by_position"] == [5 / 6, 3 / 6, 3 / 6, 2 / 2, *[1 / 1] * 5, *[0.0] * 3]
    assert fly["mean_acceptance_length"] == (10 + 4 + 1 + 2 + 1 + 5) / 6
    assert fly["num_deferred_tokens"] == 1
    assert fly["deferred_mismatch_share"] == 1 / (1 + 3)  # the cut round's own correction was not committed
    assert fly["ttft_s"] == 1.0
    assert fly["decode_tps"] == pytest.approx(23 / (6 * 0.51))
    assert fly["end_to_end_tps"] == pytest.approx(25 / (6 * 0.51 + 2.0))


def test_rows_are_kept_without_their_texts_and_with_their_ids_packed():
    tracemalloc.start()
    summarise(HEADER, (make_row(f"p{n}", "fly", text="x" * 5000, ids=list(range(n, n + 500))) for n in range(1000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6  # texts are 5 MB, ids as Python numbers 18 MB


# --- what people see


def test_the_table_in_full():
    rows = [*ROWS, failed_row("c", "fly")]
    assert format_table(summarise(HEADER, rows)) == "\n".join(
        [
            "Speed",
            "  arm           prompts  tokens/s  over target  per prompt",
            "  target              2      1.50         1.00        1.00",
            "  fly     2 (+1 failed)      3.00         2.00        3.12",
            "",
            "End to end",
            "  arm     tokens/s  over target  first token  per token   memory",
            "  target      1.33         1.00       2.00 s     750 ms  0.0 GiB",
            "  fly         2.67         2.00       1.00 s     300 ms        -",
            "",
            "Drafting, and where decode time goes",
            "  arm  tokens a round  drafted  kept  deferred  of mismatches  draft  verify  other",
            "  fly            3.00       30   70%         2            20%    40%     48%    12%",
            "",
            "Quality",
            "  arm     score  scored  recovery  same answer  first difference",
            "  target   0.75       2         -            -                 -",
            "  fly      0.50       2      0.67       1 of 2          token 15",
            "",
            "note: fly: 1 of 3 prompts failed; what failed is in no figure",
            "note: fly: compared with target on 2 prompts; answered by one of them only: 1",
            "",
        ]
    )


def test_columns_line_up_under_wide_characters_and_nothing_is_cut_off():
    name = "長いカテゴリー" * 6 + "\x1b[31m"
    rows = [
        make_row(category, arm, category=category, decode_s=2.0)
        for category in (name, "b")
        for arm in ("target", "fly")
    ]
    lines = format_table(summarise(HEADER, rows)).split("Speed-up over target by category\n")[1].splitlines()[:3]
    assert len({cell_len(line) for line in lines}) == 1
    assert "長いカテゴリー" * 6 + "\N{SYMBOL FOR ESCAPE}[31m" in lines[1]
    assert "\x1b" not in lines[1] and "…" not in "".join(lines)


def test_intervals_and_repeats_are_shown():
    rows = [
        make_row(f"p{number}", arm, decode_s=seconds + repeat, repeat=repeat)
        for number in range(6)
        for arm, seconds in (("target", 10.0), ("fly", 2.0))
        for repeat in (0, 1)
    ]
    text = format_table(summarise(HEADER, rows))
    assert "4.17 (3.33 to 5.00)" in text  # 10 tokens in 2 s and in 3 s
    assert "4.20 [4.20, 4.20]" in text  # 21 s against 5 s on every prompt


def test_a_sweep_marks_the_pareto_front():
    rows = [make_row("a", "target")]
    for arm, seconds, ids in (
        ("fly[draft_tokens=5]", 5.0, None),
        ("fly[draft_tokens=9]", 2.0, [1]),
        ("fly[draft_tokens=15]", 4.0, [1]),  # slower than 9 and no better
    ):
        rows.append(make_row("a", arm, decode_s=seconds, **({"ids": ids} if ids else {})))
    summary = summarise({}, rows)
    assert [arm for arm in summary["arms"] if summary["overall"][arm]["pareto_front"]] == [
        "fly[draft_tokens=5]",
        "fly[draft_tokens=9]",
    ]
    marked = [line.split()[0] for line in format_table(summary).splitlines() if line.endswith("*")]
    assert marked == ["fly[draft_tokens=5]", "fly[draft_tokens=9]"]


@pytest.mark.parametrize(
    "points, front",
    [
        ([], []),
        ([(1, 1), (2, 0.9), (1.5, 0.8), (2, 0.9)], [True, True, False, True]),
        ([(1, 1), (2, 1)], [False, True]),
        ([(1, None), (2, None)], [False, True]),  # by speed where quality is not known
        ([(None, None), (None, 1)], [False, True]),
    ],
)
def test_the_pareto_front_is_what_nothing_else_beats(points, front):
    assert pareto(points) == front


def test_markdown_has_the_tables_the_notes_the_rules_and_the_settings(tmp_path):
    rows = [make_row("a", "target"), make_row("a", "fly", decode_s=2.0), failed_row("b", "fly", category="x|*y*")]
    text = to_markdown(summarise({**HEADER, "template": "```"}, rows), [tmp_path / "time_split.svg"])
    assert "| arm | prompts | tokens/s | over target | per prompt |" in text
    assert "| fly | 1 (+1 failed) | 5.00 | 5.00 | 5.00 |" in text
    assert r"| x\|\*y\* | 0 | - |" in text
    assert "- fly: 1 of 2 prompts failed; what failed is in no figure" in text
    assert "![time split](time_split.svg)" in text
    assert "mean acceptance length" in text
    assert json.loads(re.search(r"````json\n(.*)\n````", text, re.DOTALL)[1])["template"] == "```"


@pytest.mark.parametrize(
    "name",
    ["a|b", "# a", "\n# a", "$a$", "[a](b)", "![a](b)", "`a", "<b>", "&lt;", "~~a~~", "\\|", "a\r\nb", "\x1b[2Ja"],
)
def test_a_category_of_any_name_is_one_cell_of_plain_text(name):
    rows = [make_row("a", arm, category=name) for arm in ("target", "fly")] + [
        make_row("b", "target", category="other")
    ]
    text = to_markdown(summarise(HEADER, rows))
    table = text[text.index("## Speed-up over target by category") :].split("\n\n")[1]
    lines = table.splitlines()
    assert len(lines) == 4 and text.count("\n# ") == 0 and "\x1b" not in text
    cells = re.split(r"(?<!\\)(?:\\\\)*\|", lines[2])
    assert len(cells) == 5
    assert not re.search(r"[\\`*_{}\[\]<>|#~&$]", re.sub(r"\\.", "", cells[1]))


# --- plots


def test_plots_are_svg_files_with_their_words_and_equal_for_equal_summaries(tmp_path):
    rows = [
        make_row(f"{category}{number}", arm, category=category, decode_s=seconds + number)
        for category in ("code $x$", "数学", "<b>")
        for number in range(4)
        for arm, seconds in (("target", 10.0), ("exact", 6.0))
    ]
    rows += [
        {**FLY_ROWS[0], "prompt_id": f"{category}{number}", "category": category}
        for category in ("code $x$", "数学", "<b>")
        for number in range(4)
    ]
    summary = summarise(HEADER, rows)
    drawn = write_plots(summary, tmp_path)
    assert [path.name for path in drawn] == [
        "speedup_by_category.svg",
        "acceptance_by_position.svg",
        "time_split.svg",
        "speed_quality.svg",
    ]
    words = ["".join(ElementTree.parse(path).getroot().itertext()) for path in drawn]
    for word in ("code $x$", "数学", "<b>", "exact", "fly"):
        assert word in words[0]
    assert "position in the draft" in words[1]
    assert "milliseconds per new token" in words[2] and "verify" in words[2]
    assert "share of answers equal to the target's" in words[3]
    before = [path.read_bytes() for path in drawn]
    assert [path.read_bytes() for path in write_plots(summary, tmp_path)] == before


def test_one_arm_without_drafts_has_a_plot_of_its_time_only(tmp_path):
    summary = summarise({}, [make_row("a", "target")])
    assert [path.name for path in write_plots(summary, tmp_path)] == ["time_split.svg"]


def test_a_category_that_an_interrupted_run_has_not_come_to_with_all_arms_is_left_out_of_a_plot(tmp_path):
    rows = [make_row("a", arm, category="x") for arm in ("fly", "target")] + [make_row("b", "fly", category="y")]
    drawn = write_plots(summarise(HEADER, rows), tmp_path)
    assert "speedup_by_category.svg" in [path.name for path in drawn]


def test_a_missing_matplotlib_is_named_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FlyError) as error:
        write_plots(summarise(HEADER, ROWS), tmp_path)
    assert error.value.hint == "pip install 'fly-decode[plots]'"


# --- two results


def test_two_results_are_compared_on_the_prompts_that_both_have():
    rows_b = [
        *TARGET_ROWS,
        {**FLY_ROWS[0], "decode_s": 1.0, "score": 0.5},
        {**FLY_ROWS[1], "decode_s": 4.0, "num_spec_steps": 12},
        make_row("only b", "fly", decode_s=0.1),
    ]
    header_b = {**HEADER, "arms": ["target", "fly", "hf"], "settings": {"window_size": 4}, "sessions": [1]}
    a, b = summarise(HEADER, ROWS), summarise(header_b, [*rows_b, make_row("a", "hf")])
    found = compare(a, ROWS, b, [*rows_b, make_row("a", "hf")])
    assert (found["num_common_prompts"], found["num_prompts_only_a"], found["num_prompts_only_b"]) == (2, 0, 1)
    assert (found["arms_only_a"], found["arms_only_b"]) == ([], ["hf"])
    fly = found["arms"]["fly"]
    nothing = {"low": None, "high": None}
    assert fly["decode_tps"] == {"a": 3.0, "b": 6.0, "change": {"value": 2.0, **nothing}, "num_prompts": 2}
    assert fly["speedup_vs_target"] == {"a": 2.0, "b": 4.0, "change": {"value": 2.0, **nothing}, "num_prompts": 2}
    assert fly["mean_acceptance_length"]["b"] == 30 / 15
    assert fly["mean_acceptance_length"]["change"]["value"] == 30 / 15 - 30 / 10
    assert (fly["score"]["a"], fly["score"]["b"], fly["score"]["change"]["value"]) == (0.5, 0.25, -0.25)
    assert fly["agreement"]["identical_share"] == 1
    assert found["settings"] == [
        {"name": "arms", "a": ["target", "fly"], "b": ["target", "fly", "hf"]},
        {"name": "settings", "a": None, "b": {"window_size": 4}},
    ]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_difference_of_two_results_has_an_interval_and_a_table():
    def rows_of(factor):
        return [
            make_row(f"p{number}", arm, decode_s=(1.0 + number) * (1.0 if arm == "target" else factor))
            for number in range(6)
            for arm in ("target", "fly")
        ]

    a, b = rows_of(0.5), rows_of(0.25)
    found = compare(summarise(HEADER, a), a, summarise(HEADER, b), b)
    change = found["arms"]["fly"]["speedup_vs_target"]["change"]
    assert (change["value"], change["low"], change["high"]) == pytest.approx((2, 2, 2))  # 4 times against 2 times
    assert format_comparison(found, "old", "new") == "\n".join(
        [
            "new against old, 6 prompts in both",
            "  arm             figure   old   new                change  prompts",
            "  target        tokens/s  2.86  2.86   × 1.00 [1.00, 1.00]        6",
            "  target  tokens a round  1.00  1.00  +0.00 [+0.00, +0.00]        6",
            "  target     same answer     -     -                6 of 6        -",
            "  fly           tokens/s  5.71  11.4   × 2.00 [2.00, 2.00]        6",
            "  fly        over target  2.00  4.00  +2.00 [+2.00, +2.00]        6",
            "  fly     tokens a round  1.00  1.00  +0.00 [+0.00, +0.00]        6",
            "  fly        same answer     -     -                6 of 6        -",
            "",
        ]
    )


def test_results_with_nothing_in_common_say_so():
    a, b = [make_row("a", "target")], [make_row("b", "target")]
    found = compare(summarise({}, a), a, summarise({}, b), b)
    assert found["arms"]["target"]["decode_tps"] is None
    text = format_comparison(found)
    assert text.startswith("B against A, 0 prompts in both: nothing to compare\n")
    assert "note: prompts only in A, left out: 1" in text
