"""The default target with a real draft model of another family. `pytest -m pair`; SmolLM2 is 98 MB to fetch."""

import pytest

from fly_cli import DecodeSettings, ModelSettings, generate, load_pair

pytestmark = pytest.mark.pair


@pytest.fixture(scope="module")
def pair():
    return load_pair(ModelSettings(draft="smollm2-135m", dtype="float32"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_writes_what_the_target_writes_with_another_tokenizer_and_in_fewer_rounds(pair, temperature):
    prompt, same = "Write a Python function that adds two numbers.", {"temperature": temperature, "seed": 1}
    plain = generate(pair, prompt, DecodeSettings(mode="target", max_new_tokens=32, **same))
    exact = generate(pair, prompt, DecodeSettings(mode="exact", max_new_tokens=32, draft_tokens=5, **same))
    assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]
    assert exact.text == plain.text
    assert exact.summary.num_spec_steps < 0.8 * plain.summary.num_spec_steps
