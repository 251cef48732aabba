import json
import shutil

import pytest
import torch
from models_for_tests import byte_tokenizer, tiny_llama
from safetensors.torch import load_file, save_file
from text_helpers import words
from transformers import Gemma3Config, LlamaForCausalLM

from fly_cli import loading, panels
from fly_cli.api import generate
from fly_cli.errors import ModelError, OutOfMemoryError, PromptError, SettingsError, UnsupportedModelError
from fly_cli.models import load_pair, with_assistant
from fly_cli.pairing import end_ids
from fly_cli.progress import Silent
from fly_cli.prompts import Prompt
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings
from fly_cli.vocabulary import Match, compare_vocabularies


def load(target, draft=LOOKUP, mode="fly", **settings):
    settings = {"dtype": "float32", "device_map": "cpu"} | settings
    return load_pair(ModelSettings(target=str(target), draft=str(draft), **settings), TextSettings(raw=True), mode=mode)


@pytest.fixture
def folder(tiny_pair_dirs, tmp_path):
    """A copy of the target's folder to spoil."""
    return shutil.copytree(tiny_pair_dirs[0], tmp_path / "model")


def test_a_pair_of_folders_loads_and_decodes(tiny_pair_dirs):
    pair = load(*tiny_pair_dirs)
    fly = generate(pair, "the an in", DecodeSettings(mode="exact", max_new_tokens=20))
    plain = generate(pair, "the an in", DecodeSettings(mode="target", max_new_tokens=20))
    assert [token.id for token in fly.tokens] == [token.id for token in plain.tokens]
    assert fly.summary.num_draft_tokens > 0
    assert 383 in pair.codec.stop_ids


@pytest.mark.parametrize(("mode", "draft"), [("target", None), ("fly", LOOKUP)])
def test_a_draft_model_that_is_not_needed_is_not_loaded(tiny_pair_dirs, mode, draft):
    assert load(tiny_pair_dirs[0], draft or tiny_pair_dirs[1], mode=mode).draft is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_decodes_on_a_cpu(tiny_pair_dirs, dtype):
    pair = load(*tiny_pair_dirs, dtype=dtype)
    assert generate(pair, "abc", DecodeSettings(max_new_tokens=10)).summary.num_new_tokens > 0
    assert pair.describe()["placement"][0]["dtype"] == dtype


def test_a_pair_describes_itself_in_json_values(tiny_pair_dirs):
    described = json.loads(json.dumps(load(*tiny_pair_dirs).describe()))
    assert described["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__
    assert described["stop_ids"] == [381, 383] or 383 in described["stop_ids"]


def test_a_model_that_looks_at_the_weights_of_its_layers_runs_with_layers_that_have_them(tiny_pair_dirs, monkeypatch):
    usual = LlamaForCausalLM.forward

    def curious(self, *args, **kwargs):
        assert self.lm_head.weight.ndim == 2
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", curious)
    notes = []
    monkeypatch.setattr(Silent, "note", lambda self, text: notes.append(text))
    target, draft = tiny_pair_dirs
    pair = load(target, draft, dtype="bfloat16")
    assert [place.quantize for place in pair.placements] == ["none", "none"]
    assert all(isinstance(model.model.lm_head, torch.nn.Linear) for model in pair.models)
    assert generate(pair, "abc", DecodeSettings(max_new_tokens=10)).summary.num_new_tokens > 0
    assert len(notes) == 1 and "runs without the faster ones" in notes[0]


def test_a_large_models_panels_are_on_disk_from_its_first_run_on(panels_folder, tiny_pair_dirs):
    settings = {"dtype": "bfloat16", "draft_quantize": "none"}
    texts = []
    for _ in range(2):
        pair = load(*tiny_pair_dirs, **settings)
        texts.append([token.id for token in generate(pair, "the an in", DecodeSettings(max_new_tokens=20)).tokens])
        kept = sorted(panels_folder.rglob("*.bin"))
        assert len(kept) == 2
        assert all(isinstance(model.model.lm_head, panels.PanelLinear) for model in pair.models)
    assert texts[0] == texts[1]


def test_panels_of_an_incomplete_model_are_not_kept(panels_folder, folder):
    spoil(folder, misspell)
    pair = load(folder, dtype="bfloat16", allow_missing_weights=True)
    assert isinstance(pair.target.model.lm_head, panels.PanelLinear)
    assert not list(panels_folder.rglob("*.bin"))


def test_int8_weights_of_an_incomplete_model_are_not_kept(tiny_pair_dirs, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    spoil(folder, misspell)
    load(tiny_pair_dirs[0], folder, allow_missing_weights=True)
    with pytest.raises(ModelError, match="stay random"):
        load(tiny_pair_dirs[0], folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_draft_with_weights_that_are_no_numbers_is_refused_by_the_name_of_one(
    tiny_pair_dirs, folder, tmp_path, monkeypatch, value
):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))

    def spoil_one(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    spoil(folder, spoil_one)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are NaN or inf"):
        load(tiny_pair_dirs[0], folder, draft_quantize="int8")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing is kept


def test_what_is_loaded_is_told_with_the_size_that_it_has_there(tiny_pair_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "gigabytes", lambda size: f"{size} bytes")
    starts = []
    progress = type("Starts", (Silent,), {"start": lambda self, what, total: starts.append(what)})()
    target, draft = tiny_pair_dirs
    pair = load_pair(ModelSettings(target=target, draft=draft, draft_quantize="int8"), progress=progress)
    with_assistant(pair, progress)
    name = pair.placements[1].name
    size = sum(one.nbytes for one in LlamaForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).parameters())
    told = [what for what in starts if what.startswith(f"loading {name} ") and "int8" not in what]
    assert told == [f"loading {name} ({size} bytes)"] * 2  # to prepare its int8 form, and as it is
    assert pair.placements[1].weight_bytes < size


def test_int8_weights_are_prepared_once_and_anew_where_they_do_not_fit(tiny_pair_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE", str(tmp_path / "cache"))
    prepared = []
    usual = loading.prepare_int8
    monkeypatch.setattr(loading, "prepare_int8", lambda *given: prepared.append(1) or usual(*given))
    first = load(*tiny_pair_dirs)
    assert first.placements[1].quantize == "int8"
    load(*tiny_pair_dirs)
    assert len(prepared) == 1
    (file,) = (tmp_path / "cache" / "int8").iterdir()
    state = load_file(file)
    state["model.norm.weight"] = torch.ones(3)
    save_file(state, file)
    load(*tiny_pair_dirs)
    assert len(prepared) == 2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 2}], ids=["greedy", "sampled"])
