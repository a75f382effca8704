"""Running pipelines."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import torch
import trio

from tests.sim.pipelines import PipelineSwarm


@pytest.fixture
def swarm_of():
    """A factory of running pipelines: `async with swarm_of(pipeline, [0, 0, 1], seed=…) as swarm`."""

    @asynccontextmanager
    async def running(pipeline, assignment, *, seed=0):
        trio._core._run._r.seed(seed)  # the order of tasks; importing hypothesis makes trio respect it
        torch.set_num_threads(1)
        swarm = PipelineSwarm(pipeline, assignment, seed)
        with trio.fail_after(1500):
            async with trio.open_nursery() as swarm.nursery:
                for peer in swarm.peers:
                    swarm.start(peer)
                yield swarm
                for peer in swarm.peers:
                    peer.scope.cancel()

    return running
