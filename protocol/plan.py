"""What one round of a run is going to do: its ballot and its plan, and who may make one.

Everything here is a pure function of its arguments. The members of a round follow a plan only if it carries the
highest ballot they have seen for that round (see `protocol.ballots`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Collection, Iterable
from typing import Annotated, Literal, TypeAlias

import attrs
from msgspec import Meta

from protocol.codecs import CodecName, block_of
from protocol.identity import PeerId
from protocol.weights import SignedWeight, WeightSignature

MAX_MEMBERS = 4096
"""Most members of one plan. A plan of that size still fits a message."""

MAX_REVISION = 2**63 - 1
MAX_ATTEMPT = 2**63 - 1
MAX_JUMP = 2**20
"""How far a number that others tell may be above the one that we know, if we are to go on from there: far above what
there can be a need for, and too little for liars to use up all numbers."""

MAX_SALVAGED = 2**10
"""Most parts that a plan takes over from earlier ones."""

SMALL = 2**13
"""Elements of all members' vectors together of which one member may own all, which it may have to keep."""

MAX_LENGTH = 2**42
MAX_BLOCK = 2**30
"""Most bytes of one member's block in a gather, unless a smaller bound is set."""

MAX_WEIGHT = 1e15

NO_DIGEST = bytes(32)
"""Stands for "no digest": the state before the first revision of a run that does not chain digests."""

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
Tag = Annotated[str, Meta(max_length=64)]
Revision = Annotated[int, Meta(ge=1, le=MAX_REVISION)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Rank = Annotated[int, Meta(ge=0, le=MAX_MEMBERS)]
Weight = Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]
Length = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
Operation: TypeAlias = Literal["reduce", "gather", "exchange"]
"""What a round does with what its members bring:

- `reduce`: the weighted mean of vectors of one length, at all;
- `gather`: each member's block of bytes, of whatever size, at all. Who has weight 0 brings none;
- `exchange`: nothing but the plan itself. By its id the members are matched in pairs, which swap their vectors.
"""
Schedule: TypeAlias = Literal["ring", "direct"]
"""How what is reduced travels: around a ring (see `protocol.ring`), or to the owners of blocks and back (see
`protocol.direct`). Values of lossy codecs are reduced in the second way only; gathers and exchanges know the first."""


@attrs.frozen(order=True)
class Ballot:
    """The priority of a plan among all plans for one round: compared by attempt, then rank, then coordinator.

    `attempt` counts the tries at the round, from 1; `rank` is the coordinator's place among the candidates, as it
    sees them. Two coordinators with different views may claim the same rank, so the peer id decides last. The smallest
    ballot, `NO_BALLOT`, belongs to no plan.
    """

    attempt: Attempt
    rank: Rank
    coordinator: PeerId


NO_BALLOT = Ballot(0, 0, PeerId(bytes(32)))


