"""A draft model whose ids are not the target's."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_for_tests import ScriptedModel, says, sure, tiny_llama
from spelling_helpers import SPELLINGS, TEXTS, TOKENIZERS, codec_of, said, translating_pair

from fly_cli.decode import decode, make_drafter
from fly_cli.events import Drafted, Round, Started
from fly_cli.prompts import Prompt
from fly_cli.sampling import Chooser
from fly_cli.settings import DecodeSettings, TextSettings
from fly_cli.text import Codec
from fly_cli.translate import Speech, TranslatingDrafter, draft_prompt_ids

NAMES = sorted(TOKENIZERS)
ANSWER = (
    "Hello world! The model answers the user, systematically:\n\n    def search(items):\n        return items\n\n"
    "한국어 좋아, naïve “questions” 😀😀 hello worldwide; x != y, z ?  'a' 42.\n貓 is a cat."
)


def end_of(spelling):
    return spelling.codec.tokenizer.eos_token_id


def speaker(spelling, num_prompt_ids, answer, end=True):
    """A model that knows the answer as text, and says it in the longest tokens that it has."""
    ids = {spelling.bytes_of(i): i for i in range(spelling.codec.vocab_size) if spelling.bytes_of(i)}
    longest = max(map(len, ids))

    def script(sequence):
        so_far = said(spelling, sequence[num_prompt_ids:])
        rest = answer.encode()[len(so_far) :]
        if not answer.encode().startswith(so_far) or not rest:
            return sure(end_of(spelling))
        return sure(next(ids[rest[:n]] for n in range(longest, 0, -1) if rest[:n] in ids))

    return ScriptedModel(script, spelling.codec.vocab_rows)


def knowing_pair(target, draft, answer=ANSWER, prompt="abc"):
    """A target that writes the answer as its tokenizer does, and a draft model that knows it."""
    target, draft = SPELLINGS[target], SPELLINGS[draft]
    num_target, num_draft = len(target.codec.plain_ids(prompt)), len(draft.codec.plain_ids(prompt))
    writer = ScriptedModel(says([*target.ids_of(answer), end_of(target)], num_target), target.codec.vocab_rows)
    return translating_pair(writer, target, speaker(draft, num_draft, answer), draft)


def run(pair, text="abc", **changes):
    return list(decode(pair, Prompt("p", text=text), DecodeSettings(**({"max_new_tokens": 400} | changes))))


def ids_of(events):
    rounds = [event for event in events if isinstance(event, Round)]
    return [events[0].first.id, *(token.id for event in rounds for token in event.tokens)]


def acceptance(events):
    """Mean acceptance length: tokens a round."""
    rounds = [event for event in events if isinstance(event, Round)]
    return sum(len(event.tokens) for event in rounds) / len(rounds)


PAIRS = [(target, draft) for target in NAMES for draft in NAMES if target != draft]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_model_that_knows_the_answer_is_nearly_always_right(target, draft):
    events = run(knowing_pair(target, draft), mode="exact", draft_tokens=8, draft_schedule="constant")
    assert events[-1].text.strip() == ANSWER
    assert acceptance(events) > 7, (target, draft)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=5, deadline=None)
@given(answer=TEXTS)
def test_what_is_drafted_says_what_the_draft_model_said(target, draft, answer):
    pair = knowing_pair(target, draft, answer)
    spelling, position = pair.translation.target, 0
    for event in run(pair, mode="exact", draft_tokens=6, draft_schedule="constant"):
        if isinstance(event, Started):
            position = len(spelling.bytes_of(event.first.id))
        elif isinstance(event, Drafted):
            drafted = [token.id for token in event.tokens]
            assert said(spelling, drafted) == answer.encode()[position:][: len(said(spelling, drafted))]
            assert not spelling.codec.special_ids.intersection(drafted)
        elif isinstance(event, Round):
            position += len(said(spelling, [token.id for token in event.tokens]))


RANDOM = {name: tiny_llama(seed, vocab_size=SPELLINGS[name].codec.vocab_rows) for seed, name in enumerate(NAMES)}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.sampled_from(PAIRS),
    draft_tokens=st.integers(1, 12),
    schedule=st.sampled_from(["constant", "adaptive"]),
    seed=st.integers(0, 3),
    sampling=st.sampled_from([{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}]),
    text=st.sampled_from(["abc", "the an in the an in the", "한국어 “hello”"]),
)
def test_exact_mode_writes_what_target_mode_writes_across_tokenizers(
    names, draft_tokens, schedule, seed, sampling, text
):
    """Random models write bytes that are no characters, special tokens in the middle, and everything else."""
    target, draft = names
    pair = translating_pair(RANDOM[target], SPELLINGS[target], RANDOM[draft], SPELLINGS[draft])
    same = {"max_new_tokens": 40, "seed": seed, **sampling}
    plain = run(pair, text, mode="target", **same)
    exact = run(pair, text, mode="exact", draft_tokens=draft_tokens, draft_schedule=schedule, **same)
    assert ids_of(exact) == ids_of(plain)
    assert exact[-1].text == plain[-1].text
    special = SPELLINGS[target].codec.special_ids
    drafted = [token for event in exact if isinstance(event, Drafted) for token in event.tokens]
    assert all(token.source == "copy" or token.id not in special for token in drafted)


# What the draft model sees


CHAT = [{"role": "user", "content": "Hello world"}]


def prompt_ids(target, draft, prompt, *, system=None, template=True):
    """The draft model's ids of a prompt; `template`: whether it has a chat template."""
    own = {} if template else {"raw": True}
    target = codec_of(target, **({"raw": False, "system": system} if system else {"raw": False}))
    return draft_prompt_ids(target, codec_of(draft, **({"raw": False} | own)), prompt)


