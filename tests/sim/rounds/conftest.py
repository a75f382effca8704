"""Swarms of peers that make rounds on a network in memory, on simulated time."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from tests.sim.swarm import running
from tests.sim.trainers import Trainers


@asynccontextmanager
async def running_swarm(count: int, *, train: bool = True, **options):
    """A swarm whose peers run.

    Without `train`, the peers are connected and take part in nothing by themselves. With a `schedule`, all plans have
    that one; with "any", this or that, and members own parts of any size.
    """
    async with running(Trainers(count, **options)) as swarm:
        if train:
            swarm.begin.set()
        yield swarm


@pytest.fixture
def swarm_of():
    """A factory of running swarms: `async with swarm_of(4, seed=…) as swarm`. Tests also take `autojump_clock`."""
    return running_swarm