@attrs.frozen
class Source:
    """What one plan has made of a part of the vector: the weighted mean over its members."""

    plan: Hash
    """The plan's id: all who hold the part with the same id hold the same bits."""
    members: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    weights: Annotated[tuple[Weight, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]

    def __attrs_post_init__(self) -> None:
        if len(self.weights) != len(self.members):
            raise ValueError("a source has one weight for each member")


@attrs.frozen
class Salvaged:
    """Elements [start, stop) that an earlier plan has reduced: they are passed on, and not reduced again."""

    start: Length
    stop: Length
    source: Annotated[int, Meta(ge=0, lt=MAX_SALVAGED)]
    """Which of the plan's sources."""
    holders: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    """Places of the members that hold them, in order."""


@attrs.frozen
class Part:
    """Elements [start, stop) of a result, and whose values they are the weighted mean of."""

    start: int
    stop: int
    members: tuple[PeerId, ...]
    weights: tuple[float, ...]
    source: bytes | None = None
    """The id of the plan that has reduced it, if that is an earlier one."""


def _check_members(_plan: Plan, _attribute: attrs.Attribute[tuple[PeerId, ...]], members: tuple[PeerId, ...]) -> None:
    if not members or len(set(members)) != len(members):
        raise ValueError("a plan has at least one member, and each of them once")


def _check_weights(plan: Plan, _attribute: attrs.Attribute[tuple[float, ...]], weights: tuple[float, ...]) -> None:
    if len(weights) != len(plan.members):
        raise ValueError("a plan has one weight for each member")
    if not all(0 <= weight <= MAX_WEIGHT for weight in weights):
        raise ValueError(f"weights are numbers from 0 to {MAX_WEIGHT:g}")


def _check_salvaged(plan: Plan, _attribute: attrs.Attribute[tuple[Salvaged, ...]], parts: tuple[Salvaged, ...]) -> None:
    position, places, block = 0, set(range(len(plan.members))), block_of(plan.codec)
    for part in parts:
        if not position <= part.start < part.stop <= plan.length:
            raise ValueError("salvaged parts are in order, and inside of the vector")
        if part.start % block or (part.stop % block and part.stop != plan.length):
            raise ValueError("salvaged parts consist of whole blocks of the codec")
        if part.source >= len(plan.sources) or not places.issuperset(part.holders):
            raise ValueError("a salvaged part has a source, and members that hold it")
        if any(holder >= following for holder, following in itertools.pairwise(part.holders)):
            raise ValueError("the holders of a salvaged part are in order, and each of them is there once")
        position = part.stop
    if plan.length and len(plan.members) > 1 and not plan.free:
        raise ValueError("several members reduce something: salvaged parts are not everything")


def _check_sizes(plan: Plan, _attribute: attrs.Attribute[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
    if plan.operation != "reduce" and plan.salvaged:
        raise ValueError("only what is reduced can be salvaged")
    if plan.operation != "gather":
        if sizes:
            raise ValueError("only a gather has sizes")
    elif len(sizes) != len(plan.members) or sum(sizes) != plan.length:
        raise ValueError("a gather has one size for each member, and they add up to its length")
    elif any(size and not weight for size, weight in zip(sizes, plan.weights, strict=True)):
        raise ValueError("the block of whoever has weight 0 has size 0")


def _usual_schedule(plan: Plan) -> Schedule:
    return "direct" if plan.operation == "reduce" and plan.codec != "fp32" else "ring"


def _check_schedule(plan: Plan, _attribute: attrs.Attribute[Schedule], schedule: Schedule) -> None:
    if schedule == "direct" and plan.operation != "reduce":
        raise ValueError("only what is reduced goes to owners of blocks")
    if schedule == "ring" and plan.operation == "reduce" and plan.codec != "fp32":
        raise ValueError("values of a lossy codec do not go around a ring")


def _check_blocks(plan: Plan, _attribute: attrs.Attribute[tuple[int, ...]], blocks: tuple[int, ...]) -> None:
    if not blocks:
        return
    if plan.operation != "reduce" or len(blocks) != len(plan.members) or sum(blocks) != plan.free:
        raise ValueError("members have one block each, and these are what is reduced")
    unit = block_of(plan.codec)
    if any(bound % unit for bound in itertools.accumulate(blocks) if bound != plan.free):
        raise ValueError("members' blocks consist of whole blocks of the codec")
    # Parts were rounded at both ends.
    if max(blocks) > max(largest_part(len(blocks)) * plan.free + 2 * unit, SMALL / len(blocks)):
        raise ValueError("a member owns too much: it may have to keep what all others send it")


def largest_part(members: int) -> float:
    """The part of the data that one member may own, by way of owners, unless it is `SMALL` for all of them together.

    It keeps the values of all others until the slowest's have come: by this, of two vectors' size at most.
    """
    return min(1.0, 2 / max(members - 2, 1))


@attrs.frozen
class Plan:
    """Who makes one revision of a run's state, and how. Fixed by the coordinator, the same for all members.

    Raises:
        ValueError: Members are missing or doubled, the weights do not fit them, or salvaged parts overlap, or leave
            several members nothing to reduce; or the schedule or the blocks do not fit the rest, or one of these is
            larger than `largest_part` allows.
    """

    run: Hash
    revision: Revision
    """The revision that is being made; the inputs belong to `revision - 1`."""
    attempt: Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
    rank: Rank
    coordinator: PeerId
    """Need not be a member: a peer that is not ready in time coordinates only."""
    members: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=MAX_MEMBERS)] = attrs.field(
        validator=_check_members
    )
    """In ring order: each sends to the next, the last to the first."""
    weights: Annotated[tuple[Weight, ...], Meta(max_length=MAX_MEMBERS)] = attrs.field(validator=_check_weights)
    """What each member's values count, in the order of `members`."""
    length: Length
    """Number of fp32 elements of each member's vector; of a gather, bytes of all blocks together."""
    base: Hash = NO_DIGEST
    """Digest of the state that the inputs belong to."""
    tag: Tag = ""
    """Tells concurrent collectives of one run apart."""
    codec: CodecName = "fp32"
    """How values look on the wire."""
    sources: Annotated[tuple[Source, ...], Meta(max_length=MAX_SALVAGED)] = ()
    salvaged: Annotated[tuple[Salvaged, ...], Meta(max_length=MAX_SALVAGED)] = attrs.field(
        default=(), validator=_check_salvaged
    )
    """What is left of earlier attempts, in order. The rest of the vector is reduced."""
    operation: Operation = "reduce"
    sizes: Annotated[tuple[Length, ...], Meta(max_length=MAX_MEMBERS)] = attrs.field(default=(), validator=_check_sizes)
    """Of a gather: bytes of each member's block, in the order of `members`."""
    signatures: Annotated[tuple[WeightSignature, ...], Meta(max_length=MAX_MEMBERS)] = ()
    """Of the `contributors`, each over its weight. Not part of the id: they are about what the id covers."""
    schedule: Schedule = attrs.field(default=attrs.Factory(_usual_schedule, takes_self=True), validator=_check_schedule)
    blocks: Annotated[tuple[Length, ...], Meta(max_length=MAX_MEMBERS)] = attrs.field(
        default=(), validator=_check_blocks
    )
    """Elements of each member's own block, in the order of `members`, of those that are not salvaged. Empty: as equal
    as can be, see `protocol.reduction.own_blocks`."""

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.attempt, self.rank, self.coordinator)

    @property
    def id(self) -> bytes:
        """SHA-256 over every field but the signatures in fixed-width big-endian form; 32 bytes."""
        tag, codec, operation = self.tag.encode(), self.codec.encode(), self.operation.encode()
        schedule = self.schedule.encode()
        digest = hashlib.sha256(b"shoal-plan-v1")
        digest.update(self.run + struct.pack(">H", len(tag)) + tag)
        digest.update(struct.pack(">Q", self.revision) + self.base)
        digest.update(struct.pack(">QI", self.attempt, self.rank) + self.coordinator)
        digest.update(struct.pack(">I", len(self.members)) + b"".join(self.members))
        digest.update(struct.pack(f">{len(self.weights)}d", *(weight + 0.0 for weight in self.weights)))
        digest.update(struct.pack(">QH", self.length, len(codec)) + codec)
        digest.update(struct.pack(">H", len(operation)) + operation)
        digest.update(struct.pack(f">I{len(self.sizes)}Q", len(self.sizes), *self.sizes))
        digest.update(struct.pack(">H", len(schedule)) + schedule)
        digest.update(struct.pack(f">I{len(self.blocks)}Q", len(self.blocks), *self.blocks))
        digest.update(struct.pack(">I", len(self.sources)))
        for source in self.sources:
            digest.update(source.plan + struct.pack(">I", len(source.members)) + b"".join(source.members))
            digest.update(struct.pack(f">{len(source.weights)}d", *(weight + 0.0 for weight in source.weights)))
        for part in self.salvaged:
            digest.update(struct.pack(">QQII", part.start, part.stop, part.source, len(part.holders)))
            digest.update(struct.pack(f">{len(part.holders)}I", *part.holders))
        return digest.digest()

    @property
    def free(self) -> int:
        """Number of elements that are reduced: all that are not salvaged."""
        return self.length - sum(part.stop - part.start for part in self.salvaged)

    @property
    def nbytes(self) -> int:
        """Bytes of the result that all members end with."""
        return {"reduce": 4 * self.length, "gather": self.length, "exchange": 0}[self.operation]

    @property
    def load(self) -> int:
        """Number of fp32 elements that can be reduced in the time in which this can be done; for deadlines."""
        # The owner of the largest block sends it to all others, and its own values to them: 1 + (n - 2) · its part.
        largest = max(self.blocks, default=0) * (len(self.members) - 2)
        return min(max(load(self.operation, self.length), (self.length + largest) // 2), MAX_LENGTH)

    @property
    def weight(self) -> float:
        """Sum of the weights, rounded once."""
        return math.fsum(self.weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """What each member multiplies its values with: weight / sum, rounded to fp32. All 0 if the sum is 0."""
        total = self.weight
        if total == 0:
            return (0.0,) * len(self.weights)
        return tuple(struct.unpack("<f", struct.pack("<f", weight / total))[0] for weight in self.weights)

    @property
    def heaviest(self) -> float:
        """The largest weight of anybody's values in any part."""
        return max(max(weights) for weights in (self.weights, *(source.weights for source in self.sources)))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Whose values the result is made of, part by part, from the first element to the last."""
        parts, position = [], 0
        for salvaged in self.salvaged:
            source = self.sources[salvaged.source]
            if position < salvaged.start:
                parts.append(Part(position, salvaged.start, self.members, self.weights))
            parts.append(Part(salvaged.start, salvaged.stop, source.members, source.weights, source.plan))
            position = salvaged.stop
        if position < self.length:
            parts.append(Part(position, self.length, self.members, self.weights))
        return tuple(parts)

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """The members whose values count, but for salvaged parts."""
        return tuple(peer for peer, weight in zip(self.members, self.weights, strict=True) if weight > 0)

    def includes(self, peer: PeerId, followed: Collection[bytes] | None = None) -> bool:
        """Whether most of the result has a peer's values in it: salvaged parts may have other peers' than the rest.

        `followed`: the ids of the plans for which it has brought these values, if it may have brought others before.
        """
        parts = [part for part in self.parts if dict(zip(part.members, part.weights, strict=True)).get(peer)]
        if followed is not None:
            parts = [part for part in parts if (part.source or self.id) in followed]
        return 2 * sum(part.stop - part.start for part in parts) > self.length

    @property
    def contributions(self) -> tuple[SignedWeight, ...]:
        """What the contributors have signed. There is a signature of each, or the plan has not been accepted."""
        weights = (weight for weight in self.weights if weight > 0)
        return tuple(
            SignedWeight(weight, signature) for weight, signature in zip(weights, self.signatures, strict=True)
        )


def load(operation: Operation, length: int) -> int:
    """See `Plan.load`. Each byte of a gather comes by once, each of an element's four twice."""
    return length if operation == "reduce" else -(-length // 8) if operation == "gather" else 0


def coordinators(run: bytes, revision: int, peers: Iterable[PeerId], *, tag: str = "") -> list[PeerId]:
    """The peers that may coordinate a round, best first: by XOR distance to a point that only the round decides.

    The point is SHA-256(run || u64 revision || tag), so that the load moves on with each round. Peers that know of
    different members still mostly agree on the first.
    """
    point = int.from_bytes(hashlib.sha256(run + struct.pack(">Q", revision) + tag.encode()).digest(), "big")
    return sorted(set(peers), key=lambda peer: int.from_bytes(peer, "big") ^ point)
