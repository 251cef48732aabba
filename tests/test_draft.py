import pytest
from models_for_tests import ScriptedModel, noisy_copy, says, sure, tiny_llama

from fly_cli.cached_model import CachedModel
from fly_cli.draft import COPIED_TOKENS, AdaptiveDrafter, LookupDrafter, ModelDrafter
from fly_cli.events import Origin, Source
from fly_cli.sampling import Chooser
from fly_cli.schedule import Adaptive, CostTable
from fly_cli.settings import DecodeSettings
from fly_cli.verify import Verdict

END = 9


def drafter(script, lookup=False, vocab_size=100, max_length=1000, **settings):
    model = CachedModel(ScriptedModel(script, vocab_size, max_length=max_length), name="draft")
    return ModelDrafter(model, Chooser(DecodeSettings(**settings), vocab_size, 0), {END}, lookup=lookup)


def cycle(*tokens):
    """A script that says the tokens round and round, by position."""
    return lambda sequence: sure(tokens[len(sequence) % len(tokens)])


def test_a_draft_is_the_model_own_greedy_continuation():
    assert drafter(says([11, 12, 13, 14], 2)).propose([1, 2], 3).ids == [11, 12, 13]


def test_drafting_stops_at_its_own_end_token_for_this_round_only():
    draft = drafter(says([11, END, 13, 14, 15], 2))
    assert draft.propose([1, 2], 4).ids == [11, END]
    assert draft.propose([1, 2, 11, 50], 3).ids == [13, 14, 15]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 15])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_inside_the_drafter_changes_forwards_and_not_tokens(limit, temperature):
    model = noisy_copy(tiny_llama(0), 1)
    prompt = [5, 6, 7, 8, 9, 10] * 4
    drafts, forwards = [], []
    for lookup in (False, True):
        chooser = Chooser(DecodeSettings(temperature=temperature), 384, 3)
        fed = []
        handle = model.register_forward_pre_hook(lambda *_, fed=fed: fed.append(1))
        made = ModelDrafter(CachedModel(model, name="d"), chooser, set(), lookup=lookup)
        ids, taken = list(prompt), []
        for _ in range(6):
            proposed = made.propose(ids, limit).ids
            taken.append(proposed)
            ids += [*proposed[: max(1, limit // 2)], 77]
        handle.remove()
        drafts.append(taken)
        forwards.append(len(fed))
    assert drafts[0] == drafts[1]
    assert all(len(d) == limit for d in drafts[1])
    assert forwards[1] <= forwards[0]


def test_confirmed_copies_take_one_forward():
    phrase = [20, 21, 22, 23, 24, 25, 26, 27]
    made = drafter(says(phrase, 10), lookup=True)
    ids = [19, *phrase, 19]
    model = made.model.model
    before = model.num_forwards
    draft = made.propose(ids, COPIED_TOKENS + 1)
    assert draft.ids == phrase[: COPIED_TOKENS + 1]
    assert draft.sources == [Source.LOOKUP] * COPIED_TOKENS + [Source.MODEL]
    assert model.num_forwards == before + 1


def test_copying_stops_where_the_draft_model_would_have_said_something_else():
    made = drafter(says([20, 21, 50, 51, 52], 6), lookup=True)
    draft = made.propose([19, 20, 21, 22, 23, 19], 4)
    assert draft.ids == [20, 21, 50, 51]
    assert draft.sources[:3] == [Source.LOOKUP, Source.LOOKUP, Source.MODEL]


def test_an_end_token_inside_the_copied_text_ends_the_draft():
    made = drafter(says([20, END, 30, 31, 32], 5), lookup=True)
    assert made.propose([19, 20, END, 30, 19], 4).ids == [20, END]
    assert LookupDrafter({END}).propose([19, 20, END, 30, 19], 4).ids == [20, END]


def test_lookup_alone_copies_unconfirmed_and_proposes_nothing_without_a_match():
    draft = LookupDrafter(set()).propose([1, 2, 9, 1, 2], 15)
    assert draft.ids == [9, 1, 2]
    assert set(draft.sources) == {Source.COPY}
    assert LookupDrafter(set()).propose([1, 2, 3], 15).ids == []


def test_the_draft_is_clipped_to_the_room_in_the_draft_model_context():
    made = drafter(cycle(11, 12, 13), max_length=12)
    assert len(made.propose(list(range(30, 40)), 15).ids) == 2


def test_past_its_context_the_draft_model_steps_aside_for_lookup_with_one_note():
    made = drafter(cycle(11, 12, 13), max_length=8)
    ids = [1, 2, 3, 4, 5, 6, 1, 2]
    first = made.propose(ids, 3)
    assert first.ids == [3, 4, 5]
    assert "context of 8 tokens" in first.notes[0]
    assert made.propose([*ids, 3], 3).notes == ()


def test_an_id_beyond_the_draft_vocabulary_is_never_fed_to_it():
    made = drafter(cycle(11, 12, 13), vocab_size=50)
    draft = made.propose([1, 60, 2, 1], 3)
    assert draft.ids == [60, 2, 1]
    assert "does not know" in draft.notes[0]


@pytest.mark.parametrize("length, waits", [(20, False), (800, True)])
def test_the_draft_model_reads_a_long_prompt_only_behind_an_answer_that_pays_for_it(length, waits):
    model = drafter(cycle(1, 2, 3))
    policy = Adaptive(CostTable({1: 1.0, 16: 1.3}, {1: 0.1, 32: 0.9}))
    adaptive = AdaptiveDrafter(None, model, policy)
    ids = [1] * length
    for _ in range(60):
        draft = adaptive.propose(ids, 5)
        if draft.ids:
            break
        adaptive.learn(draft, Verdict((), 1, Origin.TARGET))
        ids.append(1)
    new = len(ids) - length
    assert bool(new) is waits and new < 59
    assert adaptive.forward_seconds > 0 and min(model.model.timings) <= length + new
