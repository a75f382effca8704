"""Which of several peers' outer states is the run's."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from protocol.errors import ProtocolError
from protocol.identity import PeerId

_FORM = struct.Struct("<QQ16s8s?")


@attrs.frozen
class Standing:
    """How far a peer is."""

    rounds: int
    """Exchanges that succeeded."""
    begun: int
    history: bytes
    """Digest of who contributed to each of them, 16 bytes: the same at peers that have the same outer state."""
    nonce: bytes
    """Random, 8 bytes: tells peers apart that stand the same."""
    warm: bool = False
    """Whether its learning rate has risen to its peak."""

    def pack(self) -> bytes:
        """As a block."""
        return _FORM.pack(*attrs.astuple(self))

    def agrees(self, other: Standing) -> bool:
        """Whether the other peer has the same outer state."""
        return (self.rounds, self.history) == (other.rounds, other.history)


def standings(blocks: Iterable[bytes]) -> list[Standing]:
    """What peers have packed; what nobody would pack is left out.

    Raises:
        ProtocolError: Nothing is left.
    """
    told = [Standing(*_FORM.unpack(block)) for block in blocks if len(block) == _FORM.size]
    if not told:
        raise ProtocolError("nobody says how far it is")
    return told


def foremost(told: Sequence[Standing]) -> Standing:
    """The one that has the run's state, the same for all that hear the same."""
    many = Counter((one.rounds, one.history) for one in told)

    def order(one: Standing) -> tuple[bool, int, int, bytes, int, bytes]:
        return one.rounds > 0, many[one.rounds, one.history], one.rounds, one.history, one.begun, one.nonce

    return max(told, key=order)


def told_of(history: bytes, round: int, members: Sequence[PeerId]) -> bytes:
    """The history after one more exchange."""
    return hashlib.sha256(history + struct.pack("<Q", round) + b"".join(sorted(members))).digest()[:16]
