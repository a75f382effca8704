"""Signed records: what the DHT stores.

A record is one msgpack array, encoded in exactly one way:

    [version, key (32), public key (32), sequence, ttl, value (≤ 4096), signature (64)]

The signature covers length-prefixed fields that are put together by hand, not the msgpack bytes, so no two readings of
the same bytes can both be signed. The signer's peer id is the hash of the public key: one signer owns one record under
a key, and a key holds one record per signer. A higher sequence replaces a lower one, whatever time it is anywhere:
records carry no wall-clock time, only a time to live. An empty value is a tombstone: it withdraws what came before it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import attrs
import msgpack  # type: ignore[import-untyped]
from attrs.validators import and_, ge, instance_of, le, max_len, min_len

from dht.ids import ID_BYTES
from protocol.errors import ProtocolError
from protocol.identity import Identity, PeerId, verify

VERSION = 1
DOMAIN = "dht-record-v1"
MAX_VALUE = 4096
MAX_RECORD = MAX_VALUE + 160  # the other fields with their msgpack headers take at most 157 bytes
MAX_SEQUENCE = 2**64 - 1
MAX_TTL = 24 * 3600  # seconds that a signer may ask for; holders cap it further

_FIELD_TYPES = (int, bytes, bytes, int, int, bytes, bytes)


def _exactly(size: int) -> Callable[..., Any]:
    return and_(instance_of(bytes), min_len(size), max_len(size))


@attrs.frozen(slots=False)  # cached properties need a dictionary
class Record:
    """One signed statement under a key. Its fields are bounded, its signature is checked only by `verify`."""

    key: bytes = attrs.field(validator=_exactly(ID_BYTES))
    public_key: bytes = attrs.field(validator=_exactly(32))
    sequence: int = attrs.field(validator=and_(instance_of(int), ge(0), le(MAX_SEQUENCE)))
    ttl: int = attrs.field(validator=and_(instance_of(int), ge(1), le(MAX_TTL)))  # seconds
    value: bytes = attrs.field(validator=and_(instance_of(bytes), max_len(MAX_VALUE)))
    signature: bytes = attrs.field(validator=_exactly(64), repr=False)

    @classmethod
    def sign(cls, identity: Identity, key: bytes, value: bytes, *, sequence: int, ttl: int) -> Self:
        """Make a record. Raises ValueError if a field is out of bounds."""
        unsigned = cls(key, identity.public_key, sequence, ttl, value, bytes(64))
        return attrs.evolve(unsigned, signature=identity.sign(DOMAIN, *unsigned._signed_fields()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read an encoded record without checking the signature.

        Raises:
            ProtocolError: The bytes are not the one encoding of a record.
        """
        if len(data) > MAX_RECORD:
            raise ProtocolError(f"a record of {len(data)} bytes; at most {MAX_RECORD} are allowed")
        try:
            fields = msgpack.unpackb(data, raw=False, max_array_len=8, max_map_len=0, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:  # UnicodeDecodeError is a ValueError
            raise ProtocolError(f"a record that is not msgpack: {error}") from error
        shape = tuple(map(type, fields)) if isinstance(fields, list) else None
        if shape != _FIELD_TYPES or fields[0] != VERSION:
            raise ProtocolError("a record of another version or shape")
        try:
            record = cls(*fields[1:])
        except ValueError as error:
            raise ProtocolError(f"a record out of bounds: {error.args[0]}") from error
        if record.encoded != data:
            raise ProtocolError("a record that is not encoded canonically")
        return record

    @cached_property
    def encoded(self) -> bytes:
        """The record as it is sent and stored."""
        fields = [VERSION, self.key, self.public_key, self.sequence, self.ttl, self.value, self.signature]
        encoded: bytes = msgpack.packb(fields)
        return encoded

    @cached_property
    def signer(self) -> PeerId:
        """Whose record it is, once `verify` has been true."""
        return PeerId.of(self.public_key)

    @property
    def withdrawn(self) -> bool:
        """Whether it is a tombstone."""
        return not self.value

    @property
    def rank(self) -> tuple[int, bytes]:
        """What readers order records of one signer by: the sequence, then the bytes, should a signer sign two."""
        return self.sequence, self.encoded

    def verify(self) -> bool:
        """Whether the signature is the signer's."""
        return verify(self.public_key, self.signature, DOMAIN, *self._signed_fields())

    def _signed_fields(self) -> tuple[bytes, ...]:
        return self.key, struct.pack(">QI", self.sequence, self.ttl), self.value
