"""The bytes of every message, frame and record, so that no change of the wire format goes unnoticed.

docs/protocol.md describes them. Whoever changes a line here changes the protocol, and raises its version.
"""

from __future__ import annotations

import hashlib

import attrs
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dht import members_key
from dht import messages as dht
from dht.ids import Contact
from dht.records import Record
from peer import membership, sync
from protocol import endpoint, frames, round_messages, wire
from protocol.frames import Kind
from protocol.identity import Identity, PeerId
from protocol.mux import Mux, MuxLimits
from protocol.noise import Handshake
from protocol.plan import NO_BALLOT, Ballot, Plan
from protocol.records import RecordWriter
from protocol.transport import Address

ONES, TWOS = b"\x11" * 32, b"\x22" * 32
ALICE, BOB = PeerId(b"\xaa" * 32), PeerId(b"\xbb" * 32)
HOME, OFFICE = Address("192.0.2.7", 7070), Address("2001:db8::7", 7071)
COPY = dht.Copy(b"record", 1.5)
BALLOT = Ballot(2, 1, ALICE)
PLAN = Plan(
    run=ONES,
    revision=300,
    attempt=1,
    rank=0,
    coordinator=ALICE,
    members=(BOB, ALICE),
    weights=(1.0, 2.5),
    length=1_000_000,
    base=TWOS,
)
TIP = membership.TipClaim(3, 1e6, TWOS)

MESSAGES = {
    endpoint.Hello(b"\x01" * 8, 2, 7070): "HEX",
    dht.Ping(): "HEX",
    dht.Pong(): "HEX",
    dht.Find(ONES): "HEX",
    dht.Found((Contact(ALICE, (HOME, OFFICE)), Contact(BOB, ()))): "HEX",
    dht.Store(COPY): "HEX",
    dht.Stored("stored", None): "HEX",
    dht.Stored("stale", COPY): "HEX",
    dht.Fetch(ONES, b""): "HEX",
    dht.Fetched((COPY,), True): "HEX",
    round_messages.Ready(ONES, "", 300, TWOS, 2.5, 1_000_000, NO_BALLOT, (BOB,)): "HEX",
    round_messages.Queued(): "HEX",
    round_messages.Redirect(BOB, (HOME,)): "HEX",
    round_messages.Ahead(300, BOB): "HEX",
    round_messages.Forked(TWOS): "HEX",
    round_messages.Propose(PLAN): "HEX",
    round_messages.Accepted(BALLOT): "HEX",
    round_messages.Rejected(BALLOT, NO_BALLOT, "no"): "HEX",
    round_messages.Failed(BALLOT, BOB, 5): "HEX",
    round_messages.Completed(BALLOT, ONES): "HEX",
    round_messages.CallOff(BALLOT, None): "HEX",
    round_messages.CallOff(BALLOT, BOB): "HEX",
    round_messages.RoundOpen(ONES, "tag", 300, 2.5): "HEX",
    round_messages.Noted(): "HEX",
    round_messages.Led(BOB, ()): "HEX",
    round_messages.RingData(ONES, "", TWOS): "HEX",
    round_messages.FetchResult(ONES, "", 300): "HEX",
    round_messages.Result(PLAN): "HEX",
    membership.Hello(ONES, None, False): "HEX",
    membership.Welcome(TIP, True, (membership.KnownMember(BOB, (HOME,)),)): "HEX",
    sync.ManifestRequest(ONES): "HEX",
    sync.ManifestReply("[run]"): "HEX",
    sync.DescribeRequest(ONES, TWOS): "HEX",
    sync.Description(3, ONES, TWOS, 1e6, ONES, ("momentum",), 70_000): "HEX",
    sync.RangeRequest(ONES, TWOS, 17): "HEX",
    sync.RangeReply(1 << 20): "HEX",
}
