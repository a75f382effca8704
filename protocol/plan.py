"""What one round of a run is going to do: its ballot and its plan, and who may make one.

Everything here is a pure function of its arguments. The members of a round follow a plan only if it carries the
highest ballot they have seen for that round (see `protocol.ballots`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import attrs
from msgspec import Meta

from protocol.identity import PeerId

MAX_MEMBERS = 4096
"""Most members of one plan. A plan of that size still fits a message."""

MAX_REVISION = 2**63 - 1
MAX_ATTEMPT = 2**20
"""Far above what a round can need; a peer that claims more than half of it is not believed."""

MAX_LENGTH = 2**40
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


def _check_members(_plan: Plan, _attribute: attrs.Attribute[tuple[PeerId, ...]], members: tuple[PeerId, ...]) -> None:
    if not members or len(set(members)) != len(members):
        raise ValueError("a plan has at least one member, and each of them once")


def _check_weights(plan: Plan, _attribute: attrs.Attribute[tuple[float, ...]], weights: tuple[float, ...]) -> None:
    if len(weights) != len(plan.members):
        raise ValueError("a plan has one weight for each member")
    if not all(0 <= weight <= MAX_WEIGHT for weight in weights):
        raise ValueError(f"weights are numbers from 0 to {MAX_WEIGHT:g}")


@attrs.frozen
class Plan:
    """Who makes one revision of a run's state, and how. Fixed by the coordinator, the same for all members.

    Raises:
        ValueError: Members are missing or doubled, or the weights do not fit them.
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
    """Number of fp32 elements of each member's vector."""
    base: Hash = NO_DIGEST
    """Digest of the state that the inputs belong to."""
    tag: Tag = ""
    """Tells concurrent collectives of one run apart."""
    codec: Literal["fp32"] = "fp32"

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.attempt, self.rank, self.coordinator)

    @property
    def id(self) -> bytes:
        """SHA-256 over every field in fixed-width big-endian form; 32 bytes."""
        tag, codec = self.tag.encode(), self.codec.encode()
        digest = hashlib.sha256(b"shoal-plan-v1")
        digest.update(self.run + struct.pack(">H", len(tag)) + tag)
        digest.update(struct.pack(">Q", self.revision) + self.base)
        digest.update(struct.pack(">II", self.attempt, self.rank) + self.coordinator)
        digest.update(struct.pack(">I", len(self.members)) + b"".join(self.members))
        digest.update(struct.pack(f">{len(self.weights)}d", *(weight + 0.0 for weight in self.weights)))
        digest.update(struct.pack(">QH", self.length, len(codec)) + codec)
        return digest.digest()

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
    def contributors(self) -> tuple[PeerId, ...]:
        """The members whose values count."""
        return tuple(peer for peer, weight in zip(self.members, self.weights, strict=True) if weight > 0)


def coordinators(run: bytes, revision: int, peers: Iterable[PeerId], *, tag: str = "") -> list[PeerId]:
    """The peers that may coordinate a round, best first: by XOR distance to a point that only the round decides.

    The point is SHA-256(run || u64 revision || tag), so that the load moves on with each round. Peers that know of
    different members still mostly agree on the first.
    """
    point = int.from_bytes(hashlib.sha256(run + struct.pack(">Q", revision) + tag.encode()).digest(), "big")
    return sorted(set(peers), key=lambda peer: int.from_bytes(peer, "big") ^ point)


def rank_of(peer: PeerId, run: bytes, revision: int, peers: Collection[PeerId], *, tag: str = "") -> int:
    """The place of a peer in `coordinators`, from 0; it need not be among `peers`."""
    return coordinators(run, revision, {*peers, peer}, tag=tag).index(peer)
