"""Pipelines of real nodes: exact without faults, and every sample once with them."""

import pytest
import torch

from optim.swarm.ledger import Settled, audit
from optim.swarm.state import whole_state
from protocol.identity import PeerId
from tests.sim.pipelines import MICROBATCHES, pipeline, single_process


def records(swarm):
    found = []
    for peer in swarm.peers:
        for event in peer.of("stage_settled"):
            ledgers = {
                PeerId.parse(name): {int(number): count for number, count in ledger.items()}
                for name, ledger in event["ledgers"].items()
            }
            found.append(Settled(stage=event["stage"], step=event["step"], ledgers=ledgers))
    return found


def check(swarm, stages, steps):
    samples = dict.fromkeys(range(MICROBATCHES), 2)
    assert audit(records(swarm), stages=stages, steps=range(steps), samples=samples) == []


async def finished(swarm, steps):
    """The states of the stages when all peers have made the last step; they have to be the same at all servers."""
    servers = [peer for peer in swarm.alive if peer.node.serves]
    await swarm.until(lambda: all(peer.saved is not None and peer.saved[1].step == steps for peer in servers))
    states = {}
    for peer in servers:
        number, state = peer.saved
        other = states.setdefault(number, state)
        assert all(torch.equal(other.model[name], state.model[name]) for name in state.model)
    return whole_state(states.values())


@pytest.mark.parametrize("assignment", [[0, 1], [0, 0, 1, 1, 2, 2]])
async def test_without_faults_it_is_what_one_process_makes(autojump_clock, swarm_of, assignment):
    stages, steps = max(assignment) + 1, 3
    async with swarm_of(pipeline(stages, steps), assignment) as swarm:
        state = await finished(swarm, steps)
    check(swarm, stages, steps)
    whole = single_process(steps)
    assert state.model.keys() == whole.model.keys()
    for name, values in whole.model.items():
        torch.testing.assert_close(state.model[name], values, rtol=1e-4, atol=1e-5)
