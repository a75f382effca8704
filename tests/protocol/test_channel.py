"""The secure channel: who may talk to whom, and what an attacker between or beside them can do."""

from contextlib import aclosing, asynccontextmanager

import attrs
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.channel import MAX_FEATURES, handshake
from protocol.errors import HandshakeError, PeerGone, ProtocolError, WrongPeer
from protocol.frames import RECORD
from protocol.identity import Identity, PeerId
from protocol.memory import MemoryNetwork
from protocol.noise import Handshake
from protocol.records import MAX_PLAINTEXT
from protocol.tcp import TcpTransport
from protocol.transport import Address

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
EVE = Identity.from_seed(b"e" * 32)
SWARM_KEY = b"k" * 32

PREAMBLE = b"shoal\x01\x00\x00"
PRIVATE_PREAMBLE = b"shoal\x01\x01\x00"


@asynccontextmanager
async def stream_pair(kind="memory"):
    """The dialler's and the listener's end of a connection."""
    if kind == "tcp":
        transports, host = (TcpTransport(), TcpTransport()), "127.0.0.1"
    else:
        network = MemoryNetwork()
        transports, host = (network.transport("a"), network.transport("b")), "b"
    async with aclosing(await transports[1].listen(Address(host, 0))) as listener:
        dialled = await transports[0].dial(listener.address)
        accepted = await listener.accept()
    async with aclosing(dialled), aclosing(accepted):
        yield dialled, accepted


async def outcome(results, name, stream, identity, **options):
    try:
        results[name] = await handshake(stream, identity, **options)
    except HandshakeError as error:
        results[name] = error


async def meet(streams, *, dialler=None, listener=None):
    """Run both sides; for each the channel, or the error that it ended with."""
    results = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: outcome(results, "a", streams[0], ALICE, initiator=True, **(dialler or {})))
        nursery.start_soon(lambda: outcome(results, "b", streams[1], BOB, initiator=False, **(listener or {})))
    return results["a"], results["b"]


@asynccontextmanager
async def channel_pair(kind="memory", **options):
    async with stream_pair(kind) as streams:
        a, b = await meet(streams, **options)
        yield a, b


@pytest.mark.parametrize("kind", ["tcp", "memory"])
@pytest.mark.parametrize("psk", [None, SWARM_KEY], ids=["public", "private"])
async def test_both_sides_know_each_other(kind, psk):
    options = {
        "dialler": {"psk": psk, "expected": BOB.peer_id, "features": b"from a"},
        "listener": {"psk": psk, "expected": ALICE.peer_id, "features": b"x" * MAX_FEATURES},
    }
    async with channel_pair(kind, **options) as (a, b):
        assert (a.peer_id, a.public_key, a.features) == (BOB.peer_id, BOB.public_key, b"x" * MAX_FEATURES)
        assert (b.peer_id, b.public_key, b.features) == (ALICE.peer_id, ALICE.public_key, b"from a")
        await a.send(b"one", b"", bytearray(b"three"))
        assert [await b.receive() for _ in range(3)] == [b"one", b"", b"three"]
        await b.send(memoryview(bytes(RECORD)))
        assert await a.receive() == bytes(RECORD)
        assert a.bytes_sent == b.bytes_received
        assert b.bytes_sent == a.bytes_received > RECORD
        await a.aclose()
        await a.aclose()
        with pytest.raises(PeerGone, match=f"peer {ALICE.peer_id.short}.* closed the connection$"):
            await b.receive()


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_much_data_both_ways_at_once(kind):
    blocks = [bytes([number]) * MAX_PLAINTEXT for number in range(32)]
    received = {}

    async def send(channel):
        for start in range(0, len(blocks), 4):
            await channel.send(*blocks[start : start + 4])

    async def receive(name, channel):
        received[name] = [await channel.receive() for _ in blocks]

    async with channel_pair(kind) as (a, b), trio.open_nursery() as nursery:
        for name, channel in (("a", a), ("b", b)):
            nursery.start_soon(send, channel)
            nursery.start_soon(receive, name, channel)
    assert received == {"a": blocks, "b": blocks}


