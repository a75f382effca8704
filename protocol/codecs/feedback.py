"""What lossy messages leave out is not lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from protocol.codecs.base import Bytes, Codec, NotFinite, as_array, pieces
from protocol.vectors import VectorPool


class ErrorFeedback:
    """What a peer's lossy messages left out so far, to be added to the next ones.

    Within a round `encode` may be called again and again, also for the same elements and after a failed attempt: the
    values are always corrected by what was left out in *finished* rounds. What this round leaves out counts from
    `commit` on, and only for the elements that were encoded.

    Args:
        codec: Encodes the messages; not shared with another thread.
        length: Elements of the whole vector.
        decay: What is left out fades by this factor per round (1: sums are conserved). Below 1 bounds old errors.
    """

    def __init__(self, codec: Codec, length: int, *, decay: float = 1.0) -> None:
        self._codec, self._decay = codec, decay
        self._residual = VectorPool().take(length).zero_()
        self._pending = torch.empty(0)  # what this round leaves out, where it was encoded
        self._encoded: set[tuple[int, int]] = set()

    @property
    def residual(self) -> torch.Tensor:
        """What finished rounds left out."""
        return self._residual

    def encode(self, start: int, values: torch.Tensor, out: Bytes) -> None:
        """Encodes corrected values, to nearest.

        Args:
            start: Place of the first value in the vector; a multiple of the codec's block.
            values: As for `Codec.encode`.
            out: As for `Codec.encode`.

        Raises:
            NotFinite: A corrected value is not finite. What else was encoded in this round does not count any more.
        """
        if not len(self._pending):
            self._pending = VectorPool().take(len(self._residual))
        values, target, codec = values.detach(), as_array(out), self._codec
        for first, last in pieces(values.numel()):
            place = slice(start + first, start + last)
            corrected = torch.add(values[first:last], self._residual[place], out=self._pending[place])
            try:
                codec.encode(corrected, target[codec.encoded_size(first) : codec.encoded_size(last)], rest=corrected)
            except NotFinite:
                self.abort()
                raise
            if self._decay != 1:
                corrected.mul_(self._decay)
        self._encoded.add((start, start + values.numel()))

    def commit(self) -> None:
        """The round is finished, and our messages are part of its result."""
        if _covers(self._encoded, len(self._residual)):
            self._residual, self._pending = self._pending, self._residual
        else:
            for start, stop in self._encoded:
                self._residual[start:stop] = self._pending[start:stop]
        self._encoded.clear()

    def abort(self) -> None:
        """The round is given up, or finished without us: our messages have had no effect."""
        self._encoded.clear()

    def reset(self) -> None:
        """A state was downloaded: what was left out belongs to another one."""
        self._encoded.clear()
        self._residual.zero_()


def _covers(bounds: Iterable[tuple[int, int]], length: int) -> bool:
    position = 0
    for start, stop in sorted(bounds):
        if start > position:
            return False
        position = max(position, stop)
    return position == length
