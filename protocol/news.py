"""What a peer hears of rounds that others begin, or have finished."""

from __future__ import annotations

import trio

from protocol.identity import PeerId
from protocol.roster import Roster

LOOKAHEAD = 2
"""A peer takes note of rounds up to this many revisions after its own state: it may be about to commit the first."""


class News:
    """Of one run and tag.

    Args:
        roster: Who can take part.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._heard: tuple[int, PeerId] | None = None
        self._changed = trio.Event()

    @property
    def heard(self) -> tuple[int, PeerId] | None:
        """The newest revision that some live member says it holds, and that member."""
        return self._heard if self._heard is not None and self._heard[1] in self._roster.partners() else None

    def hear(self, revision: int, peer: PeerId, tip: int) -> None:
        """A peer holds this revision, or says so; we hold `tip`. Of much later ones we learn otherwise, with proof."""
        heard = self.heard
        if revision < tip + LOOKAHEAD and peer in self._roster.partners() and (heard is None or revision > heard[0]):
            self._heard = (revision, peer)
            self.spread()

    def forget(self) -> None:
        """What was heard may be about another branch."""
        self._heard = None

    def spread(self) -> None:
        """Something is new."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self) -> None:
        """Returns when something is new."""
        await self._changed.wait()
