from __future__ import annotations

import contextlib
import hashlib

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.records import MAX_RECORD, MAX_SEQUENCE, MAX_TTL, MAX_VALUE, Record
from protocol.errors import ProtocolError
from protocol.identity import Identity, PeerId

ALICE = Identity.from_seed(b"a" * 32)
KEY = bytes(range(32))


def record(value: bytes = b"value", sequence: int = 7, ttl: int = 120) -> Record:
    return Record.sign(ALICE, KEY, value, sequence=sequence, ttl=ttl)


def fields(made: Record) -> list[object]:
    return [1, made.key, made.public_key, made.sequence, made.ttl, made.value, made.signature]


def test_a_record_survives_the_wire_and_verifies():
    made = record()
    read = Record.decode(made.encoded)
    assert read == made
    assert read.verify()
    assert read.signer == ALICE.peer_id == PeerId.of(ALICE.public_key)


def test_golden_bytes():
    encoded = record().encoded
    assert encoded[:5] == bytes.fromhex("9701c42000")
    assert len(encoded) == 145
    assert hashlib.sha256(encoded).hexdigest() == ("bdfc4dee3ca968dfb33ccc08eea988434b5373d5f5e62d4b73199c996978a647")


def test_the_largest_record_fits():
    largest = record(bytes(MAX_VALUE), MAX_SEQUENCE, MAX_TTL)
    assert len(largest.encoded) <= MAX_RECORD
    assert Record.decode(largest.encoded).verify()


@pytest.mark.parametrize(
    "change",
    [
        {"key": bytes(32)},
        {"sequence": 8},
        {"ttl": 121},
        {"value": b"other"},
        {"public_key": Identity.from_seed(b"b" * 32).public_key},
        {"public_key": bytes(32)},
        {"signature": bytes(64)},
    ],
)
def test_every_field_is_signed(change):
    assert not attrs.evolve(record(), **change).verify()


def test_an_empty_value_is_a_withdrawal():
    assert record(b"").withdrawn
    assert not record(b"x").withdrawn


@pytest.mark.parametrize(
    "bad",
    [
        {0: 2},
        {0: True},
        {1: bytes(31)},
        {2: bytes(33)},
        {3: -1},
        {3: True},
        {3: 1.0},
        {4: 0},
        {4: MAX_TTL + 1},
        {5: "text"},
        {5: None},
        {6: bytes(63)},
    ],
)
def test_wrong_fields_are_refused(bad):
    values = fields(record())
    for index, value in bad.items():
        values[index] = value
    with pytest.raises(ProtocolError):
        Record.decode(msgpack.packb(values))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        msgpack.packb({1: 2}),
        msgpack.packb(fields(record())[:-1]),
        msgpack.packb([*fields(record()), 0]),
        record().encoded + b"\x00",
        record().encoded[:-1],
        b"\xdc\x00\x07" + record().encoded[1:],  # the same array with a longer header
        record().encoded.replace(b"\x07\x78", b"\xcc\x07\x78"),  # the same sequence in two bytes
        msgpack.packb([1, KEY, ALICE.public_key, 7, 120, bytes(MAX_VALUE + 1), bytes(64)]),
        bytes(MAX_RECORD + 1),
    ],
)
def test_nothing_but_the_one_encoding_is_read(data):
    with pytest.raises(ProtocolError):
        Record.decode(data)


@given(st.binary(max_size=300))
def test_garbage_is_refused(data):
    with pytest.raises(ProtocolError):
        Record.decode(data)


@given(st.integers(0, len(record().encoded) - 1), st.integers(1, 255))
def test_no_flipped_byte_goes_unnoticed(position, flip):
    data = bytearray(record().encoded)
    data[position] ^= flip
    with contextlib.suppress(ProtocolError):
        assert not Record.decode(bytes(data)).verify()


@pytest.mark.parametrize(
    "arguments", [{"value": bytes(MAX_VALUE + 1)}, {"ttl": 0}, {"ttl": MAX_TTL + 1}, {"sequence": MAX_SEQUENCE + 1}]
)
def test_records_out_of_bounds_are_not_made(arguments):
    with pytest.raises(ValueError):
        record(**arguments)
