"""One of four peers is four times slower: how long do methods take to a given loss?

    python scripts/experiments/heterogeneous.py                # all rows, one seed
    python scripts/experiments/heterogeneous.py --seeds 0 1 2 --rows synchronous quorum

The task, the data and the beginning are those of methods.py. Time is simulated: a step takes one unit, four at the slow
peer, and exchanges take none, so the results do not depend on the machine. After each of its exchanges the first peer
measures the loss of the outer parameters on held-out text; these curves go to docs/results/heterogeneous.csv, and what
is there already is not run again. Then it is told when each method has reached the loss that the synchronous one ends
with. The learning rate is constant after a warm-up, so that no method is helped by the end of a schedule.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from optim.local import LocalPeer
from peer.model import Transformer
from scripts.experiments.methods import (
    BATCH,
    MODEL,
    PEAK,
    ROOT,
    WARMUP,
    adamw,
    batches_of,
    data_of,
    done,
    pretrained,
    take_step,
    validation,
)

COSTS = (1.0, 1.0, 1.0, 4.0)
"""Units of time that a step takes at each peer."""

UNTIL = 1200.0
"""How long the synchronous method trains; the others two thirds of that, which are enough to be 1.5 x as fast."""

GRACE = 2.0
OUTER: dict[str, float | str] = {"inner_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.5}
ROWS: dict[str, tuple[str, dict[str, float | str]]] = {
    "synchronous": ("diloco", OUTER),
    "dynamic local steps": ("paced", OUTER),
    "quorum": ("decoupled", OUTER | {"fragments": 1, "delay": 0, "quorum": 3, "grace": GRACE, "radial": False}),
    "asynchronous": ("asynchronous", OUTER | {"buffer": 4, "paced": False, "grace": GRACE}),
    "asynchronous, dynamic": ("asynchronous", OUTER | {"buffer": 4, "grace": GRACE}),
    "asynchronous, plain": ("asynchronous-plain", OUTER | {"grace": GRACE}),
}
FIELDS = ("row", "seed", "time", "loss")


def replica(name: str, seed: int, begin: dict[str, torch.Tensor], peer: LocalPeer) -> list[tuple[float, float]]:
    """One replica's life: when it had made each exchange, and with what loss if it is the first peer."""
    index = peer.members.index(peer.peer_id)
    pace = min(COSTS) / COSTS[index]
    model = Transformer(MODEL)
    model.load_state_dict(begin)
    method, constants = ROWS[name]
    optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe(method, **constants), pace=lambda: pace)
    data = data_of(seed)
    batches = batches_of(data, peer, len(COSTS), 2, BATCH // len(COSTS))
    curve: list[tuple[float, float]] = []
    step = 0
    while peer.time < (UNTIL if name == "synchronous" else UNTIL / 1.5):
        peer.advance(COSTS[index])
        take_step(model, optimizer, next(batches), PEAK * min(1.0, (step + 1) / WARMUP))
        step += 1
        if index == 0 and optimizer.rounds > len(curve):
            curve.append((peer.time, validation(model, data)))
    optimizer.finish()
    return curve


def run(name: str, seed: int, out: Path, work: Path) -> None:
    """One row."""
    begin = pretrained(seed, work)
    data_of(seed)
    curve = LocalSwarm(len(COSTS)).run(partial(replica, name, seed, begin))[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        writer.writerows((name, seed, f"{time:g}", f"{loss:.4f}") for time, loss in curve)


def tell(out: Path, report: Callable[[str], None]) -> None:
    """When each row has reached the loss that the synchronous one ends with."""
    curves: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with out.open(newline="") as file:
        for line in csv.DictReader(file):
            point = (float(line["time"]), float(line["loss"]))
            curves.setdefault((line["row"], int(line["seed"])), []).append(point)
    for (name, seed), curve in sorted(curves.items(), key=lambda item: item[0][1]):
        if ("synchronous", seed) not in curves:
            continue
        whole, target = curves["synchronous", seed][-1]
        time = next((time for time, loss in curve if loss <= target), None)
        end = f"ends with {curve[-1][1]:.4f}"
        if time is None:
            report(f"{name}, seed {seed}: {target:.4f} is not reached, {end}")
        else:
            report(f"{name}, seed {seed}: {target:.4f} after {time:g}, {whole / time:.2f} x as fast, {end}")


def main(arguments: Sequence[str] | None = None, *, report: Callable[[str], None] = print) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "heterogeneous.csv")
    parser.add_argument("--work", type=Path, default=ROOT / ".experiments", help="where pre-trained models are kept")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        torch.set_num_threads(1)
        run(options.rows[0], options.seeds[0], options.out, options.work)
        return 0
    failures = 0
    for seed in options.seeds:
        for name in options.rows:
            if (name, seed) not in done(options.out):
                place = ["--out", str(options.out), "--work", str(options.work)]
                command = [sys.executable, __file__, "--one", "--rows", name, "--seeds", str(seed), *place]
                failures += subprocess.run(command).returncode != 0
    if options.out.exists():
        tell(options.out, report)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
