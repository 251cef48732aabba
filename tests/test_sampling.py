import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.sampling import NUCLEUS_CANDIDATES, Chooser, Noise, keep_top_k, keep_top_p
from fly_cli.settings import DecodeSettings


def chooser(vocab_size=4, seed=0, **settings):
    return Chooser(DecodeSettings(**settings), vocab_size, seed)


def kept(logits):
    return [i for i, value in enumerate(logits[0].tolist()) if value > -math.inf]


def log(*probabilities):
    return torch.tensor([probabilities]).log()


def test_temperature_zero_takes_the_argmax():
    assert chooser().choose(chooser().warp(log(0.2, 0.5, 0.3)), 0).tolist() == [1]


@pytest.mark.parametrize(("k", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_k_likeliest(k, expected):
    warped = chooser(temperature=1.0, top_k=k).warp(log(0.5, 0.3, 0.15, 0.05))
    assert kept(warped) == expected


@pytest.mark.parametrize(
    ("p", "expected"), [(0.01, [0]), (0.5, [0]), (0.6, [0, 1]), (0.79, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, expected):
    assert kept(chooser(temperature=1.0, top_p=p).warp(log(0.5, 0.3, 0.15, 0.05))) == expected


def test_top_p_applies_to_what_temperature_and_top_k_leave():
    # 0.5 and 0.3 renormalise to 0.625 and 0.375.
    assert kept(chooser(temperature=1.0, top_k=2, top_p=0.62).warp(log(0.5, 0.3, 0.15, 0.05))) == [0]
    # Temperature 2 flattens 0.5/0.3/0.15/0.05 to 0.38/0.29/0.21/0.12.
    assert kept(chooser(temperature=2.0, top_p=0.6).warp(log(0.5, 0.3, 0.15, 0.05))) == [0, 1]


@given(st.integers(0, 1000), st.floats(0.05, 0.999), st.booleans())
def test_the_quick_way_to_find_a_nucleus_keeps_what_a_full_sort_keeps(seed, p, flat):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, NUCLEUS_CANDIDATES * 2, generator=generator) * (0.1 if flat else 4)
    values, ids = logits.softmax(-1).sort(-1, descending=True)
    before = values.cumsum(-1) - values
    expected = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, before < p)
    differing = ((keep_top_p(logits, p) > -torch.inf) != expected).sum().item()
    assert differing <= 2  # fp32 sums in another order: at most the one id at the edge of each row


@pytest.mark.parametrize("seed", range(20))
def test_a_nucleus_depends_on_its_own_row_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    row = (torch.randn(1, 4000, generator=generator) * 3).bfloat16().float()  # many ties
    flat = torch.zeros(1, 4000)
    alone = keep_top_p(row, 0.9) > -torch.inf
    beside = keep_top_p(torch.cat([flat, row]), 0.9)[1:] > -torch.inf
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("p", [1e-50, 1e-9])
def test_a_tiny_top_p_keeps_the_likeliest_id(p):
    assert kept(chooser(temperature=1.0, top_p=p).warp(log(0.2, 0.5, 0.3))) == [1]


def test_ties_with_the_kth_value_stay():
    assert kept(keep_top_k(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2)) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-9, 1e-6, 1e-3, 100.0, 1e39, 1e300])
def test_extreme_temperatures_stay_finite_and_cold_ones_are_greedy(temperature):
    logits = torch.tensor([[1.0, 1.001, -torch.inf, 60000.0, 59999.0]])
    taken = chooser(vocab_size=5, temperature=temperature)
    assert not taken.warp(logits).isnan().any()
    if temperature < 1:
        assert taken.choose(taken.warp(logits), 7).tolist() == [3]


def test_a_banned_token_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).repeat(2000, 1)
    drawn = chooser(temperature=1.0, seed=3)
    assert set(drawn.choose(drawn.warp(logits), 0).tolist()) == {0, 2}


def test_sixteen_bit_logits_are_warped_in_fp32():
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    warped = chooser(vocab_size=3, temperature=0.7, top_p=0.9)
    for dtype in (torch.bfloat16, torch.float16):
        assert warped.warp(logits.to(dtype)).dtype == torch.float32
        assert torch.equal(warped.warp(logits.to(dtype)), warped.warp(logits))


def test_noise_depends_on_seed_and_position_alone():
    rows = Noise(seed=7, vocab_size=50).rows(10, 3, torch.device("cpu"))
    again = Noise(seed=7, vocab_size=50)
    again.rows(500, 70, torch.device("cpu"))  # pushes older rows out
    assert torch.equal(again.rows(12, 1, torch.device("cpu"))[0], rows[2])
    assert torch.equal(again.rows(10, 3, torch.device("cpu")), rows)
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(Noise(seed=8, vocab_size=50).rows(10, 1, torch.device("cpu"))[0], rows[0])


def test_a_narrower_vocabulary_sees_the_same_noise_for_the_ids_it_has():
    wide = chooser(vocab_size=6, temperature=1.0, seed=5)
    logits = torch.zeros(1, 4)
    padded = torch.cat([logits, torch.full((1, 2), -torch.inf)], dim=-1)
    for position in range(50):
        narrow = wide.choose(wide.warp(logits), position)
        assert torch.equal(narrow, wide.choose(wide.warp(padded), position))