async def test_limits_of_arguments_are_checked():
    async with stream_pair() as (a, _):
        with pytest.raises(ValueError, match="at most 2048"):
            await handshake(a, ALICE, initiator=True, features=bytes(MAX_FEATURES + 1))
        with pytest.raises(ValueError, match="32 bytes"):
            await handshake(a, ALICE, initiator=True, psk=b"short")
    async with channel_pair() as (a, b):
        with pytest.raises(ValueError, match="at most 524288"):
            await a.send(bytes(MAX_PLAINTEXT + 1))
        await a.send(b"fine")
        assert await b.receive() == b"fine"


@pytest.mark.parametrize(("psk", "first"), [(None, 32), (SWARM_KEY, 80)], ids=["public", "private"])
async def test_sizes_on_the_wire(psk, first):
    options = {"psk": psk, "features": b"12345"}
    introduction = 32 + 64 + 5
    async with channel_pair(dialler=options, listener=options) as (a, b):
        assert a.bytes_sent == (8 + 2 + first) + (2 + 48 + introduction + 16)
        assert b.bytes_sent == 8 + 2 + 80 + introduction + 16
        await a.send(b"one", b"")
        assert a.bytes_sent == b.bytes_received + 4 + 3 + 16 + 4 + 16


# Who may talk to whom


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_another_peer_than_the_one_dialled(kind):
    async with channel_pair(kind, dialler={"expected": EVE.peer_id}) as (a, b):
        assert isinstance(a, WrongPeer)
        assert "another identity" in str(a) and str(BOB.peer_id) in str(a) and str(EVE.peer_id) in str(a)
        assert isinstance(b, HandshakeError)


async def test_another_peer_than_the_one_waited_for():
    async with channel_pair(listener={"expected": EVE.peer_id}) as (a, b):
        assert isinstance(b, WrongPeer)
        with pytest.raises(PeerGone):
            await a.receive()


@pytest.mark.parametrize("kind", ["tcp", "memory"])
@pytest.mark.parametrize(
    ("dialler", "listener"),
    [(None, SWARM_KEY), (SWARM_KEY, None), (SWARM_KEY, b"x" * 32)],
    ids=["dialler has none", "listener has none", "different"],
)
async def test_without_the_swarm_key_both_sides_say_so(kind, dialler, listener):
    async with channel_pair(kind, dialler={"psk": dialler}, listener={"psk": listener}) as results:
        for result in results:
            assert isinstance(result, HandshakeError)
            assert "swarm key" in str(result)
            assert result.hint


async def receive_exactly(stream, size):
    out = bytearray()
    while len(out) < size:
        buffer = bytearray(size - len(out))
        count = await stream.receive_into(memoryview(buffer))
        assert count, "the stream ended early"
        out += buffer[:count]
    return bytes(out)


async def receive_frame(stream):
    return await receive_exactly(stream, int.from_bytes(await receive_exactly(stream, 2), "big"))


async def receive_rest(stream):
    out = bytearray()
    buffer = bytearray(100_000)
    while count := await stream.receive_into(memoryview(buffer)):
        out += buffer[:count]
    return bytes(out)


def framed(message):
    return len(message).to_bytes(2, "big") + message


def raw_handshake(initiator, preamble, psk=None, static=None, ephemeral=None):
    """An attacker's own Noise, with which it can say what it likes."""
    make = X25519PrivateKey.generate
    return Handshake(initiator, static or make(), ephemeral or make(), b"shoal-channel-v1" + preamble, psk)


@pytest.mark.parametrize("proof", [b"", bytes(32), b"x" * 1000])
async def test_a_private_peer_tells_a_stranger_that_dials_nothing(proof):
    async with stream_pair() as (stranger, stream), trio.open_nursery() as nursery:
        results = {}
        nursery.start_soon(lambda: outcome(results, "b", stream, BOB, initiator=False, psk=SWARM_KEY))
        noise = raw_handshake(True, PRIVATE_PREAMBLE, psk=bytes(32))
        await stranger.send(PRIVATE_PREAMBLE + framed(noise.write_message(proof)))
        assert await receive_exactly(stranger, 8) == PRIVATE_PREAMBLE[:-1] + b"\1"
        await stranger.send(b"more")
        with trio.move_on_after(0.1):
            assert await receive_rest(stranger) == b""
        await stranger.aclose()
    assert "swarm key" in str(results["b"])


