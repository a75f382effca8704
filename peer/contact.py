"""A peer and where to find it, as one word: PEERID@HOST:PORT."""

from __future__ import annotations

from protocol.errors import AddressError
from protocol.identity import PeerId
from protocol.transport import Address

Contact = tuple[PeerId, Address]


def parse_contact(text: str) -> Contact:
    """Reads PEERID@HOST:PORT.

    Raises:
        AddressError: It is not that, or the port is 0.
    """
    peer, at, address = text.strip().partition("@")
    hint = "It is what `shoal serve` prints: a peer's 52 characters, @, and where it listens."
    if not at:
        raise AddressError(f"not PEERID@HOST:PORT: {text[:300]!r}", hint=hint)
    try:
        contact = PeerId.parse(peer), Address.parse(address)
    except ValueError as error:
        raise AddressError(f"not a peer id: {peer[:100]!r}", hint=hint) from error
    if contact[1].port == 0:
        raise AddressError(f"nobody can be reached at {address}", hint=hint)
    return contact


def named(peer: PeerId, address: Address) -> str:
    """The inverse of `parse_contact`."""
    return f"{peer}@{address}"
