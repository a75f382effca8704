from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import Annotated

import attrs
import pytest
import trio
from msgspec import Meta

from protocol import lane_policy
from protocol.channel import LANE_OPENING
from protocol.connection import Limits
from protocol.errors import PeerGone, PeerUnreachable, ProtocolError
from protocol.frames import Kind, pack
from protocol.lane import LARGEST_PIECE, NONCE_SIZE, STALL, TOKEN_SIZE, call
from protocol.lane_policy import IDLE, MAX_LANES
from protocol.lanes import CALL_TIMEOUT
from protocol.memory import MemoryNetwork
from protocol.noise import derive_ciphers
from protocol.tcp import TcpTransport
from protocol.transport import Address
from protocol.wire import message

CONTENT = random.Random(1).randbytes(30_000_000)
DIGEST = hashlib.sha256(CONTENT).digest()


@message("test.push")
class Push:
    size: Annotated[int, Meta(ge=0, le=2**40)]


@message("test.digest")
class Digest:
    digest: bytes


async def until(condition):
    while not condition():  # noqa: ASYNC110 - simulated time; no event says how far lanes have come
        await trio.sleep(0.01)


async def take(request, stream):
    buffer = bytearray(len(CONTENT))
    for _ in range(request.size // len(CONTENT)):
        await stream.receive_into(buffer)
    return Digest(hashlib.sha256(buffer).digest())


class Tapped:
    """A transport whose streams a test gets hold of."""

    def __init__(self, transport):
        self._transport = transport
        self.dialled = []
        self.refuses = False

    async def dial(self, address, *, local_port=None):
        if self.refuses:
            await trio.lowlevel.checkpoint()
            raise PeerUnreachable("nobody there")
        stream = await self._transport.dial(address, local_port=local_port)
        self.dialled.append(stream)
        return stream

    async def listen(self, address):
        return await self._transport.listen(address)


@attrs.define
class Pair:
    """Two peers that are connected; `a` has dialled."""

    a: object
    b: object
    tap: Tapped

    @property
    def ours(self):
        """The connection as `a` has it."""
        return self.a.endpoint._links.get(self.b.peer).connection

    @property
    def theirs(self):
        return self.b.endpoint._links.get(self.a.peer).connection

    async def push(self, *, source=None):
        source, target = (self.b, self.a) if source is self.b else (self.a, self.b)
        async with source.endpoint.open(target.peer, Push(len(CONTENT)), bulk=True) as stream:
            await stream.send_bytes(CONTENT)
            return (await stream.receive(Digest)).digest

    async def under_way(self):
        """Until several pieces are under way on lanes, after some others."""
        await until(lambda: self.ours.mux.carried >= 4 and self.ours.lanes.bytes_sent >= 3e6)

    async def open_lanes(self, count):
        """As if both sides had found out that so many are of use."""
        for lanes in (self.ours.lanes, self.theirs.lanes):
            lanes._policy.wanted = count
            lanes.on_wanted(count)
        await until(lambda: len(self.ours.lanes) == count)


@pytest.fixture
def network():
    return MemoryNetwork(latency=0.05)


@pytest.fixture
def start(start_endpoint):
    return partial(start_endpoint, handlers=((Push, take),))


@pytest.fixture
def connect(start, network):
    async def connect(**limits):
        tap = Tapped(network.transport("host1"))
        b = await start(2, limits=Limits(**limits))
        a = await start(1, transport=tap, limits=Limits(**limits))
        await a.endpoint.connect(b.peer)
        await trio.sleep(1)  # until `b` knows it, too
        return Pair(a, b, tap)

    return connect


async def test_bulk_data_on_a_long_way_gets_lanes(connect, autojump_clock):
    pair = await connect()
    sent = pair.a.endpoint.bytes_sent
    assert await pair.push() == DIGEST
    assert 1 <= len(pair.ours.lanes) <= MAX_LANES
    assert pair.ours.lanes.bytes_sent > len(CONTENT) / 5
    assert pair.a.endpoint.bytes_sent - sent >= len(CONTENT)
    assert pair.b.endpoint.bytes_received >= len(CONTENT)
    assert pair.a.endpoint.statistics(pair.b.peer).bytes_sent >= len(CONTENT)
    await trio.sleep(1)
    assert pair.ours.mux.idle
    await trio.sleep(IDLE + 5)
    assert not len(pair.ours.lanes)
    assert not len(pair.theirs.lanes)
    assert pair.a.endpoint.bytes_sent - sent >= len(CONTENT)


async def test_whoever_was_dialled_asks_for_lanes(connect, autojump_clock):
    pair = await connect()
    assert await pair.push(source=pair.b) == DIGEST
    assert pair.theirs.lanes.bytes_sent > len(CONTENT) / 5
    await trio.sleep(IDLE + 5)
    assert not len(pair.ours.lanes)


async def test_more_lanes_where_they_carry_more(start, network, autojump_clock):
    """A connection in memory has a megabyte under way at most: here ten a second."""
    a, b = await start(1, limits=Limits(window=1 << 26)), await start(2, limits=Limits(window=1 << 26))
    await a.endpoint.connect(b.peer)
    lanes = a.endpoint._links.get(b.peer).connection.lanes
    async with a.endpoint.open(b.peer, Push(10 * len(CONTENT)), bulk=True) as stream:
        for _ in range(10):
            await stream.send_bytes(CONTENT)
        assert len(lanes) >= 4
        await stream.receive(Digest)


async def test_no_more_lanes_where_they_carry_no_more(start, network, autojump_clock):
    network.set_link("host1", "host2", bandwidth=5e6)
    a, b = await start(1), await start(2)
    await a.endpoint.connect(b.peer)
    lanes = a.endpoint._links.get(b.peer).connection.lanes
    async with a.endpoint.open(b.peer, Push(3 * len(CONTENT)), bulk=True) as stream:
        for _ in range(3):
            await stream.send_bytes(CONTENT)
        assert len(lanes) == 1
        await stream.receive(Digest)


async def test_no_lanes_on_a_short_way(start, network, autojump_clock):
    network.set_link("host1", "host2", latency=0.001, bandwidth=5e6)
    a, b = await start(1), await start(2)
    async with a.endpoint.open(b.peer, Push(len(CONTENT)), bulk=True) as stream:
        await stream.send_bytes(CONTENT)
        await stream.receive(Digest)
        assert not len(a.endpoint._links.get(b.peer).connection.lanes)


async def test_no_lanes_if_none_are_allowed(connect, autojump_clock):
    pair = await connect(max_lanes=0)
    assert await pair.push() == DIGEST
    assert len(pair.tap.dialled) == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_lanes_that_break_in_the_middle(connect, nursery, autojump_clock, count):
    pair = await connect()
    await pair.open_lanes(3)

    async def disaster():
        await pair.under_way()
        for stream in pair.tap.dialled[1 : 1 + count]:
            stream.crash()
        pair.tap.refuses = True

    nursery.start_soon(disaster)
    assert await pair.push() == DIGEST
    assert len(pair.ours.lanes) == 3 - count
    await trio.sleep(1)
    assert pair.ours.mux.idle
    assert pair.theirs.failure is None


async def test_lanes_that_break_carry_data_both_ways(connect, nursery, autojump_clock):
    pair = await connect()
    await pair.open_lanes(2)
    digests = []

    async def push(source):
        digests.append(await pair.push(source=source))

    async with trio.open_nursery() as both:
        both.start_soon(push, pair.a)
        both.start_soon(push, pair.b)
        for stream in list(pair.tap.dialled[1:]):
            await pair.under_way()
            stream.crash()
    assert digests == [DIGEST, DIGEST]


async def test_a_lane_that_stalls_is_given_up(connect, nursery, autojump_clock):
    pair = await connect()
    await pair.open_lanes(2)

    async def stuck(data):
        await trio.sleep_forever()

    async def disaster():
        await pair.under_way()
        pair.tap.dialled[1].send = stuck
        pair.tap.refuses = True

    nursery.start_soon(disaster)
    began = trio.current_time()
    assert await pair.push() == DIGEST
    assert STALL < trio.current_time() - began < 8 * STALL  # the network in memory does not tell what has arrived
    assert len(pair.ours.lanes) == 1


async def test_lanes_that_share_a_slow_line_are_not_given_up(connect, network, autojump_clock):
    """Each piece is under way for longer than one on a lane of its own may be, and nothing tells that it moves."""
    pair = await connect(max_lanes=4)
    await pair.open_lanes(4)
    network.set_link("host1", "host2", bandwidth=30_000)
    assert await pair.push() == DIGEST
    assert len(pair.tap.dialled) == 1 + 4


async def test_a_peer_that_acknowledges_nothing_makes_us_keep_little(connect, nursery, autojump_clock):
    window = 1 << 21
    pair = await connect(window=window)
    await pair.open_lanes(4)
    pair.theirs.mux.acknowledge = lambda lane, pieces: None
    most = 0

    async def watch():
        nonlocal most
        while True:
            await trio.sleep(0.01)
            most = max(most, sum(lane.outbox.size for lane in pair.ours.lanes._lanes.values()))

    nursery.start_soon(watch)
    assert await pair.push() == DIGEST  # lanes are given up, one after the other
    assert 1e6 < most < 2 * window + LARGEST_PIECE


async def test_lanes_are_tried_again_after_a_while(connect, autojump_clock):
    pair = await connect()
    pair.tap.refuses = True
    assert await pair.push() == DIGEST
    assert not len(pair.ours.lanes)
    pair.tap.refuses = False
    while not len(pair.ours.lanes):
        assert await pair.push() == DIGEST
    assert trio.current_time() < 60


async def test_lanes_end_with_their_connection(connect, nursery, autojump_clock):
    pair = await connect()
    await pair.open_lanes(3)
    lanes = pair.tap.dialled[1:4]
    ours, theirs = pair.ours, pair.theirs

    async def disaster():
        await pair.under_way()
        pair.tap.dialled[0].crash()

    nursery.start_soon(disaster)
    with pytest.raises(PeerGone):
        await pair.push()
    await trio.sleep(1)
    assert not len(ours.lanes)
    assert not len(theirs.lanes)
    for stream in lanes:
        with pytest.raises(PeerGone):
            await stream.send(b"x")


async def test_caps_hold_for_lanes_too(start, network, autojump_clock):
    limits = Limits(max_upload=3e6)
    a, b = await start(1, limits=limits), await start(2, limits=Limits())
    began = trio.current_time()
    async with a.endpoint.open(b.peer, Push(len(CONTENT)), bulk=True) as stream:
        await stream.send_bytes(CONTENT)
        await stream.receive(Digest)
    assert a.endpoint._links.get(b.peer).connection.lanes.bytes_sent > len(CONTENT) / 2
    assert trio.current_time() - began > 0.95 * len(CONTENT) / 3e6


async def test_a_download_cap_holds_for_lanes_too(connect, autojump_clock):
    pair = await connect(max_download=3e6)
    await pair.open_lanes(2)
    began = trio.current_time()
    assert await pair.push() == DIGEST
    assert pair.ours.lanes.bytes_sent > len(CONTENT) / 5
    assert trio.current_time() - began > 0.7 * len(CONTENT) / 3e6


async def test_messages_follow_the_bytes_before_them(start, network, autojump_clock):
    """Once a stream has gone over to lanes, its messages go there, too, and nothing overtakes anything."""
    got = []

    async def alternate(request, stream):
        for _ in range(6):
            buffer = bytearray(3_000_000)
            await stream.receive_into(buffer)
            got.append((await stream.receive(Digest)).digest == hashlib.sha256(buffer).digest())

    a, b = await start(1), await start(2)
    b.endpoint.handle(Alternate, alternate)
    async with a.endpoint.open(b.peer, Alternate(), bulk=True) as stream:
        for start_at in range(6):
            part = CONTENT[start_at * 3_000_000 :][:3_000_000]
            await stream.send_bytes(part)
            await stream.send(Digest(hashlib.sha256(part).digest()))
        await stream.finish()
        with pytest.raises(Exception, match="finished"):
            await stream.receive(Digest)
    assert got == [True] * 6
    assert a.endpoint._links.get(b.peer).connection.lanes.bytes_sent > 9_000_000


@message("test.alternate")
class Alternate:
    pass


async def test_lanes_over_tcp(start, monkeypatch):
    monkeypatch.setattr(lane_policy, "LONG", 0.0)
    here = Address("127.0.0.1", 0)
    b = await start(2, transport=TcpTransport(), listen=here)
    tap = Tapped(TcpTransport())
    a = await start(1, transport=tap, listen=here)
    await a.endpoint.connect(b.peer)
    connection = a.endpoint._links.get(b.peer).connection
    with trio.fail_after(60):
        async with a.endpoint.open(b.peer, Push(1 << 40), bulk=True) as stream:
            while connection.lanes.bytes_sent < 1e6:
                await stream.send_bytes(CONTENT)
            await tap.dialled[1].aclose()
        async with a.endpoint.open(b.peer, Push(len(CONTENT)), bulk=True) as stream:
            await stream.send_bytes(CONTENT)
            assert (await stream.receive(Digest)).digest == DIGEST


# Those who break the rules.


async def dial(network, pair):
    return await network.transport("stranger").dial(pair.b.endpoint.address)


async def ended(stream):
    """What comes until the other side closes, and when it does."""
    data = bytearray()
    buffer = memoryview(bytearray(1000))
    try:
        while count := await stream.receive_into(buffer):
            data += buffer[:count]
    except PeerGone:
        pass
    await stream.aclose()
    return bytes(data)


async def test_an_unknown_token(connect, network, autojump_clock):
    pair = await connect()
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING + bytes(TOKEN_SIZE + 4 + NONCE_SIZE))
    began = trio.current_time()
    assert await ended(stream) == b""
    assert trio.current_time() - began < 1


