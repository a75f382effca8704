"""Asking a gateway for a port: the messages of NAT-PMP (RFC 6886) and of its successor PCP (RFC 6887), without IO.

Both are UDP to port 5351 of the gateway, request and answer. What cannot be an answer to the request at hand is a
`ProtocolError`: a stray datagram, to be ignored. An answer that says no is a `MappingFailed`. Only TCP is mapped.

What differs: NAT-PMP has one message for the external address and another for a port. PCP has both in one, names the
client's own address (so that a NAT in between is noticed), and a nonce, without which nobody can change the mapping.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import Final

import attrs

from protocol.errors import MappingFailed, ProtocolError
from protocol.transport import Address

PORT: Final = 5351
NONCE_SIZE: Final = 12

_ANSWER = 0x80  # the bit that tells answers from requests, in the second byte
_TCP = 6  # IANA's number
_FIRST_WAIT = 0.25  # seconds; RFC 6886, section 3.1. PCP would have us wait 3 s, but the gateway is next door.
_CLOCK_SLACK = 2.0  # seconds; RFC 6886, section 3.6

_NATPMP_ADDRESS, _NATPMP_MAP_TCP = 0, 2
_NATPMP_HEADER = struct.Struct(">BBHI")  # version, opcode, result, epoch
_NATPMP_MAP_REQUEST = struct.Struct(">BBxxHHI")  # version, opcode, internal port, external port, lifetime
_NATPMP_MAP_ANSWER = struct.Struct(">HHI")  # internal port, external port, lifetime
_NATPMP_REFUSALS = {
    1: "it does not know this version",
    2: "port mapping is switched off, or not for this machine",
    3: "it has no external address itself",
    4: "it has no room for another mapping",
    5: "it cannot map ports",
}

_PCP_VERSION = 2
_PCP_MAP = 1
_PCP_REQUEST = struct.Struct(">BBxxI16s")  # version, opcode, lifetime, the client's address
_PCP_ANSWER = struct.Struct(">BBxBII12x")  # version, opcode, result, lifetime, epoch
_PCP_MAPPING = struct.Struct(">12sBxxxHH16s")  # nonce, transport, internal port, external port, external address
_PCP_LARGEST = 1100  # RFC 6887, section 7
_PCP_REFUSALS = {
    1: "it does not know this version",
    2: "port mapping is switched off, or not for this machine, or another program holds the port",
    3: "it finds the request malformed",
    4: "it cannot map ports",
    5: "it lacks an option",
    6: "it finds an option malformed",
    7: "it has no external address itself",
    8: "it has no room for another mapping",
    9: "it does not map TCP",
    10: "this machine has all the mappings it may have",
    11: "the external port is taken",
    12: "there is another NAT between this machine and the gateway",
    13: "it cannot limit who connects",
}

_NO_ADDRESS = "0.0.0.0"
# What only another NAT gives to a gateway: RFC 1918, RFC 6598 (carrier-grade NAT), RFC 6333 (DS-Lite), link-local.
_INSIDE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "192.0.0.0/24", "169.254.0.0/16")
)


@attrs.frozen
class Grant:
    """What a gateway says that it mapped. It may say nonsense: see `check`."""

    external: Address
    """Where others connect to; port 0 if nothing was mapped."""
    lifetime: float
    """Seconds until the gateway forgets the mapping unless it is renewed; 0 if nothing was mapped."""
    epoch: int | None = None
    """Seconds since the gateway last lost its mappings, by its own count; None if it does not say."""

    def check(self) -> None:
        """Whether there is a mapping, to an address that a machine can have.

        Raises:
            MappingFailed: no.
        """
        host = ipaddress.ip_address(self.external.host)
        if not self.external.port or not self.lifetime > 0:
            raise MappingFailed("the gateway granted a mapping that is none")
        if host.is_unspecified or host.is_loopback or host.is_multicast or str(host) == "255.255.255.255":
            raise MappingFailed("the gateway has no external address", hint="Is it connected to the internet?")


@attrs.frozen
class Epoch:
    """A gateway's count of seconds since it lost its mappings, and when it was heard."""

    seconds: int
    heard: float
    """Our clock's time, in seconds."""

    def restarted(self, later: Epoch) -> bool:
        """Whether the gateway lost its mappings in between. Clocks may differ by an eighth (RFC 6886, section 3.6)."""
        return later.seconds < self.seconds + (later.heard - self.heard) * 7 / 8 - _CLOCK_SLACK


def is_inside(host: str) -> bool:
    """Whether an IP address is one that the internet does not route: private, shared by a carrier, or link-local."""
    address = ipaddress.ip_address(host)
    return any(address in network for network in _INSIDE)


def retransmissions(tries: int) -> tuple[float, ...]:
    """How many seconds to wait for an answer after each time that a request is sent: each twice as long."""
    return tuple(_FIRST_WAIT * 2**n for n in range(tries))


def natpmp_address_request() -> bytes:
    """Asks for the gateway's external address."""
    return bytes((0, _NATPMP_ADDRESS))


