"""The bench of newcomers at a small size: whatever the time, they get the state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "newcomers.py"


@pytest.mark.processes
def test_newcomers_get_the_state():
    command = [sys.executable, BENCH, "--mib", "2", "--upload", "4e6", "--training", "0.1", "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    assert result.returncode in (0, 1), result.stdout
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["right"] and row["seconds"] > 0, result.stdout
