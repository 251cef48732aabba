"""The compiled kernel for bf16 weights: right, and the same for every number of rows."""

import pytest
import torch

from fly_cli import bf16_gemm, c_kernels
from fly_cli.bf16_gemm import AT_ONCE, FORMS, SOURCE, is_right, load
from fly_cli.c_kernels import AVX2, AVX512_BF16


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.instructions[-1])
def gemm(compiled_kernel, request):
    form = request.param
    return compiled_kernel(SOURCE, form.constants, lambda library: load(library, form), form.instructions)


def product(gemm, input, weight, bias=None):
    return gemm.multiply(input, gemm.pack(weight), bias, len(weight))


@pytest.mark.parametrize("width", [4, 80, 132, 1536])
@pytest.mark.parametrize("height", [1, 7, 8, 23, 24, 46, 47, 48, 5 * 48, 9 * 48 + 1])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_are_those_of_fp32_rounded(gemm, width, height, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(width)
    weight, bias = torch.randn(height, width).bfloat16(), torch.randn(height)
    for rows in (*range(1, 10), 32, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 6):
        input = torch.randn(rows, width).bfloat16()
        right = input.double() @ weight.double().T + bias
        assert ((product(gemm, input, weight, bias) - right).abs() <= right.abs() / 256 + 1e-4).all()


def test_sums_of_many_inputs_are_rounded_once(gemm):
    weight, input = torch.full((48, 4096), 2.0**-8).bfloat16(), torch.ones(3, 4096).bfloat16()
    assert (product(gemm, input, weight) == 16).all()  # in bf16 the sum would stop at 1 or 2


def test_results_are_rounded_as_pytorch_rounds(gemm):
    exact = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, 0.0, 1e-40])
    weight = torch.zeros(len(exact), 4).bfloat16()
    assert torch.equal(product(gemm, torch.ones(1, 4).bfloat16(), weight, exact)[0], exact.bfloat16())


def test_a_row_has_the_same_value_alone_and_in_a_block(gemm):
    torch.manual_seed(0)
    weight, input = torch.randn(9 * 48 + 5, 1536).bfloat16(), torch.randn(AT_ONCE + 9, 1536).bfloat16()
    block = product(gemm, input, weight)
    for rows in (*range(1, 18), AT_ONCE, AT_ONCE + 1):
        assert torch.equal(product(gemm, input[:rows], weight), block[:rows])


def test_nothing_behind_the_inputs_is_read_into_a_sum(gemm):
    weight, input = torch.randn(46, 12).bfloat16(), torch.randn(6, 12).bfloat16()
    right = product(gemm, input[:5].clone(), weight)
    input[5] = float("nan")
    assert torch.equal(product(gemm, input[:5], weight), right)


def test_values_that_are_not_numbers_stay_so(gemm):
    weight, input = torch.ones(2, 16).bfloat16(), torch.ones(3, 16).bfloat16()
    input[1, 3], input[2, 3] = float("nan"), float("inf")
    assert product(gemm, input, weight)[:, 0].tolist() == pytest.approx([16, float("nan"), float("inf")], nan_ok=True)


def test_no_rows_make_no_rows(gemm):
    assert product(gemm, torch.zeros(0, 16).bfloat16(), torch.ones(2, 16).bfloat16()).shape == (0, 2)


def test_the_default_dtype_of_other_threads_does_not_matter(gemm):
    weight, input = torch.randn(46, 1536).bfloat16(), torch.randn(13, 1536).bfloat16()
    right = product(gemm, input, weight)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as while a model is loaded
    try:
        assert is_right(gemm)
        assert torch.equal(product(gemm, input, weight), right)
    finally:
        torch.set_default_dtype(before)


class Wrong:
    """A kernel whose results are off by a factor."""

    def __init__(self, gemm, factor):
        self.pack, self.form, self.gemm, self.factor = gemm.pack, gemm.form, gemm, factor

    def multiply(self, *given):
        return self.gemm.multiply(*given) * self.factor


def test_a_wrong_kernel_is_found_out(gemm):
    assert is_right(gemm)
    assert not is_right(Wrong(gemm, 1.02))
    assert not is_right(Wrong(gemm, float("nan")))


@pytest.mark.parametrize(
    ("capability", "bf16", "amx", "instructions"),
    [
        ("AVX2", False, False, AVX2),
        ("AVX512", False, False, AVX2),
        ("AVX512", True, False, AVX512_BF16),
        ("AVX2", True, False, AVX2),  # as `ATEN_CPU_CAPABILITY` asks for
        ("AVX512", True, True, None),
        ("NO AVX", False, False, None),
    ],
)
def test_a_cpu_gets_the_kernel_for_its_instructions(monkeypatch, capability, bf16, amx, instructions):
    monkeypatch.setattr(c_kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(bf16_gemm, "working_kernel", lambda *given: given[-1])
    assert bf16_gemm.bf16_gemm.__wrapped__() == instructions
