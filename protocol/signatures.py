"""Signatures of weights in rounds: ours are made, and those of others checked, once for all attempts at a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import trio

from protocol.identity import Identity, PeerId
from protocol.plan import MAX_MEMBERS, Plan
from protocol.weights import SignedWeight, sign_weight

_AT_A_TIME = 64
"""Signatures of a plan that are checked before others get a turn."""

_MAX_REMEMBERED = 2 * MAX_MEMBERS

_Key: TypeAlias = tuple[int, bytes, PeerId, SignedWeight]


class Signatures:
    """Of one run and tag.

    Args:
        identity: Who we are.
        max_members: The most peers that take part in one round.
        admits: Whether a peer may contribute at all.
    """

    def __init__(
        self,
        identity: Identity,
        run: bytes,
        tag: str,
        *,
        max_members: int = MAX_MEMBERS,
        admits: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._identity, self._run, self._tag = identity, run, tag
        self._max_members, self._admits = max_members, admits
        self._valid: set[_Key] = set()

    def sign(self, revision: int, base: bytes, weight: float) -> bytes | None:
        """Our signature; None for a weight of 0, which needs none."""
        if weight <= 0:
            return None
        signed = sign_weight(self._identity, self._run, self._tag, revision, base, weight)
        self._remember((revision, base, self._identity.peer_id, signed))
        return signed.signature

    def problem(self, peer: PeerId, revision: int, base: bytes, weight: float, signature: bytes | None) -> str | None:
        """What is wrong with a peer's contribution of this weight; None if nothing is."""
        if weight <= 0:
            return None if signature is None else f"{peer.short} has signed a weight of 0"
        if signature is None:
            return f"{peer.short} has not signed its weight"
        return self._check(peer, revision, base, SignedWeight(weight, signature))

    async def problem_of(self, plan: Plan) -> str | None:
        """What is wrong with the contributions to a plan; None if nothing is."""
        contributors = plan.contributors
        if len(plan.members) > self._max_members:
            return f"{len(plan.members)} members; in this run {self._max_members} is the most"
        if len(plan.signatures) != len(contributors):
            return f"{len(contributors)} contributors and {len(plan.signatures)} signatures"
        for count, (peer, signed) in enumerate(zip(contributors, plan.contributions, strict=True), 1):
            if (problem := self._check(peer, plan.revision, plan.base, signed)) is not None:
                return problem
            if count % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
        return None

    def _check(self, peer: PeerId, revision: int, base: bytes, signed: SignedWeight) -> str | None:
        key = (revision, base, peer, signed)
        if key in self._valid:
            return None
        if signed.peer != peer or not signed.is_valid(self._run, self._tag, revision, base):
            return f"the signature of the weight of {peer.short} is wrong"
        if not self._admits(peer):
            return f"{peer.short} is not admitted to this run"
        self._remember(key)
        return None

    def _remember(self, key: _Key) -> None:
        if len(self._valid) >= _MAX_REMEMBERED:
            self._valid.clear()
        self._valid.add(key)