def test_a_target_that_is_partly_on_disk_writes_the_same_text(tiny_pair_dirs, tmp_path, caplog, sampling):
    exact = DecodeSettings(mode="exact", max_new_tokens=24, draft_schedule="constant", **sampling)
    plain = generate(load(*tiny_pair_dirs), "abc", exact)
    layers = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    layers |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    pair = load(*tiny_pair_dirs, device_map=layers, offload_folder=str(tmp_path / "off"))
    drafted = generate(pair, "abc", exact)
    assert [token.id for token in drafted.tokens] == [token.id for token in plain.tokens]
    assert drafted.summary.num_accepted_draft_tokens > 0
    assert [record.getMessage() for record in caplog.records] == []  # nothing of accelerate's about meta devices


def on_meta(model):
    """The modules that have parameters without data."""
    return [
        module
        for module in model.modules()
        if any(one.device.type == "meta" for one in module.parameters(recurse=False))
    ]


def test_no_parameter_is_left_without_data_but_where_a_hook_brings_it_in_time(tiny_pair_dirs, tmp_path):
    for pair in (load(*tiny_pair_dirs), load(*tiny_pair_dirs, draft_quantize="none", dtype="bfloat16")):
        assert not on_meta(pair.target.model) and not on_meta(pair.draft.model)
    layers = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    layers |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    pair = load(*tiny_pair_dirs, device_map=layers, offload_folder=str(tmp_path / "off"))
    away = on_meta(pair.target.model)
    assert away and all(hasattr(module, "_hf_hook") for module in away)
    assert not on_meta(pair.draft.model)


