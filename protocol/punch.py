"""From a relayed connection to a direct one: both sides dial each other at the same moment.

A router that lets nothing in lets in the answers to what went out. When both peers send their first packet before that
of the other arrives, each router takes the other's for an answer: TCP calls this a simultaneous open, and it ends in
one connection. Both dial from the port that they listen on, to where others see that port.

The side that opened the relayed connection coordinates (Ford, Srisuresh, Kegel, "Peer-to-Peer Communication Across
Network Address Translators", 2005; libp2p's DCUtR has the timing): it measures the round trip over the relay, says go,
and dials half a round trip later, when the other side hears it. It is also the one who begins the handshake.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeAlias

import trio

from protocol.channel import SecureChannel
from protocol.connection import Connection
from protocol.door import origin
from protocol.errors import PeerUnreachable, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.links import Links
from protocol.stream import Stream
from protocol.transport import Address, ByteStream, Transport
from protocol.wire import message

_Arrivals: TypeAlias = trio.MemoryReceiveChannel[ByteStream]

ATTEMPTS = 3
ATTEMPT_SECONDS = 4.0
"""What one attempt gets: a first packet that is lost is sent again after one second, and after three."""

FIRST_PAUSE, LONGEST_PAUSE = 30.0, 900.0
"""Seconds until the next time, twice as many after each."""

OBSERVERS = 2
"""Peers that are asked where they see us. If they disagree, each destination sees us somewhere else."""

PROBE_SECONDS = 20.0
"""How long a connection is kept that was made to be seen: routers forget who has no connection."""

MAX_PROBES = 64
"""Connections of others that are held at a time for this, a quarter of them for one address."""

_REPLY_SECONDS = 20.0  # time for the other side to be ready: it may have to find out where it is seen first
_ARRIVAL_SECONDS = 1.0  # after our dial has failed, the other side's may still come in at our listener


@message("punch.offer")
class Offer:
    """Proposes to dial each other at the same time."""

    address: Address
    """Where the listening port of this side is seen."""


@message("punch.answer")
class Answer:
    """Agrees."""

    address: Address


@message("punch.sync")
class Sync:
    """Answered at once, with the same, which measures the round trip. The other side's first one says it is ready."""


@message("punch.go")
class Go:
    """Whoever reads this dials."""


class Probe(Protocol):
    """How an endpoint finds out where it is seen."""

    def __call__(self, address: Address, port: int) -> Awaitable[tuple[SecureChannel, Address | None]]:
        """Dials an address from a local port. Returns the connection, and where the other side sees it come from."""
        ...


class Meet(Protocol):
    """How an endpoint takes over a connection that was punched."""

    def __call__(self, stream: ByteStream, peer: PeerId, *, initiator: bool) -> Awaitable[None]:
        """Does the handshake, and uses the connection from then on. Raises `HandshakeError`."""
        ...


