"""On a real accelerator. `pytest -m gpu`; skipped where there is none."""

import pytest
import torch

from fly_cli.api import generate
from fly_cli.models import load_pair
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings

COUNT = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="needs a GPU")]
SPLIT = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": COUNT - 1}
SPLIT |= {"model.norm": COUNT - 1, "lm_head": COUNT - 1}
PLACES = {
    "both on the GPU": {"device_map": "cuda:0"},
    "planned": {"device_map": "auto"},
    "the draft on the CPU": {"device_map": "cuda:0", "draft_device": "cpu"},
    "the target on the CPU": {"device_map": "cpu", "draft_device": "cuda:0"},
    "the target in part on the CPU": {"device_map": SPLIT | {"model.layers.0": "cpu"}},
    "the target over all GPUs": {"device_map": SPLIT, "draft_device": f"cuda:{COUNT - 1}"},
}
WAYS = {
    "exact": {"mode": "exact"},
    "fly": {"mode": "fly", "entropy_threshold": 0.0, "window_size": 1, "strict_first": 0},
    "sampled": {"mode": "exact", "temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3},
}


def ids_of(folders, way, draft=True, **places):
    target, small = folders
    settings = {"dtype": "float32", "draft_quantize": "none"} | places
    models = ModelSettings(target=str(target), draft=str(small) if draft else LOOKUP, **settings)
    made = DecodeSettings(max_new_tokens=40, draft_tokens=5, draft_schedule="constant", **WAYS[way])
    answer = generate(load_pair(models, TextSettings(raw=True)), "the an in the an in the", made)
    return [token.id for token in answer.tokens]


@pytest.mark.parametrize("way", WAYS)
def test_compiled_steps_of_the_draft_model_change_no_text(tiny_pair_dirs, way):
    places = {"device_map": "cuda:0"}
    compiled, plain = (ids_of(tiny_pair_dirs, way, **places, compile=asked) for asked in ("on", "off"))
    assert compiled == plain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_the_text_does_not_depend_on_where_the_models_are(tiny_pair_dirs, place, way):
    assert ids_of(tiny_pair_dirs, way, **PLACES[place]) == ids_of(tiny_pair_dirs, way, device_map="cpu")
