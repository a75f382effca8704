"""The experiments at small sizes: they run, go on where they were left, and judge what they find."""

import csv
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "scripts" / "experiments"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text to train on, where models that have been trained alone are kept as well."""
    folder = tmp_path_factory.mktemp("experiments")
    words = ["shoal", "peer", "round", "loss", "\n"]
    (folder / "text.txt").write_text(" ".join(random.Random(1).choices(words, k=10_000)))
    return folder


@pytest.fixture
def run(place, tmp_path):
    """Runs an experiment at its small size; returns the table's lines."""

    def run(script, *rows, out=tmp_path / "table.csv"):
        command = [sys.executable, EXPERIMENTS / script, "--quick", "--corpus", place / "text.txt", "--work", place]
        command += ["--out", out, "--rows", *rows]
        result = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert result.returncode == 0, result.stderr
        with out.open(newline="") as file:
            return list(csv.DictReader(file)), result.stdout

    return run


@pytest.mark.processes
def test_methods_go_on_where_they_were_left(run):
    (alone,), _ = run("methods.py", "single")
    assert alone["row"] == "single" and alone["bytes"] == "0"
    lines, told = run("methods.py", "single", "diloco-50")
    assert lines[0] == alone  # with its time: it has not been run again
    assert "single" not in told
    together = lines[1]
    assert together["row"] == "diloco-50" and together["reduction"] == "50.0"
    curve = [float(loss) for loss in together["curve"].split()]
    assert len(curve) == 8 and curve[-1] < curve[0] and float(together["loss"]) < curve[0]


def test_a_table_with_other_columns_is_left_alone(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("row,seed\nsingle,0\n")
    command = [sys.executable, EXPERIMENTS / "methods.py", "--quick", "--out", table, "--rows", "sync"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2 and "has other columns" in result.stdout
    assert table.read_text() == "row,seed\nsingle,0\n"


@pytest.mark.processes
def test_all_ways_of_training(run):
    """A row of each of the optimizers, and those whose steps are special."""
    rows = ("powersgd", "spsa", "mt-dao-50", "fedsam-50", "diloco-50 muon")
    lines, _ = run("methods.py", *rows)
    assert [line["row"] for line in lines] == list(rows)
    assert all(int(line["bytes"]) > 0 for line in lines)


@pytest.mark.processes
def test_peers_of_unequal_speed(run):
    lines, told = run("heterogeneous.py", "synchronous", "quorum")
    times = {row: [float(line["time"]) for line in lines if line["row"] == row] for row in ("synchronous", "quorum")}
    assert times["synchronous"][0] == 200  # 50 steps of the slow one
    assert times["quorum"][0] == 52  # 50 of the others, and the grace
    assert "synchronous, seed 0" in told and "quorum, seed 0" in told


@pytest.mark.processes
def test_real_peers_end_with_the_bits_of_local_ones(run):
    (line,), _ = run("real_peers.py", "diloco-50")
    assert line["same bits"] == "yes" and line["loss"] == line["local loss"]
    assert int(line["bytes"]) > int(line["payload"]) > 0


LOSSES = {
    "sync": 1.0,
    "diloco-50 M=2": 1.002,
    "diloco-10": 1.005,
    "diloco-50": 1.01,
    "diloco-50 int8": 1.01,
    "diloco-50 e3m0": 1.012,
    "noloco-25": 1.015,
    "diloco-100": 1.015,
    "diloco-50 M=8": 1.02,
    "fedavg-50": 1.02,
    "diloco-50 0.35": 1.025,
    "eager-50": 1.03,
    "delayed-50": 1.04,
    "single": 1.05,
}


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (LOSSES, None),
        (
            LOSSES | {"fedavg-50": 1.005},
            "sync < DiLoCo(50) < FedAvg(50) < single; seed 2: 1, 1.01, 1.005, 1.05: MISSED",
        ),
        (LOSSES | {"noloco-25": 1.04}, "NoLoCo <= 1.035 x sync; seed 0: 1.04, 1: MISSED"),
        ({row: loss for row, loss in LOSSES.items() if row != "diloco-10"}, "seed 1: 1.01, 1.015: not measured"),
    ],
)
def test_gates(losses, told, tmp_path):
    table = tmp_path / "methods.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "seed", "loss", "reduction"))
        less = {"diloco-50": 50, "diloco-50 e3m0": 396}
        writer.writerows((row, seed, loss, less.get(row, 1)) for row, loss in losses.items() for seed in range(3))
    command = [sys.executable, EXPERIMENTS / "gates.py", "--table", table]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == (0 if told is None else 1), result.stdout + result.stderr
    assert ("MISSED" in result.stdout or "not measured" in result.stdout) == (told is not None)
    assert told is None or told in result.stdout


def draw(folder, **environment):
    command = [sys.executable, EXPERIMENTS / "plots.py", "--results", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_drawing_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    result = draw(tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "pip install 'shoal[plots]'" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_drawing(tmp_path):
    assert draw(tmp_path).returncode == 1
    for name in ("methods.csv", "heterogeneous.csv", "real_peers.csv"):
        (tmp_path / name).write_bytes((ROOT / "docs" / "results" / name).read_bytes())
    result = draw(tmp_path)
    assert result.returncode == 0, result.stderr
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert {"methods-bytes.svg", "heterogeneous-time.svg"} <= drawn.keys()
    assert "diloco-50" in drawn["methods-bytes.svg"] and "quorum" in drawn["heterogeneous-time.svg"]
