"""Bootstrap intervals hold the truth as often as they say, and nothing is made up where there is no answer."""

import math
import random
import time

import pytest
from scipy import stats

from fly_cli.intervals import Estimate, _student, estimate


def speedup(tokens, seconds, base_tokens, base_seconds):
    return (tokens / seconds) / (base_tokens / base_seconds)


def ratio(part, whole):
    return part / whole


def measured_prompts(generator: random.Random, count: int):
    """One row a prompt: tokens and seconds of an arm, then of the target; the arm is faster on some prompts only."""
    rows = []
    for _ in range(count):
        tokens = generator.uniform(16, 128)
        seconds = tokens * 0.3 * generator.lognormvariate(0, 0.1)
        rows.append((tokens, seconds / generator.lognormvariate(0.6, 0.4), tokens, seconds))
    return rows


def test_the_value_is_the_statistic_of_the_sums_not_a_mean_of_ratios():
    rows = [(10, 1, 10, 2), (90, 3, 90, 18)]  # 100 tokens in 4 s against 100 tokens in 20 s
    assert estimate(rows, speedup).value == 5


@pytest.mark.parametrize("count", [24, 40])
def test_nine_intervals_in_ten_hold_the_true_speedup(count):
    generator = random.Random(7)
    truth = math.exp(0.6 - 0.4**2 / 2)  # 1 / mean of 1 / lognormal(0.6, 0.4)
    held = 0
    for _ in range(200):
        found = estimate(measured_prompts(generator, count), speedup, resamples=500)
        held += found.low <= truth <= found.high
    assert held >= 180


def test_nine_intervals_in_ten_hold_the_true_recovery():
    generator = random.Random(3)
    held = 0
    for _ in range(200):  # the target solves 60% of prompts; the arm loses a tenth of those, and wins 5% of the rest
        rows = []
        for _ in range(60):
            target = generator.random() < 0.6
            rows.append((generator.random() < (0.9 if target else 0.05), target))
        found = estimate(rows, ratio, resamples=500)
        held += found.low <= (0.6 * 0.9 + 0.4 * 0.05) / 0.6 <= found.high
    assert held >= 180


def test_the_same_seed_gives_the_same_interval_and_another_seed_nearly_the_same():
    rows = measured_prompts(random.Random(1), 30)
    assert estimate(rows, speedup, seed=5) == estimate(rows, speedup, seed=5)
    first, second = estimate(rows, speedup, seed=5), estimate(rows, speedup, seed=6)
    assert first.low != second.low
    assert first.low == pytest.approx(second.low, rel=0.05)


def test_what_both_arms_share_cancels():
    """Twice as fast on every prompt, however different the prompts are."""
    rows = [(tokens, tokens * pace, tokens, 2 * tokens * pace) for tokens, pace in [(5, 1), (50, 9), (7, 3), (80, 0.1)]]
    found = estimate(rows, speedup)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_interval_of_few_prompts_is_wider_than_the_plain_percentiles():
    rows = [(float(value), 1.0) for value in (1, 2, 3, 4, 5)]
    found = estimate(rows, ratio, resamples=20_000)
    assert found.value == 3
    assert found.low < 1.8 and found.high > 4.2  # plain 2.5% and 97.5% points: 1.8 and 4.2


@pytest.mark.parametrize("rows", [[], [(0.0, 0.0)] * 9, [(1.0, 0.0)] * 9])
def test_a_figure_without_a_meaning_is_none(rows):
    assert estimate(rows, ratio) == Estimate(None, None, None)


def test_three_prompts_have_a_value_and_no_interval():
    assert estimate([(1.0, 2.0)] * 3, ratio) == Estimate(0.5, None, None)


def test_there_is_no_interval_where_many_resamples_have_nothing_to_divide_by():
    """One prompt of eight solved by the target: a third of the resamples miss it."""
    rows = [(1.0, 1.0)] + [(0.0, 0.0)] * 7
    assert estimate(rows, ratio) == Estimate(1.0, None, None)


def test_a_thousand_prompts_take_less_than_two_seconds():
    rows = measured_prompts(random.Random(2), 1000)
    started = time.process_time()
    estimate(rows, speedup)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("degrees", [3, 7, 23, 99])
def test_the_series_for_students_t_is_good_to_one_percent(degrees):
    assert _student(0.025, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=0.01)