def read_natpmp_address(data: bytes) -> tuple[str, int]:
    """The external IPv4 address and the epoch.

    Raises:
        ProtocolError: not an answer to this request.
        MappingFailed: the gateway refuses.
    """
    epoch, rest = _read_natpmp(data, _NATPMP_ADDRESS)
    if len(rest) != 4:
        raise ProtocolError("a NAT-PMP address of the wrong size")
    return str(ipaddress.IPv4Address(rest)), epoch


def natpmp_map_request(internal_port: int, external_port: int, lifetime: int) -> bytes:
    """Asks to map a TCP port, or to renew the mapping.

    Args:
        internal_port: Where this machine listens.
        external_port: The one wished for; the gateway may choose another. 0 in order to remove.
        lifetime: In seconds; 0 removes the mapping.
    """
    return _NATPMP_MAP_REQUEST.pack(0, _NATPMP_MAP_TCP, internal_port, external_port, lifetime)


def read_natpmp_map(data: bytes, internal_port: int, host: str = _NO_ADDRESS) -> Grant:
    """What was mapped; the external address must be known from `read_natpmp_address`.

    Raises:
        ProtocolError: not an answer to this request.
        MappingFailed: the gateway refuses.
    """
    epoch, rest = _read_natpmp(data, _NATPMP_MAP_TCP)
    if len(rest) != _NATPMP_MAP_ANSWER.size:
        raise ProtocolError("a NAT-PMP mapping of the wrong size")
    port, external_port, lifetime = _NATPMP_MAP_ANSWER.unpack(rest)
    if port != internal_port:
        raise ProtocolError("a NAT-PMP answer about another port")
    return Grant(Address(host, external_port), lifetime, epoch)


def _read_natpmp(data: bytes, opcode: int) -> tuple[int, bytes]:
    if len(data) < _NATPMP_HEADER.size:
        raise ProtocolError("too short for NAT-PMP")
    version, kind, result, epoch = _NATPMP_HEADER.unpack_from(data)
    if version != 0 or kind != _ANSWER | opcode:
        raise ProtocolError("not the NAT-PMP answer that is waited for")
    if result:
        raise _refusal("NAT-PMP", result, _NATPMP_REFUSALS)
    return epoch, data[_NATPMP_HEADER.size :]


def pcp_map_request(client: str, nonce: bytes, internal_port: int, external: Address | None, lifetime: int) -> bytes:
    """Asks to map a TCP port, or to renew the mapping.

    Args:
        client: This machine's address on the way to the gateway.
        nonce: 12 secret random bytes, the same for all requests about this mapping.
        internal_port: Where this machine listens.
        external: What is wished for; the gateway may choose another. None in order to remove.
        lifetime: In seconds; 0 removes the mapping.
    """
    external = external or Address(_NO_ADDRESS, 0)
    return _PCP_REQUEST.pack(_PCP_VERSION, _PCP_MAP, lifetime, _to_ipv6(client)) + _PCP_MAPPING.pack(
        nonce, _TCP, internal_port, external.port, _to_ipv6(external.host)
    )


def read_pcp_map(data: bytes, nonce: bytes, internal_port: int) -> Grant:
    """What was mapped.

    Raises:
        ProtocolError: not an answer to this request.
        MappingFailed: the gateway refuses, or speaks another version (as one does that knows only NAT-PMP).
    """
    if len(data) < 4 or not data[1] & _ANSWER:
        raise ProtocolError("not a PCP answer")
    if data[0] != _PCP_VERSION and data[3] == 1:
        # Every version has this result in its fourth byte (RFC 6887, section 9 and appendix A).
        raise _refusal("PCP", 1, _PCP_REFUSALS)
    if not _PCP_ANSWER.size <= len(data) <= _PCP_LARGEST or len(data) % 4:
        raise ProtocolError("a PCP answer of the wrong size")
    version, kind, result, lifetime, epoch = _PCP_ANSWER.unpack_from(data)
    if version != _PCP_VERSION or kind != _ANSWER | _PCP_MAP:
        raise ProtocolError("not the PCP answer that is waited for")
    if len(data) < _PCP_ANSWER.size + _PCP_MAPPING.size:
        if result:
            raise _refusal("PCP", result, _PCP_REFUSALS)
        raise ProtocolError("a PCP answer without its mapping")
    of, transport, port, external_port, external = _PCP_MAPPING.unpack_from(data, _PCP_ANSWER.size)
    if (of, transport, port) != (nonce, _TCP, internal_port):
        raise ProtocolError("a PCP answer about another mapping")
    if result:
        raise _refusal("PCP", result, _PCP_REFUSALS)
    address = ipaddress.IPv6Address(external)
    return Grant(Address(str(address.ipv4_mapped or address), external_port), lifetime, epoch)


def _to_ipv6(host: str) -> bytes:
    """An address as PCP writes it: 16 bytes, IPv4 as ::ffff:a.b.c.d."""
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff" * 2 + address.packed


def _refusal(method: str, result: int, reasons: dict[int, str]) -> MappingFailed:
    hint = "Look for port mapping, NAT-PMP or UPnP in the router's settings." if result == 2 else None
    return MappingFailed(f"the gateway refuses {method}: {reasons.get(result, f'result {result}')}", hint=hint)
