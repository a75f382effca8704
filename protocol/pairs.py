"""Who exchanges with whom, without any input or output: pairs that every member of a plan makes the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

from protocol.identity import PeerId
from protocol.plan import Plan

Pairing: TypeAlias = Literal["random", "exponential", "exponential-ring"]
"""How members are matched, those of the one operation after those of the other.

- random: anew each time;
- exponential: number i of the sorted members with number i xor 2^k, k going round from 0 to log₂ n: then a value has
  reached everybody after log₂ n operations, if n is a power of two. Those who have no such partner are matched among
  themselves;
- exponential-ring: alternately like that, and with the neighbour to the right and to the left in the sorted ring.
"""


def pairs(plan: Plan, pairing: Pairing = "random") -> list[tuple[PeerId, ...]]:
    """The members of a plan, two by two; the last one is alone if their number is odd.

    Random ones are put in the order of SHA-256(plan id || peer id), which nobody can choose alone: every attempt has
    another. The others depend on the number of the operation and on the members only.
    """
    turn = plan.revision - 1
    match pairing:
        case "random":
            return _neighbours(sorted(plan.members, key=lambda peer: hashlib.sha256(plan.id + peer).digest()))
        case "exponential":
            return _at_a_distance(sorted(plan.members), turn)
        case "exponential-ring":
            members = sorted(plan.members)
            if turn % 2 == 0:
                return _at_a_distance(members, turn // 2)
            first = turn // 2 % 2
            return _neighbours(members[first:] + members[:first])


def _neighbours(order: Sequence[PeerId]) -> list[tuple[PeerId, ...]]:
    return [tuple(order[start : start + 2]) for start in range(0, len(order), 2)]


def _at_a_distance(members: Sequence[PeerId], turn: int) -> list[tuple[PeerId, ...]]:
    step = 1 << turn % max(1, (len(members) - 1).bit_length())
    matched = {place: place ^ step for place in range(len(members)) if place ^ step < len(members)}
    made: list[tuple[PeerId, ...]] = [
        (members[place], members[other]) for place, other in matched.items() if place < other
    ]
    return made + _neighbours([peer for place, peer in enumerate(members) if place not in matched])


def partner(plan: Plan, peer: PeerId, pairing: Pairing = "random") -> PeerId | None:
    """Whom a member exchanges with; None if it is the odd one out."""
    return next((other for pair in pairs(plan, pairing) if peer in pair for other in pair if other != peer), None)


def swap_id(plan: Plan) -> bytes:
    """What tells the streams of a plan's pairs from those of its ring; 32 bytes."""
    return hashlib.sha256(b"shoal-swap-v1" + plan.id).digest()
