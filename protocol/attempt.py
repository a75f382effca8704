"""What a member needs to know of carrying out a plan, whatever the operation is."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
import trio

from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.salvage import Holding


@attrs.frozen
class Failure:
    """Why an attempt cannot go on."""

    suspect: PeerId | None
    """Who is at fault; None if that is not clear."""
    reason: str


class Attempt(Protocol):
    """This peer's part in carrying out one plan. It runs in a task of its own and ends by itself, or by `abort`."""

    plan: Plan
    settled: trio.Event
    """Set when the result is complete, or the attempt has failed or was aborted."""
    failure: Failure | None
    bytes_received: int

    @property
    def bytes_sent(self) -> int:
        """Bytes of data that have left."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the result is here."""
        ...

    @property
    def segments(self) -> int:
        """How far we have got, to be compared with others: whoever starved first has the least."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """What has come in, and all that comes in, in pieces of about one size. (0, 0) while that is not known."""
        ...

    @property
    def mean(self) -> torch.Tensor:
        """The result, once `complete`."""
        ...

    def waiting(self, peer: PeerId) -> float | None:
        """For how many seconds nothing has come in, and it was not clear why, if there is nothing to send to a member.

        None if there is, or all has been sent: then what it lacks is on its way.
        """
        ...

    def abort(self) -> None:
        """Ends the attempt; its streams are reset."""

    def holdings(self) -> tuple[Holding, ...]:
        """What is reduced here by now, by this attempt or those before."""
        ...

    async def run(self) -> None:
        """Carries the plan out. Never raises but when cancelled."""
