#!/bin/sh
# The quality figures of the README: 40 HumanEval, 25 MBPP and 40 GSM8K rows, answers of up to 512 new tokens, each
# answered by the target alone and by `fly`, and scored. Speeds at 512 tokens come with it.
#
#     benchmarks/quality.sh DATA OUT [MORE]     # DATA has humaneval.jsonl, mbpp.jsonl and gsm8k.jsonl
#
# Runs the code that the models write, limited but not sandboxed. Takes hours on a CPU: Ctrl-C keeps what is done, the
# same command goes on.
set -eu
data=$1 out=$2
shift 2
exec fly bench "$data/humaneval.jsonl" "$data/mbpp.jsonl" "$data/gsm8k.jsonl" \
    --sample 40 --sample 25 --sample 40 -n 512 --arms target,fly --run-code --out "$out" --resume "$@"
