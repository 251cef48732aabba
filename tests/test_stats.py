"""Figures follow from the events, by the rules that stats.py states."""

from __future__ import annotations

import json

import pytest
from event_helpers import Block, plain, run
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.events import Event, Finished, FinishReason, Origin, Round
from fly_cli.settings import DecodeSettings
from fly_cli.stats import Tally, num_accepted, summarize


def test_every_origin_is_counted_once() -> None:
    summary = summarize(run("==x======!==", "===", "!=", ""))
    assert summary.origins == {
        Origin.EXACT: 11,
        Origin.DEFERRED: 1,
        Origin.CORRECTED: 2,
        Origin.BONUS: 1,
        Origin.TARGET: 2,
    }
    assert sum(summary.origins.values()) == summary.num_new_tokens == 17


def test_acceptance_is_told_by_length_and_by_position() -> None:
    summary = summarize(run("==!", "====", "!", ""))
    assert summary.num_spec_steps == 4
    assert summary.num_draft_tokens == 8
    assert summary.num_accepted_draft_tokens == 6
    assert summary.draft_acceptance_rate == 6 / 8
    assert summary.acceptance_histogram == {0: 2, 2: 1, 4: 1}
    assert summary.draft_length_histogram == {0: 1, 1: 1, 3: 1, 4: 1}
    assert summary.acceptance_by_position == (2 / 3, 1.0, 0.5, 1.0)
    assert summary.mean_acceptance_length == (3 + 5 + 1 + 1) / 4


def test_tokens_that_were_cut_off_are_not_accepted() -> None:
    summary = summarize(run(Block("=====", cut=2)))
    assert (summary.num_accepted_draft_tokens, summary.num_draft_tokens, summary.num_new_tokens) == (2, 5, 3)
    assert summary.acceptance_histogram == {2: 1}
    assert summary.mean_acceptance_length == 2


def test_target_mode_has_an_acceptance_length_of_one_and_no_rate() -> None:
    summary = summarize(plain(["a", "b", "c"]))
    assert summary.mean_acceptance_length == 1
    assert summary.draft_acceptance_rate is None
    assert summary.acceptance_histogram == {0: 2}
    assert summary.acceptance_by_position == ()


def test_speed_counts_tokens_and_leaves_prefill_out() -> None:
    # Prefill takes 2 s, then 10 rounds of 0.1 s commit 5 tokens each; the first tokens show no text.
    block = Block("====", draft_seconds=0.06, verify_seconds=0.04, other_seconds=0.0)
    summary = summarize(run(*[block] * 10, first="", prefill_seconds=2.0))
    assert (summary.num_new_tokens, summary.num_first_tokens) == (51, 1)
    assert summary.ttft_s == 2.0
    assert summary.decode_s == pytest.approx(1.0)
    assert summary.decode_tps == pytest.approx(50.0)
    assert summary.tpot_ms == pytest.approx(20.0)
    assert summary.end_to_end_tps == pytest.approx(51 / 3)
    assert summary.mean_acceptance_length == 5


def test_draft_verify_and_other_add_up_to_the_decode_time_on_the_clock() -> None:
    summary = summarize(run("==", "==", prefill_seconds=1.0, seconds=3.0))
    assert summary.decode_s == pytest.approx(2.0)
    assert summary.draft_s == pytest.approx(0.6)
    assert summary.verify_s == pytest.approx(0.4)
    assert summary.other_s == pytest.approx(1.0)


def test_overhead_is_the_median_round_outside_both_forwards() -> None:
    def block(overhead: float) -> Block:
        return Block(
            "=",
            draft_seconds=0.5,
            verify_seconds=0.5,
            other_seconds=0.0,
            draft_forward_seconds=0.5 - overhead,
            verify_forward_seconds=0.5,
        )

    assert summarize(run(block(0.01), block(0.4), block(0.02))).overhead_share == pytest.approx(0.02)


@pytest.mark.parametrize(
    "events",
    [
        [],
        run(prefill_seconds=0.0, seconds=0.0),
        run(),
        run(Block("", draft_seconds=0, verify_seconds=0, other_seconds=0), prefill_seconds=0.0),
        run("==", reason=None),
    ],
    ids=["no event", "one token at once", "one token", "no time passed", "interrupted"],
)
def test_a_figure_without_meaning_is_null(events: list[Event]) -> None:
    summary = summarize(events)
    text = json.dumps(summary.as_json(), allow_nan=False)
    assert json.loads(text)["num_new_tokens"] == summary.num_new_tokens


def test_one_token_has_no_speed_after_the_first() -> None:
    summary = summarize(run(seconds=1.0))
    assert (summary.tpot_ms, summary.decode_tps, summary.mean_acceptance_length) == (None, None, None)
    assert (summary.overhead_share, summary.draft_acceptance_rate) == (None, None)
    assert summary.end_to_end_tps == 1.0


def test_an_interrupted_run_has_no_finish_reason_and_counts_its_rounds() -> None:
    summary = summarize(run("==", "!", reason=None))
    assert summary.finish_reason is None
    assert summary.decode_s == pytest.approx(2 * 0.51)


def test_the_finish_reason_is_the_events_own() -> None:
    assert summarize(run("=", reason=FinishReason.STOP)).finish_reason is FinishReason.STOP


def test_a_tally_takes_one_run() -> None:
    tally = Tally()
    started = run()[0]
    tally.handle(started)
    with pytest.raises(ValueError, match="one run"):
        tally.handle(started)


drawings = st.lists(st.text("=x!", max_size=12), max_size=6)


@given(drawings, st.integers(0, 13))
def test_no_rate_is_above_one_and_the_parts_add_up(blocks: list[str], cut: int) -> None:
    made = [Block(drawing, cut=max(1, cut)) if at == len(blocks) - 1 else drawing for at, drawing in enumerate(blocks)]
    events = run(*made, settings=DecodeSettings(window_size=2, seed=0))
    summary = summarize(events)
    assert 0 <= summary.num_accepted_draft_tokens <= summary.num_draft_tokens
    assert sum(summary.origins.values()) == summary.num_new_tokens
    assert sum(summary.acceptance_histogram.values()) == summary.num_spec_steps
    assert sum(kept * count for kept, count in summary.acceptance_histogram.items()) == (
        summary.num_accepted_draft_tokens
    )
    assert sum(summary.draft_length_histogram.values()) == summary.num_spec_steps
    rounds = [event for event in events if isinstance(event, Round)]
    for j, share in enumerate(summary.acceptance_by_position):
        assert share == sum(num_accepted(one) > j for one in rounds) / sum(len(one.drafted) > j for one in rounds)
        assert 0 <= share <= 1
    committed = [token for event in events if isinstance(event, Round) for token in event.tokens]
    assert summary.num_new_tokens == 1 + len(committed)
    assert isinstance(events[-1], Finished)
