from importlib.metadata import PackageNotFoundError

import pytest
import torch
from models_for_tests import tiny_config

from fly_cli import lowbit, placement
from fly_cli.errors import OutOfMemoryError, SettingsError, UnsupportedModelError
from fly_cli.placement import choose_dtype, plan
from fly_cli.settings import ModelSettings
from fly_cli.skeleton import PLANNED_TOKENS, skeleton

MB = 1_000_000


@pytest.fixture
def folder(tmp_path):
    """A model folder without weights: 4 layers of 4.2 MB in fp32 and two tables of 1 MB."""
    tiny_config(vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("{", '{"architectures": ["LlamaForCausalLM"],', 1)
    )
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    """A machine with the given free memory: `machine({0: 8e9, "cpu": 16e9})`."""

    def have(free):
        monkeypatch.setattr(placement, "get_max_memory", lambda: {key: int(size) for key, size in free.items()})
        monkeypatch.setattr(placement, "HEADROOM", 0.0)
        monkeypatch.setattr(
            placement,
            "checked_device",
            lambda name: placement.accelerator(name) if isinstance(name, int) else torch.device(name),
        )
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)

    return have


def both(folder, **settings):
    model = skeleton("big", folder)
    settings = {"dtype": "float32", "draft_quantize": "none"} | settings
    return plan(model, skeleton("small", folder), ModelSettings(**settings))


def missing(name):
    raise PackageNotFoundError(name)


def devices(place):
    return {str(device) for device in place.device_map.values()}


def test_a_skeleton_knows_sizes_without_weights(folder):
    model = skeleton("tiny", folder)
    assert {parameter.device.type for parameter in model.model.parameters()} == {"meta"}
    assert model.weight_bytes(torch.float32) == 4 * model.num_parameters
    assert model.weight_bytes(torch.bfloat16) == 2 * model.num_parameters
    # 4 layers, keys and values, one head of 128
    assert model.cache_bytes(torch.float32) == 4 * 2 * 128 * 4 * PLANNED_TOKENS


def test_tied_weights_count_once(tmp_path):
    sizes = []
    for tied in (True, False):
        config = tiny_config(tie_word_embeddings=tied, architectures=["LlamaForCausalLM"])
        config.save_pretrained(tmp_path)
        sizes.append(skeleton("tiny", tmp_path).num_parameters)
    assert sizes[1] - sizes[0] == 384 * 32


def test_on_a_cpu_both_models_are_booked_together(folder, machine):
    machine({"cpu": 200 * MB})
    target, draft = both(folder)
    assert devices(target) == devices(draft) == {"cpu"}
    one = skeleton("big", folder)
    needed = one.weight_bytes(torch.float32) + one.cache_bytes(torch.float32)
    machine({"cpu": 2 * needed - 1 * MB})
    with pytest.raises(OutOfMemoryError, match=r"`big` needs .* MB"):
        both(folder)


def test_a_draft_on_the_cpu_has_int8_weights_and_is_booked_so(folder, machine):
    machine({"cpu": 400 * MB})
    _, plain = both(folder)
    target, draft = both(folder, draft_quantize="auto")
    assert (target.quantize, draft.quantize, plain.quantize) == ("none", "int8", "none")
    assert draft.weight_bytes < 0.6 * plain.weight_bytes
    assert draft.describe()["quantize"] == "int8"


def test_a_draft_on_an_accelerator_keeps_its_weights_unless_asked(folder, machine, monkeypatch):
    machine({0: 400 * MB, "cpu": 400 * MB})
    _, draft = both(folder, draft_quantize="auto")
    assert draft.quantize == "none"
    monkeypatch.setattr(lowbit, "version", missing)
    with pytest.raises(SettingsError, match="`--draft-quantize int8` on cuda needs bitsandbytes") as caught:
        both(folder, draft_quantize="int8")
    assert caught.value.hint == "pip install 'fly-decode[bitsandbytes]'"


def test_wrong_int8_kernels_are_not_used(folder, machine, monkeypatch):
    monkeypatch.setattr(placement, "int8_works", lambda: False)
    machine({"cpu": 400 * MB})
    _, draft = both(folder, draft_quantize="auto")
    assert draft.quantize == "none"
    with pytest.raises(SettingsError, match="no right result"):
        both(folder, draft_quantize="int8")


