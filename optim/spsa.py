"""Training by a few bytes per step: everybody measures along one random direction, and tells how steep it is."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import nn

from optim.buffers import Buffers
from optim.machine import Direct
from optim.sender import carry_out
from optim.slots import Gather, Mixing
from optim.wrapper import Wrapper
from protocol.collective import Collective, Gathered
from protocol.errors import SettingsError

_MESSAGE = struct.Struct("<QB")
_STEPS_PER_OCTAVE = 4
_LARGEST = 127


class SpsaOptimizer(Wrapper):
    """Seeded simultaneous perturbation, for fine-tuning over any line (Spall 1992; Zelikman et al., arXiv 2306.10015).

    Each peer draws a direction z of ±1 from a seed and measures ρ = (L(θ + ε·z) − L(θ − ε·z)) / 2ε. It tells the seed
    and ρ, nine bytes; everybody makes all directions again and gives the inner optimizer (plain SGD) the mean of ρ·z
    for a gradient. There is no backward pass, and memory for none. All peers must start from the same values, and have
    the same inner optimizer. Buffers that the model changes by itself stay each peer's own until `finish`.

    Args:
        model: The model that the inner optimizer trains.
        inner: Any optimizer over parameters of that model.
        swarm: Carries the exchanges.
        epsilon: How far to go to measure.
        seed: Of our own directions; peers need different ones.

    Raises:
        SettingsError: ε is not positive, processes share the model, or the inner optimizer trains something that is not
            a parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        swarm: Collective,
        *,
        epsilon: float = 1e-3,
        seed: int,
    ) -> None:
        super().__init__(model, inner, tokens_per_step=1)
        if self._flat.slices != self._flat.whole:
            raise SettingsError("each process has a part of the model, and a direction needs all of it")
        if not epsilon > 0:
            raise SettingsError(f"epsilon must be positive, not {epsilon:g}")
        self.rounds = 0
        """Exchanges that succeeded."""
        self._swarm, self._epsilon = swarm, epsilon
        self._link, self._buffers = Direct(swarm, self._flat), Buffers(model)
        self._seeds = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Measures twice, exchanges, and steps. Returns the mean of the two losses.

        Args:
            closure: The loss of one batch, the same both times.

        Raises:
            SettingsError: There is no closure; or a parameter is trained that was frozen when this was made.
            ShoalError: The exchange failed; the parameters are as they were, as after an exception of the closure.
        """
        if closure is None:
            raise SettingsError("step needs a closure that returns the loss")
        self._check_trained()
        seed = int(torch.randint(2**62, (1,), generator=self._seeds))
        start = self._flat.read()
        distance = self._direction(seed).mul_(self._epsilon)
        try:
            self._flat.write(start + distance)
            ahead = float(closure())
            self._flat.write(start - distance)
            behind = float(closure())
        finally:
            self._flat.write(start)
        steepness = (ahead - behind) / (2 * self._epsilon)
        gradient = carry_out(self._swarm, self._mix(seed, steepness), shares=True)
        self._flat.write_gradient(gradient)
        self.rounds += 1
        self.inner.step()
        return (ahead + behind) / 2

    def finish(self) -> None:
        """Ends the run: all peers have the same parameters already, and get the mean of their buffers.

        Raises:
            ShoalError: That failed; it may be called again.
        """
        if (problem := self._buffers.average(self._link.gather, 1.0)) is not None:
            raise problem

    def _mix(self, seed: int, steepness: float) -> Mixing[torch.Tensor]:
        block = _MESSAGE.pack(seed, _code(steepness)) if math.isfinite(steepness) else None
        gathered = yield Gather(block)
        assert isinstance(gathered, Gathered)
        told = [
            _MESSAGE.unpack(gathered.blocks[peer]) for peer in sorted(gathered.blocks) if _fits(gathered.blocks[peer])
        ]
        gradient = torch.zeros(self._flat.length)
        for theirs, code in told:
            gradient.add_(self._direction(theirs).mul_(_steepness(code) / len(told)))
        return gradient

    def _direction(self, seed: int) -> torch.Tensor:
        """Signs, made of random bits: they are the same on every processor."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        return torch.randint(2, (self._flat.length,), generator=generator, dtype=torch.float32).mul_(2).sub_(1)


def _fits(block: memoryview) -> bool:
    return len(block) == _MESSAGE.size


def _code(steepness: float) -> int:
    """A byte: the sign, and the logarithm of the magnitude; 0 and 128 are zero."""
    if steepness == 0:
        return 0
    place = round(math.log2(abs(steepness)) * _STEPS_PER_OCTAVE) + 64
    return min(max(place, 0), _LARGEST) + (128 if steepness < 0 else 0)


def _steepness(code: int) -> float:
    place, sign = code % 128, -1.0 if code >= 128 else 1.0
    return 0.0 if place == 0 else sign * 2.0 ** ((place - 64) / _STEPS_PER_OCTAVE)
