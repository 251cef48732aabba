"""Laws of the round loop, on scripted and tiny random models."""

import math
from collections import Counter
from io import StringIO
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_for_tests import ScriptedModel, byte_tokenizer, noisy_copy, says, sure, tiny_config, tiny_llama, unsure
from scipy.stats import chisquare
from transformers import MistralConfig, MistralForCausalLM

from fly_cli.cached_model import CachedModel
from fly_cli.decode import decode
from fly_cli.errors import DecodeError, PromptError
from fly_cli.events import DRAFTED_ORIGINS, Drafted, Finished, FinishReason, Origin, Round, Started
from fly_cli.models import Pair
from fly_cli.prompts import Prompt
from fly_cli.render import PlainRenderer
from fly_cli.settings import LOOKUP, DecodeSettings, ModelSettings, TextSettings
from fly_cli.text import Codec

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
VOCAB = 384


def raw_codec(vocab_rows=VOCAB, **text):
    return Codec(TOKENIZER, settings=TextSettings(raw=True, **text), end_ids=(), vocab_rows=vocab_rows)


def pair_of(target, draft=None, codec=None):
    codec = codec or raw_codec()
    cached = [
        CachedModel(m, name="tiny", vocab_size=codec.vocab_size) if m is not None else None for m in (target, draft)
    ]
    return Pair(cached[0], cached[1], codec, ModelSettings(draft="draft" if draft is not None else LOOKUP))


def scripted(target, draft=None, **more):
    models = [ScriptedModel(script, VOCAB, **more) if script else None for script in (target, draft)]
    return pair_of(*models)


def run(pair, text="abc", record=False, **changes):
    return list(decode(pair, Prompt(id="p", messages=None, text=text), DecodeSettings(**changes), record=record))


def tokens_of(events):
    return [events[0].first, *(token for event in events if isinstance(event, Round) for token in event.tokens)]


def ids_of(events):
    return [token.id for token in tokens_of(events)]


def origins_of(events):
    return [token.origin for token in tokens_of(events)]


def plain_greedy(model, prompt_ids, count):
    """One forward over everything for each token: no cache, no loop of ours."""
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits[: raw_codec().vocab_size].argmax()))
            if ids[-1] in raw_codec().stop_ids:
                break
    return ids[len(prompt_ids) :]


TARGET = tiny_llama(0)
DRAFTS = {"good": noisy_copy(TARGET, 1), "bad": tiny_llama(5), "same": TARGET}
PAIRS = {name: pair_of(TARGET, draft) for name, draft in DRAFTS.items()} | {"lookup": pair_of(TARGET)}


# What is committed


@pytest.mark.parametrize("text", ["abc", "the an in the an in the", "x"])
def test_target_mode_is_plain_greedy_decoding(text):
    events = run(PAIRS["lookup"], text, mode="target", max_new_tokens=40)
    assert ids_of(events) == plain_greedy(TARGET, events[0].prompt_ids, 40)
    assert set(origins_of(events)) == {Origin.TARGET}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(PAIRS)),
    draft_tokens=st.integers(1, 16),
    schedule=st.sampled_from(["constant", "adaptive"]),
    lookup=st.booleans(),
    seed=st.integers(0, 3),
    sampling=st.sampled_from([{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}]),
    text=st.sampled_from(["abc", "the an in the an in the", "0"]),
)
def test_exact_mode_writes_what_target_mode_writes(name, draft_tokens, schedule, lookup, seed, sampling, text):
    same = {"max_new_tokens": 40, "seed": seed, **sampling}
    target = run(PAIRS[name], text, mode="target", **same)
    drafting = {"draft_tokens": draft_tokens, "draft_schedule": schedule, "draft_lookup": lookup}
    exact = run(PAIRS[name], text, mode="exact", **drafting, **same)
    assert ids_of(exact) == ids_of(target)
    assert exact[-1].text == target[-1].text


def test_a_model_that_drafts_for_itself_is_always_right():
    for changes in ({}, {"temperature": 1.0, "seed": 4}):
        events = run(
            PAIRS["same"], mode="exact", max_new_tokens=80, draft_tokens=7, draft_schedule="constant", **changes
        )
        rounds = [event for event in events if isinstance(event, Round)]
        assert all(event.verdict.rejection is None for event in rounds)
        assert {len(event.drafted) for event in rounds[:-1]} == {7}


def test_an_entropy_threshold_that_nothing_reaches_makes_fly_exact():
    for changes in ({"entropy_threshold": 100.0}, {"window_size": 15}):
        fly = run(PAIRS["good"], mode="fly", max_new_tokens=60, **changes)
        assert ids_of(fly) == ids_of(run(PAIRS["good"], mode="target", max_new_tokens=60))