async def test_a_stranger_who_knows_the_token_cannot_open_a_lane(connect, network, autojump_clock):
    pair = await connect()
    token = pair.theirs.lanes.token
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING + token + b"\0\0\0\1" + bytes(NONCE_SIZE))
    await stream.send(b"\0\x10" + bytes(16))
    answer = await ended(stream)
    assert answer.startswith(LANE_OPENING)
    assert not len(pair.theirs.lanes)
    assert pair.theirs.failure is None
    assert await pair.push() == DIGEST
    assert len(pair.ours.lanes)


async def test_slow_strangers_time_out(connect, network, autojump_clock):
    pair = await connect()
    began = trio.current_time()
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING + pair.theirs.lanes.token + b"\0\0\0\1" + bytes(NONCE_SIZE))
    await ended(stream)
    assert trio.current_time() - began < CALL_TIMEOUT + 1
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING[:-1])
    await ended(stream)
    assert trio.current_time() - began < CALL_TIMEOUT + 12


async def test_a_lane_that_was_recorded_cannot_be_opened_again(connect, network, autojump_clock):
    pair = await connect()
    sent = []

    class Recorder:
        def __init__(self, stream):
            self._stream = stream
            self.remote = stream.remote
            self.receive_into = stream.receive_into
            self.aclose = stream.aclose

        async def send(self, data):
            sent.append(bytes(data))
            await self._stream.send(data)

    stream = await dial(network, pair)
    channel = await call(Recorder(stream), pair.ours.channel, 5)
    await trio.sleep(0.5)
    assert len(pair.theirs.lanes) == 1
    replay = await dial(network, pair)
    await replay.send(b"".join(sent))
    assert await ended(replay) == b""  # the number was used
    await channel.aclose()
    await trio.sleep(0.5)
    again = await dial(network, pair)
    await again.send(b"".join(sent).replace(b"\0\0\0\5", b"\0\0\0\6", 1))
    await ended(again)
    assert not len(pair.theirs.lanes)
    assert pair.theirs.failure is None


