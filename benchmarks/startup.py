"""From the start of the process to the first token: how long, and how much of it is imports.

python benchmarks/startup.py [REPEATS]

Runs `fly generate` with a prompt of about 30 tokens, everything being prepared, and takes the time of the first byte on
its standard output; and Python with nothing but the imports that it needs. Medians, in seconds.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median
from time import perf_counter

PROMPT = "Write a Python function that takes a list of numbers and returns the two largest of them, largest first."
IMPORTS = "import fly_cli.models, fly_cli.decode, transformers.models.qwen2.modeling_qwen2"


def first_byte(command: list[str]) -> float:
    """Seconds until the command writes something."""
    began = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command)} wrote nothing")
        seconds = perf_counter() - began
        process.communicate()
    return seconds


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    answer = [sys.executable, "-m", "fly_cli", "generate", "--no-stdin", "-n", "8", PROMPT]
    imports = [sys.executable, "-c", f"{IMPORTS}; print('.')"]
    times = [(first_byte(answer), first_byte(imports)) for _ in range(repeats + 1)][1:]  # the first one fills caches
    print(
        f"first token after {median(t for t, _ in times):.1f} s, of which imports {median(t for _, t in times):.1f} s"
    )


if __name__ == "__main__":
    main()
