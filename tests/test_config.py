"""Layers of configuration, where each value came from, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fly_cli.config import Config, Effective, Layer, load_config, parse_max_memory, resolve
from fly_cli.errors import SettingsError


class PairBook:
    """A catalog that knows the draft of two targets."""

    def __init__(self, pairs: Mapping[str, str] = MappingProxyType({})):
        self.drafts = {"qwen-coder-1.5b": "qwen-coder-0.5b", "llama-70b": "llama-8b"} | dict(pairs)

    def draft_for(self, target: str) -> str | None:
        return self.drafts.get(target)


def configure(
    tmp_path: Path, yaml: str | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> Config:
    path = tmp_path / "config.yaml"
    if yaml is not None:
        path.write_text(yaml, encoding="utf-8")
    return load_config(flags, environment=environment or {}, default_file=path)


def effective(
    tmp_path: Path, yaml: str | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> Effective:
    config = configure(tmp_path, yaml, environment, **flags)
    return resolve(config, PairBook(config.pairs))


def refused(
    tmp_path: Path, yaml: str | None = None, environment: dict[str, str] | None = None, **flags: Any
) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        effective(tmp_path, yaml, environment, **flags)
    return caught.value


def test_with_nothing_given_every_value_is_a_default(tmp_path: Path) -> None:
    config = configure(tmp_path)
    assert {value.origin for value in config.values.values()} == {"default"}
    assert config.file is None
    result = resolve(config, PairBook())
    assert (result.models.target, result.models.draft) == ("qwen-coder-1.5b", "qwen-coder-0.5b")
    assert result.decode.entropy_threshold == 0.3
    assert result.notes == ()


def test_each_layer_beats_the_one_below_and_is_named(tmp_path: Path) -> None:
    yaml = "draft_tokens: 11\nwindow_size: 5\nseed: 3\n"
    config = configure(tmp_path, yaml, {"FLY_DRAFT_TOKENS": "12", "FLY_SEED": "4"}, seed=5)
    values = config.values
    assert (values["window_size"].value, values["window_size"].origin) == (5, f"{tmp_path}/config.yaml:window_size")
    assert (values["draft_tokens"].value, values["draft_tokens"].origin) == (12, "FLY_DRAFT_TOKENS")
    assert (values["seed"].value, values["seed"].origin) == (5, "--seed")
    assert values["seed"].layer is Layer.FLAG
    assert values["mode"].origin == "default"


def test_a_missing_default_file_is_fine_and_a_missing_named_one_is_not(tmp_path: Path) -> None:
    configure(tmp_path)
    with pytest.raises(SettingsError, match="--config"):
        load_config({}, environment={}, default_file=tmp_path / "no", file=tmp_path / "nope.yaml")
    with pytest.raises(SettingsError, match="FLY_CONFIG"):
        load_config({}, environment={"FLY_CONFIG": str(tmp_path / "nope.yaml")}, default_file=tmp_path / "no")


def test_the_config_flag_beats_the_config_variable(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"seed: {seed}\n")
    environment = {"FLY_CONFIG": str(tmp_path / "a.yaml")}
    default = tmp_path / "no"
    assert load_config({}, environment=environment, default_file=default).values["seed"].value == 1
    config = load_config({}, environment=environment, default_file=default, file=tmp_path / "b.yaml")
    assert config.values["seed"].value == 2


@pytest.mark.parametrize(
    "yaml, says, hint",
    [
        ("draft_token: 3", "unknown key `draft_token`", "did you mean `draft_tokens`?"),
        ("draft-tokens: 3", "unknown key `draft-tokens`", "did you mean `draft_tokens`?"),
        ("theta: 3", "unknown key `theta`", "did you mean `entropy_threshold`?"),
        ("zzz: 3", "unknown key `zzz`", "known are aliases, "),
        ("7: 3", "unknown key `7`", "known are "),
        ("draft_tokens: many", "`draft_tokens` is 'many'", "give a whole number"),
        ("draft_tokens: true", "`draft_tokens` is True", "give a whole number"),
        ("draft_tokens: 2.5", "`draft_tokens` is 2.5", "give a whole number"),
        ("temperature: [1]", "`temperature` is [1]", "give a number"),
        ("raw: 1", "`raw` is 1", "give true or false"),
        ("draft: no", "`draft` is False", "give a text"),
        ("stop: [a, [b]]", "`stop` is ", "give a list of texts"),
        ("max_memory: 20GB", "`max_memory` is '20GB'", "give a table"),
        ("- a\n- b", "holds a list", "one `name: value` a line"),
        ("seed: 1\nstop: [a", ":2 is not YAML", "correct that line"),
        ("aliases: [a]", "`aliases` is not a table", "aliases: {my-model"),
        ("pairs: {a: 3}", "`pairs` is not a table", "pairs: {my-model"),
        ("seed: !!python/object/apply:os.system [echo]", "is not YAML", ""),
    ],
)
def test_a_bad_config_file_is_refused_with_file_and_key(tmp_path: Path, yaml: str, says: str, hint: str) -> None:
    error = refused(tmp_path, yaml)
    assert str(tmp_path / "config.yaml") in error.message
    assert says in error.message
    assert hint in error.hint


def test_an_empty_file_and_an_empty_value_leave_the_defaults(tmp_path: Path) -> None:
    assert effective(tmp_path, "").decode.window_size == 6
    assert effective(tmp_path, "window_size:\n# nothing\n").decode.window_size == 6


def test_a_byte_order_mark_does_not_spoil_the_first_key(tmp_path: Path) -> None:
    assert effective(tmp_path, "\ufeffseed: 4\ntemperature: 1").decode.seed == 4


@pytest.mark.parametrize(
    "variable, text, field, value",
    [
        ("FLY_TARGET", "llama-70b", "target", "llama-70b"),
        ("FLY_DRAFT_TOKENS", "9", "draft_tokens", 9),
        ("FLY_TEMPERATURE", "1", "temperature", 1.0),
        ("FLY_ENTROPY_THRESHOLD", "0.25", "entropy_threshold", 0.25),
        ("FLY_DRAFT_SCHEDULE", "adaptive", "draft_schedule", "adaptive"),
        ("FLY_DRAFT_LOOKUP", "off", "draft_lookup", False),
        ("FLY_RAW", "Yes", "raw", True),
        ("FLY_STOP", "\n\n", "stop", ("\n\n",)),
        ("FLY_STOP", '["a", "b, c"]', "stop", ("a", "b, c")),
        ("FLY_MAX_MEMORY", "cpu=20GB,0=40GB", "max_memory", {"cpu": "20GB", "0": "40GB"}),
        ("FLY_SEED", "", "seed", None),
        ("FLY_COLOR", "never", "color", "never"),
    ],
)
def test_a_variable_gives_its_setting(tmp_path: Path, variable: str, text: str, field: str, value: object) -> None:
    found = configure(tmp_path, environment={variable: text}).values[field]
    assert found.value == value
    assert found.origin == (variable if text else "default")


@pytest.mark.parametrize("variable, text", [("FLY_DRAFT_TOKENS", "many"), ("FLY_RAW", "maybe"), ("FLY_STOP", "[a")])
def test_a_variable_of_the_wrong_type_is_refused_by_name(tmp_path: Path, variable: str, text: str) -> None:
    if variable == "FLY_STOP":
        assert configure(tmp_path, environment={variable: text}).values["stop"].value == ("[a",)
    else:
        assert variable in refused(tmp_path, environment={variable: text}).message


def test_a_variable_that_is_nearly_ours_is_refused_and_others_are_left_alone(tmp_path: Path) -> None:
    error = refused(tmp_path, environment={"FLY_DRAFT_TOKEN": "3"})
    assert error.hint == "did you mean `FLY_DRAFT_TOKENS`?"
    assert refused(tmp_path, environment={"FLY_THETA": "3"}).hint == "did you mean `FLY_ENTROPY_THRESHOLD`?"
    others = [
        "APP",
        "APP_NAME",
        "REGION",
        "MACHINE_ID",
        "API_TOKEN",
        "ACCESS_TOKEN",
        "CONFIG_DIR",
        "VM_MEMORY_MB",
        "IMAGE_REF",
        "CACHE",
    ]
    configure(tmp_path, environment={f"FLY_{name}": "x" for name in others} | {"FLYCTL": "1"})


@pytest.mark.parametrize("name, value", [("draft_tokens", -1), ("temperature", -0.5), ("top_p", 0.0), ("mode", "fast")])
def test_a_value_out_of_range_is_called_what_the_user_called_it(tmp_path: Path, name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    assert f"`{flag}` is" in refused(tmp_path, **{name: value}).message
    assert f"`FLY_{name.upper()}` is" in refused(tmp_path, environment={f"FLY_{name.upper()}": str(value)}).message
    assert f"`{name}` ({tmp_path}/config.yaml:{name}) is" in refused(tmp_path, f"{name}: {value}").message


@pytest.mark.parametrize("text", ["nan", "inf", "-0.5"])
def test_a_temperature_that_is_no_number_of_at_least_0_is_refused(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, environment={"FLY_TEMPERATURE": text}).message.startswith("`FLY_TEMPERATURE` is")


# --- draft that goes with a target ----------------------------------------------------------------------------------


def test_a_known_target_brings_its_own_draft(tmp_path: Path) -> None:
    result = effective(tmp_path, target="llama-70b")
    assert result.models.draft == "llama-8b"
    assert result.values["draft"].origin == "pair of llama-70b"
    assert result.notes == ()


def test_the_users_own_pair_beats_the_catalog(tmp_path: Path) -> None:
    assert effective(tmp_path, "pairs: {llama-70b: tiny}", target="llama-70b").models.draft == "tiny"


def test_a_draft_given_by_hand_beats_every_pair(tmp_path: Path) -> None:
    assert effective(tmp_path, "pairs: {llama-70b: tiny}\ndraft: mine", target="llama-70b").models.draft == "mine"


def test_an_unknown_target_is_drafted_by_lookup_with_a_note(tmp_path: Path) -> None:
    result = effective(tmp_path, target="./mine")
    assert result.models.draft == "lookup"
    assert len(result.notes) == 1 and "`--draft`" in result.notes[0]


def test_mode_target_wants_no_draft_and_says_nothing(tmp_path: Path) -> None:
    assert effective(tmp_path, target="./mine", mode="target").notes == ()


# --- settings that depend on each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("k, window", [(6, 6), (4, 9), (1, 1)])
def test_a_window_that_fits_no_draft_is_refused_when_both_were_given(tmp_path: Path, k: int, window: int) -> None:
    error = refused(tmp_path, draft_tokens=k, window_size=window)
    assert error.message == f"`--window-size` {window} leaves nothing to forgive in {k} draft tokens (`--draft-tokens`)"
    assert error.hint.startswith("use `--draft-tokens 15 --window-size 6`")
    assert "FLY_WINDOW_SIZE" in refused(tmp_path, environment={"FLY_WINDOW_SIZE": str(window)}, draft_tokens=k).message


@pytest.mark.parametrize("k, fits", [(6, 2), (5, 2), (2, 1), (1, 0)])
def test_a_short_draft_with_the_default_window_gets_one_note_with_a_window_that_fits(
    tmp_path: Path, k: int, fits: int
) -> None:
    (note,) = effective(tmp_path, draft_tokens=k).notes
    assert f"`--window-size {fits}` fits" in note and "nothing can be deferred" in note
    assert effective(tmp_path, draft_tokens=k, window_size=fits).notes == ()


def test_a_window_wider_than_the_default_draft_gets_a_note_with_a_draft_that_fits(tmp_path: Path) -> None:
    (note,) = effective(tmp_path, window_size=20).notes
    assert "`--draft-tokens 50` fits" in note


@pytest.mark.parametrize("window", [500, 1023, 1024])
def test_what_a_note_about_a_wide_window_proposes_is_allowed(tmp_path: Path, window: int) -> None:
    (note,) = effective(tmp_path, window_size=window).notes
    match = re.search("`--(draft-tokens|window-size) (\\d+)` fits", note)
    assert match is not None
    proposed = {"window_size": window} | {match[1].replace("-", "_"): int(match[2])}
    assert effective(tmp_path, **proposed).notes == ()


@pytest.mark.parametrize("mode", ["exact", "target"])
def test_a_window_that_fits_no_draft_is_no_error_where_nothing_is_deferred(tmp_path: Path, mode: str) -> None:
    (note,) = effective(tmp_path, mode=mode, draft_tokens=3, window_size=6).notes
    assert "`--window-size`" in note and f"nothing in mode {mode}" in note


@pytest.mark.parametrize(
    "flags, note",
    [
        ({"mode": "target", "draft": "x"}, "`--draft` does nothing in mode target"),
        (
            {"mode": "target", "draft_tokens": 4, "entropy": "topk"},
            "`--draft-tokens`, `--entropy` do nothing in mode target",
        ),
        ({"mode": "exact", "entropy_threshold": 0.1}, "`--entropy-threshold` does nothing in mode exact"),
        ({"entropy": "normalized", "entropy_top_k": 4}, "`--entropy-top-k` does nothing with normalized entropy"),
        ({"draft": "lookup", "draft_lookup": False}, "`--draft-lookup` does nothing without a draft model"),
        ({"top_p": 0.9, "seed": 1}, "`--top-p`, `--seed` do nothing at temperature 0"),
    ],
)
def test_flags_without_effect_are_noted_once(tmp_path: Path, flags: dict[str, Any], note: str) -> None:
    assert effective(tmp_path, **flags).notes == (note,)


def test_settings_of_a_file_that_have_no_effect_are_not_noted(tmp_path: Path) -> None:
    assert effective(tmp_path, "top_p: 0.9\nseed: 1\nwindow_size: 3", mode="target").notes == ()
    assert effective(tmp_path, temperature=0.7, top_p=0.9, seed=1).notes == ()


# --- values that are read or checked here ---------------------------------------------------------------------------


def test_sizes_are_checked_and_a_small_b_never_means_bits(tmp_path: Path) -> None:
    given = parse_max_memory(["cpu=20gb", "0=1.5GiB, 1=500mib"])
    assert effective(tmp_path, max_memory=given).models.max_memory == {"cpu": "20GB", "0": "1.5GiB", "1": "500MiB"}


@pytest.mark.parametrize("item", ["cpu", "cpu=", "cpu=lots", "tpu=3GB", "cpu=20", "=3GB"])
def test_a_bad_size_is_refused(tmp_path: Path, item: str) -> None:
    with pytest.raises(SettingsError, match="max"):
        effective(tmp_path, max_memory=parse_max_memory([item]))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_a_device_is_taken_by_name(tmp_path: Path, device: str) -> None:
    assert effective(tmp_path, device_map=device).models.device_map == device


@pytest.mark.parametrize(
    "flags", [{"device_map": "gpu"}, {"device_map": "cuda:x"}, {"draft_device": "auto"}, {"draft_device": ""}]
)
def test_an_unknown_device_is_refused(tmp_path: Path, flags: dict[str, Any]) -> None:
    assert "such as cpu or cuda:0" in refused(tmp_path, **flags).hint


def test_a_device_map_is_read_from_a_file_beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "map.yaml").write_text("model.embed_tokens: cpu\nmodel.layers.0: 1\n")
    monkeypatch.chdir("/")
    assert effective(tmp_path, "device_map: map.yaml").models.device_map == {
        "model.embed_tokens": "cpu",
        "model.layers.0": 1,
    }
    assert effective(tmp_path, "device_map: {'': cpu}").models.device_map == {"": "cpu"}
    assert "no such file" in refused(tmp_path, device_map="nope.yaml").message


@pytest.mark.parametrize("content", ["", "a: [1]", "- a"])
def test_a_bad_device_map_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "map.yaml").write_text(content)
    refused(tmp_path, device_map=str(tmp_path / "map.yaml"))


def test_a_chat_template_is_the_text_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}\n")
    assert effective(tmp_path, "chat_template: t.jinja").text.chat_template == "{{ messages }}\n"
    assert "No such file" in refused(tmp_path, chat_template="/nope.jinja").message


def test_a_chat_template_that_is_a_bare_word_and_no_file_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag").mkdir()
    for name in ("tool_use", "rag"):
        assert effective(tmp_path, chat_template=name).text.chat_template == name
        assert effective(tmp_path, environment={"FLY_CHAT_TEMPLATE": name}).text.chat_template == name
        assert effective(tmp_path, f"chat_template: {name}").text.chat_template == name
    (tmp_path / "tool_use").write_text("{{ messages }}")
    assert effective(tmp_path, "chat_template: tool_use").text.chat_template == "{{ messages }}"
    for path in ("tool_use.jinja", "./nope", "../nope"):
        assert "No such file" in refused(tmp_path, chat_template=path).message


def test_raw_and_a_system_prompt_exclude_each_other_by_their_flags(tmp_path: Path) -> None:
    assert "`--raw`" in refused(tmp_path, raw=True, system="x").message


def test_quiet_and_verbose_exclude_each_other(tmp_path: Path) -> None:
    assert refused(tmp_path, quiet=True, verbose=True).message == "`--quiet` and `--verbose` exclude each other"
