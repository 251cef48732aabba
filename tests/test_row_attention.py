"""The compiled attention of single rows: right, the same in every block, and of the keys that a row sees alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fly_cli.row_attention import CONSTANTS, LANES, SOURCE, TILE, is_right, load


@pytest.fixture(scope="module")
def kernel(compiled_kernel):
    return compiled_kernel(SOURCE, CONSTANTS, load)


def made(rows, keys, heads=6, key_heads=2, width=16, value_width=None):
    torch.manual_seed(rows)
    shapes = ((heads, rows, width), (key_heads, keys, width), (key_heads, keys, value_width or width))
    return tuple(torch.randn(1, *shape).bfloat16() for shape in shapes)


def right(query, key, value, spans, scale):
    """[1, rows, heads, width] in fp64."""
    rows = []
    for row, (first, behind) in enumerate(spans.tolist()):
        seen = (x[:, :, first:behind].double() for x in (key, value))
        one = query[:, :, row : row + 1].double()
        rows.append(scaled_dot_product_attention(one, *seen, scale=scale, enable_gqa=True))
    return torch.cat(rows, dim=2).transpose(1, 2)


def causal(rows, keys, window=None):
    behind = torch.arange(keys - rows + 1, keys + 1)
    first = (behind - window).clamp(min=0) if window else torch.zeros_like(behind)
    return torch.stack((first, behind), dim=1)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (64, 64), (80, 128), (192, 128)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_it_is_what_fp64_gives_rounded(kernel, heads, key_heads, width, value_width, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows, keys in ((1, 1), (1, TILE), (2, TILE + 1), (3, 50), (5, 5), (33, 300)):
        given = (*made(rows, keys, heads, key_heads, width, value_width), causal(rows, keys, window=40), 0.2)
        expected = right(*given)
        assert ((kernel(*given) - expected).abs() <= expected.abs() / 256 + 1e-5).all()


@pytest.mark.parametrize("window", [None, 3, 20])
def test_a_row_has_the_same_value_alone_and_in_a_block(kernel, window):
    query, key, value = made(32, 200, width=128)
    spans = causal(32, 200, window)
    block = kernel(query, key, value, spans, 0.1)
    for row, (first, behind) in enumerate(spans.tolist()):
        alone = torch.tensor([[0, behind - first]])
        seen = (x[:, :, first:behind] for x in (key, value))
        assert torch.equal(kernel(query[:, :, row : row + 1], *seen, alone, 0.1), block[:, row : row + 1])


def test_what_a_row_does_not_see_does_not_matter(kernel):
    query, key, value = made(2, 30)
    spans = torch.tensor([[3, 12], [9, 10]])
    before = kernel(query, key, value, spans, 1.0)
    for x in (key, value):
        x[:, :, :3] = x[:, :, 12:] = float("nan")
    assert torch.equal(kernel(query, key, value, spans, 1.0), before)


def test_keys_may_lie_apart_as_in_a_cache_with_room(kernel):
    query, key, value = made(3, 20)
    roomy = [torch.full((1, 2, 64, 16), float("nan")).bfloat16() for _ in range(2)]
    for room, x in zip(roomy, (key, value), strict=True):
        room[:, :, :20] = x
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.stack((key, key), dim=-1)[..., 0]  # the last axis has gaps
    spans, before = causal(3, 20), kernel(query, key, value, causal(3, 20), 1.0)
    assert torch.equal(kernel(turned, *(room[:, :, :20] for room in roomy), spans, 1.0), before)
    assert torch.equal(kernel(query, wide, value, spans, 1.0), before)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_scores_of_any_size_are_softened_as_fp64_does(kernel, size):
    query, key, value = made(4, 60)
    query *= size
    given = (query, key, value, causal(4, 60), 0.5)
    torch.testing.assert_close(kernel(*given).double(), right(*given), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("low", [-200.0, -1e30])
def test_scores_far_below_zero_are_as_good_as_others(kernel, low):
    query, key, value = (
        torch.full((1, 1, 1, 8), low).bfloat16(),
        torch.ones(1, 1, 3, 8).bfloat16(),
        made(1, 3, 1, 1, 8)[2],
    )
    mean = value.double().mean(2, keepdim=True)
    torch.testing.assert_close(kernel(query, key, value, torch.tensor([[0, 3]]), 1.0).double(), mean, atol=5e-3, rtol=0)


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_values_that_are_not_numbers_stay_so_where_they_are_seen(kernel, place):
    given = dict(zip(("query", "key", "value"), made(2, 20), strict=True))
    given[place][0, 0, 1 if place == "query" else 19, 3] = float("nan")
    output = kernel(*given.values(), causal(2, 20), 1.0)
    assert output[0, 1].isnan().any() and not output[0, 0].isnan().any()


def test_the_default_dtype_of_other_threads_does_not_matter(kernel):
    torch.set_default_dtype(torch.bfloat16)  # as while a model is loaded
    try:
        assert is_right(kernel)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_kernel_is_found_out(kernel, factor):
    assert is_right(kernel)
    assert not is_right(lambda *given: kernel(*given) * factor)


def test_widths_are_whole_vectors():
    assert (LANES, TILE) == (8, 8)  # as in the source
