"""The bench of what a peer and training cost each other, at a small size: whatever the time, all is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "overhead.py"


@pytest.mark.processes
def test_a_loop_with_a_peer_and_questions_while_it_trains_are_measured():
    command = [sys.executable, BENCH, "--turns", "2", "--seconds", "0.02", "--mib", "1", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280, env=environment)
    assert result.returncode in (0, 1), result.stdout
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["case"].split(":")[0] for row in rows] == ["transformer"] * 7 + ["small steps"] * 7
    assert sum(row["goal"] == ">= 0.97" for row in rows) == 2
    assert sum(row["goal"] == "<= 1" for row in rows) == 4
    assert all(row["ours"] > 0 and row["ratio"] > 0 for row in rows), result.stdout
