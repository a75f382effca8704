"""Messages: frozen attrs classes to bytes and back, strictly.

A message is a class decorated with `@message("some.name")`. On the wire it is a msgpack array, the name first and then
the fields in order; values that are classes themselves (plain `attrs.frozen`) are arrays of their fields. There is
exactly one encoding of every message, and nothing but that encoding decodes: unknown names, missing or surplus fields,
wrong types, violated bounds, trailing bytes and longer forms of numbers are all a `ProtocolError`. Maps and extension
types do not occur, so neither duplicate keys nor hidden timestamps do.

Field types: `bool`, `int`, `float` (finite), `str`, `bytes`, `PeerId`, `Address`, `Literal[...]`, `X | None`,
`tuple[X, ...]`, `tuple[X, Y]` and `attrs.frozen` classes, each of them also as `Annotated[X, msgspec.Meta(...)]` with
bounds. Validators given to `attrs.field` run as well.

msgspec does the work. It decodes arrays into classes of its own kind only, so each attrs class gets a twin of that
kind when it is decorated, which is kept on the class: there is no registry, the receiver says which types it expects.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, dataclass_transform

import attrs
import msgspec

from protocol.errors import AddressError, MessageTooLong, ProtocolError
from protocol.identity import PeerId
from protocol.transport import Address

MAX_MESSAGE = 1 << 20
"""Bytes of the longest message."""

_MAX_NAME = 31  # the longest that one byte in front of it can announce
_MAX_EXPLANATION = 300  # characters
_LEAVES = (bool, int, float, str, bytes, PeerId)
_CODEC = "__wire_codec__"
_Class = TypeVar("_Class", bound=type)
_T = TypeVar("_T")
Message: TypeAlias = object
"""An instance of a class decorated with `@message`."""


class UnknownMessage(ProtocolError):
    """The bytes are a message of a type that was not expected here."""


class _Twin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of an attrs class, checked for type and bounds."""

    original: ClassVar[type]


class _Place:
    """The twin of `Address`, which is text on the wire."""

    def __init__(self, address: Address) -> None:
        self.address = address


class _Codec:
    """How messages of one type become bytes and come back."""

    def __init__(self, name: str, cls: type) -> None:
        self.name = name
        self._twin = _twin(cls, name)
        self._fields = [field.name for field in attrs.fields(cls)]
        self._decoder = msgspec.msgpack.Decoder(self._twin, dec_hook=_plain_to_twin)

    def encode(self, msg: Message) -> bytes:
        plain = [self.name, *_lower(msg)]
        return _encoder.encode(msgspec.convert(plain, self._twin, dec_hook=_plain_to_twin))

    def decode(self, data: bytes | bytearray | memoryview) -> object:
        checked = self._decoder.decode(data)
        if _encoder.encode(checked) != data:
            raise ValueError("it is not in its canonical encoding")
        return _lift(checked)

    def explain(self, error: Exception) -> str:
        """The text of an error, with the field's name in place of its index. Some quote what the other side sent."""
        names = {f"$[{place}]": name for place, name in enumerate([self.name, *self._fields])}
        text = re.sub(r"\$\[\d+\]", lambda match: names.get(match[0], match[0]), str(error)[:_MAX_EXPLANATION])
        return "".join(character if character.isprintable() else "?" for character in text)


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def message(name: str) -> Callable[[_Class], _Class]:
    """Makes a class a frozen attrs class that can be encoded under `name`.

    Args:
        name: Short, dotted and lower case, such as "dht.find". Unique among the types that one endpoint handles.

    Raises:
        TypeError: From the decorator, for a field whose type has no encoding.
    """
    if not 0 < len(name) <= _MAX_NAME:
        raise TypeError(f"a message's name has at most {_MAX_NAME} characters: {name!r}")

    def decorate(cls: _Class) -> _Class:
        frozen = attrs.frozen(cls)
        setattr(frozen, _CODEC, _Codec(name, frozen))
        return frozen

    return decorate


def name_of(message_type: type) -> str:
    """The name of a message type on the wire.

    Raises:
        TypeError: If the class was not decorated with `@message`.
    """
    return _codec(message_type).name


