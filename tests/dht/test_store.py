from __future__ import annotations

from functools import cache

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dht.records import Record
from dht.store import RecordStore, StoreLimits, Verdict
from protocol.identity import Identity, PeerId

PEOPLE = [Identity.from_seed(bytes([n]) * 32) for n in range(5)]
KEYS = [bytes([n]) * 32 for n in range(4)]
ALICE, BOB = PEOPLE[:2]
KEY = KEYS[0]
OWN = PeerId(bytes(32))


@cache
def record(who: int = 0, key: int = 0, value: bytes = b"v", sequence: int = 1, ttl: int = 100) -> Record:
    return Record.sign(PEOPLE[who], KEYS[key], value, sequence=sequence, ttl=ttl)


def put(store: RecordStore, made: Record, now: float = 0.0, *, remaining=1e9, by_signer=True, origin="") -> Verdict:
    return store.put(made, remaining, now, by_signer=by_signer, origin=origin)


def test_a_higher_sequence_replaces_and_nothing_else_does():
    store = RecordStore(OWN)
    assert put(store, record(sequence=5)) is Verdict.STORED
    assert put(store, record(sequence=4)) is Verdict.STALE
    assert put(store, record(sequence=5, value=b"other")) is Verdict.STALE
    assert store.get(KEY, ALICE.peer_id, 0.0).record == record(sequence=5)
    assert put(store, record(sequence=6, value=b"new")) is Verdict.STORED
    assert store.get(KEY, ALICE.peer_id, 0.0).record.value == b"new"
    assert len(store) == 1


@pytest.mark.parametrize("who", [0, 4])
def test_a_record_that_finds_no_room_displaces_nothing_and_not_its_predecessor_either(who):
    """One of the largest share could give way, and then it turns out that this is not enough."""
    earlier = [record(who=number, key=number, value=b"v" * 1000) for number in range(3)]
    roomy = RecordStore(OWN)
    for made in earlier:
        put(roomy, made, origin="crowd")
    store = RecordStore(OWN, StoreLimits(size=roomy.size + 10))
    for made in earlier:
        assert put(store, made, origin="crowd") is Verdict.STORED
    assert put(store, record(who=who, value=b"v" * 3000, sequence=2), origin="other") is Verdict.FULL
    assert {held.record for held in store} == set(earlier)
    assert store.size == roomy.size


def test_the_same_record_from_its_signer_lives_on():
    store = RecordStore(OWN)
    put(store, record(ttl=100), 0.0)
    assert put(store, record(ttl=100), 50.0) is Verdict.REFRESHED
    assert store.get(KEY, ALICE.peer_id, 149.0)
    assert not store.get(KEY, ALICE.peer_id, 150.0)


def test_the_same_record_from_somebody_else_does_not():
    store = RecordStore(OWN)
    put(store, record(ttl=100), 0.0)
    assert put(store, record(ttl=100), 50.0, by_signer=False) is Verdict.REFRESHED
    assert not store.get(KEY, ALICE.peer_id, 100.0)


def test_what_is_passed_on_lives_no_longer_than_it_has_left():
    store = RecordStore(OWN)
    put(store, record(ttl=100), 0.0, remaining=10.0, by_signer=False)
    assert store.get(KEY, ALICE.peer_id, 4.0).remaining(4.0) == 6.0
    assert put(store, record(), 10.0, remaining=0.0) is Verdict.STALE
    assert len(store) == 0


def test_life_is_capped_by_the_record_and_by_the_holder():
    store = RecordStore(OWN, StoreLimits(ttl=60.0))
    put(store, record(ttl=30))
    put(store, record(who=1, ttl=1000))
    store.expire(30.0)
    assert [held.record.signer for held in store] == [BOB.peer_id]
    store.expire(60.0)
    assert len(store) == store.size == 0


def test_a_withdrawal_keeps_the_older_record_out():
    store = RecordStore(OWN)
    put(store, record(sequence=1))
    assert put(store, record(sequence=2, value=b"")) is Verdict.STORED
    assert put(store, record(sequence=1)) is Verdict.STALE


def test_forgeries_are_not_kept():
    store = RecordStore(OWN)
    forged = attrs.evolve(record(), value=b"forged")
    assert put(store, forged) is Verdict.FORGED
    put(store, record())
    assert put(store, attrs.evolve(forged, sequence=9)) is Verdict.FORGED
    assert [held.record for held in store] == [record()]


