"""Fuzz target: a whole endpoint against somebody who completes the handshake and then does as he likes."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import trio
from trio.testing import MockClock

from dht import DHT
from dht.messages import Find, Found
from peer.chain import Tip
from peer.membership import Membership
from peer.probe import Prober
from peer.sync import DescribeRequest, Donor, HistoryRequest, RangeRequest
from protocol import frames, wire
from protocol.channel import SecureChannel, handshake
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Limits, Stream
from protocol.errors import PeerGone, ShoalError
from protocol.frames import BULK, FIN, MAX_RECORD, RECORD, U32, Kind
from protocol.hello import Hello
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.plan import NO_BALLOT
from protocol.reachability import Reachability
from protocol.round_messages import Ready
from protocol.rounds import Rounds
from protocol.transport import Address
from protocol.weights import sign_weight
from protocol.wire import message
from tests.fuzz.choices import Choices
from tests.fuzz.messages import mangled
from tests.fuzz.states import STATE
from tests.protocol.test_golden import MESSAGES

VICTIM, HONEST = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
_LIMITS = Limits(max_streams=8, max_connections=8)
_DONE = 60.0  # simulated seconds within which an honest request is answered, whatever else goes on


@message("fuzz.echo")
class Echo:
    """Asks for the same, and for as many raw bytes as follow it."""

    text: str
    size: int


async def _echo(request: Echo, stream: Stream) -> Echo:
    body = bytearray(max(0, min(request.size, 1 << 20)))
    await stream.receive_into(body)
    await stream.send_bytes(body)
    return request


# As in the examples of messages, so that they are about the victim's run.
_RUN, _DIGEST = b"\x11" * 32, b"\x22" * 32
_REVISION, _VALUES = 299, 8
_FIRST_ATTACKER = Identity.from_seed((1).to_bytes(32, "big"))
_SIGNED = sign_weight(_FIRST_ATTACKER, _RUN, "", _REVISION + 1, _DIGEST, 1.0).signature
_EXAMPLES = (
    *MESSAGES,
    *(Echo("hello", size) for size in (0, 1, 200_000)),
    Ready(_RUN, "", _REVISION + 1, _DIGEST, 0.0, _VALUES, NO_BALLOT, ()),
    Ready(_RUN, "", _REVISION + 1, _DIGEST, 1.0, _VALUES, NO_BALLOT, (), signature=_SIGNED),
    HistoryRequest(_RUN, STATE.header.digest, ()),
    DescribeRequest(_RUN, STATE.header.digest),
    *(RangeRequest(_RUN, STATE.header.digest, leaf) for leaf in (0, 1, 2, 2**48 - 1)),
)
_HELLO = wire.encode(Hello(bytes(8), 1, 0))


def run(data: bytes) -> None:
    """The endpoint goes on serving an honest peer, no handler fails, and what the attacker is asked ends in an answer
    or in one of our errors."""
    with _no_bug_is_logged():
        trio.run(_run, Choices(data), clock=MockClock(autojump_threshold=0))


async def _run(choices: Choices) -> None:
    network = MemoryNetwork(latency=0.01)
    async with trio.open_nursery() as nursery:
        victim = await _start(network, nursery, VICTIM)
        await _take_part(victim, nursery)
        honest = await _start(network, nursery, HONEST)
        attacker = _Attacker(network, choices, victim)
        nursery.start_soon(attacker.run)
        assert victim.address is not None
        peer = await honest.connect(victim.address)
        await _served(honest, victim)
        nursery.start_soon(_ask, victim, attacker, choices)
        await trio.sleep(choices.number(60))
        await _served(honest, victim)
        assert victim.is_connected(HONEST.peer_id)
        assert peer == VICTIM.peer_id
        nursery.cancel_scope.cancel()


async def _start(network: MemoryNetwork, nursery: trio.Nursery, identity: Identity) -> Endpoint:
    host, rng = identity.peer_id.short, random.Random(0)
    endpoint = Endpoint(identity, network.transport(host), limits=_LIMITS, rng=rng)
    endpoint.handle(Echo, _echo)
    await nursery.start(endpoint.run, Address(host, 1000))
    return endpoint


async def _take_part(endpoint: Endpoint, nursery: trio.Nursery) -> None:
    """All that a daemon does on its endpoint, but for training."""
    rng = random.Random(0)
    dht = DHT(endpoint, VICTIM, rng=rng)
    await nursery.start(dht.run)
    Prober(endpoint, clock=lambda: 0.0)
    nursery.start_soon(Reachability(endpoint, rng=rng).run)
    membership = Membership(endpoint, dht, _RUN, rng=rng)
    await nursery.start(membership.run)
    await membership.announce(Tip(_REVISION, 1.0, _DIGEST), active=True)
    Donor(endpoint, _RUN, "[run]").offer(STATE)
    rounds = Rounds(endpoint, _RUN, settings=RoundTimes(grace=2.0), roster=membership, report=lambda event: None)
    await nursery.start(rounds.run)
    rounds.committed(_REVISION, _DIGEST)
    nursery.start_soon(_reduce, rounds)


async def _reduce(rounds: Rounds) -> None:
    while True:
        try:
            reduced = await rounds.all_reduce(_REVISION + 1, torch.ones(_VALUES), 1.0, digest=_DIGEST)
            assert len(reduced.mean) == _VALUES
            return
        except ShoalError:
            await trio.sleep(1)


async def _served(honest: Endpoint, victim: Endpoint) -> None:
    with trio.fail_after(_DONE):
        async with honest.open(victim.peer_id, Echo("hello", 100_000), bulk=True) as stream:
            await stream.send_bytes(b"x" * 100_000)
            back = bytearray(100_000)
            await stream.receive_into(back)
            assert back == b"x" * 100_000
            assert await stream.receive(Echo) == Echo("hello", 100_000)


async def _ask(victim: Endpoint, attacker: _Attacker, choices: Choices) -> None:
    """The endpoint wants something of the attacker."""
    while choices.left:
        await trio.sleep(1 + choices.number(5))
        try:
            with trio.move_on_after(30):
                if choices.one_in(2):
                    await victim.request(attacker.identity.peer_id, Find(bytes(32)), Found, timeout=5)
                else:
                    async with victim.open(
                        attacker.identity.peer_id, Echo("", 100_000), bulk=choices.one_in(2)
                    ) as stream:
                        await stream.send_bytes(bytes(100_000))
                        await stream.receive_into(bytearray(100_000))
                        await stream.receive(Echo)
        except ShoalError as error:
            assert str(error)


class _Attacker:
    """Connects as often as he gets thrown out, each time as somebody else."""

    def __init__(self, network: MemoryNetwork, choices: Choices, victim: Endpoint) -> None:
        self.identity = HONEST  # until he has connected
        self._network = network
        self._choices = choices
        self._victim = victim
        self._connections = 0
        self._opened: list[int] = []
        handled = victim._handlers._types
        self._requests = [wire.encode(example) for example in _EXAMPLES if wire.name_of(type(example)) in handled]
        self._others = [wire.encode(example) for example in _EXAMPLES if wire.name_of(type(example)) not in handled]
        self._sending = trio.Lock()

    async def run(self) -> None:
        while self._choices.left:
            try:
                channel = await self._connect()
            except ShoalError:
                await trio.sleep(1)
                continue
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, channel, nursery.cancel_scope)
                    await self._talk(channel)
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await channel.aclose()

    async def _connect(self) -> SecureChannel:
        assert self._victim.address is not None
        self._connections += 1
        self.identity = Identity.from_seed(self._connections.to_bytes(32, "big"))
        transport = self._network.transport(f"attacker{self._connections}")
        stream = await transport.dial(self._victim.address)
        features = mangled(self._choices, _HELLO)[:2048] if self._choices.one_in(4) else _HELLO
        return await handshake(stream, self.identity, initiator=True, features=features)

    async def _listen(self, channel: SecureChannel, scope: trio.CancelScope) -> None:
        """Reads what comes, and no faster than he wants to."""
        try:
            while True:
                record = await channel.receive()
                if record[:1] == bytes([Kind.OPEN]):
                    self._opened.append(int.from_bytes(record[4:8], "big"))
                if record[:1] == bytes([Kind.PING]) and not self._choices.one_in(16):
                    await self._send(channel, frames.pack(Kind.PONG, 0, 0, record[8:16]))
                if self._choices.one_in(32):
                    await trio.sleep(self._choices.number(60))
        except PeerGone:
            scope.cancel()

    async def _talk(self, channel: SecureChannel) -> None:
        number = -1
        self._opened = []
        try:
            while self._choices.left:
                number += 2
                for record in self._records(number):
                    await self._send(channel, record[:MAX_RECORD])
                if self._choices.one_in(4):
                    await trio.sleep(self._choices.number(9) / 4)
        except PeerGone:
            pass

    async def _send(self, channel: SecureChannel, record: bytes) -> None:
        async with self._sending:
            await channel.send(record)

    def _records(self, number: int) -> list[bytes]:
        """A request, an answer to one, any frame, a body, or rubbish."""
        choices = self._choices
        match choices.number(9):
            case 0 | 1 | 2 | 3:
                opening = frames.pack(Kind.OPEN, BULK * choices.number(1), number)
                self._opened.append(number)
                return [opening + self._frame(Kind.DATA, number, self._message(self._requests))]
            case 4 | 5 if self._opened:
                return [self._frame(Kind.DATA, choices.of(self._opened), self._message(self._others))]
            case 6 if self._opened:
                size = 1 + choices.number(70_000)
                announced = self._frame(Kind.BODY, choices.of(self._opened), U32.pack(size))
                return [announced, *(bytes(min(MAX_RECORD, size - start)) for start in range(0, size, MAX_RECORD))]
            case 7 if choices.one_in(8):
                return [choices.blob()]
            case 8 if self._opened:
                kind = choices.of(list(Kind))
                length = frames._SIZES.get(kind, choices.number(20))
                stream = 0 if kind in frames._OF_CONNECTION else choices.of(self._opened)
                return [self._frame(kind, stream, choices.take(length).ljust(length, b"\0"))]
            case _:
                return [frames.pack(Kind.CREDIT, 0, number, U32.pack(2**20)) for number in self._opened[-1:]]

    def _message(self, examples: list[bytes]) -> bytes:
        choices = self._choices
        encoded = choices.of(examples)
        if choices.one_in(2):
            encoded = mangled(choices, encoded)
        size = len(encoded) if choices.number(15) else choices.boundary() % 2**32
        return U32.pack(size) + encoded + (choices.blob() if choices.one_in(2) else b"")

    def _frame(self, kind: Kind, stream: int, payload: bytes) -> bytes:
        flags = FIN if kind in (Kind.DATA, Kind.BODY) and self._choices.one_in(4) else 0
        return frames.pack(kind, flags, stream, payload[: RECORD // 2])


class _Alarm(logging.Handler):
    """Remembers what was logged as an error: an endpoint survives the bugs of handlers, but they are bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is not None
        error = record.exc_info[1]
        assert error is not None
        self.errors.append(error)


@contextmanager
def _no_bug_is_logged() -> Iterator[None]:
    logger, alarm = logging.getLogger("protocol"), _Alarm()
    logger.addHandler(alarm)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(alarm)
        logger.propagate = True
    for error in alarm.errors:
        raise error
