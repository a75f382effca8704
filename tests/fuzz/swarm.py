"""Fuzz targets: the state machines that strangers' messages reach. They are told anything, in any order."""

from __future__ import annotations

from collections import Counter

from dht.ids import MAX_ADDRESSES, Contact, distance, network_group
from dht.lookup import Lookup, LookupSettings
from dht.messages import MAX_CONTACTS, Copy, Fetched
from dht.reading import MAX_PAGES, Reading
from dht.records import MAX_TTL, Record
from dht.store import RecordStore, StoreLimits, Verdict
from dht.table import RoutingTable, TableSettings
from protocol import wire
from protocol.ballots import Acceptor, Offer
from protocol.book import MAX_ADDRESSES as MOST_IN_BOOK
from protocol.book import AddressBook
from protocol.candidates import Candidate
from protocol.coordinator import Coordinator, RoundTimes, Send, View
from protocol.errors import ProtocolError
from protocol.identity import Identity, PeerId
from protocol.plan import MAX_ATTEMPT, MAX_JUMP, NO_BALLOT, Ballot, Plan, Source
from protocol.rates import Partner, Rates
from protocol.round_messages import Propose
from protocol.salvage import Holding, Span
from protocol.transport import Address
from tests.fuzz.choices import Choices

_SIGNERS = tuple(Identity.from_seed(bytes([number]) * 32) for number in range(1, 6))
_KEYS = (bytes(32), b"\xff" * 32)
_RECORDS = tuple(
    Record.sign(signer, key, b"v" * size, sequence=sequence, ttl=60)
    for signer in _SIGNERS
    for key in _KEYS
    for sequence, size in ((0, 0), (1, 1), (1, 2), (2**64 - 1, 4096))
)
_LIMITS = StoreLimits(per_key=3, per_signer=2, records=5, size=9_000, ttl=50.0)
_HOSTS = (
    "192.0.2.7",
    "192.0.2.8",
    "203.0.113.1",
    "10.0.0.1",
    "2001:db8::7",
    "::ffff:192.0.2.9",
    "fe80::1%eth0",
    "a.b.example",
)
_TABLE = TableSettings(k=3, replacements=2, per_bucket=2, per_table=3, forget_after=100.0)
_LOOKUP = LookupSettings(k=4, distrust=3, max_queries=12, max_candidates=16)
_US = PeerId(bytes(32))
_TIMES = RoundTimes()


def store(data: bytes) -> None:
    """Records, genuine and forged, offered and asked for at any time: the store keeps its bounds."""
    choices = Choices(data)
    held, now, newest = RecordStore(_US, _LIMITS), 0.0, {}
    while choices.left:
        now += choices.of((0.0, 0.0, 1.0, 30.0))
        record = choices.of(_RECORDS)
        if choices.one_in(4):
            record = Record(record.key, record.public_key, record.sequence, 60, record.value, bytes(64))
        remaining = choices.of((0.0, 1e-9, 1.0, 40.0, float(MAX_TTL)))
        place = record.key, record.signer
        before = held.get(*place, now)
        origin = choices.of(("", "192.0.2.7", "203.0.113.1"))
        verdict = held.put(record, remaining, now, by_signer=choices.one_in(2), origin=origin)
        after = held.get(*place, now)
        if before is not None:
            assert after is not None
            assert after.record == before.record or after.record.sequence > before.record.sequence
        if verdict is Verdict.STORED:
            assert record.verify()
            newest[place] = record
        assert after is None or after.record == newest[place]
        entries = list(held)
        assert len(entries) == len(held) <= _LIMITS.records
        assert held.size <= _LIMITS.size
        assert max(Counter(entry.record.key for entry in entries).values(), default=0) <= _LIMITS.per_key
        assert max(Counter(entry.record.signer for entry in entries).values(), default=0) <= _LIMITS.per_signer
        page, more = held.page(
            record.key, now, after=choices.of((b"", b"\x7f", record.signer, b"\xff" * 32)), records=2, size=5_000
        )
        assert all(0 < entry.remaining(now) <= _LIMITS.ttl for entry in page)
        assert page or not more


