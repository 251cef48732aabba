"""The real default pair. `pytest -m pair`; the first run fetches and converts 1.6 GB."""

import json
import subprocess
import sys

import pytest
import torch

from fly_cli import DecodeSettings, ModelSettings, Origin, generate, load_pair
from fly_cli.bf16_gemm import bf16_gemm
from fly_cli.row_attention import row_attention
from fly_cli.settings import LOOKUP

pytestmark = pytest.mark.pair
PROMPTS = [
    "Write a Python function that adds two numbers.",
    "What is 17 * 23? Think step by step.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog",
]


# First, while no pair is in this process's memory.
def test_the_command_prints_the_answer_and_nothing_else_to_stdout():
    command = [sys.executable, "-m", "fly_cli", "generate", "-n", "6", "--json", "-q", "Say hello."]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["text"]
    assert answer["num_new_tokens"] <= 6


def test_in_bf16_a_row_of_a_block_has_bit_for_bit_the_logits_that_it_has_alone():
    if bf16_gemm() is None or row_attention() is None:
        pytest.skip("needs our kernels")
    target = load_pair(ModelSettings(draft=LOOKUP, device_map="cpu")).target
    ids = list(range(1000, 1095))
    target.read(ids[:64])
    block = target.read(ids, last=31)
    target.reset()
    target.read(ids[:64])
    alone = torch.cat([target.read(ids[: 64 + rows]) for rows in range(1, 32)])
    assert torch.equal(block, alone)


@pytest.fixture(scope="module")
def pair():
    return load_pair(ModelSettings(dtype="float32"))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_exact_writes_what_the_target_writes(pair, prompt):
    plain = generate(pair, prompt, DecodeSettings(mode="target", max_new_tokens=24))
    exact = generate(pair, prompt, DecodeSettings(mode="exact", max_new_tokens=24, draft_tokens=6))
    assert [token.id for token in exact.tokens] == [token.id for token in plain.tokens]
    assert exact.text == plain.text
    assert exact.summary.num_spec_steps < plain.summary.num_spec_steps


def test_sampled_exact_text_does_not_depend_on_the_drafter(pair):
    sampled = {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "seed": 1}
    plain = generate(pair, PROMPTS[0], DecodeSettings(mode="target", **sampled))
    exact = generate(pair, PROMPTS[0], DecodeSettings(mode="exact", draft_tokens=5, **sampled))
    assert exact.text == plain.text


def test_fly_answers_sensibly_and_ends_at_its_end_token(pair):
    answer = generate(pair, "What is the capital of France? Answer with one word.", DecodeSettings(max_new_tokens=12))
    assert "Paris" in answer.text
    assert answer.summary.finish_reason == "stop"
    assert answer.tokens[0].origin is Origin.TARGET
    assert "<|" not in answer.text


def test_the_loop_around_the_models_costs_little(pair):
    answer = generate(pair, PROMPTS[0], DecodeSettings(max_new_tokens=48, draft_tokens=6))
    assert answer.summary.overhead_share < 0.05  # 0.003 on an idle machine
