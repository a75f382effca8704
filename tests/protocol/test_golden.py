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
from peer import chain, membership, probe, rotation, sync
from peer.pipeline import messages as stages
from protocol import frames, hello, lane, mesh, punch, reachability, relay, rivals, round_messages, wire
from protocol.budget import Budget
from protocol.channel import LANE_OPENING
from protocol.frames import Kind as FrameKind
from protocol.identity import Identity, PeerId
from protocol.kinds import Brought, Kind, Terms
from protocol.mux import FIRST_WINDOW, Mux
from protocol.mux_stream import MuxLimits, MuxStream
from protocol.noise import Handshake
from protocol.pairs import swap_id
from protocol.pieces import Piece
from protocol.plan import NO_BALLOT, Ballot, Plan, Salvaged, Source
from protocol.rates import Partner, Rates
from protocol.records import RecordWriter
from protocol.salvage import Holding, Span
from protocol.transport import Address
from protocol.weights import SIZE, SignedWeight, sign_weight

ONES, TWOS = b"\x11" * 32, b"\x22" * 32
ALICE, BOB = PeerId(b"\xaa" * 32), PeerId(b"\xbb" * 32)
HOME, OFFICE = Address("192.0.2.7", 7070), Address("2001:db8::7", 7071)
SIGNATURE = b"s" * SIZE
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
    signatures=(SIGNATURE, SIGNATURE),
)
TERMS = Terms("all_reduce", quorum=2, grace=1.0, keep=8)
SOURCE = Source(ONES, (BOB,), (1.0,))
SALVAGING = attrs.evolve(PLAN, sources=(SOURCE,), salvaged=(Salvaged(5, 300, 0, (0, 1)),))
UNEQUAL = attrs.evolve(PLAN, schedule="direct", blocks=(0, 1_000_000))
RATES = Rates(1_000_000, 0, (Partner(BOB, 0, 300, 50_000, True, 400),))
GATHERING = attrs.evolve(PLAN, weights=(1.0, 0.0), length=5, operation="gather", sizes=(5, 0), signatures=(SIGNATURE,))
TIP = membership.TipClaim(3, 1e6, TWOS)
MEASURED, SQUARES = stages.Measured(6, 2.5), stages.Squares(6, 2.5)
STANDING = stages.Standing(
    5, 0, 1, True, 7, 1, 4, False, (2, 3), 2.5, 6, 1, False, 2, (0,), MEASURED, 1.5, SQUARES, (BOB,)
)
SHAPE = stages.Shape("int8", (2, 16, 8), 264)