def table(data: bytes) -> None:
    """Contacts that answer, fail and move, in any order: the table keeps its bounds."""
    choices = Choices(data)
    known, now = RoutingTable(_US, _TABLE), 0.0
    while choices.left:
        now += choices.of((0.0, 1.0, 60.0))
        contact = _contact(choices)
        match choices.number(6):
            case 0 | 1 | 2:
                admitted = known.heard(contact, now)
                assert admitted == (contact.peer in known) or not contact.addresses
            case 3:
                known.failed(contact.peer, now)
            case 4:
                known.remove(contact.peer)
                assert contact.peer not in known
            case 5:
                known.looked_up(contact.peer, now)
            case 6:
                known.wants(contact.peer)
        entries = list(known)
        assert len(entries) == len(known)
        assert _US not in known
        groups = Counter(group for entry in entries for group in entry.contact.groups)
        assert max(groups.values(), default=0) <= _TABLE.per_table
        buckets = Counter(256 - distance(_US, entry.contact.peer).bit_length() for entry in entries)
        assert max(buckets.values(), default=0) <= _TABLE.k
        near = [distance(found.peer, contact.peer) for found in known.closest(contact.peer, 5)]
        assert near == sorted(near)
        assert len(known.freshest(4)) <= 4
        assert all(0 <= prefix < 256 for prefix in known.stale(now, 60))
        known.due(now, 60, 3)


def lookup(data: bytes) -> None:
    """Peers that name anybody, late or never: a lookup ends, and its bounds hold all the time."""
    choices = Choices(data)
    search = Lookup(bytes(choices.take(32).ljust(32, b"\0")), _US, [_contact(choices) for _ in range(3)], _LOOKUP)
    asked: list[PeerId] = []
    open_queries: list[PeerId] = []
    while not search.done:
        for contact in search.next_queries():
            assert contact.peer not in asked
            assert contact.peer != _US
            asked.append(contact.peer)
            open_queries.append(contact.peer)
        assert len(asked) <= _LOOKUP.max_queries
        assert open_queries or search.done, "a lookup that waits for nobody"
        if not open_queries:
            break
        peer = choices.of(open_queries)
        match choices.number(4):
            case 0 | 1:
                search.answered(peer, [_contact(choices) for _ in range(choices.number(MAX_CONTACTS))])
                open_queries.remove(peer)
            case 2:
                search.failed(peer)
                open_queries.remove(peer)
            case 3 if choices.left:
                search.slow(peer)
            case 4 if choices.left:
                search.answered(_contact(choices).peer, [_contact(choices)])
                open_queries = [
                    other for other in open_queries if search._candidates[other].state.name in ("ASKED", "SLOW")
                ]
            case _:
                search.failed(peer)
                open_queries.remove(peer)
        result = [distance(contact.peer, search._target) for contact in search.result]
        assert result == sorted(result)
        assert len(result) <= _LOOKUP.k
        assert {contact.peer for contact in search.result} <= set(asked)


def reading(data: bytes) -> None:
    """Pages of records from holders that lie: what is read is signed, of that key, and the newest shown."""
    choices = Choices(data)
    key = choices.of(_KEYS)
    reader = Reading(key, 0.0)
    shown: dict[PeerId, int] = {}
    for _ in range(1 + choices.number(2)):
        pages = reader.of(_contact(choices))
        for count in range(MAX_PAGES + 1):
            if pages.next_request() is None:
                break
            assert count < MAX_PAGES
            reply = _page(choices)
            try:
                pages.receive(reply)
            except ProtocolError:
                break
            for copy in reply.copies:
                record = Record.decode(copy.record)
                shown[record.signer] = max(shown.get(record.signer, 0), record.sequence)
    for signer, record in reader.result().items():
        assert record.verify()
        assert record.key == key
        assert record.signer == signer
        assert record.sequence >= shown.get(signer, 0)
        assert record.value
    for _, missing in reader.corrections(2):
        assert 0 < len(missing) <= 2


