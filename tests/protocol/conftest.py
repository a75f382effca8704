"""Endpoints on an in-memory network."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
import trio

from protocol.codecs import block_of
from protocol.endpoint import Endpoint, Limits
from protocol.errors import IdentityInUse
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.plan import largest_part
from protocol.transport import Address


@attrs.define
class Node:
    """A running endpoint and its scope."""

    endpoint: Endpoint
    scope: trio.CancelScope
    stopped: trio.Event
    error: IdentityInUse | None = None

    @property
    def peer(self):
        return self.endpoint.peer_id

    async def stop(self):
        self.scope.cancel()
        await self.stopped.wait()


@pytest.fixture(scope="session")
def unequal():
    """A plan as another one, but that its members own parts of any size, mostly. Takes a source of randomness."""

    def cut(plan, random):
        if not random.randrange(4):
            return attrs.evolve(plan, blocks=())
        unit = block_of(plan.codec)
        units = -(-plan.free // unit)
        cuts = sorted(min(random.randint(0, units) * unit, plan.free) for _ in plan.members[1:])
        blocks = tuple(b - a for a, b in itertools.pairwise([0, *cuts, plan.free]))
        fits = max(blocks) <= largest_part(len(blocks)) * plan.free
        return attrs.evolve(plan, blocks=blocks if fits else ())

    return cut


@pytest.fixture
def network():
    return MemoryNetwork(latency=0.01)


@pytest.fixture
async def start_endpoint(network, nursery):
    """Starts endpoints: seed n lives on host n. Those started later know those before."""
    nodes = []

    async def start(seed, *, limits=None, psk=None, transport=None, listen=None, handlers=(), **options):
        endpoint = Endpoint(
            Identity.from_seed(bytes([seed]) * 32),
            transport or network.transport(f"host{seed}"),
            psk=psk,
            limits=limits or Limits(),
            rng=random.Random(f"{seed} {len(nodes)}"),
            **options,
        )
        for message_type, handler in handlers:
            endpoint.handle(message_type, handler)
        node = Node(endpoint, trio.CancelScope(), trio.Event())

        async def run(task_status):
            with node.scope:
                try:
                    await endpoint.run(listen or Address(f"host{seed}", 1000), task_status=task_status)
                except IdentityInUse as error:
                    node.error = error
            node.stopped.set()

        address = await nursery.start(run)
        for other in nodes:
            if other.endpoint.address is not None:
                endpoint.learn(other.peer, other.endpoint.address)
                other.endpoint.learn(endpoint.peer_id, address)
        nodes.append(node)
        return node

    async def watchdog():  # heartbeats never end, so simulated time would run on for ever
        await trio.sleep(10_000)
        raise AssertionError("the test hangs")

    nursery.start_soon(watchdog)
    yield start
    nursery.cancel_scope.cancel()
