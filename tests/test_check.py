"""`fly check`, and that loading refuses what it refuses, before any weight is read or fetched."""

import json
import re
import shutil
from collections import Counter

import pytest
import torch
from cli_helpers import Fly
from models_for_tests import byte_tokenizer, tiny_config, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, MambaConfig, PreTrainedTokenizerFast
from weights_helpers import stub_hub, write_gguf

from fly_cli import hub, loading, placement
from fly_cli.catalog import load_catalog
from fly_cli.check import check_pair
from fly_cli.cli.check import show_styled
from fly_cli.costs import costs_file
from fly_cli.errors import ModelError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError
from fly_cli.models import load_pair
from fly_cli.pairing import DRAFTS, examine
from fly_cli.progress import Silent
from fly_cli.settings import LOOKUP, ModelSettings
from fly_cli.theme import ColorPolicy
from fly_cli.weights import Located


@pytest.fixture(autouse=True)
def away_from_the_world(tmp_path, monkeypatch):
    """No hub and no cache of this machine."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "endpoint", lambda: "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "cache_location", lambda: tmp_path / "hub-cache")


@pytest.fixture
def fly(monkeypatch, capsys, tmp_path):
    fly = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    yield fly
    fly.close()


@pytest.fixture
def folder(tiny_pair_dirs, tmp_path):
    """A copy of the draft's folder to change."""
    return shutil.copytree(tiny_pair_dirs[1], tmp_path / "draft")


def settings(target, draft=LOOKUP, **changed):
    return ModelSettings(**({"target": str(target), "draft": str(draft), "device_map": "cpu"} | changed))


def check(target, draft=LOOKUP, **changed):
    return check_pair(settings(target, draft, **changed), load_catalog(), Silent())