MESSAGES = {
    hello.Hello(b"\x01" * 8, 2, 7070): "9a ab73686f616c2e68656c6c6f c408 01*8 02 cd1b9e c0 c0 c0 c2 c2 c2",
    hello.Hello(b"\x01" * 8, 2, 7070, HOME, OFFICE, HOME, True, True, True): (
        "9a ab73686f616c2e68656c6c6f c408 01*8 02 cd1b9e ae3139322e302e322e373a37303730 "
        "b25b323030313a6462383a3a375d3a37303731 ae3139322e302e322e373a37303730 c3 c3 c3"
    ),
    punch.Offer(HOME): "92 ab70756e63682e6f66666572 ae3139322e302e322e373a37303730",
    punch.Answer(OFFICE): "92 ac70756e63682e616e73776572 b25b323030313a6462383a3a375d3a37303731",
    punch.Sync(): "91 aa70756e63682e73796e63",
    punch.Go(): "91 a870756e63682e676f",
    reachability.DialBack(7070, b"\x05" * 16): "93 ac6e65742e6469616c6261636b cd1b9e c410 05*16",
    reachability.DialBackResult(True): "92 b36e65742e6469616c6261636b2e726573756c74 c3",
    relay.Connect(ALICE): "92 ad72656c61792e636f6e6e656374 c420 aa*32",
    relay.Incoming(BOB): "92 ae72656c61792e696e636f6d696e67 c420 bb*32",
    relay.Ready(): "91 ab72656c61792e7265616479",
    rivals.Vouch(b"\x01" * 8): "92 ae6964656e746974792e766f756368 c408 01*8",
    rivals.Vouched(b"\x02" * 64): "92 b06964656e746974792e766f7563686564 c440 02*64",
    dht.Ping(): "91 a86468742e70696e67",
    dht.Pong(): "91 a86468742e706f6e67",
    dht.Find(ONES): "92 a86468742e66696e64 c420 11*32",
    dht.Found((Contact(ALICE, (HOME, OFFICE)), Contact(BOB, ()))): (
        "92 a96468742e666f756e64 92 92 c420 aa*32 92 ae3139322e302e322e373a37303730 "
        "b25b323030313a6462383a3a375d3a37303731 92 c420 bb*32 90"
    ),
    dht.Store(COPY): "92 a96468742e73746f7265 92 c406 7265636f7264 cb3ff8000000000000",
    dht.Stored("stored", None): "93 aa6468742e73746f726564 a673746f726564 c0",
    dht.Stored("stale", COPY): "93 aa6468742e73746f726564 a57374616c65 92 c406 7265636f7264 cb3ff8000000000000",
    dht.Fetch(ONES, b""): "93 a96468742e6665746368 c420 11*32 c400",
    dht.Fetched((COPY,), True): "93 ab6468742e66657463686564 91 92 c406 7265636f7264 cb3ff8000000000000 c3",
    round_messages.Ready(ONES, "", 300, TWOS, 0.0, 1_000_000, NO_BALLOT, (BOB,)): (
        "dc0010 ab726f756e642e7265616479 c420 11*32 a0 cd012c c420 22*32 cb0000000000000000 ce000f4240 93 00 "
        "00 c420 00*32 91 c420 bb*32 90 a6726564756365 c0 93 00 00 90 "
        "a466703332 95 a0 a672616e646f6d 00 cb0000000000000000 00 c2"
    ),
    round_messages.Ready(ONES, "", 300, TWOS, 2.5, 1_000_000, NO_BALLOT, (BOB,), signature=SIGNATURE): (
        "dc0010 ab726f756e642e7265616479 c420 11*32 a0 cd012c c420 22*32 cb4004000000000000 ce000f4240 93 00 "
        "00 c420 00*32 91 c420 bb*32 90 a6726564756365 c460 73*96 "
        "93 00 00 90 a466703332 95 a0 a672616e646f6d 00 cb0000000000000000 00 c2"
    ),
    round_messages.Ready(ONES, "", 300, TWOS, 0.0, 1_000_000, NO_BALLOT, (), rates=RATES): (
        "dc0010 ab726f756e642e7265616479 c420 11*32 a0 cd012c c420 22*32 cb0000000000000000 ce000f4240 93 00 "
        "00 c420 00*32 90 90 a6726564756365 c0 93 ce000f4240 00 91 96 c420 bb*32 00 cd012c cdc350 c3 cd0190 "
        "a466703332 95 a0 a672616e646f6d 00 cb0000000000000000 00 c2"
    ),
    round_messages.Ready(ONES, "", 300, TWOS, 0.0, 5, NO_BALLOT, (), codec="int8", terms=TERMS, late=True): (
        "dc0010 ab726f756e642e7265616479 c420 11*32 a0 cd012c c420 22*32 cb0000000000000000 05 "
        "93 00 00 c420 00*32 90 90 a6726564756365 c0 93 00 00 90 a4696e7438 "
        "95 aa616c6c5f726564756365 a672616e646f6d 02 cb3ff0000000000000 08 c3"
    ),
    round_messages.Queued(300): "92 ac726f756e642e717565756564 cd012c",
    round_messages.Redirect(BOB, (HOME,)): (
        "93 ae726f756e642e7265646972656374 c420 bb*32 91 ae3139322e302e322e373a37303730"
    ),
    round_messages.Ahead(300, BOB): "93 ab726f756e642e6168656164 cd012c c420 bb*32",
    round_messages.Forked(TWOS): "92 ac726f756e642e666f726b6564 c420 22*32",
    round_messages.Misfits((Brought(BOB, Kind("reduce", 300, "int8", TERMS), True),)): (
        "92 ac726f756e642e6d6973666974 91 93 c420 bb*32 94 a6726564756365 cd012c a4696e7438 "
        "95 aa616c6c5f726564756365 a672616e646f6d 02 cb3ff0000000000000 08 c3"
    ),
    round_messages.Compare(ONES, "tag", 300, Kind("gather", 0)): (
        "95 ad726f756e642e636f6d70617265 c420 11*32 a3746167 cd012c "
        "94 a6676174686572 00 a466703332 95 a0 a672616e646f6d 00 cb0000000000000000 00"
    ),
    round_messages.Brings(None, False): "93 ac726f756e642e6272696e6773 c0 c2",
    round_messages.Brings(Kind("exchange", 300, "fp32", Terms("exchange", "exponential")), True): (
        "93 ac726f756e642e6272696e6773 94 a865786368616e6765 cd012c a466703332 "
        "95 a865786368616e6765 ab6578706f6e656e7469616c 00 cb0000000000000000 00 c3"
    ),
    round_messages.Propose(PLAN): (
        "92 ad726f756e642e70726f706f7365 dc0012 c420 11*32 cd012c 01 00 c420 aa*32 92 c420 bb*32 c420 aa*32 "
        "92 cb3ff0000000000000 cb4004000000000000 ce000f4240 c420 22*32 a0 a466703332 90 90 a6726564756365 90 "
        "92 c460 73*96 c460 73*96 a472696e67 90"
    ),
    round_messages.Propose(SALVAGING): (
        "92 ad726f756e642e70726f706f7365 dc0012 c420 11*32 cd012c 01 00 c420 aa*32 92 c420 bb*32 c420 aa*32 "
        "92 cb3ff0000000000000 cb4004000000000000 ce000f4240 c420 22*32 a0 a466703332 "
        "91 93 c420 11*32 91 c420 bb*32 91 cb3ff0000000000000 91 94 05 cd012c 00 92 00 01 a6726564756365 90 "
        "92 c460 73*96 c460 73*96 a472696e67 90"
    ),
    round_messages.Propose(GATHERING): (
        "92 ad726f756e642e70726f706f7365 dc0012 c420 11*32 cd012c 01 00 c420 aa*32 92 c420 bb*32 c420 aa*32 "
        "92 cb3ff0000000000000 cb0000000000000000 05 c420 22*32 a0 a466703332 90 90 a6676174686572 92 05 00 "
        "91 c460 73*96 a472696e67 90"
    ),
    round_messages.Propose(UNEQUAL): (
        "92 ad726f756e642e70726f706f7365 dc0012 c420 11*32 cd012c 01 00 c420 aa*32 92 c420 bb*32 c420 aa*32 "
        "92 cb3ff0000000000000 cb4004000000000000 ce000f4240 c420 22*32 a0 a466703332 90 90 a6726564756365 90 "
        "92 c460 73*96 c460 73*96 a6646972656374 92 00 ce000f4240"
    ),
    round_messages.Waiting(ONES, "", TWOS): "94 ac72696e672e77616974696e67 c420 11*32 a0 c420 22*32",
    round_messages.Waits(2.5): "92 aa72696e672e7761697473 cb4004000000000000",
    round_messages.Halt(BALLOT): "92 aa726f756e642e68616c74 93 02 01 c420 aa*32",
    round_messages.Halted(BALLOT, (Holding(SOURCE, (Span(5, 300),)),)): (
        "93 ac726f756e642e68616c746564 93 02 01 c420 aa*32 "
        "91 92 93 c420 11*32 91 c420 bb*32 91 cb3ff0000000000000 91 92 05 cd012c"
    ),
    round_messages.Accepted(BALLOT): "92 ae726f756e642e6163636570746564 93 02 01 c420 aa*32",
    round_messages.Rejected(BALLOT, NO_BALLOT, "no"): (
        "94 ae726f756e642e72656a6563746564 93 02 01 c420 aa*32 93 00 00 c420 00*32 a26e6f"
    ),
    round_messages.Failed(BALLOT, BOB, 5): "94 ac726f756e642e6661696c6564 93 02 01 c420 aa*32 c420 bb*32 05",
    round_messages.Completed(BALLOT, ONES): "93 af726f756e642e636f6d706c65746564 93 02 01 c420 aa*32 c420 11*32",
    round_messages.CallOff(BALLOT, None): "93 ad726f756e642e63616c6c6f6666 93 02 01 c420 aa*32 c0",
    round_messages.CallOff(BALLOT, BOB): "93 ad726f756e642e63616c6c6f6666 93 02 01 c420 aa*32 c420 bb*32",
    round_messages.RoundOpen(ONES, "tag", 300, TWOS, 2.5): (
        "96 aa726f756e642e6f70656e c420 11*32 a3746167 cd012c c420 22*32 cb4004000000000000"
    ),
    round_messages.Noted(): "91 ab726f756e642e6e6f746564",
    round_messages.Late(): "91 aa726f756e642e6c617465",
    round_messages.Led(BOB, ()): "93 a9726f756e642e6c6564 c420 bb*32 90",
    round_messages.RingData(ONES, "", TWOS): "94 a972696e672e64617461 c420 11*32 a0 c420 22*32",
    mesh.MeshHello(ONES, (mesh.Known(BOB, (HOME,)),)): (
        "93 aa6d6573682e68656c6c6f c420 11*32 91 92 c420 bb*32 91 ae3139322e302e322e373a37303730"
    ),
    mesh.MeshWelcome(()): "92 ac6d6573682e77656c636f6d65 90",
    round_messages.GatherBlock(1): "92 ac6761746865722e626c6f636b 01",
    round_messages.FetchResult(ONES, "", 300): "94 ab726f756e642e6665746368 c420 11*32 a0 cd012c",
    round_messages.Result(PLAN): (
        "92 ac726f756e642e726573756c74 dc0012 c420 11*32 cd012c 01 00 c420 aa*32 92 c420 bb*32 c420 aa*32 92 "
        "cb3ff0000000000000 cb4004000000000000 ce000f4240 c420 22*32 a0 a466703332 90 90 a6726564756365 90 "
        "92 c460 73*96 c460 73*96 a472696e67 90"
    ),
    membership.Hello(
        ONES, membership.StatusClaim(1, None, False)
    ): "93 ac6d656d6265722e68656c6c6f c420 11*32 94 01 c0 c2 cb0000000000000000",
    membership.Welcome(membership.StatusClaim(300, TIP, True, 2.5), (membership.KnownMember(BOB, (HOME,)),)): (
        "93 ae6d656d6265722e77656c636f6d65 94 cd012c 93 03 cb412e848000000000 c420 22*32 c3 cb4004000000000000 91 92 "
        "c420 bb*32 91 ae3139322e302e322e373a37303730"
    ),
    rotation.KeyRotation(ONES, 300, TWOS, (BOB,), b"s" * 64): (
        "96 a772756e2e6b6579 c420 11*32 cd012c c420 22*32 91 c420 bb*32 c440 73*64"
    ),
    rotation.KeyTaken(0): "92 ad72756e2e6b65792e74616b656e 00",
    sync.ManifestRequest(ONES): "92 ac72756e2e6d616e6966657374 c420 11*32",
    sync.ManifestReply("[run]"): "92 b272756e2e6d616e69666573742e7265706c79 a55b72756e5d",
    sync.DescribeRequest(ONES, TWOS): "93 ae73746174652e6465736372696265 c420 11*32 c420 22*32",
    sync.Description(("momentum",), 70_000): "93 ac73746174652e686561646572 91 a86d6f6d656e74756d ce00011170",
    sync.HistoryRequest(ONES, TWOS, (ONES,)): ("94 ad73746174652e686973746f7279 c420 11*32 c420 22*32 91 c420 11*32"),
    sync.HistoryReply(sync.HeaderClaim(300, ONES, TWOS, TWOS, 1e6, ONES), 300): (
        "93 ab73746174652e6c696e6b73 96 cd012c c420 11*32 c420 22*32 c420 22*32 cb412e848000000000 c420 11*32 cd012c"
    ),
    sync.RangeRequest(ONES, TWOS, 17): "94 ab73746174652e72616e6765 c420 11*32 c420 22*32 11",
    probe.Probe(5, 300): "93 ab70726f62652e7374617274 05 cd012c",
    probe.ProbeAnswer(HOME, 1.5): ("93 ac70726f62652e616e73776572 ae3139322e302e322e373a37303730 cb3ff8000000000000"),
    sync.RangeReply(1 << 20): "92 ab73746174652e6279746573 ce00100000",
    stages.Hello(ONES, STANDING): (
        "93ab73746167652e68656c6c6fc420 11*32 dc0013050001c3070104c2920203cb40040000000000000601c2029100 "
        "9206cb4004000000000000 cb3ff8000000000000 9206cb4004000000000000 91 c420 bb*32"
    ),
    stages.Welcome(stages.Standing()): (
        "92ad73746167652e77656c636f6d65dc001300c0c0c2000000c290cb00000000000000000000c2c090c0c0c0 90"
    ),
    stages.Ask(ONES, "backward", 7, 3, True, 30.0, SHAPE, None, SHAPE): (
        "9aa973746167652e61736bc420 11*32 a86261636b776172640703c3cb403e00000000000093a4696e743893021008cd "
        "0108c093a4696e743893021008cd0108 "
    ),
    stages.Reply(7, 3, True, 1, True, None, SHAPE): (
        "98ac73746167652e616e737765720703c301c3c093a4696e743893021008cd0108 "
    ),
    stages.WithdrawRequest(ONES, 7, 3): "94ae73746167652e7769746864726177c420 11*32 0703",
    stages.WithdrawReply(7, 3, False, 1): "95af73746167652e77697468647261776e0703c201",
    stages.FetchState(ONES): "92ab73746167652e6665746368c420 11*32",
    stages.FetchTied(ONES, 7): "93aa73746167652e74696564c420 11*32 07",
    stages.TensorsReply(7, 1 << 20): "93ad73746167652e74656e736f727307ce00100000",
}