def test_copied_text_is_never_deferred_for_it_is_no_models_opinion():
    open_gate = {"entropy_threshold": 0.0, "window_size": 1, "strict_first": 0, "max_new_tokens": 80}
    for schedule in ("constant", "adaptive"):
        events = run(PAIRS["lookup"], "the an in the an in the", mode="fly", draft_schedule=schedule, **open_gate)
        assert Origin.DEFERRED not in origins_of(events)
        assert ids_of(events) == ids_of(
            run(PAIRS["lookup"], "the an in the an in the", mode="target", max_new_tokens=80)
        )


def test_an_open_gate_defers_and_changes_the_text():
    open_gate = {"entropy_threshold": 0.0, "window_size": 1, "strict_first": 0}
    events = run(PAIRS["good"], mode="fly", max_new_tokens=150, **open_gate)
    assert Origin.DEFERRED in origins_of(events)
    assert ids_of(events) != ids_of(run(PAIRS["good"], mode="target", max_new_tokens=150))


def test_the_first_token_is_the_target_own_and_comes_before_any_draft():
    pair = scripted(says([10, 11, 12, 13, 14], 3), says([10, 11, 12, 13, 14], 3))
    events = decode(pair, Prompt(id="p", messages=None, text="abc"), DecodeSettings(max_new_tokens=4))
    started = next(events)
    assert isinstance(started, Started)
    assert (started.first.id, started.first.origin) == (10, Origin.TARGET)
    assert pair.draft.model.num_forwards == 1  # the probe at load


def test_every_token_has_the_origin_of_how_it_got_there():
    said = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]

    def target(sequence):
        index = len(sequence) - 3
        if index == 4:
            return unsure(14, 50)
        return sure(said[index] if index < len(said) else 30)

    drafted = [10, 11, 12, 13, 50, 15, 16, 17, 99, 19, 20, 21]
    events = run(scripted(target, says(drafted, 3)), max_new_tokens=12, draft_tokens=5, window_size=2, strict_first=0)
    # 10 from prefill | 11 12 13 50 15: the window behind 50 does not fit | 15 16 17 99: no doubt | 19 20 fill the room
    assert ids_of(events) == said
    signs = {"exact": "=", "deferred": "d", "corrected": "C", "bonus": "B", "target": "T"}
    drawn = "".join(signs[origin] for origin in origins_of(events))
    assert drawn == "T===C===C==B"


def test_a_deferred_token_stays_and_the_target_goes_on_from_it():
    def target(sequence):
        index = len(sequence) - 3
        if index == 3:
            return unsure(13, 50)
        return sure(60 + index if 50 in sequence else 10 + index)

    draft = says([10, 11, 12, 50, 64, 65, 66, 67], 3)
    events = run(scripted(target, draft), max_new_tokens=8, draft_tokens=7, window_size=3)
    assert ids_of(events) == [10, 11, 12, 50, 64, 65, 66, 67]
    assert origins_of(events)[3] == Origin.DEFERRED


def test_a_banned_token_is_rejected_however_clean_its_window():
    def target(sequence):
        index = len(sequence) - 3
        return {13: 1.0, 14: 0.99, 15: 0.98} if index == 3 else sure(10 + index)

    events = run(
        scripted(target, says([10, 11, 12, 50, 14, 15, 16, 17], 3)), max_new_tokens=8, draft_tokens=7, window_size=3
    )
    assert 50 not in ids_of(events)


def test_an_end_token_is_never_deferred_into_or_out_of():
    def target(sequence):
        index = len(sequence) - 3
        return unsure(END, 50) if index == 3 else sure(10 + index)

    drafting = says([10, 11, 12, 50, 14, 15, 16, 17], 3)
    events = run(scripted(target, drafting), max_new_tokens=9, draft_tokens=7, window_size=3)
    assert ids_of(events) == [10, 11, 12, END]

    def other(sequence):
        index = len(sequence) - 3
        return unsure(13, END) if index == 3 else sure(10 + index)

    events = run(scripted(other, says([10, 11, 12, END], 3)), max_new_tokens=9, draft_tokens=7, window_size=1)
    assert END not in ids_of(events)


# Stopping


@pytest.mark.parametrize("mode", ["fly", "exact", "target"])
@pytest.mark.parametrize("n", range(1, 10))
def test_never_more_than_max_new_tokens_and_exactly_as_many_without_a_stop(n, mode):
    events = run(PAIRS["good"], mode=mode, max_new_tokens=n, draft_tokens=8)
    full = run(PAIRS["good"], mode="target", max_new_tokens=9)
    assert len(ids_of(events)) == n
    assert events[-1].reason is FinishReason.LENGTH
    assert ids_of(events) == ids_of(full)[:n]