async def test_a_private_dialler_tells_a_stranger_nothing_but_a_fresh_key():
    statics = []
    for _ in range(2):
        async with stream_pair() as (stream, stranger), trio.open_nursery() as nursery:
            results = {}
            nursery.start_soon(
                lambda stream=stream: outcome(results, "a", stream, ALICE, initiator=True, psk=SWARM_KEY)  # noqa: B023
            )
            noise = raw_handshake(False, PRIVATE_PREAMBLE, psk=bytes(32))
            assert await receive_exactly(stranger, 8) == PRIVATE_PREAMBLE
            noise.read_message(await receive_frame(stranger))
            static = noise._static.public_key().public_bytes_raw()
            signature = EVE.sign("channel-static-key-v1", b"responder", static)
            await stranger.send(PRIVATE_PREAMBLE + framed(noise.write_message(EVE.public_key + signature)))
            with pytest.raises(HandshakeError):
                noise.read_message(await receive_frame(stranger))
            statics.append(noise.remote_static)
            await stranger.aclose()
    assert statics[0] != statics[1]


async def test_a_replayed_first_message_gets_nobody_in():
    async with stream_pair() as (stream, tap):
        results = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: outcome(results, "a", stream, ALICE, initiator=True, psk=SWARM_KEY))
            first = await receive_exactly(tap, 8) + framed(await receive_frame(tap))
            await tap.aclose()
    async with stream_pair() as (replayer, stream):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: outcome(results, "b", stream, BOB, initiator=False, psk=SWARM_KEY))
            await replayer.send(first)
            assert await receive_exactly(replayer, 8) == PRIVATE_PREAMBLE
            answer = await receive_frame(replayer)
            assert BOB.public_key not in answer
            await replayer.send(framed(answer))
        assert isinstance(results["b"], HandshakeError)


# What else may be at the other end


async def answered(sent, *, initiator=False, psk=None):
    """What a peer says to these bytes followed by the end of the stream: its bytes, and its error."""
    async with stream_pair() as streams:
        stranger, stream = streams if not initiator else reversed(streams)
        results = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: outcome(results, "it", stream, BOB, initiator=initiator, psk=psk))
            await stranger.send(sent)
            await wait_all_tasks_blocked()
            said = bytearray(10_000)
            with trio.move_on_after(0.01):
                del said[await stranger.receive_into(memoryview(said)) :]
            await stranger.aclose()
        assert isinstance(results["it"], HandshakeError)
        with pytest.raises(PeerGone):
            await stream.send(b"closed?")
        return bytes(said).rstrip(b"\0") if len(said) == 10_000 else bytes(said), results["it"]


@pytest.mark.parametrize("initiator", [False, True])
@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\x02\x00\x01\x00\x01"])
async def test_another_protocol(autojump_clock, initiator, sent):
    said, error = await answered(sent, initiator=initiator)
    assert "another protocol" in str(error)
    if not initiator:
        assert said == b""  # a stranger that looks around is told nothing


@pytest.mark.parametrize("initiator", [False, True])
async def test_another_version(autojump_clock, initiator):
    said, error = await answered(b"shoal\x07\x00\x00", initiator=initiator)
    assert "version 7" in str(error) and "version 1" in str(error)
    assert "Update" in error.hint
    assert said.startswith(PREAMBLE)  # so the other side can say the same


@pytest.mark.parametrize(
    "preamble", [b"shoal\x01\x02\x00", b"shoal\x01\x80\x00", b"shoal\x01\x00\x01", b"shoal\x01\x00\xff"]
)
async def test_unknown_flags_and_states(autojump_clock, preamble):
    _, error = await answered(preamble + framed(bytes(32)))
    assert "does not know" in str(error)


async def test_a_dialler_cannot_be_talked_into_another_state(autojump_clock):
    _, error = await answered(b"shoal\x01\x00\x05", initiator=True)
    assert "does not know" in str(error)


@pytest.mark.parametrize("initiator", [False, True])
@pytest.mark.parametrize("sent", [b"", b"sho", PREAMBLE, PREAMBLE + b"\0", PREAMBLE + b"\0\x20" + bytes(31)])
async def test_streams_that_end_early(autojump_clock, initiator, sent):
    _, error = await answered(sent, initiator=initiator)
    assert "closed the connection during the handshake" in str(error)


@pytest.mark.parametrize("initiator", [False, True])
async def test_overlong_messages_are_not_waited_for(autojump_clock, initiator):
    _, error = await answered(PREAMBLE + (4097).to_bytes(2, "big"), initiator=initiator)
    assert "4097 bytes: too long" in str(error)


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
async def test_low_order_points(autojump_clock, point):
    _, error = await answered(PREAMBLE + framed(point))
    assert "no secret" in str(error)
    _, error = await answered(PREAMBLE + framed(point + bytes(200)), initiator=True)
    assert "no secret" in str(error)


