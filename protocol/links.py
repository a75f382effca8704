"""The connections of an endpoint, and which of several to the same peer is the one to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import attrs
import trio

from protocol.connection import Connection
from protocol.hello import Hello
from protocol.identity import PeerId
from protocol.lanes import Lanes
from protocol.transport import Address, Path

_SETTLED = 10.0  # seconds after which a connection is not one of two simultaneous dials any more
_MAX_PER_PEER = 4  # connections, of which all but one are retired
_MAX_EVENTS = 4096  # a watcher that is further behind than this is not reading


@attrs.frozen
class PeerConnected:
    """There is a connection to a peer now. Followed by `PeerLost` before the next one of the same peer."""

    peer: PeerId
    path: Path = "direct"


@attrs.frozen
class PathChanged:
    """The connection to a peer that is connected was replaced by another one, which takes another path."""

    peer: PeerId
    path: Path


@attrs.frozen
class PeerLost:
    """There is no connection to a peer any more."""

    peer: PeerId
    reason: str


PeerEvent: TypeAlias = PeerConnected | PathChanged | PeerLost


@attrs.frozen
class PeerStatistics:
    """What is known of a connection. Bytes are those on the wire."""

    remote: Address
    """The other end, as we see it; if it dialled us, not an address to dial."""
    rtt: float
    bytes_sent: int
    bytes_received: int
    carried: float
    """Bytes per second that the way to it has carried at most lately, as our system saw it; 0 if it did not tell."""
    streams: int
    seconds: float
    path: Path


@attrs.define(eq=False)
class Link:
    """A connection and what decides whether it is the one to use."""

    connection: Connection
    theirs: Hello
    dial: int  # the dialling side's count
    since: float
    _handshake: int = attrs.field(init=False)  # bytes that had been received when it began

    def __attrs_post_init__(self) -> None:
        self._handshake = self.connection.channel.bytes_received

    @property
    def heard(self) -> bool:
        """The other side has said something since the handshake. It does so as soon as it has taken us in."""
        return self.connection.channel.bytes_received > self._handshake

    @property
    def relayed(self) -> bool:
        return self.connection.path == "relayed"


class Links:
    """Keeps one connection for each peer, and tells watchers what happens to them.

    Args:
        own: Our own peer id.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._links: dict[PeerId, Link] = {}
        self.connections: dict[Connection, None] = {}
        """All of them, with retired ones, the oldest first."""
        self._watchers: set[trio.MemorySendChannel[PeerEvent]] = set()
        self._past_sent = 0  # on connections that are over
        self._past_received = 0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers that there is a connection to."""
        return tuple(self._links)

    def get(self, peer: PeerId) -> Link | None:
        """The connection to use."""
        return self._links.get(peer)

    def lanes(self, token: bytes) -> Lanes | None:
        """Those of the connection that is called by a token."""
        return next((one.lanes for one in self.connections if one.lanes.token == token), None)

    def direct(self) -> list[Link]:
        """The connections that go through nobody else."""
        return [link for link in self._links.values() if not link.relayed]

    def any_heard(self) -> bool:
        """Whether anybody has taken us in."""
        return any(link.heard for link in self._links.values())

    def admit(self, new: Link) -> None:
        """Decides between a new connection and the one that there is, both of the same instance of a peer.

        The one that is not used is retired.
        """
        peer = new.connection.peer
        old = self._links.get(peer)
        if old is None:
            self._links[peer] = new
            self._publish(PeerConnected(peer, new.connection.path))
        elif self._wins(new, old):
            self._links[peer] = new
            old.connection.retire()
            if old.connection.path != new.connection.path:
                self._publish(PathChanged(peer, new.connection.path))
        else:
            new.connection.retire()
        self._close_superfluous(peer)

    def ended(self, connection: Connection) -> None:
        """A connection can no longer be used."""
        link = self._links.get(connection.peer)
        if link is not None and link.connection is connection:
            del self._links[connection.peer]
            self._publish(PeerLost(connection.peer, str(connection.failure)))

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        self.connections.pop(connection, None)
        self._past_sent += _sent(connection)
        self._past_received += _received(connection)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent on all connections so far. Those sent through a relay are sent on the connection to it."""
        return self._past_sent + sum(map(_sent, self.connections))

    @property
    def bytes_received(self) -> int:
        """Bytes received on all connections so far."""
        return self._past_received + sum(map(_received, self.connections))

    def statistics(self, peer: PeerId) -> PeerStatistics | None:
        """The state of the connection to a peer, or None if there is none."""
        link = self._links.get(peer)
        if link is None:
            return None
        connection = link.connection
        return PeerStatistics(
            remote=connection.channel.remote,
            rtt=connection.rtt,
            bytes_sent=connection.bytes_sent,
            bytes_received=connection.bytes_received,
            carried=connection.carried,
            streams=connection.streams,
            seconds=trio.current_time() - link.since,
            path=connection.path,
        )

    def host_seen(self) -> str | None:
        """The host that most of those who were dialled see us at."""
        dialled = (link for link in self._links.values() if link.connection.initiator)
        seen = Counter(link.theirs.seen.host for link in dialled if link.theirs.seen is not None)
        return max(seen, key=seen.__getitem__) if seen else None

    @contextmanager
    def watch(self) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        """What happens to connections from now on."""
        send, receive = trio.open_memory_channel[PeerEvent](_MAX_EVENTS)
        self._watchers.add(send)
        try:
            with send, receive:
                yield receive
        finally:
            self._watchers.discard(send)

    def _publish(self, event: PeerEvent) -> None:
        for watcher in list(self._watchers):
            try:
                watcher.send_nowait(event)
            except trio.WouldBlock:
                watcher.close()
                self._watchers.discard(watcher)

    def _wins(self, new: Link, old: Link) -> bool:
        """Which of two connections to use. Both sides come to the same answer.

        One that goes through nobody else wins, unless it has gone silent: whoever comes over a relay all the same has
        noticed that it is dead. Of two simultaneous dials that of the lower peer id wins. Otherwise the
        newer one does: whoever dialled it had noticed that the old one was dead.
        """
        if new.relayed != old.relayed:
            return old.relayed or not old.connection.fresh
        if new.connection.initiator == old.connection.initiator:
            return new.dial > old.dial
        if new.since - old.since > _SETTLED:
            return True
        return new.connection.initiator == (self._own < new.connection.peer)

    def _close_superfluous(self, peer: PeerId) -> None:
        """Ends the oldest connections to a peer that has too many. One is in use, others fade away."""
        theirs = [other for other in self.connections if other.peer == peer and other.failure is None]
        retired = [other for other in theirs if other is not self._links[peer].connection]
        for connection in retired[: max(0, len(theirs) - _MAX_PER_PEER)]:
            connection.close("too many connections of the same peer")


def _sent(connection: Connection) -> int:
    return 0 if connection.path == "relayed" else connection.bytes_sent


def _received(connection: Connection) -> int:
    return 0 if connection.path == "relayed" else connection.bytes_received