async def test_a_lane_reflects_nothing(connect, network, autojump_clock):
    """What the other side says cannot be said back to it."""
    pair = await connect()
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING + pair.theirs.lanes.token + b"\0\0\0\1" + bytes(NONCE_SIZE))
    buffer = bytearray(len(LANE_OPENING) + NONCE_SIZE + 18)
    rest = memoryview(buffer)
    while rest:
        rest = rest[await stream.receive_into(rest) :]
    await stream.send(buffer[-18:])
    await ended(stream)
    assert not len(pair.theirs.lanes)


async def test_too_many_lanes(connect, network, autojump_clock):
    pair = await connect()
    channels = []
    for number in range(1, MAX_LANES + 1):
        channels.append(await call(await dial(network, pair), pair.ours.channel, number))
    await trio.sleep(0.5)
    stream = await dial(network, pair)
    await stream.send(LANE_OPENING + pair.theirs.lanes.token + b"\0\0\0\x09" + bytes(NONCE_SIZE))
    assert await ended(stream) == b""
    for channel in channels:
        await channel.aclose()
    await trio.sleep(0.5)
    assert not len(pair.theirs.lanes)


async def test_lanes_are_dialled_by_whoever_dialled_the_connection(connect, network, autojump_clock):
    pair = await connect()
    stream = await network.transport("stranger").dial(pair.a.endpoint.address)
    await stream.send(LANE_OPENING + pair.ours.lanes.token + b"\0\0\0\1" + bytes(NONCE_SIZE))
    assert await ended(stream) == b""


