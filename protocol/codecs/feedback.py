"""What lossy messages leave out is not lost."""

from __future__ import annotations

import torch

from protocol.codecs.base import Bytes, Codec


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
        self._residual = torch.zeros(length)
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
            NotFinite: A corrected value is not finite; nothing else has changed.
        """
        corrected = values.detach() + self._residual[start : start + values.numel()]
        self._codec.encode(corrected, out)
        decoded = torch.empty_like(corrected)
        self._codec.decode(out, decoded)
        if not len(self._pending):
            self._pending = torch.empty_like(self._residual)
        self._encoded.add((start, start + values.numel()))
        self._pending[start : start + values.numel()] = corrected.sub_(decoded).mul_(self._decay)

    def commit(self) -> None:
        """The round is finished, and our messages are part of its result."""
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
