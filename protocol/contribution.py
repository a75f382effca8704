"""What a peer brings to the rounds of a run: checked, and as the run's codec writes it."""

from __future__ import annotations

from collections.abc import Collection

import torch
import trio

from protocol.codecs import CodecName, ErrorFeedback, NotFinite, make_codec
from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.vectors import VectorPool, all_finite, vector_bytes

_AT_ONCE = 1 << 20
"""Elements that are looked at, or encoded, without a break: a few milliseconds at most, less than a thread is worth."""


class Contributor:
    """Encodes one peer's values, round after round, and remembers what was left out, of each part by itself."""

    def __init__(self, codec: CodecName) -> None:
        self._codec = make_codec(codec)
        self._feedbacks: dict[str, tuple[int, ErrorFeedback]] = {}  # by part, with its length
        self._feedback: ErrorFeedback | None = None  # of what was encoded last
        self._open: tuple[int, Collection[bytes] | None] | None = None  # it may still turn out to count, see `left`
        self._memory = VectorPool()

    async def encode(self, values: torch.Tensor, part: str = "") -> memoryview:
        """The bytes of a round's values, for all attempts at it; none for fp32, which is sent as it is.

        Args:
            values: What is brought.
            part: What it is a part of, if not always of the same.

        Raises:
            NotFinite: They are not finite numbers, or not with what was left out so far.
        """
        codec = self._codec
        if codec.name == "fp32":
            if not await is_finite(values):
                raise NotFinite("the values are not finite")
            return memoryview(b"")
        self.finished(counted=False)  # if nothing was heard of that
        length, feedback = self._feedbacks.get(part, (0, None))
        if feedback is None or length != len(values):
            feedback = ErrorFeedback(codec, len(values))
            self._feedbacks[part] = len(values), feedback
        self._feedback = feedback
        size = codec.encoded_size(len(values))
        encoded = vector_bytes(self._memory.take(-(-size // 4)))[:size]
        for start in range(0, len(values), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(values))
            piece = encoded[codec.encoded_size(start) : codec.encoded_size(stop)]
            feedback.encode(start, values[start:stop], piece)
            await trio.lowlevel.checkpoint()
        return encoded

    def finished(self, *, counted: bool) -> None:
        """The round is over. What was left out of it counts from now on, if what we sent is part of its result."""
        self._open = None
        if self._feedback is not None and counted:
            self._feedback.commit()
        elif self._feedback is not None:
            self._feedback.abort()

    def left(self, revision: int, followed: Collection[bytes] | None) -> None:
        """We have left a round before its end: others may have made it with what we sent.

        `followed`: for which plans that was, if not for all.
        """
        self._open = revision, followed

    def heard(self, plan: Plan, peer: PeerId) -> None:
        """This plan has made a round; we are that peer."""
        if self._open is not None and self._open[0] == plan.revision:
            self.finished(counted=plan.includes(peer, self._open[1]))

    def reset(self) -> None:
        """The state was replaced by another one, of which nothing was left out."""
        self._feedback = self._open = None
        self._feedbacks.clear()


async def is_finite(values: torch.Tensor) -> bool:
    """Whether every element is a finite number."""
    for start in range(0, len(values), _AT_ONCE):
        if not all_finite(values[start : start + _AT_ONCE]):
            return False
        await trio.lowlevel.checkpoint()
    return True
