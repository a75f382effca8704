"""Handshakes in private runs while a swarm key is replaced by another."""

from contextlib import aclosing

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.channel import handshake
from protocol.errors import HandshakeError, WrongSwarmKey
from protocol.identity import Identity
from protocol.keyring import Keyring
from protocol.memory import MemoryNetwork
from protocol.transport import Address
from tests.protocol.messages import Echo

ALICE, BOB = (Identity.from_seed(bytes([letter]) * 32) for letter in b"ab")
KEYS = [bytes([number]) * 32 for number in range(4)]
RINGS = st.builds(
    lambda newest, older: Keyring(KEYS[newest], newest, KEYS[newest - 1] if older and newest else None),
    st.integers(0, 3),
    st.booleans(),
)


async def meet(dialler, listener):
    """Both sides' channels, or the errors that they ended with."""
    network, results = MemoryNetwork(), {}

    async def side(stream, identity, keys, *, initiator):
        try:
            results[initiator] = await handshake(stream, identity, initiator=initiator, psk=keys, features=b"hi")
        except HandshakeError as error:
            results[initiator] = error

    async with aclosing(await network.transport("b").listen(Address("b", 1))) as door:
        streams = await network.transport("a").dial(door.address), await door.accept()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: side(streams[0], ALICE, dialler, initiator=True))
        nursery.start_soon(lambda: side(streams[1], BOB, listener, initiator=False))
    for stream in streams:
        await stream.aclose()
    return results[True], results[False]


@given(RINGS, RINGS)
def test_two_that_have_a_key_in_common_meet_by_it(dialler, listener):
    async def main():
        a, b = await meet(dialler, listener)
        common = [key for key in listener.keys if key in dialler.keys]
        if common:
            assert a.swarm_key == b.swarm_key == common[0]
            assert (a.peer_id, b.peer_id, a.features) == (BOB.peer_id, ALICE.peer_id, b"hi")
            assert a.bytes_sent == (8 + 2 + 48 + 32 * len(dialler.keys)) + (2 + 48 + 98 + 16)
        else:
            assert isinstance(a, WrongSwarmKey)
            assert isinstance(b, WrongSwarmKey)
            assert "fresh ticket" in a.hint

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_key_alone_is_a_ring_of_one(autojump_clock):
    a, b = await meet(Keyring(KEYS[1], 1, KEYS[0]), KEYS[0])
    assert a.swarm_key == b.swarm_key == KEYS[0]
    a, b = await meet(None, None)
    assert a.swarm_key is b.swarm_key is None


async def answer(status, keys):
    """How a dialler ends whom somebody without its keys answers with this status."""
    network, errors = MemoryNetwork(), []

    async def dial():
        stream = await network.transport("a").dial(door.address)
        with pytest.raises(HandshakeError) as caught:
            await handshake(stream, ALICE, initiator=True, psk=keys)
        errors.append(caught.value)

    async with aclosing(await network.transport("b").listen(Address("b", 1))) as door, trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        async with aclosing(await door.accept()) as stream:
            await stream.send(b"shoal\x01" + bytes([keys is not None, status]))
            await stream.receive_into(memoryview(bytearray(1000)))
    return errors[0]


@pytest.mark.parametrize("keys", [None, KEYS[0], Keyring(KEYS[1], 1, KEYS[0])])
async def test_an_answer_that_does_not_fit_ends_the_handshake(autojump_clock, keys):
    several = isinstance(keys, Keyring)
    assert ("does not know" in str(await answer(2, keys))) != several
    assert "does not know" in str(await answer(3, keys))
    assert "another swarm key" in str(await answer(1, keys))


@attrs.define
class Server:
    async def echo(self, request, stream):
        return request


async def test_endpoints_follow_their_keyring(start_endpoint, autojump_clock):
    rings = [Keyring(KEYS[0]) for _ in range(3)]
    handlers = [(Echo, Server().echo)]
    a, b, c = [await start_endpoint(n + 1, psk=rings[n], handlers=handlers) for n in range(3)]

    async def talk(one, two):
        return await one.endpoint.request(two.peer, Echo("x"), Echo)

    assert await talk(a, b) == Echo("x")
    rings[0].rotate(1, KEYS[1])
    assert await talk(a, b) == Echo("x")  # the connection stays
    assert a.endpoint.swarm_key(b.peer) == KEYS[0]
    assert await talk(a, c) == Echo("x")  # who has not heard of it yet is still let in, and dialled
    c.endpoint.disconnect(a.peer, "for a test")
    rings[2].rotate(1, KEYS[1])
    assert await talk(c, a) == Echo("x")
    assert c.endpoint.swarm_key(a.peer) == a.endpoint.swarm_key(c.peer) == KEYS[1]
    rings[0].retire()
    a.endpoint.disconnect(b.peer, "for a test")
    for one, two in ((a, b), (b, a)):
        with pytest.raises(WrongSwarmKey):
            await talk(one, two)
    assert a.endpoint.swarm_key(b.peer) is None