def _page(choices: Choices) -> Fetched:
    chosen = [choices.of(_RECORDS) for _ in range(choices.number(3))]
    if choices.number(3):
        chosen.sort(key=lambda record: record.signer)
    encoded = [choices.damaged(record.encoded) if choices.one_in(16) else record.encoded for record in chosen]
    return Fetched(tuple(Copy(data, choices.of((0.0, 1.0, 60.0))) for data in encoded), choices.one_in(2))


def _peer(choices: Choices) -> PeerId:
    """One of some peers whose distances from each other are of all lengths."""
    return PeerId(choices.of((bytes(31), b"\x80" + bytes(30), b"\xff" * 31)) + bytes([choices.number(11)]))


def _contact(choices: Choices) -> Contact:
    addresses = tuple(Address(choices.of(_HOSTS), choices.number(65_535)) for _ in range(choices.number(MAX_ADDRESSES)))
    assert all(network_group(address.host) != "" for address in addresses)
    return Contact(_peer(choices), addresses)


def book(data: bytes) -> None:
    """Hearsay about addresses: it stays bounded, and never hides where a peer was met."""
    choices = Choices(data)
    known = AddressBook()
    met: dict[PeerId, Address] = {}
    while choices.left:
        contact = _contact(choices)
        if choices.one_in(4) and contact.addresses:
            known.learn(contact.peer, contact.addresses[:1], proven=True)
            met[contact.peer] = contact.addresses[0]
        else:
            known.learn(contact.peer, contact.addresses * 3)
        found = known.addresses(contact.peer)
        assert len(found) <= MOST_IN_BOOK
        if contact.peer in met:
            assert found[0] == met[contact.peer]


def coordinator(data: bytes) -> None:
    """Members, and others, that say anything in any order: plans are valid, their ballots rise, and rounds get on."""
    choices = Choices(data)
    peers = [PeerId(bytes([number]) * 32) for number in range(1, 6)]
    fixed = choices.one_in(2)
    core = Coordinator(run=bytes(32), tag="", revision=1, peer=peers[0], times=_TIMES, fixed=fixed)
    ballots = [NO_BALLOT]
    now = 0.0
    while choices.left:
        now += choices.of((0.0, 0.5, 5.0, 1000.0))
        _tell(choices, core, choices.of(peers), peers, ballots, now)
        view = View(
            expected=frozenset(peer for peer in peers if choices.number(3)),
            woken=choices.one_in(8),
            arriving=frozenset(peer for peer in peers if choices.one_in(4)),
            leading=choices.number(3) > 0,
            rank=choices.number(3),
            base=choices.of((bytes(32), None, b"1" * 32)),
            patience=choices.of((0.0, 20.0)),
        )
        proposed = set()
        for action in core.poll(now, view):
            if isinstance(action, Send):
                wire.encode(action.message)
                if isinstance(action.message, Propose):
                    proposed.add(action.message.plan)
        for plan in sorted(proposed, key=lambda plan: plan.ballot):
            assert plan.coordinator == peers[0]
            assert plan.ballot > ballots[-1]
            ballots.append(plan.ballot)
        assert len(proposed) <= 1
        assert core.holder is not None or core.deadline >= 0


def _tell(
    choices: Choices, core: Coordinator, peer: PeerId, peers: list[PeerId], ballots: list[Ballot], now: float
) -> None:
    """One fact, true or not."""
    ballot = ballots[-1] if choices.number(3) else _ballot(choices, peers)
    match choices.number(11):
        case 0 | 1 | 2:
            weight, length = choices.of((0.0, 1.0, 1e15)), choices.of((4, 4, 4, 0, 2**40))
            base = choices.of((bytes(32), bytes(32), b"1" * 32))
            tried, holdings = frozenset(peers[: choices.number(2)]), _holdings(choices, core, peers)
            rates = _rates(choices, peers)
            late = choices.one_in(2)
            core.ready(peer, Candidate(weight, length, base, tried, holdings, rates=rates, late=late), ballot)
        case 3:
            core.gone(peer)
        case 4:
            core.accepted(peer, ballot)
        case 5:
            core.rejected(peer, ballot, _ballot(choices, peers))
        case 6:
            core.failed(peer, ballot, choices.of(peers), choices.boundary() % 2**40, now)
        case 7:
            plan_id = core.plan.id if core.plan is not None and choices.number(3) else bytes(32)
            core.completed(peer, ballot, plan_id)
        case 8:
            core.answered(peer, choices.of(("noted", "late", "led", "gone")))
        case 9:
            core.step_down(peer, ())
        case 10:
            core.halted(peer, ballot, _holdings(choices, core, peers))
        case _:
            if core.holder is not None:
                core.reopen()
            elif choices.one_in(8):
                core.finished_elsewhere(peer)


