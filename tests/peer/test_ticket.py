import hashlib

import attrs
import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peer.text import to_base32
from peer.ticket import CLOCK_TOLERANCE, MAX_TICKET, Ticket, TicketError, TicketExpired
from protocol.identity import PeerId
from protocol.transport import Address

RUN = bytes(range(32))
PEER = PeerId(b"p" * 32)
TICKET = Ticket(RUN, ((PEER, Address("192.0.2.7", 7070)),), swarm_key=b"k" * 32, expires=1000.0)

label = st.from_regex(r"[a-z][a-z0-9]{0,20}", fullmatch=True)
addresses = st.builds(
    Address,
    st.one_of(st.ip_addresses().map(str), st.lists(label, min_size=1, max_size=4).map(".".join)),
    st.integers(1, 65535),
)
keys = st.binary(min_size=32, max_size=32)
tickets = st.builds(
    Ticket,
    keys,
    st.lists(st.tuples(keys.map(PeerId), addresses), min_size=1, max_size=8).map(tuple),
    st.none() | keys,
    st.none() | st.floats(0, 1e12),
).flatmap(
    lambda ticket: st.builds(
        attrs.evolve, st.just(ticket), key_number=st.integers(0, 2**32 - 1) if ticket.swarm_key else st.just(0)
    )
)


def wrap(body, version=1):
    """A ticket with a right checksum around any body."""
    data = bytes([version]) + body
    return "shoal:" + to_base32(hashlib.sha256(data).digest()[:4] + data)


def fields(**changes):
    """The map in a valid ticket, changed."""
    return {"r": RUN, "b": [[bytes(PEER), "192.0.2.7", 7070]], **changes}


@given(tickets)
def test_a_ticket_survives_its_text(ticket):
    text = ticket.encode()
    assert len(text) <= MAX_TICKET
    assert Ticket.parse(text, now=0.0) == ticket


def test_the_longest_ticket_fits():
    host = ".".join(["a" * 62] * 4)
    peers = tuple((PeerId(bytes([i]) * 32), Address(host, 65535)) for i in range(8))
    ticket = Ticket(RUN, peers, swarm_key=bytes(32), key_number=2**32 - 1, expires=1e12)
    assert len(ticket.encode()) <= MAX_TICKET
    assert Ticket.parse(ticket.encode(), now=0.0) == ticket


@given(tickets, st.data())
def test_case_and_white_space_do_not_matter(ticket, data):
    text = ticket.encode()
    place = data.draw(st.integers(0, len(text)))
    space = data.draw(st.sampled_from([" ", "\n", "\r\n  ", "\t", "\u00a0"]))
    assert Ticket.parse(f"  {(text[:place] + space + text[place:]).upper()}\n", now=0.0) == ticket


@given(tickets, st.data())
def test_no_single_typing_error_is_accepted(ticket, data):
    text = ticket.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(exclude_categories=["Cs"]))
    changed = text[:place] + character + text[place + 1 :]
    try:
        assert Ticket.parse(changed, now=0.0) == ticket
        assert character.lower() == text[place]
    except TicketError as error:
        assert "\n" not in str(error)


@given(tickets, st.data())
def test_no_part_of_a_ticket_is_accepted(ticket, data):
    text = ticket.encode()
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    if text[begin:end] != text:
        with pytest.raises(TicketError):
            Ticket.parse(text[begin:end], now=0.0)


