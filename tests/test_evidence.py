import math

import pytest
import torch

from fly_cli.errors import DecodeError
from fly_cli.evidence import entropy, measure
from fly_cli.sampling import Chooser
from fly_cli.settings import DecodeSettings


def evidence(logits, draft_ids, protected_ids=frozenset(), record=False, **settings):
    logits = torch.tensor(logits) if isinstance(logits, list) else logits
    made = DecodeSettings(**settings)
    return measure(
        logits,
        draft_ids,
        position=5,
        num_new_tokens=3,
        chooser=Chooser(made, logits.shape[-1], 0),
        settings=made,
        protected_ids=protected_ids,
        record=record,
    )


def test_top_k_entropy_is_in_nats_and_not_renormalised():
    p = [0.4, 0.3, 0.2, 0.1]
    expected = -sum(x * math.log(x) for x in p[:3])
    assert entropy(torch.tensor([p]).log(), "topk", 3).item() == pytest.approx(expected, abs=1e-6)


def test_top_k_entropy_is_low_for_a_very_flat_row():
    flat = torch.zeros(1, 100_000)
    assert entropy(flat, "topk", 3).item() < 0.001
    assert entropy(flat, "normalized", 3).item() == pytest.approx(1.0, abs=1e-4)


def test_normalized_entropy_divides_by_the_log_of_the_vocabulary():
    p = [0.4, 0.3, 0.2, 0.1]
    expected = -sum(x * math.log(x) for x in p) / math.log(4)
    assert entropy(torch.tensor([p]).log(), "normalized", 3).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["topk", "normalized"])
def test_entropy_of_extreme_rows_is_finite(kind):
    rows = torch.tensor([[65504.0, -65504.0, 0.0], [0.0, -torch.inf, -torch.inf], [-65504.0, -65504.0, -65504.0]])
    for dtype in (torch.float32, torch.float16):
        values = entropy(rows.to(dtype), kind, 3)
        assert values.isfinite().all()
        assert values[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["topk", "normalized"])
def test_entropy_ignores_temperature_and_warpers(kind):
    row = [[1.0, 0.9, 0.0, -1.0]] * 2
    plain = evidence(row, [1], record=True, entropy=kind)
    warped = evidence(row, [1], record=True, entropy=kind, temperature=0.2, top_k=1)
    assert plain.entropies == warped.entropies


def test_the_target_choice_and_the_entropies_of_mismatched_rows_are_listed():
    got = evidence([[0.0, 5.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 9.0]], [1, 2])
    assert got.target_ids == (1, 0, 2)
    assert got.top_ids == got.target_ids
    assert got.matches == (True, False)
    assert got.entropies[0] is None
    assert got.entropies[1] == pytest.approx(entropy(torch.tensor([[3.0, 0.0, 1.0]]), "topk", 3).item())
    assert got.num_new_tokens == 3


def test_recording_measures_every_row_alike():
    rows = [[0.0, 5.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 9.0]]
    plain, recorded = evidence(rows, [1, 2]), evidence(rows, [1, 2], record=True)
    assert None not in recorded.entropies
    assert recorded.entropies[1] == plain.entropies[1]


def test_with_the_gate_off_nothing_is_measured_unless_recorded():
    assert evidence([[0.0, 1.0], [0.0, 1.0]], [0], mode="exact").entropies == (None,)
    assert evidence([[0.0, 1.0], [0.0, 1.0]], [0], mode="exact", record=True).entropies[0] is not None


def test_a_token_that_the_target_cannot_produce_is_not_allowed():
    banned = -torch.inf
    assert evidence([[0.0, banned, 1.0], [0.0, 0.0, 0.0]], [1]).allowed == (False,)
    assert evidence([[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]], [1]).allowed == (True,)
    assert evidence([[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]], [1], temperature=1.0, top_k=1).allowed == (False,)
    assert evidence([[0.0, 0.5, 9.0], [0.0, 0.0, 0.0]], [1], temperature=1.0, top_p=0.5).allowed == (False,)


def test_drafted_chosen_and_likeliest_tokens_are_protected():
    row = [[0.0, 0.5, 1.0, -9.0], [0.0, 0.0, 0.0, 0.0]]
    assert evidence(row, [1], protected_ids={1}).protected == (True,)
    assert evidence(row, [1], protected_ids={2}).protected == (True,)
    assert evidence(row, [1], protected_ids={3}).protected == (False,)
    # Sampling may choose another token than the likeliest: that one is protected too.
    for seed_row in range(20):
        got = evidence(row, [1], protected_ids={2}, temperature=5.0, top_k=2)
        assert got.protected == (True,), seed_row


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_row_without_a_finite_peak_is_an_error_that_names_the_step(bad, settings):
    with pytest.raises(DecodeError, match="new token 5 "):
        evidence([[0.0, 1.0], bad, [0.0, 1.0]], [1, 1], **settings)


def test_nothing_drafted_gives_one_choice():
    got = evidence([[0.0, 1.0]], [])
    assert (got.draft_ids, got.target_ids) == ((), (1,))