def spoil(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def misspell(weights):
    weights["model.layers.0.mlp.up_prjo.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")


def test_missing_weights_are_an_error_that_names_them(folder):
    spoil(folder, misspell)
    with pytest.raises(ModelError, match=r"up_proj\.weight") as caught:
        load(folder)
    assert "--allow-missing-weights" in caught.value.hint


def test_missing_weights_may_be_allowed(folder):
    spoil(folder, misspell)
    assert load(folder, allow_missing_weights=True).target


def test_an_output_layer_that_lost_its_tie_is_an_error(tmp_path):
    tiny_llama(0, tie_word_embeddings=True).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lm_head"):
        load(tmp_path)


def test_weights_of_another_shape_are_an_error(folder):
    def shrink(weights):
        weights["lm_head.weight"] = weights["lm_head.weight"][:, :16].contiguous()

    spoil(folder, shrink)
    with pytest.raises(
        ModelError, match=r"another shape: lm_head\.weight is \[384, 16\] and should be \[384, 32\]"
    ) as caught:
        load(folder)
    assert "--allow-missing-weights" in caught.value.hint
    assert load(folder, allow_missing_weights=True).target


class Notes(Silent):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def test_weights_that_the_model_has_no_place_for_are_a_note_that_names_some(folder):
    change_json(folder / "config.json", num_hidden_layers=1)
    notes = Notes()
    load_pair(ModelSettings(target=str(folder), draft=LOOKUP, dtype="float32", device_map="cpu"), progress=notes)
    (note,) = notes.texts
    assert "9 weights" in note
    assert "model.layers.1.input_layernorm.weight" in note


def test_weights_that_all_have_a_place_are_no_note(folder):
    notes = Notes()
    load_pair(ModelSettings(target=str(folder), draft=LOOKUP, dtype="float32", device_map="cpu"), progress=notes)
    assert notes.texts == []


# Files that hold something else than they should


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "x"},
        {"eos_token_id": [5, None]},
        {"eos_token_id": "x"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"hidden_act": "nope"},
        {"vocab_size": -1},
        {"dtype": "x"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_an_error_in_one_line_that_names_the_file(folder, change):
    change_json(folder / "config.json", **change)
    with pytest.raises(UnsupportedModelError, match=r"config\.json") as caught:
        load(folder)
    assert "\n" not in caught.value.message
    assert caught.value.__cause__


@pytest.mark.parametrize(
    "content", ["{bad", "[]", '"x"', "null", "", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}']
)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_generation_config_that_says_nothing_is_an_error_in_one_line_that_names_the_file(
    tiny_pair_dirs, folder, content, side
):
    (folder / "generation_config.json").write_text(content)
    pair = (folder, tiny_pair_dirs[1]) if side == "target" else (tiny_pair_dirs[0], folder)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json of .*model") as caught:
        load(*pair)
    assert "\n" not in caught.value.message


def test_end_ids_that_only_the_outer_config_of_a_model_names_count(tmp_path):
    assert end_ids("m", tmp_path, Gemma3Config(eos_token_id=[5, 9])) >= {5, 9}
    assert end_ids("m", tmp_path, Gemma3Config(text_config={"eos_token_id": 7}, eos_token_id=None)) == {7}


def test_nulls_among_the_end_ids_of_a_generation_config_are_skipped(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [280, null]}')
    assert 280 in load(folder).codec.stop_ids


def with_generation_config(folder, to, **settings):
    """A copy of a model folder with another generation config."""
    copy = shutil.copytree(folder, to)
    (copy / "generation_config.json").write_text(json.dumps(settings))
    return copy


def test_sampling_settings_and_limits_of_a_checkpoint_change_nothing_on_either_side(tiny_pair_dirs, tmp_path):
    leaking = {"do_sample": True, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.9, "max_length": 20}
    leaking["eos_token_id"] = 383
    target = with_generation_config(tiny_pair_dirs[0], tmp_path / "target", **leaking)
    draft = with_generation_config(tiny_pair_dirs[1], tmp_path / "draft", **leaking | {"temperature": 1.5})
    pairs = [load(*tiny_pair_dirs), load(target, draft)]
    lengths = []
    for mode in ("target", "exact", "fly"):
        for text in ("abc", "the an in", "0"):
            settings = DecodeSettings(mode=mode, max_new_tokens=40, draft_schedule="constant")
            plain, other = (generate(pair, text, settings).tokens for pair in pairs)
            assert [token.id for token in other] == [token.id for token in plain]
            lengths.append(len(plain))
    assert max(lengths) > leaking["max_length"]


@pytest.mark.parametrize("place", ["list", "int", "config alone"])
def test_an_answer_ends_at_the_first_end_id_of_any_source_and_the_result_names_it(tiny_pair_dirs, tmp_path, place):
    settings = DecodeSettings(mode="target", max_new_tokens=40)
    endless = [token.id for token in generate(load(tiny_pair_dirs[0]), "abc", settings).tokens]
    end = endless[10]
    listed = {"eos_token_id": end if place == "int" else [9999, end]}
    folder = with_generation_config(tiny_pair_dirs[0], tmp_path / "model", **listed)
    if place == "config alone":
        (folder / "generation_config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [5, end]}))
    result = generate(load(folder), "abc", settings)
    assert (result.summary.finish_reason, result.events[-1].stop_id) == ("stop", end)
    assert [token.id for token in result.tokens] == endless[: endless.index(end) + 1]


def test_prompt_tokens_are_read_even_where_they_are_the_pad_token(tiny_pair_dirs, tmp_path):
    padded = shutil.copytree(tiny_pair_dirs[0], tmp_path / "padded")
    config = json.loads((padded / "config.json").read_text())
    pad = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    (padded / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(padded)
    chat = Prompt("p", tuple({"role": role, "content": "abc"} for role in ("user", "assistant", "user")))
    settings = DecodeSettings(mode="target", max_new_tokens=20)
    found = []
    for folder in (tiny_pair_dirs[0], padded):
        pair = load_pair(ModelSettings(target=str(folder), draft=LOOKUP, device_map="cpu", dtype="float32"))
        assert pair.codec.encode(chat).ids.count(pad) >= 3
        found.append([token.id for token in generate(pair, chat, settings).tokens])
    assert found[0] == found[1]


@pytest.mark.parametrize("content", ["[]", "5", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_file_of_another_kind_is_an_error_in_one_line(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_while_a_config_is_read_is_not_taken_for_a_bad_file(tiny_pair_dirs, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("fly_cli.skeleton.AutoConfig.from_pretrained", fail)
    with pytest.raises(error):
        load(tiny_pair_dirs[0])


def test_a_stop_token_in_digits_that_are_not_ascii_is_a_text(tiny_pair_dirs):
    with pytest.raises(SettingsError, match="not one token"):
        load_pair(
            ModelSettings(target=str(tiny_pair_dirs[0]), draft=LOOKUP), TextSettings(raw=True, stop_token=("\u0663",))
        )


@pytest.mark.parametrize("token", ["384", "9" * 5000])
def test_a_stop_token_beyond_the_vocabulary_is_an_error_however_long(tiny_pair_dirs, token):
    with pytest.raises(SettingsError, match="does not exist"):
        load_pair(
            ModelSettings(target=str(tiny_pair_dirs[0]), draft=LOOKUP), TextSettings(raw=True, stop_token=(token,))
        )


def test_a_truncated_weights_file_is_an_error_in_one_line(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(folder)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_that_runs_out_while_loading_is_an_error_with_options(tiny_pair_dirs, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(OutOfMemoryError, match=r"loading .*target.* \(.*B\)") as caught:
        load(tiny_pair_dirs[0])
    assert caught.value.hint.count(",") >= 2


@pytest.mark.parametrize("form", ["none", "int8"])
def test_memory_that_runs_out_while_the_draft_loads_names_the_draft_and_its_size(tiny_pair_dirs, monkeypatch, form):
    real = loading.load_in_form

    def fail_for_the_draft(source, place):
        if source.located.path.name == "draft":
            raise MemoryError
        return real(source, place)

    monkeypatch.setattr(loading, "load_in_form", fail_for_the_draft)
    with pytest.raises(OutOfMemoryError, match=r"memory ran out while loading `.*draft` \(.*B\)$"):
        load(*tiny_pair_dirs, draft_quantize=form)


# Vocabularies


def other_tokenizer(folder, change):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def swap(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_a_draft_with_other_ids_drafts_by_way_of_the_text_and_one_note_says_so(tiny_pair_dirs, folder):
    other_tokenizer(folder, swap)
    notes = Notes()
    settings = ModelSettings(target=str(tiny_pair_dirs[0]), draft=str(folder), dtype="float32", device_map="cpu")
    pair = load_pair(settings, TextSettings(raw=True), progress=notes)
    (note,) = [text for text in notes.texts if "by way of the text" in text]
    assert "differ in 2 of 384 shared ids" in note
    exact = generate(pair, "abc", DecodeSettings(mode="exact", max_new_tokens=20, draft_schedule="constant"))
    plain = generate(pair, "abc", DecodeSettings(mode="target", max_new_tokens=20))
    assert exact.summary.num_draft_tokens > 0
    assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]


def test_a_pair_with_one_tokenizer_is_not_translated(tiny_pair_dirs):
    assert load(*tiny_pair_dirs).translation is None


def test_a_draft_that_cannot_be_translated_is_refused_before_any_weight_loads(tiny_pair_dirs, folder, monkeypatch):
    words(None).save_pretrained(folder)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("loaded weights"))
    with pytest.raises(UnsupportedModelError, match="model` is of a kind that cannot be translated") as caught:
        load(tiny_pair_dirs[0], folder)
    assert "--draft lookup" in caught.value.hint


def test_ids_that_one_side_lacks_and_renamed_special_tokens_do_not_matter(tiny_pair_dirs, folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.chat_template = "other"
    tokenizer.pad_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    assert compare_vocabularies(tiny_pair_dirs[0], folder, rows=(384, 384)).kind is Match.SAME
    assert compare_vocabularies(folder, tiny_pair_dirs[0], rows=(385, 384)).kind is Match.PADDED

    def rename(table):
        for token in table["added_tokens"]:
            token["content"] = token["content"].replace("im_start", "turn")

    other_tokenizer(folder, rename)
    assert compare_vocabularies(tiny_pair_dirs[0], folder, rows=(384, 384)).kind is Match.SAME


def test_tokens_that_one_side_lacks_are_told_in_one_note(tiny_pair_dirs, folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    told = {}
    for target, draft in [(tiny_pair_dirs[0], folder), (folder, tiny_pair_dirs[1]), tiny_pair_dirs]:
        notes = Notes()
        load_pair(ModelSettings(target=str(target), draft=str(draft), device_map="cpu"), progress=notes)
        told[target.name, draft.name] = [note for note in notes.texts if "lacks" in note]
    name, target, draft = folder.name, *(one.name for one in tiny_pair_dirs)
    assert [len(notes) for notes in told.values()] == [1, 1, 0]
    assert f"{name}` has 1 token that" in told[target, name][0] and told[target, name][0].endswith("are not used")
    assert f"{name}` has 1 token that" in told[name, draft][0] and told[name, draft][0].endswith("are not drafted")


def fed_ids(model):
    """The highest id that each forward of a model was given from here on."""
    highest = []
    model.register_forward_pre_hook(lambda _, inputs: highest.append(int(inputs[0].max())))
    return highest


@pytest.mark.parametrize(("rows", "other"), [(384, 448), (448, 384)])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("mode", ["exact", "fly"])
def test_padded_rows_of_either_model_change_nothing(tiny_pair_dirs, tmp_path, rows, other, temperature, mode):
    for name, size, seed in (("t", rows, 0), ("d", other, 0)):
        model = tiny_llama(seed)
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():  # padded rows that would win if they could
            model.lm_head.weight[384:] = 50.0
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    pair = load(tmp_path / "t", tmp_path / "d", draft_quantize="none")
    fed = [fed_ids(model.model) for model in pair.models]
    settings = {"max_new_tokens": 30, "temperature": temperature, "seed": 3, "draft_schedule": "constant"}
    drafted = generate(pair, "abc", DecodeSettings(mode=mode, **settings))
    plain = generate(pair, "abc", DecodeSettings(mode="target", **settings))
    # The draft model is the target but for its padded rows.
    assert [token.id for token in drafted.tokens] == [token.id for token in plain.tokens]
    assert drafted.summary.num_accepted_draft_tokens > 0
    assert max(token.id for token in drafted.tokens) < 384
    assert all(max(highest) < 384 for highest in fed)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 50.0])
def test_tokens_that_the_draft_models_table_lacks_are_chosen_and_never_fed_to_it(tmp_path, temperature):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(16)])
    for name, rows in (("t", 448), ("d", 384)):
        tiny_llama(0, vocab_size=rows).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = load(tmp_path / "t", tmp_path / "d", draft_quantize="none")
    to_target, to_draft = (fed_ids(model.model) for model in pair.models)
    settings = {"max_new_tokens": 60, "temperature": temperature, "draft_schedule": "constant"}
    chosen = []
    for seed in range(6):
        exact = generate(pair, "abc", DecodeSettings(mode="exact", seed=seed, **settings))
        plain = generate(pair, "abc", DecodeSettings(mode="target", seed=seed, **settings))
        assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]
        chosen += [token.id for token in exact.tokens]
    assert 384 <= max(chosen) < 400
    assert 384 <= max(to_target) < 400
    assert max(to_draft) < 384


def test_tokens_that_the_targets_table_lacks_are_never_drafted_nor_taken_from_a_prompt(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<more{i}>" for i in range(16)])
    for name, rows in (("t", 384), ("d", 448)):
        model = tiny_llama(0, vocab_size=rows)
        with torch.no_grad():  # that the draft model would choose if it could
            model.lm_head.weight[384:] = 50.0
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = load(tmp_path / "t", tmp_path / "d", draft_quantize="none")
    to_target, to_draft = (fed_ids(model.model) for model in pair.models)
    for temperature in (0.0, 1.0):
        settings = DecodeSettings(mode="exact", max_new_tokens=30, temperature=temperature, seed=1)
        assert generate(pair, "abc", settings).summary.num_new_tokens
    assert max(*to_target, *to_draft) < 384
    with pytest.raises(PromptError, match="the model knows 384 ids"):
        generate(pair, "abc<more3>")
