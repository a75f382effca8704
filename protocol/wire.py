"""Messages: frozen attrs classes to bytes and back, strictly.

A message is a class decorated with `@message("some.name")`. On the wire it is a msgpack array, the name first and then
the fields in order; values that are classes themselves (plain `attrs.frozen`) are arrays of their fields. There is
exactly one encoding of every message, and nothing but that encoding decodes: unknown names, missing or surplus fields,
wrong types, violated bounds, trailing bytes and longer forms of numbers are all a `ProtocolError`. Maps and extension
types do not occur, so neither duplicate keys nor hidden timestamps do.

Field types: `bool`, `int`, `float` (finite), `str`, `bytes`, `PeerId`, `Address`, `Literal[...]`, `X | None`,
`tuple[X, ...]`, `tuple[X, Y]` and `attrs.frozen` classes, each of them also as `Annotated[X, msgspec.Meta(...)]` with
`ge`, `gt`, `le`, `lt`, `min_length` or `max_length`. Validators given to `attrs.field` run as well.

Codecs are compiled once, when the class is decorated, and kept on the class: there is no registry, the receiver says
which types it expects.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, dataclass_transform

import attrs
import msgpack  # type: ignore[import-untyped]
import msgspec

from protocol.errors import AddressError, ProtocolError
from protocol.identity import PeerId
from protocol.transport import Address

MAX_MESSAGE = 1 << 20
"""Bytes of the longest message."""

MAX_DEPTH = 8
"""Arrays within arrays in one message, the message itself included."""

_CODEC = "__wire_codec__"
_Class = TypeVar("_Class", bound=type)
_T = TypeVar("_T")
Message: TypeAlias = object
"""An instance of a class decorated with `@message`."""


class UnknownMessage(ProtocolError):
    """The bytes are a message of a type that was not expected here."""


class _Invalid(ValueError):
    """A value does not have its field's type or breaks its bounds. Grows the path to the field on its way out."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.')}: {self.problem}" if self.path else self.problem

    def inside(self, step: str) -> _Invalid:
        return _Invalid(self.problem, step + self.path)


@attrs.frozen
class _Codec:
    """How values of one type become msgpack's plain values (lower) and come back (lift). Both check."""

    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any]
    depth: int = 0  # arrays within arrays


@attrs.frozen
class _MessageCodec:
    name: str
    fields: _Codec


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def message(name: str) -> Callable[[_Class], _Class]:
    """Makes a class a frozen attrs class that can be encoded under `name`.

    Args:
        name: Short, dotted and lower case, such as "dht.find". Unique among the types that one endpoint handles.

    Raises:
        TypeError: From the decorator, for a field whose type has no encoding.
    """

    def decorate(cls: _Class) -> _Class:
        frozen = attrs.frozen(cls)
        setattr(frozen, _CODEC, _MessageCodec(name, _class_codec(frozen, ())))
        return frozen

    return decorate


def name_of(message_type: type) -> str:
    """The name of a message type on the wire.

    Raises:
        TypeError: If the class was not decorated with `@message`.
    """
    return _message_codec(message_type).name


