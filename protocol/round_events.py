"""What rounds tell about themselves."""

from __future__ import annotations

from typing import Literal

import attrs

from protocol.identity import PeerId
from protocol.plan import Plan


@attrs.frozen(kw_only=True)
class RoundEvent:
    """Something happened in a round.

    `round_started`: an attempt that this peer takes part in began. `round_failed`: it failed, or one that this peer
    coordinates did. `contribution_dropped`: this peer's values were not finite, so it takes part with weight 0.
    `misfit`: these members bring something else to it than this peer does.
    """

    event: Literal["round_started", "round_failed", "contribution_dropped", "misfit"]
    round: int
    attempt: int = 0
    members: tuple[PeerId, ...] = ()
    schedule: str = ""
    """How the data travels, see `plan.Schedule`."""
    blocks: tuple[int, ...] = ()
    """Elements of which each member is the owner, where that is not as equal as can be."""
    reason: str = ""


def attempt_event(plan: Plan, reason: str | None) -> RoundEvent:
    """The attempt to carry out a plan began (no reason), or failed."""
    return RoundEvent(
        event="round_started" if reason is None else "round_failed",
        round=plan.revision,
        attempt=plan.attempt,
        members=plan.members,
        schedule=plan.schedule,
        blocks=plan.blocks,
        reason=reason or "",
    )


@attrs.frozen
class RoundStatistics:
    """What is going on at a peer at one moment."""

    sessions: int
    """Ready peers that are waiting or taking part here, ourselves included."""
    parked: int
    """Streams of ring data whose plan is not known here yet."""
    transfers: int
    """Attempts whose data are being received or sent."""
    results: int
    """Results that are kept for others."""

    @property
    def busy(self) -> bool:
        return bool(self.sessions or self.parked or self.transfers)
