from __future__ import annotations

import hashlib
import random

import pytest

from dht.ids import Contact, distance
from dht.lookup import Lookup, LookupSettings
from protocol.identity import PeerId
from protocol.transport import Address

OWN = PeerId(b"\xff" * 32)
TARGET = bytes(32)
SMALL = LookupSettings(k=3, alpha=2)


def peer(number: int) -> PeerId:
    """The closer to the target the lower the number."""
    return PeerId(number.to_bytes(32, "big"))


def contact(number: int, host: str = "10.0.0.1") -> Contact:
    return Contact(peer(number), (Address(host, 7000),))


def numbers(contacts: list[Contact]) -> list[int]:
    return [int.from_bytes(c.peer, "big") for c in contacts]


def start(*seeds: int, settings: LookupSettings = SMALL) -> Lookup:
    return Lookup(TARGET, OWN, map(contact, seeds), settings)


def test_without_seeds_it_is_done_at_once():
    lookup = start()
    assert lookup.done
    assert lookup.next_queries() == []
    assert lookup.result == []


def test_it_asks_alpha_at_a_time_the_closest_first():
    lookup = start(5, 9, 7, 8)
    assert numbers(lookup.next_queries()) == [5, 7]
    assert lookup.next_queries() == []
    lookup.answered(peer(7), [contact(2)])
    assert numbers(lookup.next_queries()) == [2]
    assert not lookup.done


def test_it_ends_when_the_k_closest_have_answered():
    lookup = start(10, 20, 30, 40)
    assert numbers(lookup.next_queries()) == [10, 20]
    lookup.answered(peer(10), map(contact, [1, 2, 3]))
    lookup.answered(peer(20), [])
    assert numbers(lookup.next_queries()) == [1, 2]
    lookup.answered(peer(1), [])
    lookup.answered(peer(2), [])
    assert not lookup.done
    assert numbers(lookup.next_queries()) == [3]
    lookup.answered(peer(3), [])
    assert lookup.done
    assert lookup.next_queries() == []
    assert numbers(lookup.result) == [1, 2, 3]


def test_the_unanswered_are_replaced_by_the_next():
    lookup = start(1, 2, 3, 4)
    lookup.next_queries()
    lookup.failed(peer(1))
    assert numbers(lookup.next_queries()) == [3]
    lookup.failed(peer(2))
    lookup.failed(peer(3))
    assert numbers(lookup.next_queries()) == [4]
    lookup.answered(peer(4), [])
    assert lookup.done
    assert numbers(lookup.result) == [4]


def test_a_slow_one_lets_others_be_asked_and_may_still_answer():
    lookup = start(1, 2, 3)
    lookup.next_queries()
    lookup.slow(peer(1))
    lookup.slow(peer(1))
    assert numbers(lookup.next_queries()) == [3]
    lookup.answered(peer(2), [])
    lookup.answered(peer(3), [])
    assert not lookup.done
    lookup.answered(peer(1), [])
    assert lookup.done
    assert numbers(lookup.result) == [1, 2, 3]


def test_ourselves_and_the_unreachable_are_not_candidates():
    lookup = start(1)
    lookup.next_queries()
    lookup.answered(peer(1), [Contact(OWN, (Address("10.0.0.9", 1),)), Contact(peer(2), ())])
    assert lookup.done


def test_what_was_not_asked_for_does_not_count():
    lookup = start(1, 2, 3)
    lookup.answered(peer(1), [contact(0)])
    lookup.failed(peer(2))
    assert numbers(lookup.next_queries()) == [1, 2]
    lookup.answered(peer(1), [])
    lookup.answered(peer(1), [contact(0)])  # twice
    lookup.answered(peer(99), [contact(0)])
    assert numbers(lookup.next_queries()) == [3]


def test_an_answer_counts_for_k_contacts():
    lookup = start(100)
    lookup.next_queries()
    lookup.answered(peer(100), map(contact, [50, 51, 52, 1]))
    assert numbers(lookup.next_queries()) == [50, 51]


def test_two_addresses_of_one_peer_are_both_tried():
    lookup = start(10, 11)
    lookup.next_queries()
    lookup.answered(peer(10), [contact(1, "10.0.0.2")])
    lookup.answered(peer(11), [contact(1, "10.0.0.3"), contact(1, "10.0.0.3")])
    (asked,) = lookup.next_queries()
    assert [address.host for address in asked.addresses] == ["10.0.0.2", "10.0.0.3"]


