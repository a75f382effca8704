"""Compares methods of low-communication training on a small language model: the same data, tokens and seeds for all.

    python scripts/experiments/methods.py                  # all rows, one seed
    python scripts/experiments/methods.py --seeds 0 1 2 --rows sync single fedavg-50 diloco-50
    python scripts/experiments/methods.py --corpus tinyshakespeare.txt --rows sync single diloco-50

A transformer of some 110,000 parameters is trained on the source of Python's standard library, or another text: first
alone, then from there by so many replicas with each method, all with the same number of tokens in all. Each row runs in
a process of its own, its replicas in a `LocalSwarm`, through the recipes that ship. The losses are those on held-out
text of what a run ends with, and, as its curve, those of one replica's own parameters on the way. Results go to
docs/results/methods.csv one by one; what is there already is not run again.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import time
from pathlib import Path
from typing import Literal

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim import (
    GradientOptimizer,
    LocalSwarm,
    LowCommunicationOptimizer,
    MultiTimescaleOptimizer,
    MuonAdamW,
    QuasiHyperbolicAdam,
    gradient_recipe,
    recipe,
)
from optim.methods import GRADIENT_RECIPES
from optim.spsa import SpsaOptimizer
from peer.model import Transformer
from protocol.codecs import CodecName
from scripts.experiments.table import Line, Table, command
from scripts.experiments.task import PEAK, Peer, Task, adamw, loss_of, take_step

LINK = 100e6 / 8  # bytes per second, for the computed times
POINTS = 8  # of a curve
MUON_RATE = 0.02
FIELDS = ("row", "seed", "loss", "spread", "bytes", "reduction", "link seconds", "seconds", "curve")


@attrs.frozen(kw_only=True)
class Row:
    """One method with its constants.

    Attributes:
        method: By name; "single" exchanges nothing, "spsa" only scalars.
        constants: Of its recipe.
        replicas: How many.
        codec: How reduced values look on the wire.
        rate: The peak learning rate, if it is another one.
        inner: The inner optimizer; SGD where the method has momentum of its own.
    """

    method: str
    constants: dict[str, float | str] = attrs.field(factory=dict)
    replicas: int = 4
    codec: CodecName = "fp32"
    rate: float = PEAK
    inner: Literal["adamw", "muon", "sgd"] = "adamw"

    def inner_optimizer(self, model: Transformer) -> torch.optim.Optimizer:
        """The inner optimizer."""
        if self.inner == "adamw":
            return adamw(model)
        if self.inner == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.rate)
        muon = MuonAdamW(model, lr=MUON_RATE, other_lr=self.rate, others=[model.embedding.weight])
        for group in muon.param_groups:
            group["scale"] = group["lr"] / self.rate
        return muon


@attrs.frozen(kw_only=True)
class Life:
    """What became of a replica.

    Attributes:
        loss: Of what it ends with.
        own: Of its own parameters before the end.
        curve: Of its own parameters on the way, if it is the first of them.
        digest: Of what it ends with.
    """

    loss: float
    own: float
    curve: tuple[float, ...]
    digest: str


def diloco(steps: int, momentum: float = 0.5, rate: float = 0.7, **options: object) -> Row:
    """DiLoCo after every so many steps."""
    constants = {"inner_steps": steps, "outer_lr": rate, "outer_momentum": momentum}
    return Row(method="diloco", constants=constants, **options)


ROWS: dict[str, Row] = {
    "sync": Row(method="data-parallel"),
    "single": Row(method="single"),
    "merge once": Row(method="fedavg", constants={"inner_steps": 400}),
    "fedavg-20": Row(method="fedavg", constants={"inner_steps": 20}),
    "fedavg-50": Row(method="fedavg", constants={"inner_steps": 50}),
    "diloco-1": diloco(1),
    "diloco-10": diloco(10),
    "diloco-20": diloco(20),
    "diloco-50": diloco(50),
    "diloco-100": diloco(100),
    "diloco-50 momentum 0.9": diloco(50, 0.9),
    "diloco-50 0.35": diloco(50, rate=0.35),
    "diloco-50 M=2": diloco(50, replicas=2),
    "diloco-50 M=8": diloco(50, replicas=8),
    "diloco-50 bf16": diloco(50, codec="bf16"),
    "diloco-50 int8": diloco(50, codec="int8"),
    "diloco-50 int4": diloco(50, codec="int4"),
    "diloco-50 e3m0": diloco(50, codec="e3m0"),
    "streaming-48": Row(
        method="streaming",
        constants={"inner_steps": 48, "fragments": 2, "delay": 1, "outer_lr": 0.7, "outer_momentum": 0.5},
    ),
    "streaming-48 delay 5": Row(
        method="streaming",
        constants={"inner_steps": 48, "fragments": 2, "delay": 5, "outer_lr": 0.7, "outer_momentum": 0.5},
    ),
    "streaming-48 e3m0": Row(
        method="streaming",
        constants={"inner_steps": 48, "fragments": 2, "delay": 1, "outer_lr": 0.7, "outer_momentum": 0.5},
        codec="e3m0",
    ),
    "eager-20": Row(method="eager", constants={"inner_steps": 20, "outer_lr": 0.35}),
    "eager-50": Row(method="eager", constants={"inner_steps": 50, "outer_lr": 0.35}),
    "delayed-10": Row(method="delayed", constants={"inner_steps": 10, "outer_lr": 0.2}),
    "delayed-50": Row(method="delayed", constants={"inner_steps": 50, "outer_lr": 0.35}),
    "dilocox-20": Row(
        method="dilocox", constants={"inner_steps": 20, "outer_lr": 0.35, "rank": 8, "adaptive": False}, codec="int4"
    ),
    "dilocox-20 adaptive": Row(
        method="dilocox", constants={"inner_steps": 20, "outer_lr": 0.35, "rank": 8}, codec="int4"
    ),
    "co2-48": Row(method="co2", constants={"inner_steps": 48, "momentum": 0.2}),
    "asynchronous-50": Row(
        method="asynchronous", constants={"inner_steps": 50, "buffer": 4, "outer_lr": 0.7, "outer_momentum": 0.5}
    ),
    "asynchronous-50 plain": Row(
        method="asynchronous-plain", constants={"inner_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.5}
    ),
    "decoupled-48": Row(
        method="decoupled",
        constants={"inner_steps": 48, "fragments": 2, "delay": 0, "quorum": 3, "outer_momentum": 0.5},
    ),
    "slowmo-48": Row(method="slowmo", constants={"inner_steps": 48, "momentum": 0.4}),
    "fedadam-50": Row(method="fedopt", constants={"inner_steps": 50, "outer_lr": 0.05, "tau": 0.01}),
    "fedyogi-50": Row(method="fedopt", constants={"inner_steps": 50, "rule": "yogi", "outer_lr": 0.05, "tau": 0.01}),
    "fedadagrad-50": Row(
        method="fedopt", constants={"inner_steps": 50, "rule": "adagrad", "outer_lr": 0.05, "tau": 0.01}
    ),
    "fedprox-50": Row(method="fedprox", constants={"inner_steps": 50}),
    "fedsam-50": Row(method="fedsam", constants={"inner_steps": 50}),
    "quadratic": Row(method="quadratic", constants={"base_steps": 4, "alpha": 0.01}),
    "noloco-25": Row(method="noloco", constants={"inner_steps": 25}),
    "noloco-25 M=8": Row(method="noloco", constants={"inner_steps": 25}, replicas=8),
    "mt-dao-50": Row(method="mt-dao", constants={"sync_every": 50}),
    "gossip": Row(method="gossip"),
    "gossip exponential": Row(method="gossip", constants={"pairing": "exponential"}),
    "gossip exponential-ring": Row(method="gossip", constants={"pairing": "exponential-ring"}),
    "gossip corrected": Row(method="gossip", constants={"corrected": True}),
    "sparseloco-20": Row(method="sparseloco", constants={"inner_steps": 20}),
    "powersgd": Row(method="powersgd", constants={"rank": 8}),
    "demo": Row(method="demo", rate=1e-3, inner="sgd"),
    "lion": Row(method="lion", rate=4e-4, inner="sgd"),
    "sync muon": Row(method="data-parallel", inner="muon"),
    "diloco-50 muon": diloco(50, inner="muon"),
    "terngrad": Row(method="terngrad"),
    "spsa": Row(method="spsa", rate=1e-4, inner="sgd"),
}


def replica(row: Row, seed: int, task: Task, peer: Peer) -> Life:
    """One replica's life."""
    model = task.make()
    model.load_state_dict(task.pretrained(seed))
    batches = task.batches(peer, seed, len(peer.members), row.replicas)
    optimizer = _optimizer(row, model, peer, seed)
    curve: list[float] = []
    for step in range(task.steps):
        rate, windows = task.rate(step, row.rate), next(batches)
        if isinstance(optimizer, SpsaOptimizer):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step(functools.partial(_loss, model, windows))
        else:
            take_step(model, optimizer, windows, rate)
        if peer.peer_id == peer.members[0] and (step + 1) % (task.steps // POINTS) == 0:
            curve.append(task.validation(model, seed))
    own = task.validation(model, seed)
    if isinstance(optimizer, LowCommunicationOptimizer) and row.method == "quadratic":
        optimizer.synchronize()  # its last interval is whatever is left
    if isinstance(optimizer, LowCommunicationOptimizer | MultiTimescaleOptimizer):
        optimizer.finish()
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return Life(loss=task.validation(model, seed), own=own, curve=tuple(curve), digest=digest)


def _loss(model: Transformer, windows: torch.Tensor) -> float:
    return loss_of(model, windows).item()


def _optimizer(row: Row, model: Transformer, peer: Peer, seed: int) -> torch.optim.Optimizer:
    inner = row.inner_optimizer(model)
    if row.method == "single":
        return inner
    if row.method == "spsa":
        return SpsaOptimizer(model, inner, peer, seed=1000 * seed + peer.members.index(peer.peer_id))
    if row.method == "mt-dao":
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in inner.param_groups]
        adam = QuasiHyperbolicAdam(groups, momenta=((0.95, 0.6), (0.99, 0.3)), beta=0.95)
        return MultiTimescaleOptimizer(model, adam, peer, sync_every=int(row.constants["sync_every"]))
    if row.method in GRADIENT_RECIPES:
        return GradientOptimizer(model, inner, peer, gradient_recipe(row.method, **row.constants))
    return LowCommunicationOptimizer(model, inner, peer, recipe(row.method, **row.constants))