def encode(msg: Message) -> bytes:
    """The one encoding of a message.

    Raises:
        MessageTooLong: If it is longer than `MAX_MESSAGE`: what the fields hold together often comes from others.
        ValueError: If a field breaks its type or bounds. This is the caller's mistake: the other side would end the
            connection over it.
    """
    codec = _codec(type(msg))
    try:
        data = codec.encode(msg)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise ValueError(f"cannot encode {codec.name}: {codec.explain(error)}") from None
    if len(data) > MAX_MESSAGE:
        raise MessageTooLong(f"cannot encode {codec.name}: {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    return data


def decode(data: bytes | bytearray | memoryview, expected: Mapping[str, type[_T]] | Collection[type[_T]]) -> _T:
    """The message that some bytes from the network stand for.

    Args:
        data: Untrusted bytes.
        expected: The message types that are allowed here, or a mapping of their names to them.

    Raises:
        UnknownMessage: For a message of another type.
        ProtocolError: For anything that is not exactly the encoding of a valid message.
    """
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    if not isinstance(expected, Mapping):
        expected = {name_of(message_type): message_type for message_type in expected}
    name = _name(data)
    message_type = expected.get(name)
    if message_type is None:
        raise UnknownMessage(f"unexpected message {name!r}")
    codec = _codec(message_type)
    try:
        return typing.cast(_T, codec.decode(data))
    # Validators raise ValueError and TypeError; lone surrogates in text are a UnicodeError.
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolError(f"invalid {name}: {codec.explain(error)}") from None


def _name(data: bytes | bytearray | memoryview) -> str:
    """The name in front: nothing else is looked at before it is known what it should be."""
    head = bytes(data[: 4 + _MAX_NAME])
    start = 1 if head[:1] < b"\xdc" else 3  # the header of an array with up to 15 fields, or more
    length = head[start] - 0xA0 if len(head) > start else -1
    name = head[start + 1 : start + 1 + length] if 0 < length <= _MAX_NAME else b""
    if not name or not name.isascii():
        raise ProtocolError("not a message: no name")
    return name.decode()


def _codec(message_type: type) -> _Codec:
    codec = message_type.__dict__.get(_CODEC)
    if codec is None:
        raise TypeError(f"{message_type.__name__} is not a message type")
    return typing.cast(_Codec, codec)


def _twin(cls: type, name: str | None = None) -> type[_Twin]:
    if any(not field.init or field.kw_only for field in attrs.fields(cls)):
        raise TypeError(f"{cls.__name__} must take all of its fields by position")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(field.name, _hint(hints[field.name])) for field in attrs.fields(cls)]
    twin = msgspec.defstruct(cls.__name__, fields, bases=(_Twin,), tag=name)
    assert issubclass(twin, _Twin)
    twin.original = cls
    return twin


def _hint(hint: Any) -> Any:  # noqa: ANN401 - a type expression has no better type
    """A field's type, with twins in place of attrs classes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Address:
        return _Place
    if hint in _LEAVES or origin is Literal:
        return hint
    if origin is typing.Annotated:
        return typing.Annotated[_hint(arguments[0]), *arguments[1:]]
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not types.NoneType]
        if len(others) != 1:
            raise TypeError(f"{hint!r} has no encoding in messages: the only unions are optional values")
        return _hint(others[0]) | None
    if origin is tuple:
        items = tuple(argument if argument is Ellipsis else _hint(argument) for argument in arguments)
        return types.GenericAlias(tuple, items)
    if isinstance(hint, type) and attrs.has(hint):
        return _twin(hint)
    raise TypeError(f"{hint!r} has no encoding in messages")


def _lower(value: Any) -> Any:  # noqa: ANN401 - anything that a field can hold
    """The plain form of a value, of lists and msgpack's own types."""
    if isinstance(value, PeerId):
        return bytes(value)
    if isinstance(value, Address):
        return str(value)
    if attrs.has(type(value)):
        return [_lower(getattr(value, field.name)) for field in attrs.fields(type(value))]
    if isinstance(value, tuple):
        return [_lower(item) for item in value]
    return _finite(value)


def _lift(value: Any) -> Any:  # noqa: ANN401 - anything that a field can hold
    """What a twin stands for."""
    if isinstance(value, _Twin):
        return value.original(*(_lift(getattr(value, field)) for field in value.__struct_fields__))
    if isinstance(value, _Place):
        return value.address
    if isinstance(value, tuple):
        return tuple(_lift(item) for item in value)
    return _finite(value)


def _finite(value: _T) -> _T:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _twin_to_plain(value: object) -> bytes | str:
    return bytes(value) if isinstance(value, PeerId) else str(typing.cast(_Place, value).address)


def _plain_to_twin(wanted: type, plain: object) -> object:
    """What msgspec asks for the types that it does not know, and names the place of a ValueError."""
    if wanted is PeerId and type(plain) is bytes:
        return PeerId(plain)
    if wanted is _Place and type(plain) is str:
        try:
            address = Address.parse(plain)
        except AddressError as error:
            raise ValueError(str(error)) from None
        if str(address) == plain:
            return _Place(address)
    raise ValueError("peer id expected" if wanted is PeerId else "address expected")


_encoder = msgspec.msgpack.Encoder(enc_hook=_twin_to_plain)
