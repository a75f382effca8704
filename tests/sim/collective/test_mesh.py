"""Peers that are told one address find all others, and find them again."""

from __future__ import annotations

import hashlib
import itertools
import random
from contextlib import asynccontextmanager

import pytest
import trio

from protocol import mesh
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.mesh import Known, Mesh, MeshHello, MeshWelcome
from protocol.transport import Address

RUN = hashlib.sha256(b"a mesh").digest()


class Peer:
    def __init__(self, network, number: int, first) -> None:
        self.network, self.number, self.host = network, number, f"host{number}"
        identity = Identity.from_seed(hashlib.sha256(b"%d" % number).digest())
        self.endpoint = Endpoint(identity, network.transport(self.host), rng=random.Random(number))
        self.mesh = Mesh(self.endpoint, RUN, first)
        self.scope = trio.CancelScope()

    async def run(self, *, task_status) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.endpoint.run, Address(self.host, 7000))
                await nursery.start(self.mesh.run)
                task_status.started()


@asynccontextmanager
async def peers_of(count: int, known):
    """Peers of which each is told the addresses of `known(number)`."""
    network = MemoryNetwork(latency=0.02)
    async with trio.open_nursery() as nursery:
        peers = [
            Peer(network, number, [Address(f"host{other}", 7000) for other in known(number)]) for number in range(count)
        ]
        for peer in peers:
            await nursery.start(peer.run)
        yield network, peers
        nursery.cancel_scope.cancel()


def ids(peers) -> set[PeerId]:
    return {peer.endpoint.peer_id for peer in peers}


KNOWN = {
    "all know the first": lambda number: [0] if number else [],
    "each knows the one before": lambda number: [number - 1] if number else [],
    "each knows itself and the next, who is not there yet": lambda number: [number, number + 1],
}


@pytest.mark.parametrize("known", KNOWN)
async def test_all_find_all(autojump_clock, known):
    async with peers_of(5, KNOWN[known]) as (_, peers):
        with trio.fail_after(30):
            for peer in peers:
                await peer.mesh.wait_for(5)
        for peer in peers:
            assert set(peer.mesh.members) == set(peer.mesh.expected()) == set(peer.mesh.partners()) == ids(peers)
            assert all(peer.mesh.knows(other) for other in ids(peers) - {peer.endpoint.peer_id})
            assert set(peer.mesh.arriving()) <= ids(peers)


async def test_who_is_lost_is_no_member_and_comes_back(autojump_clock):
    async with peers_of(4, KNOWN["all know the first"]) as (network, peers):
        for peer in peers:
            await peer.mesh.wait_for(4)
        network.partition(["host1"], ["host0", "host2", "host3"])
        await trio.sleep(10)
        assert set(peers[0].mesh.members) == ids(peers) - {peers[1].endpoint.peer_id}
        assert len(peers[1].mesh.members) == 1
        network.heal()
        with trio.fail_after(30):
            for peer in peers:
                await peer.mesh.wait_for(4)


async def test_who_has_lost_everybody_takes_them_to_be_back_in_a_moment(autojump_clock):
    async with peers_of(3, KNOWN["all know the first"]) as (network, peers):
        for peer in peers:
            await peer.mesh.wait_for(3)
        lonely = peers[1]
        network.partition(["host1"], ["host0", "host2"])
        while len(lonely.mesh.members) > 1:
            await lonely.mesh._changed.wait()
        assert set(lonely.mesh.arriving()) == ids(peers) - ids([lonely])
        assert not set(peers[0].mesh.arriving())  # it has somebody left
        await trio.sleep(2)
        assert not set(lonely.mesh.arriving())


async def test_who_is_gone_for_good_is_forgotten(autojump_clock):
    async with peers_of(3, KNOWN["all know the first"]) as (_, peers):
        for peer in peers:
            await peer.mesh.wait_for(3)
        peers[2].scope.cancel()
        await trio.sleep(300)
        assert not peers[0].mesh._missing
        assert set(peers[0].mesh.members) == ids(peers[:2])


async def test_who_was_silent_coordinates_nothing_for_a_while(autojump_clock):
    async with peers_of(2, KNOWN["all know the first"]) as (_, peers):
        one, other = peers
        await one.mesh.wait_for(2)
        one.mesh.doubt(other.endpoint.peer_id, 10)
        assert other.endpoint.peer_id not in one.mesh.partners()
        assert other.endpoint.peer_id in one.mesh.expected()
        await trio.sleep(11)
        assert other.endpoint.peer_id in one.mesh.partners()


async def test_another_run_is_refused(autojump_clock):
    async with peers_of(2, KNOWN["all know the first"]) as (_, peers):
        one, other = peers
        await one.mesh.wait_for(2)
        with pytest.raises(RequestRefused) as caught:
            await one.endpoint.request(other.endpoint.peer_id, MeshHello(bytes(32), ()), MeshWelcome)
        assert caught.value.code == "unknown_run"


class Dials:
    """When an endpoint dials whom."""

    def __init__(self, peer) -> None:
        self.times: dict[object, list[float]] = {}
        connect = peer.endpoint.connect

        async def dialled(target):
            self.times.setdefault(target, []).append(trio.current_time())
            return await connect(target)

        peer.endpoint.connect = dialled


async def test_who_is_out_of_reach_is_dialled_seldom_whatever_others_say(autojump_clock):
    """A member says again and again whom it knows; nobody of those is there."""
    async with peers_of(2, KNOWN["all know the first"]) as (_, peers):
        one, other = peers
        await one.mesh.wait_for(2)
        dials = Dials(one)
        ghosts = [Known(PeerId(bytes([number]) * 32), (Address(f"ghost{number}", 7000),)) for number in range(3)]
        for _ in range(600):
            await other.endpoint.request(one.endpoint.peer_id, MeshHello(RUN, tuple(ghosts)), MeshWelcome)
            await trio.sleep(0.05)
        assert set(dials.times) == {ghost.peer for ghost in ghosts}
        for times in dials.times.values():
            pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert min(pauses) >= 2
            assert min(pauses[2:]) >= 8


async def test_who_comes_and_goes_is_dialled_seldom(autojump_clock):
    async with peers_of(2, KNOWN["all know the first"]) as (_, peers):
        one, other = peers
        await one.mesh.wait_for(2)
        dials = [Dials(one), Dials(other)]
        ends = trio.current_time() + 20
        while trio.current_time() < ends:
            await one.mesh.wait_for(2)
            for connection in list(one.endpoint._connections):
                connection.close("a test")
            while len(one.mesh.members) > 1:
                await one.mesh.changes()
        for times in (times for one in dials for times in one.times.values()):
            assert all(later - earlier >= 1.9 for earlier, later in zip(times, times[2:], strict=False))


async def test_those_who_were_members_are_remembered_up_to_a_limit(autojump_clock, monkeypatch):
    monkeypatch.setattr(mesh, "MAX_KNOWN", 3)
    async with peers_of(1, KNOWN["all know the first"]) as (network, peers):
        (one,) = peers
        for number in range(10, 16):
            async with trio.open_nursery() as nursery:
                stranger = Peer(network, number, [Address("host0", 7000)])
                await nursery.start(stranger.run)
                await stranger.mesh.wait_for(2)
                stranger.scope.cancel()
            while len(one.mesh.members) > 1:
                await one.mesh.changes()
        assert 0 < len(one.mesh._missing) <= 3
        assert one.mesh._returning.keys() <= one.mesh._missing.keys()
