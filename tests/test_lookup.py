from hypothesis import given
from hypothesis import strategies as st

from fly_cli.lookup import NgramIndex


def find(ids, limit=6, max_ngram=4):
    return NgramIndex(max_ngram).find(ids, limit)


def test_nothing_is_copied_where_the_ending_never_occurred_before():
    assert find([1, 2, 3]) == []
    assert find([5]) == []
    assert find([1, 2]) == []
    assert find([]) == []


def test_what_followed_the_ending_earlier_is_copied():
    assert find([1, 2, 9, 1, 2]) == [9, 1, 2]


def test_the_ending_never_matches_itself_but_may_overlap_its_earlier_occurrence():
    assert find([7, 7, 7]) == [7]


def test_the_longest_ngram_wins_over_a_later_shorter_one():
    assert find([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], limit=1) == [50]


def test_among_equal_lengths_the_latest_match_wins():
    assert find([1, 2, 50, 1, 2, 60, 1, 2], limit=1) == [60]


def test_ngrams_longer_than_the_limit_are_not_looked_for():
    ids = [1, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    assert find(ids, limit=1, max_ngram=1) == [60]


def test_an_index_that_followed_other_sequences_finds_what_a_fresh_one_finds():
    index = NgramIndex()
    index.find([1, 2, 3, 1, 2], 6)
    index.find([1, 2, 3, 1, 2, 4, 4], 6)
    assert index.find([1, 2, 3, 1, 9, 1], 6) == find([1, 2, 3, 1, 9, 1])


def naive(ids, limit, max_ngram=4):
    for n in range(min(max_ngram, len(ids) - 1), 0, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + limit]
    return []


@given(st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=5), st.integers(0, 7))
def test_the_index_agrees_with_a_plain_search_over_any_series_of_sequences(series, limit):
    index = NgramIndex()
    for ids in series:
        assert index.find(ids, limit) == naive(ids, limit)
