"""How a peer's part in a pipeline ends: it waits for those who are late, and not for ever if all others are gone."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peer.node import FORLORN, LONGEST_LINGER
from peer.pipeline.crew import Crew
from protocol.errors import PeerUnreachable, ShoalError

LINGER = 30.0
"""Seconds that a server stays after the last step for those that still lack it, or since they last asked for it."""

STRANDED = 600.0
"""Seconds for which a peer that has been among others waits until one of them is back: lines break for minutes, and
nobody else may have what it has."""

HANDOVER = 8.0
"""Seconds for which the last server of a stage goes on after it was asked to leave, until another one has come."""

HEARD = 1.0
"""Seconds for which others are given time to hear that we leave."""


async def linger(crew: Crew, step: int, served: Callable[[], float]) -> None:
    """Stays until all servers that we know have made the last step: those that we have lost may come back.

    Args:
        crew: Who does what.
        step: The one after the last.
        served: When somebody has last had a state of ours.
    """
    deadline, limit = trio.current_time() + LINGER, trio.current_time() + LONGEST_LINGER
    while crew.lags(step) and trio.current_time() < deadline:
        changed = crew.changed
        with trio.move_on_at(deadline):
            await changed.wait()
        deadline = min(limit, max(deadline, served() + LINGER))


async def hand_over(crew: Crew, is_needed: Callable[[], bool]) -> None:
    """Tells others that we leave, and returns once nobody needs us any more."""
    crew.announce(leaving=True)
    number = crew.own.number
    with trio.move_on_after(HEARD):
        await crew.until(lambda: crew.is_known(number))
    await crew.until(lambda: not is_needed())


async def forlorn(crew: Crew, refusal: Callable[[], ShoalError | None]) -> ShoalError:
    """Returns, when there is no use in waiting for others any more, why.

    Args:
        crew: Who does what.
        refusal: Why a peer has not taken us for a member, if one has said so.
    """

    def is_refused() -> bool:
        return refusal() is not None and not crew.has_met

    while True:
        await crew.until(lambda: crew.is_stuck_alone)
        with trio.move_on_after(STRANDED if crew.has_met else FORLORN):
            await crew.until(lambda: not crew.is_stuck_alone or is_refused())
        if crew.is_stuck_alone:
            return refusal() or PeerUnreachable(
                "nobody else of this run is there, and it cannot go on without",
                hint="ask whoever founded it to start it again",
            )
