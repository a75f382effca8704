"""Attacks on a running endpoint: each fails, what it can occupy is bounded, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import random

import attrs
import pytest
import trio

from protocol import wire
from protocol.channel import HANDSHAKE_TIMEOUT, handshake
from protocol.door import GREETINGS_AT_ONCE, GREETINGS_PER_SECOND, PROTOCOL_ERROR
from protocol.endpoint import Hello, Limits
from protocol.errors import HandshakeError, PeerGone, PeerUnreachable, ShoalError
from protocol.frames import Kind, pack
from protocol.identity import Identity
from protocol.punch import MAX_PROBES
from protocol.transport import Address
from tests.protocol.messages import Echo, echo

ALICE, EVE = (Identity.from_seed(bytes([seed]) * 32) for seed in (77, 66))


@pytest.fixture
def start(start_endpoint):
    async def start(seed, **options):
        return await start_endpoint(seed, handlers=((Echo, echo),), **options)

    return start


@pytest.fixture
def works(start):
    """Whether an honest newcomer is served."""
    seeds = iter(range(200, 255))

    async def works(node):
        honest = await start(next(seeds))
        with trio.fail_after(5):
            reply = await honest.endpoint.request(node.peer, Echo("hi"), Echo)
        await honest.stop()
        return reply == Echo("hi!")

    return works


async def knock(network, address, identity=EVE, *, host="evil", hello=None):
    """The secure channel of somebody who may then say whatever they like."""
    stream = await network.transport(host).dial(address)
    features = wire.encode(hello or Hello(bytes(8), 1, 0))
    return await handshake(stream, identity, initiator=True, features=features)


async def closed(channel):
    """Returns when the other side has ended the connection."""
    with contextlib.suppress(PeerGone):
        while True:
            await channel.receive()
    await channel.aclose()


async def read(stream, size):
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = await stream.receive_into(rest)
        if not count:
            raise PeerGone("the stream has ended")
        rest = rest[count:]
    return bytes(data)


async def read_frame(stream, size=2):
    """The next handshake message or record (with 4), with its length, which has that size."""
    head = await read(stream, size)
    return head + await read(stream, int.from_bytes(head, "big"))


# Somebody on the way between two peers.


@attrs.define
class Middle:
    """Listens in another peer's place, dials that peer, and passes on what it wants to.

    Attributes:
        preambles: What becomes of the preamble of the dialler and of the listener.
        records: What becomes of the records of the dialler, given as a list of two at a time.
    """

    preambles: tuple = (bytes, bytes)
    records: object = list

    async def run(self, network, target, *, task_status):
        transport = network.transport("middle")
        listener = await transport.listen(Address("middle", 1))
        task_status.started(listener.address)
        while True:
            near = await listener.accept()
            far = await transport.dial(target)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.forward, near, far)
                    nursery.start_soon(self.back, far, near)
            except* PeerGone:
                pass
            finally:
                with trio.CancelScope(shield=True):
                    await near.aclose()
                    await far.aclose()

    async def forward(self, near, far):
        await far.send(self.preambles[0](await read(near, 8)))
        for _ in range(2):
            await far.send(await read_frame(near))
        while True:
            records = [await read_frame(near, 4), await read_frame(near, 4)]
            await far.send(b"".join(self.records(records)))

    async def back(self, far, near):
        await near.send(self.preambles[1](await read(far, 8)))
        buffer = bytearray(70_000)
        while count := await far.receive_into(memoryview(buffer)):
            await near.send(bytes(buffer[:count]))
        raise PeerGone("the stream has ended")


def at(place, value):
    """Changes one byte."""
    return lambda data: data[:place] + bytes([value]) + data[place + 1 :]


DOWNGRADES = {
    "older version, to the listener": (at(5, 0), bytes),
    "newer version, to the listener": (at(5, 2), bytes),
    "older version, to both": (at(5, 0), at(5, 1)),
    "older version, to the dialler": (bytes, at(5, 0)),
    "no swarm key, to the listener": (at(6, 0), bytes),
    "no swarm key, to the dialler": (bytes, at(6, 0)),
    "unknown flags, hidden from the dialler": (at(6, 3), at(6, 1)),
    "wrong swarm key, to the dialler": (bytes, at(7, 1)),
    "a status, to the listener": (at(7, 1), bytes),
}


@pytest.mark.parametrize("psk", [None, bytes(range(32))], ids=["public", "private"])
@pytest.mark.parametrize("preambles", DOWNGRADES.values(), ids=DOWNGRADES)
async def test_nobody_is_talked_down(start, network, nursery, autojump_clock, works, preambles, psk):
    a, b = await start(1, psk=psk), await start(2, psk=psk)
    gate = await nursery.start(Middle(preambles).run, network, b.endpoint.address)
    preamble = b"shoal\1" + bytes([psk is not None, 0])
    changed = any(change(preamble) != preamble for change in preambles)
    if changed:
        with pytest.raises((HandshakeError, PeerUnreachable)):
            await a.endpoint.connect(gate)
        await trio.sleep(HANDSHAKE_TIMEOUT + 1)
        assert a.endpoint.connected == b.endpoint.connected == ()
    else:
        assert await a.endpoint.connect(gate) == b.peer
    assert await a.endpoint.request(b.peer, Echo("direct"), Echo) == Echo("direct!")


TAMPERING = {
    "replayed": lambda records: [records[0], records[0], records[1]],
    "reordered": lambda records: records[::-1],
    "left out": lambda records: records[1:],
    "truncated": lambda records: [records[0][:-1], records[1]],
    "shortened": lambda records: [(len(records[0]) - 5).to_bytes(4, "big") + records[0][4:-1], records[1]],
    "changed": lambda records: [records[0][:-1] + bytes([records[0][-1] ^ 1]), records[1]],
    "made up": lambda records: [*records, b"\0\0\0\x20" + bytes(32)],
    "empty": lambda records: [*records, bytes(4)],
}


@pytest.mark.parametrize("tampering", TAMPERING.values(), ids=TAMPERING)
async def test_tampered_records_end_the_connection_and_nothing_else(
    start, network, nursery, autojump_clock, works, tampering
):
    a, b = await start(1), await start(2)
    gate = await nursery.start(Middle(records=tampering).run, network, b.endpoint.address)
    assert await a.endpoint.connect(gate) == b.peer
    await trio.sleep(10)
    assert not a.endpoint.is_connected(b.peer)
    assert not b.endpoint.is_connected(a.peer)
    assert await works(a)
    assert await works(b)


async def test_an_untouched_connection_through_the_middle_lasts(start, network, nursery, autojump_clock):
    a, b = await start(1), await start(2)
    gate = await nursery.start(Middle().run, network, b.endpoint.address)
    await a.endpoint.connect(gate)
    await trio.sleep(30)
    assert a.endpoint.is_connected(b.peer)


async def test_another_identity_than_the_one_dialled_learns_nothing(start, network, autojump_clock, works):
    a, b = await start(1), await start(2)
    a.endpoint.learn(EVE.peer_id, b.endpoint.address)
    with pytest.raises(ShoalError):
        await a.endpoint.connect(EVE.peer_id)
    await trio.sleep(HANDSHAKE_TIMEOUT)
    assert a.endpoint.connected == b.endpoint.connected == ()
    assert await works(a)
    assert await works(b)


# Our own words, sent back to us.


async def test_a_dialler_is_not_taken_in_by_a_mirror(start, network, nursery, autojump_clock, works):
    node = await start(1)
    listener = await network.transport("mirror").listen(Address("mirror", 1))

    async def mirror():
        buffer = bytearray(70_000)
        stream = await listener.accept()
        with contextlib.suppress(PeerGone):
            while count := await stream.receive_into(memoryview(buffer)):
                await stream.send(bytes(buffer[:count]))
        await stream.aclose()

    nursery.start_soon(mirror)
    with pytest.raises(HandshakeError):
        await node.endpoint.connect(listener.address)
    assert await works(node)


async def test_a_listener_is_not_taken_in_by_a_mirror(start, network, autojump_clock, works):
    node = await start(1)
    stream = await network.transport("evil").dial(node.endpoint.address)
    await stream.send(b"shoal\1\0\0" + b"\0\x20" + bytes([9] * 32))
    preamble = await read(stream, 8)
    answer = await read_frame(stream)
    await stream.send(answer)
    assert preamble == b"shoal\1\0\0"
    assert await stream.receive_into(memoryview(bytearray(1))) == 0
    assert node.endpoint.connected == ()
    assert await works(node)


async def test_a_peer_that_is_connected_to_itself_notices(start, network, nursery, autojump_clock, works):
    node = await start(1)
    gate = await nursery.start(Middle().run, network, node.endpoint.address)
    with pytest.raises(PeerUnreachable, match="this very peer"):
        await node.endpoint.connect(gate)
    await trio.sleep(5)
    assert node.endpoint.connected == ()
    assert await works(node)


async def test_records_sent_back_end_the_connection(start, network, nursery, autojump_clock, works):
    node = await start(1)
    stream = (await knock(network, node.endpoint.address))._stream
    await stream.send(await read_frame(stream))
    with contextlib.suppress(PeerGone):
        while await stream.receive_into(memoryview(bytearray(1000))):
            pass
    assert node.endpoint.connected == ()
    assert await works(node)


async def test_a_handshake_cannot_be_said_again(start, network, nursery, autojump_clock, works):
    node = await start(1)
    listener = await network.transport("tap").listen(Address("tap", 1))
    said = []

    async def tap():
        near, far = await listener.accept(), await network.transport("tap").dial(node.endpoint.address)
        said.append(await read(near, 8) + await read_frame(near))
        await far.send(said[0])
        await near.send(await read(far, 8) + await read_frame(far))
        said.append(await read_frame(near))
        await near.aclose()
        await far.aclose()

    nursery.start_soon(tap)
    victim = await network.transport("victim").dial(listener.address)
    with contextlib.suppress(HandshakeError):
        await (await handshake(victim, ALICE, initiator=True, features=wire.encode(Hello(bytes(8), 1, 0)))).aclose()
    await trio.sleep(1)
    replay = await network.transport("evil").dial(node.endpoint.address)
    await replay.send(said[0])
    await read(replay, 8)
    await read_frame(replay)
    await replay.send(said[1])
    assert await replay.receive_into(memoryview(bytearray(1))) == 0
    assert node.endpoint.connected == ()
    assert await works(node)


# Too much of everything.


def deep(name, depth=1 << 18):
    """A message whose field is so many arrays in each other."""
    return b"\x92" + bytes([0xA0 + len(name)]) + name.encode() + b"\x91" * depth + b"\xc0"


OVERSIZED = {
    "length": (2**32 - 1).to_bytes(4, "big"),
    "length by one": (wire.MAX_MESSAGE + 1).to_bytes(4, "big"),
    "no length": bytes(4),
    "many fields": (20).to_bytes(4, "big") + b"\xdd\xff\xff\xff\xff\xa9test.echo" + bytes(5),
    "long text": (20).to_bytes(4, "big") + b"\x92\xa9test.echo\xdb\xff\xff\xff\xff" + bytes(4),
}


@pytest.mark.parametrize("data", OVERSIZED.values(), ids=OVERSIZED)
async def test_oversized_messages_end_the_connection(start, network, autojump_clock, works, data):
    node = await start(1)
    channel = await knock(network, node.endpoint.address)
    await channel.send(pack(Kind.OPEN, 0, 1) + pack(Kind.DATA, 0, 1, data))
    await closed(channel)
    assert node.endpoint.connected == ()
    assert await works(node)


@pytest.mark.parametrize("name", ["test.echo", "relay.connect", "punch.offer", "net.dialback"])
async def test_nested_messages_end_the_connection(start, network, autojump_clock, works, name):
    node = await start(1)
    channel = await knock(network, node.endpoint.address)
    data = deep(name)
    data = len(data).to_bytes(4, "big") + data
    await channel.send(pack(Kind.OPEN, 0, 1))
    with contextlib.suppress(PeerGone):
        for begin in range(0, len(data), 30_000):
            await channel.send(pack(Kind.DATA, 0, 1, data[begin : begin + 30_000]))
            await trio.sleep(0.1)
    await closed(channel)
    assert node.endpoint.connected == ()
    assert await works(node)


@pytest.mark.parametrize("hosts", [4, 130])
async def test_ten_thousand_half_open_connections(start, network, nursery, autojump_clock, works, hosts):
    node = await start(1)
    opened = 0

    async def besiege(number):
        nonlocal opened
        transport = network.transport(f"evil{number}")
        for _ in range(13_000 // hosts):
            with contextlib.suppress(PeerUnreachable):  # too many wait to be accepted
                stream = await transport.dial(node.endpoint.address)
                opened += 1
                if number % 2:
                    await stream.send(b"shoal\1")
                nursery.start_soon(hold, stream)

    async def hold(stream):
        with contextlib.suppress(PeerGone):
            await stream.receive_into(memoryview(bytearray(1)))
        await stream.aclose()

    async with trio.open_nursery() as besieging:
        for number in range(hosts):
            besieging.start_soon(besiege, number)
        if hosts < 10:  # more can keep newcomers out while the siege lasts, but not for longer
            assert await works(node)
    assert opened >= 10_000
    assert await works(node)
    sockets = len(network._hosts["host1"].streams)
    assert sockets <= Limits().max_pending_handshakes + 1
    await trio.sleep(HANDSHAKE_TIMEOUT + 1)
    assert len(network._hosts["host1"].streams) <= 1


# Very slow peers.


async def drip(stream, data):
    """A byte a second."""
    with contextlib.suppress(PeerGone):
        for byte in data:
            await stream.send(bytes([byte]))
            await trio.sleep(1)


async def test_a_byte_a_second_in_the_handshake(start, network, nursery, autojump_clock, works):
    node = await start(1)
    streams = [await network.transport(f"evil{number}").dial(node.endpoint.address) for number in range(60)]
    for stream in streams:
        nursery.start_soon(drip, stream, b"shoal\1\0\0\0\x20" + bytes(32))
    await trio.sleep(5)
    assert await works(node)
    await trio.sleep(HANDSHAKE_TIMEOUT)
    for stream in streams:
        assert await stream.receive_into(memoryview(bytearray(1))) == 0
    assert await works(node)


async def test_a_byte_a_second_in_a_record(start, network, nursery, autojump_clock, works):
    node = await start(1)
    before = node.endpoint._memory.held
    for number in range(20):
        identity = Identity.from_seed(number.to_bytes(32, "big"))
        channel = await knock(network, node.endpoint.address, identity, host=f"evil{number}")
        record = bytes(channel._writer.seal(bytes(60_000)))
        nursery.start_soon(drip, channel._stream, record)
    for _ in range(10):
        await trio.sleep(60)
        assert await works(node)
        assert node.endpoint._memory.held - before <= 1 << 20
    nursery.cancel_scope.cancel()


async def test_a_byte_a_second_in_a_message(start, network, nursery, autojump_clock, works):
    node = await start(1)
    channel = await knock(network, node.endpoint.address)
    data = wire.encode(Echo("x" * 1000))
    reset = trio.Event()

    async def listen():
        with contextlib.suppress(PeerGone):
            while True:
                record = memoryview(await channel.receive())
                while record:
                    if record[0] == Kind.RESET:
                        reset.set()
                    record = record[8 + int.from_bytes(record[2:4], "big") :]

    async def speak():
        await channel.send(pack(Kind.OPEN, 0, 1))
        with contextlib.suppress(PeerGone):
            for byte in len(data).to_bytes(4, "big") + data:
                await channel.send(pack(Kind.DATA, 0, 1, bytes([byte])))
                await trio.sleep(1)

    nursery.start_soon(listen)
    nursery.start_soon(speak)
    await trio.sleep(5)
    assert await works(node)
    with trio.fail_after(10):
        await reset.wait()
    assert await works(node)
    nursery.cancel_scope.cancel()


async def test_probes_of_one_address_leave_room_for_others(start, network, nursery, autojump_clock, works):
    node = await start(1)
    lasted = {}

    async def probe(number, host):
        hello = Hello(bytes(8), 0, 0, probe=True)
        identity = Identity.from_seed(number.to_bytes(32, "big"))
        channel = await knock(network, node.endpoint.address, identity, host=host, hello=hello)
        began = trio.current_time()
        await closed(channel)
        lasted[number] = trio.current_time() - began

    async with trio.open_nursery() as probing:
        for number in range(80):
            probing.start_soon(probe, number, "evil")
        await trio.sleep(1)
        probing.start_soon(probe, 100, "honest")
    assert sum(seconds > 10 for seconds in lasted.values()) == MAX_PROBES // 4 + 1
    assert lasted[100] > 10
    assert node.endpoint._observer._served == {}


# Scores.


async def misbehave(network, node, identity, *, host):
    """One protocol error; False if it did not even come to that."""
    try:
        channel = await knock(network, node.endpoint.address, identity, host=host)
    except (HandshakeError, PeerUnreachable):
        return False
    said = bytearray()
    with contextlib.suppress(PeerGone):
        await channel.send(b"\xff garbage")
        while True:
            said += await channel.receive()
    await channel.aclose()
    return b"banned" not in said


async def test_an_identity_is_banned_wherever_it_comes_from(start, network, autojump_clock, works):
    node = await start(1)
    tries = [await misbehave(network, node, EVE, host=f"evil{number}") for number in range(6)]
    assert tries == [True] * 3 + [False] * 3
    assert await misbehave(network, node, ALICE, host="evil0")
    assert await works(node)
    await trio.sleep(61)
    assert await misbehave(network, node, EVE, host="evil0")


async def test_an_address_that_misbehaves_under_ever_new_names_is_slowed_down(start, network, autojump_clock, works):
    node = await start(1)
    errors, seconds = 0, 60
    began = trio.current_time()
    for number in range(10_000):
        if trio.current_time() - began > seconds:
            break
        identity = Identity.from_seed(random.Random(number).randbytes(32))
        errors += await misbehave(network, node, identity, host="evil")
    assert errors <= (GREETINGS_AT_ONCE + seconds * GREETINGS_PER_SECOND) / (1 + PROTOCOL_ERROR) + 1
    assert errors > 1
    assert await works(node)
    assert await misbehave(network, node, ALICE, host="another")
