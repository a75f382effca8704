"""The states that a peer has held lately, and holds now: of each revision its digest. Without any input or output."""

from __future__ import annotations

_HISTORY = 64
"""Digests of past revisions by which a peer that is further behind is told from one on another branch."""


class Branch:
    """What one peer holds of a run."""

    def __init__(self) -> None:
        self.tip: int | None = None
        """The revision that it holds; None before the first."""
        self._digests: dict[int, bytes] = {}

    def advance(self, revision: int, digest: bytes) -> None:
        """It holds this revision now."""
        self.tip, self._digests[revision] = revision, digest
        for number in [number for number in self._digests if not revision - _HISTORY <= number <= revision]:
            del self._digests[number]

    def leave(self) -> None:
        """What it has held may be another branch's than what it is about to hold."""
        self._digests.clear()

    def digest(self, revision: int) -> bytes | None:
        """That of a revision; None if it is too old, was never held, or is not there yet."""
        return self._digests.get(revision)
