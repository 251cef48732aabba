"""Every kind of cache and of rotary positions, drafted for in every way, against a loop without a cache."""

import copy
from functools import cache

import pytest
import torch
from architectures import ALL, CONTEXT, DYNAMIC, WINDOW, OneByOne, Uncached, codec
from models_for_tests import noisy_copy, tiny_llama

from fly_cli.cached_model import CachedModel
from fly_cli.decode import decode
from fly_cli.events import FinishReason, Origin, Round, Source, Started
from fly_cli.models import Pair
from fly_cli.prompts import Prompt
from fly_cli.sampling import Chooser
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings

NAMES = ["llama", "qwen2", "qwen3", "gpt2, learned positions", "phi3"]
NAMES += ["mistral, sliding", "gemma3, mixed"]
NAMES += ["llama, llama3 rope", "llama, yarn", "phi3, longrope", "phi3, longrope and sliding", "llama, longrope"]
NAMES += list(DYNAMIC)
SAMPLING = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 7}}
DRAFTERS = ["self", "other", LOOKUP]
CODEC = codec()
PROMPT = Prompt(id="p", messages=None, text="the an in the an in the ab")
COUNT = 36
OPEN_GATE = {"mode": "fly", "entropy_threshold": 0.0, "window_size": 1, "strict_first": 0}


@cache
def model_of(name):
    return ALL[name]()


def draft_of(name, drafter):
    match drafter:
        case "self":
            return model_of(name)
        case "near":
            return noisy_copy(model_of(name), 1, scale=0.06)
        case "other":
            return tiny_llama(5)
    return None


def pair_of(name, drafter, kind=CachedModel):
    models = [model_of(name), draft_of(name, drafter)]
    target, draft = (None if m is None else kind(m, name=name, vocab_size=CODEC.vocab_size) for m in models)
    return Pair(target, draft, CODEC, ModelSettings(draft=LOOKUP if draft is None else "draft"))


def run(pair, **settings):
    return list(decode(pair, PROMPT, DecodeSettings(max_new_tokens=COUNT, **settings)))


def tokens_of(events):
    return [events[0].first, *(token for event in events if isinstance(event, Round) for token in event.tokens)]


def ids_of(events):
    return [token.id for token in tokens_of(events)]


def reader(name):
    """Reads the model of that name as nobody caches, or as transformers does where that says something else."""
    return (OneByOne if name in DYNAMIC else Uncached)(model_of(name), name=name, vocab_size=CODEC.vocab_size)


@cache
def plain_ids(name, sampling):
    """A token a forward: no cache, no loop of ours."""
    prompt, plain = list(CODEC.encode(PROMPT).ids), reader(name)
    settings = DecodeSettings(**SAMPLING[sampling])
    chooser = Chooser(settings, CODEC.vocab_size, settings.seed or 0)
    ids = list(prompt)
    while len(ids) < len(prompt) + COUNT:
        ids += chooser.choose(chooser.warp(plain.read(ids)), len(ids)).tolist()
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_target_alone_writes_what_it_does_without_a_cache(name, sampling):
    events = run(pair_of(name, LOOKUP), mode="target", **SAMPLING[sampling])
    assert ids_of(events) == plain_ids(name, sampling)
    started = events[0]
    assert isinstance(started, Started)
    assert WINDOW < len(started.prompt_ids) < CONTEXT < len(started.prompt_ids) + COUNT


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_exact_text_is_that_of_the_target_without_a_cache_whoever_drafts(name, drafter, sampling):
    drafting = {"draft_schedule": "constant" if sampling == "greedy" else "adaptive", "draft_tokens": 6}
    events = run(pair_of(name, drafter), mode="exact", **drafting, **SAMPLING[sampling])
    assert ids_of(events) == plain_ids(name, sampling)
    if drafter == "self":
        assert sum(token.origin is Origin.EXACT for token in tokens_of(events)) > COUNT / 2


@pytest.mark.parametrize("name", ["llama", "gpt2, learned positions", "mistral, sliding", "gemma3, mixed"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_what_is_deferred_is_what_would_be_without_a_cache(name, sampling):
    settings = OPEN_GATE | {"draft_schedule": "constant", "draft_tokens": 6} | SAMPLING[sampling]
    plain = run(pair_of(name, "near", kind=Uncached), **settings)
    cached = run(pair_of(name, "near"), **settings)
    assert Origin.DEFERRED in [token.origin for token in tokens_of(cached)]
    assert tokens_of(cached) == tokens_of(plain)


@pytest.mark.parametrize("name", ["phi3, longrope", "phi3, longrope and sliding", "llama, yarn", *DYNAMIC])
def test_where_frequencies_change_with_the_length_the_text_is_that_of_transformers(name):
    prompt = list(CODEC.encode(PROMPT).ids)
    model = copy.deepcopy(model_of(name))  # which remembers longer texts
    generated = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=COUNT, pad_token_id=0)
    assert generated[0, len(prompt) :].tolist() == ids_of(run(pair_of(name, "self"), mode="exact"))


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, longrope"])
def test_no_forward_of_a_text_is_in_vain_where_longrope_changes_its_frequencies(name):
    model = model_of(name)
    pair = pair_of(name, LOOKUP)
    fed = []
    handle = model.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    events = run(pair, mode="exact", draft_schedule="constant", draft_tokens=6)
    handle.remove()
    prompt, again = [rows for rows in fed if rows > 7]  # all of it anew, once
    assert prompt == len(events[0].prompt_ids)
    assert CONTEXT < again <= CONTEXT + 7


@cache
def learned(positions):
    """A GPT-2 whose table of positions ends there: a forward beyond it fails."""
    return ALL["gpt2, learned positions"](n_positions=positions)


@pytest.mark.parametrize("length", [60, 62, 63])
@pytest.mark.parametrize("drafter", ["model", LOOKUP])
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_no_forward_goes_beyond_a_table_of_positions(length, drafter, schedule):
    target = CachedModel(learned(64), name="t", vocab_size=CODEC.vocab_size)
    draft = CachedModel(learned(64), name="d", vocab_size=CODEC.vocab_size) if drafter == "model" else None
    prompt = Prompt(id="p", messages=None, text="ab" * (length // 2) + "a" * (length % 2))
    settings = DecodeSettings(mode="exact", draft_tokens=8, max_new_tokens=20, draft_schedule=schedule)
    events = list(decode(Pair(target, draft, CODEC, ModelSettings()), prompt, settings))
    assert len(events[0].prompt_ids) == length
    assert len(ids_of(events)) == 64 - length
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [50, 100])
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_a_draft_model_whose_table_ends_earlier_steps_aside_with_one_note(length, lookup, schedule):
    target, draft = (CachedModel(learned(n), name="m", vocab_size=CODEC.vocab_size) for n in (256, 64))
    pair = Pair(target, draft, CODEC, ModelSettings())
    prompt = Prompt(id="p", messages=None, text="ab" * (length // 2))
    settings = {"max_new_tokens": 100, "draft_lookup": lookup, "draft_schedule": schedule}
    events = list(decode(pair, prompt, DecodeSettings(mode="exact", **settings)))
    plain = list(decode(pair, prompt, DecodeSettings(mode="target", **settings)))
    assert ids_of(events) == ids_of(plain)
    (note,) = [note for event in events if isinstance(event, Round) for note in event.notes]
    assert "context of 64 tokens" in note
    assert ("lookup" in note) == lookup
    copied = [token for e in events if isinstance(e, Round) for token in e.drafted if token.source is Source.COPY]
    assert lookup or not copied
