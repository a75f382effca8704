"""Which peer serves which stage.

Everybody computes the same moves from the members' records, so nobody has to decide for the others: who finds itself in
a move makes it, all others do nothing. Records differ for a while, so whoever is about to move says so first, and
counts as moved for all who have heard it (`peer.pipeline.moving`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

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
    """Steps that it has made since it has moved to this stage, or has come."""
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
    rest: float = 10.0
    """Steps that a peer stays in a stage: a move costs the transfer of the stage's state."""


def throughputs(members: Collection[Member], stages: int) -> list[float]:
    """Samples per second of each stage, without those who leave. The pipeline's is the least of them."""
    rates = [0.0] * stages
    for member in sorted(members, key=lambda member: member.peer):  # so that all sum in the same order
        if not member.leaving:
            rates[member.stage] += member.rate
    return rates


def newcomers_stage(members: Collection[Member], stages: int) -> int:
    """Where a newcomer is needed most: in the slowest stage, and before that in one with fewer than two servers."""
    counts = [sum(member.stage == stage and not member.leaving for member in members) for stage in range(stages)]
    if min(counts) < 2:
        return counts.index(min(counts))
    rates = throughputs(members, stages)
    return rates.index(min(rates))


def moves(members: Collection[Member], stages: int, policy: Policy) -> list[Move]:
    """All moves that are worth it at present, in order: after them none is. No peer moves twice.

    Stages that are about to have no server come first. No stage gives away the last server that has its state.
    """
    there, found = {member.peer: member for member in members}, list[Move]()
    while (move := _next(there, stages, policy, {each.peer for each in found})) is not None:
        found.append(move)
        there[move.peer] = attrs.evolve(there[move.peer], stage=move.target, ready=False)
    return found


def _next(there: dict[PeerId, Member], stages: int, policy: Policy, moved: Collection[PeerId]) -> Move | None:
    """The best move to the slowest stage: after which the slower one of the two stages is as fast as possible."""
    rates = throughputs(there.values(), stages)
    target = rates.index(min(rates))
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
        and member.peer not in moved
        and staying[member.stage] > member.ready
        and (urgent or (member.settled_for >= policy.rest and after(member) > rates[target] * (1 + policy.gain)))
    ]
    if not donors:
        return None
    # Of those that are about as good, those of the fastest stages, and of these the first by name. "About", because
    # rates differ a little from one peer's records to another's.
    good = _largest(donors, after, policy.gain)
    best = min(_largest(good, lambda member: rates[member.stage], policy.gain), key=lambda member: member.peer)
    return Move(best.peer, best.stage, target)


def _largest(members: Collection[Member], value: Callable[[Member], float], tolerance: float) -> list[Member]:
    enough = max(map(value, members)) / (1 + tolerance)
    return [member for member in members if value(member) >= enough]