def golden(text: str) -> bytes:
    """Bytes in hexadecimal, with spaces anywhere, and XX*N for N times the byte XX."""
    parts = (part.split("*") for part in text.split())
    return b"".join(bytes.fromhex(digits) * int(count[0] if count else 1) for digits, *count in parts)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: wire.name_of(type(message)))
def test_messages(message):
    data = golden(MESSAGES[message])
    assert wire.encode(message).hex() == data.hex()
    assert wire.decode(data, [type(message)]) == message


def test_every_message_type_is_here():
    modules = (
        hello,
        mesh,
        punch,
        reachability,
        relay,
        rivals,
        dht,
        round_messages,
        membership,
        rotation,
        probe,
        stages,
        sync,
    )
    types = {value for module in modules for value in vars(module).values() if is_message(value)}
    assert {type(message) for message in MESSAGES} == types


def is_message(value: object) -> bool:
    if not isinstance(value, type):
        return False
    try:
        wire.name_of(value)
    except TypeError:
        return False
    return True


def test_identities_and_signatures():
    alice = Identity.from_seed(bytes(range(32)))
    assert alice.public_key.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert alice.peer_id.hex() == "3071741322c7e288a790a7fdc9df6344da9be1b0c86e3dfcb9147f07075a49ef"
    assert str(alice.peer_id) == "gbyxiezcy7rirj4qu764tx3ditnjxynqzbxd37fzcr7qob22jhxq"
    assert alice.sign("some-domain", b"one", b"", b"three").hex() == (
        "34bce3515682d4a1edfd0b1d8ec51ae904e3df57fb35d4099aa2d1c24e472a8d"
        "d85c7b130f59a1283fdb8afe3d4b32a2c8d456c0f4ed8864a0108b17fdf91b06"
    )


