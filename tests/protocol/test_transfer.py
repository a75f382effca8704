"""One attempt on streams: what becomes of it when others fail, or it is given up."""

import contextlib
import gc
import weakref

import attrs
import pytest
import torch
import trio
import trio.testing

from protocol import transfer as module
from protocol.coordinator import RoundTimes
from protocol.errors import PeerGone, RequestRefused, RequestTimeout
from protocol.gather_transfer import GatherTransfer
from protocol.identity import PeerId
from protocol.plan import Plan, Salvaged, Source
from protocol.ring import Ring
from protocol.round_messages import GatherBlock, RingData
from protocol.salvage import Holding, Span
from protocol.transfer import AHEAD, FASTER, RingInbox, Transfer
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
    arrived = 0
    withheld = False

    async def receive_into(self, buffer):
        await trio.lowlevel.checkpoint()
        buffer[:] = bytes(len(buffer))

    async def receive(self, *types, timeout):
        await trio.lowlevel.checkpoint()
        raise PeerGone("it is gone")


class BringsBlock(Arriving):
    """The same, of a gather."""

    async def receive(self, *types, timeout=None):
        if timeout is None:
            await trio.lowlevel.checkpoint()
            return GatherBlock(1)
        return await super().receive(*types, timeout=timeout)


class Leaving:
    """An endpoint with streams that take everything."""

    peer_id = A

    def open(self, peer, request, *, bulk, one_way):
        return self

    def statistics(self, peer):
        return None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def send(self, message):
        await trio.lowlevel.checkpoint()

    async def send_bytes(self, data, *, last):
        await trio.lowlevel.checkpoint()


async def says_nothing(peer):
    await trio.lowlevel.checkpoint()


def begin(plan, inbox, previous=None, *, pace=0.0, ask=says_nothing):
    return Transfer(
        plan,
        torch.ones(plan.length),
        endpoint=Leaving(),
        inbox=inbox,
        times=RoundTimes(),
        memory=VectorPool(),
        pace=pace,
        ask=ask,
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


async def test_a_gather_ends_when_the_neighbour_is_lost_after_its_last_byte(autojump_clock):
    plan = attrs.evolve(PLAN, operation="gather", length=2, sizes=(1, 1))
    inbox = RingInbox(plan.run, plan.tag, patience=1.0)
    ours = torch.ones(1, dtype=torch.uint8)
    times = RoundTimes()
    gather = GatherTransfer(plan, ours, endpoint=Leaving(), inbox=inbox, times=times, pace=0.0, ask=says_nothing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.deliver, RingData(plan.run, plan.tag, plan.id), BringsBlock())
        with trio.fail_after(1):
            await gather.run()
    assert gather.complete and gather.failure is None


async def test_its_memory_is_free_as_soon_as_nobody_refers_to_it(autojump_clock):
    """The next round takes it: if that had to wait for cycles to be collected, every round would touch new memory."""
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(PLAN, inbox)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, PLAN.id), Arriving())
        nursery.start_soon(transfer.run)
        await transfer.ended()
    ring = weakref.ref(await transfer.ended())
    gc.disable()
    try:
        del transfer, nursery
        assert ring() is None
    finally:
        gc.enable()


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
    """A stream that brings so many bytes a second, and so many in all."""

    def __init__(self, peer, most=10**9, rate=10**9):
        self.peer, self.left, self.rate = peer, most, rate

    async def receive_into(self, buffer):
        for position in range(0, len(buffer), 1000):
            piece = buffer[position : position + 1000]
            if len(piece) > self.left:
                await trio.sleep_forever()
            await trio.sleep(len(piece) / self.rate)
            piece[:] = bytes(len(piece))
            self.left -= len(piece)
            self.arrived = position + len(piece)
        self.arrived = 0


OWNED = attrs.evolve(PLAN, length=1 << 19, schedule="direct")
VALUES = 2 * (1 << 19)  # bytes of a block's values


@pytest.mark.parametrize("comes", [0, VALUES // 2, VALUES, 3 * VALUES // 2])
@pytest.mark.parametrize("schedule", ["ring", "direct"])
async def test_who_sends_quickly_and_then_stops_is_found_soon(autojump_clock, nursery, schedule, comes):
    """Also who has sent all of its values, and then no sum."""
    inbox, plan = RingInbox(PLAN.run, PLAN.tag, patience=1.0), attrs.evolve(OWNED, schedule=schedule)
    transfer = begin(plan, inbox, pace=1e7)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), Slow(B, comes))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == B
    assert RoundTimes().quiet <= trio.current_time() < RoundTimes().quiet + 1
    transfer.abort()


async def test_a_neighbour_that_never_opens_its_stream_is_noticed_after_the_stall_time(autojump_clock, nursery):
    """Unless it is known how quickly data usually comes."""
    transfer = begin(OWNED, RingInbox(PLAN.run, PLAN.tag, patience=1.0))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert RoundTimes().stall <= trio.current_time() < RoundTimes().stall + 1
    transfer.abort()


@pytest.mark.parametrize("schedule", ["ring", "direct"])
async def test_who_brings_little_at_a_time_is_not_cut(autojump_clock, nursery, schedule):
    """However quickly it went the last time."""
    plan = attrs.evolve(OWNED, schedule=schedule)
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(plan, inbox, pace=1e9)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), Slow(B, rate=RoundTimes().slowest))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.complete
    await transfer.ended()


