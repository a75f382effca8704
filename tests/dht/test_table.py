from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dht.ids import Contact, common_prefix, distance, network_group
from dht.table import RoutingTable, TableSettings
from protocol.identity import PeerId
from protocol.transport import Address

OWN = PeerId(bytes(32))


def peer(prefix: int, number: int = 0) -> PeerId:
    """The number-th peer that shares so many bits with our own id, all of them zero."""
    return PeerId((1 << (255 - prefix) | number).to_bytes(32, "big"))


def contact(prefix: int, number: int = 0, host: str | None = "10.0.0.1") -> Contact:
    return Contact(peer(prefix, number), (Address(host, 7000),) if host else ())


def peers(table: RoutingTable) -> set[PeerId]:
    return {entry.contact.peer for entry in table}


def small(**changes) -> RoutingTable:
    return RoutingTable(OWN, TableSettings(**{"k": 2, "replacements": 2, **changes}))


def test_ourselves_and_peers_without_an_address_are_never_in():
    table = RoutingTable(OWN)
    assert not table.heard(Contact(OWN, (Address("10.0.0.1", 1),)), 0.0)
    assert not table.heard(contact(0, host=None), 0.0)
    assert len(table) == 0
    assert OWN not in table
    assert not table.wants(OWN)


def test_a_full_bucket_keeps_those_that_answer():
    table = small()
    assert table.heard(contact(0, 0), 0.0)
    assert table.heard(contact(0, 1), 1.0)
    assert not table.heard(contact(0, 2), 2.0)
    assert table.heard(contact(1, 0), 3.0)  # another bucket
    assert peers(table) == {peer(0, 0), peer(0, 1), peer(1, 0)}


def test_one_failure_makes_dormant_and_the_second_makes_room():
    table = small()
    for number in range(4):
        table.heard(contact(0, number), float(number))
    table.failed(peer(0, 0), 5.0)
    assert peer(0, 0) in table
    assert peer(0, 0) not in [c.peer for c in table.closest(OWN, 10)]
    assert peer(0, 0) in [c.peer for c in table.closest(OWN, 10, dormant=True)]
    table.failed(peer(0, 0), 6.0)
    assert peers(table) == {peer(0, 1), peer(0, 3)}  # the latest that waited


def test_a_dormant_contact_stays_while_nobody_waits_and_revives():
    table = small()
    table.heard(contact(0, 0), 0.0)
    for now in range(1, 10):
        table.failed(peer(0, 0), float(now))
    assert not table.entry(peer(0, 0)).alive
    assert table.wants(peer(0, 0))
    table.heard(contact(0, 0), 20.0)
    assert table.entry(peer(0, 0)).alive
    assert not table.wants(peer(0, 0))


def test_a_newcomer_takes_the_place_of_the_one_dead_for_longest():
    table = small()
    table.heard(contact(0, 0), 0.0)
    table.heard(contact(0, 1), 1.0)
    for _ in range(2):
        table.failed(peer(0, 1), 2.0)
        table.failed(peer(0, 0), 2.0)
    assert table.heard(contact(0, 2), 3.0)
    assert peers(table) == {peer(0, 1), peer(0, 2)}


def test_silence_for_long_is_the_end():
    table = small(forget_after=100.0)
    table.heard(contact(0, 0), 0.0)
    table.failed(peer(0, 0), 100.0)
    assert peer(0, 0) in table
    table.failed(peer(0, 0), 101.0)
    assert peer(0, 0) not in table


def test_few_of_one_network_in_a_bucket_and_in_all():
    table = RoutingTable(OWN, TableSettings(per_bucket=2, per_table=5))
    for prefix in range(4):
        for number in range(4):
            table.heard(contact(prefix, number, f"8.8.8.{10 * prefix + number}"), 0.0)
    assert Counter(common_prefix(OWN, p) for p in peers(table)) == {0: 2, 1: 2, 2: 1}
    assert table.heard(contact(0, 9, "8.8.9.1"), 1.0)  # the next network
    for number in range(10, 20):
        assert table.heard(contact(0, number, "192.168.0.1"), 1.0)  # private ones are not counted


def test_where_peers_are_seen_counts_whatever_they_say():
    table = RoutingTable(OWN, TableSettings(per_bucket=2, per_table=3))
    for number in range(200):
        table.heard(contact(number % 4, number, f"9.{number}.1.1"), 0.0, host="8.8.8.8")
    assert len(table) == 3
    assert table.heard(contact(0, 300, "9.9.9.9"), 1.0, host="8.8.9.8")
    for number in range(200):
        table.failed(contact(number % 4, number).peer, 5000.0)
    assert peers(table) == {peer(0, 300)}
    assert table._groups == Counter({"9.9.9.0/24": 1, "8.8.9.0/24": 1})