def every_step(row: Row, task: Task) -> int:
    """Bytes that a peer would send if it averaged gradients in every step."""
    return 2 * (row.replicas - 1) * 4 * task.length // row.replicas * task.steps


def run(name: str, seed: int, task: Task) -> list[Line]:
    """One row."""
    row = ROWS[name]
    swarm = LocalSwarm(1 if row.method == "single" else row.replicas, codec=row.codec)
    task.data(seed), task.pretrained(seed)  # once for all replicas
    started = time.monotonic()
    lives = swarm.run(functools.partial(replica, row, seed, task))
    own = [life.own for life in lives]
    sent = swarm.peers[0].bytes_sent
    line = {
        "row": name,
        "seed": seed,
        "loss": f"{lives[0].loss:.4f}",
        "spread": f"{max(own) - min(own):.4f}",
        "bytes": sent,
        "reduction": f"{every_step(row, task) / sent:.1f}" if sent else "",
        "link seconds": f"{sent / LINK:.2f}",
        "seconds": f"{time.monotonic() - started:.0f}",
        "curve": " ".join(f"{loss:.4f}" for loss in lives[0].curve),
    }
    return [line]


ABOUT = (__doc__ or "").partition("\n")[0]
TABLE = Table(script=__file__, about=ABOUT, rows=ROWS, fields=FIELDS, run=run)

if __name__ == "__main__":
    sys.exit(command(TABLE))
