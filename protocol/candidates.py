"""Those who are ready for a round, as its coordinator sees them. Without any input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import attrs

from protocol.codecs import CodecName
from protocol.identity import PeerId
from protocol.kinds import NO_TERMS, Brought, Kind, Terms, agreed
from protocol.plan import MAX_ATTEMPT, MAX_JUMP, Operation
from protocol.rates import UNKNOWN, Rates
from protocol.salvage import Holding

_T = TypeVar("_T", Kind, bytes)


@attrs.frozen
class Candidate:
    """What a ready peer brings."""

    weight: float
    length: int
    base: bytes
    tried: frozenset[PeerId]
    holdings: tuple[Holding, ...] = ()
    """What it has of attempts that failed."""
    operation: Operation = "reduce"
    signature: bytes | None = None
    """Of its weight, checked; None if that is 0."""
    rates: Rates = UNKNOWN
    """What it knows about its lines."""
    codec: CodecName = "fp32"
    terms: Terms = NO_TERMS
    late: bool = False
    """It has missed the round before."""
    promised: int = 0
    """The highest attempt of which it says that it accepts nothing more."""

    def follows(self, attempt: int) -> bool:
        """Whether it can accept a plan of this attempt; see `protocol.ballots`."""
        return self.promised < attempt <= self.promised + MAX_JUMP

    @property
    def kind(self) -> Kind:
        """Those of one kind can be in one plan."""
        return Kind.of(self.operation, self.length, self.codec, self.terms)


def brought(candidates: Mapping[PeerId, Candidate]) -> list[Brought]:
    """What they bring, for others to hear."""
    return [Brought(peer, candidate.kind, candidate.late) for peer, candidate in candidates.items()]


def kind_of(candidates: Mapping[PeerId, Candidate], ours: PeerId, *, fixed: bool) -> Kind:
    """What a plan for some of these candidates, of which there is one at least, would be for.

    Args:
        candidates: Those who may be in it.
        ours: Who makes it.
        fixed: Whether that peer's kind is right, if it is ready, or else what most bring.
    """
    own = candidates[ours].kind if ours in candidates else None
    if fixed:
        return own or most_common(candidate.kind for candidate in candidates.values())
    return agreed(brought(candidates), own) or own or min(candidate.kind for candidate in candidates.values())


def total_length(fit: Mapping[PeerId, Candidate], kind: Kind) -> int:
    """The length of a plan for candidates of one kind."""
    return sum(candidate.length for candidate in fit.values()) if kind.operation == "gather" else kind.length


def believed(
    candidates: Mapping[PeerId, Candidate], members: Iterable[PeerId], refusals: Mapping[PeerId, int]
) -> dict[PeerId, tuple[Holding, ...]]:
    """What members hold of attempts that failed, as they say.

    Whoever has refused a plan, perhaps since it does not hold what it said it did, is asked again but believed no more:
    with each plan that relies on a lie, the others overwrite what they do hold.
    """
    return {peer: candidates[peer].holdings for peer in members if not refusals.get(peer)}


def next_attempt(candidates: Collection[Candidate], last: int) -> int | None:
    """The lowest attempt after the last one that as many candidates as possible can follow; None if nobody can.

    Whoever lies about what it has promised goes without, and so does who was made to promise a lot by a liar.
    """
    possible = sorted({max(candidate.promised, last) + 1 for candidate in candidates})
    followers = {one: sum(each.follows(one) for each in candidates) for one in possible if one <= MAX_ATTEMPT}
    best = max(followers, key=followers.__getitem__, default=None)
    return best if best is not None and followers[best] else None


def most_common(values: Iterable[_T]) -> _T:
    """What there is most of; of what is as common, the least."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))