def test_one_network_cannot_have_all_of_a_replacement_cache():
    table = RoutingTable(OWN, TableSettings(k=2, replacements=3, per_bucket=1))
    for number in range(2):
        table.heard(contact(0, number, f"9.9.{number}.1"), 0.0)
    table.heard(contact(0, 2, "7.7.7.7"), 0.0)
    for number in range(10, 30):
        table.heard(contact(0, number, f"8.8.8.{number}"), 1.0)
    for number in range(2):
        for _ in range(2):
            table.failed(peer(0, number), 2.0)
    assert peer(0, 2) in table


def test_a_restarted_peer_with_a_new_identity_replaces_the_old_one_behind_its_network_limit():
    table = RoutingTable(OWN, TableSettings(per_bucket=1))
    table.heard(contact(0, 0, "8.8.8.1"), 0.0)
    assert not table.heard(contact(0, 1, "8.8.8.1"), 1.0)
    table.failed(peer(0, 0), 2.0)
    table.failed(peer(0, 0), 3.0)
    assert peers(table) == {peer(0, 1)}


def test_a_contact_that_moves_to_a_crowded_network_waits_and_leaves_its_place():
    table = RoutingTable(OWN, TableSettings(k=3, per_bucket=1))
    table.heard(contact(0, 0, "8.8.8.1"), 0.0)
    table.heard(contact(0, 1, "8.8.9.1"), 0.0)
    assert not table.heard(contact(0, 2, "8.8.9.2"), 0.0)
    assert not table.heard(contact(0, 1, "8.8.8.2"), 1.0)
    assert peers(table) == {peer(0, 0), peer(0, 2)}


def test_who_broke_the_protocol_goes_and_the_next_moves_up():
    table = small()
    for number in range(3):
        table.heard(contact(0, number), 0.0)
    table.remove(peer(0, 0))
    assert peers(table) == {peer(0, 1), peer(0, 2)}
    table.remove(peer(0, 1))
    table.remove(peer(5))
    assert peers(table) == {peer(0, 2)}


def test_closest_is_sorted_and_leaves_out_who_asks():
    table = RoutingTable(OWN)
    for prefix in range(8):
        table.heard(contact(prefix), 0.0)
    nearest = [c.peer for c in table.closest(OWN, 3, but=peer(7))]
    assert nearest == [peer(6), peer(5), peer(4)]


def test_those_not_tried_for_longest_are_due_first():
    table = RoutingTable(OWN)
    for number in range(4):
        table.heard(contact(0, number), float(number))
    table.failed(peer(0, 0), 4.0)
    assert [c.peer for c in table.due(12.0, 9.0, 2)] == [peer(0, 1), peer(0, 2)]
    assert table.due(12.0, 20.0, 2) == []


def test_the_freshest_that_answer_are_saved_first():
    table = RoutingTable(OWN)
    for number in range(3):
        table.heard(contact(0, number), float(number))
    table.failed(peer(0, 2), 4.0)
    assert [c.peer for c in table.freshest(3)] == [peer(0, 1), peer(0, 0), peer(0, 2)]
    assert len(table.freshest(1)) == 1


def test_buckets_without_a_lookup_are_stale():
    table = RoutingTable(OWN)
    assert table.stale(1000.0, 900.0) == []
    table.heard(contact(2), 0.0)
    assert table.stale(1000.0, 900.0) == [0, 1, 2]
    table.looked_up(peer(1, 77), 1000.0)
    table.looked_up(OWN, 1000.0)
    assert table.stale(1000.0, 900.0) == [0, 2]


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_a_full_bucket_wants_newcomers_until_enough_wait(waiting):
    table = small()
    for number in range(2 + waiting):
        table.heard(contact(0, number), 0.0)
    assert table.wants(peer(0, 99)) == (waiting < 2)
    if waiting:
        assert not table.wants(peer(0, 2))
    table.failed(peer(0, 0), 1.0)
    assert table.wants(peer(0, 99))


