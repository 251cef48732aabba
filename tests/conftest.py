"""Fixtures that more than one test file uses."""

import os
import signal

import pytest

# A shell starts background jobs with SIGINT ignored, and processes that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_pair_dirs(tmp_path_factory):
    """(target folder, draft folder): a random 2-layer Llama and a noisy copy, with a byte-level chat tokenizer."""
    from models_for_tests import byte_tokenizer, noisy_copy, tiny_llama

    target = tiny_llama(0, eos_token_id=383)
    folders = []
    for name, model in {"target": target, "draft": noisy_copy(target, 1)}.items():
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        folders.append(folder)
    return tuple(folders)


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory, monkeypatch):
    """Keeps tests out of the user's cache, but for those that need the real pair in it."""
    if request.node.get_closest_marker("pair") is None and "FLY_CACHE" not in os.environ:
        monkeypatch.setenv("FLY_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
