"""A draft model whose ids are not the target's."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_for_tests import ScriptedModel, says, sure, tiny_llama
from spelling_helpers import SPELLINGS, TEXTS, TOKENIZERS, said, translating_pair

from fly_cli.decode import decode
from fly_cli.events import Drafted, Round, Started
from fly_cli.prompts import Prompt
from fly_cli.settings import DecodeSettings

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