def test_an_end_token_as_the_very_first_gives_an_empty_answer():
    events = run(scripted(says([END], 3), says([END], 3)), max_new_tokens=20)
    assert [type(event) for event in events] == [Started, Finished]
    assert events[-1].text == ""
    assert (events[-1].reason, events[-1].stop_id) == (FinishReason.STOP, END)


def test_nothing_behind_an_end_token_is_committed_shown_or_counted():
    said = [10, 11, 12, END, 13, 14, 15, 16]
    events = run(scripted(says(said, 3), says(said, 3)), max_new_tokens=50, draft_tokens=7)
    assert ids_of(events) == said[:4]
    assert events[-1].text == TOKENIZER.decode(said[:3])


def test_the_drafter_goes_on_after_its_end_token_was_rejected():
    said = list(range(10, 30))
    drafted = [END if i % 4 == 1 else token for i, token in enumerate(said)]
    events = run(scripted(says(said, 3), says(drafted, 3)), max_new_tokens=20, draft_tokens=3, mode="exact")
    assert ids_of(events) == said
    assert sum(event.verdict.num_kept for event in events if isinstance(event, Round)) > 0


@pytest.mark.parametrize("name", ["good", "lookup"])
def test_a_prompt_after_another_decodes_as_if_alone(name):
    alone = run(pair_of(TARGET, DRAFTS.get(name)), "second prompt", max_new_tokens=30)
    pair = pair_of(TARGET, DRAFTS.get(name))
    run(pair, "first", max_new_tokens=17)
    after = run(pair, "second prompt", max_new_tokens=30)
    assert ids_of(after) == ids_of(alone)
    assert [e.evidence for e in after if isinstance(e, Round)] == [e.evidence for e in alone if isinstance(e, Round)]


@pytest.mark.parametrize("prompt", ["a" * 60, "a" * 62, "a" * 63])
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_decoding_ends_at_the_end_of_the_context(prompt, drafter):
    small = tiny_llama(0, max_position_embeddings=64)
    pair = pair_of(small, noisy_copy(small, 1) if drafter == "model" else None)
    events = run(pair, prompt, max_new_tokens=20, draft_tokens=8)
    assert len(events[0].prompt_ids) + len(ids_of(events)) == 64
    assert events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [64, 65, 500])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    pair = pair_of(tiny_llama(0, max_position_embeddings=64))
    with pytest.raises(PromptError, match=rf"{length} tokens.* 64"):
        run(pair, "a" * length)
    assert len(ids_of(run(pair, "abc", max_new_tokens=5))) == 5


def test_a_draft_model_with_a_shorter_context_steps_aside():
    short = noisy_copy(tiny_llama(0, max_position_embeddings=64), 1)
    target = tiny_llama(0, max_position_embeddings=256)
    for prompt in ("a" * 50, "a" * 100):
        events = run(pair_of(target, short), prompt, mode="exact", max_new_tokens=120)
        assert ids_of(events) == ids_of(run(pair_of(target), prompt, mode="target", max_new_tokens=120))
        notes = [note for event in events if isinstance(event, Round) for note in event.notes]
        assert len(notes) == 1


def test_a_row_of_nan_is_an_error_that_names_the_token():
    def script(sequence):
        return {1: math.nan} if len(sequence) == 8 else sure(10)

    with pytest.raises(DecodeError, match="new token 6 "):
        run(scripted(script, None), mode="target")


# Text


def test_the_pieces_of_the_tokens_make_up_the_text():
    for name in PAIRS:
        events = run(PAIRS[name], max_new_tokens=60, temperature=1.0, seed=1)
        finished = events[-1]
        assert "".join(token.text for token in tokens_of(events)) + finished.tail == finished.text
        shown = [token for token in ids_of(events) if token not in raw_codec().stop_ids]
        assert finished.text == TOKENIZER.decode(shown, skip_special_tokens=True)


