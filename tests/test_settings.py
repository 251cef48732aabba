from collections import OrderedDict
from pathlib import Path

import pytest

from fly_cli.errors import SettingsError
from fly_cli.settings import DecodeSettings, ModelSettings, TextSettings


@pytest.mark.parametrize(
    ("kind", "name", "value", "right"),
    [
        (DecodeSettings, "draft_tokens", 2.5, "a whole number"),
        (DecodeSettings, "draft_tokens", 2.0, "a whole number"),
        (DecodeSettings, "draft_tokens", "2", "a whole number"),
        (DecodeSettings, "draft_tokens", None, "a whole number"),
        (DecodeSettings, "max_new_tokens", True, "a whole number"),
        (DecodeSettings, "seed", True, "a whole number or None"),
        (DecodeSettings, "temperature", "1", "a number"),
        (DecodeSettings, "top_p", None, "a number"),
        (DecodeSettings, "temperature", False, "a number"),
        (DecodeSettings, "entropy_threshold", "0.3", "a number or None"),
        (DecodeSettings, "mode", ["fly"], "a string"),
        (DecodeSettings, "draft_lookup", 1, "True or False"),
        (DecodeSettings, "stop", [1], "a sequence of strings"),
        (DecodeSettings, "stop", 1, "a sequence of strings"),
        (DecodeSettings, "stop", None, "a sequence of strings"),
        (DecodeSettings, "stop", b"ab", "a sequence of strings"),
        (TextSettings, "stop_token", [1], "a sequence of strings"),
        (TextSettings, "raw", "no", "True or False"),
        (TextSettings, "system", Path("a"), "a string or None"),
        (ModelSettings, "target", None, "a string"),
        (ModelSettings, "device_map", {"": None}, "a string or a dict from a string to a string or a whole number"),
        (ModelSettings, "device_map", {"": True}, "a string or a dict from a string to a string or a whole number"),
        (ModelSettings, "max_memory", {"cpu": 5}, "a dict from a string to a string or None"),
        (ModelSettings, "offline", "yes", "True or False"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_setting(kind, name, value, right):
    with pytest.raises(SettingsError, match=f"`{name}` is ") as caught:
        kind(**{name: value})
    assert caught.value.hint == f"give {right}"


def test_one_stop_string_is_taken_as_one():
    assert DecodeSettings(stop="ab").stop == ("ab",)
    assert TextSettings(stop_token="ab").stop_token == ("ab",)


def test_stop_strings_may_come_in_any_iterable():
    assert DecodeSettings(stop=["a", "b"]).stop == ("a", "b")
    assert TextSettings(stop_token=(name for name in "ab")).stop_token == ("a", "b")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(SettingsError, match="empty string"):
        DecodeSettings(stop="")


def test_a_whole_number_is_a_number():
    assert DecodeSettings(temperature=1, top_p=1, entropy_threshold=0).temperature == 1


def test_a_path_may_name_a_model_and_becomes_its_text():
    settings = ModelSettings(target=Path("a"), draft=Path("b"), offload_folder=Path("c"))
    assert (settings.target, settings.draft, settings.offload_folder) == ("a", "b", "c")


def test_any_dict_may_be_a_device_map():
    assert ModelSettings(device_map=OrderedDict(lm_head=0, model="cpu")).device_map["lm_head"] == 0
