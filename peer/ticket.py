"""Tickets: all that a newcomer needs to take part in a run, as one short string.

    "shoal:" + base32(checksum || version || body)

The checksum is the first 4 bytes of SHA-256(version || body), so that typing errors are told from everything else. The
body is a canonical msgpack map: `r` run id, `b` bootstrap peers as [peer id, host, port], and where there is one, `k`
swarm key, `n` its number unless that is 0, and `e` expiry in Unix seconds. A ticket of a private run holds its swarm
key: it is a secret.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import attrs
import msgpack  # type: ignore[import-untyped]

from peer.text import duration, from_base32, printable, to_base32
from protocol.errors import AddressError, ShoalError
from protocol.identity import PeerId
from protocol.transport import Address

PREFIX: Final = "shoal:"
VERSION: Final = 1
MAX_TICKET: Final = 4096  # characters; fits eight bootstrap peers with the longest host names
MAX_BOOTSTRAP: Final = 8
SWARM_KEY_SIZE: Final = 32
CLOCK_TOLERANCE: Final = 60.0
"""Seconds for which a ticket is good after it has expired: clocks do not quite agree."""

_CHECKSUM_SIZE: Final = 4
_ALPHABET: Final = frozenset("abcdefghijklmnopqrstuvwxyz234567")


class TicketError(ShoalError):
    """A ticket is mistyped, incomplete, of another version, or not a ticket at all."""


class TicketExpired(TicketError):
    """A ticket was valid until a time that is over."""


def _bounded(ticket: Ticket, attribute: object, bootstrap: tuple[tuple[PeerId, Address], ...]) -> None:
    if not 1 <= len(bootstrap) <= MAX_BOOTSTRAP:
        raise ValueError(f"a ticket names 1 to {MAX_BOOTSTRAP} bootstrap peers, not {len(bootstrap)}")
    for _, address in bootstrap:
        if address.port == 0:
            raise ValueError(f"nobody can be reached at {printable(str(address))}")


def _sized(size: int) -> Any:  # noqa: ANN401 - attrs' validators are typed by their own plugin
    def check(ticket: Ticket, attribute: attrs.Attribute[bytes], value: bytes | None) -> None:
        if value is not None and len(value) != size:
            raise ValueError(f"{attribute.name} must be {size} bytes")

    return check


def _finite(ticket: Ticket, attribute: object, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError("the expiry must be a time")


def _countable(ticket: Ticket, attribute: object, value: int) -> None:
    if type(value) is not int or not 0 <= value < 2**32 or (value and ticket.swarm_key is None):
        raise ValueError("the number must be that of a key")


@attrs.frozen
class Ticket:
    """What a ticket says.

    Attributes:
        run_id: The 32-byte id of the run.
        bootstrap: 1 to 8 peers to ask first, with an address each.
        swarm_key: The 32-byte key of a private run, or None.
        key_number: How many keys the run has had before it.
        expires: Unix seconds; it is refused when `CLOCK_TOLERANCE` more have passed. None: never.
    """

    run_id: bytes = attrs.field(validator=_sized(32))
    bootstrap: tuple[tuple[PeerId, Address], ...] = attrs.field(validator=_bounded)
    swarm_key: bytes | None = attrs.field(default=None, validator=_sized(SWARM_KEY_SIZE), repr=False)
    key_number: int = attrs.field(default=0, validator=_countable, kw_only=True)
    expires: float | None = attrs.field(default=None, converter=attrs.converters.optional(float), validator=_finite)

    def encode(self) -> str:
        """The ticket as text, at most 4 KiB."""
        fields: dict[str, Any] = {
            "r": self.run_id,
            "b": [[bytes(peer), address.host, address.port] for peer, address in self.bootstrap],
        }
        if self.swarm_key is not None:
            fields["k"] = self.swarm_key
        if self.key_number:
            fields["n"] = self.key_number
        if self.expires is not None:
            fields["e"] = self.expires
        data = bytes([VERSION]) + msgpack.packb(fields, use_bin_type=True)
        return PREFIX + to_base32(_checksum(data) + data)

    def is_over(self, now: float) -> bool:
        """Whether it is refused at this time (Unix seconds)."""
        return self.expires is not None and now > self.expires + CLOCK_TOLERANCE

    @classmethod
    def parse(cls, text: str, now: float) -> Ticket:
        """Reads a ticket that somebody has typed or pasted: case and white space do not matter.

        Args:
            text: The ticket.
            now: Unix seconds, for the expiry.

        Raises:
            TicketError: It cannot be read; the message says why.
            TicketExpired: It can, but is over.
        """
        data = _unwrap(text)
        checksum, data = data[:_CHECKSUM_SIZE], data[_CHECKSUM_SIZE:]
        if checksum != _checksum(data):
            raise TicketError(
                "the ticket's checksum is wrong: characters are missing or mistyped",
                hint="copy the whole ticket, from shoal: to its end",
            )
        if data[:1] != bytes([VERSION]):
            raise TicketError(
                f"the ticket has format {data[0] if data else 'nothing'}, and this version of Shoal reads {VERSION}",
                hint="install the version of Shoal that the run uses",
            )
        ticket = _from_body(data[1:])
        if ticket.expires is not None and ticket.is_over(now):
            raise TicketExpired(
                f"the ticket has expired {duration(now - ticket.expires)} ago, by this machine's clock",
                hint="ask somebody in the run for a new one (`shoal ticket`), if the clock is right",
            )
        return ticket


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_SIZE]


def _unwrap(text: str) -> bytes:
    """The bytes in a ticket's text, checksum first."""
    if len(text) > 2 * MAX_TICKET:  # white space may be in it
        raise TicketError(f"that is too long for a ticket: more than {MAX_TICKET} characters")
    compact = "".join(text.split()).lower()
    if not compact:
        raise TicketError("the ticket is empty")
    if len(compact) > MAX_TICKET:
        raise TicketError(f"that is too long for a ticket: {len(compact)} characters, at most {MAX_TICKET}")
    if not compact.startswith(PREFIX):
        raise TicketError(
            f"that is not a ticket: it begins with {printable(compact, 8)!r}", hint=f"a ticket begins with {PREFIX}"
        )
    body = compact.removeprefix(PREFIX)
    for place, character in enumerate(body, start=len(PREFIX) + 1):
        if character not in _ALPHABET:
            raise TicketError(
                f"the ticket has {printable(character)!r} as its character {place}",
                hint="tickets consist of the letters a to z and the digits 2 to 7",
            )
    try:
        return from_base32(body)
    except ValueError as error:
        possible = len(body) % 8 in (0, 2, 4, 5, 7)  # base32 of whole bytes
        reason = "its last character is wrong or missing" if possible else "it is incomplete: its length is impossible"
        raise TicketError(f"the ticket is damaged: {reason}", hint="copy the whole ticket") from error


def _from_body(body: bytes) -> Ticket:
    """Only what `encode` writes is a ticket: one that encodes differently was not made by us."""
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=True)
        bootstrap = tuple((PeerId(peer), Address(host, port)) for peer, host, port in fields["b"])
        swarm_key, number = _bytes(fields.get("k")), fields.get("n", 0)
        ticket = Ticket(_bytes(fields["r"]), bootstrap, swarm_key, fields.get("e"), key_number=number)
        canonical = ticket.encode()
    except (ValueError, TypeError, KeyError, AttributeError, AddressError, msgpack.UnpackException) as error:
        raise TicketError(f"the ticket makes no sense: {_reason(error)}") from error
    if from_base32(canonical.removeprefix(PREFIX))[_CHECKSUM_SIZE + 1 :] != body:
        raise TicketError("the ticket makes no sense: it is not written as tickets are")
    return ticket


def _bytes(value: object) -> Any:  # noqa: ANN401 - narrows what msgpack returned
    if value is not None and not isinstance(value, bytes):
        raise TypeError("an id or key is not bytes")
    return value


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else printable(str(error), 100)