def test_a_stop_string_ends_the_answer_inside_a_token_and_a_block():
    said = TOKENIZER.encode("alpha beta gamma delta")
    pair = scripted(says(said, 3), says(said, 3))
    events = run(pair, stop=("ta ga",), max_new_tokens=60)
    assert events[-1].text == "alpha be"
    assert (events[-1].reason, events[-1].stop) == (FinishReason.STOP, "ta ga")
    assert "".join(token.text for token in tokens_of(events))[: len("alpha be")] == "alpha be"


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [("AB CD EF", ("B CD E",), "A"), ("a...b", ("..",), "a"), ("xyz", ("x",), ""), ("abc", ("bcd", "c"), "ab")],
)
@pytest.mark.parametrize("mode", ["fly", "target"])
def test_what_a_pipe_shows_ends_before_the_stop_string(said, stop, kept, mode):
    ids = TOKENIZER.encode(said)
    stream = StringIO()
    renderer = PlainRenderer(stream)
    for event in run(scripted(says(ids, 3), says(ids, 3)), stop=stop, mode=mode, max_new_tokens=60):
        renderer.handle(event)
    assert stream.getvalue().removesuffix("\n") == kept


class ByteRunCodec(Codec):
    """A codec whose bytes give text only once the run has ended, as byte tokens of SentencePiece do."""

    def detokenizer(self, prompt_ids=()):
        return ByteRun()


class ByteRun:
    def __init__(self, pending=()):
        self.pending = list(pending)

    def push(self, token_id):
        self.pending.append(token_id)
        return ""

    def flush(self):
        return TOKENIZER.decode(self.pending)

    def fork(self):
        return ByteRun(self.pending)


@pytest.mark.parametrize("mode", ["fly", "target"])
def test_a_stop_string_in_bytes_that_are_not_text_yet_ends_the_answer_at_once(mode):
    said = TOKENIZER.encode("가한한한한한한한한한한")
    codec = ByteRunCodec(TOKENIZER, settings=TextSettings(raw=True), end_ids=(), vocab_rows=VOCAB)
    models = [ScriptedModel(says(said, 3), VOCAB) for _ in range(2)]
    events = run(pair_of(*models, codec), stop=("한한",), mode=mode, max_new_tokens=60)
    assert events[-1].text == "가"
    assert (events[-1].reason, events[-1].stop) == (FinishReason.STOP, "한한")
    assert len(ids_of(events)) == len(TOKENIZER.encode("가한한"))


def test_two_equal_prompts_in_a_row_decode_alike_with_a_sliding_draft_model():
    torch.manual_seed(0)
    config = tiny_config(sliding_window=8, model_type="mistral").to_dict()
    sliding = MistralForCausalLM(MistralConfig(**config)).float().eval()
    pair = pair_of(sliding, noisy_copy(sliding, 1))
    first, second = (run(pair, "abcdefghijkl", max_new_tokens=30) for _ in range(2))
    assert ids_of(first) == ids_of(second)
    assert ids_of(first) == ids_of(run(pair, "abcdefghijkl", mode="target", max_new_tokens=30))


def test_text_that_may_become_a_stop_string_is_held_and_released():
    said = TOKENIZER.encode("pleas")
    events = run(scripted(says([*said, END], 3), None), stop=("assistant",), mode="target")
    held = [event.held for event in events if isinstance(event, Round)]
    assert max(held) == 2
    assert events[-1].text == "pleas"


def test_previews_show_the_text_that_a_kept_draft_would_add():
    said = TOKENIZER.encode("né 한 the end")
    events = run(scripted(says([*said, END], 3), says([*said, END], 3)), draft_tokens=5, max_new_tokens=50)
    for drafted, round_ in pairwise(e for e in events if isinstance(e, Drafted | Round)):
        if isinstance(drafted, Drafted):
            kept = round_.tokens[: round_.verdict.num_kept]
            assert [t.text for t in drafted.tokens[: len(kept)]] == [t.text for t in kept]


# Sampling


def test_a_seed_fixes_the_text_and_its_absence_does_not():
    def text(**changes):
        return run(PAIRS["good"], temperature=1.0, max_new_tokens=40, **changes)[-1].text

    assert text(seed=7) == text(seed=7)
    assert text(seed=7) != text(seed=8)
    assert text() != text()


def test_the_seed_that_was_drawn_is_reported_and_gives_the_text_again():
    events = run(PAIRS["good"], temperature=1.0, max_new_tokens=40)
    again = run(PAIRS["good"], temperature=1.0, max_new_tokens=40, seed=events[0].settings["seed"])
    assert again[-1].text == events[-1].text


P = {10: 0.4, 11: 0.25, 12: 0.15, 13: 0.1, 14: 0.06, 15: 0.04}
Q = {10: 0.1, 11: 0.3, 12: 0.3, 13: 0.1, 14: 0.1, 15: 0.1}


def logs(probabilities):
    return {token: math.log(p) for token, p in probabilities.items()}