def test_one_network_has_only_its_share_of_the_result():
    seeds = [contact(number, f"8.8.8.{number}") for number in range(1, 9)] + [contact(20, "9.9.9.9")]
    lookup = Lookup(TARGET, OWN, seeds, SMALL)
    while not lookup.done:
        for asked in lookup.next_queries():
            lookup.answered(asked.peer, [])
    assert numbers(lookup.result) == [1, 2, 20]


def test_a_failed_one_gives_the_share_of_its_network_back():
    lookup = Lookup(TARGET, OWN, [contact(n, f"8.8.8.{n}") for n in (1, 2, 3)], SMALL)
    lookup.next_queries()
    lookup.failed(peer(1))
    assert numbers(lookup.next_queries()) == [3]


def test_a_liar_costs_a_few_timeouts_and_is_believed_no_more():
    settings = LookupSettings(k=20, alpha=3, distrust=6)
    honest = range(1000, 1020)
    lookup = start(500, *honest, settings=settings)
    fakes = 0
    while not lookup.done:
        for number in numbers(lookup.next_queries()):
            if number == 500:
                lookup.answered(peer(500), map(contact, range(1, 21)))  # nobody there
            elif number in honest:
                lookup.answered(peer(number), [])
            else:
                fakes += 1
                lookup.failed(peer(number))
    assert fakes <= 6 + 2  # two more may be under way
    assert numbers(lookup.result) == [500, *honest][:20]


def test_whom_somebody_honest_names_too_stays_a_candidate():
    settings = LookupSettings(k=4, alpha=1, distrust=2)
    lookup = start(10, 11, settings=settings)
    asked = []
    while not lookup.done:
        (query,) = numbers(lookup.next_queries())
        asked.append(query)
        if query in (10, 11):
            lookup.answered(peer(query), map(contact, [1, 2, 3, 4] if query == 10 else [4]))
        elif query == 4:
            lookup.answered(peer(4), [])
        else:
            lookup.failed(peer(query))
    assert asked[:3] == [10, 1, 2]
    assert 3 not in asked
    assert 4 in numbers(lookup.result)


def test_the_number_of_queries_is_bounded():
    lookup = start(2**40, settings=LookupSettings(k=3, alpha=3, max_queries=10, max_candidates=8))
    asked = 0
    while not lookup.done:
        for query in numbers(lookup.next_queries()):
            asked += 1
            lookup.answered(peer(query), [contact(query // 2 - n) for n in range(3)])
    assert asked == 10
    assert len(lookup._candidates) <= 10 + 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dead", "liars"), [(0.0, 0), (0.0, 5), (0.3, 0), (0.3, 5)])
def test_it_finds_the_closest_of_those_alive(seed, dead, liars):
    """A network of 200 whose tables know everyone near them and a few far away, in random order of answers."""
    rng = random.Random(seed)
    ids = [PeerId(hashlib.sha256(rng.randbytes(8)).digest()) for _ in range(200)]
    alive = {one: rng.random() >= dead for one in ids}
    lying = set(rng.sample([one for one in ids if alive[one]], liars))
    target = rng.randbytes(32)
    address = (Address("10.0.0.1", 1),)
    known = {
        one: sorted(ids, key=lambda other, one=one: distance(one, other))[1:30] + rng.sample(ids, 25) for one in ids
    }

    def answer(one: PeerId) -> list[Contact]:
        if one in lying:
            invented = [PeerId(target[:8] + rng.randbytes(24)) for _ in range(20)]
            return [Contact(other, address) for other in invented]
        nearest = sorted(known[one], key=lambda other: distance(other, target))[:20]
        return [Contact(other, address) for other in nearest]

    own = PeerId(rng.randbytes(32))
    lookup = Lookup(target, own, [Contact(one, address) for one in rng.sample(ids, 20)])
    in_flight: list[PeerId] = []
    while not lookup.done:
        in_flight += [c.peer for c in lookup.next_queries()]
        one = in_flight.pop(rng.randrange(len(in_flight)))
        if alive.get(one, False):
            lookup.answered(one, answer(one))
        else:
            lookup.failed(one)
    found = [c.peer for c in lookup.result]
    expected = sorted((one for one in ids if alive[one]), key=lambda one: distance(one, target))[:20]
    assert found[:5] == expected[:5]
    assert len(set(found) & set(expected)) >= 15
    assert found == sorted(found, key=lambda one: distance(one, target))
