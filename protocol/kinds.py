"""What members have to agree on to take part in one operation, and who is right if they do not.

Everything here is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Literal, TypeAlias

import attrs
from msgspec import Meta

from protocol.codecs import CodecName
from protocol.collective import Window
from protocol.identity import PeerId
from protocol.pairs import Pairing
from protocol.plan import Length, Operation

Call: TypeAlias = Literal["", "all_reduce", "gather", "broadcast", "barrier", "exchange"]
Strength: TypeAlias = tuple[int, int]
"""Of those who bring the same: how many they are, and how many of them have not missed the operation before."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@attrs.frozen(order=True)
class Terms:
    """What a program asks for that is in no plan. In runs of daemons the manifest says all, and this is the default."""

    call: Call = ""
    pairing: Pairing = "random"
    quorum: _Count = 0
    """Of the window; 0 if there is none."""
    grace: Annotated[float, Meta(ge=0)] = 0.0
    keep: _Count = 0

    @classmethod
    def of(cls, call: Call, window: Window | None = None, pairing: Pairing = "random") -> Terms:
        """Those of a call with these arguments."""
        if window is None:
            return cls(call, pairing)
        return cls(call, pairing, window.quorum, window.grace, window.keep)


NO_TERMS = Terms()


@attrs.frozen(order=True)
class Kind:
    """What somebody brings to an operation, but for the values. Those of one kind can be in one plan."""

    operation: Operation
    length: Length
    """Elements of the vector; 0 of a gather, to which each brings as much as it likes."""
    codec: CodecName = "fp32"
    terms: Terms = NO_TERMS

    @classmethod
    def of(cls, operation: Operation, length: int, codec: CodecName, terms: Terms) -> Kind:
        """That of who brings a vector of so many elements, or a block of so many bytes."""
        return cls(operation, 0 if operation == "gather" else length, codec, terms)

    @property
    def call(self) -> str:
        """What it is for people."""
        return self.terms.call or self.operation


@attrs.frozen
class Brought:
    """What one peer says that it brings."""

    peer: PeerId
    kind: Kind
    late: bool = False
    """It has missed the operation before, and joins in where the others are."""


def differences(ours: Kind, theirs: Kind) -> str:
    """What is different, for people; empty if nothing is."""
    here, there = _told(ours), _told(theirs)
    if ours.call != theirs.call:  # then the rest says nothing, but for what holds for all of a peer's operations
        here, there = ({name: told[name] for name in ("operation", "codec")} for told in (here, there))
    return ", ".join(f"{name}: {here[name]} here, {there[name]} there" for name in here if here[name] != there[name])


def agreed(brought: Collection[Brought], ours: Kind | None) -> Kind | None:
    """The kind of the operation: what most bring.

    Of those that as many bring, the one of which fewer have missed the operation before; then ours; then whichever.
    None if nobody brings the same as anybody else, and nobody is right.
    """
    strengths = _strengths(brought)
    most = max(strengths.values())
    first = sorted(kind for kind, strength in strengths.items() if strength == most)
    if len(first) > 1 and most[0] == 1:
        return None
    return ours if ours in first else first[0]


def left_out(ours: Brought, others: Iterable[Brought], undecided: int) -> bool | None:
    """Whether the others make an operation without us, of a kind that as many bring; None if it is not known yet.

    Args:
        ours: What we bring.
        others: What others bring.
        undecided: How many have not said yet what they bring.
    """
    strengths = _strengths([ours, *others])
    own = strengths.pop(ours.kind)
    most = max(strengths.values(), default=(0, 0))
    if most < own:
        return False
    return True if most >= (own[0] + undecided, own[1] + undecided) else None


def _strengths(brought: Iterable[Brought]) -> dict[Kind, Strength]:
    strengths: dict[Kind, Strength] = {}
    for each in brought:
        count, settled = strengths.get(each.kind, (0, 0))
        strengths[each.kind] = count + 1, settled + (not each.late)
    return strengths


def _told(kind: Kind) -> dict[str, str]:
    terms = kind.terms
    window = f"quorum {terms.quorum} grace {terms.grace:g} s keep {terms.keep}" if terms.quorum else "none"
    return {
        "operation": kind.call,
        "length": str(kind.length),
        "codec": kind.codec,
        "pairing": terms.pairing,
        "window": window,
    }
