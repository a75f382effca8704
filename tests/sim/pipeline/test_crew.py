"""What peers of a pipeline know of each other."""

import hashlib
import random

import pytest
import trio

from optim.swarm import cut
from optim.swarm.state import Form, StageState
from peer.pipeline.copies import Copies
from peer.pipeline.crew import RETRY, Crew
from peer.pipeline.driver import Driver
from peer.pipeline.messages import Sizes, Standing
from peer.pipeline.transfer import Fetcher
from peer.pipeline.trust import Trust
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.mesh import Mesh
from protocol.transport import Address
from tests.optim.swarm.toys import sample, text_batch, transformer_chain

RUN = hashlib.sha256(b"a crew").digest()


async def _one(nursery, network, number):
    """One of several peers, each at a stage of its own: its crew and its endpoint."""
    endpoint = Endpoint(
        Identity.from_seed(bytes([number] * 32)), network.transport(f"host{number}"), rng=random.Random(number)
    )
    await nursery.start(endpoint.run, Address(f"host{number}", 7070))
    mesh = Mesh(endpoint, RUN, [Address("host0", 7070)] if number else [])
    await nursery.start(mesh.run)
    crew = Crew(endpoint, RUN, mesh, Standing(), stages=3, last=0)
    await nursery.start(crew.run)
    crew.announce(stage=number, ready=True)
    return crew, endpoint


async def test_after_a_short_break_both_know_each_other_again(autojump_clock, nursery):
    network = MemoryNetwork(latency=0.01)
    crews = [await _one(nursery, network, number) for number in range(2)]
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


@pytest.fixture
async def alone(nursery):
    """A peer that nobody else is with: its endpoint and its crew."""
    endpoint = Endpoint(Identity.from_seed(bytes(32)), MemoryNetwork().transport("host0"), rng=random.Random(0))
    await nursery.start(endpoint.run, Address("host0", 7070))
    mesh = Mesh(endpoint, RUN)
    await nursery.start(mesh.run)
    crew = Crew(endpoint, RUN, mesh, Standing(), stages=2, last=0)
    await nursery.start(crew.run)
    return endpoint, crew


def copies_of(crew, endpoint, step):
    """Those of a peer that has a state of stage 2 of a step on its disk, or of none."""
    (stage,) = cut(transformer_chain(), 1)
    state = StageState(step, stage.state(), {})

    async def saved(stage):
        return state

    kept = {"saved": saved, "offered": [2] if step else [], "fetcher": fetcher_of(endpoint)}
    return Copies(endpoint, RUN, 3, crew, Courtesy(lambda: 0), lambda _: Form.of(stage), compute=compute, **kept)


async def compute(function, *arguments):
    return function(*arguments)


def fetcher_of(endpoint):
    trust = Trust(lambda peer, stage, reason: None)
    return Fetcher(endpoint=endpoint, run_id=RUN, last=0, trust=trust, compute=compute)


@pytest.mark.parametrize("steps", [(10, 20), (20, 10)])
async def test_of_several_copies_the_newest_is_taken(autojump_clock, nursery, steps):
    network = MemoryNetwork(latency=0.01)
    crews = [await _one(nursery, network, number) for number in range(3)]
    asking, *others = [copies_of(*crew, step) for crew, step in zip(crews, (0, *steps), strict=True)]
    for copies in others:
        nursery.start_soon(copies.run)
    crew = crews[0][0]
    await crew.until(lambda: sum(2 in each.copies for each in crew.standings.values()) == 2)
    await crew.until(lambda: crew.is_known(crew.own.number))  # who keeps a copy gives it to those it knows
    state = await asking.find(2, {})
    assert state.step == 20


async def test_what_was_reached_in_another_history_is_forgotten(autojump_clock, nursery):
    """Nobody else says it is there, and nobody any more who would be believed more than we are."""
    crew, _ = await _one(nursery, MemoryNetwork(), 0)
    crew.announce(step=50)
    assert crew.furthest == 50
    crew.fall_back(30)
    crew.announce(step=30)
    assert crew.furthest == 30


async def test_a_copy_is_not_fetched_from_ourselves_if_we_have_moved_to_its_stage(autojump_clock, nursery, alone):
    endpoint, crew = alone

    async def saved(stage):
        return None

    def form(stage):
        raise AssertionError("nothing is fetched")

    kept = {"saved": saved, "fetcher": fetcher_of(endpoint)}
    copies = Copies(endpoint, RUN, 2, crew, Courtesy(lambda: 0), form, compute=compute, **kept)
    crew.announce(stage=0, ready=True)
    copies.renew(0, {}, due=True)
    crew.announce(stage=1)
    nursery.start_soon(copies.run)
    await trio.sleep(1)
    assert crew.own.copies == ()


async def test_a_stage_that_we_have_just_left_is_not_asked_for_over_the_network(autojump_clock, nursery, alone):
    """Our standing says for a moment that we serve it."""
    endpoint, crew = alone
    asked = []

    def local(stage):
        asked.append(stage)

    driver = Driver(
        endpoint,
        RUN,
        crew,
        stages=1,
        microbatches=1,
        at_a_time=1,
        sizes=Sizes(samples=2, tokens=8, width=8),
        sample=lambda step, number: sample(text_batch(step, number)),
        local=local,
        trust=Trust(lambda peer, stage, reason: None),
        compute=compute,
        rng=random.Random(0),
    )
    crew.announce(stage=0, ready=True, trains_from=0)
    nursery.start_soon(driver.run)
    await trio.sleep(1)
    assert asked == [0]  # and it goes on, and leaves us alone for a while
