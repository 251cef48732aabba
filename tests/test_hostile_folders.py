"""Folders that are damaged or mean harm: one error, or a model that works; no code run, nothing read elsewhere."""

import json
import os
import pickle
import shutil
import struct

import pytest
from cli_helpers import Fly
from fuzz_helpers import fuzz, spoilt
from hypothesis import given
from hypothesis import strategies as st

from fly_cli import templates
from fly_cli.api import generate
from fly_cli.catalog import load_catalog
from fly_cli.check import check_pair
from fly_cli.errors import FlyError, ModelError, PromptError, UnsupportedModelError
from fly_cli.machine import identify_model
from fly_cli.models import load_pair
from fly_cli.progress import Silent
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings

SHORT = DecodeSettings(mode="target", max_new_tokens=2)


@pytest.fixture
def folder(tiny_pair_dirs, tmp_path):
    """A copy of the target's folder to spoil."""
    return shutil.copytree(tiny_pair_dirs[0], tmp_path / "model")


@pytest.fixture
def marker(tmp_path):
    """A file that code of the folder makes when it is run."""
    yield tmp_path / "code-was-run"
    assert not (tmp_path / "code-was-run").exists()


def settings(folder):
    return ModelSettings(target=str(folder), draft=LOOKUP, dtype="float32", device_map="cpu")


def answer(folder, text=None):
    return generate(load_pair(settings(folder), text or TextSettings()), "Hi", SHORT).text


def refusal(folder):
    """Why the folder is refused, by `check` or by what follows; None for a model that works."""
    try:
        check_pair(settings(folder), load_catalog(), Silent())
        answer(folder)
    except FlyError as error:
        assert error.message and "\n" not in error.message + error.hint
        return error
    return None


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- code


def code(marker):
    return f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Evil:\n    pass\n"


@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_code_that_a_config_names_is_not_run(folder, marker, kind):
    (folder / "evil.py").write_text(code(marker))
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    change(folder / "config.json", auto_map=names, model_type=kind)
    error = refusal(folder)
    if kind == "llama":  # the library has a class of its own for it
        assert error is None
    else:
        assert isinstance(error, UnsupportedModelError) and "--trust-remote-code" in error.hint


@pytest.mark.parametrize(
    "names", [["evil.Evil", None], [None, "evil.Evil"], "evil.Evil", {"AutoTokenizer": "evil.Evil"}]
)
def test_code_that_a_tokenizer_names_is_not_run(folder, marker, names):
    (folder / "evil.py").write_text(code(marker))
    names = names if isinstance(names, dict) else {"AutoTokenizer": names}
    change(folder / "tokenizer_config.json", auto_map=names, tokenizer_class="EvilTokenizer")
    refusal(folder)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.bin", "model.pt"])
def test_pickles_beside_safetensors_are_not_opened(folder, marker, name):
    (folder / name).write_bytes(pickle.dumps(Touch(marker)))
    assert refusal(folder) is None


def test_a_pickle_that_is_called_safetensors_is_not_opened(folder, marker):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Touch(marker)))
    assert isinstance(refusal(folder), ModelError)


# --- weights


def sharded(folder, **names):
    """The folder with its weights under an index: weight -> file."""
    weights = {"lm_head.weight": "model-1.safetensors"} | names
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "a/../../elsewhere.safetensors", "..\\elsewhere.safetensors"]
)
def test_an_index_that_leaves_its_folder_is_refused(folder, name):
    shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    sharded(folder, other=name)
    error = refusal(folder)
    assert isinstance(error, ModelError) and f"outside its folder: {name}" in error.message


def test_an_index_with_an_absolute_path_is_refused(folder):
    elsewhere = shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    sharded(folder, other=str(elsewhere))
    assert "outside its folder" in refusal(folder).message


