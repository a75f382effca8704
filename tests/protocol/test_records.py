"""Records: any way of cutting the bytes gives the same plaintexts, and nothing else is accepted."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import noise, records
from protocol.errors import ProtocolError
from protocol.noise import CipherState
from protocol.records import (
    LARGEST_BUFFER,
    MAX_PLAINTEXT,
    SHORT,
    SMALLEST_BUFFER,
    RecordReader,
    RecordWriter,
)

KEY = bytes(range(32))


def writer(key=KEY):
    return RecordWriter(CipherState(key))


def reader(key=KEY):
    return RecordReader(CipherState(key))


def put(target, data):
    """Hand over bytes as a socket would, and return the plaintexts that are complete then."""
    out = []
    rest = memoryview(data)
    while rest:
        space = target.space()
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        target.received(count)
        rest = rest[count:]
        while (record := target.next_record()) is not None:
            out.append(record)
    return out


def split(sealed):
    """The single records."""
    out, start = [], 0
    while start < len(sealed):
        end = start + 4 + int.from_bytes(sealed[start : start + 4], "big")
        out.append(bytes(sealed[start:end]))
        start = end
    return out


def test_golden_bytes():
    assert (
        writer().seal(b"hello", b"").hex()
        == "0000001566d9d9b2da0e0c4679f3a82524f5e0499271e16f3000000010367ef8288831557408e102950a16e26a"
    )


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_cut_at_any_byte(plaintexts, data):
    sealed = writer().seal(*plaintexts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sealed)), max_size=30)))
    target = reader()
    out = []
    for start, end in zip([0, *cuts], [*cuts, len(sealed)], strict=True):
        out += put(target, sealed[start:end])
    assert out == plaintexts
    assert target.pending == 0


def test_byte_by_byte():
    sealed = writer().seal(b"one", b"", b"three")
    target = reader()
    assert [record for byte in sealed for record in put(target, bytes([byte]))] == [b"one", b"", b"three"]


def test_many_large_records_in_odd_pieces():
    plaintexts = [bytes([number]) * (MAX_PLAINTEXT - number % 3) for number in range(12)]
    sealed = writer().seal(*plaintexts)
    target = reader()
    out = []
    for start in range(0, len(sealed), 99_991):
        out += put(target, sealed[start : start + 99_991])
    assert out == plaintexts


@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4000, 65_536, 131_072, 200_000, MAX_PLAINTEXT]), min_size=1, max_size=8),
    reads=st.lists(st.sampled_from([1, 5, 3000, 2 * MAX_PLAINTEXT]), max_size=5),
)
def test_there_is_always_space(sizes, reads):
    plaintexts = [bytes([number]) * size for number, size in enumerate(sizes)]
    sealed = bytes(writer().seal(*plaintexts))
    target = reader()
    out, start = [], 0
    for most in itertools.cycle([*reads, 70_000]):
        space = target.space()
        assert space
        assert len(target._buffer) <= max(SMALLEST_BUFFER, min(2 * start, LARGEST_BUFFER))
        count = min(len(space), len(sealed) - start, most)
        space[:count] = sealed[start : start + count]
        target.received(count)
        start += count
        while (record := target.next_record()) is not None:
            out.append(record)
        if start == len(sealed):
            break
    assert out == plaintexts


def test_a_long_record_takes_no_memory_before_it_arrives():
    sealed = writer().seal(bytes(MAX_PLAINTEXT))
    target = reader()
    assert put(target, sealed[:100]) == []
    assert len(target._buffer) == SMALLEST_BUFFER
    assert put(target, sealed[100:]) == [bytes(MAX_PLAINTEXT)]
    assert len(target._buffer) == LARGEST_BUFFER


def test_memory_for_large_reads_is_given_back_when_it_is_empty():
    source, target = writer(), reader()
    assert put(target, source.seal(bytes(MAX_PLAINTEXT))) == [bytes(MAX_PLAINTEXT)]
    first, second = split(source.seal(b"1" * MAX_PLAINTEXT, b"2"))
    assert put(target, first[:-1]) == []
    target.release()
    assert put(target, first[-1:] + second) == [b"1" * MAX_PLAINTEXT, b"2"]
    target.space()
    assert len(target._buffer) == SMALLEST_BUFFER
    assert put(target, source.seal(b"3" * MAX_PLAINTEXT)) == [b"3" * MAX_PLAINTEXT]


def test_little_is_read_beyond_the_end_of_a_long_record():
    """It would have to be moved before the next one can be completed."""
    sealed = writer().seal(*[bytes(MAX_PLAINTEXT)] * 3)
    target = reader()
    start = 0
    while start < len(sealed):
        space = target.space()
        count = min(len(space), len(sealed) - start)
        space[:count] = sealed[start : start + count]
        target.received(count)
        start += count
        while target.next_record() is not None:
            pass
        assert target.pending <= SHORT or start <= MAX_PLAINTEXT


def test_buffers_of_all_kinds_are_sealed():
    sealed = writer().seal(b"a", bytearray(b"b"), memoryview(b"xcx")[1:2])
    assert put(reader(), sealed) == [b"a", b"b", b"c"]


def test_too_long_a_plaintext_is_refused_before_anything_is_sealed():
    source = writer()
    with pytest.raises(ValueError, match="at most 524288"):
        source.seal(b"first", bytes(MAX_PLAINTEXT + 1))
    assert put(reader(), source.seal(b"first")) == [b"first"]


def test_nothing_to_seal():
    assert writer().seal() == b""


@pytest.mark.parametrize("without_encrypt_into", [False, True])
def test_rekeying_on_both_sides(monkeypatch, without_encrypt_into):
    monkeypatch.setattr(records, "REKEY_INTERVAL", 3)
    if without_encrypt_into:
        monkeypatch.setattr(noise, "_INTO", False)
    source, target = writer(), reader()
    plaintexts = [bytes([number]) for number in range(10)]
    sealed = source.seal(*plaintexts)
    assert put(target, sealed) == plaintexts
    monkeypatch.setattr(records, "REKEY_INTERVAL", 1000)
    stale = reader()
    with pytest.raises(ProtocolError):
        put(stale, sealed)


def full(*plaintexts):
    """A reader that has received records."""
    target = reader()
    sealed = writer().seal(*plaintexts)
    target.space()[: len(sealed)] = sealed
    target.received(len(sealed))
    return target


@pytest.mark.parametrize("into", [False, True])
def test_records_are_decrypted_where_they_are_wanted(monkeypatch, into):
    monkeypatch.setattr(noise, "_INTO", into)
    target = full(b"first", b"2" * SHORT, b"3" * SHORT, b"fourth", b"", b"fifth")
    buffer = bytearray(2 * SHORT + 20)
    assert target.next_record() == b"first"
    assert target.fill(memoryview(buffer)[2:]) == 2 * SHORT  # the next one is short
    assert buffer == b"\0\0" + b"2" * SHORT + b"3" * SHORT + bytes(18)
    assert target.fill(memoryview(buffer)[:5]) == 0  # and does not fit in
    assert target.fill(memoryview(buffer)[:6]) == 6  # but fills this
    assert buffer[:6] == b"fourth"
    assert target.next_record() == b""  # which is not lost
    assert target.next_record() == b"fifth"
    assert target.fill(memoryview(buffer)) == 0


def test_only_complete_records_are_decrypted_where_they_are_wanted():
    target = reader()
    sealed = writer().seal(b"1" * SHORT, b"2" * SHORT)
    buffer = bytearray(2 * SHORT)
    filled = []
    for byte in bytes(sealed):
        target.space()[0] = byte
        target.received(1)
        filled.append(target.fill(memoryview(buffer)[sum(filled) :]))
    assert [count for count in filled if count] == [SHORT, SHORT]
    assert filled[len(sealed) // 2 - 1] and filled[-1]
    assert buffer == b"1" * SHORT + b"2" * SHORT


def test_keys_are_replaced_while_records_are_decrypted_where_they_are_wanted(monkeypatch):
    monkeypatch.setattr(records, "REKEY_INTERVAL", 2)
    plaintexts = [bytes([number]) * SHORT for number in range(7)]
    buffer = bytearray(7 * SHORT)
    assert full(*plaintexts).fill(memoryview(buffer)) == len(buffer)
    assert buffer == b"".join(plaintexts)


def test_a_forged_record_is_refused_where_it_is_wanted():
    target = reader()
    sealed = writer().seal(b"1" * SHORT, b"2" * SHORT)
    sealed[-1] ^= 1
    target.space()[: len(sealed)] = sealed
    target.received(len(sealed))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            target.fill(memoryview(bytearray(2 * SHORT)))


def test_memory_for_large_writes_is_given_back():
    source = writer()
    first = bytes(source.seal(bytes(MAX_PLAINTEXT), b"x"))
    source.release()
    assert put(reader(), first + bytes(source.seal(b"y" * MAX_PLAINTEXT))) == [
        bytes(MAX_PLAINTEXT),
        b"x",
        b"y" * MAX_PLAINTEXT,
    ]


def refused(data, *, before=()):
    target = reader()
    assert put(target, b"".join(before)) == [b"record %d" % number for number in range(len(before))]
    with pytest.raises(ProtocolError):
        put(target, data)
    # Nothing is accepted any more, not even what would have been right.
    with pytest.raises(ProtocolError):
        target.next_record()


def test_replayed_left_out_and_reordered_records_fail():
    first, second, third = split(writer().seal(*(b"record %d" % number for number in range(3))))
    refused(first, before=[first])
    refused(first, before=[first, second])
    refused(second)
    refused(third, before=[first])
    refused(third + second, before=[first])


def test_reflected_and_foreign_records_fail():
    refused(writer(bytes(32)).seal(b"record 0"))


@given(index=st.integers(4, 4 + 8 + 16 - 1), change=st.integers(1, 255))
def test_changed_records_fail(index, change):
    sealed = writer().seal(b"record 0")
    sealed[index] ^= change
    refused(sealed)


@pytest.mark.parametrize("size", [*range(16), MAX_PLAINTEXT + 17, 2**32 - 1])
def test_records_shorter_than_a_tag_or_too_long_fail_at_once(size):
    refused(size.to_bytes(4, "big"))


def test_a_changed_length_fails_when_the_bytes_are_there():
    sealed = writer().seal(b"record 0", b"record 1")
    sealed[3] += 1
    refused(sealed)
    sealed = writer().seal(b"record 0", b"record 1")
    sealed[3] -= 1
    refused(sealed)


@given(st.binary(min_size=4 + 16, max_size=1000))
def test_nonsense_never_gives_a_record(data):
    target = reader()
    with contextlib.suppress(ProtocolError):
        assert put(target, data) == []
