from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs
import pytest
import trio

from dht.node import DHT, DhtSettings
from protocol.endpoint import Endpoint, Limits
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.transport import Address

PORT = 7000


@attrs.define(eq=False)
class Node:
    """One peer of a simulated swarm."""

    host: str
    identity: Identity
    endpoint: Endpoint
    dht: DHT
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def contact(self) -> tuple[PeerId, Address]:
        return self.id, Address(self.host, PORT)

    def knows(self, other: Node) -> bool:
        """Whether it would tell others of this one."""
        return other.id in [contact.peer for contact in self.dht._table.closest(other.id, 100)]


@attrs.define(eq=False)
class Swarm:
    """Peers in one process, on simulated time."""

    nursery: trio.Nursery
    network: MemoryNetwork = attrs.field(factory=lambda: MemoryNetwork(latency=0.02))
    limits: Limits = attrs.field(factory=Limits)
    settings: DhtSettings | None = None
    nodes: list[Node] = attrs.field(factory=list)
    made: int = 0

    async def add(
        self,
        *via: Node,
        seed: int | None = None,
        settings: DhtSettings | None = None,
        setup: Callable[[Endpoint], None] | None = None,
    ) -> Node:
        """A new peer that listens and, if there is somebody to join through, has joined.

        Args:
            via: Whom it joins through.
            seed: Of its identity, to have one again.
            settings: Of its DHT.
            setup: Called with its endpoint; what it registers takes the place of the DHT's handlers.
        """
        self.made += 1
        host = f"10.0.{self.made // 256}.{self.made % 256}"
        identity = Identity.from_seed((seed or self.made).to_bytes(32, "big"))
        rng = random.Random(self.made)
        endpoint = Endpoint(identity, self.network.transport(host), limits=self.limits, rng=rng)
        if setup is not None:
            spare = Endpoint(identity, self.network.transport(host), limits=self.limits, rng=rng)
            node = Node(host, identity, endpoint, DHT(spare, identity, rng=rng))
            setup(endpoint)
        else:
            node = Node(host, identity, endpoint, DHT(endpoint, identity, rng=rng, settings=settings or self.settings))
        await self.nursery.start(self._live, node, setup is None)
        self.nodes.append(node)
        if via:
            if setup is None:
                await node.dht.bootstrap([other.contact for other in via])
            else:
                for other in via:
                    await endpoint.connect(Address(other.host, PORT))
        return node

    async def grow(self, size: int, *, at_once: int = 8) -> Sequence[Node]:
        """Add peers until there are so many, each joining through one that is there."""
        if not self.nodes:
            await self.add()
        while len(self.nodes) < size:
            gates = list(self.nodes)
            async with trio.open_nursery() as nursery:
                for n in range(min(at_once, size - len(self.nodes))):
                    nursery.start_soon(self.add, gates[n % len(gates)])
        return self.nodes

    def kill(self, *nodes: Node) -> None:
        """Let peers vanish as if their machines had lost power."""
        for node in nodes:
            self.network.kill(node.host)
            node.scope.cancel()
            self.nodes.remove(node)

    async def _live(self, node: Node, with_dht: bool, task_status: trio.TaskStatus[None]) -> None:
        with node.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.endpoint.run, Address(node.host, PORT))
                if with_dht:
                    await nursery.start(node.dht.run)
                task_status.started()


@pytest.fixture
def swarm(nursery) -> Swarm:
    return Swarm(nursery)


async def eventually(condition: Callable[[], bool], within: float) -> None:
    """Wait until something is so, on the simulated clock."""
    with trio.fail_after(within):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in many places, none of which has an event
            await trio.sleep(0.1)


@pytest.fixture(name="eventually")
def eventually_fixture():
    return eventually
