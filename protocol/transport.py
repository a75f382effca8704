"""What connections stand on: addresses, and byte streams between them.

`tcp.TcpTransport` and `memory.MemoryNetwork` offer the same interface with the same errors, so everything above runs
over either.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Literal, Protocol, Self, runtime_checkable

import attrs

from protocol.errors import AddressError

Buffer = bytes | bytearray | memoryview
"""What can be sent; memoryviews must be of single bytes."""

Path = Literal["direct", "mapped", "punched", "relayed"]
"""How bytes get to a peer: one side was dialled, perhaps at a port that its router maps, or both dialled each other at
once, or a third peer passes them on."""

DIAL_TIMEOUT = 10.0
"""Seconds after which a dial that nobody answers fails."""

_MAX_HOST_LENGTH = 253  # RFC 1035: 255 octets on the wire
# Host names as RFC 1123 has them, and "_", which container names use.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")


@lru_cache(maxsize=1024)  # asked of each connection, again and again
def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _canonical_host(host: str) -> str:
    """The one spelling of a host: IP addresses as Python's ipaddress writes them, names in lower case."""
    if not isinstance(host, str):
        raise AddressError(f"a host is text, not {type(host).__name__}")
    if len(host) <= _MAX_HOST_LENGTH:
        if ":" in host or re.search(r"(?:^|\.)[0-9]+$", host):
            # It can only be an IP address: names have no colon, and none ends in a label of digits.
            try:
                return str(ipaddress.ip_address(host))
            except ValueError:
                pass
        elif _NAME.fullmatch(host):
            return host.lower()
    raise AddressError(f"not a host name or IP address: {host[:80]!r}")


def _check_port(_instance: Address, _attribute: attrs.Attribute[int], port: int) -> None:
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise AddressError(f"not a port (0 to 65535): {port!r}")


@attrs.frozen(order=True)
class Address:
    """Where a peer listens.

    Raises:
        AddressError: host or port cannot be one.
    """

    host: str = attrs.field(converter=_canonical_host)
    """A name, an IPv4 address, or an IPv6 address without brackets."""

    port: int = attrs.field(validator=_check_port)
    """0 to 65535; 0 only makes sense for listening, where it asks for any free port."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "host:port" or "[IPv6 address]:port".

        Raises:
            AddressError: it is neither.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not _PORT.fullmatch(port):
            raise AddressError(
                f"not HOST:PORT: {text[:300]!r}", hint="For example 192.0.2.7:7070 or [2001:db8::7]:7070."
            )
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if ":" not in host:
                raise AddressError(f"only IPv6 addresses go in brackets: {text[:300]!r}")
        elif ":" in host:
            raise AddressError(
                f"an IPv6 address needs brackets: {text[:300]!r}", hint="For example [2001:db8::7]:7070."
            )
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether it is an address of this very machine that no line leads to."""
        return _is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ByteStream(Protocol):
    """A connection that carries bytes in order, both ways.

    At most one task sends and at most one receives at a time.
    """

    @property
    def remote(self) -> Address:
        """The other side's address; for an accepted connection not one that can be dialled."""

    async def send(self, data: Buffer) -> None:
        """Send all of it. If cancelled, any part of it may have been sent.

        Raises:
            PeerGone: the connection is broken or closed.
        """

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into a non-empty buffer and return how many; 0 means that no more will come.

        Raises:
            PeerGone: the connection is broken or closed.
        """
        ...

    async def aclose(self) -> None:
        """Close the connection; what was sent still arrives. Does not block, may be called again."""


@attrs.frozen
class LineState:
    """What a connection's end knows about the way to the other."""

    rtt: float
    """Smoothed round-trip time in seconds."""

    acked: int
    """Bytes that have arrived there, since the connection began."""

    shortest: float | None = None
    """The shortest round-trip time lately, in seconds; None where the system does not tell."""

    sent: int | None = None
    """Segments sent, those sent again included; None where the system does not tell."""

    resent: int = 0
    """Those of them that were sent again."""

    rate: float | None = None
    """Bytes per second at which data arrived lately while there was something to send all the time, or more than that
    at another time since; None where the system does not tell."""

    limited: bool = False
    """`rate` is of a time in which there was not always something to send: the way can take more."""

    sturdy: bool = False
    """Its congestion control does not take every lost packet for a sign of congestion."""


@runtime_checkable
class PacedStream(ByteStream, Protocol):
    """A byte stream that can send at a given rate."""

    def measure(self) -> LineState | None:
        """What is known about the path; None where the system does not tell."""

    def pace(self, rate: float, unsent: int) -> None:
        """Send at most `rate` bytes per second (infinity for no limit); about `unsent` bytes may wait for it."""


class Listener(Protocol):
    """Takes connections in."""

    @property
    def address(self) -> Address:
        """Where it listens, with the port that was chosen if 0 was asked for."""

    async def accept(self) -> ByteStream:
        """The next connection.

        Raises:
            AddressError: the listener was closed.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening. Does not block, may be called again. Connections that were accepted live on."""


class Transport(Protocol):
    """A way to reach others."""

    async def dial(self, address: Address, *, local_port: int | None = None) -> ByteStream:
        """Connect.

        Args:
            address: Where to.
            local_port: The port to connect from, which this host may be listening on; None for any free one.

        Raises:
            PeerUnreachable: nobody listens there, no answer came within `DIAL_TIMEOUT`, or we cannot connect from
                that port.
        """
        ...

    async def listen(self, address: Address) -> Listener:
        """Listen on an address of this host.

        Raises:
            AddressError: the address is in use, or not ours.
        """
        ...