@pytest.mark.parametrize("waits", [1.0, 100.0])
async def test_who_is_waiting_itself_is_excused_unless_it_should_have_found_out_why(autojump_clock, nursery, waits):
    asked = []

    async def ask(peer):
        asked.append(peer)
        await trio.sleep(0.1)
        return waits

    transfer = begin(OWNED, RingInbox(PLAN.run, PLAN.tag, patience=1.0), pace=1e9, ask=ask)
    nursery.start_soon(transfer.run)
    with trio.move_on_after(15):
        await transfer.settled.wait()
    assert transfer.settled.is_set() == (waits > 10)
    assert len(asked) == 1
    transfer.abort()


@pytest.mark.parametrize("schedule", ["ring", "direct"])
async def test_who_always_says_that_it_is_waiting_does_not_hold_the_attempt(autojump_clock, nursery, schedule):
    async def ask(peer):
        await trio.lowlevel.checkpoint()
        return 0.0

    plan, times = attrs.evolve(OWNED, schedule=schedule), RoundTimes()
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(plan, inbox, pace=1e7, ask=ask)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), Slow(B, VALUES // 2))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == B
    assert 2 * times.quiet < trio.current_time() < times.attempt(plan.load, 2) / 2
    transfer.abort()


async def test_who_answers_nothing_is_looked_at_meanwhile(autojump_clock, nursery):
    """Time in which a question has no answer is silence: nothing was stopped."""
    times = RoundTimes()

    async def ask(peer):
        await trio.sleep(times.quiet)
        raise RequestTimeout("no answer")

    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(OWNED, inbox, pace=1e9, ask=ask)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, OWNED.id), Slow(B, 0))
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == B
    assert times.stall < trio.current_time() < times.stall + 2 * times.quiet
    transfer.abort()


C, D = (PeerId(bytes([number]) * 32) for number in (3, 4))


@pytest.mark.parametrize(("slow", "blamed"), [((B,), B), ((C,), C), ((B, C, D), None)])
async def test_when_the_time_is_over_it_is_whoever_has_not_delivered(autojump_clock, nursery, slow, blamed):
    """And nobody if all have not: it may be our own line. In the plan, the left neighbour is D."""
    members = (A, B, C, D)
    plan = attrs.evolve(OWNED, members=members, weights=(1.0,) * 4)
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(plan, inbox)
    for peer in members[1:]:
        stream = Slow(peer, rate=2000.0) if peer in slow else Slow(peer)
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), stream)
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == blamed
    assert trio.current_time() == pytest.approx(RoundTimes().attempt(plan.load, 4))


async def test_whether_a_member_waits_is_told_to_those_it_has_nothing_for(autojump_clock, nursery):
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(OWNED, inbox)
    assert transfer.waiting(B) is None
    nursery.start_soon(transfer.run)
    await trio.sleep(5)
    assert transfer.waiting(B) == pytest.approx(5, abs=0.5)  # it has sent its values, and waits for those of B
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, OWNED.id), Arriving())
    await transfer.settled.wait()
    assert transfer.waiting(B) is None  # everything is on its way


async def test_many_streams_side_by_side_on_the_slowest_line_that_is_worth_waiting_for(autojump_clock, nursery):
    """Each of them brings less than one would alone."""
    others = tuple(PeerId(bytes([number]) * 32) for number in range(2, 42))
    plan = attrs.evolve(OWNED, members=(A, *others), weights=(1.0,) * 41, length=41 << 14)
    inbox = RingInbox(PLAN.run, PLAN.tag, patience=1.0)
    transfer = begin(plan, inbox)
    for peer in others:
        slow = Slow(peer, rate=RoundTimes().slowest / 40)
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, plan.id), slow)
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.complete
    await transfer.ended()


class Counting(Slow):
    """Counts the segments that were asked for."""

    asked = 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.fifteenth = trio.Event()

    async def receive_into(self, buffer):
        self.asked += 1
        if self.asked == 15:
            self.fifteenth.set()
        await super().receive_into(buffer)


async def test_values_that_nobody_can_use_yet_are_left_on_the_line_that_the_slowest_needs(autojump_clock, nursery):
    others = fast, slow = [PeerId(bytes([number]) * 32) for number in (2, 3)]
    owned = attrs.evolve(OWNED, members=(A, *others), weights=(1.0,) * 3, length=1 << 20, blocks=(1 << 20, 0, 0))
    inbox, streams = RingInbox(PLAN.run, PLAN.tag, patience=1.0), [Counting(fast, rate=1e9), Counting(slow, rate=1e5)]
    transfer = begin(owned, inbox)
    for stream in streams:
        nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, owned.id), stream)
    nursery.start_soon(transfer.run)
    await streams[1].fifteenth.wait()
    assert AHEAD < streams[0].asked <= FASTER * 15 + AHEAD
    await transfer.settled.wait()
    assert transfer.complete
    await transfer.ended()


async def test_nobody_waits_for_long_for_values_that_do_not_come(autojump_clock, nursery):
    others = fast, gone = [PeerId(bytes([number]) * 32) for number in (2, 3)]
    owned = attrs.evolve(OWNED, members=(A, *others), weights=(1.0,) * 3, length=1 << 20, blocks=(1 << 20, 0, 0))
    inbox, stream = RingInbox(PLAN.run, PLAN.tag, patience=1.0), Counting(fast, rate=1e9)
    transfer = begin(owned, inbox)
    nursery.start_soon(inbox.deliver, RingData(PLAN.run, PLAN.tag, owned.id), stream)
    nursery.start_soon(transfer.run)
    await transfer.settled.wait()
    assert transfer.failure.suspect == gone
    assert stream.asked > AHEAD + 5
    transfer.abort()
