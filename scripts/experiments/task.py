"""What the experiments have in common: a small language model, its text, and where all methods begin.

A transformer of some 110,000 parameters is trained alone for a while, on the source of Python's standard library or on
any other text. From there replicas go on with each method, all with the same number of tokens in all.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import attrs
import torch
import torch.nn.functional as F

from optim import LocalSwarm
from optim.local import LocalPeer
from peer.data import STDLIB, Corpus, Dataset
from peer.model import Transformer
from peer.settings import DataSettings, ModelSettings
from protocol.standalone import Joined

MODEL = ModelSettings(layers=2, width=64, heads=4, context=64)
PEAK, FLOOR = 4e-3, 0.05
BEFORE_RATE, BEFORE_WARMUP = 8e-3, 50


Peer: TypeAlias = LocalPeer | Joined
"""One of a `LocalSwarm`, or a real one."""


@attrs.frozen(kw_only=True)
class Task:
    """What is trained, and for how long.

    Attributes:
        work: Where models that have been trained alone are kept.
        corpus: The text: a file, a folder, or "stdlib".
        model: Its sizes.
        batch: Sequences of all replicas in one step.
        steps: That each replica takes.
        warmup: How many of them the learning rate rises.
        windows: Of held-out text that losses are measured on.
        before_steps: That the model has been trained alone.
        before_batch: Sequences in each of these.
    """

    work: Path
    corpus: str = STDLIB
    model: ModelSettings = MODEL
    batch: int = 64
    steps: int = 400
    warmup: int = 20
    windows: int = 256
    before_steps: int = 1500
    before_batch: int = 32

    @classmethod
    def quick(cls, work: Path, corpus: str = STDLIB) -> Task:
        """Sizes that show whether everything works, and nothing else."""
        sizes = ModelSettings(layers=1, width=16, heads=2, context=16)
        return cls(work=work, corpus=corpus, model=sizes, batch=8, steps=100, windows=16, before_steps=20)

    def make(self, seed: int = 0) -> Transformer:
        """The model."""
        return Transformer(self.model, seed=seed)

    @property
    def length(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel() for parameter in self.make().parameters())

    def data(self, seed: int) -> Dataset:
        """The text. It is only read, so all replicas of a process share it."""
        return _dataset(self.corpus, seed, self.model.context)

    def batches(self, peer: Peer, seed: int, size: int, replicas: int) -> Iterator[torch.Tensor]:
        """Batches of a peer's own shards."""
        return self.data(seed).training_batches(peer.peer_id, peer.members[:size], 2, self.batch // replicas)

    def rate(self, step: int, peak: float) -> float:
        """Linear warm-up, then half a cosine down to a twentieth."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))

    @torch.no_grad()
    def validation(self, model: Transformer, seed: int) -> float:
        """Loss on held-out text, always the same windows."""
        windows = self.data(seed).validation_windows(self.windows)
        return sum(loss_of(model, part).item() * len(part) for part in windows.split(64)) / len(windows)

    def pretrained(self, seed: int) -> dict[str, torch.Tensor]:
        """Where all methods begin: one model after a while of ordinary training, made once."""
        before = (self.model, self.before_steps, self.before_batch, BEFORE_RATE, BEFORE_WARMUP)
        digest = hashlib.blake2b(repr(before).encode(), digest_size=6)
        digest.update(_corpus(self.corpus).text)
        path = self.work / f"pretrained-{digest.hexdigest()}-{seed}.pt"
        if not path.exists():
            model = self.make(seed)
            optimizer, peer = adamw(model), LocalSwarm(1).peers[0]
            batches = self.data(seed).training_batches(peer.peer_id, peer.members, 1, self.before_batch)
            for step in range(self.before_steps):
                take_step(model, optimizer, next(batches), BEFORE_RATE * min(1.0, (step + 1) / BEFORE_WARMUP))
            self.work.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            torch.save(model.state_dict(), part)
            part.replace(path)
        return torch.load(path, weights_only=True)


@functools.cache
def _corpus(source: str) -> Corpus:
    return Corpus.open(source)


@functools.cache
def _dataset(source: str, seed: int, context: int) -> Dataset:
    return Dataset(_corpus(source), DataSettings(), seed=seed, context=context)


def loss_of(model: Transformer, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def adamw(model: Transformer) -> torch.optim.Optimizer:
    """The inner optimizer: matrices decay, gains do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


def take_step(model: Transformer, optimizer: torch.optim.Optimizer, windows: torch.Tensor, rate: float) -> None:
    """One step of ordinary training. A group of parameters may have a "scale" for its rate."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.item()

    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
    optimizer.step(closure)