def test_the_draft_model_sees_the_chat_as_its_own_template_writes_it():
    shown = TOKENIZERS["llama"].decode(prompt_ids("bytes", "llama", Prompt("p", text="Hello world")))
    assert shown == "<s>[INST] Hello world [/INST]"
    assert prompt_ids("bytes", "llama", Prompt("p", messages=CHAT)) == prompt_ids(
        "bytes", "llama", Prompt("p", text="Hello world")
    )


def test_a_system_message_of_the_settings_reaches_the_draft_model_too():
    shown = TOKENIZERS["bytes"].decode(prompt_ids("other bytes", "bytes", Prompt("p", messages=CHAT), system="Be kind"))
    assert shown.startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHello")


def test_a_draft_model_without_a_template_sees_plain_text_behind_its_own_start_token():
    shown = TOKENIZERS["llama"].decode(
        prompt_ids("bytes", "llama", Prompt("p", messages=CHAT), system="Be kind", template=False)
    )
    assert shown == "<s> Be kind\n\nHello world\n\n"


def test_where_the_target_gets_plain_text_so_does_the_draft_model():
    raw, chatting = codec_of("bytes"), codec_of("llama", raw=False)
    ids = draft_prompt_ids(raw, chatting, Prompt("p", text="Once upon"))
    assert TOKENIZERS["llama"].decode(ids) == "<s> Once upon"


def test_a_template_that_refuses_the_chat_gives_way_to_plain_text():
    strict = Codec(
        TOKENIZERS["llama"],
        settings=TextSettings(chat_template="{{ raise_exception('no') }}"),
        end_ids=None,
        vocab_rows=len(TOKENIZERS["llama"]),
    )
    ids = draft_prompt_ids(codec_of("bytes", raw=False), strict, Prompt("p", messages=CHAT))
    assert TOKENIZERS["llama"].decode(ids) == "<s> Hello world\n\n"


def heard_by(pair, answer_ids, text="abc"):
    """The draft model's ids behind its prompt, when the target has said these."""
    translation, heard = pair.translation, []
    prompt = Prompt("p", text=text)
    drafter = TranslatingDrafter(pair.draft, translation, prompt, 3)
    usual = pair.draft.read
    pair.draft.read = lambda ids, last=1: heard.append(list(ids)) or usual(ids, last)
    drafter.propose([1, 2, 3, *answer_ids], 1)
    return heard[0][len(draft_prompt_ids(translation.target.codec, translation.draft.codec, prompt)) :]


def test_special_tokens_that_the_target_writes_are_not_shown_to_the_draft_model():
    pair = knowing_pair("bytes", "llama")
    target, draft = pair.translation.target, pair.translation.draft
    special = target.codec.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert said(draft, heard_by(pair, [*target.ids_of("Hello"), special, *target.ids_of(" world")])) == b"Hello world"


# Seams


def test_half_a_character_of_the_target_is_completed_by_the_draft():
    pair = knowing_pair("gemma", "bytes", "x 貓 is a cat")
    target = pair.translation.target
    whole = target.ids_of("x 貓 is a cat")
    drafter = TranslatingDrafter(pair.draft, pair.translation, Prompt("p", text="abc"), 3)
    for known in range(1, len(whole)):
        draft = drafter.propose([1, 2, 3, *whole[:known]], 20)
        assert draft.ids == whole[known:], known


def test_a_character_that_the_draft_model_would_complete_otherwise_is_left_to_the_target():
    pair = knowing_pair("gemma", "bytes", "x 犬")
    target = pair.translation.target
    cat = target.ids_of("貓")
    assert target.bytes_of(cat[0]) == "貓".encode()[:1] != "犬".encode()[:1]
    drafter = TranslatingDrafter(pair.draft, pair.translation, Prompt("p", text="abc"), 3)
    draft = drafter.propose([1, 2, 3, *target.ids_of("x "), cat[0]], 5)
    assert draft.ids == [] and draft.steps == [1]


