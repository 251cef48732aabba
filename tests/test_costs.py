import json
from itertools import count

import pytest
import torch
from models_for_tests import tiny_llama

from fly_cli import costs
from fly_cli.cached_model import CachedModel
from fly_cli.costs import costs_file, load_costs, store_costs, without_outliers
from fly_cli.placement import Placement

PLACES = [
    Placement("t", {"": "cpu"}, torch.float32, weight_bytes=4000, cache_bytes=1),
    Placement("d", {"": "cpu"}, torch.float32, weight_bytes=1000, cache_bytes=1),
]


@pytest.fixture
def models(monkeypatch):
    """Every forward takes a second: those of tiny models are noise on a busy machine."""
    clock = count()
    monkeypatch.setattr("fly_cli.cached_model.perf_counter", lambda: float(next(clock)))
    made = [CachedModel(tiny_llama(0), name=name) for name in "td"]
    for model in made:
        model.read(list(range(100)))
        model.read(list(range(101)))
        model.read(list(range(105)), last=4)
    return made


def test_before_the_first_run_costs_are_guessed_from_sizes(tmp_path):
    guess = load_costs(PLACES, tmp_path)
    assert guess.step_seconds() / guess.verify_seconds(0) == pytest.approx(0.25)


def test_a_run_is_remembered_for_the_next_one_without_its_prefill(tmp_path, models):
    store_costs(PLACES, models, tmp_path)
    table = load_costs(PLACES, tmp_path)
    assert set(table.target) == set(table.draft) == {1, 4}
    assert table.target[1] == pytest.approx(models[0].timings[1][0])


def test_later_runs_move_the_table_half_way(tmp_path, models):
    store_costs(PLACES, models, tmp_path)
    for seconds in models[0].timings.values():
        seconds[0] *= 3
    before = load_costs(PLACES, tmp_path).target[1]
    store_costs(PLACES, models, tmp_path)
    assert load_costs(PLACES, tmp_path).target[1] == pytest.approx(2 * before)


def test_another_placement_has_a_table_of_its_own(tmp_path, models):
    store_costs(PLACES, models, tmp_path)
    assert costs_file(PLACES, tmp_path) != costs_file(PLACES[:1], tmp_path)
    assert load_costs(PLACES[:1], tmp_path).draft is None


@pytest.mark.parametrize("change", ["another kernel", "other instructions"])
def test_what_other_kernels_took_is_not_asked(tmp_path, monkeypatch, change):
    before = costs_file(PLACES, tmp_path)
    assert costs_file(PLACES, tmp_path) == before
    if change == "another kernel":
        monkeypatch.setattr(costs, "digest_of_sources", lambda: "another")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert costs_file(PLACES, tmp_path) != before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"target": {"x": 1}}', '{"target": 5}', '{"target": {"1": -3}}', '{"target": {"1": Infinity}}'],
)
def test_a_spoiled_table_is_as_good_as_none(tmp_path, content):
    file = costs_file(PLACES, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert load_costs(PLACES, tmp_path) == load_costs(PLACES, tmp_path / "elsewhere")


def test_a_cache_that_cannot_be_written_does_not_end_a_run(tmp_path, models):
    (tmp_path / "costs").write_text("a file where the folder should be")
    store_costs(PLACES, models, tmp_path)


def test_the_table_is_plain_json(tmp_path, models):
    store_costs(PLACES, models, tmp_path)
    assert set(json.loads(costs_file(PLACES, tmp_path).read_text())) == {"target", "draft"}


def test_times_of_a_busy_moment_are_forgotten():
    quiet = {1: 0.147, 4: 0.15, 6: 0.207, 8: 0.23, 32: 0.765, 40: 1.1}
    busy = {5: 2.895, 31: 7.904, 35: 23.2}
    assert without_outliers(quiet | busy) == quiet
    assert without_outliers({1: 5.0, 4: 0.15, 8: 0.2}) == {4: 0.15, 8: 0.2}
    assert without_outliers({1: 0.1, 2: 0.2, 16: 1.6}) == {
        1: 0.1,
        2: 0.2,
        16: 1.6,
    }  # a row each time
