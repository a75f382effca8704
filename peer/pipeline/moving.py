"""When a peer moves to another stage: what the members' records say, and how several agree on who goes."""

from __future__ import annotations

import attrs
import trio

from optim.swarm.balance import Member, Move, Policy, moves, throughputs
from peer.pipeline.crew import Crew

PATIENCE = 3.0
"""Seconds for which a peer that is about to move waits until the others have heard of it, or have gone first."""


@attrs.frozen
class Balance:
    """Moves between the stages of a pipeline.

    All compute the same moves from the same records, and all of these are made at once. But records differ for a while.
    So who finds itself in a move *claims* it, and goes once everybody has heard that, if the others' claims are among
    the moves that it has computed as well. Of two claims, one has heard the other by then, or both have. So the last
    one to decide knows all that went before, and no stage loses its last server. Of claims that do not fit together,
    the one made later is not made at all; of those made at the same time, who comes first by name goes.
    """

    crew: Crew
    stages: int
    policy: Policy

    def members(self) -> list[Member]:
        """What balancing goes by. Who fetches a stage's state counts as its server: help is on its way."""
        standings = {peer: each for peer, each in self.crew.heeded.items() if each.stage is not None}
        known = [each.rate for each in standings.values() if each.rate]
        usual = sum(known) / len(known) if known else 1.0
        return [
            Member(
                peer=peer,
                stage=each.stage or 0,
                rate=each.rate or usual,
                settled_for=float(each.rested),
                leaving=each.leaving,
                ready=each.ready,
            )
            for peer, each in standings.items()
        ]

    def wanted(self) -> Move | None:
        """The move that is ours, if there is one."""
        return next((move for move in self.moves() if move.peer == self.crew.peer), None)

    def rescue(self) -> Move | None:
        """The same, if it is to a stage that has no servers at all."""
        rates = throughputs(self.members(), self.stages)
        move = None if all(rates) else self.wanted()
        return move if move is not None and not rates[move.target] else None

    async def claim(self, move: Move, *, urgent: bool = False) -> bool:
        """Says that we are about to make a move of ours. False if we may not, as others go, or nobody can replace us.

        If it is urgent, who serves other stages need not have heard it: at worst, two go.
        """
        crew = self.crew
        if crew.own.moving is not None or not self._fits(move):
            return False
        crew.announce(moving=move.target)
        number = crew.own.number

        def is_known() -> bool:
            return crew.is_known(number, crew.servers(move.source) if urgent else None)

        def is_ours() -> bool:
            return is_known() and self._fits(move) and self._is_replaced(move.source)

        def is_others() -> bool:
            return is_known() and not self._fits(move) and not self._is_first()

        with trio.move_on_after(PATIENCE):
            await crew.until(lambda: is_ours() or is_others())
        if is_ours():
            return True
        crew.announce(moving=None)
        return False

    def moves(self) -> list[Move]:
        """All moves that are worth it, by the records that we have."""
        return moves(self.members(), self.stages, self.policy)

    def _fits(self, move: Move) -> bool:
        """Whether a move of ours, and all that others have claimed, are among the moves that we compute."""
        claims = {
            (peer, each.stage, each.moving)
            for peer, each in self.crew.heeded.items()
            if each.moving is not None and peer != self.crew.peer
        }
        return {(move.peer, move.source, move.target), *claims} <= {*map(attrs.astuple, self.moves())}

    def _is_first(self) -> bool:
        """Whether nobody else who is about to move comes before us by name."""
        return all(peer >= self.crew.peer for peer, each in self.crew.heeded.items() if each.moving is not None)

    def _is_replaced(self, stage: int) -> bool:
        """Whether a server of our stage that stays is as far as we are."""
        own = self.crew.own
        return any(
            (each.step, each.settled) >= (own.step, own.settled)
            for peer, each in self.crew.servers(stage).items()
            if peer != self.crew.peer and each.moving is None and not each.leaving
        )
