"""Swarms that live in one process, for tests of optimizers."""

from __future__ import annotations

import pytest
import torch

from optim import LocalSwarm
from protocol.collective import Collective


class Recorder(Collective):
    """A swarm of one, which notes what the peer's values weigh."""

    def __init__(self):
        (self._peer,) = LocalSwarm(1).peers
        self.weights = []

    def all_reduce(self, values, weight=1.0, **options):
        self.weights.append(weight)
        return self._peer.all_reduce(values, weight, **options)

    def exchange(self, values, weight=1.0, **options):
        return self._peer.exchange(values, weight, **options)

    def gather(self, block, **options):
        return self._peer.gather(block, **options)

    def broadcast(self, block, **options):
        return self._peer.broadcast(block, **options)

    def barrier(self, **options):
        return self._peer.barrier(**options)


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are slower on many threads, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone():
    return Recorder()
