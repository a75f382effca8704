"""Fuzz targets: everything that is decoded from strangers. `run` has the messages, the others what is no message."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from typing import Any

import msgpack

from dht.records import MAX_RECORD, Record
from peer.manifest import Manifest, ManifestError
from peer.settings import Settings
from peer.text import from_base32, to_base32
from peer.ticket import PREFIX, Ticket, TicketError
from protocol import natpmp, wire
from protocol.errors import AddressError, MappingFailed, ProtocolError
from protocol.identity import Identity, PeerId
from protocol.transport import Address
from protocol.upnp import Upnp
from tests.fuzz.choices import HOSTILE_TEXT, Choices
from tests.protocol.test_golden import MESSAGES

ALICE = Identity.from_seed(b"a" * 32)
HOME = Address("192.0.2.7", 7070)
TYPES = {wire.name_of(type(message)): type(message) for message in MESSAGES}
_EXAMPLES = tuple(wire.encode(message) for message in MESSAGES)
_LONGEST_ERROR = 4000  # characters; 300 that are quoted may be written as six each

_RECORD = Record.sign(ALICE, bytes(32), b"value", sequence=7, ttl=120)
_TICKET = Ticket(bytes(32), ((ALICE.peer_id, HOME), (ALICE.peer_id, Address("::1", 1))), b"k" * 32, 2e9)
_MANIFEST = Manifest.create(Settings(), ALICE).dump()
_NATPMP = struct.pack(">BBHIHHI", 0, 0x82, 0, 9, 7070, 7071, 3600)
_NATPMP_ADDRESS = struct.pack(">BBHI4s", 0, 0x80, 0, 9, bytes([192, 0, 2, 7]))
_NONCE = b"n" * natpmp.NONCE_SIZE
_PCP = struct.pack(
    ">BBxBII12x12sBxxxHH16s", 2, 0x81, 0, 3600, 9, _NONCE, 6, 7070, 7071, bytes(10) + b"\xff\xff\xc0\0\x02\7"
)


def run(data: bytes) -> None:
    """Decoding is strict: bytes are the one encoding of a valid message, or a `ProtocolError` that can be shown."""
    choices = Choices(data)
    encoded = choices.of((bytes, bytearray))(mangled(choices, choices.of(_EXAMPLES)))
    try:
        message = wire.decode(encoded, TYPES)
    except ProtocolError as error:
        _presentable(error)
        return
    assert wire.encode(message) == encoded
    assert wire.decode(wire.encode(message), [type(message)]) == message
    hash(message)
    repr(message)


def records(data: bytes) -> None:
    """The same of the DHT's records, whose signature cannot survive a change."""
    choices = Choices(data)
    encoded = mangled(choices, _RECORD.encoded)
    try:
        record = Record.decode(encoded)
    except ProtocolError as error:
        _presentable(error)
        return
    assert record.encoded == encoded
    assert len(encoded) <= MAX_RECORD
    assert record.verify() == (record == _RECORD)


def tickets(data: bytes) -> None:
    """A ticket that somebody made up is the ticket that its text is the one encoding of, or a `TicketError`."""
    choices = Choices(data)
    body = mangled(choices, from_base32(_TICKET.encode().removeprefix(PREFIX))[5:])
    body = bytes([choices.of((1, 1, 1, 2))]) + body
    text = PREFIX + to_base32(hashlib.sha256(body).digest()[:4] + body)
    if choices.one_in(8):
        text = choices.damaged(text.encode()).decode("utf-8", "replace")
    try:
        ticket = Ticket.parse(text, now=1e9)
    except TicketError as error:
        _presentable(error)
        return
    assert ticket.encode() == "".join(text.split()).lower()


