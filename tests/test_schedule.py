"""The adaptive schedule on made-up machines and prompts: a table of costs and chances, no clocks."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.events import Origin
from fly_cli.schedule import Adaptive, CostTable, Way, guess_costs, interpolate, rising, room_for_draft
from fly_cli.verify import Rejection, Verdict

CHEAP_ROWS = CostTable({1: 1.0, 16: 1.3}, {1: 0.2})  # a machine with matrix units
DEAR_ROWS = CostTable({1: 1.0, 16: 4.5}, {1: 0.35})  # one without


def verdict(kept, drafted):
    """That of a strict walk which keeps `kept` of `drafted` tokens."""
    whole = kept == drafted
    final = Origin.BONUS if whole else Origin.CORRECTED
    return Verdict((Origin.EXACT,) * kept, 0, final, None if whole else Rejection.STRICT)


def play(costs, keep, rounds=400, match=0, copy_keep=0.0, seed=0):
    """Tokens per unit of plain decoding time of a prompt whose drafts are kept with chance `keep(confidence)`."""
    dice, policy = random.Random(seed), Adaptive(costs)
    tokens = seconds = 0.0
    ways = []
    for _ in range(rounds):
        way, limit = policy.choose(15, match, 15 if match else 0)
        ways.append(way)
        if way is Way.MODEL:
            confidences = [dice.choice((0.4, 0.75, 0.92, 0.995))]
            while len(confidences) < limit and policy.goes_on(confidences, limit):
                confidences.append(dice.choice((0.4, 0.75, 0.92, 0.995)))
            kept = next((j for j, c in enumerate(confidences) if dice.random() > keep(c)), len(confidences))
            policy.learn_model(confidences, verdict(kept, len(confidences)), [1] * len(confidences))
            seconds += len(confidences) * costs.step_seconds() + costs.verify_seconds(len(confidences))
        elif way is Way.COPY:
            kept = next((j for j in range(limit) if dice.random() > copy_keep), limit)
            policy.learn_copy(limit, verdict(kept, limit))
            policy.learn_match(match, [1] * limit, [1] * kept + [2])
            seconds += costs.verify_seconds(limit)
        else:
            kept = 0
            policy.learn_none()
            seconds += costs.verify_seconds(0)
        tokens += kept + 1
    return tokens / seconds, ways


@pytest.mark.parametrize("costs", [CHEAP_ROWS, DEAR_ROWS])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
def test_useless_drafts_cost_little_over_plain_decoding(costs, chance):
    rate, ways = play(costs, lambda _: chance)
    assert rate > 0.93
    if chance == 0:
        assert ways.count(Way.NONE) > 0.8 * len(ways)


def test_good_drafts_are_used_to_the_full_where_rows_are_cheap():
    rate, ways = play(CHEAP_ROWS, lambda _: 0.97)
    assert rate > 2.0
    assert ways.count(Way.MODEL) > 0.95 * len(ways)


def test_a_drafter_that_knows_when_it_is_right_beats_one_that_does_not():
    knowing, _ = play(CHEAP_ROWS, lambda c: {0.4: 0.1, 0.75: 0.7, 0.92: 0.97, 0.995: 1.0}[c])
    blind, _ = play(CHEAP_ROWS, lambda _: 0.69)  # the same share on the whole
    assert knowing > blind


def test_copied_tokens_that_hold_are_sent_straight_to_the_target():
    rate, ways = play(CHEAP_ROWS, lambda _: 0.9, match=8, copy_keep=0.97)
    assert ways.count(Way.COPY) > 0.9 * len(ways)
    assert rate > 5


@pytest.mark.parametrize("costs", [CHEAP_ROWS, DEAR_ROWS])
def test_copied_tokens_that_never_hold_soon_cost_nothing(costs):
    rate, _ = play(costs, lambda _: 0.0, match=8, copy_keep=0.0)
    assert rate > 0.92


def test_fewer_copied_tokens_are_sent_where_rows_are_dear():
    lengths = []
    for costs in (CHEAP_ROWS, DEAR_ROWS):
        policy = Adaptive(costs)
        policy.rest = 100  # no draft model
        lengths.append(policy.choose(15, 4, 15)[1])
    assert lengths[0] > lengths[1]


def test_a_draft_stops_sooner_after_doubt_and_where_steps_are_dear():
    sure, doubtful = [0.995] * 4, [0.995, 0.2]
    assert Adaptive(CHEAP_ROWS).goes_on(sure, 15)
    assert not Adaptive(CHEAP_ROWS).goes_on(sure, 4)
    assert Adaptive(CHEAP_ROWS).goes_on(doubtful, 15)
    assert not Adaptive(DEAR_ROWS).goes_on(doubtful, 15)
    assert not Adaptive(CostTable({1: 1.0, 16: 1.3}, {1: 0.9})).goes_on(sure, 15)


def test_a_long_prompt_is_read_by_the_draft_model_only_when_the_answer_is_long_enough_to_pay_for_it():
    policy = Adaptive(CostTable({1: 1.0, 16: 1.3}, {1: 0.1, 32: 0.9}))  # 0.026 a row
    assert policy.pays_to_read(100, 0)
    assert not policy.pays_to_read(800, 0)
    assert not policy.pays_to_read(820, 20)
    assert policy.pays_to_read(840, 40)
    policy.rounds.add(tokens=40, seconds=10)  # copying is four times as fast as the target
    assert not policy.pays_to_read(840, 40)
    assert policy.pays_to_read(940, 180)
    assert Adaptive(CHEAP_ROWS).pays_to_read(100_000, 0)  # where rows cost nothing


def test_one_noisy_point_does_not_make_long_prompts_cheap():
    measured = {1: 0.028, 2: 0.031, 4: 0.03, 8: 0.092, 16: 0.084, 32: 0.155}
    for noise in ({}, {36: 0.349, 51: 0.234}, {36: 0.15, 51: 0.155}):
        assert 4 < CostTable({1: 0.2}, measured | noise).step_seconds(1500) < 16


def test_a_row_that_begins_a_block_pays_if_the_block_does():
    blocks = CostTable({1: 1.0, 6: 1.0, 7: 1.6, 12: 1.6, 13: 2.2, 18: 2.2}, {1: 0.02})
    policy = Adaptive(blocks)
    policy.rounds.add(tokens=30, seconds=10)
    assert policy.goes_on([0.998] * 5, 15)
    assert not policy.goes_on([0.998] * 5, 6)  # a single row of the block does not
    assert not policy.goes_on([0.998] * 4 + [0.1], 15)


def test_a_doubt_counts_less_where_a_window_fits_behind_it_and_mismatches_are_forgiven():
    strict, relaxed = Adaptive(CHEAP_ROWS), Adaptive(CHEAP_ROWS, window_size=6)
    assert relaxed.chance_of(0.4, 6) > relaxed.chance_of(0.4, 5) == strict.chance_of(0.4, 6)
    before = relaxed.chance_of(0.4, 6)
    forgiven = Verdict((Origin.DEFERRED,) + (Origin.EXACT,) * 6, 0, Origin.BONUS)
    relaxed.learn_model([0.4] + [0.99] * 6, forgiven, [1] * 7)
    assert relaxed.clean.value > Adaptive(CHEAP_ROWS).clean.value
    unclean = Verdict((), 0, Origin.CORRECTED, Rejection.SECOND_MISMATCH)
    for _ in range(20):
        relaxed.learn_model([0.4] + [0.99] * 6, unclean, [1] * 7)
    assert relaxed.chance_of(0.4, 6) < before


def test_a_doubt_whose_window_would_not_fit_ends_a_draft_as_it_does_without_windows():
    strict, relaxed = Adaptive(DEAR_ROWS), Adaptive(DEAR_ROWS, window_size=6)
    for confidences in ([0.2], [0.75, 0.2], [0.995, 0.995, 0.4], [0.4] * 5):
        assert relaxed.goes_on(confidences, 15) == strict.goes_on(confidences, 15)
    assert not relaxed.goes_on([0.2], 15)


def test_the_window_of_a_doubtful_token_may_be_what_pays():
    table = CostTable({1: 1.0, 16: 1.2}, {1: 0.08})
    strict, relaxed = Adaptive(table), Adaptive(table, window_size=6)
    for policy in (strict, relaxed):
        policy.rounds.add(tokens=40, seconds=10)
        policy.clean.add(True)
    doubt_and_no_more = [0.1, 0.995, 0.995, 0.995, 0.995, 0.995]  # one token short of the window
    assert not strict.goes_on(doubt_and_no_more, 15)
    assert relaxed.goes_on(doubt_and_no_more, 15)


@pytest.mark.parametrize("costs", [CHEAP_ROWS, DEAR_ROWS])
@pytest.mark.parametrize("forgiven", [0.0, 0.3, 1.0])
def test_drafts_that_hope_for_forgiveness_are_not_slower_than_strict_ones(costs, forgiven):
    rates = {window: forgiving(costs, window, forgiven) for window in (None, 6)}
    assert rates[6] > 0.98 * rates[None]
    if forgiven == 1 and costs is CHEAP_ROWS:
        assert rates[6] > 1.1 * rates[None]


def forgiving(costs, window, forgiven, rounds=1500):
    """Tokens per second where a mismatch with a window behind it is kept with chance `forgiven`."""
    dice, policy = random.Random(1), Adaptive(costs, window_size=window)
    tokens = seconds = 0.0
    for _ in range(rounds):
        if policy.choose(15, 0, 0)[0] is Way.NONE:
            policy.learn_none()
            tokens, seconds = tokens + 1, seconds + costs.verify_seconds(0)
            continue
        confidences = [dice.choice((0.4, 0.75, 0.92, 0.995))]
        while len(confidences) < 15 and policy.goes_on(confidences, 15):
            confidences.append(dice.choice((0.4, 0.75, 0.92, 0.995)))
        origins, rejection, n = [], None, len(confidences)
        for j, confidence in enumerate(confidences):
            fits = window is not None and j + window <= n - 1
            if dice.random() <= confidence:
                origins.append(Origin.EXACT)
            elif fits and dice.random() < forgiven:  # with a clean window, for simplicity
                origins.append(Origin.DEFERRED)
            else:
                rejection = Rejection.SECOND_MISMATCH if fits else Rejection.NO_WINDOW
                break
        final = Origin.BONUS if rejection is None else Origin.CORRECTED
        policy.learn_model(confidences, Verdict(tuple(origins), 0, final, rejection), [1] * n)
        tokens += len(origins) + 1
        seconds += n * costs.step_seconds() + costs.verify_seconds(n)
    return tokens / seconds


def test_a_text_that_repeats_itself_is_noticed_while_the_draft_model_works():
    policy = Adaptive(CHEAP_ROWS)
    for _ in range(20):
        policy.learn_match(1, [5, 6, 7], [5, 6, 7])
    assert policy.by_match[0].value > 0.8
    assert policy.behind.value > 0.9
    for _ in range(20):
        policy.learn_match(1, [5, 6, 7], [9])
    assert policy.by_match[0].value < 0.6
    assert policy.behind.value > 0.9  # nothing was seen of those behind a wrong one


def test_one_bad_round_does_not_put_a_good_draft_model_away():
    policy = Adaptive(CHEAP_ROWS)
    policy.learn_model([0.9] * 8, verdict(0, 8), [1] * 8)
    ways = []
    for _ in range(5):
        way, _ = policy.choose(15, 0, 0)
        ways.append(way)
        policy.learn_model([0.9] * 8, verdict(6, 8), [1] * 8) if way is Way.MODEL else policy.learn_none()
    assert ways.count(Way.MODEL) >= 4


def test_a_model_that_does_not_pay_is_tried_ever_more_rarely_and_taken_up_again_when_it_does():
    policy = Adaptive(CHEAP_ROWS)
    tries = []
    for i in range(200):
        way, _ = policy.choose(15, 0, 0)
        if way is Way.MODEL:
            tries.append(i)
            policy.learn_model([0.9] * 5, verdict(0, 5), [1] * 5)
        else:
            policy.learn_none()
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 30
    for _ in range(200):
        way, _ = policy.choose(15, 0, 0)
        if way is Way.MODEL:
            policy.learn_model([0.99] * 10, verdict(10, 10), [1] * 10)
        else:
            policy.learn_none()
    assert policy.choose(15, 0, 0)[0] is Way.MODEL


def test_a_model_with_other_tokens_pays_less_where_it_takes_more_steps_for_one_of_the_targets():
    same, few, many = Adaptive(CHEAP_ROWS), *(Adaptive(CHEAP_ROWS, translated=True) for _ in range(2))
    assert same.token_seconds == few.token_seconds == CHEAP_ROWS.step_seconds()
    for _ in range(20):
        for policy, num_steps in ((same, 12), (few, 5), (many, 12)):
            policy.learn_model([0.9] * 4, verdict(4, 4), [1] * num_steps)
    assert same.token_seconds == CHEAP_ROWS.step_seconds()
    assert many.token_seconds == pytest.approx(3 * CHEAP_ROWS.step_seconds(), rel=0.02)
    assert few.goes_on([0.75], 15)
    assert not many.goes_on([0.75], 15)


def test_steps_of_a_model_that_come_to_nothing_are_counted_and_soon_saved():
    policy, ways = Adaptive(CHEAP_ROWS, translated=True), []
    for _ in range(200):
        way, _ = policy.choose(15, 0, 0)
        ways.append(way)
        if way is Way.MODEL:
            policy.learn_model([], verdict(0, 0), [1, 1])
        else:
            policy.learn_none()
    assert 0 < ways.count(Way.MODEL) < 30
    assert policy.rounds.rate < 1


def test_choices_are_a_function_of_what_was_seen():
    assert play(DEAR_ROWS, lambda _: 0.8, seed=3)[1] == play(DEAR_ROWS, lambda _: 0.8, seed=3)[1]


def test_without_a_draft_model_there_is_nothing_but_copying():
    policy = Adaptive(CostTable({1: 1.0, 16: 1.3}))
    assert policy.choose(15, 0, 0) == (Way.NONE, 0)
    assert policy.choose(15, 8, 5)[0] is Way.COPY
    assert policy.choose(0, 8, 5) == (Way.NONE, 0)


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10), min_size=1, max_size=6), st.integers(1, 80))
def test_more_rows_never_cost_less_between_two_points_of_a_rising_table(points, rows):
    rising = dict(zip(sorted(points), sorted(points.values()), strict=True))
    assert 0 < interpolate(rising, rows) <= interpolate(rising, rows + 1) + 1e-12
    for known in rising:
        assert interpolate(rising, known) == pytest.approx(rising[known])


def test_a_table_comes_back_from_json():
    for table in (guess_costs(4, 1), CostTable({1: 0.5})):
        assert CostTable.from_json(table.as_json()) == table


@given(st.dictionaries(st.integers(1, 64), st.floats(0.001, 10), min_size=1, max_size=8), st.integers(0, 70))
def test_by_a_noisy_table_more_rows_never_cost_less(points, drafted):
    table = CostTable(points)
    assert table.verify_seconds(drafted) <= table.verify_seconds(drafted + 1) + 1e-9
    assert sum(rising(points).values()) == pytest.approx(sum(points.values()))


def test_a_table_that_rises_is_taken_as_it_is():
    assert rising({4: 2.0, 1: 1.0, 2: 1.0}) == {1: 1.0, 2: 1.0, 4: 2.0}
    assert rising({1: 3.0, 2: 1.0, 4: 5.0}) == {1: 2.0, 2: 2.0, 4: 5.0}


def test_a_table_has_a_name_that_changes_with_its_numbers():
    assert guess_costs(4, 1).digest == guess_costs(4, 1).digest
    assert guess_costs(4, 1).digest != guess_costs(4, 2).digest


@pytest.mark.parametrize(("draft_tokens", "room", "expected"), [(15, 100, 15), (15, 8, 7), (15, 1, 0), (0, 9, 0)])
def test_a_draft_leaves_room_for_the_target_own_token(draft_tokens, room, expected):
    assert room_for_draft(draft_tokens, room) == expected
