"""The compiled kernel for a few rows of bf16 weights: right, the same for every number of rows, and optional."""

import shutil

import pytest
import torch

from fly_cli import bf16_rows as module
from fly_cli.bf16_rows import bf16_rows, compiled, is_right, load


@pytest.fixture
def kernel(tmp_path):
    if shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in module.INSTRUCTIONS:
        pytest.skip("needs a C compiler and AVX2")
    return load(compiled(module.INSTRUCTIONS["AVX2"], tmp_path))


@pytest.mark.parametrize("width", [16, 80, 1536])
@pytest.mark.parametrize("height", [1, 2, 11, 12, 46])
def test_products_are_those_of_fp32(kernel, width, height):
    torch.manual_seed(width)
    weight = torch.randn(height, width).bfloat16()
    for rows in (1, 2, 5, 6, 7, 12, 13, 32):
        input = torch.randn(rows, width)
        right = input.double() @ weight.double().T
        assert (kernel(input, weight) - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_row_has_the_same_value_alone_and_in_a_block(kernel):
    torch.manual_seed(0)
    weight, input = torch.randn(46, 1536).bfloat16(), torch.randn(17, 1536)
    block = kernel(input, weight)
    for rows in range(1, 18):
        assert torch.equal(kernel(input[:rows], weight), block[:rows])


def test_values_that_are_not_numbers_stay_so(kernel):
    weight, input = torch.ones(2, 16).bfloat16(), torch.ones(3, 16)
    input[1, 3], input[2, 3] = float("nan"), float("inf")
    assert kernel(input, weight)[:, 0].tolist() == pytest.approx([16, float("nan"), float("inf")], nan_ok=True)


def test_the_default_dtype_of_other_threads_does_not_matter(kernel):
    weight, input = torch.randn(46, 1536).bfloat16(), torch.randn(13, 1536)
    right = kernel(input, weight)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as while a model is loaded
    try:
        assert is_right(kernel)
        assert torch.equal(kernel(input, weight), right)
    finally:
        torch.set_default_dtype(before)


def test_a_wrong_kernel_is_found_out(kernel):
    assert is_right(kernel)
    assert not is_right(lambda input, weight: kernel(input, weight) * 1.01)
    assert not is_right(lambda input, weight: kernel(input, weight) * float("nan"))


@pytest.mark.parametrize("trouble", ["no compiler", "broken compiler", "no room", "library of another machine"])
def test_without_a_kernel_there_is_none_and_no_error(tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    if trouble == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif trouble == "broken compiler":
        monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    elif trouble == "no room":
        (tmp_path / "cache").write_text("a file")
    else:
        (tmp_path / "garbage.so").write_bytes(b"garbage")
        monkeypatch.setattr(module, "compiled", lambda instructions: tmp_path / "garbage.so")
    bf16_rows.cache_clear()
    assert bf16_rows() is None
    bf16_rows.cache_clear()
    assert not list(tmp_path.glob("cache/kernels/*"))
