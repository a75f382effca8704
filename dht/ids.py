"""Points of the key space, their distance, and who can be reached at one.

Peer ids and keys are both SHA-256 hashes and share one space of 256 bits; the distance of two points is their exclusive
or, read as a number (Maymounkov and Mazières 2002). A peer id is already a hash of a key, so it is not hashed again.
"""

from __future__ import annotations

import hashlib
import ipaddress
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import attrs
import msgspec
from attrs.validators import max_len

from protocol.identity import PeerId
from protocol.transport import Address

if TYPE_CHECKING:
    import random

ID_BYTES = 32
ID_BITS = 8 * ID_BYTES
MAX_ADDRESSES = 4  # of one contact; enough for a LAN, a public IPv4, an IPv6 and a mapped one


@attrs.frozen
class Contact:
    """A peer and where it was last known to listen (at most `MAX_ADDRESSES` addresses)."""

    peer: PeerId
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = attrs.field(
        validator=max_len(MAX_ADDRESSES)
    )

    @property
    def groups(self) -> frozenset[str]:
        """The networks that its addresses are in, as `network_group` tells them apart."""
        return frozenset(group for address in self.addresses if (group := network_group(address.host)) is not None)


def distance(a: bytes, b: bytes) -> int:
    """Exclusive-or distance of two points."""
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


def common_prefix(a: bytes, b: bytes) -> int:
    """How many leading bits two points share: 0 to 256."""
    return ID_BITS - distance(a, b).bit_length()


def random_id(own: bytes, prefix: int, rng: random.Random) -> bytes:
    """A random point that shares exactly `prefix` (0 to 255) leading bits with `own`."""
    below = ID_BITS - 1 - prefix
    head = (int.from_bytes(own, "big") >> below) ^ 1
    return (head << below | rng.getrandbits(below)).to_bytes(ID_BYTES, "big")


def members_key(run_id: bytes) -> bytes:
    """The key under which the members of a run publish themselves."""
    return hashlib.sha256(b"shoal-members-v1" + run_id).digest()


@lru_cache(maxsize=4096)  # asked again and again for the same few hosts
def network_group(host: str) -> str | None:
    """The network that a host is counted under when many peers of one owner shall not crowd out the others.

    Returns:
        The /24 of an IPv4 address, the /48 of an IPv6 address, the last two labels of a name; None for loopback,
        link-local and private addresses, which only a swarm on one machine or in one LAN uses.
    """
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        name = ".".join(host.lower().rstrip(".").split(".")[-2:])
        return None if name == "localhost" else name
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback or ip.is_private or ip.is_link_local:
        return None
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))
