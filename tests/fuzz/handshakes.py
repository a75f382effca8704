"""Fuzz target: the handshake, against both roles, with and without a swarm key."""

from __future__ import annotations

import contextlib

import attrs
import trio
from trio.testing import MockClock

from protocol.channel import MAX_FEATURES, SecureChannel, handshake
from protocol.errors import HandshakeError, PeerGone, ProtocolError
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.transport import Address, ByteStream
from tests.fuzz.choices import Choices

ALICE, BOB = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
KEYS = (None, b"k" * 32, b"o" * 32)
PLACE = Address("victim", 1000)
_LONGEST = 100.0  # seconds of simulated time: far beyond every time limit of a handshake


@attrs.define
class Tap:
    """A stream whose owner's bytes are changed on their way out, a send at a time."""

    stream: ByteStream
    choices: Choices
    changed: bool = False

    @property
    def remote(self) -> Address:
        return self.stream.remote

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        sent = bytes(data)
        while self.choices.one_in(3):
            sent = self.choices.damaged(sent)
        self.changed = self.changed or sent != data
        for start in range(0, len(sent), cut := 1 + self.choices.number(len(sent))):
            await self.stream.send(sent[start : start + cut])

    async def receive_into(self, buffer: memoryview) -> int:
        return await self.stream.receive_into(buffer)

    async def aclose(self) -> None:
        await self.stream.aclose()


def run(data: bytes) -> None:
    """A handshake with somebody who sends arbitrary bytes, or what is left of an honest one's words.

    It ends in time, in a channel or in a `HandshakeError`. A channel means that both have the same swarm key, and that
    each knows who the other is.
    """
    trio.run(_run, Choices(data), clock=MockClock(autojump_threshold=0))


async def _run(choices: Choices) -> None:
    network = MemoryNetwork()
    listener = await network.transport(PLACE.host).listen(PLACE)
    dialled = await network.transport("stranger").dial(PLACE)
    ends = (await listener.accept(), dialled)
    victim, stranger = ends if choices.one_in(2) else ends[::-1]
    key = choices.of(KEYS)
    expected = choices.of((None, BOB.peer_id, ALICE.peer_id))
    ended: list[SecureChannel | None] = []
    over = trio.Event()

    async def be_victim() -> None:
        try:
            with trio.fail_after(_LONGEST):
                channel = await handshake(
                    victim, ALICE, initiator=victim is dialled, psk=key, expected=expected, features=b"alice"
                )
        except HandshakeError as error:
            assert str(error)
            ended.append(None)
        else:
            ended.append(channel)
        over.set()

    async with trio.open_nursery() as nursery:
        if choices.one_in(4):
            nursery.start_soon(_babble, stranger, choices)
            await be_victim()
            assert ended == [None], "a handshake with nobody"
        else:
            theirs = key if choices.number(3) else choices.of(KEYS)
            tap = Tap(stranger, choices)
            nursery.start_soon(be_victim)
            other = await _impersonate(tap, initiator=stranger is dialled, psk=theirs, features=choices.blob())
            await over.wait()
            with trio.move_on_after(_LONGEST):  # a record that was cut short never comes
                await _judge(ended[0], other, tap, fitting=theirs == key and expected != ALICE.peer_id)
        nursery.cancel_scope.cancel()


async def _babble(stream: ByteStream, choices: Choices) -> None:
    """Somebody who speaks something else, or only begins to speak as we do."""
    with contextlib.suppress(PeerGone):
        if choices.one_in(2):
            await stream.send(b"shoal\x01" + bytes([choices.number(3), choices.number(2)]))
        while choices.left:
            await stream.send((b"\x00" + choices.take(1) if choices.one_in(2) else b"") + choices.take(64) + b".")
            await trio.sleep(choices.number(3))
        await stream.aclose()


async def _impersonate(stream: Tap, *, initiator: bool, psk: bytes | None, features: bytes) -> SecureChannel | None:
    try:
        return await handshake(stream, BOB, initiator=initiator, psk=psk, features=features)
    except HandshakeError:
        return None


async def _judge(channel: SecureChannel | None, other: SecureChannel | None, tap: Tap, *, fitting: bool) -> None:
    if channel is None:
        assert tap.changed or not fitting, "two honest peers did not understand each other"
        return
    assert fitting
    assert channel.peer_id == BOB.peer_id
    assert len(channel.features) <= MAX_FEATURES
    if other is None:
        return  # the answer to them was lost with the connection
    assert other.peer_id == ALICE.peer_id
    assert other.features == b"alice"
    await other.send(b"hello")
    await other.send(tap.choices.blob())
    try:
        first = await channel.receive()
    except (ProtocolError, PeerGone):
        assert tap.changed
        return
    assert first == b"hello"