def test_signed_weights():
    alice = Identity.from_seed(bytes(range(32)))
    signed = sign_weight(alice, ONES, "tag", 300, TWOS, 2.5)
    fields = (ONES, b"tag", golden("00*6 012c"), TWOS, golden("4004000000000000"))
    assert signed.signature == alice.public_key + alice.sign("weight-v1", *fields)


def test_the_chain_of_headers():
    signed = (SignedWeight(2.5, SIGNATURE), SignedWeight(1.0, bytes(SIZE)))
    link = chain.Link(ONES, TWOS, signed)
    assert link.pack() == golden("11*32 22*32 00000002 4004000000000000 73*96 3ff0000000000000 00*96")
    contributions = b"shoal-contributions-v1" + golden("73*32 4004000000000000 00*32 3ff0000000000000")
    genesis = chain.Header.genesis(ONES, TWOS)
    first = b"shoal-state-v1" + golden("11*32 00*8 00*8 11*32 00*32 00*32 22*32")
    assert genesis.digest == hashlib.sha256(first).digest()
    second = b"shoal-state-v1" + golden("11*32 00*7 01 400c000000000000") + genesis.digest
    second += ONES + hashlib.sha256(contributions).digest() + TWOS
    assert genesis.next(link).digest == hashlib.sha256(second).digest()