def encode(msg: Message) -> bytes:
    """The one encoding of a message.

    Raises:
        ValueError: If a field breaks its type or bounds, or the message is longer than `MAX_MESSAGE`. This is the
            caller's mistake: the other side would end the connection over it.
    """
    codec = _message_codec(type(msg))
    try:
        data: bytes = msgpack.packb([codec.name, *codec.fields.lower(msg)])
    except (_Invalid, OverflowError) as error:
        raise ValueError(f"cannot encode {codec.name}: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"cannot encode {codec.name}: {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
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
    name, values = _unpack(data)
    message_type = expected.get(name)
    if message_type is None:
        raise UnknownMessage(f"unexpected message {name!r:.80}")
    try:
        return typing.cast(_T, _message_codec(message_type).fields.lift(values))
    except _Invalid as error:
        raise ProtocolError(f"invalid {name}: {error}") from None


def _unpack(data: bytes | bytearray | memoryview) -> tuple[str, list[Any]]:
    try:
        plain = msgpack.unpackb(data, strict_map_key=True, ext_hook=_refuse_extension)
        canonical = msgpack.packb(plain) == data
    except (ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error!s:.120}") from None
    if not (isinstance(plain, list) and plain and isinstance(plain[0], str)):
        raise ProtocolError("not a message: no name")
    if not canonical:
        raise ProtocolError(f"message {plain[0]!r:.80} is not in its canonical encoding")
    return plain[0], plain[1:]


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError("extension types are not allowed")


def _message_codec(message_type: type) -> _MessageCodec:
    codec = message_type.__dict__.get(_CODEC)
    if codec is None:
        raise TypeError(f"{message_type.__name__} is not a message type")
    return typing.cast(_MessageCodec, codec)


# Compiling types to codecs.


def _codec(hint: Any, outer: tuple[type, ...]) -> _Codec:  # noqa: ANN401 - a type expression has no better type
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        codec = _codec(arguments[0], outer)
        for meta in arguments[1:]:
            if isinstance(meta, msgspec.Meta):
                codec = _bounded(codec, meta)
        return codec
    if origin is Literal:
        return _checked(lambda value: any(value == choice and type(value) is type(choice) for choice in arguments))
    if origin in (typing.Union, types.UnionType):
        return _optional(hint, outer)
    if origin is tuple:
        return _tuple_codec(arguments, outer)
    if hint in _LEAVES:
        return _LEAVES[hint]
    if isinstance(hint, type) and attrs.has(hint):
        return _class_codec(hint, outer)
    raise TypeError(f"{hint!r} has no encoding in messages")


def _class_codec(cls: type, outer: tuple[type, ...]) -> _Codec:
    if cls in outer:
        raise TypeError(f"{cls.__name__} contains itself")
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in attrs.fields(cls)]
    codecs = [(f".{name}", _codec(hints[name], (*outer, cls))) for name in names]
    depth = 1 + max((codec.depth for _, codec in codecs), default=0)
    if depth > MAX_DEPTH:
        raise TypeError(f"{cls.__name__} nests deeper than {MAX_DEPTH}")

    def lower(value: object) -> list[Any]:
        if type(value) is not cls:
            raise _Invalid(f"{cls.__name__} expected, not {type(value).__name__}")
        return _each(codecs, [getattr(value, name) for name in names], "lower")

    def lift(plain: object) -> object:
        if type(plain) is not list or len(plain) != len(codecs):
            raise _Invalid(f"array of {len(codecs)} fields expected")
        values = _each(codecs, plain, "lift")
        try:
            return cls(*values)
        except (ValueError, TypeError) as error:  # what attrs validators raise
            raise _Invalid(str(error)) from None

    if any(not field.init or field.kw_only for field in attrs.fields(cls)):
        raise TypeError(f"{cls.__name__} must take all of its fields by position")
    return _Codec(lower, lift, depth)


def _each(
    codecs: Sequence[tuple[str, _Codec]], values: Sequence[Any], direction: Literal["lower", "lift"]
) -> list[Any]:
    results = []
    for (step, codec), value in zip(codecs, values, strict=True):
        try:
            results.append(codec.lower(value) if direction == "lower" else codec.lift(value))
        except _Invalid as error:
            raise error.inside(step) from None
    return results


def _tuple_codec(arguments: tuple[Any, ...], outer: tuple[type, ...]) -> _Codec:
    repeated = len(arguments) == 2 and arguments[1] is Ellipsis
    fixed = [(f"[{i}]", _codec(hint, outer)) for i, hint in enumerate(arguments[: 1 if repeated else None])]
    item = fixed[0][1] if repeated else None

    def convert(values: Sequence[Any], direction: Literal["lower", "lift"]) -> list[Any]:
        if item is not None:
            try:
                return [(item.lower if direction == "lower" else item.lift)(value) for value in values]
            except _Invalid as error:
                raise error.inside("[]") from None
        if len(values) != len(fixed):
            raise _Invalid(f"{len(fixed)} items expected, not {len(values)}")
        return _each(fixed, values, direction)

    return _Codec(
        lambda value: convert(_expect(value, tuple), "lower"),
        lambda plain: tuple(convert(_expect(plain, list), "lift")),
        1 + max((codec.depth for _, codec in fixed), default=0),
    )


def _optional(hint: Any, outer: tuple[type, ...]) -> _Codec:  # noqa: ANN401 - a type expression has no better type
    others = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    if len(others) != 1 or len(others) == len(typing.get_args(hint)):
        raise TypeError(f"{hint!r} has no encoding in messages: the only unions are optional values")
    codec = _codec(others[0], outer)
    return _Codec(
        lambda value: None if value is None else codec.lower(value),
        lambda plain: None if plain is None else codec.lift(plain),
        codec.depth,
    )


def _bounded(codec: _Codec, meta: msgspec.Meta) -> _Codec:
    if meta.pattern is not None or meta.multiple_of is not None:
        raise TypeError("only ge, gt, le, lt, min_length and max_length are supported")
    shortest = 0 if meta.min_length is None else meta.min_length
    longest = MAX_MESSAGE if meta.max_length is None else meta.max_length

    def check_length(plain: object) -> None:
        if isinstance(plain, list | str | bytes) and not shortest <= len(plain) <= longest:
            raise _Invalid(f"length {len(plain)} is not in [{shortest}, {longest}]")

    def check_number(value: object) -> None:
        if not isinstance(value, int | float):
            return
        for bound, holds in (
            (meta.ge, operator.ge),
            (meta.gt, operator.gt),
            (meta.le, operator.le),
            (meta.lt, operator.lt),
        ):
            if bound is not None and not holds(value, bound):
                raise _Invalid(f"{value} is out of bounds")

    def lower(value: object) -> object:
        plain = codec.lower(value)
        check_length(plain)
        check_number(plain)
        return plain

    def lift(plain: object) -> object:
        check_length(plain)  # before its contents cost anything
        value = codec.lift(plain)
        check_number(value)
        return value

    return _Codec(lower, lift, codec.depth)


def _checked(holds: Callable[[Any], bool], expected: str = "another value") -> _Codec:
    """The codec of a type whose values msgpack carries as they are."""

    def check(value: object) -> object:
        if not holds(value):
            raise _Invalid(f"{expected} expected, not {value!r:.40}")
        return value

    return _Codec(check, check)


def _lower_float(value: object) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):  # type: ignore[arg-type]
        raise _Invalid(f"finite number expected, not {value!r:.40}")
    return float(value)  # type: ignore[arg-type]


