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

import csv
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from optim.local import LocalPeer
from scripts.experiments.table import Line, Table, command
from scripts.experiments.task import PEAK, Task, adamw, take_step

COSTS = (1.0, 1.0, 1.0, 4.0)
"""Units of time that a step takes at each peer."""

ENOUGH = 1.5
"""How much longer the synchronous method trains than the others, who are to be at least so much faster."""

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


def replica(name: str, seed: int, task: Task, peer: LocalPeer) -> list[tuple[float, float]]:
    """One replica's life: when it had made each exchange, and with what loss if it is the first peer."""
    index = peer.members.index(peer.peer_id)
    pace = min(COSTS) / COSTS[index]
    model = task.make()
    model.load_state_dict(task.pretrained(seed))
    method, constants = ROWS[name]
    optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe(method, **constants), pace=lambda: pace)
    batches = task.batches(peer, seed, len(COSTS), len(COSTS))
    until = task.steps * 3 / (1 if name == "synchronous" else ENOUGH)
    curve: list[tuple[float, float]] = []
    step = 0
    while peer.time < until:
        peer.advance(COSTS[index])
        take_step(model, optimizer, next(batches), PEAK * min(1.0, (step + 1) / task.warmup))
        step += 1
        if index == 0 and optimizer.rounds > len(curve):
            curve.append((peer.time, task.validation(model, seed)))
    optimizer.finish()
    return curve


def run(name: str, seed: int, task: Task) -> list[Line]:
    """One row: a line for each point of its curve."""
    task.data(seed), task.pretrained(seed)  # once for all replicas
    curve = LocalSwarm(len(COSTS)).run(partial(replica, name, seed, task))[0]
    return [{"row": name, "seed": seed, "time": f"{time:g}", "loss": f"{loss:.4f}"} for time, loss in curve]


def tell(out: Path) -> Iterator[str]:
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
            yield f"{name}, seed {seed}: {target:.4f} is not reached, {end}"
        else:
            yield f"{name}, seed {seed}: {target:.4f} after {time:g}, {whole / time:.2f} x as fast, {end}"


ABOUT = (__doc__ or "").partition("\n")[0]
TABLE = Table(script=__file__, about=ABOUT, rows=ROWS, fields=FIELDS, run=run, told=tell)

if __name__ == "__main__":
    sys.exit(command(TABLE))
