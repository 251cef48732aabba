"""A real model with mixed layers, most of them sliding: Gemma 3 270M. `pytest -m pair`; fetched once, 253 MB."""

import pytest
import torch
from real_models import gemma_gguf

from fly_cli import DecodeSettings, ModelSettings, TextSettings, generate, load_pair

pytestmark = pytest.mark.pair
WINDOW = 512
STORY = "The old keeper of the lighthouse at {place} wrote in his book that the {thing} came back at night.\n"
PLACES = ["Skagen", "Fastnet", "Eddystone", "Muckle Flugga", "Bell Rock", "Kullen"]
THINGS = ["fog", "grey seal", "lost boat", "north wind"]


@pytest.fixture(scope="module")
def pair():
    return load_pair(ModelSettings(target=str(gemma_gguf()), draft="lookup", dtype="float32"), TextSettings(raw=True))


@pytest.mark.parametrize("num_lines", [21, 24], ids=["the answer passes the window", "the prompt does"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_exact_writes_what_the_target_writes_past_the_window_of_its_sliding_layers(pair, num_lines, sampling):
    lines = [STORY.format(place=place, thing=thing) for thing in THINGS for place in PLACES]
    story, limit = "".join(lines[:num_lines]), {"max_new_tokens": 64, **sampling}
    exact = generate(pair, story, DecodeSettings(mode="exact", **limit))
    plain = generate(pair, story, DecodeSettings(mode="target", **limit))
    assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]
    assert exact.summary.num_accepted_draft_tokens > 0
    prompt_ids, new_ids = exact.events[0].prompt_ids, [token.id for token in exact.tokens]
    assert (len(prompt_ids) < WINDOW) == (num_lines == 21)
    assert len(prompt_ids) + len(new_ids) > WINDOW + 16
    if not sampling:  # nor is it another text without any cache
        ids = torch.tensor([[*prompt_ids, *new_ids[:-1]]])
        with torch.inference_mode():
            rows = pair.target.model(ids, use_cache=False, logits_to_keep=len(new_ids)).logits[0]
        assert rows[:, : pair.codec.vocab_size].argmax(dim=-1).tolist() == new_ids
