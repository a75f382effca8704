"""A table of results that is made row by row, each in a process of its own, and goes on where it was left."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from peer.data import STDLIB
from scripts.experiments.task import Task

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
Line = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Table:
    """What is measured.

    Attributes:
        script: The file that is run, whose name is the table's.
        about: What the command does, in a line.
        rows: By name.
        fields: The columns. The first two are "row" and "seed".
        run: Makes a row's lines, given its name, the seed, and the task.
        told: What to say about the whole table in the end, if anything.
    """

    script: str
    about: str
    rows: Collection[str]
    fields: Sequence[str]
    run: Callable[[str, int, Task], Iterable[Line]]
    told: Callable[[Path], Iterable[str]] = attrs.field(default=lambda path: ())


def done(path: Path) -> set[tuple[str, int]]:
    """What the table has already."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(line["row"], int(line["seed"])) for line in csv.DictReader(file)}


def columns(path: Path) -> list[str]:
    """What the columns of a table are called."""
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def append(path: Path, fields: Sequence[str], lines: Iterable[Line]) -> None:
    """Adds lines to a table; the first ones make it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        writer.writerows(lines)


def command(table: Table, arguments: Sequence[str] | None = None, *, report: Callable[[str], None] = print) -> int:
    """Makes the rows that are missing; returns the exit code."""
    options = _options(table, arguments)
    task = (Task.quick if options.quick else Task)(work=options.work, corpus=options.corpus)
    if options.one:
        torch.set_num_threads(1)
        lines = list(table.run(options.rows[0], options.seeds[0], task))
        append(options.out, table.fields, lines)
        report("  ".join(str(value) for value in lines[-1].values()))
        return 0
    if options.out.exists() and columns(options.out) != list(table.fields):
        report(f"{options.out} has other columns: move it away, or name another one with --out")
        return 2
    same = ["--out", str(options.out), "--work", str(options.work), "--corpus", options.corpus]
    same += ["--quick"] if options.quick else []
    failures = 0
    for seed in options.seeds:
        for name in options.rows:
            if (name, seed) not in done(options.out):
                one = [sys.executable, table.script, "--one", "--rows", name, "--seeds", str(seed), *same]
                failures += subprocess.run(one).returncode != 0
    if options.out.exists():
        for line in table.told(options.out):
            report(line)
    return 1 if failures else 0


def _options(table: Table, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=table.about)
    parser.add_argument("--rows", nargs="+", choices=list(table.rows), default=list(table.rows), metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--corpus", default=STDLIB, help="a text file or folder in place of the standard library")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how well")
    parser.add_argument("--out", type=Path, help="the table; one in docs/results if not given")
    parser.add_argument("--work", type=Path, default=ROOT / ".experiments", help="where pre-trained models are kept")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out is None:
        name = Path(table.script).stem
        name += "" if options.corpus == STDLIB else f"-{Path(options.corpus).stem}"
        options.out = (options.work if options.quick else RESULTS) / f"{name}{'-quick' * options.quick}.csv"
    return options
