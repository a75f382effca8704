"""One attempt on streams: what becomes of it when others fail, or it is given up."""

import contextlib

import attrs
import pytest
import torch
import trio
import trio.testing

from protocol import transfer as module
from protocol.coordinator import RoundTimes
from protocol.errors import PeerGone, RequestRefused
from protocol.identity import PeerId
from protocol.plan import Plan, Salvaged, Source
from protocol.ring import Ring
from protocol.round_messages import RingData
from protocol.salvage import Holding, Span
from protocol.transfer import RingInbox, Transfer
from protocol.vectors import VectorPool

A, B = (PeerId(bytes([number]) * 32) for number in (1, 2))
PLAN = Plan(
    run=bytes(32),
    revision=1,
    attempt=1,
    rank=0,
    coordinator=A,
    members=(A, B),
    weights=(1.0, 1.0),
    length=8,
)
SOURCE = Source(bytes(32), (A, B), (1.0, 1.0))


class Arriving:
    """A stream from the left neighbour that brings zeros and then breaks."""

    peer = B

    async def receive_into(self, buffer):
        await trio.lowlevel.checkpoint()
        buffer[:] = bytes(len(buffer))

    async def receive(self, *types, timeout):
        await trio.lowlevel.checkpoint()
        raise PeerGone("it is gone")


class Leaving:
    """An endpoint with streams that take everything."""

    peer_id = A

    def open(self, peer, request, *, bulk):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def send_bytes(self, data):
        await trio.lowlevel.checkpoint()

    async def finish(self):
        await trio.lowlevel.checkpoint()


def begin(plan, inbox, previous=None):
    return Transfer(
        plan,
        torch.ones(plan.length),
        endpoint=Leaving(),
        inbox=inbox,
        times=RoundTimes(),
        memory=VectorPool(),
        previous=previous,
    )


async def test_a_stream_that_breaks_as_it_arrives(autojump_clock):
    """The neighbour opens its stream and is gone in the same moment: no reason to fail, another one may come."""
    for _ in range(50):  # in random order: whoever waits for the stream goes on before or after it has broken
        inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
        async with trio.open_nursery() as nursery:
            taken = []

            async def take(inbox=inbox, taken=taken):
                taken.append(await inbox.take(PLAN.id, B))

            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                scope.cancel()
                await inbox.deliver(RingData(PLAN.run, PLAN.tag, PLAN.id), Arriving())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert inbox.parked == 0


async def test_nothing_is_left_when_the_neighbour_is_lost_after_its_last_byte(autojump_clock):
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(PLAN, inbox)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, PLAN.id), Arriving())
        nursery.start_soon(transfer.run)
        await transfer.settled.wait()
        assert transfer.complete
        with trio.fail_after(1):
            await transfer.ended()


async def test_what_is_being_overwritten_is_not_held(autojump_clock, monkeypatch):
    """While an attempt takes over the memory of the one before, nothing that it writes to can be salvaged."""
    monkeypatch.setattr(module, "IN_WORKER", 1)
    held = (Holding(SOURCE, (Span(0, 4),)),)
    first = begin(PLAN, RingInbox(PLAN.run, PLAN.tag, patience=1.0))
    ring = Ring(PLAN, 0, torch.ones(8))
    monkeypatch.setattr(ring, "holdings", lambda: held, raising=False)
    first._ring = ring
    first.abort()
    alone = attrs.evolve(PLAN, attempt=2, members=(A,), weights=(1.0,))  # which copies all values at once
    second = begin(alone, RingInbox(PLAN.run, PLAN.tag, patience=1.0), first)
    third = attrs.evolve(PLAN, attempt=3, sources=(SOURCE,), salvaged=(Salvaged(0, 2, 0, (0,)),))
    told = []

    async def in_worker(make):
        told.append(second.holdings())
        second.abort()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return make()

    monkeypatch.setattr(module.trio.to_thread, "run_sync", in_worker)
    await second.run()
    with pytest.raises(ValueError, match="does not hold"):
        Ring(third, 0, torch.ones(8), previous=await second.ended())
    assert told == [()]


