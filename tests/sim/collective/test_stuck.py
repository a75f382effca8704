"""Peers that answer, and whose transfer is stuck, or only slow."""

from __future__ import annotations

import attrs
import pytest
import torch
import trio

from protocol.transfer import Transfer
from tests.sim.swarm import TIMES

PATIENT = attrs.evolve(TIMES, stall=10.0)
LENGTH = 400_000


def reduce(length: int):
    return lambda peer: peer.collective.all_reduce(torch.full((length,), float(peer.number)))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("after", [0, 2, 7])
async def test_who_is_stuck_on_a_fast_line_is_found_in_seconds(autojump_clock, swarm_of, codec, after):
    """It says that it is alive, takes all that it is sent, and sends nothing more."""
    async with swarm_of(4, bandwidth=1e7, latency=0.01, times=PATIENT, codec=codec) as swarm:
        call = reduce(LENGTH)
        await swarm.together(call)  # by which it is known how quickly it goes
        stuck = swarm.peers[1]
        stuck.jam_ring(after=after)
        others = [peer for peer in swarm.peers if peer is not stuck]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, call, [stuck])
            with trio.fail_after(5):
                outcomes = await swarm.together(call, others)
        assert {outcome.members for outcome in outcomes.values()} == {outcomes[others[0]].members}
        assert set(outcomes[others[0]].members) >= {peer.id for peer in others}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_who_is_stuck_and_says_that_it_waits_does_not_hold_the_others(
    autojump_clock, swarm_of, monkeypatch, codec
):
    async with swarm_of(4, bandwidth=1e7, latency=0.01, times=PATIENT, codec=codec) as swarm:
        call = reduce(LENGTH)
        await swarm.together(call)
        liar = swarm.peers[1]
        liar.jam_ring(after=2)
        waiting = Transfer.waiting
        monkeypatch.setattr(
            Transfer, "waiting", lambda self, peer: 0.0 if self._endpoint is liar.endpoint else waiting(self, peer)
        )
        others = [peer for peer in swarm.peers if peer is not liar]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, call, [liar])
            with trio.fail_after(PATIENT.attempt(LENGTH, 4) / 2):
                outcomes = await swarm.together(call, others)
        assert set(outcomes[others[0]].members) >= {peer.id for peer in others}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_who_is_slow_but_goes_on_is_not_left_out(autojump_clock, swarm_of, codec):
    """Each segment takes it longer than the stall time, and whoever waits for it keeps others waiting."""
    times, length = attrs.evolve(TIMES, slowest=10_000.0), 2_000_000 if codec == "fp32" else 3_000_000
    async with swarm_of(4, bandwidth=1e7, latency=0.01, times=times, codec=codec) as swarm:
        for other in swarm.peers[1:]:
            swarm.network.set_link(swarm.peers[0].host, other.host, bandwidth=30_000.0)
        outcomes = await swarm.together(reduce(length))
        assert {outcome.attempts for outcome in outcomes.values()} == {1}
        assert {len(outcome.members) for outcome in outcomes.values()} == {4}


async def test_who_comes_while_something_long_is_gathered_waits_for_the_end(autojump_clock, swarm_of):
    """It brings nothing and does not know what others have brought, but is told."""
    async with swarm_of(4, bandwidth=80_000) as swarm:
        late, *others = swarm.peers
        doubted = []
        late.doubt = lambda peer, seconds: doubted.append(peer)
        block = bytes(2_400_000)
        outcomes = {}
        async with trio.open_nursery() as nursery:

            async def come():
                await trio.sleep(8)
                outcomes.update(await swarm.together(lambda peer: peer.collective.barrier(), [late]))
                nursery.cancel_scope.cancel()

            nursery.start_soon(come)
            first = await swarm.together(
                lambda peer: peer.collective.broadcast(block if peer is others[0] else None), others
            )
            assert {len(outcome.members) for outcome in first.values()} == {3}
            await swarm.together(lambda peer: peer.collective.barrier(), others)
            await trio.sleep_forever()
        assert not doubted
        assert len(outcomes[late].members) == 4
