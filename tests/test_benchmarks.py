"""The scripts that the benchmarks' README names."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_the_roofline_script_finds_all_that_it_imports():
    command = [sys.executable, str(FOLDER / "roofline.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "--draft" in done.stdout