def test_records_of_the_dht():
    alice = Identity.from_seed(bytes(range(32)))
    record = Record.sign(alice, ONES, b"value", sequence=7, ttl=120)
    signature = alice.sign("dht-record-v1", ONES, golden("00*7 07 000000 78"), b"value")
    key = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert record.encoded == golden(f"97 01 c420 11*32 c420 {key} 07 78 c405 76616c7565 c440") + signature
    assert members_key(ONES) == hashlib.sha256(b"shoal-members-v1" + ONES).digest()


def test_plan_ids():
    assert PLAN.id.hex() == "ec9f8cac580b7d772726890ba3e5b37c608b0e02b97dd6b28537f75b12912656"
    assert attrs.evolve(PLAN, tag="tag").id.hex() == "7bbc050e980512ea924e237e7a3636b33464f3ff025212e8a57df3b732c910c0"
    assert GATHERING.id.hex() == "125a89781d2d2a746091cc17e68a2b35dcfbc124a6b35ee006ab2c67f96535eb"
    assert UNEQUAL.id.hex() == "c2c197fbb5d11827277ecb921ab12e2574c54447685abee641c78dd1891f385d"
    assert swap_id(PLAN).hex() == "0c49870c6bc28cd2dbd7b57d68ea9be84a7e29e2a15ae462f0d099ec9578318b"


