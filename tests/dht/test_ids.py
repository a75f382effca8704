from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.ids import Contact, common_prefix, distance, members_key, network_group, random_id
from protocol.identity import PeerId
from protocol.transport import Address

points = st.binary(min_size=32, max_size=32)


@given(points, points, points)
def test_distance_is_a_metric(a, b, c):
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


@given(points, st.integers(0, 255), st.integers())
def test_a_random_id_shares_exactly_the_prefix_asked_for(own, prefix, seed):
    assert common_prefix(own, random_id(own, prefix, random.Random(seed))) == prefix


def test_common_prefix_counts_bits_from_the_front():
    assert common_prefix(bytes(32), bytes(32)) == 256
    assert common_prefix(bytes(32), b"\x80" + bytes(31)) == 0
    assert common_prefix(bytes(32), b"\x00\x01" + bytes(30)) == 15


def test_members_key_is_as_published():
    assert members_key(b"r" * 32) == hashlib.sha256(b"shoal-members-v1" + b"r" * 32).digest()


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("8.8.4.4", "8.8.4.0/24"),
        ("8.8.4.255", "8.8.4.0/24"),
        ("::ffff:8.8.4.4", "8.8.4.0/24"),
        ("2a00:1450:4001:81b::200e", "2a00:1450:4001::/48"),
        ("a.b.example.com", "example.com"),
        ("example.com", "example.com"),
        ("127.0.0.1", None),
        ("::1", None),
        ("10.1.2.3", None),
        ("192.168.1.9", None),
        ("fe80::1", None),
        ("fd00::1", None),
        ("localhost", None),
    ],
)
def test_networks_are_told_apart_and_private_ones_are_exempt(host, group):
    assert network_group(host) == group


def test_a_contact_has_few_addresses():
    addresses = tuple(Address("10.0.0.1", port) for port in range(1, 6))
    Contact(PeerId(bytes(32)), addresses[:4])
    with pytest.raises(ValueError, match="addresses"):
        Contact(PeerId(bytes(32)), addresses)