def test_a_config_that_names_weights_elsewhere_is_refused(folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    change(folder / "config.json", transformers_weights="../elsewhere.safetensors")
    assert isinstance(refusal(folder), ModelError)


@pytest.mark.parametrize(
    "content",
    ["[]", "5", "{", '{"weight_map": []}', '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": 5}}', "[" * 100_000],
    ids=range(7),
)
def test_an_index_of_another_kind_is_refused(folder, content):
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    assert isinstance(refusal(folder), FlyError)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "missing.safetensors"], ids=range(3))
def test_a_file_that_cannot_be_there_is_missing(folder, name):
    sharded(folder, other=name)
    assert "lacks 1 of its files" in refusal(folder).message


def tensor(**changes):
    header = {"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        *(
            struct.pack("<Q", len(header)) + header + b"\0" * 8
            for header in (
                tensor(shape=[2**40]),
                tensor(shape=[-1]),
                tensor(data_offsets=[0, 2**63]),
                tensor(data_offsets=[8, 0]),
                tensor(dtype="EVIL"),
            )
        ),
    ],
    ids=range(12),
)
def test_safetensors_with_a_false_header_are_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert isinstance(refusal(folder), ModelError)


# --- configurations


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"llama"',
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
    ids=range(10),
)
def test_a_config_that_is_none_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    error = refusal(folder)
    assert isinstance(error, UnsupportedModelError) and "config.json" in error.message


SIZED = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
SIZED += ["head_dim", "vocab_size"]


@pytest.mark.parametrize("value", [10**12, 10**4000])
@pytest.mark.parametrize("name", SIZED)
def test_an_absurd_size_is_refused_and_named(folder, name, value):
    change(folder / "config.json", **{name: value})
    error = refusal(folder)
    assert isinstance(error, UnsupportedModelError) and f"`{name}`" in error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize("value", [0, -1, "x", None, [], {}])
@pytest.mark.parametrize("name", [*SIZED, "max_position_embeddings"])
def test_a_size_that_is_none_is_refused_or_does_no_harm(folder, name, value):
    change(folder / "config.json", **{name: value})
    refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"experts_implementation": "evil/kernel"},
        {"quantization_config": {"quant_method": "evil"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": 5},
        {"architectures": 5},
        {"architectures": ["os.system"]},
        {"layer_types": ["evil", "evil"]},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0, "rope_theta": 1.0}},
        {"rope_parameters": {"rope_type": "evil"}},
        {"rope_parameters": 5},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1e308, "rope_theta": 1.0}},
        {"tie_word_embeddings": "x"},
        {"is_decoder": "x"},
        {"text_config": {"text_config": 5}},
        {"model_type": ["llama"]},
        {"model_type": "../llama"},
    ],
    ids=str,
)
def test_other_fields_are_refused_or_do_no_harm(folder, changes):
    change(folder / "config.json", **changes)
    refusal(folder)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "eos_token_id": [383, 5],
    "dtype": "float32",
}


ROPES = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
    },
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    | {"factor": 2.0, "original_max_position_embeddings": 1024},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 1024},
]


@fuzz(20)
@given(config=st.sampled_from(ROPES).flatmap(lambda rope: spoilt(CONFIG | {"rope_parameters": rope})))
def test_any_config_is_refused_or_does_no_harm(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    refusal(folder)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"temperature": "x"}', '{"cache_implementation": "evil"}', "\0"], ids=range(4)
)
def test_garbage_in_a_generation_config_is_refused_or_does_no_harm(folder, content):
    (folder / "generation_config.json").write_text(content)
    refusal(folder)


# --- tokenizers and chat templates


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_cut_tokenizer_is_refused(folder, share):
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    assert isinstance(refusal(folder), ModelError)


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template": 5},
        {"chat_template": []},
        {"chat_template": [5]},
        {"chat_template": {"default": 5}},
        {"chat_template": [{"name": None, "template": "x"}, {"name": "default", "template": "x"}]},
        {"chat_template": [{"name": "default", "template": ["x"]}]},
        {"eos_token": 5},
        {"eos_token": {"content": 5}},
        {"eos_token": ["x"]},
        {"model_max_length": "x"},
        {"added_tokens_decoder": {"x": 5}},
        {"added_tokens_decoder": {"-1": {"content": "a"}}},
        {"added_tokens_decoder": {"4294967296": {"content": "a"}}},
        {"extra_special_tokens": 5},
        {"tokenizer_class": 5},
        {"tokenizer_file": "../elsewhere.json", "vocab_file": "/etc/hostname"},
    ],
    ids=str,
)
def test_a_tokenizer_config_is_refused_or_does_no_harm(folder, changes):
    change(folder / "tokenizer_config.json", **changes)
    refusal(folder)