def test_a_model_that_fits_alone_is_refused_beside_its_draft_with_the_sizes(folder, machine):
    one = skeleton("big", folder)
    needed = one.weight_bytes(torch.float32) + one.cache_bytes(torch.float32)
    machine({"cpu": int(1.5 * needed)})
    assert plan(one, None, ModelSettings(dtype="float32"))[1] is None
    with pytest.raises(OutOfMemoryError, match=r"weights in float32.*cache.*cpu"):
        both(folder)


def test_the_draft_takes_the_roomiest_accelerator_and_the_target_what_is_left(folder, machine):
    one = skeleton("big", folder)
    needed = one.weight_bytes(torch.float32) + one.cache_bytes(torch.float32)
    machine({0: 0.8 * needed, 1: 1.5 * needed, "cpu": 10 * needed})
    target, draft = both(folder)
    assert devices(draft) == {"cuda:1"}
    assert 0 in target.device_map.values()


def test_a_draft_that_fits_no_accelerator_goes_to_the_cpu_and_never_to_disk(folder, machine):
    machine({0: 5 * MB, "cpu": 500 * MB})
    _, draft = both(folder)
    assert devices(draft) == {"cpu"}


def test_a_named_device_takes_the_whole_model(folder, machine):
    machine({0: 500 * MB, 1: 500 * MB, "cpu": 500 * MB})
    target, draft = both(folder, device_map="cuda:1", draft_device="cpu")
    assert devices(target) == {"cuda:1"}
    assert devices(draft) == {"cpu"}


def test_without_a_draft_device_the_draft_goes_where_the_target_was_put(folder, machine):
    machine({0: 500 * MB, "cpu": 500 * MB})
    target, draft = both(folder, device_map="cpu")
    assert devices(target) == devices(draft) == {"cpu"}


def test_max_memory_limits_a_device_and_leaves_out_the_others(folder, machine):
    machine({0: 500 * MB, "cpu": 500 * MB})
    target, _ = both(folder, max_memory={"cpu": "400MB"})
    assert devices(target) == {"cpu"}


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"cpu": "lots"}, "lots"),
        ({"7": "2GB"}, "not there"),
        ({"\u00b2": "2GB"}, "not there"),
        ({"9" * 5000: "2GB"}, "not there"),
    ],
)
def test_a_bad_max_memory_is_a_usage_error(folder, machine, limits, what):
    machine({"cpu": 500 * MB})
    with pytest.raises(SettingsError, match=what):
        both(folder, max_memory=limits)


def test_what_fits_nowhere_needs_an_offload_folder(folder, machine):
    machine({"cpu": 60 * MB})
    one = skeleton("big", folder)
    with pytest.raises(OutOfMemoryError, match="what is left is") as caught:
        plan(one, None, ModelSettings(dtype="float32", max_memory={"cpu": "30MB"}))
    assert "--offload-folder" in caught.value.hint
    target, _ = plan(one, None, ModelSettings(dtype="float32", max_memory={"cpu": "30MB"}, offload_folder="off"))
    assert "disk" in devices(target)


def test_a_device_map_must_name_every_module(folder, machine):
    machine({"cpu": 500 * MB})
    with pytest.raises(SettingsError, match="device map"):
        plan(skeleton("big", folder), None, ModelSettings(device_map={"lm_head": "cpu"}))
    target, _ = plan(skeleton("big", folder), None, ModelSettings(device_map={"model": "cpu", "lm_head": "cpu"}))
    assert target.describe()["devices"] == {"cpu": 2}


def test_a_module_that_the_model_lacks_is_named(folder, machine):
    machine({"cpu": 500 * MB})
    with pytest.raises(SettingsError, match="'bogus'") as caught:
        plan(skeleton("big", folder), None, ModelSettings(device_map={"": "cpu", "bogus": "cpu"}))
    assert "lm_head" in caught.value.hint