@given(sent=st.binary(max_size=300), known=st.sampled_from([b"", PREAMBLE, PREAMBLE + framed(bytes([9] * 32))]))
@settings(max_examples=50)
def test_any_bytes_end_in_a_handshake_error(sent, known):
    for initiator in (False, True):
        trio.run(lambda: answered(known + sent, initiator=initiator), clock=MockClock(autojump_threshold=0))  # noqa: B023


@attrs.frozen
class Introduction:
    """What an attacker says about itself in the third message."""

    public_key: bytes = EVE.public_key
    signer: Identity = EVE
    role: bytes = b"initiator"
    domain: str = "channel-static-key-v1"
    own_static: bool = True
    features: bytes = b""


@pytest.mark.parametrize(
    ("introduction", "reason"),
    [
        (Introduction(public_key=ALICE.public_key), "prove its identity"),
        (Introduction(role=b"responder"), "prove its identity"),
        (Introduction(domain="other"), "prove its identity"),
        (Introduction(own_static=False), "prove its identity"),
        (Introduction(public_key=b"short"), "prove its identity"),
        (Introduction(features=bytes(MAX_FEATURES + 1)), "too many"),
    ],
)
async def test_who_cannot_prove_its_identity_is_refused(autojump_clock, introduction, reason):
    results = {}
    async with stream_pair() as (attacker, stream), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: outcome(results, "b", stream, BOB, initiator=False))
        noise = raw_handshake(True, PREAMBLE)
        await attacker.send(PREAMBLE + framed(noise.write_message(b"")))
        await receive_exactly(attacker, 8)
        noise.read_message(await receive_frame(attacker))
        static = noise._static.public_key().public_bytes_raw() if introduction.own_static else noise.remote_static
        signature = introduction.signer.sign(introduction.domain, introduction.role, static)
        payload = introduction.public_key + signature + introduction.features
        await attacker.send(framed(noise.write_message(payload)))
    assert reason in str(results["b"])


async def test_a_public_first_message_carries_nothing(autojump_clock):
    noise = raw_handshake(True, PREAMBLE)
    _, error = await answered(PREAMBLE + framed(noise.write_message(b"extra")))
    assert isinstance(error, HandshakeError)


@pytest.mark.parametrize("initiator", [False, True])
@pytest.mark.parametrize("drip", [b"", PREAMBLE + b"\x0f\xff" + bytes(100)], ids=["silent", "slow"])
async def test_slow_handshakes_end_after_ten_seconds(autojump_clock, initiator, drip):
    async with stream_pair() as streams:
        stream, slow = streams if initiator else reversed(streams)
        start = trio.current_time()

        async def drop_by_drop():
            for byte in drip:
                await trio.sleep(0.7)
                await slow.send(bytes([byte]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drop_by_drop)
            with pytest.raises(HandshakeError, match="within 10 s"):
                await handshake(stream, ALICE, initiator=initiator)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - start == pytest.approx(10)
        with pytest.raises(PeerGone, match="closed on our side"):
            await stream.send(b"x")


async def test_a_cancelled_handshake_closes_the_stream(autojump_clock):
    async with stream_pair() as (stream, _):
        with trio.move_on_after(1):
            await handshake(stream, ALICE, initiator=True)
        with pytest.raises(PeerGone, match="closed on our side"):
            await stream.send(b"x")


# Between two peers


@attrs.frozen
class Tapped:
    """Two channels, and the attacker through whose hands all their bytes go."""

    a: object
    b: object
    to_a: object
    to_b: object

    async def from_a(self):
        """The next record."""
        length = await receive_exactly(self.to_a, 4)
        return length + await receive_exactly(self.to_a, int.from_bytes(length, "big"))


@asynccontextmanager
async def tapped():
    async with stream_pair() as (a_stream, to_a), stream_pair() as (to_b, b_stream):
        results = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: outcome(results, "a", a_stream, ALICE, initiator=True))
            nursery.start_soon(lambda: outcome(results, "b", b_stream, BOB, initiator=False))
            await to_b.send(await receive_exactly(to_a, 8) + framed(await receive_frame(to_a)))
            await to_a.send(await receive_exactly(to_b, 8) + framed(await receive_frame(to_b)))
            await to_b.send(framed(await receive_frame(to_a)))
        yield Tapped(results["a"], results["b"], to_a, to_b)