def load(target, draft=LOOKUP, **changed):
    return load_pair(settings(target, draft, **changed))


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def other_ids(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    return folder


def other_words(folder):
    """A tokenizer of whole words: nothing can be translated to it."""
    tokenizer = Tokenizer(WordLevel({f"word{i}": i for i in range(384)}, unk_token="word0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="word0").save_pretrained(folder)
    return folder


def both_ways(folder):
    """A model that reads its text in both directions."""
    size = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertConfig(**size, architectures=["BertLMHeadModel"]).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


def recurrent(folder):
    """A model whose state cannot be rewound, as far as configuration and tokenizer go."""
    config = MambaConfig(vocab_size=384, hidden_size=32, num_hidden_layers=2, architectures=["MambaForCausalLM"])
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


# Facts


def test_a_pair_that_can_run_is_told_so_with_its_facts(tiny_pair_dirs):
    found = check(*tiny_pair_dirs)
    assert found.runs and found.fits and found.problems == ()
    assert found.verdict == f"can run: `{tiny_pair_dirs[1]}` drafts with the ids of the target"
    assert found.target.cache_layers == found.draft.cache_layers == {"full attention": 2}
    assert found.target.num_parameters == sum(p.numel() for p in tiny_llama(0).parameters())
    assert found.target.weight_bytes == 2 * found.target.num_parameters
    assert (found.target.dtype, found.target.quantize, found.draft.quantize) == ("bfloat16", "none", "int8")
    assert found.target.devices == {"cpu": found.target.weight_bytes}
    assert found.target.max_length == 2048
    assert found.vocabularies.kind == "same"
    assert found.notes == []


def test_what_is_told_is_what_loading_does(tiny_pair_dirs):
    found, pair = check(*tiny_pair_dirs), load(*tiny_pair_dirs)
    for facts, place in zip((found.target, found.draft), pair.describe()["placement"], strict=True):
        assert facts.quantize == place["quantize"]
        assert facts.weight_bytes == place["weight_bytes"]
        assert facts.dtype == place["dtype"]


def test_with_lookup_only_the_target_is_looked_at(tiny_pair_dirs):
    found = check(tiny_pair_dirs[0])
    assert found.draft is None and found.vocabularies is None and found.cost_ratio is None
    assert found.verdict == "can run: drafts are copied from the text"


def test_the_cost_is_the_stored_one_where_there_is_one(tiny_pair_dirs):
    found = check(*tiny_pair_dirs)
    assert not found.cost_measured
    assert found.cost_ratio == pytest.approx(found.draft.weight_bytes / found.target.weight_bytes)
    pair = load(*tiny_pair_dirs)
    file = costs_file(pair.placements, None)
    file.parent.mkdir(parents=True)
    file.write_text('{"target": {"1": 4.0, "16": 6.0}, "draft": {"1": 1.0, "8": 2.0}}')
    found = check(*tiny_pair_dirs)
    assert found.cost_measured
    assert found.cost_ratio == 0.25


def test_a_draft_with_a_shorter_context_steps_aside_and_that_is_told(tiny_pair_dirs, folder):
    change_json(folder / "config.json", max_position_embeddings=64)
    (note,) = check(tiny_pair_dirs[0], folder).notes
    assert note == "behind 64 tokens the draft model steps aside, and drafts are copied from the text"
    assert check(folder, tiny_pair_dirs[0]).notes == []


def test_padded_tables_are_told_with_the_ids_that_one_lacks(tiny_pair_dirs, folder):
    change_json(folder / "config.json", vocab_size=448)
    found = check(tiny_pair_dirs[0], folder)
    assert found.runs and found.vocabularies.kind == "padded"
    assert found.verdict.endswith("drafts with the ids that both have")


def test_ends_that_differ_are_told(tiny_pair_dirs, folder):
    change_json(folder / "generation_config.json", eos_token_id=[5, 383])
    found = check(tiny_pair_dirs[0], folder)
    assert list(found.special_tokens) == ["end"]
    assert found.runs


# Refusals: by `check` as by loading


def refusals(tiny_pair_dirs, folder, tmp_path):
    target = tiny_pair_dirs[0]
    return {
        "other words": ((target, other_words(folder)), {}, UnsupportedModelError, "cannot be translated"),
        "both ways": ((both_ways(tmp_path / "bert"), LOOKUP), {}, UnsupportedModelError, "bert.*both directions"),
        "draft": ((target, recurrent(tmp_path / "mamba")), {}, UnsupportedModelError, "mamba.*cannot be rewound"),
        "target": ((tmp_path / "mamba", target), {}, UnsupportedModelError, "mamba.*cannot be rewound"),
        "lookup": ((tmp_path / "mamba", LOOKUP), {}, UnsupportedModelError, "mamba.*cannot be rewound"),
        "memory": ((target, target), {"max_memory": {"cpu": "1MB"}}, OutOfMemoryError, "needs .* MB on cpu"),
    }


@pytest.mark.parametrize("case", ["other words", "both ways", "draft", "target", "lookup", "memory"])
def test_check_and_loading_refuse_the_same_for_the_same_reason(tiny_pair_dirs, folder, tmp_path, monkeypatch, case):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("read weights"))
    pair, changed, error, reason = refusals(tiny_pair_dirs, folder, tmp_path)[case]
    with pytest.raises(error, match=reason) as caught:
        load(*pair, **changed)
    found = check(*pair, **changed)
    assert not found.runs
    assert found.verdict == f"cannot run: {caught.value.message}"
    assert found.problems[0].hint == caught.value.hint
    assert found.fits is (case != "memory")


def test_every_problem_is_told_and_sizes_are_known_where_nothing_fits(folder, tmp_path):
    found = check(recurrent(tmp_path / "mamba"), other_words(folder), max_memory={"cpu": "1MB"}, draft_quantize="none")
    assert len(found.problems) == 3
    assert found.target.weight_bytes == 2 * found.target.num_parameters
    assert found.draft.weight_bytes == 2 * found.draft.num_parameters


def test_a_draft_with_other_ids_is_told_to_draft_by_way_of_the_text(tiny_pair_dirs, folder):
    found = check(tiny_pair_dirs[0], other_ids(folder))
    assert found.vocabularies.kind == "different"
    assert found.verdict == f"can run: `{folder}` {DRAFTS['different']}"


def test_a_folder_without_its_weights_cannot_run(tiny_pair_dirs, folder):
    (folder / "model.safetensors").unlink()
    found = check(tiny_pair_dirs[0], folder)
    assert not found.runs and not found.draft.on_disk
    assert found.draft.cache_layers == {"full attention": 2}
    with pytest.raises(ModelNotFoundError) as caught:
        load(tiny_pair_dirs[0], folder)
    assert found.verdict == f"cannot run: {caught.value.message}"


def test_a_gguf_file_that_is_not_converted_yet_is_not_guessed_at(tmp_path):
    file = write_gguf(tmp_path / "some.gguf")
    with pytest.raises(ModelError, match="not known before that is fetched and converted") as caught:
        check(file)
    assert caught.value.hint == f"run `fly pull {file}` first"
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        check(tmp_path / "page.gguf")


# Models of the hub


@pytest.fixture
def repository(tiny_pair_dirs):
    """The files of the target as a repository of the hub, whose weights are never to be read."""
    files = {path.name: path.read_bytes() for path in tiny_pair_dirs[0].iterdir()}
    return files | {"model.safetensors": b"not weights at all"}


def test_of_a_hub_model_only_small_files_are_fetched_and_once(repository, monkeypatch):
    with stub_hub(repository) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        found = check("owner/tiny")
        assert found.runs and not found.target.on_disk
        assert found.notes == ["the weights of `owner/tiny` are not on this machine yet"]
        assert any("tokenizer.json" in request for request in requests)
        assert not any("safetensors" in request for request in requests)
        count = len(requests)
        assert check("owner/tiny").target == found.target
        assert len(requests) == count
    assert check("owner/tiny", offline=True).target == found.target
    with pytest.raises(ModelNotFoundError, match="the configuration of `owner/other` is not in the cache"):
        check("owner/other", offline=True)


def test_a_pair_that_cannot_run_is_refused_before_its_weights_are_fetched(repository, folder, monkeypatch):
    with stub_hub(repository) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        with pytest.raises(UnsupportedModelError, match="cannot be translated"):
            load("owner/tiny", other_words(folder))
        assert not any("safetensors" in request for request in requests)
        with pytest.raises(ModelError, match="cannot be loaded"):  # what comes is no weights
            load("owner/tiny")
        assert any("safetensors" in request for request in requests)


# The command


def test_the_command_tells_a_pair_that_can_run_and_returns_0(fly, tiny_pair_dirs):
    outcome = fly("check", *map(str, tiny_pair_dirs), "--device-map", "cpu")
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    labels = [row[0] for row in rows]
    assert labels[:2] == ["target", "draft"] and labels[-1] == "verdict"
    told = dict(rows)
    assert "caches" in told and told["caches"] == "target 2 x full attention; draft 2 x full attention"
    assert told["context"] == "target 2048 tokens; draft 2048 tokens"
    assert told["verdict"].startswith("can run: ")
    assert "guessed from their bytes" in told["cost"]
    assert "\x1b" not in outcome.out


def test_colours_in_a_pipe_leave_every_row_on_its_line(fly, tiny_pair_dirs):
    plain, coloured = (
        fly("check", *map(str, tiny_pair_dirs), "--device-map", "cpu", "--max-memory", "cpu=1KB", "--color", color)
        for color in ("never", "always")
    )
    assert max(map(len, plain.out.splitlines())) > 80
    assert "\x1b" in coloured.out
    assert len(coloured.out.splitlines()) == len(plain.out.splitlines())


def test_a_pair_that_cannot_run_returns_1_with_a_hint_on_stdout(fly, tiny_pair_dirs, folder):
    outcome = fly("check", str(tiny_pair_dirs[0]), str(other_words(folder)), "--device-map", "cpu")
    assert (outcome.code, outcome.err) == (1, "")
    assert "verdict     cannot run: " in outcome.out
    assert outcome.out.splitlines()[-1].startswith("hint        choose a draft model with the target's own tokenizer")
    assert "id 0: target '!'; draft 'word0'" in outcome.out


def test_json_is_one_object_with_all_of_it(fly, tiny_pair_dirs, folder):
    outcome = fly("check", str(tiny_pair_dirs[0]), str(other_words(folder)), "--json", "--dtype", "float32")
    found = json.loads(outcome.out)
    assert outcome.code == 1
    assert found["runs"] is False
    assert found["vocabularies"]["kind"] == "different"
    assert found["vocabularies"]["num_differing"] == 384
    assert found["target"]["dtype"] == "float32"
    assert found["target"]["cache_layers"] == {"full attention": 2}
    assert found["memory"]["fits"] is True
    assert found["problems"][0]["hint"]
    assert found["settings"]["dtype"] == "float32"


def test_on_a_terminal_the_verdict_is_coloured_and_nothing_is_lost(fly, tiny_pair_dirs):
    outcome = fly("check", str(tiny_pair_dirs[0]), "lookup", "--color", "always", "--device-map", "cpu")
    assert "\x1b[32mcan run: drafts are copied from the text" in outcome.out


@pytest.mark.parametrize("columns", [1, 2, 12, 30, 80, 500])
def test_a_terminal_of_any_width_gets_all_of_the_report(columns, monkeypatch, capsys):
    rows = [
        ("target", f"/{'x' * 90}/한 (llama)"),
        ("", "more of it"),
        ("vocabulary", "same"),
        ("verdict", "can run: `a`"),
    ]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_styled(rows, ColorPolicy(color=False, cues=True, live=False))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert Counter("".join(shown.split())) == Counter("".join("".join(map("".join, rows)).split()))


def test_without_names_the_configured_pair_is_checked(fly, tiny_pair_dirs, tmp_path):
    target, draft = tiny_pair_dirs
    (tmp_path / "config.yaml").write_text(f"target: {target}\npairs: {{{target}: {draft}}}\ndevice_map: cpu\n")
    found = json.loads(fly("check", "--json").out)
    assert (found["settings"]["target"], found["settings"]["draft"]) == (str(target), str(draft))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["check", "./nowhere"], "no such folder"),
        (["check", "qwen-codr"], "no alias, folder or hub id"),
        (["check", "--dtype", "int3"], "`--dtype` is 'int3'"),
        (["check", "--quantize", "int3"], "`--quantize` is 'int3'"),
        (["check", "--max-memory", "cpu"], "`max_memory` is 'cpu'"),
        (["check", "a", "b", "c"], "unexpected extra argument"),
    ],
)
def test_bad_input_returns_2(fly, arguments, says):
    outcome = fly(*arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert says in outcome.err


def test_a_device_that_is_not_there_is_bad_input(fly, tiny_pair_dirs):
    outcome = fly("check", str(tiny_pair_dirs[0]), "lookup", "--device-map", "cuda:77")
    assert outcome.code == 2 and "no device" in outcome.err


def test_a_config_that_makes_no_model_is_bad_input(fly, folder):
    change_json(folder / "config.json", hidden_act="nope")
    outcome = fly("check", str(folder), "lookup")
    assert outcome.code == 2 and "config.json" in outcome.err


def test_weights_are_never_opened(fly, tiny_pair_dirs, folder, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"no weights")
    outcome = fly("check", str(tiny_pair_dirs[0]), str(folder), "--device-map", "cpu")
    assert outcome.code == 0


# The rules


def test_a_large_model_is_examined_by_its_configuration_alone(tmp_path, monkeypatch):
    """70 billion parameters, on a machine with two GPUs: nothing of that size is made."""
    config = tiny_config(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(placement, "get_max_memory", lambda: {0: 80 * 10**9, 1: 80 * 10**9, "cpu": 10**9})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    place = Located("big", tmp_path, "big")
    outlook = examine([place], ModelSettings(target="big", draft=LOOKUP))
    outlook.refuse()
    assert outlook.places[0].weight_bytes > 10**11
    assert set(placement.bytes_by_device(outlook.skeletons[0], outlook.places[0])) == {"cuda:0", "cuda:1"}