@pytest.mark.parametrize(
    "record",
    [
        b"garbage",
        b"",
        pack(Kind.PING, 0, 0, bytes(8)),
        pack(Kind.PIECE, 0, 99, bytes(11) + b"\1"),
    ],
)
async def test_a_peer_that_breaks_the_rules_on_a_lane(connect, network, autojump_clock, record):
    pair = await connect()
    theirs = pair.theirs
    channel = await call(await dial(network, pair), pair.ours.channel, 1)
    await channel.send(record)
    await trio.sleep(1)
    assert isinstance(theirs.failure, ProtocolError)
    await channel.aclose()


async def test_bytes_that_the_peer_did_not_send_cost_the_lane_only(connect, network, autojump_clock):
    pair = await connect()
    stream = await dial(network, pair)
    await call(stream, pair.ours.channel, 1)
    await trio.sleep(0.5)
    assert len(pair.theirs.lanes) == 1
    await stream.send(b"\0\x20" + bytes(32))
    await trio.sleep(1)
    assert not len(pair.theirs.lanes)
    assert await pair.push() == DIGEST
    await stream.aclose()


async def test_pieces_acknowledged_that_were_never_sent(connect, autojump_clock):
    pair = await connect()
    await pair.open_lanes(1)
    (number,) = pair.ours.lanes._lanes
    pair.theirs.mux.acknowledge(number + 1, 7)  # a lane that is gone, for all that the other side knows
    pair.theirs.kick()
    await trio.sleep(1)
    assert pair.ours.failure is None
    pair.theirs.mux.acknowledge(number, 7)
    pair.theirs.kick()
    await trio.sleep(1)
    assert not pair.b.endpoint.is_connected(pair.a.peer)


def test_keys_depend_on_everything():
    ciphers = {
        bytes(derive_ciphers(secret, context)[way].encrypt(b""))
        for secret in (bytes(32), bytes(31) + b"\1")
        for context in (b"one", b"two")
        for way in (0, 1)
    }
    assert len(ciphers) == 8
