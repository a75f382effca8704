"""Relaying: a peer that is connected to two others passes bytes on between them.

A asks R on a stream (`relay.connect`), R opens one to B (`relay.incoming`), and from then on copies bytes both ways.
To A and B that is a connection like any other: they do the whole handshake on it, and R sees nothing but ciphertext.
R can delay it, and end it; whatever it alters ends the connection.

Nothing is relayed over a connection that is relayed itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import attrs
import trio

from protocol.connection import Limits
from protocol.door import origin
from protocol.errors import PeerGone, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.links import Links
from protocol.rate import TokenBucket
from protocol.stream import Stream
from protocol.transport import DIAL_TIMEOUT, Address, Buffer
from protocol.wire import message

_CHUNK = 1 << 16
_IDLE = 30.0  # seconds without a byte after which a circuit is ended
_FAREWELL = 5.0  # seconds that one direction goes on when the other has ended


@message("relay.connect")
class Connect:
    """Asks for a circuit: that the bytes that follow are passed on to another peer, and its bytes to us."""

    target: PeerId


@message("relay.incoming")
class Incoming:
    """Offers a circuit to the peer that somebody wants to reach."""

    source: PeerId


@message("relay.ready")
class Ready:
    """The answer to both: what follows is the other peer's."""


class CircuitHandler(Protocol):
    """How an endpoint takes in a connection that came over a relay."""

    def __call__(self, stream: RelayedStream, source: PeerId) -> Awaitable[None]:
        """Does the handshake; `source` is who the relay says it is."""
        ...


class Relay:
    """Both sides of relaying: serving others, and being served.

    Args:
        links: The endpoint's connections.
        limits: The endpoint's.
        accept: Takes in a connection that came over a relay.
    """

    def __init__(self, links: Links, limits: Limits, accept: CircuitHandler) -> None:
        self._links = links
        self._limits = limits
        self._accept = accept
        self._bucket = TokenBucket(limits.max_relay_rate)
        self._circuits: Counter[Hashable] = Counter()
        self._origins: Counter[Hashable] = Counter()  # circuits by the address of those who asked for them
        self._sources: Counter[Hashable] = Counter()
        self._targets: Counter[Hashable] = Counter()
        self.open = limits.relay
        """Whether we serve others."""

    def register(self, handle: Callable[..., None]) -> None:
        """Registers the handlers; `handle` is `Endpoint.handle`."""
        handle(Connect, self._on_connect)
        handle(Incoming, self._on_incoming)

    @property
    def circuits(self) -> int:
        """Pairs that we pass on bytes for."""
        return self._circuits.total()

    def relays(self, target: PeerId) -> list[PeerId]:
        """Connected peers that may pass on bytes to `target`, those with the shortest way first."""
        links = [link for link in self._links.direct() if link.theirs.relays and link.connection.peer != target]
        links.sort(key=lambda link: link.connection.rtt)
        return [link.connection.peer for link in links]

    async def dial(self, relay: PeerId, target: PeerId) -> RelayedStream:
        """A stream to `target` through a peer that is connected to both.

        Raises:
            ShoalError: The relay does not want to, is not connected to the target, or is lost.
        """
        link = self._links.get(relay)
        if link is None or link.relayed:
            raise PeerGone(f"{relay.short} cannot relay any more: there is no connection to it")
        stream = await link.connection.open(bulk=True)
        try:
            await stream.send(Connect(target))
            await stream.receive(Ready, timeout=DIAL_TIMEOUT)
        except BaseException:
            stream.close(abandon=True)
            raise
        return RelayedStream(stream, link.connection.channel.remote.host)

    async def _on_incoming(self, request: Incoming, stream: Stream) -> None:
        """We are the target."""
        _refuse_nested(stream)
        link = self._links.get(stream.peer)
        if link is None:
            raise PeerGone(f"the connection to {stream.peer.short} is over")
        await stream.send(Ready())
        relayed = RelayedStream(stream, link.connection.channel.remote.host)
        try:
            await self._accept(relayed, request.source)
            await relayed.closed.wait()
        finally:
            relayed.closed.set()  # the stream is closed when this returns

    async def _on_connect(self, request: Connect, stream: Stream) -> None:
        """We are the relay."""
        _refuse_nested(stream)
        if not self.open:
            raise RequestRefused("this peer does not relay", code="no_relay")
        link = self._links.get(request.target)
        if link is None or link.relayed or request.target == stream.peer:
            raise RequestRefused(f"no connection to {request.target.short}", code="unknown_peer")
        with self._counted(stream.peer, request.target):
            async with await link.connection.open(bulk=True) as onward:
                await onward.send(Incoming(stream.peer))
                await onward.receive(Ready, timeout=DIAL_TIMEOUT)
                await stream.send(Ready())
                await self._splice(stream, onward)

    @contextmanager
    def _counted(self, source: PeerId, target: PeerId) -> Iterator[None]:
        """Counts a circuit as long as it lasts.

        Identities cost nothing, so no address gets more than half of all circuits. Those to one target are bounded
        because they must leave streams of its connection for others.
        """
        limits = self._limits
        asking = self._links.get(source)
        uses: tuple[tuple[Counter[Hashable], Hashable, int], ...] = (
            (self._circuits, "all", limits.max_circuits),
            (self._origins, origin(asking.connection.channel.remote.host) if asking else "", limits.max_circuits // 2),
            (self._sources, source, limits.max_circuits_of_peer),
            (self._targets, target, 2 * limits.max_circuits_of_peer),
        )
        if any(counter[key] >= limit for counter, key, limit in uses):
            raise RequestRefused("too many circuits", code="busy")
        for counter, key, _ in uses:
            counter[key] += 1
        try:
            yield
        finally:
            for counter, key, _ in uses:
                counter.subtract([key])
                if not counter[key]:
                    del counter[key]

    async def _splice(self, one: Stream, other: Stream) -> None:
        """Passes on bytes until both directions have ended, or one has for a while."""
        budget = _Budget(self._limits.max_relayed)

        async def copy(source: Stream, target: Stream) -> None:
            await self._copy(source, target, budget)
            nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, trio.current_time() + _FAREWELL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy, one, other)
            nursery.start_soon(copy, other, one)

    async def _copy(self, source: Stream, target: Stream, budget: _Budget) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        while count := await self._receive(source, buffer):
            budget.left -= count
            if budget.left < 0:
                raise RequestRefused(f"{self._limits.max_relayed} bytes have been relayed", code="used_up")
            now = trio.current_time()
            self._bucket.spend(count, now)
            if delay := self._bucket.delay(now):
                await trio.sleep(delay)
            if target.raw.stopped:
                return  # its reader has closed the connection
            await target.send_bytes(buffer[:count])
        if not target.raw.stopped:
            await target.finish()

    async def _receive(self, source: Stream, buffer: memoryview) -> int:
        """As `Stream.receive_some`. Ends a circuit on which there are not even heartbeats."""
        with trio.move_on_after(_IDLE):
            return await source.receive_some(buffer)
        raise RequestRefused(f"nothing was sent for {_IDLE:g} s", code="idle")


