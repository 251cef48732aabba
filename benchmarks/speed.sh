#!/bin/sh
# The speed table of the README: 8 HumanEval, 8 GSM8K and 24 Spec-Bench rows (4 a subtask), 128 new tokens.
#
#     benchmarks/speed.sh DATA OUT [MORE]     # DATA has humaneval.jsonl, gsm8k.jsonl and spec_bench.jsonl
#
# Takes hours on a CPU: Ctrl-C keeps what is done, the same command goes on. MORE are further flags, as --repeat 2.
set -eu
data=$1 out=$2
shift 2
exec fly bench "$data/humaneval.jsonl" "$data/gsm8k.jsonl" "$data/spec_bench.jsonl" \
    --sample 8 --sample 8 --sample 24 -n 128 --arms target,exact,fly,hf,hf-assisted,hf-lookup \
    --out "$out" --resume "$@"
