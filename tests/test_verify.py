"""The walk, drawn: `=` match, `x` mismatch with an open gate, `!` with a shut one.

`p` protected, `i` impossible, `c` copied from the text.
"""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly_cli.events import Origin
from fly_cli.verify import Evidence, Rejection, judge


@dataclass(frozen=True)
class Rules:
    entropy_threshold: float | None = 0.3
    window_size: int = 6
    strict_first: int = 0


def evidence(drawing: str, num_new_tokens: int = 100) -> Evidence:
    n = len(drawing)
    targets = tuple(range(10, 11 + n))
    return Evidence(
        draft_ids=tuple(t if sign == "=" else t + 1000 for sign, t in zip(drawing, targets, strict=False)),
        target_ids=targets,
        top_ids=targets,
        entropies=tuple({"=": None, "!": 0.1}.get(sign, 0.5) for sign in drawing),
        allowed=tuple(sign != "i" for sign in drawing),
        protected=tuple(sign == "p" for sign in drawing),
        num_new_tokens=num_new_tokens,
        copied=tuple(sign == "c" for sign in drawing) if "c" in drawing else (),
    )


def walk(drawing: str, rules: Rules | None = None, **more: int) -> str:
    """The kept origins and the final one, drawn: `=` exact, `d` deferred, then `C`, `B` or `T`."""
    verdict = judge(evidence(drawing, **more), rules or Rules())
    signs = {Origin.EXACT: "=", Origin.DEFERRED: "d"}
    return "".join(signs[origin] for origin in verdict.origins) + verdict.final_origin.value[0].upper()


@pytest.mark.parametrize(
    ("drawing", "walked"),
    [
        # nothing drafted, all matched
        ("", "T"),
        ("=", "=B"),
        ("===============", "===============B"),
        # rule a: the gate
        ("==x======", "==d======B"),
        ("==!======", "==C"),
        ("!======", "C"),
        ("x======", "d======B"),
        # rule b: the window must fit
        ("==x=====", "==C"),
        ("x=====", "C"),
        ("========x======", "========d======B"),
        ("=========x=====", "=========C"),
        ("==============x", "==============C"),
        # rule c: the window must be clean, and it is the first mismatch that is rejected
        ("==x=====x======", "==C"),
        ("==x=====x", "==C"),
        ("==x=====!======", "==C"),
        ("xx=============", "C"),
        # several deferrals in one block
        ("x======x======", "d======d======B"),
        ("x======x=====", "d======C"),
        ("x======!======", "d======C"),
        ("=x======x======", "=d======d======B"),
        # rule d: protected tokens, also with everything else in favour
        ("==p======", "==C"),
        # copied text is no model's opinion
        ("==c======", "==C"),
        ("==x======c", "==d======C"),
        # rule e: what the target cannot produce
        ("==i======", "==C"),
    ],
)
def test_a_mismatch_is_kept_only_behind_an_open_gate_with_a_clean_window(drawing, walked):
    assert walk(drawing) == walked


@pytest.mark.parametrize(
    ("window_size", "drawing", "walked"),
    [
        (0, "x", "dB"),
        (0, "xxx", "dddB"),
        (1, "x=", "d=B"),
        (1, "x=x=", "d=d=B"),
        (1, "xx=", "C"),
        (3, "x===x===", "d===d===B"),
        (3, "x===x==", "d===C"),
        (14, "x==============", "d==============B"),
        (14, "=x=============", "=C"),
        (15, "x==============", "C"),
    ],
)
def test_the_window_counts_the_tokens_that_follow(window_size, drawing, walked):
    assert walk(drawing, Rules(window_size=window_size)) == walked


@pytest.mark.parametrize(
    ("strict_first", "num_new_tokens", "drawing", "walked"),
    [
        (2, 1, "x======", "C"),  # the second new token
        (2, 1, "=x======", "=d======B"),  # the third
        (2, 2, "x======", "d======B"),
        (0, 0, "x======", "d======B"),
        (9, 1, "=======x======", "=======C"),
        (9, 1, "========x======", "========d======B"),
    ],
)
def test_the_first_new_tokens_are_judged_strictly(strict_first, num_new_tokens, drawing, walked):
    assert walk(drawing, Rules(strict_first=strict_first), num_new_tokens=num_new_tokens) == walked


@pytest.mark.parametrize("drawing", ["x======", "==x======", "===", "", "x"])
def test_with_the_gate_off_every_mismatch_is_rejected(drawing):
    expected = drawing.split("x")[0]
    final = "C" if "x" in drawing else ("B" if drawing else "T")
    assert walk(drawing, Rules(entropy_threshold=None)) == expected + final


def test_entropy_equal_to_the_threshold_opens_the_gate():
    assert walk("x======", Rules(entropy_threshold=0.5)) == "d======B"
    assert walk("x======", Rules(entropy_threshold=0.5000001)) == "C"


def test_a_rejected_token_gives_way_to_the_target_own_choice_there():
    verdict = judge(evidence("==!==="), Rules())
    assert verdict.final_id == 12  # target_ids[2]


def test_a_fully_kept_draft_is_followed_by_the_target_choice_behind_it():
    verdict = judge(evidence("==x======"), Rules())
    assert verdict.final_id == 19  # target_ids[9]


@pytest.mark.parametrize(
    ("drawing", "reason"),
    [
        ("!======", Rejection.CONFIDENT),
        ("x=====", Rejection.NO_WINDOW),
        ("x=x====", Rejection.SECOND_MISMATCH),
        ("p======", Rejection.PROTECTED),
        ("i======", Rejection.IMPOSSIBLE),
        ("===", None),
    ],
)
def test_a_verdict_names_the_rule_that_ended_the_walk(drawing, reason):
    assert judge(evidence(drawing), Rules()).rejection is reason


def test_an_unmeasured_entropy_is_an_error_and_not_a_closed_gate():
    good = evidence("x======")
    broken = Evidence(**{name: getattr(good, name) for name in Evidence.__slots__} | {"entropies": (None,) * 7})
    with pytest.raises(ValueError, match="not measured"):
        judge(broken, Rules())


def reference_walk(drawing: str, window_size: int) -> str:
    """The rule said another way: cut at the first mismatch whose next W signs are not all there and all `=`."""
    kept = ""
    for j, sign in enumerate(drawing):
        if sign == "=":
            kept += "="
        elif sign == "x" and drawing[j + 1 :].startswith("=" * window_size):
            kept += "d"
        else:
            return kept + "C"
    return kept + ("B" if kept else "T")


@given(st.text("=x!", max_size=20), st.integers(0, 8))
def test_any_drawing_walks_as_the_rule_says(drawing, window_size):
    assert walk(drawing, Rules(window_size=window_size)) == reference_walk(drawing, window_size)


@given(st.text("=x!pi", max_size=20), st.integers(0, 8))
def test_fly_never_keeps_fewer_tokens_than_exact_and_never_two_mismatches_in_one_window(drawing, window_size):
    fly = walk(drawing, Rules(window_size=window_size))
    exact = walk(drawing, Rules(entropy_threshold=None))
    assert len(fly) >= len(exact)
    deferred = [j for j, sign in enumerate(fly[:-1]) if sign == "d"]
    assert all(b - a > window_size for a, b in pairwise(deferred))