def _holdings(choices: Choices, core: Coordinator, peers: list[PeerId]) -> tuple[Holding, ...]:
    """What a member might say it holds, of the plan that is out or of others, also beyond the end of the vector."""
    holdings = []
    for _ in range(choices.number(2)):
        source = Source(choices.of((bytes(32), b"1" * 32)), (peers[0],), (choices.of((1.0, 0.0, 1e15)),))
        if core.plan is not None and choices.number(3):
            source = Source(core.plan.id, core.plan.members, core.plan.weights)
        spans = tuple(Span(choices.number(5), choices.number(5)) for _ in range(choices.number(3)))
        holdings.append(Holding(source, spans))
    return tuple(holdings)


def _rates(choices: Choices, peers: list[PeerId]) -> Rates:
    """What a member might say about its lines and the ways to others, itself and strangers among them."""
    numbers = (0, 1, 10**6, 2**40)
    partners = (
        Partner(
            choices.of((*peers, PeerId(b"s" * 32))),
            choices.of(numbers),
            choices.of(numbers),
            choices.of((0, 50_000, 10**8)),
            choices.one_in(2),
            choices.of(numbers),
        )
        for _ in range(choices.number(3))
    )
    return Rates(choices.of(numbers), choices.of(numbers), tuple(partners))


def _ballot(choices: Choices, peers: list[PeerId]) -> Ballot:
    return Ballot(choices.of((0, 1, 2, 3, MAX_JUMP, MAX_ATTEMPT)), choices.number(4), choices.of(peers))


def acceptor(data: bytes) -> None:
    """Plans of rival coordinators: what is given up is never completed, and promises only rise."""
    choices = Choices(data)
    peers = [PeerId(bytes([number]) * 32) for number in range(1, 4)]
    member = Acceptor(peers[0])
    offer = Offer(run=bytes(32), tag="", revision=1, base=bytes(32), weight=1.0, length=4, max_weight=10.0)
    plans: list[Plan] = []
    given_up = NO_BALLOT
    while choices.left:
        before = member.promised
        match choices.number(3):
            case 0 | 1:
                plan = _plan(choices, peers)
                sender = plan.coordinator if choices.number(3) else choices.of(peers)
                if member.accept(plan, offer, sender) is None:
                    assert plan.ballot > given_up
                    assert plan.attempt <= before.attempt + MAX_JUMP
                    assert peers[0] in plan.members
                    given_up = before
                    plans.append(plan)
            case 2:
                ballot = _ballot(choices, peers)
                member.renounce(ballot)
                if not member.completed:  # what is too far ahead is not given up, but what is being done all the same
                    given_up = max(given_up, ballot if ballot.attempt <= before.attempt + MAX_JUMP else before)
            case 3 if plans:
                plan = choices.of(plans)
                if member.complete(plan):
                    assert plan.ballot > given_up
                    assert plan == plans[-1]
        assert member.promised >= before


def _plan(choices: Choices, peers: list[PeerId]) -> Plan:
    members = tuple(peers[choices.number(1) : 1 + choices.number(2)]) or tuple(peers)
    ballot = _ballot(choices, peers)
    return Plan(
        run=choices.of((bytes(32), bytes(32), b"1" * 32)),
        revision=1,
        attempt=max(1, ballot.attempt),
        rank=ballot.rank,
        coordinator=ballot.coordinator,
        members=members,
        weights=tuple(choices.of((1.0, 1.0, 0.0, 11.0)) for _ in members),
        length=choices.of((4, 4, 5)),
        schedule=choices.of(("ring", "direct")),
    )