def expected(temperature, top_p):
    """The distribution after temperature and top-p, worked out with plain floats."""
    powered = {token: p ** (1 / temperature) for token, p in P.items()}
    total = sum(powered.values())
    kept, mass = {}, 0.0
    for token, p in sorted(powered.items(), key=lambda item: -item[1]):
        if mass >= top_p:
            break
        kept[token] = p / total
        mass += p / total
    return {token: p / mass for token, p in kept.items()}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.6), (1.5, 0.9)])
@pytest.mark.parametrize("drafter", ["none", "model", "lookup", "model and lookup"])
def test_sampled_tokens_follow_the_target_distribution(drafter, temperature, top_p):
    draft = None if drafter in ("none", "lookup") else (lambda _: logs(Q))
    events = run(
        scripted(lambda _: logs(P), draft),
        mode="target" if drafter == "none" else "exact",
        draft_lookup=drafter == "model and lookup",
        draft_tokens=6,
        max_new_tokens=1500,
        temperature=temperature,
        top_p=top_p,
        seed=11,
    )
    wanted = expected(temperature, top_p)
    counts = Counter(ids_of(events))
    assert set(counts) <= set(wanted)
    assert chisquare([counts[t] for t in wanted], [1500 * p for p in wanted.values()]).pvalue > 0.001


def test_a_token_outside_the_nucleus_is_not_deferred_either():
    def target(_):
        return logs(P)

    events = run(
        scripted(target, lambda _: logs(Q)),
        temperature=1.0,
        top_p=0.6,
        max_new_tokens=1500,
        entropy_threshold=0.0,
        window_size=1,
        seed=2,
    )
    assert set(ids_of(events)) == {10, 11}


# Lookup


def test_lookup_does_not_copy_past_an_end_token_of_the_prompt():
    turn = [20, 21, 22]
    prompt = [*turn, END, 30, 31, *turn[:1]]
    said = [*turn[1:], END]
    pair = scripted(says(said, len(prompt)), None)
    pair.codec.encode = lambda _: type("Encoded", (), {"ids": tuple(prompt), "notes": ()})()
    events = run(pair, mode="exact", max_new_tokens=20)
    assert ids_of(events) == said
    assert all(token.id not in (30, 31) for e in events if isinstance(e, Drafted) for token in e.tokens)


def test_without_any_match_lookup_makes_plain_steps_and_loses_nothing():
    said = list(range(100, 120))
    events = run(scripted(says(said, 3), None), max_new_tokens=20)
    assert ids_of(events) == said
    assert {len(e.drafted) for e in events if isinstance(e, Round)} == {0}


def test_lookup_decodes_without_any_end_token():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    codec = Codec(tokenizer, settings=TextSettings(raw=True), end_ids=(), vocab_rows=VOCAB)
    events = run(pair_of(TARGET, codec=codec), "a b c d a b", max_new_tokens=15)
    assert len(ids_of(events)) == 15


# Books


def test_each_round_accounts_for_its_time_and_tokens():
    for mode in ("fly", "exact", "target"):
        events = run(PAIRS["good"], mode=mode, max_new_tokens=50, draft_tokens=4)
        for event in events:
            if not isinstance(event, Round):
                continue
            assert event.tokens
            assert event.other_seconds >= 0
            assert event.draft_forward_seconds <= event.draft_seconds
            assert event.verify_forward_seconds <= event.verify_seconds
            kept = event.tokens[: event.verdict.num_kept]
            assert all(token.origin in DRAFTED_ORIGINS for token in kept)
            assert all(token.origin not in DRAFTED_ORIGINS for token in event.tokens[len(kept) :])


def test_recording_changes_no_token():
    plain = run(PAIRS["good"], max_new_tokens=60)
    recorded = run(PAIRS["good"], max_new_tokens=60, record=True)
    assert ids_of(plain) == ids_of(recorded)
    assert all(h is not None for e in recorded if isinstance(e, Round) for h in e.evidence.entropies)


def test_the_drafter_cache_stays_in_step_with_the_committed_ids():
    pair = pair_of(TARGET, DRAFTS["good"])
    ids = []
    for event in decode(pair, Prompt(id="p", messages=None, text="abc"), DecodeSettings(max_new_tokens=80)):
        if isinstance(event, Started):
            ids = [*event.prompt_ids, event.first.id]
        if isinstance(event, Round):
            drafted = [token.id for token in event.drafted]
            fresh = CachedModel(DRAFTS["good"], name="fresh", vocab_size=pair.codec.vocab_size)
            sequence = ids + drafted[:-1]
            torch.testing.assert_close(pair.draft.read(sequence), fresh.read(sequence), atol=1e-4, rtol=1e-3)
            ids += [token.id for token in event.tokens]
