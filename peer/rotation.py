"""Rotations of a private run's swarm key: what the founder signs, and what a home keeps of it.

`shoal rotate-key` leaves an order in the founder's home, and the founder's daemon carries it out: see `peer.keys`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Final, Self

import attrs
import msgspec
from msgspec import Meta

from peer.home import Home, HomeError, write_atomically
from protocol import wire
from protocol.errors import ProtocolError, SettingsError
from protocol.identity import SIGNATURE_SIZE, Identity, PeerId, verify
from protocol.keyring import KEY_SIZE, Keyring
from protocol.wire import message

DOMAIN: Final = "swarm-key-v1"
MAX_EXCLUDED: Final = 64
_MAX_FILE: Final = 1 << 20

Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
KeyNumber = Annotated[int, Meta(ge=1, le=2**32 - 1)]


@message("run.key")
class KeyRotation:
    """The founder's word that a private run has another swarm key from now on. It is secret, as the key is in it."""

    run: Bytes32
    number: KeyNumber
    """Grows with each rotation; the key that a run is founded with has number 0."""
    key: Bytes32 = attrs.field(repr=False)
    excluded: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_EXCLUDED)]
    """Who is no member any more and must not be given the key."""
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_SIZE, max_length=SIGNATURE_SIZE)]

    @classmethod
    def sign(cls, founder: Identity, run: bytes, number: int, key: bytes, excluded: Iterable[PeerId] = ()) -> Self:
        """A rotation that the run's members will follow, if `founder` is who founded it."""
        names = tuple(sorted(set(excluded)))
        return cls(run, number, key, names, founder.sign(DOMAIN, *_signed(run, number, key, names)))

    def is_by(self, founder: bytes) -> bool:
        """Whether the holder of this public key has signed it."""
        signed = _signed(self.run, self.number, self.key, self.excluded)
        return verify(founder, self.signature, DOMAIN, *signed)


@message("run.key.taken")
class KeyTaken:
    """The answer to a `KeyRotation`: the number of the newest key that the answering peer has now."""

    number: Annotated[int, Meta(ge=0, le=2**32 - 1)]


@attrs.frozen
class Stored:
    """The newest rotation that a home knows of.

    Attributes:
        rotation: What the founder signed.
        older: The key before it, as long as that is still good.
        recipients: Who was here when it came, and may be given the new key; None if that is not settled yet.
        until: When the key before it stops being good at the latest, in Unix seconds; None if that is not known.
    """

    rotation: KeyRotation
    older: bytes | None = attrs.field(default=None, repr=False)
    recipients: frozenset[PeerId] | None = None
    until: float | None = None


@attrs.frozen
class _File:
    """`Stored` as JSON: bytes are in base64."""

    rotation: bytes
    older: bytes | None
    recipients: tuple[bytes, ...] | None
    until: float | None = None


def open_keyring(home: Home, run: bytes, key: bytes, number: int) -> Keyring:
    """The keys to begin with: those that the home has stored, unless those of the ticket are newer.

    Args:
        home: Ours.
        run: The run's id.
        key: The swarm key in the ticket, or that with which the run was founded here.
        number: Its number.

    Raises:
        HomeError: What the home has stored is damaged.
    """
    stored = read_stored(home, run)
    if stored is None or stored.rotation.number <= number:
        return Keyring(key, number)
    return Keyring(stored.rotation.key, stored.rotation.number, stored.older)


def read_stored(home: Home, run: bytes) -> Stored | None:
    """What this home knows of rotations of this run.

    Raises:
        HomeError: The file is damaged.
    """
    data = _read(home.rotated)
    if data is None:
        return None
    try:
        file = msgspec.json.decode(data, type=_File)
        rotation = wire.decode(file.rotation, [KeyRotation])
        if file.older is not None and len(file.older) != KEY_SIZE:
            raise ValueError("the older key has another length")
        recipients = None if file.recipients is None else frozenset(map(PeerId, file.recipients))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, ProtocolError) as error:
        raise _damaged(home.rotated) from error
    return Stored(rotation, file.older, recipients, file.until) if rotation.run == run else None


def write_stored(home: Home, stored: Stored) -> None:
    """Replaces what the home knows.

    Raises:
        OSError: It cannot be written.
    """
    recipients = None if stored.recipients is None else tuple(bytes(peer) for peer in sorted(stored.recipients))
    file = _File(wire.encode(stored.rotation), stored.older, recipients, stored.until)
    write_atomically(home.rotated, msgspec.json.encode(file))


def read_order(home: Home, run: bytes) -> KeyRotation | None:
    """The rotation of this run that was ordered last in this home, carried out or not.

    Raises:
        HomeError: The file is damaged.
    """
    data = _read(home.rotation)
    if data is None:
        return None
    try:
        rotation = wire.decode(data, [KeyRotation])
    except ProtocolError as error:
        raise _damaged(home.rotation) from error
    return rotation if rotation.run == run else None


def order_rotation(home: Home, run: bytes, excluded: Collection[PeerId] = ()) -> KeyRotation:
    """Orders the founder's daemon to rotate the key, now or when it is started next.

    A rotation that excludes nobody admits again who was excluded; one that excludes others adds to a rotation that is
    still under way. Who is excluded by an order that nobody has carried out stays excluded: they are still members.

    Args:
        home: The founder's.
        run: The run's id.
        excluded: Who is not to have the new key.

    Raises:
        HomeError: A file of the home is damaged or cannot be written.
        SettingsError: More than `MAX_EXCLUDED` peers are excluded.
    """
    stored, ordered = read_stored(home, run), read_order(home, run)
    number = max(stored.rotation.number if stored else 0, ordered.number if ordered else 0)
    names, more = set(excluded), bool(excluded)
    if ordered is not None and (stored is None or stored.rotation.number < ordered.number):
        names |= set(ordered.excluded)
    if more and stored is not None and stored.older is not None:
        names |= set(stored.rotation.excluded)
    if len(names) > MAX_EXCLUDED:
        raise SettingsError(f"at most {MAX_EXCLUDED} peers can be excluded at a time, and these are {len(names)}")
    rotation = KeyRotation.sign(home.identity, run, number + 1, secrets.token_bytes(KEY_SIZE), names)
    try:
        write_atomically(home.rotation, wire.encode(rotation))
    except OSError as error:
        raise HomeError(f"{home.rotation} cannot be written: {error.strerror}") from error
    return rotation


def _signed(run: bytes, number: int, key: bytes, excluded: tuple[PeerId, ...]) -> tuple[bytes, ...]:
    return (run, number.to_bytes(8, "big"), key, *excluded)


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HomeError(f"{path} cannot be read: {error.strerror}") from error


def _damaged(path: Path) -> HomeError:
    return HomeError(f"{path} is damaged", hint="move it away; join with a fresh ticket, or rotate the key once more")
