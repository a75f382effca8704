"""Byte streams over TCP."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from protocol.errors import AddressError, PeerGone, PeerUnreachable
from protocol.forks import not_for_children
from protocol.transport import DIAL_TIMEOUT, Address, Buffer, LineState

_BACKLOG = 1024  # a flood that we turn away quickly must not make the system turn away others first

# Options, some of which exist on some systems only. A peer whose host vanished is noticed by the heartbeat of the
# connection, which knows how long round trips are. The kernel is to notice it too, but not before: its user timeout
# (milliseconds) also ends what keepalive begins after 5 s. No more than the low water mark waits in the kernel besides
# what is on the wire: what is written next should not queue behind megabytes. `TcpStream.pace` changes it.
_OPTIONS = (
    ("SOL_SOCKET", "SO_KEEPALIVE", 1),
    ("IPPROTO_TCP", "TCP_NODELAY", 1),
    ("IPPROTO_TCP", "TCP_NOTSENT_LOWAT", 131_072),
    ("IPPROTO_TCP", "TCP_USER_TIMEOUT", 40_000),
    ("IPPROTO_TCP", "TCP_KEEPIDLE", 5),
    ("IPPROTO_TCP", "TCP_KEEPINTVL", 2),
    ("IPPROTO_TCP", "TCP_KEEPCNT", 18),
)

# accept() fails with these when the system is short of something; it helps to wait.
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE = 0.1


_LISTEN_HINTS = {
    errno.EADDRINUSE: "Choose another port, or 0 for any that is free.",
    errno.EADDRNOTAVAIL: "This machine does not have that address: listen on 0.0.0.0, and announce what others use.",
    errno.EACCES: "Choose a port from 1024 on, or 0 for any that is free.",
}

# Linux only; the socket module lacks the first. In struct tcp_info: tcpi_rtt in microseconds, and tcpi_bytes_acked;
# since Linux 4.6 also tcpi_total_retrans, tcpi_min_rtt in microseconds and tcpi_data_segs_out; since Linux 4.9 also
# tcpi_delivery_rate: over a round trip, and the last one in which we never ran out of data, unless it was higher since.
# Before it was there, the bit that says that it was higher since was always 0.
_SO_MAX_PACING_RATE = 47
_INFO_SIZE = 128
_INFO_RTT = struct.Struct("=68xI")
_INFO_ACKED = struct.Struct("=120xQ")
_MORE_SIZE = 160
_INFO_MORE = struct.Struct("=100xI44xI4xI")
_ALL_SIZE = 168
_LIMITED_AT, _LIMITED = 7, 1 if sys.byteorder == "little" else 0x80  # tcpi_delivery_rate_app_limited
_INFO_RATE = struct.Struct("=160xQ")
_NO_LIMIT = 2**64 - 1

_UNPACED, _STURDY = "cubic", "bbr"

_TURN = 1 << 21  # bytes that a stream moves before others get their turn, if it never has to wait
_LEAST = 1 << 14  # bytes that every call counts for


class TcpTransport:
    """Dials and listens over TCP, on IPv4 and IPv6. Implements `transport.Transport`.

    Args:
        congestion: The congestion control to use where the system has it and lets us. BBR does not take every lost
            packet for a sign of congestion: with 0.5 % of them lost, cubic reaches a tenth of its rate. None leaves the
            choice to the system.
    """

    def __init__(self, *, congestion: str | None = "bbr") -> None:
        self._congestion = congestion

    async def dial(self, address: Address, *, local_port: int | None = None) -> TcpStream:
        """See `Transport.dial`. Tries all addresses that a name has, as RFC 8305 ("happy eyeballs") says.

        With a local port, it tries the first one only, and does what TCP calls a simultaneous open when the other side
        dials us at the same time from the port that we dial.
        """
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                if local_port is not None or _is_loopback_address(address):
                    sock = await _connect(address, local_port, _fitting(self._congestion, address))
                else:
                    sock = (await trio.open_tcp_stream(address.host, address.port)).socket
            remote = _peer_of(sock)
        except trio.TooSlowError:
            raise PeerUnreachable(f"{address} did not answer within {DIAL_TIMEOUT:.0f} s") from None
        except OSError as error:
            raise PeerUnreachable(f"cannot connect to {address}: {_reason(error)}") from error
        set_options(sock, _fitting(self._congestion, remote))
        return TcpStream(sock, address)

    async def listen(self, address: Address) -> TcpListener:
        """See `Transport.listen`. The host "::" takes IPv4 connections too, where the system can do both."""
        try:
            return await _listen(address, self._congestion)
        except OSError as error:
            hint = _LISTEN_HINTS.get(error.errno or 0)
            raise AddressError(f"cannot listen on {address}: {_reason(error)}", hint=hint) from error


class TcpListener:
    """Implements `transport.Listener`."""

    def __init__(self, sock: trio.socket.SocketType, congestion: str | None = None) -> None:
        self._socket = sock
        not_for_children(sock)
        self._congestion = congestion
        self._address = _address_of(sock.getsockname())

    @property
    def address(self) -> Address:
        return self._address

    async def accept(self) -> TcpStream:
        while True:
            try:
                accepted, name = await self._socket.accept()
            except trio.ClosedResourceError:
                raise AddressError(f"no longer listening on {self.address}") from None
            except OSError as error:
                if self._socket.fileno() < 0:
                    raise AddressError(f"no longer listening on {self.address}") from error
                # Everything else concerns one connection, which died before we could take it.
                await trio.sleep(_SHORTAGE_PAUSE if error.errno in _SHORTAGE else 0)
            else:
                remote = _address_of(name)
                set_options(accepted, _fitting(self._congestion, remote))
                return TcpStream(accepted, remote)

    async def aclose(self) -> None:
        self._socket.close()
        await trio.lowlevel.checkpoint()


class TcpStream:
    """Implements `transport.ByteStream`.

    Args:
        sock: The connection. Its file descriptor is ours from now on.
        remote: The other end.
    """

    def __init__(self, sock: trio.socket.SocketType, remote: Address) -> None:
        # trio's own sockets let others run after every call, which costs more than moving 100 KiB.
        self._socket = socket.socket(fileno=sock.detach())
        self._socket.setblocking(False)
        not_for_children(self._socket)
        self._remote = remote
        self._moved = 0  # bytes since others had their turn
        self._sturdy = _congestion_of(self._socket) == _STURDY

    @property
    def remote(self) -> Address:
        return self._remote

    async def send(self, data: Buffer) -> None:
        rest = memoryview(data)
        await self._take_turn()
        try:
            while rest:
                try:
                    count = self._socket.send(rest)
                except (BlockingIOError, InterruptedError):
                    await self._wait(trio.lowlevel.wait_writable)
                else:
                    rest = rest[count:]
                    self._moved += max(count, _LEAST)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._gone(error) from error

    async def receive_into(self, buffer: memoryview) -> int:
        await self._take_turn()
        try:
            while True:
                try:
                    count = self._socket.recv_into(buffer)
                except (BlockingIOError, InterruptedError):
                    await self._wait(trio.lowlevel.wait_readable)
                else:
                    self._moved += max(count, _LEAST)
                    return count
        except (OSError, trio.ClosedResourceError) as error:
            raise self._gone(error) from error

    async def _take_turn(self) -> None:
        if self._moved < _TURN:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._moved = 0
            await trio.lowlevel.checkpoint()

    async def _wait(self, until_ready: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._moved = 0
        await until_ready(self._socket)

    def measure(self) -> LineState | None:
        if sys.platform != "linux":
            return None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ALL_SIZE)
        except OSError:
            return None
        if len(info) < _INFO_SIZE:  # Linux before 4.1
            return None
        (rtt,), (acked,) = _INFO_RTT.unpack_from(info), _INFO_ACKED.unpack_from(info)
        if len(info) < _MORE_SIZE:
            return LineState(rtt / 1e6, acked)
        resent, shortest, sent = _INFO_MORE.unpack_from(info)
        (rate,) = _INFO_RATE.unpack_from(info) if len(info) >= _ALL_SIZE else (0,)
        limited = bool(info[_LIMITED_AT] & _LIMITED)
        return LineState(rtt / 1e6, acked, shortest / 1e6, sent, resent, rate or None, limited, self._sturdy)

    def pace(self, rate: float, unsent: int) -> None:
        if sys.platform != "linux":
            return
        limit = _NO_LIMIT if rate == math.inf else max(1, int(rate))
        # Before Linux 4.20 a rate has 32 bits. A connection that is dead refuses options, and sending will say so.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, limit.to_bytes(8, sys.byteorder))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()

    def _gone(self, error: OSError | trio.ClosedResourceError) -> PeerGone:
        if self._socket.fileno() < 0:
            return PeerGone(f"the connection to {self.remote} was closed on our side")
        assert isinstance(error, OSError)
        return PeerGone(f"the connection to {self.remote} broke: {_reason(error)}")


async def _listen(address: Address, congestion: str | None) -> TcpListener:
    infos = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, name = infos[0]
    sock = trio.socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two listeners share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        await sock.bind(name)
        _set_congestion(sock, None if congestion is None else _UNPACED)  # connections begin with it, see `_connect`
        # After binding: another listener on the port is still an error, and only our own dials share it.
        _share_port(sock)
        sock.listen(_BACKLOG)
        return TcpListener(sock, congestion)
    except BaseException:
        sock.close()
        raise


async def _connect(address: Address, port: int | None, congestion: str | None) -> trio.socket.SocketType:
    """Connects from a port, or from any. Sets congestion control before: what has begun with BBR stays paced."""
    infos = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, name = infos[0]
    sock = trio.socket.socket(family, kind, protocol)
    try:
        _set_congestion(sock, congestion)
        if port is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _share_port(sock)
            await sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        await sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def _share_port(sock: trio.socket.SocketType) -> None:
    """Lets several sockets of ours have one local port, where the system can do that."""
    if hasattr(socket, "SO_REUSEPORT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def set_options(sock: trio.socket.SocketType, congestion: str | None = None) -> None:
    """Sets what we want of a TCP connection, as far as the system has it; see `TcpTransport`."""
    for level, name, value in _OPTIONS:
        if hasattr(socket, name):
            # A connection that is already dead refuses options; sending on it will say so.
            with contextlib.suppress(OSError):
                sock.setsockopt(getattr(socket, level), getattr(socket, name), value)
    _set_congestion(sock, congestion)


def _set_congestion(sock: trio.socket.SocketType, congestion: str | None) -> None:
    if congestion is not None and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _congestion_of(sock: socket.socket) -> str:
    """The congestion control of a connection; empty where the system does not tell."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    except OSError:
        return ""


def _fitting(congestion: str | None, remote: Address) -> str | None:
    """Within one machine nothing is lost, and BBR's timers only cost time: a tenth of all that a transfer takes."""
    return _UNPACED if congestion is not None and remote.is_loopback else congestion


def _is_loopback_address(address: Address) -> bool:
    """Not by a name, which may stand for several addresses."""
    return address.is_loopback and address.host != "localhost"


def _peer_of(sock: trio.socket.SocketType) -> Address:
    """The other end's address; closes the socket if there is none any more: it was reset as soon as it was there."""
    try:
        return _address_of(sock.getpeername())
    except OSError:
        sock.close()
        raise


def _address_of(name: Any) -> Address:  # noqa: ANN401 - the socket module's own type
    """The address in a socket name; IPv4 connections to an IPv6 socket count as IPv4."""
    host, port = name[:2]
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return Address(str(mapped or address), port)


def _reason(error: OSError) -> str:
    """The reason in words. When several addresses were tried, trio has the first failure among the causes."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if error.strerror is None and isinstance(cause, OSError):
        error = cause
    return error.strerror or str(error)