def test_handshake_and_records_with_fixed_keys():
    keys = [X25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(1, 5)]
    alice = Handshake(True, keys[0], keys[1], b"shoal-channel-v1" + b"shoal\x01\x00\x00")
    bob = Handshake(False, keys[2], keys[3], b"shoal-channel-v1" + b"shoal\x01\x00\x00")
    said = hashlib.sha256()
    for speaker, listener, payload in ((alice, bob, b""), (bob, alice, b"bob"), (alice, bob, b"alice")):
        text = speaker.write_message(payload)
        said.update(text)
        assert listener.read_message(text) == payload
    assert said.hexdigest() == "85732fd1a80394942c0994f696d7739fdb4f67d741d31e5b39c9cd9e372d78e5"
    assert (
        alice.export().hex() == bob.export().hex() == "4e1ce4e2f99c59ad2c2da3002676e51228b5e795901aa45b21e9da3a2154cda3"
    )
    writer = RecordWriter(alice.split()[0])
    assert (
        writer.seal(b"one", b"").hex()
        == "0000001319949f87f3c345b1d5d7fec88804e84cb966210000001072ced18f9db668faab8fec536ae75cac"
    )


def test_frames():
    assert {kind.name: int(kind) for kind in FrameKind} == {
        "OPEN": 1,
        "DATA": 2,
        "BODY": 3,
        "CREDIT": 4,
        "RESET": 5,
        "STOP": 6,
        "PING": 7,
        "PONG": 8,
        "RETIRE": 9,
        "GOODBYE": 10,
        "PIECE": 11,
        "ACK": 12,
        "LANES": 13,
    }
    assert frames.pack(FrameKind.RESET, 0, 258, frames.pack_reset("busy", "later")) == golden(
        "05 00 000a 00000102 04 62757379 6c61746572"
    )


