"""Who can take part in the rounds of a run, as far as this peer knows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from protocol.identity import PeerId


class Roster(Protocol):
    """What rounds ask about the members of their run. All answers hold for the moment only."""

    def partners(self) -> Collection[PeerId]:
        """The live, synchronised members, maybe with ourselves: the candidates for coordinating."""

    def expected(self) -> Collection[PeerId]:
        """The connected members that can take part in the next round, also those that have to catch up before."""

    def arriving(self) -> Collection[PeerId]:
        """Peers that may be among those in a moment: each is being greeted, or its connection is being made anew."""

    def woken(self) -> bool:
        """Whether this process was stopped, and went on a moment ago: whom it has lost may be there all the same."""

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer is a connected member at all; nobody else is let into rounds."""

    def doubt(self, peer: PeerId, seconds: float) -> None:
        """This peer has coordinated for so many seconds, and was silent or without a result."""
