"""Releases of the libraries: what was not tested is refused by name, before anything is loaded."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from fly_cli import requirements
from fly_cli.errors import ModelError
from fly_cli.models import load_pair
from fly_cli.settings import ModelSettings


def other_release(monkeypatch, package, release):
    def told(name):
        if name != package:
            return version(name)
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(requirements, "version", told)


def test_what_is_installed_here_is_accepted():
    requirements.refuse_other_releases()


@pytest.mark.parametrize(
    ("package", "release", "told"),
    [
        ("transformers", "5.23.1", "transformers 5.23.1 is installed, and fly works with"),
        ("transformers", "5.25.0", "transformers 5.25.0 is installed, and fly works with"),
        ("accelerate", "0.34.0", "accelerate 0.34.0 is installed, and fly works with"),
        ("tokenizers", None, "tokenizers is not installed, and fly works with"),
    ],
)
def test_another_release_of_a_library_is_refused_before_anything_is_loaded(monkeypatch, package, release, told):
    other_release(monkeypatch, package, release)
    with pytest.raises(ModelError) as caught:
        load_pair(ModelSettings(target="no-such-model"))
    assert caught.value.message.startswith(told)
    assert caught.value.hint.startswith(f"pip install '{package}")


@pytest.mark.parametrize(
    ("package", "release"), [("transformers", "5.24.99"), ("torch", "2.14.0.dev1+cu130"), ("torch", "2.13.0a0+1")]
)
def test_a_later_patch_or_a_build_of_ones_own_is_accepted(monkeypatch, package, release):
    other_release(monkeypatch, package, release)
    requirements.refuse_other_releases()


def test_what_only_an_extra_needs_may_be_missing(monkeypatch):
    other_release(monkeypatch, "onnxruntime", None)
    requirements.refuse_other_releases()
