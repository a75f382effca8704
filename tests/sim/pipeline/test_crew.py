"""What peers of a pipeline know of each other."""

import hashlib
import random

import trio

from peer.pipeline.crew import RETRY, Crew
from peer.pipeline.messages import Standing
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mesh import Mesh
from protocol.transport import Address

RUN = hashlib.sha256(b"a crew").digest()


async def test_after_a_short_break_both_know_each_other_again(autojump_clock, nursery):
    network, crews = MemoryNetwork(latency=0.01), []
    for number in range(2):
        endpoint = Endpoint(
            Identity.from_seed(bytes([number] * 32)), network.transport(f"host{number}"), rng=random.Random(number)
        )
        await nursery.start(endpoint.run, Address(f"host{number}", 7070))
        mesh = Mesh(endpoint, RUN, [Address("host0", 7070)] if number else [])
        await nursery.start(mesh.run)
        crew = Crew(endpoint, RUN, mesh, Standing(), stages=2, last=0)
        await nursery.start(crew.run)
        crew.announce(stage=number, ready=True)
        crews.append((crew, endpoint))
    with trio.fail_after(30):
        for crew, _ in crews:
            await crew.until(lambda crew=crew: all(crew.servers(stage) for stage in range(2)))
    await trio.sleep(RETRY / 10)  # simulated: so that both wait for news
    (one, first), (_, second) = crews
    first.disconnect(second.peer_id, "a test")
    with trio.fail_after(30):
        await one.until(lambda: not one.servers(1))
        await first.connect(second.peer_id)
        for crew, _ in crews:
            await crew.until(lambda crew=crew: all(crew.servers(stage) for stage in range(2)))