def test_behind_half_a_word_the_rest_of_the_word_is_drafted():
    pair = knowing_pair("bytes", "other bytes", "Hello world again")
    target = pair.translation.target
    halves = [*target.ids_of("Hello wor")]
    drafter = TranslatingDrafter(pair.draft, pair.translation, Prompt("p", text="abc"), 3)
    draft = drafter.propose([1, 2, 3, *halves], 20)
    assert said(target, draft.ids) == b"ld again"


def test_a_target_that_spells_in_single_bytes_meets_no_stutter():
    for target, draft in (("bytes", "llama"), ("llama", "bytes")):
        pair = knowing_pair(target, draft)
        spelling = pair.translation.target
        single = {spelling.bytes_of(i): i for i in range(spelling.codec.vocab_size) if len(spelling.bytes_of(i)) == 1}
        ids = [single[bytes([byte])] for byte in ANSWER.encode()]
        pair.target.model.script = says([*ids, end_of(spelling)], len(spelling.codec.plain_ids("abc")))
        for mode in ("exact", "fly"):
            events = run(pair, mode=mode, draft_tokens=5, max_new_tokens=600, draft_schedule="constant")
            assert events[-1].text == ANSWER


# Where it ends


def test_the_draft_ends_where_the_draft_model_ends_and_proposes_no_end_token():
    pair = knowing_pair("bytes", "llama", "Hello")
    drafter = TranslatingDrafter(pair.draft, pair.translation, Prompt("p", text="abc"), 3)
    target = pair.translation.target
    draft = drafter.propose([1, 2, 3, *target.ids_of("He")], 10)
    assert said(target, draft.ids) == b"llo"
    assert len(draft.confidences) == len(draft.ids)


def test_past_the_draft_models_context_lookup_drafts_on_with_one_note():
    pair = knowing_pair("bytes", "other bytes")
    pair.draft.max_length = 40
    for schedule in ("constant", "adaptive"):
        events = run(pair, mode="exact", draft_schedule=schedule)
        assert events[-1].text == ANSWER
        notes = [note for event in events if isinstance(event, Round) for note in event.notes]
        assert len(notes) == 1 and "draft model's context of 40 tokens" in notes[0]


def test_a_draft_model_whose_context_the_prompt_fills_never_runs():
    pair = knowing_pair("bytes", "other bytes", prompt="abc" * 30)
    pair.draft.max_length = 40
    events = run(pair, "abc" * 30, mode="exact")
    assert events[-1].text == ANSWER and pair.draft.forward_seconds == 0


# What it costs


def test_only_what_is_new_is_fed_to_the_draft_model(monkeypatch):
    pair, fed = knowing_pair("bytes", "other bytes", ANSWER * 4), []
    spelling = pair.translation.draft
    pair.draft.model.script = says(spelling.ids_of(ANSWER * 4), len(spelling.codec.plain_ids("abc")))
    usual = pair.draft._forward
    monkeypatch.setattr(pair.draft, "_forward", lambda *given: fed.append(given[2] - given[1]) or usual(*given))
    run(pair, mode="exact", draft_tokens=6, max_new_tokens=1000, draft_schedule="constant")
    assert sum(fed[1:]) < 1.3 * len(fed)
    assert max(fed[1:]) < 6


def test_confidences_multiply_to_the_probability_of_all_that_was_said():
    speech = Speech(b"")
    for word, probability in ((b"ab", 0.5), (b"c", 0.25), (b"defg", 0.125)):
        speech.add(word, probability)
    assert speech.confidences([1, 3, 5, 7]) == [0.5, 0.25, 0.125, 1.0]
    assert speech.confidences([7]) == [0.5 * 0.25 * 0.125]
    assert speech.confidences([2]) == [0.5]


def test_sampling_leaves_the_draft_model_greedy():
    for temperature in (0.0, 1.0):
        pair = knowing_pair("bytes", "llama")
        drafter = make_drafter(
            pair,
            Chooser(DecodeSettings(temperature=temperature), pair.codec.vocab_size, 5),
            DecodeSettings(temperature=temperature, draft_schedule="constant"),
            Prompt("p", text="abc"),
            3,
        )
        draft = drafter.propose([1, 2, 3, *pair.translation.target.ids_of("Hello")], 4)
        assert said(pair.translation.target, draft.ids).startswith(b" world")


@pytest.mark.parametrize(("target", "draft"), [("bytes", "llama"), ("llama", "other bytes")])
def test_the_adaptive_schedule_takes_a_model_that_is_right(target, draft):
    events = run(knowing_pair(target, draft, ANSWER * 2), mode="exact", draft_lookup=False)
    assert events[-1].text == ANSWER * 2
    assert acceptance(events) > 4