async def refuses(channel):
    with pytest.raises(ProtocolError, match=f"from peer {channel.peer_id.short}"):
        await channel.receive()
    with pytest.raises(ProtocolError):
        await channel.receive()


async def test_untouched_records_pass():
    async with tapped() as tap:
        await tap.a.send(b"secret")
        record = await tap.from_a()
        assert b"secret" not in record
        await tap.to_b.send(record)
        assert await tap.b.receive() == b"secret"


async def test_forged_records_fail():
    async with tapped() as tap:
        await tap.a.send(b"secret")
        record = bytearray(await tap.from_a())
        record[5] ^= 1
        await tap.to_b.send(record)
        await refuses(tap.b)


async def test_replayed_records_fail():
    async with tapped() as tap:
        await tap.a.send(b"secret")
        record = await tap.from_a()
        await tap.to_b.send(record + record)
        assert await tap.b.receive() == b"secret"
        await refuses(tap.b)


async def test_reordered_records_fail():
    async with tapped() as tap:
        await tap.a.send(b"one", b"two")
        first, second = await tap.from_a(), await tap.from_a()
        await tap.to_b.send(second + first)
        await refuses(tap.b)


async def test_records_sent_back_fail():
    async with tapped() as tap:
        await tap.a.send(b"secret")
        await tap.to_a.send(await tap.from_a())
        await refuses(tap.a)


async def test_records_of_another_session_fail():
    async with tapped() as old, tapped() as new:
        await old.a.send(b"secret")
        await new.to_b.send(await old.from_a())
        await refuses(new.b)


async def test_a_shortened_record_fails():
    async with tapped() as tap:
        await tap.a.send(b"secret")
        record = await tap.from_a()
        await tap.to_b.send((len(record) - 5).to_bytes(4, "big") + record[4:-1])
        await refuses(tap.b)


async def test_an_end_inside_a_record_gives_nothing_of_it():
    async with tapped() as tap:
        await tap.a.send(b"one", b"two")
        await tap.to_b.send(await tap.from_a() + (await tap.from_a())[:-1])
        await tap.to_b.aclose()
        assert await tap.b.receive() == b"one"
        with pytest.raises(PeerGone, match="in the middle of a record"):
            await tap.b.receive()


# Cancellation


async def test_a_send_cut_short_ends_sending(autojump_clock):
    async with channel_pair() as (a, b):
        with trio.move_on_after(1):
            for _ in range(100):
                await a.send(bytes(MAX_PLAINTEXT))
        with pytest.raises(PeerGone, match="interrupted"):
            await a.send(b"x")
        # The other direction is not concerned.
        await b.send(b"y")
        assert await a.receive() == b"y"


async def test_a_send_cancelled_before_it_starts_harms_nothing():
    async with channel_pair() as (a, b):
        with trio.CancelScope() as scope:
            scope.cancel()
            await a.send(b"never")
        await a.send(b"fine")
        assert await b.receive() == b"fine"


async def test_a_cancelled_receive_loses_nothing():
    async with channel_pair() as (a, b):
        with trio.CancelScope() as scope:
            scope.cancel()
            await b.receive()
        await a.send(b"one", b"two")
        assert await b.receive() == b"one"
        with trio.CancelScope() as scope:
            scope.cancel()
            await b.receive()
        assert await b.receive() == b"two"


async def test_a_broken_stream_is_a_lost_peer(autojump_clock):
    network = MemoryNetwork()
    async with aclosing(await network.transport("b").listen(Address("b", 1))) as listener:
        streams = await network.transport("a").dial(listener.address), await listener.accept()
        a, b = await meet(streams)
        assert isinstance(a.peer_id, PeerId) and a.remote == Address("b", 1)
        network.kill("b")
        with pytest.raises(PeerGone, match="reset"):
            await a.receive()
        with pytest.raises(PeerGone):
            await a.send(b"x")
        with pytest.raises(PeerGone):
            await b.send(b"x")


async def test_a_stream_that_breaks_in_the_handshake(autojump_clock):
    network = MemoryNetwork()
    async with aclosing(await network.transport("b").listen(Address("b", 1))) as listener:
        stream = await network.transport("a").dial(listener.address)
        network.kill("b")
        with pytest.raises(HandshakeError, match="broke off the handshake"):
            await handshake(stream, ALICE, initiator=True)