@pytest.mark.parametrize(
    ("limits", "fits", "too_many"),
    [
        (StoreLimits(per_key=2), [record(0), record(1)], record(2)),
        (StoreLimits(per_signer=2), [record(0, 0), record(0, 1)], record(0, 2)),
        (StoreLimits(records=2), [record(0, 0), record(1, 1)], record(2, 2)),
        (StoreLimits(size=1400), [record(0, 0), record(1, 1)], record(2, 2)),
    ],
)
def test_every_bound_refuses_the_new_and_keeps_the_old(limits, fits, too_many):
    store = RecordStore(OWN, limits)
    for made in fits:
        assert put(store, made) is Verdict.STORED
    assert put(store, too_many) is Verdict.FULL
    assert {held.record for held in store} == set(fits)
    newer = Record.sign(PEOPLE[0], KEY, b"w", sequence=2, ttl=100)
    assert put(store, newer) is Verdict.STORED  # replaces what is there
    assert put(store, too_many, 100.0) is Verdict.STORED  # the others are over


def stranger(number: int, key: bytes, *, ttl: int = 100, value: bytes = b"v") -> Record:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    return Record.sign(identity, key, value, sequence=1, ttl=ttl)


def key_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def test_thousands_of_identities_of_a_few_addresses_displace_nobody_else():
    limits = StoreLimits(records=1000, size=1_000_000)
    store = RecordStore(OWN, limits)
    honest = [stranger(number, key_of(number), value=bytes(500)) for number in range(60)]
    for number, made in enumerate(honest[:30]):
        assert put(store, made, origin=f"home{number // 2}") is Verdict.STORED
    verdicts = []
    for number in range(100, 3100):
        made = stranger(number, key_of(number), value=bytes(number % 2000))
        verdicts.append(put(store, made, origin=f"evil{number % 3}"))
        assert len(store) <= limits.records
        assert store.size <= limits.size
    assert verdicts[-1] is Verdict.FULL
    for number, made in enumerate(honest[30:]):
        assert put(store, made, origin=f"home{number // 2}") is Verdict.STORED
    held = {held.record for held in store}
    assert held >= set(honest)
    assert put(store, stranger(4000, key_of(1)), origin="evil0") is Verdict.FULL


def test_identities_of_a_few_addresses_leave_room_under_a_key():
    store = RecordStore(OWN, StoreLimits(per_key=20))
    for number in range(100, 300):
        put(store, stranger(number, KEY), origin=f"evil{number % 2}")
    honest = [stranger(number, KEY) for number in range(8)]
    assert all(put(store, made, origin=f"home{number}") is Verdict.STORED for number, made in enumerate(honest))
    assert len(store) == 20
    assert {held.record for held in store} >= set(honest)
    assert put(store, stranger(400, KEY), origin="evil0") is Verdict.FULL


def test_equals_do_not_displace_each_other():
    store = RecordStore(OWN, StoreLimits(per_key=4))
    for number in range(4):
        assert put(store, stranger(number, KEY), origin=f"host{number % 2}") is Verdict.STORED
    assert put(store, stranger(5, KEY), origin="host0") is Verdict.FULL
    assert len(store) == 4


def test_what_goes_is_far_from_us():
    store = RecordStore(OWN, StoreLimits(records=5))
    keys = [key_of(number) for number in (9, 3, 7, 1, 5)]
    for number, key in enumerate(keys):
        put(store, stranger(number, key), origin="evil")
    for number in (10, 11):
        assert put(store, stranger(number, key_of(2)), origin=f"home{number}") is Verdict.STORED
    assert {held.record.key for held in store if held.origin == "evil"} == {key_of(number) for number in (1, 3, 5)}


def test_a_record_counts_for_its_signer_once_that_has_sent_it():
    store = RecordStore(OWN)
    put(store, record(), by_signer=False, origin="messenger")
    put(store, record(), by_signer=False, origin="another")
    assert [held.origin for held in store] == ["messenger"]
    put(store, record(), origin="home")
    assert [held.origin for held in store] == ["home"]
    put(store, record(), by_signer=False, origin="another")
    assert [held.origin for held in store] == ["home"]


def test_forgeries_displace_nothing():
    store = RecordStore(OWN, StoreLimits(records=3))
    for number in range(3):
        put(store, stranger(number, KEY), origin="evil")
    forged = attrs.evolve(stranger(9, KEY), value=b"forged")
    assert put(store, forged, origin="other") is Verdict.FORGED
    assert len(store) == 3


def test_displacing_again_and_again_leaves_nothing_behind():
    store = RecordStore(OWN, StoreLimits(records=8, ttl=10_000.0))
    lasting = [stranger(number, key_of(number), ttl=10_000) for number in range(8)]
    brief = [stranger(number, key_of(number), ttl=1) for number in range(8, 11)]
    for now in range(200):
        for made in lasting:
            put(store, made, float(now), origin="one")
        for made in brief:
            put(store, made, float(now), origin="two")
        assert len(store._timers) <= 2 * len(store) + 1
    store.expire(20_000.0)
    assert len(store) == store.size == len(store._timers) == len(store._origins) == len(store._shares) == 0


