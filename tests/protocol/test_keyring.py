"""The swarm keys that are good at a time, and the proof that a dialler has one of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.keyring import PROOF_SIZE, Keyring, prove, proved

OLD, NEW, NEWER = b"o" * 32, b"n" * 32, b"r" * 32
KEY = st.binary(min_size=32, max_size=32)
KEYS = st.lists(KEY, min_size=1, max_size=2, unique=True).map(tuple)


def test_the_key_before_the_newest_is_good_until_it_is_retired():
    ring = Keyring(OLD)
    assert ring.keys == (OLD,)
    ring.rotate(1, NEW)
    assert (ring.keys, ring.number) == ((NEW, OLD), 1)
    ring.rotate(5, NEWER)
    assert (ring.keys, ring.number) == ((NEWER, NEW), 5)
    ring.retire()
    assert ring.keys == (NEWER,)


@pytest.mark.parametrize("number", [0, 4, 5])
def test_keys_are_not_replaced_by_older_ones(number):
    ring = Keyring(NEW, 5, OLD)
    with pytest.raises(ValueError, match="cannot follow key 5"):
        ring.rotate(number, NEWER)
    assert (ring.keys, ring.number) == ((NEW, OLD), 5)


def test_keys_have_their_length():
    with pytest.raises(ValueError, match="32 bytes"):
        Keyring(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        Keyring(NEW, 1, b"short")
    with pytest.raises(ValueError, match="cannot follow"):
        Keyring(NEW).rotate(1, b"short")


@given(KEYS, KEYS, st.binary(min_size=32, max_size=32))
def test_the_first_of_our_keys_that_they_have_is_found(ours, theirs, ephemeral):
    found = proved(ours, prove(theirs, ephemeral), ephemeral)
    common = [key for key in ours if key in theirs]
    assert found == ((common[0], theirs.index(common[0])) if common else None)


@given(KEYS, st.binary(max_size=100), st.binary(min_size=32, max_size=32))
def test_nothing_else_is_a_proof(keys, proof, ephemeral):
    assert proved(keys, proof, ephemeral) is None


@given(KEYS, st.integers(0, 511))
def test_a_proof_is_about_one_handshake(keys, bit):
    ephemeral = bytes(32)
    proof = bytearray(prove(keys[:1], ephemeral))
    assert proved(keys, bytes(proof), b"\1" + ephemeral[1:]) is None
    proof[bit // 8 % PROOF_SIZE] ^= 1 << bit % 8
    assert proved(keys, bytes(proof), ephemeral) is None


def test_more_proofs_than_keys_can_be_good_are_not_looked_at():
    assert proved((NEW,), prove((OLD, NEWER, NEW), bytes(32)), bytes(32)) is None


def test_in_a_public_run_there_is_nothing_to_prove():
    assert prove((), bytes(32)) == b""
    assert proved((), b"", bytes(32)) == (None, 0)
    assert proved((), bytes(PROOF_SIZE), bytes(32)) is None
