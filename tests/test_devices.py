"""Models on several devices. The devices are fake ones: they compute on the CPU, but their tensors do not mix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from devices_for_tests import COUNT, DRAFT_TOKENS, PLACES, TEXT, WAYS

ROWS = DRAFT_TOKENS + 1
COLUMNS = 5  # choices, likeliest ids, entropies and two flags


@pytest.fixture(scope="module")
def found():
    here = Path(__file__).parent
    command = [sys.executable, str(here / "devices_for_tests.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=here)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_the_text_does_not_depend_on_where_the_models_are(found, place, way):
    if place == "lookup alone" and way == "fly":
        pytest.skip("another drafter: other tokens are deferred")
    assert len(found[place][way]["ids"]) == COUNT - 1
    assert found[place][way]["ids"] == found["one device"][way]["ids"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_verifying_asks_the_target_device_once_a_round(found, place, way):
    target_place, _ = PLACES[place]
    for transfers in found[place][way]["verifying"]:
        to_host = [size for source, home, size in transfers if source != "cpu" and home == "cpu"]
        assert len(to_host) == (0 if target_place == "cpu" else 1)
        assert sum(to_host) <= COLUMNS * ROWS


@pytest.mark.parametrize("way", WAYS)
def test_only_ids_go_from_model_to_model(found, way):
    facts = found["each on its own"][way]
    transfers = facts["drafting"] + [one for transfers in facts["verifying"] for one in transfers]
    assert not [one for one in transfers if "cpu" not in one[:2]]  # nothing directly
    to_host = [size for _, home, size in transfers if home == "cpu"]
    assert max(to_host) <= COLUMNS * ROWS  # ids and what is asked about them, never logits or states
    if way != "sampled":  # there the noise goes to both
        assert max(size for _, home, size in transfers if home != "cpu") <= len(TEXT) + COUNT  # the text's ids


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_the_clock_of_a_forward_is_read_when_its_device_has_finished(found, place, way):
    """On the clock of these models only waiting for a device takes time: a second."""
    homes = [home for home in PLACES[place] if home]
    for seconds, home in zip(found[place][way]["seconds"], homes, strict=True):
        assert seconds == (0 if home == "cpu" else 1)
