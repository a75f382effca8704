from __future__ import annotations

from protocol import book
from protocol.book import AddressBook, Strikes
from protocol.identity import PeerId
from protocol.transport import Address


def peer(number):
    return PeerId(number.to_bytes(32, "big"))


def address(number):
    return Address("host", number)


def test_the_latest_addresses_come_first_and_few_are_kept():
    addresses = AddressBook()
    for number in range(20):
        addresses.learn(peer(1), (address(number),))
    addresses.learn(peer(1), (address(17),))
    assert addresses.addresses(peer(1)) == tuple(map(address, [17, 19, 18, 16]))
    addresses.forget(peer(1), address(19))
    assert address(19) not in addresses.addresses(peer(1))
    assert addresses.addresses(peer(2)) == ()
    addresses.forget(peer(2), address(1))


def test_hearsay_does_not_displace_what_was_proven():
    addresses = AddressBook()
    addresses.learn(peer(1), (address(1),), proven=True)
    for number in range(10, 30):
        addresses.learn(peer(1), (address(number),))
    assert addresses.addresses(peer(1)) == tuple(map(address, [1, 29, 28, 27, 26]))
    addresses.learn(peer(1), (address(29),), proven=True)
    assert addresses.addresses(peer(1)) == tuple(map(address, [29, 1, 28, 27, 26]))


def test_the_book_is_bounded():
    addresses = AddressBook()
    for number in range(book.MAX_PEERS + 10):
        addresses.learn(peer(number), (address(1),))
        addresses.learn(peer(0), (address(2),))
    assert addresses.addresses(peer(0))
    assert not addresses.addresses(peer(1))
    assert addresses.addresses(peer(book.MAX_PEERS))


def test_hearsay_about_many_does_not_displace_those_that_were_met():
    addresses = AddressBook()
    addresses.learn(peer(0), (address(1),), proven=True)
    for number in range(1, 3 * book.MAX_PEERS):
        addresses.learn(peer(number), (address(2),))
    assert addresses.addresses(peer(0)) == (address(1),)


def test_the_list_of_offenders_is_bounded():
    strikes = Strikes()
    for number in range(book.MAX_PEERS + 10):
        strikes.strike(peer(number), 0.0)
    assert len(strikes._records) == book.MAX_PEERS


def test_repeated_errors_ban_for_a_while():
    strikes = Strikes()
    assert [strikes.strike(peer(1), now) for now in (0, 10, 20)] == [False, False, True]
    assert strikes.is_banned(peer(1), 79)
    assert not strikes.is_banned(peer(1), 80)
    assert not strikes.is_banned(peer(2), 20)
    assert strikes.strike(peer(1), 100)


def test_old_errors_are_forgiven():
    strikes = Strikes()
    assert not any(strikes.strike(peer(1), now) for now in range(0, 10_000, 301))
