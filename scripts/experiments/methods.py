"""Compares methods of low-communication training on a small language model: the same data, tokens and seeds for all.

    python scripts/experiments/methods.py                  # all rows, one seed
    python scripts/experiments/methods.py --seeds 0 1 2 --rows sync single fedavg-50 diloco-50

A transformer of some 110,000 parameters is trained on the source of Python's standard library: first alone, then from
there by so many replicas with each method, all with the same number of tokens in all. Each row runs in a process of
its own, its replicas in a `LocalSwarm`, through the recipes that ship. The losses are those on held-out text of what a
run ends with. Results go to docs/results/methods.csv one by one; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim import (
    GradientOptimizer,
    LocalSwarm,
    LowCommunicationOptimizer,
    MultiTimescaleOptimizer,
    QuasiHyperbolicAdam,
    gradient_recipe,
    recipe,
)
from optim.local import LocalPeer
from optim.spsa import SpsaOptimizer
from peer.data import STDLIB, Corpus, Dataset
from peer.model import Transformer
from peer.settings import DataSettings, ModelSettings
from protocol.codecs import CodecName

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSettings(layers=2, width=64, heads=4, context=64)
BATCH = 64  # sequences of all replicas in one step
STEPS, PEAK, WARMUP, FLOOR = 400, 4e-3, 20, 0.05
BEFORE_STEPS, BEFORE_BATCH, BEFORE_RATE, BEFORE_WARMUP = 1500, 32, 8e-3, 50
WINDOWS = 256
LINK = 100e6 / 8  # bytes per second, for the computed times
FIELDS = ("row", "seed", "loss", "spread", "bytes", "reduction", "link seconds", "seconds")


@attrs.frozen(kw_only=True)
class Row:
    """One method with its constants.

    Attributes:
        method: By name; "single" exchanges nothing, "spsa" only scalars.
        constants: Of its recipe.
        replicas: How many.
        codec: How reduced values look on the wire.
        rate: The peak learning rate, if it is another one.
        plain: Whether the inner optimizer is SGD, as the method has momentum of its own.
    """

    method: str
    constants: dict[str, float | str] = attrs.field(factory=dict)
    replicas: int = 4
    codec: CodecName = "fp32"
    rate: float = PEAK
    plain: bool = False


def diloco(steps: int, momentum: float = 0.5, rate: float = 0.7, **options: object) -> Row:
    """DiLoCo after every so many steps."""
    constants = {"inner_steps": steps, "outer_lr": rate, "outer_momentum": momentum}
    return Row(method="diloco", constants=constants, **options)


ROWS: dict[str, Row] = {
    "sync": Row(method="data-parallel"),
    "single": Row(method="single"),
    "merge once": Row(method="fedavg", constants={"inner_steps": STEPS}),
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
    "quadratic": Row(method="quadratic", constants={"base_steps": 4, "alpha": 0.01}),
    "noloco-25": Row(method="noloco", constants={"inner_steps": 25}),
    "noloco-25 M=8": Row(method="noloco", constants={"inner_steps": 25}, replicas=8),
    "mt-dao-50": Row(method="mt-dao", constants={"sync_every": 50}),
    "gossip": Row(method="gossip"),
    "gossip exponential": Row(method="gossip", constants={"pairing": "exponential"}),
    "gossip exponential-ring": Row(method="gossip", constants={"pairing": "exponential-ring"}),
    "sparseloco-20": Row(method="sparseloco", constants={"inner_steps": 20}),
    "powersgd": Row(method="powersgd", constants={"rank": 8}),
    "demo": Row(method="demo", rate=1e-3, plain=True),
    "lion": Row(method="lion", rate=4e-4, plain=True),
    "terngrad": Row(method="terngrad"),
    "spsa": Row(method="spsa", rate=1e-4, plain=True),
}


@functools.cache
def data_of(seed: int) -> Dataset:
    """The text. It is only read, so all replicas of a process share it."""
    return Dataset(Corpus.open(STDLIB), DataSettings(), seed=seed, context=MODEL.context)


def rate_at(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model: Transformer, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation(model: Transformer, data: Dataset) -> float:
    """Loss on held-out text, always the same windows."""
    windows = data.validation_windows(WINDOWS)
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(64)) / len(windows)


def adamw(model: Transformer) -> torch.optim.Optimizer:
    """The inner optimizer: matrices decay, gains do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def take_step(model: Transformer, optimizer: torch.optim.Optimizer, windows: torch.Tensor, rate: float) -> None:
    """One step of ordinary training."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss_of(model, windows).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def pretrained(seed: int, work: Path) -> dict[str, torch.Tensor]:
    """Where all methods begin: one model after a while of ordinary training, made once."""
    path = work / f"pretrained-{seed}.pt"
    if not path.exists():
        model = Transformer(MODEL, seed=seed)
        optimizer, data = adamw(model), data_of(seed)
        batches = batches_of(data, LocalSwarm(1).peers[0], 1, 1, BEFORE_BATCH)
        for step in range(BEFORE_STEPS):
            take_step(model, optimizer, next(batches), BEFORE_RATE * min(1.0, (step + 1) / BEFORE_WARMUP))
        work.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def batches_of(data: Dataset, peer: LocalPeer, size: int, phase: int, batch: int) -> Iterator[torch.Tensor]:
    """Batches of a peer's own shards."""
    return data.training_batches(peer.peer_id, peer.members[:size], phase, batch)


