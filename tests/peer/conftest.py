import random

import attrs
import pytest

from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.transport import Address


@attrs.frozen
class Mesh:
    """Endpoints that know each other's addresses, on an in-memory network and simulated time."""

    network: MemoryNetwork
    endpoints: list[Endpoint]


@pytest.fixture
async def mesh(autojump_clock, nursery):
    """`await mesh(n)` makes n endpoints on hosts "0", "1", …"""

    async def make(count):
        network = MemoryNetwork(latency=0.01)
        endpoints = []
        for number in range(count):
            identity = Identity.from_seed(bytes([number + 1]) * 32)
            endpoint = Endpoint(identity, network.transport(str(number)), rng=random.Random(number))
            await nursery.start(endpoint.run, Address(str(number), 4000))
            endpoints.append(endpoint)
        for one in endpoints:
            for number, two in enumerate(endpoints):
                if one is not two:
                    one.learn(two.peer_id, Address(str(number), 4000))
        return Mesh(network, endpoints)

    return make
