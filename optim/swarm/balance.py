"""Which peer serves which stage.

Everybody computes the same moves from the members' records, so nobody has to decide for the others: who finds itself in
a move makes it, all others do nothing. Where records differ for a while, two may move instead of one; the next period
repairs that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import attrs

from protocol.identity import PeerId


@attrs.frozen(kw_only=True)
class Member:
    """What a peer's membership record says of its stage."""

    peer: PeerId
    stage: int
    rate: float
    """Samples per second that it can lead through its stage, forwards and backwards, as measured; above 0."""
    settled_for: float = math.inf
    """Seconds since it has moved to this stage, or has come."""
    ready: bool = True
    """Whether it has the stage's state. Else it is about to, and cannot be the stage's last one."""
    leaving: bool = False
    """Whether it has said that it leaves, or is told that it will be preempted."""


@attrs.frozen
class Move:
    """A peer leaves its stage for another one."""

    peer: PeerId
    source: int
    target: int


@attrs.frozen(kw_only=True)
class Policy:
    """When moves are worth it. The same for all members."""

    gain: float = 0.05
    """By what share the slower one of the two stages has to gain: hysteresis, as measured rates go up and down."""
    rest: float = 300.0
    """Seconds that a peer stays in a stage: a move costs the transfer of the stage's state."""
    most: int = 4
    """Moves at a time."""


def throughputs(members: Collection[Member], stages: int) -> list[float]:
    """Samples per second of each stage, without those who leave. The pipeline's is the least of them."""
    rates = [0.0] * stages
    for member in sorted(members, key=lambda member: member.peer):  # so that all sum in the same order
        if not member.leaving:
            rates[member.stage] += member.rate
    return rates


def eta(members: Collection[Member], stages: int, remaining: Sequence[int]) -> list[float]:
    """Seconds until each stage has counted the samples that it lacks; infinite without servers."""
    rates = throughputs(members, stages)
    return [left / rate if rate else (math.inf if left else 0.0) for left, rate in zip(remaining, rates, strict=True)]


def newcomers_stage(members: Collection[Member], stages: int) -> int:
    """Where a newcomer is needed most: the slowest stage, of equal ones the first."""
    rates = throughputs(members, stages)
    return min(range(stages), key=lambda stage: (rates[stage], stage))


def moves(members: Collection[Member], stages: int, policy: Policy) -> list[Move]:
    """The moves of a period, in order. Stages that are about to have no server come first, as many as there are."""
    there, found = {member.peer: member for member in members}, list[Move]()
    while (move := _next(there, stages, policy)) is not None:
        urgent = not throughputs(there.values(), stages)[move.target]
        if not urgent and len(found) >= policy.most:
            break
        found.append(move)
        there[move.peer] = attrs.evolve(there[move.peer], stage=move.target, settled_for=0.0)
    return found


def _next(there: dict[PeerId, Member], stages: int, policy: Policy) -> Move | None:
    """The best move to the slowest stage: after which the slower one of the two stages is as fast as possible."""
    rates = throughputs(there.values(), stages)
    target = min(range(stages), key=lambda stage: (rates[stage], stage))
    urgent = not rates[target]
    able = [member for member in there.values() if not member.leaving]
    staying = [0] * stages
    for member in able:
        staying[member.stage] += member.ready

    def after(member: Member) -> float:
        return min(rates[target] + member.rate, rates[member.stage] - member.rate)

    donors = [
        member
        for member in able
        if member.stage != target
        and staying[member.stage] > member.ready
        and (urgent or (member.settled_for >= policy.rest and after(member) > rates[target] * (1 + policy.gain)))
    ]
    if not donors:
        return None
    best = min(donors, key=lambda member: (-after(member), member.peer))
    return Move(best.peer, best.stage, target)
