"""Swarms that live in one process, for tests of optimizers."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch


class Alone:
    """A swarm of one: the mean is what the only peer brings."""

    def __init__(self):
        self.weights = []

    def all_reduce(self, values, weight):
        self.weights.append(weight)
        return SimpleNamespace(mean=values.clone())


class LocalCollective:
    """`n` peers in `n` threads. The mean is exact: summed in double precision, in the order of the peers."""

    def __init__(self, n):
        self._slots = [None] * n
        self._barrier = threading.Barrier(n)

    def seat(self, index):
        def all_reduce(values, weight):
            self._slots[index] = (values, weight)
            self._barrier.wait(timeout=60)
            mean = exact_mean(self._slots)
            self._barrier.wait(timeout=60)
            return SimpleNamespace(mean=mean)

        return SimpleNamespace(all_reduce=all_reduce)


def exact_mean(contributions):
    total = sum(weight for _, weight in contributions)
    if total == 0:
        return torch.zeros_like(contributions[0][0])
    return (sum(values.double() * weight for values, weight in contributions) / total).float()


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are slower on many threads, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone():
    return Alone()


@pytest.fixture
def local_collective():
    return LocalCollective


@pytest.fixture
def mean_of():
    return exact_mean
