"""Who is there and who is not, on links of all kinds, and transfers that do not move."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from functools import partial
from typing import Annotated

import pytest
import trio
from msgspec import Meta

from protocol import wire
from protocol.channel import handshake
from protocol.endpoint import Limits, PeerLost
from protocol.errors import StreamReset
from protocol.frames import Kind, pack
from protocol.hello import Hello
from protocol.identity import Identity
from protocol.liveness import LONGEST_SILENCE, Progress, Pulse
from protocol.stream import STALL
from protocol.wire import message
from tests.protocol.messages import Echo, echo

SIZE = 1 << 20


@message("test.blob")
class Blob:
    """Asks for so many raw bytes: some of them at once, the rest after a while."""

    size: Annotated[int, Meta(ge=0)]
    at_once: Annotated[int, Meta(ge=0)]
    pause: float


async def blob(request, stream):
    await stream.send_bytes(bytes(request.at_once))
    await trio.sleep(request.pause)
    await stream.send_bytes(bytes(request.size - request.at_once))
    await stream.finish()


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Echo, echo), (Blob, blob)))


def lost(*watchers):
    """The peers that were lost since somebody began to watch."""
    found = []
    for events in watchers:
        with contextlib.suppress(trio.WouldBlock):
            while True:
                if isinstance(event := events.receive_nowait(), PeerLost):
                    found.append(event)
    return found


async def receive_blob(endpoint, peer, *, at_once=SIZE, pause=0.0, size=SIZE):
    buffer = memoryview(bytearray(size))
    async with endpoint.open(peer, Blob(size, at_once, pause), bulk=True) as stream:
        for begin in range(0, size, 1 << 16):
            await stream.receive_into(buffer[begin : begin + (1 << 16)])
        await stream.finish()


def pulse(rtt=0.02):
    return Pulse(heartbeat=1.0, dead_after=4.0, rtt=rtt, now=0.0)


def answer(heart, trips, now=0.0):
    """Pings once a second, each answered after its time. Returns when the last answer has come."""
    arrivals, latest = deque(), 0.0
    for count, trip in enumerate(trips):
        sent = now + count
        while arrivals and arrivals[0][0] <= sent:
            arrival, token = arrivals.popleft()
            heart.heard(arrival)
            heart.answered(token, arrival)
        assert heart.beat(sent) == 0
        latest = max(latest, sent + trip)  # nothing overtakes
        arrivals.append((latest, heart.ping(sent)))
        heart.next_beat(sent)
    heart.heard(sent)
    return sent


@pytest.mark.parametrize("rtt", [0.001, 0.05, 0.6])
def test_on_short_ways_silence_is_noticed_after_four_seconds(rtt):
    heart = pulse(rtt)
    now = answer(heart, [rtt] * 30)
    assert heart.rtt == pytest.approx(rtt)
    assert heart.patience == 4.0
    assert not heart.gone(now + 3.9)
    assert heart.gone(now + 4.0)


def test_patience_grows_with_the_round_trip_and_its_variation_up_to_a_bound():
    steady, jittery, endless = pulse(), pulse(), pulse()
    answer(steady, [4.0] * 60)
    answer(jittery, [2.0, 6.0] * 30)
    answer(endless, [50.0] * 100)
    assert 9 <= steady.patience < jittery.patience <= endless.patience == LONGEST_SILENCE


def test_patience_shrinks_when_the_way_is_short_again():
    heart = pulse()
    now = answer(heart, [5.0] * 20)
    assert heart.patience > 10
    answer(heart, [0.05] * 60, now)
    assert heart.patience == 4.0


def test_the_time_that_the_handshake_took_is_forgotten_with_the_first_answer():
    """The other side may have been stopped when it was asked."""
    heart = pulse(9.0)
    assert heart.patience > 20
    answer(heart, [0.02] * 2)
    assert heart.rtt == pytest.approx(0.02)
    assert heart.patience == 4.0


@pytest.mark.parametrize("stop", [3.9, 10])
def test_answers_that_were_late_because_the_other_side_was_stopped_are_soon_forgotten(stop):
    heart = pulse()
    answer(heart, [0.02] * 10 + [stop - count for count in range(round(stop))] + [0.02] * 13)
    assert heart.patience < 6


def test_after_a_stop_silence_is_counted_from_then_on_at_the_latest():
    """Something had been waiting to be read, and was, before it was noticed that this process had been stopped."""
    heart = pulse()
    now = answer(heart, [0.02] * 10)
    heart.heard(now + 3600)
    assert heart.beat(now + 3600) > 3000
    assert not heart.gone(now + 3603.9)
    assert heart.gone(now + 3604)


def test_what_begins_after_a_stop_is_not_excused_for_it():
    progress = Progress(10, 5.0)
    progress.begin(3600.0, 0)
    progress.excuse(3000.0, 3600.0)
    assert not progress.stuck(3604.9, 0)
    assert progress.stuck(3605.0, 0)


def test_a_ping_without_an_answer_does_not_hide_later_ones():
    heart = pulse(1.0)
    heart.ping(0.0)
    later = heart.ping(1.0)
    heart.next_beat(1.0)
    heart.answered(later, 1.2)
    assert heart.rtt < 1.0


def test_answers_to_what_was_not_asked_count_for_nothing():
    heart = pulse(1.0)
    token = heart.ping(0.0)
    heart.next_beat(0.0)
    heart.answered(b"\xff" * 8, 0.5)
    assert heart.rtt == 1.0
    heart.answered(token, 0.5)
    after = heart.rtt
    heart.answered(token, 1.0)
    assert heart.rtt == after


def test_the_time_in_which_we_were_stopped_is_no_round_trip_and_no_silence():
    heart = pulse()
    token = heart.ping(0.0)
    heart.next_beat(0.0)
    heart.answered(token, 500.0)  # the reader may run first
    assert heart.rtt == 0.02
    assert heart.beat(500.0) == 498.0
    assert not heart.gone(500.0)


def test_progress():
    progress = Progress(100, 10.0)
    assert not progress.stuck(1e9, 0)
    progress.begin(0.0, 5)
    assert not progress.stuck(9.0, 104)
    assert progress.stuck(10.0, 104)
    assert not progress.stuck(10.0, 105)
    assert not progress.stuck(19.9, 105)
    progress.excuse(5.0, 19.9)
    assert not progress.stuck(20.0, 105)
    assert progress.stuck(25.0, 105)
    progress.end()
    assert not progress.running
    assert not progress.stuck(1e9, 105)


@pytest.mark.parametrize("latency", [0.01, 0.3, 1.0, 2.0, 3.0])
async def test_a_long_way_is_not_death(start, network, autojump_clock, latency):
    a, b = await start(1), await start(2)
    network.set_link("host1", "host2", latency=latency)
    await a.endpoint.connect(b.peer)
    with a.endpoint.watch() as here, b.endpoint.watch() as there:
        await trio.sleep(300)
        assert not lost(here, there)
    assert a.endpoint.statistics(b.peer).rtt == pytest.approx(2 * latency, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
async def test_jitter_is_not_death(start, network, autojump_clock, seed):
    """Now 10 ms, now up to three seconds; what comes later never overtakes."""
    rng = random.Random(seed)
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    with a.endpoint.watch() as here, b.endpoint.watch() as there:
        for _ in range(300):
            network.set_link("host1", "host2", latency=0.01 + rng.random() ** 2 * 2.9)
            await trio.sleep(rng.random() * 2)
        assert not lost(here, there)


@pytest.mark.parametrize(("bandwidth", "both"), [(6e3, False), (20e3, False), (60e3, True), (200e3, True)])
async def test_pings_that_wait_behind_bulk_data_are_not_death(start, network, autojump_clock, bandwidth, both):
    """A megabyte waits on the way there: minutes on the slowest link."""
    network.set_link("host1", "host2", latency=0.1, bandwidth=bandwidth)
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    with a.endpoint.watch() as here, b.endpoint.watch() as there:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(receive_blob, a.endpoint, b.peer, size=3 * SIZE))
            if both:
                nursery.start_soon(partial(receive_blob, b.endpoint, a.peer, size=3 * SIZE))
        assert not lost(here, there)


async def silence_noticed(a, b, network):
    """Seconds until each notices that the other cannot be heard any more."""
    with a.endpoint.watch() as here, b.endpoint.watch() as there:
        network.partition({"host1"}, {"host2"})
        began = trio.current_time()
        times = []

        async def wait(events):
            event = await events.receive()
            assert isinstance(event, PeerLost)
            assert "silent" in event.reason
            times.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, here)
            nursery.start_soon(wait, there)
    return times


@pytest.mark.parametrize(
    ("latency", "least", "most"), [(0.001, 2.5, 4.1), (0.05, 2.5, 4.1), (0.25, 2.5, 4.1), (3.0, 10, LONGEST_SILENCE)]
)
async def test_the_dead_are_noticed(start, network, autojump_clock, latency, least, most):
    network.set_link("host1", "host2", latency=latency)
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(120)
    for seconds in await silence_noticed(a, b, network):
        assert least <= seconds <= most


async def test_the_dead_are_noticed_soon_after_an_earlier_stall(start, network, autojump_clock):
    """A connection that was made while the other side slept says nothing about the way there."""
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(10)
    with a.endpoint.watch() as events:
        network.stall("host2")
        assert isinstance(await events.receive(), PeerLost)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.endpoint.connect, b.peer)
            await trio.sleep(6)
            network.resume("host2")
        assert a.endpoint.statistics(b.peer).rtt > 5
        await trio.sleep(12)
        assert a.endpoint.is_connected(b.peer)
        assert a.endpoint.statistics(b.peer).rtt == pytest.approx(0.02, rel=0.05)
    network.stall("host2")
    with a.endpoint.watch() as events, trio.fail_after(6):
        event = await events.receive()
        assert isinstance(event, PeerLost)
        assert "silent for 4 s" in event.reason


async def test_a_long_way_may_be_interrupted_for_longer(start, network, autojump_clock):
    """As when TCP has to repeat what was lost."""
    network.set_link("host1", "host2", latency=1.5)
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    await trio.sleep(60)
    with a.endpoint.watch() as events:
        network.partition({"host1"}, {"host2"})
        await trio.sleep(4)
        network.heal()
        await trio.sleep(60)
        assert not lost(events)


# Transfers.


async def test_a_transfer_that_stops_is_given_up_though_the_peer_answers_pings(start, autojump_clock):
    a, b = await start(1), await start(2)
    began = trio.current_time()
    with pytest.raises(StreamReset, match=rf"{b.peer.short} sent hardly anything for 60 s"):
        await receive_blob(a.endpoint, b.peer, at_once=SIZE // 2, pause=1e4)
    assert STALL <= trio.current_time() - began <= STALL + 3
    assert a.endpoint.is_connected(b.peer)
    assert await a.endpoint.request(b.peer, Echo(""), Echo) == Echo("!")


async def test_a_transfer_that_only_pauses_is_not(start, autojump_clock):
    a, b = await start(1), await start(2)
    await receive_blob(a.endpoint, b.peer, at_once=SIZE // 2, pause=STALL - 5)


async def test_a_transfer_that_is_slow_is_not(start, network, autojump_clock):
    a, b = await start(1), await start(2)
    network.set_link("host1", "host2", bandwidth=2500)
    await receive_blob(a.endpoint, b.peer)
    assert trio.current_time() > SIZE / 2500


async def test_a_transfer_that_we_hold_up_ourselves_is_not_given_up(start, autojump_clock):
    """The caps let so little in that a window takes minutes."""
    a = await start(1, limits=Limits(max_download=8000))
    b = await start(2)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(partial(receive_blob, a.endpoint, b.peer, at_once=2 * SIZE, size=2 * SIZE))
    assert trio.current_time() > 3 * SIZE / 8000


async def test_a_sender_whose_cap_is_low_is_not_given_up(start, autojump_clock):
    a = await start(1)
    b = await start(2, limits=Limits(max_upload=2500))
    await receive_blob(a.endpoint, b.peer)


async def test_who_takes_nothing_is_given_up_though_he_answers_pings(start, autojump_clock):
    """The reader's task hangs: credit does not come back."""

    async def hang(request, stream):
        await trio.sleep_forever()

    a, b = await start(1), await start(2, handlers=[(Echo, hang)])
    began = trio.current_time()
    with pytest.raises(StreamReset, match=rf"{b.peer.short} took hardly anything for 60 s"):
        async with a.endpoint.open(b.peer, Echo(""), bulk=True) as stream:
            await stream.send_bytes(bytes(SIZE))
    assert STALL <= trio.current_time() - began <= STALL + 3
    assert a.endpoint.is_connected(b.peer)


async def test_a_trickle_is_not_progress(start, network, autojump_clock):
    """A byte a second, in frames that are copied as they come."""
    asked = trio.Event()
    a = await start(1)
    stream = await network.transport("intruder").dial(a.endpoint.address)
    identity = Identity.from_seed(bytes(32))
    channel = await handshake(stream, identity, initiator=True, features=wire.encode(Hello(bytes(8), 1, 0)))

    async def trickle():
        await asked.wait()
        while True:
            await channel.send(pack(Kind.DATA, 0, 2, b"x"))
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        await trio.sleep(1)
        began = trio.current_time()
        async with a.endpoint.open(identity.peer_id, Echo(""), bulk=True) as opened:
            asked.set()
            with pytest.raises(StreamReset, match="hardly anything"):
                await opened.receive_into(bytearray(SIZE))
        assert trio.current_time() - began <= STALL + 3
        nursery.cancel_scope.cancel()
    await channel.aclose()


async def test_the_time_in_which_we_were_stopped_is_not_the_peers(start, autojump_clock):
    a, b = await start(1), await start(2)

    async def stop():
        await trio.sleep(20)
        autojump_clock.jump(4000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        await receive_blob(a.endpoint, b.peer, at_once=SIZE // 2, pause=4030)
