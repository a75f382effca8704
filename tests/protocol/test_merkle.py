"""The hash tree over ranges of a byte string."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import merkle


def naive_root(hashes: list[bytes]) -> bytes:
    """The definition of RFC 6962, by recursion on the largest power of two below the size."""
    if len(hashes) == 1:
        return hashes[0]
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    return hashlib.sha256(b"\1" + naive_root(hashes[:split]) + naive_root(hashes[split:])).digest()


def test_empty():
    assert merkle.leaves(b"") == ()
    assert merkle.root(()) == hashlib.sha256(b"").digest()
    assert not merkle.verify(0, b"", (), 0)


def test_one_leaf_is_its_own_root():
    assert merkle.root(merkle.leaves(b"abc")) == merkle.leaf(b"abc") == hashlib.sha256(b"\0abc").digest()


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40))
def test_root_is_that_of_the_definition(hashes):
    assert merkle.root(hashes) == naive_root(hashes)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=20), st.data())
def test_a_node_is_no_leaf(hashes, data):
    assert merkle.root(hashes) != merkle.leaf(b"".join(hashes))
    index = data.draw(st.integers(0, len(hashes) - 1))
    changed = [*hashes[:index], merkle.leaf(hashes[index]), *hashes[index + 1 :]]
    assert merkle.root(changed) != merkle.root(hashes)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.sampled_from([0, 1, 17, merkle.LEAF - 1]))
def test_ranges(full, rest):
    data = bytes(full * merkle.LEAF) + b"x" * rest
    hashes = merkle.leaves(bytearray(data))
    assert len(hashes) == merkle.leaf_count(len(data))
    parts = []
    for index in range(len(hashes)):
        start, end = merkle.leaf_range(index, len(data))
        parts.append(data[start:end])
        assert merkle.verify(index, memoryview(data)[start:end], hashes, len(data))
        assert not merkle.verify(index, data[start : end - 1], hashes, len(data))
        assert not merkle.verify(index, b"?" + data[start + 1 : end], hashes, len(data))
        assert not merkle.verify(index, data[start:end], hashes, len(data) + merkle.LEAF)
    assert b"".join(parts) == data


@pytest.mark.parametrize("index", [-1, 2])
def test_no_such_range(index):
    with pytest.raises(ValueError, match="range"):
        merkle.leaf_range(index, merkle.LEAF + 1)
    assert not merkle.verify(index, b"", merkle.leaves(bytes(merkle.LEAF + 1)), merkle.LEAF + 1)
