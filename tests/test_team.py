"""Several processes that share a target: the same text as one process, and an end for all whatever happens to one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models_for_tests import byte_tokenizer, noisy_copy, tiny_llama
from team_for_tests import facts
from transformers import GPT2Config, GPT2LMHeadModel

from fly_cli import api, models, placement
from fly_cli.errors import OutOfMemoryError, SettingsError, UnsupportedModelError, UsageError
from fly_cli.models import load_pair
from fly_cli.placement import plan
from fly_cli.processes import Processes
from fly_cli.settings import DecodeSettings, ModelSettings, TextSettings
from fly_cli.skeleton import skeleton
from fly_cli.team import join_team

HERE = Path(__file__).parent
PATIENCE = 120  # seconds
MB = 1_000_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, draft): random Llamas whose key and value heads two processes can share."""
    target = tiny_llama(0, eos_token_id=383, num_key_value_heads=2)
    home = tmp_path_factory.mktemp("shared")
    return [kept(model, home / name) for name, model in (("t", target), ("d", noisy_copy(target, 1)))]


def kept(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(command, tmp_path, homes=(HERE, HERE)):
    """The command as two processes in these folders, as a launcher starts them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(tmp_path), "FLY_CACHE": str(tmp_path / "cache")}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=home,
        )
        for rank, home in enumerate(homes)
    ]


def ended(processes):
    """(exit code, stdout, stderr) of each. One that does not end fails the test."""
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            done.append((process.returncode, out.decode(), err.decode()))
    finally:
        for process in processes:
            process.kill()
    return done


def said(err):
    """What we told on stderr; libraries may talk there as well."""
    ours = ("error: ", "hint: ", "note: ", "interrupted")
    return [line for line in err.splitlines() if line.startswith(ours)]


def generate(*arguments):
    return ["-m", "fly_cli", "generate", "--raw", "--dtype", "float32", *arguments]


# The same text


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """What one process finds, then what each of two does."""
    processes = start([str(HERE / "team_for_tests.py"), *folders], tmp_path_factory.mktemp("team"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load_costs", models.load_costs)  # put back afterwards
        alone = facts(*folders, 1, 0)
    together = ended(processes)
    assert [code for code, _, _ in together] == [0, 0], together
    return [json.loads(json.dumps(alone)), *(json.loads(out) for _, out, _ in together)]


def text_of_one_process(target, prompt, max_new_tokens):
    """What the target alone writes, and so what exact decoding does."""
    pair = load_pair(ModelSettings(target=target, draft="lookup", dtype="float32"), TextSettings(raw=True))
    return api.generate(pair, prompt, DecodeSettings(mode="target", max_new_tokens=max_new_tokens)).text


@pytest.mark.parametrize("way", ["target", "exact", "adaptive", "sampled", "fly", "lookup"])
def test_two_processes_write_what_one_writes(found, way):
    alone, first, second = found
    assert len(first[way]["ids"]) == 24 or 383 in first[way]["ids"]
    assert first[way] == second[way] == alone[way]


def test_the_costs_that_the_first_process_knows_decide_for_all(found):
    _, first, second = found
    assert max(first["adaptive"]["drafted"]) > 1
    assert second["adaptive"]["drafted"] == first["adaptive"]["drafted"]


def test_the_seed_that_the_first_process_draws_is_that_of_all(found):
    _, first, second = found
    assert first["unseeded"] == second["unseeded"]
    assert first["unseeded"]["seed"] is not None


def test_what_goes_wrong_in_the_first_process_goes_wrong_in_all(found):
    assert [one["error"] for one in found] == ["the target's logits for new token 1 are not finite"] * 3


def test_each_process_has_its_part_of_the_target_and_the_whole_draft(found):
    alone, first, _ = found
    (whole, draft), (part, own_draft) = alone["placement"], first["placement"]
    assert part["processes"] == 2
    assert 0.5 * whole["weight_bytes"] <= part["weight_bytes"] < 0.51 * whole["weight_bytes"]
    assert own_draft == draft


def test_layers_that_are_shared_are_not_brought_into_another_shape(found):
    alone, first, second = found
    assert "Linear" not in alone["layers"]
    assert first["layers"] == second["layers"] == ["Linear"]
    assert first["bfloat16"] > 0


def test_the_command_reads_in_the_first_process_and_speaks_there_alone(folders, tmp_path):
    target, draft = folders
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "the an in"}, {"prompt": "a" * 3000}, {"prompt": "in the an"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    command = generate("--target", target, "--draft", draft, "-n", "12", "-f", str(prompts), "--mode", "exact")
    (code, out, err), (other_code, other_out, other_err) = ended(start(command, tmp_path))
    assert (code, other_code, other_out) == (1, 1, "")
    first, failed, third = map(json.loads, out.splitlines())
    assert "3000 tokens" in failed["error"]
    for answer, row in ((first, rows[0]), (third, rows[2])):
        assert answer["text"] == text_of_one_process(target, row["prompt"], 12)
    assert [line for line in said(err) if line.startswith("error: 1 of 3 prompts failed")]
    assert said(other_err) == []


def test_a_launched_command_answers_from_standard_input_once(folders, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            *generate("--target", folders[0], "--draft", "lookup", "-n", "8", "--mode", "exact"),
        ],
        input=b"the an in the an in",
        capture_output=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(tmp_path)},
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    text = text_of_one_process(folders[0], "the an in the an in", 8)
    assert done.stdout.decode().removesuffix("\n") == text.removesuffix("\n")


# An end for all


def test_a_model_without_a_plan_is_refused_once(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    folder = kept(model, tmp_path / "gpt2")
    command = generate("--target", folder, "--draft", "lookup", "hi")
    (code, out, err), (other_code, other_out, other_err) = ended(start(command, tmp_path))
    assert (code, out, other_code, other_out) == (2, "", 2, "")
    assert "(model type `gpt2`) cannot be shared by several processes" in said(err)[0]
    assert said(other_err) == []


def test_an_error_of_one_process_is_shown_by_it_and_ends_the_others(folders, tmp_path):
    command = generate("--target", "./t", "--draft", "lookup", "hi")
    here = Path(folders[0]).parent
    (code, _, err), (other_code, _, other_err) = ended(start(command, tmp_path, homes=(here, tmp_path)))
    assert (code, other_code) == (1, 2)
    assert said(err)[-2] == "error: another process of this run ended early"
    assert [line for line in said(other_err) if line.startswith("error: ")] == [said(other_err)[0]]
    assert "no such folder" in said(other_err)[0]


@pytest.mark.parametrize(
    ("number", "signalled", "codes", "shown"),
    [
        (signal.SIGINT, [0, 1], (130, 130), "interrupted"),
        (signal.SIGINT, [1], (1, 130), "error: another process of this run ended early"),
        (signal.SIGKILL, [0], (-9, 1), None),
    ],
    ids=["ctrl-c", "one interrupted", "the first killed"],
)
def test_the_end_of_one_process_is_the_end_of_all_and_what_was_written_is_kept(
    folders, tmp_path, number, signalled, codes, shown
):
    command = generate("--target", folders[0], "--mode", "target", "-n", "2000", "-q", "hi")
    processes = start(command, tmp_path)
    first_bytes = processes[0].stdout.read(4)
    began = time.monotonic()
    for rank in signalled:
        processes[rank].send_signal(number)
    done = ended(processes)
    assert time.monotonic() - began < 30
    assert tuple(code for code, _, _ in done) == codes
    assert len(first_bytes) == 4
    assert done[1][1] == ""
    assert "Traceback" not in done[0][2] + done[1][2]
    assert said(done[0][2])[:1] == [shown][: shown is not None]
    assert said(done[1][2]) == []


# Plans


@pytest.fixture
def one_of_two(monkeypatch):
    """This process as the second of two on a machine with the given free memory."""

    def have(free):
        monkeypatch.setattr(placement, "get_max_memory", lambda: {key: int(size) for key, size in free.items()})
        monkeypatch.setattr(placement, "HEADROOM", 0.0)
        monkeypatch.setattr(placement, "place_of", lambda _: Processes(1, 2, 1, 2))

    return have


def test_processes_of_one_machine_share_its_memory(folders, one_of_two):
    model, settings = skeleton("big", Path(folders[0])), ModelSettings(dtype="float32", processes=2)
    one_of_two({"cpu": 40 * MB})
    place, _ = plan(model, None, settings)
    needed = place.weight_bytes + place.cache_bytes
    one_of_two({"cpu": 2 * needed})
    assert plan(model, None, settings)[0] == place
    one_of_two({"cpu": 2 * needed - 2})
    with pytest.raises(OutOfMemoryError, match="`big` needs"):
        plan(model, None, settings)


@pytest.mark.parametrize("placed", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"offload_folder": "off"}])
def test_a_place_of_its_own_is_refused_for_a_shared_target(folders, one_of_two, placed):
    one_of_two({"cpu": 40 * MB})
    with pytest.raises(SettingsError, match="2 processes share the target"):
        plan(skeleton("big", Path(folders[0])), None, ModelSettings(processes=2, **placed))


def test_heads_that_cannot_be_shared_evenly_are_refused_with_the_numbers(tmp_path, one_of_two):
    one_of_two({"cpu": 40 * MB})
    folder = kept(tiny_llama(0), tmp_path / "one-group")
    with pytest.raises(UnsupportedModelError, match=r"2 attention heads and 1 key and value heads.* by 2 processes"):
        plan(skeleton("big", Path(folder)), None, ModelSettings(processes=2))


def test_processes_that_were_not_started_are_a_usage_error_that_says_how():
    with pytest.raises(UsageError, match="2 processes, and there are 1") as caught:
        join_team(2)
    assert "torchrun" in caught.value.hint
