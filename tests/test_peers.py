"""transformers' own decoders as arms: the same ids as ours, by the same rules."""

import pytest
import torch
from bench_helpers import VOCAB, pair_of, raw_codec
from models_for_tests import noisy_copy, tiny_llama
from spelling_helpers import SPELLINGS, translating_pair
from transformers import GenerationConfig

from fly_cli import peers
from fly_cli.bench import answer
from fly_cli.errors import DecodeError, PromptError, UsageError
from fly_cli.peers import answer_with
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings

KINDS = ["hf", "hf-assisted", "hf-lookup"]
PROMPTS = ["abc", "the the the an", "x", "a b a b a b a b a"]


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(0)
    return target, noisy_copy(target, 1)


@pytest.fixture
def pair(models):
    return pair_of(*models)


def settings(**changes):
    return DecodeSettings(mode="target", seed=0, **({"max_new_tokens": 24} | changes))


def asked(text="abc"):
    return Prompt("p", text=text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", PROMPTS)
def test_a_peer_writes_what_the_target_writes(pair, kind, text):
    ours = answer(pair, asked(text), "target", settings())
    theirs = answer_with(kind, pair, asked(text), settings())
    assert theirs.ids == ours.ids and theirs.text == ours.text
    assert theirs.figures["finish_reason"] == ours.figures["finish_reason"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 3, 10])
def test_a_peer_stops_at_the_same_end_token(models, kind, number):
    end = answer(pair_of(*models), asked(), "target", settings()).ids[number]
    pair = pair_of(*models, raw_codec(end_ids=[end]))
    ours = answer(pair, asked(), "target", settings())
    theirs = answer_with(kind, pair, asked(), settings())
    assert theirs.ids == ours.ids and theirs.ids[-1] == end
    assert (theirs.text, theirs.figures["finish_reason"]) == (ours.text, "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_stops_at_a_stop_string_and_counts_nothing_behind_it(pair, kind):
    whole = answer(pair, asked(), "target", settings()).text
    stop = (whole[6:8],)
    ours = answer(pair, asked(), "target", settings(stop=stop))
    theirs = answer_with(kind, pair, asked(), settings(stop=stop))
    assert stop[0] not in theirs.text
    assert (theirs.ids, theirs.text) == (ours.ids, ours.text)
    assert theirs.figures["num_new_tokens"] == len(ours.ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2])
def test_short_answers_have_figures_without_nonsense(pair, kind, n):
    figures = answer_with(kind, pair, asked(), settings(max_new_tokens=n)).figures
    assert figures["num_new_tokens"] == n and figures["num_prompt_tokens"] == 3
    assert (figures["decode_tps"] is None) == (figures["num_first_tokens"] == n)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_from_a_checkpoints_generation_config(models, kind):
    target, draft = models
    plain = answer_with(kind, pair_of(target, draft), asked(), settings())
    spoiled = GenerationConfig(
        do_sample=True, temperature=0.7, repetition_penalty=1.9, max_length=20, top_k=3, num_assistant_tokens=1
    )
    before = [model.generation_config for model in models]
    try:
        for model in models:
            model.generation_config = spoiled
        again = answer_with(kind, pair_of(target, draft), asked(), settings())
        assert again.ids == plain.ids
        assert all(model.generation_config is spoiled for model in models)
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config


def test_what_the_draft_runs_with_are_transformers_own_defaults(pair, monkeypatch):
    seen = {}
    model = pair.target.model

    def generate(*_, generation_config, assistant_model, stopping_criteria, **__):
        seen.update(generation_config.to_diff_dict())
        seen["draft"] = assistant_model.generation_config.to_diff_dict()
        stopping_criteria(torch.tensor([[1, 2, 3, 4]]), None)

    monkeypatch.setattr(model, "generate", generate, raising=False)
    answer_with("hf-assisted", pair, asked(), settings(max_new_tokens=1))
    assert seen.pop("draft").keys() <= {"transformers_version"}
    assert set(seen) <= {"max_new_tokens", "do_sample", "eos_token_id", "pad_token_id", "transformers_version"}


