"""The bench of churn at a small size: whatever the time, nothing is wrong, and nothing hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "churn.py"


@pytest.mark.processes
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_hold_the_bits_of_their_plan(how):
    command = [sys.executable, BENCH, "--cases", "two", "--how", how, "--mib", "1", "--repeat", "1", "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    assert result.returncode in (0, 1), result.stdout
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (row["runs"], row["wrong"], row["hangs"]) == (1, 0, 0), result.stdout
