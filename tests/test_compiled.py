"""Compiled steps of a draft model: the plain model's logits, one compilation, and never without a comparison.

The compiler here traces and guards as it does for a GPU, and then runs what it traced as it is.
"""

import random

import pytest
import torch
from architectures import ROPE, SLIDING
from models_for_tests import noisy_copy, tiny_llama

from fly_cli import compiled as compiled_module
from fly_cli.api import generate
from fly_cli.cached_model import CachedModel
from fly_cli.compiled import CompileError, compiled
from fly_cli.errors import SettingsError
from fly_cli.models import load_pair
from fly_cli.settings import DecodeSettings, ModelSettings, TextSettings


class Traced:
    """A compiler, and how often it was asked to compile."""

    def __init__(self):
        self.count = 0

    def backend(self, graph, _):
        self.count += 1
        return graph.forward

    def __call__(self, forward):
        torch._dynamo.reset()
        return torch.compile(forward, backend=self.backend, fullgraph=True, dynamic=False)


@pytest.fixture
def traced(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return Traced()


def plain_model(seed=0, **changes):
    return CachedModel(tiny_llama(seed, max_position_embeddings=8192, **changes), name="tiny")


def test_logits_are_the_plain_models_through_drafts_and_rejections_and_one_compilation_serves_all(traced):
    plain, dice = plain_model(), random.Random(1)
    model = compiled(plain, faster=False, compiler=traced)
    assert traced.count == 1
    for text in ([5], [dice.randrange(256) for _ in range(40)]):
        model.reset()
        for rejected_at in range(6):  # 5 is none
            model.settle(text[:-1])
            drafted = [dice.randrange(256) for _ in range(5)]
            for n in range(6):
                ids = text + drafted[:n]
                torch.testing.assert_close(model.read(ids), plain.read(ids), atol=1e-3, rtol=1e-3)
            rows = model.read(text + drafted[:2] + [3, 4], last=3)  # copied tokens, checked at once
            torch.testing.assert_close(rows, plain.read(text + drafted[:2] + [3, 4], last=3), atol=1e-3, rtol=1e-3)
            text = [*text, *drafted[:rejected_at], dice.randrange(256)]
    assert traced.count == 1


def test_a_text_that_outgrows_the_cache_goes_on_without_another_compilation(traced, monkeypatch):
    monkeypatch.setattr(compiled_module, "LENGTH", 64)
    plain = plain_model()
    model = compiled(plain, faster=False, compiler=traced)
    ids = [(7 * i) % 256 for i in range(80)]
    for end in (62, 63, 64, 65, 66, 80, 79):
        torch.testing.assert_close(model.read(ids[:end]), plain.read(ids[:end]), atol=1e-3, rtol=1e-3)
    model.reset()
    for end in (50, 51, 52):
        torch.testing.assert_close(model.read(ids[:end]), plain.read(ids[:end]), atol=1e-3, rtol=1e-3)
    assert traced.count == 1


def test_steps_that_give_other_logits_are_not_used(traced):
    def wrong(forward):
        other = noisy_copy(tiny_llama(3), 4)
        return lambda *given, **more: other(*given, **more)

    with pytest.raises(CompileError, match="other logits"):
        compiled(plain_model(), faster=False, compiler=wrong)


def test_steps_that_are_no_faster_are_not_used_unless_asked(monkeypatch, traced):
    clock = iter(range(10**6))
    monkeypatch.setattr("fly_cli.cached_model.perf_counter", lambda: float(next(clock)))  # every forward takes 1 s
    with pytest.raises(CompileError, match=r"a compiled step takes 1000\.0 ms, a plain one 1000\.0"):
        compiled(plain_model(), faster=True, compiler=traced)


def test_what_the_compiler_cannot_take_is_told_in_one_line(traced):
    class Odd(type(tiny_llama(0))):
        def forward(self, *given, **more):
            print(end="")  # leaves the graph
            return super().forward(*given, **more)

    model = tiny_llama(0)
    model.__class__ = Odd
    with pytest.raises(CompileError, match="its steps cannot be compiled: ") as caught:
        compiled(CachedModel(model, name="odd"), faster=False, compiler=traced)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (next(iter(SLIDING.values())), "without a cache of fixed length"),
        (ROPE["llama, longrope"], "positions change"),
    ],
)
def test_models_with_other_layers_or_positions_are_not_compiled(make, reason):
    with pytest.raises(CompileError, match=reason):
        compiled(CachedModel(make().float().eval(), name="m"), faster=False)


@pytest.fixture
def load(tiny_pair_dirs, monkeypatch, traced):
    monkeypatch.setattr(compiled_module, "compile_step", traced)

    def load(**settings):
        settings = {"dtype": "float32", "device_map": "cpu", "draft_quantize": "none"} | settings
        target, draft = map(str, tiny_pair_dirs)
        return load_pair(ModelSettings(target=target, draft=draft, **settings), TextSettings(raw=True))

    return load


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"])
def test_a_compiled_draft_model_changes_no_text(load, sampling):
    pair, plain = load(compile="on"), load()
    assert (pair.placements[1].compiled, plain.placements[1].compiled) == (True, False)
    assert pair.describe()["placement"][1]["compiled"] and "compiled" not in plain.describe()["placement"][1]
    settings = DecodeSettings(mode="fly", max_new_tokens=60, draft_schedule="constant", window_size=2, **sampling)
    for text in ("the an in", "abc"):
        one, other = generate(pair, text, settings), generate(plain, text, settings)
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert one.summary.num_accepted_draft_tokens == other.summary.num_accepted_draft_tokens > 0


def test_on_a_cpu_nothing_is_compiled_unless_asked(load, traced):
    load()
    load(compile="off")
    assert traced.count == 0


def test_where_it_was_asked_for_and_cannot_be_the_settings_are_refused(load, monkeypatch):
    with pytest.raises(SettingsError, match="its int8 weights have kernels of their own") as caught:
        load(compile="on", draft_quantize="int8")
    assert "--draft-quantize none" in caught.value.hint
    monkeypatch.setattr(compiled_module, "no_compile", lambda *_: "it is odd")
    with pytest.raises(SettingsError, match="cannot draft with compiled steps: it is odd"):
        load(compile="on")