async def test_who_is_aborted_before_it_has_begun_to_write_leaves_the_memory_alone(autojump_clock, nursery):
    """It is aborted in the moment in which the attempt before has ended."""
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    first = begin(PLAN, inbox)
    first._ring, first._begun = Ring(PLAN, 0, torch.ones(8)), True
    second = begin(attrs.evolve(PLAN, attempt=2), inbox, first)
    nursery.start_soon(second.run)
    await trio.testing.wait_all_tasks_blocked()
    first._ended.set()
    second.abort()
    assert await second.ended() is first._ring


async def test_streams_without_a_plan_do_not_keep_out_those_with_one(autojump_clock):
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1000.0)
    others = [PeerId(bytes([number]) * 32) for number in range(1, 40)]
    async with trio.open_nursery() as nursery:

        async def deliver(peer, plan_id):
            stream = Arriving()
            stream.peer = peer
            with contextlib.suppress(RequestRefused):
                await inbox.deliver(RingData(PLAN.run, PLAN.tag, plan_id), stream)

        for number in range(module.MAX_PARKED):
            nursery.start_soon(deliver, others[0], bytes([1, number]) * 16)
        await trio.testing.wait_all_tasks_blocked()
        assert inbox.parked == module.MAX_PARKED_BY_ONE
        for peer in others[1:]:
            for number in range(module.MAX_PARKED_BY_ONE):
                nursery.start_soon(deliver, peer, bytes([2, number]) * 16)
        await trio.testing.wait_all_tasks_blocked()
        assert inbox.parked == module.MAX_PARKED
        taken = []

        async def take():
            taken.append(await inbox.take(PLAN.id, B))

        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(deliver, B, PLAN.id)
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 1
        nursery.cancel_scope.cancel()


class Slow(Arriving):
    """A stream that brings so many bytes and then no more; the first only after a while."""

    def __init__(self, peer, most, delay=0.0):
        self.peer, self.left, self.delay = peer, most, delay

    async def receive_into(self, buffer):
        await trio.sleep(self.delay)
        self.delay = 0.0
        if len(buffer) > self.left:
            await trio.sleep_forever()
        self.left -= len(buffer)
        buffer[:] = bytes(len(buffer))


OWNED = attrs.evolve(PLAN, length=1 << 19, schedule="direct")  # segments of 1 << 15, so of twice what is read at least
SEGMENT = 4 << 15
VALUES = 2 * (1 << 19)  # bytes of a block's values


@pytest.mark.parametrize(
    ("comes", "silent"),
    [
        (VALUES // 2, 10.0),  # values of its own, for which it waits for nobody
        (VALUES + SEGMENT // 2, 10.0),  # a sum that has begun to come
        (VALUES + SEGMENT, 10.0 + SEGMENT / RoundTimes().slowest),  # a sum that may wait for somebody
    ],
)
async def test_only_sums_may_keep_us_waiting_for_longer_than_the_stall_time(autojump_clock, nursery, comes, silent):
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(OWNED, inbox)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, OWNED.id), Slow(B, comes))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == B
    assert trio.current_time() == pytest.approx(silent)
    transfer.abort()


async def test_a_neighbour_that_never_opens_its_stream_is_noticed_after_the_stall_time(autojump_clock, nursery):
    transfer = begin(OWNED, RingInbox(PLAN.run, PLAN.tag, patience=1.0))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert trio.current_time() == pytest.approx(RoundTimes().stall)
    transfer.abort()


async def test_many_streams_side_by_side_on_the_slowest_line_that_is_worth_waiting_for(autojump_clock, nursery):
    """Each of them brings less than one would alone."""
    others = tuple(PeerId(bytes([number]) * 32) for number in range(2, 42))
    plan = attrs.evolve(OWNED, members=(A, *others), weights=(1.0,) * 41, length=41 << 14)

    class Shared(Arriving):
        def __init__(self, peer):
            self.peer = peer

        async def receive_into(self, buffer):
            await trio.sleep(40 * len(buffer) / RoundTimes().slowest)
            buffer[:] = bytes(len(buffer))

    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(plan, inbox)
    for peer in others:
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), Shared(peer))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.complete
    await transfer.ended()
