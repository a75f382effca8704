from __future__ import annotations

from typing import Annotated, Literal

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from protocol import wire
from protocol.errors import MessageTooLong, ProtocolError
from protocol.identity import PeerId
from protocol.transport import Address
from protocol.wire import decode, encode, message


@attrs.frozen
class Contact:
    peer: PeerId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=2)]


@message("test.all")
class Everything:
    flag: bool
    count: Annotated[int, Meta(ge=1, le=10)]
    ratio: float
    text: Annotated[str, Meta(max_length=5)]
    data: Annotated[bytes, Meta(min_length=1, max_length=4)]
    kind: Literal["a", "b"]
    maybe: int | None
    contacts: tuple[Contact, ...]
    pair: tuple[int, str]


@message("test.small")
class Small:
    number: int


@message("test.even")
class Even:
    number: int = attrs.field()

    def __attrs_post_init__(self):
        if self.number % 2:
            raise ValueError("number must be even")


@message("test.quoted")
class Quoted:
    word: Literal["yes"]
    address: Address


PEER = PeerId(bytes(range(32)))
EXAMPLE = Everything(
    True,
    3,
    0.5,
    "hé",
    b"\x00\xff",
    "b",
    None,
    (Contact(PEER, (Address("127.0.0.1", 80),)), Contact(PEER, ())),
    (7, "x"),
)


def fields(**changes):
    """The plain form of EXAMPLE, changed."""
    names = [field.name for field in attrs.fields(Everything)]
    plain = msgpack.unpackb(encode(EXAMPLE))
    for name, value in changes.items():
        plain[1 + names.index(name)] = value
    return plain


def test_round_trip_of_every_field_type():
    assert decode(encode(EXAMPLE), [Everything]) == EXAMPLE
    assert decode(memoryview(encode(EXAMPLE)), {"test.all": Everything}) == EXAMPLE
    assert type(decode(encode(EXAMPLE), [Everything]).contacts[0].peer) is PeerId


def test_golden_bytes():
    assert encode(Small(5)).hex() == "92aa746573742e736d616c6c05"


def test_integers_become_floats_in_float_fields():
    whole = attrs.evolve(EXAMPLE, ratio=2)
    assert decode(encode(whole), [Everything]).ratio == 2.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"flag": 1}, "flag"),
        ({"count": 0}, "count"),
        ({"count": 11}, "count"),
        ({"count": True}, "count"),
        ({"count": "3"}, "count"),
        ({"count": [3]}, "count"),
        ({"count": 3.0}, "count"),
        ({"ratio": float("nan")}, "finite"),
        ({"ratio": float("inf")}, "finite"),
        ({"ratio": 1}, "canonical"),
        ({"text": "123456"}, "text"),
        ({"text": b"12"}, "text"),
        ({"data": b""}, "data"),
        ({"data": b"12345"}, "data"),
        ({"data": "12"}, "data"),
        ({"kind": "c"}, "kind"),
        ({"kind": None}, "kind"),
        ({"maybe": "x"}, "maybe"),
        ({"contacts": None}, "contacts"),
        ({"contacts": {}}, "contacts"),
        ({"contacts": [[bytes(PEER)]]}, "contacts"),
        ({"contacts": [[bytes(PEER)[1:], []]]}, "peer"),
        ({"contacts": [[bytes(PEER), ["h:1", "h:2", "h:3"]]]}, "contacts"),
        ({"contacts": [[bytes(PEER), ["nowhere"]]]}, "contacts"),
        ({"contacts": [[bytes(PEER), ["h:0080"]]]}, "contacts"),
        ({"pair": [1]}, "pair"),
        ({"pair": ["x", 1]}, "pair"),
    ],
)
def test_wrong_fields_are_refused_by_name(changes, problem):
    with pytest.raises(ProtocolError, match=problem):
        decode(msgpack.packb(fields(**changes)), [Everything])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x05",
        b"\x90",
        b"\x91\x05",
        msgpack.packb(["test.small"]),
        msgpack.packb(["test.small", 1, 2]),
        msgpack.packb({"test.small": 5}),
        msgpack.packb(["test.small", {"a": 1}]),
        msgpack.packb(["test.small", msgpack.ExtType(1, b"x")]),
        msgpack.packb(["test.small", msgpack.Timestamp(1)]),
        encode(Small(5)) + b"\x00",
        encode(Small(5))[:-1],
        encode(Small(5))[:-1] + b"\xd1\x00\x05",  # 5 as a longer integer
        b"\xdd\xff\xff\xff\xff",  # four billion elements
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        b"\x92\xa2\xff\xfe\x05",  # a name that is not UTF-8
        bytes(wire.MAX_MESSAGE + 1),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(ProtocolError):
        decode(data, [Small])


@given(st.binary(max_size=200))
def test_garbage_decodes_or_is_a_protocol_error(data):
    try:
        result = decode(data, [Small, Everything, Even])
    except ProtocolError:
        return
    assert encode(result) == data


@given(st.data())
def test_flipped_bytes_decode_or_are_a_protocol_error(data):
    damaged = bytearray(encode(EXAMPLE))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = decode(damaged, [Small, Everything, Even])
    except ProtocolError:
        return
    assert encode(result) == damaged


@pytest.mark.parametrize("text", ["$[999]", "$[" + "9" * 5000 + "]", "\x1b[2J", "x" * 100_000])
def test_errors_may_quote_anything(text):
    with pytest.raises(ProtocolError, match=r"invalid test\.quoted") as caught:
        decode(msgpack.packb(["test.quoted", text, "127.0.0.1:1"]), [Quoted])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    with pytest.raises(ProtocolError, match=r"invalid test\.quoted"):
        decode(msgpack.packb(["test.quoted", "yes", text]), [Quoted])


def test_unknown_names_are_told_apart():
    with pytest.raises(wire.UnknownMessage, match=r"test\.small"):
        decode(encode(Small(5)), [Even])


def test_attrs_validation_counts():
    assert decode(encode(Even(4)), [Even]) == Even(4)
    with pytest.raises(ProtocolError, match="even"):
        decode(msgpack.packb(["test.even", 5]), [Even])


def test_own_mistakes_are_value_errors():
    for wrong in (
        attrs.evolve(EXAMPLE, count=11),
        attrs.evolve(EXAMPLE, text="123456"),
        attrs.evolve(EXAMPLE, ratio=float("nan")),
        attrs.evolve(EXAMPLE, pair=(1, 2)),
        attrs.evolve(EXAMPLE, contacts=(PEER,)),
        Small(2**64),
    ):
        with pytest.raises(ValueError, match="cannot encode"):
            encode(wrong)


def test_messages_have_a_longest_length():
    @message("test.long")
    class Long:
        data: bytes

    assert len(encode(Long(bytes(wire.MAX_MESSAGE - 20)))) <= wire.MAX_MESSAGE
    with pytest.raises(MessageTooLong, match=r"cannot encode test\.long: \d+ bytes"):
        encode(Long(bytes(wire.MAX_MESSAGE)))


def test_types_without_an_encoding_are_refused_when_defined():
    with pytest.raises(TypeError, match="no encoding"):

        @message("test.dict")
        class _Dict:
            data: dict[str, int]

    with pytest.raises(TypeError, match="union"):

        @message("test.union")
        class _Union:
            data: int | str

    with pytest.raises(TypeError, match="31 characters"):
        message("a.name.that.is.longer.than.all.others")

    with pytest.raises(TypeError, match="position"):

        @message("test.keyword")
        class _Keyword:
            data: int = attrs.field(kw_only=True)

    with pytest.raises(TypeError, match="not a message"):
        encode(Contact(PEER, ()))