def test_goodbyes_with_evidence():
    mux = Mux(initiator=True, limits=MuxLimits(), memory=Budget(1 << 24, connections=1).account("host"))
    mux.goodbye("bye", b"\x01" * 8 + b"\x02" * 64)
    assert [bytes(record) for record in mux.take(1 << 20, 1 << 20).records] == [
        golden("0a 01 004b 00000000 01*8 02*64 627965")
    ]


def test_pieces():
    piece = Piece(MuxStream(258, bulk=True), 1 << 32, b"last", True)
    assert [bytes(record) for record in piece.records()] == [
        golden("0b 01 000c 00000102 0000000100000000 00000004"),
        b"last",
    ]
    mux = Mux(initiator=True, limits=MuxLimits(), memory=Budget(1 << 24, connections=1).account("host"))
    mux.acknowledge(3, 500)
    mux.want_lanes(8)
    assert [bytes(record) for record in mux.take(1 << 20, 1 << 20).records] == [
        golden("0c 00 0008 00000000 00000003 000001f4  0d 00 0004 00000000 00000008")
    ]


def test_opening_a_lane():
    """With the nonce of the side that dialled as 11…, and the other one's as 22…."""
    secret = bytes(range(32))
    assert LANE_OPENING + lane.token_of(secret) == golden("73686f616c 01 02 00") + golden(
        "69ae8a123d2b69b662e890a9054c8463"
    )
    dialler, dialled = lane.ciphers(secret, 3, b"\x11" * 16, b"\x22" * 16)
    assert RecordWriter(dialler).seal(b"").hex() == "000000108f2f968e945c9c74698dd99770e26e43"
    assert RecordWriter(dialled).seal(b"").hex() == "000000108f189d6f6940770842543b741e07af4b"


def test_a_conversation():
    memory = Budget(1 << 24, connections=2)
    alice, bob = (
        Mux(initiator=initiator, limits=MuxLimits(), memory=memory.account("host")) for initiator in (True, False)
    )
    stream = alice.open(bulk=True)
    alice.write(stream, b"\x00\x00\x00\x02hi")
    alice.ping(b"12345678")
    sent = alice.take(1 << 20, 1 << 20).records
    assert [bytes(record) for record in sent] == [
        golden("01 01 0000 00000001  07 00 0008 00000000 3132333435363738  02 00 0006 00000001 00000002 6869")
    ]
    (opened, _) = bob.receive(bytes(sent[0]))
    bob.widen(opened.stream, FIRST_WINDOW)
    assert [bytes(record) for record in bob.take(1 << 20, 1 << 20).records] == [
        golden("08 00 0008 00000000 3132333435363738  04 00 0004 00000001 000f0000")
    ]
    alice.write(stream, bytes(20_000))
    alice.finish(stream)
    assert [bytes(record) for record in alice.take(1 << 20, 1 << 20).records] == [
        golden("03 01 0004 00000001 00004e20"),
        bytes(20_000),
    ]
    alice.finish(alice.open(bulk=True, one_way=True))
    assert [bytes(record) for record in alice.take(1 << 20, 1 << 20).records] == [
        golden("01 03 0000 00000003  02 01 0000 00000003")
    ]
    bob.stop(opened.stream)
    bob.reset(opened.stream)
    bob.retire()
    bob.goodbye("bye")
    assert [bytes(record) for record in bob.take(1 << 20, 1 << 20).records] == [
        golden("06 00 0000 00000001  05 00 0001 00000001 00  09 00 0000 00000000  0a 00 0003 00000000 627965")
    ]