def manifests(data: bytes) -> None:
    """A manifest's text, signed or to be signed, is one that says the same when written again, or a `ManifestError`."""
    choices = Choices(data)
    signed = choices.one_in(2)
    text = _MANIFEST if signed else _MANIFEST.partition("[founder]")[0]
    while choices.left:
        if choices.one_in(2):
            text = choices.damaged(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
        else:
            lines = text.split("\n")
            place = choices.number(len(lines) - 1)
            lines[place] = lines[place].partition("=")[0] + "= " + choices.of(_TOML)
            text = "\n".join(lines)
    try:
        manifest = Manifest.parse(text) if signed else Manifest.found(text, ALICE)
    except ManifestError as error:
        _presentable(error)
        return
    assert Manifest.parse(manifest.dump()) == manifest


_TOML = (
    "0",
    "-1",
    "9" * 400,
    "0x" + "f" * 5000,
    "1e999",
    "nan",
    "-0.0",
    "true",
    '"' + "a" * 70 + '"',
    '"\\u001b[2J"',
    '["x", "y"]',
    "[" * 2000,
    "{" + "a." * 2000 + "b = 1}",
    "{ x = 1 }",
    "1979-05-27T07:32:00Z",
    '"allow"',
    '"$[99]%s{0}"',
    '"transformer"',
    "2",
)


def texts(data: bytes) -> None:
    """Addresses and peer ids have one spelling; other text is an error of theirs."""
    choices = Choices(data)
    text = (
        choices.of(HOSTILE_TEXT)
        if choices.one_in(8)
        else choices.of((str(HOME), "[2001:db8::7]:1", str(ALICE.peer_id)))
    )
    while choices.left:
        text = choices.damaged(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
    try:
        address = Address.parse(text)
        assert Address.parse(str(address)) == address
    except AddressError as error:
        _presentable(error)
    with contextlib.suppress(ValueError):
        assert str(PeerId.parse(text)) == text


def gateways(data: bytes) -> None:
    """What a gateway answers to a request for a port is a grant, a refusal, or no answer at all."""
    choices = Choices(data)
    match choices.number(3):
        case 0:
            _answer(lambda: natpmp.read_natpmp_map(_struck(choices, _NATPMP), 7070, "192.0.2.7"))
        case 1:
            _answer(lambda: natpmp.read_natpmp_address(_struck(choices, _NATPMP_ADDRESS)))
        case 2:
            _answer(lambda: natpmp.read_pcp_map(_struck(choices, _PCP), _NONCE, 7070))
        case _:
            router = Upnp()
            router._device = _Device(choices)
            _answer(lambda: router._map(7070, choices.of((7070, 65_535)), 3600))


class _Device:
    """A UPnP gateway that answers with anything."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.lanaddr = "192.168.1.2"

    def externalipaddress(self) -> object:
        return self._answer(("192.0.2.7", "::1", "0.0.0.0", "", None, *HOSTILE_TEXT))

    def getspecificportmapping(self, port: int, protocol: str) -> object:
        return self._answer((None, ("192.168.1.2", "7070"), (), ("", ""), (self.lanaddr, "x"), 7))

    def addportmapping(self, *mapping: object) -> object:
        return self._answer((True, False, None))

    def _answer(self, options: tuple[object, ...]) -> object:
        if self._choices.one_in(4):
            raise Exception(self._choices.of(("OnlyPermanentLease", "ConflictInMapping", *HOSTILE_TEXT)))  # noqa: TRY002
        return self._choices.of(options)


def _answer(read: Any) -> None:
    try:
        granted = read()
        if isinstance(granted, natpmp.Grant):
            granted.check()
            assert 0 < granted.external.port < 65_536
    except (ProtocolError, MappingFailed) as error:
        assert str(error)


def _struck(choices: Choices, data: bytes) -> bytes:
    while choices.one_in(2):
        data = choices.damaged(data)
    return data


def _presentable(error: Exception) -> None:
    """Errors are shown to people, and may quote what strangers sent: on a terminal, and not at length."""
    assert str(error).isprintable(), error
    assert len(str(error)) <= _LONGEST_ERROR


def mangled(choices: Choices, example: bytes) -> bytes:
    """Bytes with a history: of a valid encoding, mostly, in which values or bytes were replaced."""
    if choices.one_in(16):
        return choices.take(4096)
    encoded = example
    if choices.number(3):
        value = msgpack.unpackb(example, strict_map_key=False)
        for _ in range(1 + choices.number(2)):
            value = _replaced(choices, value)
        encoded = msgpack.packb(value, unicode_errors="surrogatepass")
    while choices.one_in(3):
        encoded = choices.damaged(encoded)
    return encoded


def _replaced(choices: Choices, value: Any) -> Any:
    """A structure with one of its values replaced, removed or repeated."""
    if isinstance(value, dict):
        return {key: _replaced(choices, item) if choices.one_in(3) else item for key, item in value.items()}
    if not isinstance(value, list) or not value or choices.one_in(8):
        return _odd(choices, value)
    place = choices.number(len(value) - 1)
    match choices.number(7):
        case 0:
            return value[:place] + value[place + 1 :]
        case 1:
            return value[:place] + [value[place]] * (2 + choices.number(40)) + value[place + 1 :]
        case _:
            return [*value[:place], _replaced(choices, value[place]), *value[place + 1 :]]


def _odd(choices: Choices, value: object) -> object:
    """A value for another: of the same kind but at the edge of what it may be, or of another kind."""
    match choices.number(11):
        case 0 | 1:
            return min(choices.boundary(), 2**64 - 1)
        case 2:
            return -min(choices.boundary(), 2**63)
        case 3:
            return choices.of((0.0, -0.0, 1.5, 1e300, -1.0, float("inf"), float("-inf"), float("nan")))
        case 4 | 5:
            return choices.of(HOSTILE_TEXT)
        case 6:
            return bytes(choices.boundary() % 70_000)
        case 7:
            return choices.of(
                (None, True, False, [], {}, "", b"", {"a": 1}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1))
            )
        case 8:
            deep: object = 1
            for _ in range(choices.of((3, 100, 500))):
                deep = [deep]
            return deep
        case 9 if isinstance(value, int):
            return min(max(value + choices.of((1, -1)), -(2**63)), 2**64 - 1)
        case 10 if isinstance(value, (bytes, str)):
            return value[:-1]
        case _:
            return choices.blob()
