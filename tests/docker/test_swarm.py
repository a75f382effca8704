"""`docker compose up` trains, and the swarm of containers outlives the loss of one of them."""

import json
import os
import subprocess
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
import trio

pytestmark = pytest.mark.docker

EVENTS = "/home/shoal/state/events.jsonl"
# A model that takes seconds a round on two cores that four containers share.
RUN = "--layers 1 --width 32 --heads 2 --context 32 --batch 2 --inner-steps 20 --grace 5"


class Swarm:
    """The containers of one compose project."""

    def __init__(self, engine, image):
        self.engine = engine
        self.environment = {"SHOAL_IMAGE": image, "RUN_OPTIONS": RUN}
        self.command = [*engine.compose, "-f", "docker/compose.yaml", "-p", f"shoal-test-{os.getpid()}"]

    def compose(self, *arguments):
        return self.engine.run(*self.command, *arguments, **self.environment)

    def scale(self, peers):
        self.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"peer={peers}")

    def containers(self, service):
        return self.compose("ps", "-q", service).split()

    def kill(self, container):
        """What a power cut does to a machine; its disk goes too, so that compose starts another peer, not this one."""
        self.engine.run("docker", "rm", "--force", "--volumes", container)

    def down(self):
        self.compose("down", "--volumes", "--timeout", "5")


@asynccontextmanager
async def committed_rounds(engine, container):
    """The `round_committed` events of the peer in a container, from its first on, as they come."""
    command = ["docker", "exec", container, "tail", "-n", "+1", "-F", EVENTS]
    process = await trio.lowlevel.open_process(
        command, env=engine.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        async with aclosing(read_rounds(process.stdout)) as rounds:
            yield rounds
    finally:
        process.kill()
        await process.wait()
        await process.stdout.aclose()


async def read_rounds(stream):
    pending = b""
    async for data in stream:
        *lines, pending = (pending + data).split(b"\n")
        for event in map(json.loads, lines):
            if event["event"] == "round_committed":
                yield event
    pytest.fail("the peer ended")


async def rounds_until(rounds, wanted):
    """Read events until one satisfies `wanted`; gives the digest of every round read, by number."""
    digests = {}
    async for event in rounds:
        digests[event["round"]] = event["digest"]
        if wanted(event):
            return digests
    raise AssertionError("unreachable: the events never end")


@pytest.fixture
def swarm(engine, image):
    swarm = Swarm(engine, image)
    try:
        yield swarm
    finally:
        swarm.down()


async def test_containers_train_lose_a_peer_and_gain_one(engine, swarm):
    def members(count):
        return lambda event: len(event["members"]) == count

    async with AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(240))
        await trio.to_thread.run_sync(swarm.scale, 2)
        (founder,) = swarm.containers("founder")
        victim, survivor = swarm.containers("peer")
        at_founder = await stack.enter_async_context(committed_rounds(engine, founder))
        at_survivor = await stack.enter_async_context(committed_rounds(engine, survivor))

        digests = await rounds_until(at_founder, members(3))
        swarm.kill(victim)
        digests |= await rounds_until(at_founder, members(2))
        await trio.to_thread.run_sync(swarm.scale, 2)
        (newcomer,) = set(swarm.containers("peer")) - {survivor}
        at_newcomer = await stack.enter_async_context(committed_rounds(engine, newcomer))
        digests |= await rounds_until(at_founder, members(3))

        last = max(digests)
        for rounds in (at_survivor, at_newcomer):
            theirs = await rounds_until(rounds, lambda event: event["round"] >= last)
            common = theirs.keys() & digests.keys()
            assert last in common
            assert {number: theirs[number] for number in common} == {number: digests[number] for number in common}