class Observer:
    """Finds out where others see our listening port.

    Args:
        links: The endpoint's connections: those that we dialled are to peers that can be dialled.
        probe: See `Probe`.
    """

    def __init__(self, links: Links, probe: Probe) -> None:
        self._links = links
        self._probe = probe
        self._lock = trio.Lock()
        self._seen: set[Address] = set()
        self._until = -math.inf
        self._served: Counter[str] = Counter()  # by address
        self._expected: dict[bytes | None, trio.Event] = {}

    async def locate(self, port: int, nursery: trio.Nursery) -> Address:
        """The address under which others see a local port.

        Args:
            port: The port that we listen on.
            nursery: Where the connections made for this are held.

        Raises:
            PeerUnreachable: Nobody can tell, or each says something else.
        """
        async with self._lock:
            # While the connections are held that were made for this, they cannot be made again.
            if not self._seen or trio.current_time() > self._until:
                self._seen = await self._ask(port, nursery)
                self._until = trio.current_time() + PROBE_SECONDS
            seen = self._seen
        if not seen:
            raise PeerUnreachable("nobody can tell where this peer is seen from outside")
        if len(seen) > 1:
            raise PeerUnreachable("each destination sees this peer at another address: there can be no direct dial")
        return next(iter(seen))

    async def serve(self, channel: SecureChannel) -> None:
        """Somebody has connected only to be seen, or to say a word. Holds the connection for its time.

        TCP does not let the side that closes first connect the same way again for a minute: that is this side.
        """
        where = origin(channel.remote.host)
        self._served[where] += 1
        room = self._served.total() <= MAX_PROBES and self._served[where] <= MAX_PROBES // 4
        try:
            word = await _hold(channel, PROBE_SECONDS if room else 0.0)
            if word in self._expected:
                self._expected[word].set()
        finally:
            self._served[where] -= 1
            self._served += Counter()  # drops the addresses that have none any more

    @contextmanager
    def expect(self, word: bytes) -> Iterator[trio.Event]:
        """The event is set when somebody connects who says this word."""
        said = self._expected[word] = trio.Event()
        try:
            yield said
        finally:
            del self._expected[word]

    async def _ask(self, port: int, nursery: trio.Nursery) -> set[Address]:
        dialled = [link.connection for link in self._links.direct() if link.connection.initiator]
        answers: set[Address] = set()

        async def ask(address: Address) -> None:
            with contextlib.suppress(ShoalError):
                channel, seen = await self._probe(address, port)
                nursery.start_soon(_hold, channel, 1.5 * PROBE_SECONDS)
                if seen is not None:
                    answers.add(seen)

        async with trio.open_nursery() as asking:
            for connection in dialled[-OBSERVERS:]:
                asking.start_soon(ask, connection.channel.remote)
        return answers


async def _hold(channel: SecureChannel, seconds: float) -> bytes | None:
    """Keeps a connection that serves as a probe for a time, or until the other side says a word or ends it."""
    try:
        with trio.move_on_after(seconds), contextlib.suppress(ShoalError):
            return await channel.receive()
        return None
    finally:
        with trio.CancelScope(shield=True):
            await channel.aclose()