def _lift_peer_id(plain: object) -> PeerId:
    if type(plain) is not bytes or len(plain) != 32:
        raise _Invalid("peer id of 32 bytes expected")
    return PeerId(plain)


def _lift_address(plain: object) -> Address:
    if type(plain) is not str or len(plain) > 300:
        raise _Invalid("address expected")
    try:
        address = Address.parse(plain)
    except AddressError as error:
        raise _Invalid(str(error)) from None
    if str(address) != plain:
        raise _Invalid(f"address {plain!r} is not in its canonical form")
    return address


_LEAVES: Mapping[Any, _Codec] = types.MappingProxyType(
    {
        bool: _checked(lambda value: type(value) is bool, "bool"),
        int: _checked(lambda value: type(value) is int and -(2**63) <= value < 2**64, "integer of 64 bits"),
        float: _Codec(_lower_float, _checked(lambda v: type(v) is float and math.isfinite(v), "finite float").lift),
        str: _checked(lambda value: type(value) is str, "text"),
        bytes: _checked(lambda value: isinstance(value, bytes), "bytes"),
        PeerId: _Codec(lambda value: bytes(_expect(value, PeerId)), _lift_peer_id),
        Address: _Codec(lambda value: str(_lift_address(str(_expect(value, Address)))), _lift_address),
    }
)


def _expect(value: object, cls: type) -> Any:  # noqa: ANN401 - an instance of cls
    if not isinstance(value, cls):
        raise _Invalid(f"{cls.__name__} expected, not {type(value).__name__}")
    return value
