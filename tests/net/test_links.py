"""The benches of emulated lines, at a small size: that they measure what they say, not how fast that is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def bounds(monkeypatch):
    """The bench's module, which imports its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHES))
    import links

    return links


def test_bounds(bounds):
    equal = [12.5e6] * 4
    assert bounds.ring_bound(100e6, equal) == pytest.approx(12.0)
    assert bounds.best_bound(100e6, equal) == pytest.approx(12.0)
    slow = [12.5e6, 12.5e6, 12.5e6, 2.5e6]
    assert bounds.ring_bound(100e6, slow) == pytest.approx(60.0)
    assert bounds.best_bound(100e6, slow) == pytest.approx(40.0)  # it sends its values, and nobody else's
    assert bounds.best_bound(100e6, [12.5e6] * 3 + [10e6]) == pytest.approx(600 / 47.5)
    assert bounds.best_bound(100e6, [12.5e6, 2.5e6]) == pytest.approx(40.0)


@pytest.mark.netns
def test_rounds_over_emulated_lines(namespaces):
    command = [sys.executable, BENCHES / "links.py", "--quick", "--mib", "1", "--loss", "0", "--slow", "0", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode in (0, 1), result.stderr  # goals are for larger vectors
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    ratios = {row["case"].partition(": ")[2]: row["ratio"] for row in rows}
    assert ratios["int8, bytes sent"] < 0.3
    assert ratios["int4, bytes sent"] < 0.2
    assert all(row["ours"] >= row["rival"] for row in rows if row["rival_name"].startswith("the"))


@pytest.mark.netns
def test_pipelines_over_emulated_lines(namespaces):
    small = "--layers 1 --width 64 --context 16 --microbatches 4 --batch 1 --steps 1 --rtt 0 20 --encodings int8 --json"
    command = [sys.executable, BENCHES / "pipeline.py", *small.split()]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240)
    assert result.returncode == 0, result.stdout  # it goes by what 100 ms take
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["case"] for row in rows] == [
        "int8, 0 ms: tokens",
        "int8, 20 ms: tokens",
        "int8, 20 ms: tokens of SWARM",
        "int8, 20 ms: tokens of GPipe",
    ]
    assert all(row["ours"] > 0 and row["rival"] > 0 for row in rows)
