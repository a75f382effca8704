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
        self.engine.run("docker", "kill", container)
        self.engine.run("docker", "rm", "--volumes", container)

    def stop(self):
        """What Ctrl-C does to `docker compose up`; gives the exit codes of all containers."""
        self.compose("stop", "--timeout", "30")
        containers = self.compose("ps", "-q").split()
        return self.engine.run("docker", "inspect", "--format", "{{.State.ExitCode}}", *containers).split()

    def down(self):
        self.compose("down", "--volumes", "--timeout", "5")


@asynccontextmanager
async def events_of(engine, container):
    """All events of the peer in a container, from its first on, as they come."""
    command = ["docker", "exec", container, "tail", "-n", "+1", "-F", EVENTS]
    process = await trio.lowlevel.open_process(
        command, env=engine.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        async with aclosing(read_events(process.stdout)) as events:
            yield events
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            await process.stdout.aclose()


async def read_events(stream):
    pending = b""
    async for data in stream:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
    pytest.fail("the peer ended")


async def first(events, kind):
    """The next event of a kind."""
    async for event in events:
        if event["event"] == kind:
            return event
    raise AssertionError("unreachable: the events never end")


async def rounds_until(events, wanted):
    """Reads events until a committed round satisfies `wanted`; gives the digest of every round read, by number."""
    digests = {}
    while True:
        event = await first(events, "round_committed")
        digests[event["round"]] = event["digest"]
        if wanted(event):
            return digests


@pytest.fixture
def swarm(engine, image):
    swarm = Swarm(engine, image)
    try:
        yield swarm
    finally:
        swarm.down()


def members(count):
    return lambda event: len(event["members"]) == count


def since(number):
    return lambda event: event["round"] >= number


async def test_containers_train_lose_a_peer_gain_one_and_restart_the_founder(engine, swarm):
    async with AsyncExitStack() as stack:
        stack.enter_context(trio.fail_after(280))

        async def follow(container):
            return await stack.enter_async_context(events_of(engine, container))

        await trio.to_thread.run_sync(swarm.scale, 2)
        (founder,) = swarm.containers("founder")
        victim, survivor = swarm.containers("peer")
        at_founder, at_survivor = await follow(founder), await follow(survivor)

        digests = await rounds_until(at_founder, members(3))
        await trio.to_thread.run_sync(swarm.kill, victim)
        digests |= await rounds_until(at_founder, members(2))
        await trio.to_thread.run_sync(swarm.scale, 2)
        (newcomer,) = set(swarm.containers("peer")) - {survivor}
        at_newcomer = await follow(newcomer)
        digests |= await rounds_until(at_founder, members(3))

        last = max(digests)
        theirs = await rounds_until(at_survivor, since(last))
        assert_equal_where_both(digests, theirs, last)
        assert_equal_where_both(digests, await rounds_until(at_newcomer, since(last)), last)

        await trio.to_thread.run_sync(engine.run, "docker", "restart", founder)
        at_founder = await follow(founder)
        before, after = await first(at_founder, "started"), await first(at_founder, "started")
        assert (before["peer"], before["run"]) == (after["peer"], after["run"])
        digests = await rounds_until(at_founder, members(3))
        assert min(digests) > last  # it went on where it was
        theirs |= await rounds_until(at_survivor, since(max(digests)))
        assert_equal_where_both(digests, theirs, max(digests))

        assert await trio.to_thread.run_sync(swarm.stop) == ["0"] * 4  # with the helper


def assert_equal_where_both(digests, others, number):
    """Two peers have the same digests for all rounds that both of them took part in, among these the one given."""
    common = digests.keys() & others.keys()
    assert number in common
    assert {number: others[number] for number in common} == {number: digests[number] for number in common}
