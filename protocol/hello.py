"""What the two sides of a new connection say of themselves, and of each other, in the handshake."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.transport import Address
from protocol.wire import message


@message("shoal.hello")
class Hello:
    """What each side says of itself in the handshake."""

    instance: Annotated[bytes, Meta(min_length=8, max_length=8)]
    """Random, new whenever the peer starts: tells a peer that came back from one that never left."""
    dial: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Counts the connections that this side dialled."""
    port: Annotated[int, Meta(ge=0, le=65535)]
    """Where it listens, at the address it is seen with; 0 if it does not."""
    address: Address | None = None
    """Where others are to connect to, as far as it knows."""
    local: Address | None = None
    """Where it listens on its own network, for those behind the same router."""
    seen: Address | None = None
    """Where it sees the other side: where that connects from or, if this side dialled, the address that it dialled.
    Nil if there is a relay in between."""
    relays: bool = False
    """Whether it passes on bytes for others."""
    probe: bool = False
    """Whether the connection only serves to find out something about the network, and is over after the handshake."""
    mapped: bool = False
    """Whether `address` is a port that its router maps to it."""

    def places(self, host: str | None, ours: str | None) -> tuple[Address, ...]:
        """Where it says that it listens.

        Args:
            host: Where it connected from, if it has dialled us.
            ours: The host that others see us at.
        """
        places = [] if self.address is None else [self.address]
        if self.port and host is not None:
            places.append(Address(host, self.port))
        if self.local and self.address and self.address.host == ours:  # behind the same router
            places.append(self.local)
        return tuple(dict.fromkeys(places))
