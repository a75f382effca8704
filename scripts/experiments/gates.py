"""Checks what `methods.py` has measured against what the papers, and their reproductions, lead one to expect.

    python scripts/experiments/methods.py --seeds 0 1 2
    python scripts/experiments/gates.py

Every comparison has to hold for each seed by itself: all rows of a seed begin at the same model, and see the same text.
Exit code 1 if one does not, or a row is missing.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

TABLE = Path(__file__).resolve().parents[2] / "docs" / "results" / "methods.csv"
SEEDS = (0, 1, 2)


@attrs.frozen
class Gate:
    """Something that has to hold.

    Attributes:
        text: It in words.
        rows: Whose values it takes, in this order.
        holds: Whether it does, given each row's value.
        column: Which value: the loss, or by how much fewer bytes were sent than with an exchange in each step.
    """

    text: str
    rows: tuple[str, ...]
    holds: Callable[..., bool]
    column: str = "loss"


def within(most: float) -> Callable[[float, float], bool]:
    """Whether two values differ by no more than that."""
    return lambda one, other: abs(one - other) <= most


def ascending(*values: float) -> bool:
    """Whether each is less than the next."""
    return all(one < other for one, other in itertools.pairwise(values))


GATES = (
    Gate("sync < DiLoCo(50) < FedAvg(50) < single", ("sync", "diloco-50", "fedavg-50", "single"), ascending),
    Gate("DiLoCo(50) <= 1.03 x sync", ("diloco-50", "sync"), lambda one, sync: one <= 1.03 * sync),
    Gate("DiLoCo(50) sends 50 x fewer bytes", ("diloco-50",), lambda less: less >= 50, "reduction"),
    Gate("int8 within 0.004 nats of fp32", ("diloco-50 int8", "diloco-50"), within(0.004)),
    Gate("E3M0 within 0.006 nats of fp32", ("diloco-50 e3m0", "diloco-50"), within(0.006)),
    Gate("E3M0 sends 390 x fewer bytes, scales included", ("diloco-50 e3m0",), lambda less: less >= 390, "reduction"),
    Gate("NoLoCo <= 1.035 x sync", ("noloco-25", "sync"), lambda one, sync: one <= 1.035 * sync),
    Gate("2 replicas < 4 < 8", ("diloco-50 M=2", "diloco-50", "diloco-50 M=8"), ascending),
    Gate("10 inner steps < 50 < 100", ("diloco-10", "diloco-50", "diloco-100"), ascending),
    Gate("blocking < eager < delayed, all with 0.35", ("diloco-50 0.35", "eager-50", "delayed-50"), ascending),
)


def read(path: Path) -> dict[tuple[str, int], Mapping[str, str]]:
    """The table's lines, by row and seed."""
    with path.open(newline="") as file:
        return {(line["row"], int(line["seed"])): line for line in csv.DictReader(file)}


def main() -> int:
    """Checks and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    table, failures = read(options.table), 0
    for gate in GATES:
        for seed in SEEDS:
            lines = [table.get((row, seed)) for row in gate.rows]
            values = [float(line[gate.column]) for line in lines if line is not None]
            fine = len(values) == len(lines) and gate.holds(*values)
            failures += not fine
            verdict = "holds" if fine else "MISSED" if len(values) == len(lines) else "not measured"
            print(f"{gate.text}; seed {seed}: {', '.join(f'{value:g}' for value in values)}: {verdict}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
