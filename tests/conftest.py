"""Fixtures that more than one test file uses."""

import os
import shutil
import signal

import pytest

# A shell starts background jobs with SIGINT ignored, and processes that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_pair_dirs(tmp_path_factory):
    """(target folder, draft folder): a random 2-layer Llama and a noisy copy, with a byte-level chat tokenizer."""
    from models_for_tests import saved_pair, tiny_llama

    return saved_pair(tiny_llama(0, eos_token_id=383), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def compiled_kernel(tmp_path_factory):
    """Compiles a C source with constants and loads it."""
    import torch

    from fly_cli.c_kernels import INSTRUCTIONS, compiled

    if shutil.which("cc") is None or torch.backends.cpu.get_cpu_capability() not in INSTRUCTIONS:
        pytest.skip("needs a C compiler and AVX2")
    folder = tmp_path_factory.mktemp("kernels")
    return lambda source, constants, load: load(compiled(source, constants, INSTRUCTIONS["AVX2"], folder))


@pytest.fixture
def panels_folder(tmp_path, monkeypatch):
    """Where panels of models of any size are kept, on a CPU without 16-bit products."""
    from fly_cli import cpu_linear, panels

    if panels.bf16_gemm() is None:
        pytest.skip("needs a C compiler and AVX2")
    monkeypatch.setattr(cpu_linear, "cpu_multiplies_16_bit", lambda: False)
    monkeypatch.setattr(panels, "KEPT_FROM", 1)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "panels"


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Keeps tests out of the user's cache, but for those that need the real pair in it."""
    if request.node.get_closest_marker("pair") is None and "FLY_CACHE" not in os.environ:
        monkeypatch.setenv("FLY_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