def test_times_are_taken_at_the_first_token_and_at_the_end(pair, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(peers, "perf_counter", lambda: now[0])

    def generate(*_, stopping_criteria, **__):
        ids = [[1, 2, 3]]
        for token, seconds in ((7, 2.0), (8, 0.5), (9, 0.5)):
            now[0] += seconds
            ids[0].append(token)
            stopping_criteria(torch.tensor(ids), None)

    monkeypatch.setattr(pair.target.model, "generate", generate, raising=False)
    figures = answer_with("hf", pair, asked(), settings(max_new_tokens=3)).figures
    assert (figures["ttft_s"], figures["decode_s"], figures["decode_tps"]) == (2.0, 1.0, 2.0)
    assert (figures["end_to_end_tps"], figures["tpot_ms"]) == (1.0, 500.0)


def test_a_block_that_comes_with_the_prefill_is_in_no_decode_speed(pair, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(peers, "perf_counter", lambda: now[0])

    def generate(*_, stopping_criteria, **__):
        ids = [1, 2, 3]
        for block in ([7] * 5, [8] * 3, [9] * 2):
            now[0] += 2.0
            ids += block
            stopping_criteria(torch.tensor([ids]), None)

    monkeypatch.setattr(pair.target.model, "generate", generate, raising=False)
    figures = answer_with("hf-assisted", pair, asked(), settings(max_new_tokens=10)).figures
    assert (figures["num_new_tokens"], figures["num_first_tokens"], figures["ttft_s"]) == (10, 5, 2.0)
    assert (figures["decode_tps"], figures["tpot_ms"], figures["end_to_end_tps"]) == (5 / 4, 800.0, 10 / 6)


@pytest.mark.parametrize("kind", KINDS)
def test_first_tokens_are_those_of_the_first_forward(pair, kind):
    figures = answer_with(kind, pair, asked("a b a b a b a b a"), settings()).figures
    assert (figures["num_first_tokens"] == 1) if kind == "hf" else (1 <= figures["num_first_tokens"] < 24)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_chooses_a_padded_row_fails_with_the_reason_where_our_arms_go_on(kind):
    target = tiny_llama(0, vocab_size=VOCAB + 16)
    with torch.no_grad():  # the padded row is the twin of what would be chosen next, and stronger
        first = answer(pair_of(target), asked(), "target", settings()).ids[3]
        target.lm_head.weight[VOCAB + 5] = 2 * target.lm_head.weight[first]
    pair = pair_of(target, noisy_copy(target, 1), raw_codec(vocab_rows=VOCAB + 16))
    assert len(answer(pair, asked(), "target", settings()).ids) == 24
    with pytest.raises(DecodeError, match=f"transformers chose id {VOCAB + 5}, a padded row"):
        answer_with(kind, pair, asked(), settings())


def test_a_prompt_that_is_too_long_is_refused_before_any_forward():
    pair = pair_of(tiny_llama(0, max_position_embeddings=16))
    for kind in ("hf", "hf-lookup"):
        with pytest.raises(PromptError, match="16"):
            answer_with(kind, pair, asked("a" * 16), settings())
        assert len(answer_with(kind, pair, asked("a" * 12), settings()).ids) == 4


def test_an_assistant_is_needed_for_assisted(models):
    with pytest.raises(UsageError, match="needs a draft model"):
        answer_with("hf-assisted", pair_of(models[0]), asked(), settings())


def test_a_draft_with_a_differently_padded_embedding_can_assist():
    target = tiny_llama(0)
    pair = pair_of(target, tiny_llama(0, vocab_size=VOCAB + 16))
    ours = answer(pair, asked(), "target", settings())
    assert answer_with("hf-assisted", pair, asked(), settings()).ids == ours.ids


@pytest.mark.parametrize("names", [("bytes", "other bytes"), ("other bytes", "llama"), ("llama", "bytes")])
@pytest.mark.parametrize("text", PROMPTS)
def test_a_draft_with_another_tokenizer_can_assist(names, text):
    spellings = [SPELLINGS[name] for name in names]
    target, draft = (tiny_llama(0, vocab_size=spelling.codec.vocab_rows) for spelling in spellings)
    pair = translating_pair(target, spellings[0], draft, spellings[1])
    ours = answer(pair, asked(text), "target", settings())
    theirs = answer_with("hf-assisted", pair, asked(text), settings())
    assert (theirs.ids, theirs.text) == (ours.ids, ours.text)
