"""A peer's place on the network: one connection to each other peer, requests out, handlers for requests in.

Between two peers there is one connection. When both dial at the same time there are two for a moment; both sides then
pick the same one (see `links`) and retire the other, which still carries the conversations that were begun on it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

import trio

from protocol import wire
from protocol.book import AddressBook, Strikes
from protocol.budget import Budget
from protocol.channel import HANDSHAKE_TIMEOUT, SecureChannel
from protocol.connection import Connection, Limits
from protocol.dialer import Dial, Route, first_to_answer, path_of
from protocol.door import Door, Greeting, origin
from protocol.errors import (
    AddressError,
    HandshakeError,
    IdentityInUse,
    Overloaded,
    PeerGone,
    PeerUnreachable,
    ProtocolError,
    RequestTimeout,
    ShoalError,
    WrongPeer,
)
from protocol.handlers import Handler, Handlers
from protocol.hello import Hello
from protocol.identity import Identity, PeerId
from protocol.introduction import Introductions, theirs_of
from protocol.keyring import Keyring
from protocol.lanes import greet
from protocol.links import Link, Links, PathChanged, PeerConnected, PeerEvent, PeerLost, PeerStatistics
from protocol.pacing import Senders
from protocol.punch import Observer, Puncher
from protocol.rate import TokenBucket
from protocol.relay import Relay, RelayedStream
from protocol.rivals import Rivals
from protocol.stream import Stream
from protocol.transport import Address, ByteStream, Listener, Path, Transport
from protocol.wire import Message

__all__ = ["Endpoint", "Limits", "PathChanged", "PeerConnected", "PeerLost", "PeerStatistics", "Stream"]

_T = TypeVar("_T")

_REDIAL = 5.0  # seconds for dialling a peer directly that is connected through a relay
_MAX_RELAYS = 8  # that are tried for one peer


class Endpoint:
    """One peer on the network.

    Args:
        identity: Who we are.
        transport: How others are reached.
        psk: The run's swarm key (32 bytes), or those that are good at a time, or None for a public run.
        limits: See `Limits`.
        announce: Where others are to connect to; None if that is to be found out.
        local_host: Our address on our own network, for others behind the same router.
        rng: The source of randomness for everything that is no secret. It must be in another state at every start of
            a peer, as that is how others notice that it was restarted.
    """

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        *,
        psk: bytes | Keyring | None = None,
        limits: Limits | None = None,
        announce: Address | None = None,
        local_host: str | None = None,
        rng: random.Random,
    ) -> None:
        self.identity, self.peer_id = identity, identity.peer_id
        self.address: Address | None = None
        """Where we listen, while we do."""
        self._transport = transport
        self._introductions = Introductions(identity, psk, self._describe)
        self._limits = limits or Limits()
        self._instance, self._dialled = rng.randbytes(8), 0
        self._upload = None if self._limits.max_upload is None else TokenBucket(self._limits.max_upload)
        self._download = None if self._limits.max_download is None else TokenBucket(self._limits.max_download)
        self._handlers, self._senders = Handlers(), Senders()
        self._announce = announce
        self.mapped: Address | None = None
        """Set this to a gateway's address that leads to ours; new connections tell others."""
        self._local_host = local_host
        self._links = Links(self.peer_id)
        self._connections = self._links.connections
        self._relay = Relay(self._links, self._limits, self._greet_relayed)
        self._observer = Observer(self._links, self.probe)
        self._puncher = Puncher(self._links, transport, locate=self._locate, port=self._port, meet=self._meet)
        self._rivals = Rivals(identity, self._instance, self._links, self._limits.heartbeat)
        self._dials: dict[PeerId | Address, Dial] = {}
        self._door = Door(self._limits)
        self._memory = Budget(self._limits.max_buffered, connections=self._limits.max_connections)
        self._book = AddressBook()
        self._strikes = Strikes()
        self._nursery: trio.Nursery | None = None
        self._relay.register(self.handle)
        self._puncher.register(self.handle)
        self._rivals.register(self.handle)

    # What others see of us.

    def handle(self, message_type: type[_T], handler: Callable[[_T, Stream], Awaitable[Message | None]]) -> None:
        """Serves requests of a type.

        The handler gets the request and its stream, on which it may send and receive more. What it returns is sent as
        the last message; then the stream is finished. It declines by raising `RequestRefused`; any other `ShoalError`
        reaches the other side as a refusal with code "failed". `ProtocolError` ends the connection and counts against
        the peer. It is cancelled when the connection is lost.

        Raises:
            ValueError: If there is a handler for the type's name already.
        """
        self._handlers.add(message_type, handler)

    def serving(self, run: bytes, tag: str | None, handlers: Mapping[type, Handler]) -> AbstractContextManager[None]:
        """Within the block, serves the requests whose `run` and `tag` are these; see `Handlers.serving`."""
        return self._handlers.serving(run, tag, handlers)

    async def run(
        self, listen: Address | None, *, task_status: trio.TaskStatus[Address | None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Takes part until cancelled; then says goodbye to everybody, which takes a second at most.

        Args:
            listen: Where to listen; port 0 picks one. None if others cannot reach us anyway.
            task_status: Told the address we listen on.

        Raises:
            AddressError: If we cannot listen there.
            IdentityInUse: If another daemon with our identity is in our place, see `rivals`.
        """
        listener = None if listen is None else await self._transport.listen(listen)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if listener is not None:
                    self.address = listener.address
                    nursery.start_soon(self._accept, listener)
                task_status.started(self.address)
                verdict = await self._rivals.outcome()
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self.address = None
            if listener is not None:
                with trio.CancelScope(shield=True):
                    await listener.aclose()
        raise verdict

    @property
    def in_use(self) -> IdentityInUse | None:
        """The reason, if nobody takes us in because another daemon with our identity is there. Else None."""
        return self._rivals.verdict

    @property
    def copied(self) -> IdentityInUse | None:
        """Why somebody did not take us in, if there is another daemon with our identity; others may have. Else None."""
        return self._rivals.refusal

    # Whom we know.

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """The peers that there is a connection to."""
        return self._links.peers

    def is_connected(self, peer: PeerId) -> bool:
        """There is a connection to this peer."""
        return self._links.get(peer) is not None

    def learn(self, peer: PeerId, *addresses: Address) -> None:
        """Remembers where a peer is said to be reachable. Where it was reached before goes first."""
        if peer != self.peer_id and addresses:
            self._book.learn(peer, addresses)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Where a peer can be reached, as far as we know; the best first."""
        return self._book.addresses(peer)

    def watch(self) -> AbstractContextManager[trio.MemoryReceiveChannel[PeerEvent]]:
        """What happens to connections from now on. For each peer, connecting and losing alternate."""
        return self._links.watch()

    def path(self, peer: PeerId) -> Path | None:
        """How the connection to a peer goes; None if there is none."""
        link = self._links.get(peer)
        return None if link is None else link.connection.path

    def swarm_key(self, peer: PeerId) -> bytes | None:
        """The key that the connection to a peer was made with; None if there is none."""
        link = self._links.get(peer)
        return None if link is None else link.connection.channel.swarm_key

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on all connections so far."""
        return self._links.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received on all connections so far."""
        return self._links.bytes_received

    def statistics(self, peer: PeerId) -> PeerStatistics | None:
        """The state of the connection to a peer, or None if there is none."""
        return self._links.statistics(peer)

    # What we do.

    async def connect(self, target: PeerId | Address) -> PeerId:
        """Makes sure that there is a connection, and returns whom it is to.

        Dials of the same target at the same time are one dial.

        Raises:
            PeerUnreachable: If nobody answers, no address is known, or it is ourselves.
            HandshakeError: If somebody answers who is not part of this.
            ValueError: If the target is our own peer id.
        """
        if target == self.peer_id:
            raise ValueError("a peer cannot connect to itself")
        if isinstance(target, PeerId) and self.is_connected(target):
            await trio.lowlevel.checkpoint()
            return target
        dial = self._dials.get(target)
        if self._nursery is None:  # as while everything is being shut down
            raise PeerUnreachable(f"cannot connect to {_name(target)}: this endpoint is not running")
        if dial is None:
            dial = self._dials[target] = Dial()
            self._nursery.start_soon(self._dial, target, dial)
        await dial.done.wait()
        if dial.error is not None:
            raise type(dial.error)(str(dial.error), hint=dial.error.hint)
        if dial.peer is None:
            raise PeerUnreachable(f"the dial of {_name(target)} was cut short: we are shutting down")
        return dial.peer

    async def request(
        self, peer: PeerId, request: Message, reply: type[_T] | tuple[type[_T], ...], *, timeout: float = 10.0
    ) -> _T:
        """Sends one message and returns the answer, connecting if need be.

        Args:
            peer: Whom to ask.
            request: The question.
            reply: The type of the answer, or several.
            timeout: Seconds for all of it.

        Raises:
            PeerUnreachable, HandshakeError: As `connect`.
            PeerGone: If the connection was lost. The request may or may not have been carried out.
            RequestRefused: If the other side declined.
            RequestTimeout: If there was no answer in time.
            ProtocolError: If the answer is none.
            MessageTooLong: If the request is longer than `wire.MAX_MESSAGE`.
        """
        types = reply if isinstance(reply, tuple) else (reply,)
        encoded = wire.encode(request)
        try:
            with trio.fail_after(timeout):
                async with await self._open(peer) as stream:
                    await stream.send_encoded(encoded, last=True)
                    return await stream.receive(*types)
        except trio.TooSlowError:
            name = wire.name_of(type(request))
            raise RequestTimeout(f"{peer.short} did not answer {name} within {timeout:g} s") from None

    @asynccontextmanager
    async def open(
        self, peer: PeerId, request: Message, *, bulk: bool = False, one_way: bool = False
    ) -> AsyncIterator[Stream]:
        """A stream on which the request has been sent, connecting if need be. See `Stream` for how it ends.

        Args:
            peer: Whom to talk to.
            request: The first message, which chooses the handler on the other side.
            bulk: The stream waits for everything that is not bulk. It does so anyway once raw bytes flow.
            one_way: The other side sends nothing, at most that it declines.

        Raises: As `request`, but for the timeout.
        """
        encoded = wire.encode(request)
        async with await self._open(peer, bulk=bulk, one_way=one_way) as stream:
            await stream.send_encoded(encoded)
            yield stream

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Ends the connections to a peer, telling it why. Does nothing if there is none."""
        for connection in [connection for connection in self._connections if connection.peer == peer]:
            connection.close(reason)

    async def _open(self, peer: PeerId, *, bulk: bool = False, one_way: bool = False) -> Stream:
        while True:
            await self.connect(peer)
            link = self._links.get(peer)
            if link is None:
                raise PeerGone(f"the connection to {peer.short} was lost as soon as it was made")
            try:
                return await link.connection.open(bulk=bulk, one_way=one_way)
            except Overloaded:
                if link.connection.usable:
                    link.connection.close("out of stream numbers")
                # Else it was retired while we waited for a slot: there is a better one.
                await trio.lowlevel.checkpoint()

    def _running(self) -> trio.Nursery:
        if self._nursery is None:
            raise RuntimeError("the endpoint is not running")
        return self._nursery

    # Dialling and being dialled.

    async def _dial(self, target: PeerId | Address, dial: Dial) -> None:
        try:
            with dial.scope:
                dial.peer = await self._dial_anew(target, dial)
        except ShoalError as error:
            dial.error = error
        finally:
            if self._dials.get(target) is dial:
                del self._dials[target]
            dial.done.set()

    async def _dial_anew(self, target: PeerId | Address, dial: Dial, *, may_relay: bool = True) -> PeerId:
        expected = target if isinstance(target, PeerId) else None
        if expected is not None and self._strikes.is_banned(expected, trio.current_time()):
            raise PeerUnreachable(f"{expected.short} is banned for repeated protocol errors")
        addresses = (target,) if isinstance(target, Address) else self._book.addresses(target)
        relays = self._relay.relays(expected)[:_MAX_RELAYS] if may_relay and expected is not None else []
        if not addresses and not relays:
            raise PeerUnreachable(f"no address of {_name(target)} is known")
        self._dialled += 1
        number = self._dialled

        async def attempt(route: Route) -> SecureChannel:
            channel = await self._shake_hands_with(route, expected, number)
            dial.answered = True
            return channel

        channel, route = await first_to_answer(addresses, attempt, relays=relays)
        if channel.peer_id == self.peer_id:
            await channel.aclose()
            raise PeerUnreachable(f"{route} is this very peer")
        theirs = theirs_of(channel)
        path = path_of(route, theirs.address if theirs.mapped else None)
        refusal = await self._register(channel, theirs, initiator=True, dial=number, path=path)
        if refusal is not None:
            raise PeerUnreachable(f"no connection to {channel.peer_id.short}: {refusal}")
        if isinstance(route, Address):
            self._book.learn(channel.peer_id, (route,), proven=True)
        return channel.peer_id

    async def _shake_hands_with(self, route: Route, expected: PeerId | None, dial: int) -> SecureChannel:
        """Dials an address, or through a relay."""
        stream: ByteStream
        if isinstance(route, Address):
            stream = await self._transport.dial(route)
        else:
            assert expected is not None
            stream = await self._relay.dial(route, expected)
        seen = route if isinstance(route, Address) else None
        try:
            return await self._introductions.exchange(stream, initiator=True, expected=expected, dial=dial, seen=seen)
        except WrongPeer:
            if expected is not None and isinstance(route, Address):
                self._book.forget(expected, route)
            raise

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                stream = await listener.accept()
            except AddressError:  # it was closed: we are about to be cancelled
                return
            scope = trio.CancelScope()
            if self._puncher.takes(stream):
                continue
            greeting = self._door.enter(stream.remote.host, trio.current_time(), scope.cancel)
            if greeting is None:
                await stream.aclose()
            else:
                self._running().start_soon(self._greet, stream, greeting, scope)

    async def _greet_relayed(self, stream: RelayedStream, source: PeerId) -> None:
        """As for somebody who has dialled us, with the relay in the place of the address."""
        scope = trio.CancelScope()
        greeting = self._door.enter(stream.remote.host, trio.current_time(), scope.cancel)
        if greeting is None:
            await stream.aclose()
        else:
            await self._greet(stream, greeting, scope, source)

    async def _greet(
        self, stream: ByteStream, greeting: Greeting, scope: trio.CancelScope, relayed: PeerId | None = None
    ) -> None:
        """Does the handshake with somebody who has dialled us; over a relay, it has to be peer `relayed`."""
        try:
            scope.deadline = trio.current_time() + HANDSHAKE_TIMEOUT
            with scope:
                if (opening := await greet(stream, self._links.lanes)) is None:
                    return
                seen = None if relayed else stream.remote
                channel = await self._introductions.exchange(
                    stream, initiator=False, expected=relayed, seen=seen, opening=opening
                )
                theirs = theirs_of(channel)
                if theirs.probe:
                    self._running().start_soon(self._observer.serve, channel)
                    return
                path = path_of(theirs.seen if relayed is None else relayed, self.mapped)
                await self._register(channel, theirs, initiator=False, dial=theirs.dial, path=path)
        except HandshakeError:
            pass  # whoever it was knows why; anybody can make us fail here, so there is nothing to report
        finally:
            self._door.leave(greeting)

    # Finding out where we are seen, and direct connections in place of relayed ones.

    async def probe(self, address: Address, port: int) -> tuple[SecureChannel, Address | None]:
        """Dials an address from a local port, only to be seen; raises as `connect` does.

        Returns the channel, for the caller to close, and where the other side sees it come from, if it says so.
        """
        stream = await self._transport.dial(address, local_port=port)
        channel = await self._introductions.exchange(stream, initiator=True, probe=True)
        return channel, theirs_of(channel).seen

    async def _meet(self, stream: ByteStream, peer: PeerId, *, initiator: bool) -> None:
        """See `punch.Meet`."""
        self._dialled += initiator
        number = self._dialled if initiator else 0
        channel = await self._introductions.exchange(stream, initiator=initiator, expected=peer, dial=number)
        theirs = theirs_of(channel)
        await self._register(channel, theirs, initiator=initiator, dial=number or theirs.dial, path="punched")

    async def _locate(self) -> Address:
        if (port := self._port()) is None:
            raise PeerUnreachable("this peer listens nowhere")
        return await self._observer.locate(port, self._running())

    def _port(self) -> int | None:
        return None if self.address is None else self.address.port

    async def _redial(self, peer: PeerId) -> None:
        """Dials the addresses of a peer that is connected through a relay."""
        with trio.move_on_after(_REDIAL):
            await self._dial_anew(peer, Dial(), may_relay=False)

    def host(self, peer: PeerId) -> str | None:
        """Where a peer is, as far as we see; None unless it is connected directly."""
        link = self._links.get(peer)
        return None if link is None or link.relayed else link.connection.channel.remote.host

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The connected peers that pass on bytes for others, those with the shortest way first."""
        return tuple(self._relay.relays(self.peer_id))

    @property
    def relaying(self) -> bool:
        """Whether we pass on bytes for others."""
        return self._relay.open

    @relaying.setter
    def relaying(self, willing: bool) -> None:
        self._relay.open = willing and self._limits.relay

    def expect_call(self, word: bytes) -> AbstractContextManager[trio.Event]:
        """The event is set when somebody calls (see `call`) who says this word."""
        return self._observer.expect(word)

    async def call(self, peer: PeerId, port: int, word: bytes) -> None:
        """Dials a connected peer anew, at the host that it is seen at, only to say a word.

        Raises:
            PeerUnreachable: It does not listen there, or is not connected directly.
            HandshakeError: Somebody else answers there.
        """
        host = self.host(peer)
        if host is None:
            raise PeerUnreachable(f"it is not known where {peer.short} is")
        stream = await self._transport.dial(Address(host, port))
        channel = await self._introductions.exchange(stream, initiator=True, expected=peer, probe=True)
        try:
            await channel.send(word)
        finally:
            with trio.CancelScope(shield=True):
                await channel.aclose()

    @property
    def host_seen(self) -> str | None:
        """The host that most of those whom we dialled see us at; None as long as nobody is connected who says so."""
        return self._links.host_seen()

    def advertised(self) -> Address | None:
        """Where others are to connect to: as configured, else as mapped, else our port at the host that others see."""
        host = self._links.host_seen()
        if self._announce is not None or self.address is None:
            return self._announce
        return self.mapped or (Address(host, self.address.port) if host is not None else None)

    def _describe(self, dial: int, seen: Address | None, probe: bool) -> Hello:
        """What we say in a handshake; see `Introductions`."""
        port = self._port()
        local = None if port is None or self._local_host is None else Address(self._local_host, port)
        address = self.advertised()
        mapped = address is not None and address == self.mapped
        return Hello(self._instance, dial, port or 0, address, local, seen, self._relay.open, probe, mapped)

    # One connection for each peer.

    async def _register(
        self, channel: SecureChannel, theirs: Hello, *, initiator: bool, dial: int, path: Path
    ) -> str | None:
        """Begins a connection. Returns why it cannot stay, or None."""
        rival = await self._rivals.of(channel, theirs.instance)
        relayed = path == "relayed"  # the caps are kept on the connection to the relay
        connection = Connection(
            channel,
            initiator=initiator,
            limits=self._limits,
            serve=self._handlers.serve,
            ended=self._ended,
            memory=self._memory.account(origin(channel.remote.host)),
            path=path,
            upload=None if relayed else self._upload,
            download=None if relayed else self._download,
            dial=None if relayed else self._transport.dial,
            senders=self._senders,
        )
        self._connections[connection] = None
        self._running().start_soon(self._run_connection, connection)
        if rival is not None:
            connection.close(rival.reason, evidence=rival.evidence)
            return rival.reason
        host = None if initiator or path != "direct" else channel.remote.host
        if channel.peer_id != self.peer_id and (places := theirs.places(host, self._links.host_seen())):
            self._book.learn(channel.peer_id, places, proven=True)
        refusal = self._refusal(connection)
        if refusal is not None:
            connection.close(refusal)
            return refusal
        self._links.admit(Link(connection, theirs, dial, trio.current_time()))
        self._answer_dials(channel.peer_id)
        return None

    def _refusal(self, new: Connection) -> str | None:
        """Why a new connection cannot stay."""
        if new.peer == self.peer_id:
            return "you are this very peer"
        if self._strikes.is_banned(new.peer, trio.current_time()):
            return "banned for repeated protocol errors"
        if self.is_connected(new.peer):
            return None  # it takes the place of another, see `Links.admit`
        return self._door.refusal(new, self._connections)

    def _answer_dials(self, peer: PeerId) -> None:
        """The peer itself has connected, or another dial got there first: nobody has to wait for this dial."""
        dial = self._dials.pop(peer, None)
        if dial is not None:
            dial.peer = peer
            dial.done.set()
            if not dial.answered:  # else the other side has that connection by now, and may choose it
                dial.scope.cancel()

    async def _run_connection(self, connection: Connection) -> None:
        try:
            async with trio.open_nursery() as nursery:
                if connection.path == "relayed":
                    nursery.start_soon(self._puncher.upgrade, connection, self._redial)
                await connection.run()
                nursery.cancel_scope.cancel()
        finally:
            self._links.forget(connection)

    def _ended(self, connection: Connection) -> None:
        # What comes over a relay may be the relay's fault.
        if isinstance(connection.failure, ProtocolError) and connection.path != "relayed":
            self._strikes.strike(connection.peer, trio.current_time())
            self._door.misbehaved(connection.channel.remote.host, trio.current_time())
        self._rivals.ended(connection)
        self._links.ended(connection)


def _name(target: PeerId | Address) -> str:
    return target.short if isinstance(target, PeerId) else str(target)
