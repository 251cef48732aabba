"""Fixtures that more than one test file uses."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from fly_cli.storage import default_cache_dir

USERS_CACHE = default_cache_dir()
OF_THE_PAIR = ("compiled", "downloads", "gguf", "int4", "int8", "kernels", "locks", "models", "panels")

# A shell starts background jobs with SIGINT ignored, and processes that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session):
    session.config.own_caches = tempfile.TemporaryDirectory(prefix="fly-tests-")


def pytest_unconfigure(config):
    if hasattr(config, "own_caches"):
        config.own_caches.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Keeps tests, and fixtures of any scope, out of the user's cache; tests of the real pair find its models there.

    What forwards took beside other tests is not what they take a user: such costs stay out of the user's too.
    """
    with_pair = item.get_closest_marker("pair") is not None
    cache = Path(item.config.own_caches.name) / ("pair" if with_pair else "fast")
    os.environ["FLY_CACHE"] = str(cache)
    if with_pair and not cache.exists():
        cache.mkdir()
        for name in OF_THE_PAIR:
            (USERS_CACHE / name).mkdir(parents=True, exist_ok=True)
            (cache / name).symlink_to(USERS_CACHE / name, target_is_directory=True)


@pytest.fixture(scope="session")
def tiny_pair_dirs(tmp_path_factory):
    """(target folder, draft folder): a random 2-layer Llama and a noisy copy, with a byte-level chat tokenizer."""
    from models_for_tests import saved_pair, tiny_llama

    return saved_pair(tiny_llama(0, eos_token_id=383), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def compiled_kernel(tmp_path_factory):
    """Compiles a C source with constants and loads it."""
    from fly_cli.c_kernels import AVX2, compiled, cpu_has

    folder = tmp_path_factory.mktemp("kernels")

    def make(source, constants, load, instructions=AVX2):
        if shutil.which("cc") is None or not cpu_has(instructions):
            pytest.skip(f"needs a C compiler and {' '.join(instructions)}")
        return load(compiled(source, constants, instructions, folder))

    return make


@pytest.fixture
def panels_folder(tmp_path, monkeypatch):
    """Where panels of models of any size are kept."""
    from fly_cli import panels

    if panels.bf16_gemm() is None:
        pytest.skip("needs a C compiler and AVX2, and no AMX")
    monkeypatch.setattr(panels, "KEPT_FROM", 1)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "panels"
