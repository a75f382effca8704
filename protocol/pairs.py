"""Who exchanges with whom, without any input or output: random pairs that every member of a plan makes the same."""

from __future__ import annotations

import hashlib

from protocol.identity import PeerId
from protocol.plan import Plan


def pairs(plan: Plan) -> list[tuple[PeerId, ...]]:
    """The members of a plan, two by two; the last one is alone if their number is odd.

    They are put in the order of SHA-256(plan id || peer id), which nobody can choose alone: every attempt has another.
    """
    order = sorted(plan.members, key=lambda peer: hashlib.sha256(plan.id + peer).digest())
    return [tuple(order[start : start + 2]) for start in range(0, len(order), 2)]


def partner(plan: Plan, peer: PeerId) -> PeerId | None:
    """Whom a member exchanges with; None if it is the odd one out."""
    return next((other for pair in pairs(plan) if peer in pair for other in pair if other != peer), None)


def swap_id(plan: Plan) -> bytes:
    """What tells the streams of a plan's pairs from those of its ring; 32 bytes."""
    return hashlib.sha256(b"shoal-swap-v1" + plan.id).digest()