@fuzz(15)
@given(st.data())
def test_any_tokenizer_is_refused_or_does_no_harm(folder, tiny_pair_dirs, data):
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    whole = {
        one: json.loads((tiny_pair_dirs[0] / one).read_text()) for one in ("tokenizer.json", "tokenizer_config.json")
    }
    whole[name] = data.draw(spoilt(whole[name]))
    for one, content in whole.items():
        (folder / one).write_text(json.dumps(content))
    refusal(folder)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"


@pytest.mark.parametrize(
    "template",
    [LOOPS, "{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 10 }}", DOUBLING, "{{ 'x'.center(10 ** 10) }}"],
    ids=range(5),
)
def test_a_template_that_does_not_end_is_refused_before_weights_are_read(folder, monkeypatch, template):
    monkeypatch.setattr(templates, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(templates, "MOST_BYTES", 10**8)
    (folder / "model.safetensors").write_bytes(b"never read")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UnsupportedModelError, match="chat template does not end") as caught:
        load_pair(settings(folder))
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('touch MARKER').read() }}", "unsafe"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe"),
        ("{% include '/etc/hostname' %}", ""),
        ("{% import 'os' as os %}", ""),
        ("{{ raise_exception('not\nfor\nyou') }}", "not for you"),
        ("{% for", ""),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
    ids=range(10),
)
def test_a_template_that_breaks_out_or_down_is_an_error_that_quotes_it(folder, marker, template, says):
    (folder / "chat_template.jinja").write_text(template.replace("MARKER", str(marker)))
    error = refusal(folder)
    assert isinstance(error, PromptError) and "the chat template refuses this prompt" in error.message
    assert says in error.message


def test_a_template_that_is_no_text_is_told_by_name(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    assert isinstance(refusal(folder), ModelError)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"source": 5, "sha256": []}'], ids=range(4))
def test_a_file_of_the_name_of_ours_tells_nothing_of_a_model(folder, content):
    (folder / "fly.json").write_text(content)
    assert identify_model(folder).keys() == {"source", "sha256"}


# --- links, pipes, permissions


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("to", ["missing", "itself", "folder", "/dev/zero", "pipe"])
def test_a_file_that_leads_to_none_is_refused(folder, name, to):
    (folder / name).unlink()
    if to == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to({"itself": folder / name, "folder": folder}.get(to, to))
    assert isinstance(refusal(folder), FlyError)


def test_a_link_to_a_whole_file_is_as_good_as_the_file(folder):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)
    assert refusal(folder) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_what_may_not_be_read_is_told_without_a_traceback(monkeypatch, capsys, tmp_path, folder, name):
    (folder / name).chmod(0)
    fly = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    outcome = fly("generate", "--target", str(folder), "--draft", "lookup", "hi")
    fly.close()
    (folder / name).chmod(0o755)
    assert outcome.code in (1, 2) and outcome.err.startswith("error: ")


@pytest.mark.parametrize("command", ["check", "generate"])
def test_the_command_line_tells_a_hostile_folder_in_one_line(monkeypatch, capsys, tmp_path, folder, command):
    sharded(folder, other="../elsewhere.safetensors")
    fly = Fly(monkeypatch, capsys, tmp_path, scripted=False)
    words = ["check", str(folder), "lookup"] if command == "check" else ["generate", "--target", str(folder), "hi"]
    outcome = fly(*words)
    fly.close()
    assert outcome.code == 1 and "outside its folder: ../elsewhere.safetensors" in outcome.out + outcome.err
    assert "Traceback" not in outcome.err