def replica(row: Row, seed: int, begin: dict[str, torch.Tensor], peer: LocalPeer) -> tuple[float, float]:
    """One replica's life: the loss of what it ends with, and of its own parameters before the end."""
    size = len(peer.members)
    data = data_of(seed)
    model = Transformer(MODEL)
    model.load_state_dict(begin)
    inner = torch.optim.SGD(model.parameters(), lr=row.rate) if row.plain else adamw(model)
    batches = batches_of(data, peer, size, 2, BATCH // row.replicas)
    optimizer = _optimizer(row, model, inner, peer, seed)
    for step in range(STEPS):
        rate, windows = rate_at(step, STEPS, row.rate, WARMUP), next(batches)
        if isinstance(optimizer, SpsaOptimizer):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step(functools.partial(_loss, model, windows))
        else:
            take_step(model, optimizer, windows, rate)
    own = validation(model, data)
    if isinstance(optimizer, LowCommunicationOptimizer | MultiTimescaleOptimizer):
        optimizer.finish()
    return validation(model, data), own


def _loss(model: Transformer, windows: torch.Tensor) -> float:
    return loss_of(model, windows).item()


def _optimizer(
    row: Row, model: Transformer, inner: torch.optim.Optimizer, peer: LocalPeer, seed: int
) -> torch.optim.Optimizer:
    if row.method == "single":
        return inner
    if row.method == "spsa":
        return SpsaOptimizer(model, inner, peer, seed=1000 * seed + peer.members.index(peer.peer_id))
    if row.method == "mt-dao":
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in inner.param_groups]
        adam = QuasiHyperbolicAdam(groups, momenta=((0.95, 0.6), (0.99, 0.3)), beta=0.95)
        return MultiTimescaleOptimizer(model, adam, peer, sync_every=int(row.constants["sync_every"]))
    if row.method in ("data-parallel", "powersgd", "demo", "lion", "terngrad"):
        return GradientOptimizer(model, inner, peer, gradient_recipe(row.method, **row.constants))
    return LowCommunicationOptimizer(model, inner, peer, recipe(row.method, **row.constants))


def run(name: str, seed: int, work: Path) -> dict[str, object]:
    """One row."""
    row = ROWS[name]
    swarm = LocalSwarm(1 if row.method == "single" else row.replicas, codec=row.codec)
    begin, started = pretrained(seed, work), time.monotonic()
    data_of(seed)
    results = swarm.run(functools.partial(replica, row, seed, begin))
    own = [loss for _, loss in results]
    sent = swarm.peers[0].bytes_sent
    length = sum(parameter.numel() for parameter in Transformer(MODEL).parameters())
    every_step = 2 * (row.replicas - 1) * 4 * length // row.replicas * STEPS
    return {
        "row": name,
        "seed": seed,
        "loss": f"{results[0][0]:.4f}",
        "spread": f"{max(own) - min(own):.4f}",
        "bytes": sent,
        "reduction": f"{every_step / sent:.1f}" if sent else "",
        "link seconds": f"{sent / LINK:.2f}",
        "seconds": f"{time.monotonic() - started:.0f}",
    }


def done(path: Path) -> set[tuple[str, int]]:
    """What the table has already."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(line["row"], int(line["seed"])) for line in csv.DictReader(file)}


def main(arguments: Sequence[str] | None = None, *, report: Callable[[str], None] = print) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "methods.csv")
    parser.add_argument("--work", type=Path, default=ROOT / ".experiments", help="where pre-trained models are kept")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        torch.set_num_threads(1)
        line = run(options.rows[0], options.seeds[0], options.work)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        fresh = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(line)
        report("  ".join(str(value) for value in line.values()))
        return 0
    failures = 0
    for seed in options.seeds:
        for name in options.rows:
            if (name, seed) not in done(options.out):
                place = ["--out", str(options.out), "--work", str(options.work)]
                command = [sys.executable, __file__, "--one", "--rows", name, "--seeds", str(seed), *place]
                failures += subprocess.run(command).returncode != 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