def test_a_record_that_replaces_a_longer_lived_one_goes_when_its_own_time_is_over():
    store = RecordStore(OWN, StoreLimits(ttl=10_000.0))
    for sequence in range(1, 50):
        put(store, record(sequence=sequence, ttl=10_000 - 100 * sequence))
        assert len(store._timers) <= 3
    store.expire(5_100.0)
    assert len(store) == store.size == 0


def test_pages_cover_everything_once_in_order():
    store = RecordStore(OWN)
    for who in range(5):
        put(store, record(who, ttl=100 if who else 10))
    signers = sorted(person.peer_id for person in PEOPLE[1:])
    seen, after, more = [], b"", True
    while more:
        page, more = store.page(KEY, 10.0, after=after, records=2, size=10_000)
        assert 1 <= len(page) <= 2
        seen += [held.record.signer for held in page]
        after = seen[-1]
    assert seen == signers


def test_pages_are_bounded_in_bytes_but_never_empty():
    store = RecordStore(OWN)
    for who in range(3):
        put(store, record(who, value=bytes(1000)))
    page, more = store.page(KEY, 0.0, after=b"", records=50, size=1)
    assert (len(page), more) == (1, True)
    page, more = store.page(KEY, 0.0, after=b"", records=50, size=2400)
    assert (len(page), more) == (2, True)
    assert store.page(KEYS[1], 0.0, after=b"", records=50, size=1) == ([], False)


class StoreMachine(RuleBasedStateMachine):
    """The store against a list that is searched from end to end."""

    LIMITS = StoreLimits(per_key=3, per_signer=2, records=6, size=6 * 800, ttl=50.0)

    def __init__(self) -> None:
        super().__init__()
        self.store = RecordStore(OWN, self.LIMITS)
        self.kept: list[tuple[Record, float]] = []
        self.now = 0.0

    @rule(
        who=st.integers(0, 4),
        key=st.integers(0, 3),
        value=st.sampled_from([b"", b"v", bytes(100)]),
        sequence=st.integers(0, 3),
        ttl=st.sampled_from([10, 40, 90]),
        remaining=st.sampled_from([0.0, 5.0, 30.0, 100.0]),
        by_signer=st.booleans(),
    )
    def offer(self, who, key, value, sequence, ttl, remaining, by_signer) -> None:
        offered = record(who, key, value, sequence, ttl)
        verdict = put(self.store, offered, self.now, remaining=remaining, by_signer=by_signer)
        expires = self.now + min(remaining, ttl, self.LIMITS.ttl)
        old = [(r, e) for r, e in self.live() if (r.key, r.signer) == (offered.key, offered.signer)]
        if old and old[0][0] == offered:
            assert verdict is Verdict.REFRESHED
            if by_signer:
                self.kept.remove(old[0])
                self.kept.append((offered, max(expires, old[0][1])))
        elif (old and old[0][0].sequence >= sequence) or expires <= self.now:
            assert verdict is Verdict.STALE
        elif verdict is Verdict.STORED:
            if old:
                self.kept.remove(old[0])
            self.kept.append((offered, expires))
        else:
            assert verdict is Verdict.FULL
            assert self.full(offered)

    def full(self, offered: Record) -> bool:
        """Whether there is a bound that is reached by what the store has not yet forgotten."""
        records = [held.record for held in self.store]
        return (
            len(records) == self.LIMITS.records
            or sum(r.key == offered.key for r in records) == self.LIMITS.per_key
            or sum(r.signer == offered.signer for r in records) == self.LIMITS.per_signer
            or self.store.size + 800 > self.LIMITS.size
        )

    @rule(seconds=st.sampled_from([1.0, 7.0, 45.0]))
    def wait(self, seconds) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now)

    def live(self) -> list[tuple[Record, float]]:
        return [(r, e) for r, e in self.kept if e > self.now]

    @invariant()
    def it_serves_what_is_alive(self) -> None:
        for key in KEYS:
            page, more = self.store.page(key, self.now, after=b"", records=100, size=1 << 20)
            expected = sorted(((r.signer, r, e) for r, e in self.live() if r.key == key), key=lambda item: item[0])
            assert not more
            assert [(held.record.signer, held.record, held.expires) for held in page] == expected
        assert len(self.store) == len(self.live())  # and nothing else is kept

    @invariant()
    def it_keeps_its_bounds(self) -> None:
        records = [held.record for held in self.store]
        assert len(records) == len(self.store) <= self.LIMITS.records
        assert self.store.size <= self.LIMITS.size
        assert len(records) <= len(self.store._timers) <= 2 * self.LIMITS.records + 1
        for key in KEYS:
            assert sum(r.key == key for r in records) <= self.LIMITS.per_key
        for person in PEOPLE:
            assert sum(r.signer == person.peer_id for r in records) <= self.LIMITS.per_signer


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