@pytest.mark.parametrize(
    ("device_map", "what"),
    [
        ({"": "cpu", "lm_head": "disk"}, "names lm_head beside the whole model"),
        ({"model": "cpu", "model.layers.1": "disk", "lm_head": "cpu"}, r"names model\.layers\.1 beside model,"),
    ],
)
def test_a_module_that_a_device_map_places_twice_is_refused_by_name(folder, machine, device_map, what):
    machine({"cpu": 500 * MB})
    with pytest.raises(SettingsError, match=what):
        plan(skeleton("big", folder), None, ModelSettings(device_map=device_map, offload_folder="off"))


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_a_device_map_that_asks_for_disk_needs_an_offload_folder(folder, machine, device_map):
    machine({"cpu": 500 * MB})
    with pytest.raises(SettingsError, match=r"device map puts (the whole model|lm_head) on disk") as caught:
        plan(skeleton("big", folder), None, ModelSettings(device_map=device_map))
    assert "--offload-folder" in caught.value.hint
    place, _ = plan(skeleton("big", folder), None, ModelSettings(device_map=device_map, offload_folder="off"))
    assert "disk" in devices(place)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_a_device_map_is_refused_with_the_sizes_when_a_device_is_too_small_for_its_part(folder, machine, device_map):
    model = skeleton("big", folder)
    needed = model.weight_bytes(torch.float32) + model.cache_bytes(torch.float32)
    settings = ModelSettings(dtype="float32", device_map=device_map)
    machine({"cpu": needed})
    assert plan(model, None, settings)[0]
    machine({"cpu": needed - 10})
    with pytest.raises(OutOfMemoryError, match=r"`big` needs .* MB on cpu \(.* weights in float32, .* cache\)"):
        plan(model, None, settings)


def test_each_device_of_a_map_is_booked_for_its_own_part(folder, machine):
    model = skeleton("big", folder)
    head = 1000 * 256 * 4
    rest = model.weight_bytes(torch.float32) - head
    cache = model.cache_bytes(torch.float32)
    settings = ModelSettings(dtype="float32", device_map={"model": 0, "lm_head": "cpu"})
    machine({0: rest + cache, "cpu": head})
    assert plan(model, None, settings)[0]
    for free, device in (({0: rest + cache - 1, "cpu": head}, "cuda:0"), ({0: rest + cache, "cpu": head - 1}, "cpu")):
        machine(free)
        with pytest.raises(OutOfMemoryError, match=f"on {device}"):
            plan(model, None, settings)


def test_a_map_that_keeps_the_weights_on_disk_still_needs_room_for_the_cache(folder, machine):
    model = skeleton("big", folder)
    machine({"cpu": model.cache_bytes(torch.float32) - 1})
    with pytest.raises(OutOfMemoryError, match=r"on cpu \(0\.0 MB weights"):
        plan(model, None, ModelSettings(dtype="float32", device_map={"": "disk"}, offload_folder="off"))


@pytest.mark.parametrize("name", ["banana", "", "hpu", "meta", "cuda:99999", -1, 99999, 10**22])
def test_a_device_that_is_not_there_is_a_usage_error_that_names_it(name):
    with pytest.raises(SettingsError, match=f"no device '{name}'"):
        placement.checked_device(name)


def test_an_index_is_not_wrapped_into_another_device(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # as if every device were there
    assert placement.checked_device(1).index == 1
    for name in ("cuda:256", 256):
        with pytest.raises(SettingsError, match="256"):
            placement.checked_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_accelerator_that_is_not_there_is_a_usage_error():
    with pytest.raises(SettingsError, match="cuda:0"):
        placement.checked_device("cuda:0")


def test_a_folder_that_is_no_language_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(UnsupportedModelError, match="not a causal language model") as caught:
        skeleton("pictures", tmp_path)
    assert "\n" not in caught.value.message


def test_a_model_with_code_of_its_own_is_refused_unless_trusted(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('own code was run')")
    with pytest.raises(UnsupportedModelError, match="code of its own") as caught:
        skeleton("own", tmp_path)
    assert "--trust-remote-code" in caught.value.hint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_was_asked_for_is_taken(dtype):
    assert choose_dtype(dtype, torch.device("cpu")) == getattr(torch, dtype)