class Puncher:
    """Makes direct connections to peers that are connected through a relay.

    Args:
        links: The endpoint's connections.
        transport: How others are dialled.
        locate: Where others see our listening port, see `Observer.locate`.
        port: The port that we listen on, if any.
        meet: See `Meet`.
    """

    def __init__(
        self,
        links: Links,
        transport: Transport,
        *,
        locate: Callable[[], Awaitable[Address]],
        port: Callable[[], int | None],
        meet: Meet,
    ) -> None:
        self._links = links
        self._transport = transport
        self._locate = locate
        self._port = port
        self._meet = meet
        self._arrivals: dict[Address, trio.MemorySendChannel[ByteStream]] = {}

    def register(self, handle: Callable[..., None]) -> None:
        """Registers the handler; `handle` is `Endpoint.handle`."""
        handle(Offer, self._on_offer)

    def takes(self, stream: ByteStream) -> bool:
        """Whether a connection that came in at our listener is one that is being punched."""
        expecting = self._arrivals.get(stream.remote)
        if expecting is None:
            return False
        try:
            expecting.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError):
            return False
        return True

    async def upgrade(self, relayed: Connection, redial: Callable[[PeerId], Awaitable[object]]) -> None:
        """Tries to replace a relayed connection by a direct one for as long as it is in use.

        Args:
            relayed: The connection.
            redial: Dials the peer's addresses. Whoever opened the relayed connection has done so just now; it may be
                the other side that can.
        """
        pause = FIRST_PAUSE
        dialled = relayed.initiator
        while self._in_use(relayed):
            with contextlib.suppress(ShoalError):
                if not dialled:
                    await redial(relayed.peer)
            with contextlib.suppress(ShoalError):
                if relayed.initiator and self._in_use(relayed):
                    await self._punch(relayed)
            dialled = False
            if not self._in_use(relayed):
                return
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _in_use(self, relayed: Connection) -> bool:
        link = self._links.get(relayed.peer)
        return link is not None and link.connection is relayed

    async def _punch(self, relayed: Connection) -> None:
        """Tries to connect directly to the peer of a relayed connection, which this side opened.

        Raises:
            ShoalError: It did not work.
        """
        ours = await self._locate()
        async with await relayed.open() as stream:
            await stream.send(Offer(ours))
            theirs = (await stream.receive(Answer, timeout=_REPLY_SECONDS)).address
            async with self._expecting(theirs) as arrivals:
                await self._coordinate(stream, theirs, arrivals)
            await stream.finish()

    async def _coordinate(self, stream: Stream, theirs: Address, arrivals: _Arrivals) -> None:
        failure: ShoalError = PeerUnreachable("not tried")
        for _ in range(ATTEMPTS):
            await stream.receive(Sync, timeout=_REPLY_SECONDS)
            began = trio.current_time()
            await stream.send(Sync())
            await stream.receive(Sync, timeout=_REPLY_SECONDS)
            round_trip = trio.current_time() - began
            await stream.send(Go())
            await trio.sleep(round_trip / 2)
            try:
                await self._attempt(theirs, stream.peer, arrivals, initiator=True)
                return
            except ShoalError as error:
                failure = error
        raise failure

    async def _on_offer(self, offer: Offer, stream: Stream) -> None:
        """The other side coordinates."""
        if stream.path != "relayed":
            raise RequestRefused("the connection is direct", code="direct")
        try:
            ours = await self._locate()
        except PeerUnreachable as error:
            raise RequestRefused(str(error), code="unseen") from None
        async with self._expecting(offer.address) as arrivals:
            await stream.send(Answer(ours))
            for _ in range(ATTEMPTS):
                await stream.send(Sync())
                await stream.receive(Sync, timeout=_REPLY_SECONDS)
                await stream.send(Sync())
                await stream.receive(Go, timeout=_REPLY_SECONDS)
                with contextlib.suppress(ShoalError):
                    await self._attempt(offer.address, stream.peer, arrivals, initiator=False)
                    return

    @asynccontextmanager
    async def _expecting(self, address: Address) -> AsyncIterator[_Arrivals]:
        """What comes in at our listener from an address, in place of the answer to our dial.

        The handshake's roles are those that were agreed on, and not those of who was dialled.
        """
        if address in self._arrivals:
            raise PeerUnreachable(f"{address} is being dialled already")
        send, receive = trio.open_memory_channel[ByteStream](1)
        self._arrivals[address] = send
        try:
            yield receive
        finally:
            del self._arrivals[address]
            with contextlib.suppress(trio.WouldBlock):
                await _close([receive.receive_nowait()])
            send.close()
            receive.close()

    async def _attempt(self, address: Address, peer: PeerId, arrivals: _Arrivals, *, initiator: bool) -> None:
        stream = await self._dial(address, arrivals)
        with trio.move_on_after(ATTEMPT_SECONDS):
            await self._meet(stream, peer, initiator=initiator)
            return
        raise PeerUnreachable(f"no handshake with {peer.short}")

    async def _dial(self, address: Address, arrivals: _Arrivals) -> ByteStream:
        """Dials from our listening port, and waits for the other side's dial as well: there is one connection."""
        port = self._port()
        found: list[ByteStream] = []
        failure: ShoalError = PeerUnreachable(f"{address} did not answer in time")

        async def dial(patience: trio.CancelScope) -> None:
            nonlocal failure
            try:
                found.append(await self._transport.dial(address, local_port=port))
                patience.cancel()
            except PeerUnreachable as error:
                failure = error
                patience.deadline = min(patience.deadline, trio.current_time() + _ARRIVAL_SECONDS)

        try:
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + ATTEMPT_SECONDS
                nursery.start_soon(dial, nursery.cancel_scope)
                found.append(await arrivals.receive())
                nursery.cancel_scope.cancel()
        except BaseException:
            await _close(found)
            raise
        await _close(found[1:])
        if not found:
            raise failure
        return found[0]


async def _close(streams: list[ByteStream]) -> None:
    with trio.CancelScope(shield=True):
        for stream in streams:
            await stream.aclose()