@attrs.define
class _Budget:
    left: int


class RelayedStream:
    """A stream through a relay as a connection's stream of bytes. Implements `transport.ByteStream`.

    Args:
        stream: The stream to the relay.
        host: Where the relay is. What comes through it counts for its address: anybody can say that he is a relay, and
            that others want to reach us.
    """

    def __init__(self, stream: Stream, host: str) -> None:
        self._stream = stream
        self._remote = Address(host, 0)
        self.closed = trio.Event()
        """Set when it is closed."""

    @property
    def remote(self) -> Address:
        return self._remote

    async def send(self, data: Buffer) -> None:
        self._check()
        try:
            await self._stream.send_bytes(data)
        except ShoalError as error:
            raise self._gone(error) from error

    async def receive_into(self, buffer: memoryview) -> int:
        self._check()
        try:
            return await self._stream.receive_some(buffer)
        except ShoalError as error:
            raise self._gone(error) from error

    async def aclose(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            try:
                with contextlib.suppress(ShoalError):
                    await self._stream.finish()
            finally:
                self._stream.close(abandon=False)

    def _check(self) -> None:
        if self.closed.is_set():
            raise PeerGone(f"the connection through {self._stream.peer.short} was closed on our side")

    def _gone(self, error: ShoalError) -> PeerGone:
        return PeerGone(f"the connection through {self._stream.peer.short} broke: {error}")


def _refuse_nested(stream: Stream) -> None:
    if stream.path == "relayed":
        raise RequestRefused("nothing is relayed over a connection that is relayed itself", code="nested")
