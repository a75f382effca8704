"""Which claims of others can be true: a single peer that says what it likes must not lead all others astray."""

from __future__ import annotations

from collections.abc import Collection

from peer.pipeline.messages import Standing

LEAP = 1000
"""Steps by which a file may be newer than all others when a pipeline begins anew."""


def is_credible(step: int, others: Collection[Standing]) -> bool:
    """Whether a peer may be at a step, by what all others say.

    No stage makes a step before all others have settled it. So whoever is ahead of all that serve by more than a step
    is wrong, if there are two: a single one may have been away. While nobody serves yet, peers say of which step they
    have a file, and these may be further apart.
    """
    serving = [each.step for each in others if each.ready]
    begun = [each.step for each in others if each.step]
    if len(serving) >= 2:
        return step <= max(serving) + 1
    return len(begun) < 2 or step <= max(begun) + LEAP