class TableMachine(RuleBasedStateMachine):
    """The table against lists: [peer, host, seen, failures], least recently heard first."""

    SETTINGS = TableSettings(k=3, replacements=2, per_bucket=2, per_table=3, evict_after=2, forget_after=30.0)
    PREFIXES = range(3)
    HOSTS = ("10.0.0.1", "8.8.8.1", "8.8.8.2", "8.8.9.1")

    def __init__(self) -> None:
        super().__init__()
        self.table = RoutingTable(OWN, self.SETTINGS)
        self.buckets: dict[int, list[list]] = {prefix: [] for prefix in self.PREFIXES}
        self.waiting: dict[int, list[list]] = {prefix: [] for prefix in self.PREFIXES}
        self.now = 0.0

    prefixes = st.sampled_from(PREFIXES)
    numbers = st.integers(0, 6)

    def fits(self, prefix: int, host: str, leaving: list | None = None) -> bool:
        bucket = [item for item in self.buckets[prefix] if item is not leaving]
        everyone = [item for items in self.buckets.values() for item in items if item is not leaving]
        group = network_group(host)
        same = [sum(network_group(item[1]) == group for item in items) for items in (bucket, everyone)]
        settings = self.SETTINGS
        crowded = group is not None and (same[0] >= settings.per_bucket or same[1] >= settings.per_table)
        return len(bucket) < settings.k and not crowded

    def drop(self, items: dict[int, list[list]], prefix: int, who: PeerId) -> list | None:
        found = next((item for item in items[prefix] if item[0] == who), None)
        if found is not None:
            items[prefix].remove(found)
        return found

    def promote(self, prefix: int, leaving: list | None = None) -> None:
        for item in reversed(self.waiting[prefix]):
            if self.fits(prefix, item[1], leaving):
                if leaving is not None:
                    self.buckets[prefix].remove(leaving)
                self.waiting[prefix].remove(item)
                self.buckets[prefix].append(item)
                return

    @rule(prefix=prefixes, number=numbers, host=st.sampled_from(HOSTS))
    def heard(self, prefix, number, host) -> None:
        who = peer(prefix, number)
        self.drop(self.buckets, prefix, who)
        self.drop(self.waiting, prefix, who)
        item = [who, host, self.now, 0]
        dead = [i for i in self.buckets[prefix] if i[3] >= self.SETTINGS.evict_after]
        victim = next((i for i in dead if self.fits(prefix, host, i)), None)
        admitted = True
        if self.fits(prefix, host):
            self.buckets[prefix].append(item)
        elif victim is not None:
            self.buckets[prefix].remove(victim)
            self.buckets[prefix].append(item)
        else:
            admitted = False
            self.waiting[prefix].append(item)
            if len(self.waiting[prefix]) > self.SETTINGS.replacements:
                groups = [network_group(i[1]) for i in self.waiting[prefix]]
                crowds = [1 if group is None else groups.count(group) for group in groups]
                del self.waiting[prefix][crowds.index(max(crowds))]
            self.promote(prefix)
        assert self.table.heard(contact(prefix, number, host), self.now) == admitted

    @rule(prefix=prefixes, number=numbers)
    def failed(self, prefix, number) -> None:
        who = peer(prefix, number)
        self.drop(self.waiting, prefix, who)
        item = next((i for i in self.buckets[prefix] if i[0] == who), None)
        if item is not None:
            item[3] += 1
            if self.now - item[2] > self.SETTINGS.forget_after:
                self.buckets[prefix].remove(item)
                self.promote(prefix)
            elif item[3] >= self.SETTINGS.evict_after:
                self.promote(prefix, leaving=item)
        self.table.failed(who, self.now)

    @rule(prefix=prefixes, number=numbers)
    def remove(self, prefix, number) -> None:
        who = peer(prefix, number)
        self.drop(self.waiting, prefix, who)
        if self.drop(self.buckets, prefix, who):
            self.promote(prefix)
        self.table.remove(who)

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def wait(self, seconds) -> None:
        self.now += seconds

    @rule(point=st.sampled_from([OWN, peer(0, 3), peer(2, 1)]), count=st.integers(1, 5))
    def closest(self, point, count) -> None:
        alive = [item[0] for items in self.buckets.values() for item in items if not item[3]]
        expected = sorted(alive, key=lambda who: distance(who, point))[:count]
        assert [c.peer for c in self.table.closest(point, count)] == expected

    @invariant()
    def it_is_what_the_lists_say(self) -> None:
        expected = {item[0]: item[1:] for items in self.buckets.values() for item in items}
        actual = {e.contact.peer: [e.contact.addresses[0].host, e.seen, e.failures] for e in self.table}
        assert actual == expected
        assert len(self.table) == len(expected)

    @invariant()
    def it_counts_its_networks_right(self) -> None:
        groups = Counter(group for entry in self.table for group in entry.contact.groups)
        assert self.table._groups == groups


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