@given(st.binary(max_size=200), st.integers(0, 255))
@example(msgpack.packb({"r": RUN, "b": []}), 1)
@example(b"\x81" * 100, 1)
@example(b"\x91" * 3000, 1)
@example(b"\xdf\xff\xff\xff\xff", 1)
def test_garbage_with_a_right_checksum_is_refused(body, version):
    with pytest.raises(TicketError) as caught:
        Ticket.parse(wrap(body, version), now=0.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        fields(x=1),
        fields(r=RUN[:-1]),
        fields(n=1),
        fields(k=b"k" * 32, n=0),
        fields(k=b"k" * 32, n=-1),
        fields(k=b"k" * 32, n=2**32),
        fields(k=b"k" * 32, n=True),
        fields(k=b"k" * 32, n=1.0),
        fields(r="r" * 32),
        fields(b=[]),
        fields(b=[[bytes(PEER), "192.0.2.7", 7070]] * 9),
        fields(b=[[bytes(PEER), "192.0.2.7", 0]]),
        fields(b=[[bytes(PEER), "192.0.2.7", "7070"]]),
        fields(b=[[bytes(PEER), "not a host", 7070]]),
        fields(b=[[bytes(PEER), "192.0.2.7"]]),
        fields(b=[[b"short", "192.0.2.7", 7070]]),
        fields(b=[[list(PEER), "192.0.2.7", 7070]]),
        fields(b=[["p" * 32, "192.0.2.7", 7070]]),
        fields(b=7),
        fields(k=b"short"),
        fields(k=None),
        fields(e=float("nan")),
        fields(e=float("inf")),
        fields(e=-1.0),
        fields(e=5),
        fields(e="soon"),
        {"b": fields()["b"]},
        {"r": RUN},
        {"b": fields()["b"], "r": RUN},
        [],
        7,
        {},
    ],
)
def test_tickets_that_make_no_sense_are_refused(body):
    with pytest.raises(TicketError, match="makes no sense"):
        Ticket.parse(wrap(msgpack.packb(body)), now=0.0)


def test_trailing_bytes_are_refused():
    assert Ticket.parse(wrap(msgpack.packb(fields())), now=0.0).run_id == RUN
    with pytest.raises(TicketError, match="makes no sense"):
        Ticket.parse(wrap(msgpack.packb(fields()) + b"\0"), now=0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("shoal:", "checksum"),
        ("shoal", "begins with"),
        ("https://example.org", "begins with"),
        ("shoal:abc0", "has '0' as its character 10"),
        ("shoal:a=======", "has '='"),
        ("shoal:a", "incomplete"),
        ("shoal:ab", "last character"),
        ("shoal:" + "a" * MAX_TICKET, "too long"),
        (" " * 10 * MAX_TICKET, "too long"),
        (wrap(b"", version=2), "has format 2"),
    ],
)
def test_each_mistake_has_its_own_line(text, message):
    with pytest.raises(TicketError, match=message) as caught:
        Ticket.parse(text, now=0.0)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, TicketExpired)


def test_a_ticket_that_has_expired_is_not_good_for_long():
    assert not TICKET.is_over(1060.0)
    assert TICKET.is_over(1061.0)
    assert not attrs.evolve(TICKET, expires=None).is_over(1e12)


def test_expiry_tolerates_clocks_that_disagree():
    text = TICKET.encode()
    assert Ticket.parse(text, now=1000.0 + CLOCK_TOLERANCE) == TICKET
    with pytest.raises(TicketExpired, match=r"expired 1 min 01 s ago, by this machine's clock"):
        Ticket.parse(text, now=1001.0 + CLOCK_TOLERANCE)
    assert Ticket.parse(attrs.evolve(TICKET, expires=None).encode(), now=1e12).expires is None


def test_the_key_is_not_shown():
    assert "kkk" not in repr(TICKET)


def test_impossible_tickets_cannot_be_made():
    with pytest.raises(ValueError, match="run_id must be 32 bytes"):
        Ticket(b"short", TICKET.bootstrap)
    with pytest.raises(ValueError, match="1 to 8 bootstrap peers"):
        Ticket(RUN, ())
    with pytest.raises(ValueError, match=r"nobody can be reached at 192\.0\.2\.7:0"):
        Ticket(RUN, ((PEER, Address("192.0.2.7", 0)),))


def test_the_format_is_fixed():
    assert Ticket(RUN, TICKET.bootstrap).encode() == (
        "shoal:tdodkkybqkqxfrbaaaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dyp2cyurspcca4dqobyh"
        "a4dqobyha4dqobyha4dqobyha4dqobyha4dqobyha4dqveytsmrogaxdelrxzunz4"
    )
