"""When to exchange."""

from __future__ import annotations

import math

import attrs
from attrs.validators import ge, gt

from optim.slots import Moment
from protocol.errors import SettingsError


@attrs.frozen
class FixedSteps:
    """Exchange after every H inner steps: of the whole model, or of each of n fragments, which take turns.

    With n fragments there is an exchange every H/n steps, the first one after H. The result is applied `delay` (τ)
    steps later: 0 waits for it, H/n applies it when the next exchange begins (Streaming DiLoCo, arXiv 2501.18512).
    """

    H: int = attrs.field(validator=ge(1))
    fragments: int = attrs.field(default=1, validator=ge(1))
    delay: int = attrs.field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        if self.H % self.fragments:
            raise SettingsError(
                f"{self.fragments} fragments cannot take turns evenly in {self.H} steps",
                hint=f"use a multiple of {self.fragments} inner steps, or fewer fragments",
            )
        if self.delay > self.every:
            turns = f" ({self.fragments} fragments take turns in {self.H})" if self.fragments > 1 else ""
            raise SettingsError(
                f"a delay of {self.delay} steps is longer than the {self.every} from one exchange to the next{turns}",
                hint="a result is applied so long after its exchange began, before the next one begins: use a delay "
                f"from 0 (wait for it) to {self.every}, more inner steps, or fewer fragments",
            )

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return self.H // self.fragments

    def steps(self, moment: Moment) -> int:
        return self.H if moment.round == 1 else self.every


@attrs.frozen
class QuadraticSteps:
    """The quadratic synchronisation rule: H = max(H₀, ⌊(α/η)²⌋), so that exchanges get rarer as η decays.

    η is the learning rate of the whole run's schedule, the same at all peers. While it warms up it is that after the
    warm-up: from a rate next to zero, no exchange would ever follow. (Gu et al., arXiv 2310.14423.)
    """

    base: int = attrs.field(validator=ge(1))
    alpha: float = attrs.field(validator=gt(0))
    delay: int = attrs.field(default=0, init=False)

    def steps(self, moment: Moment) -> int:
        steps = max(self.base, math.floor((self.alpha / moment.lr) ** 2)) if moment.lr > 0 else self.base
        return steps if moment.total is None else max(1, min(steps, moment.total))


@attrs.frozen
class HiddenSteps:
    """H steps at first, and fewer as less is sent: as many as hide an exchange that goes on meanwhile.

    Hₜ = ⌊H₁ · load⌋; the result is applied when the next exchange begins. (DiLoCoX, arXiv 2506.21263.)
    """

    H: int = attrs.field(validator=ge(1))

    @property
    def delay(self) -> int:
        """Until the next exchange, however soon that is."""
        return self.H

    def steps(self, moment: Moment) -> int:
        return max(1, math.floor(self.H * moment.load))


@attrs.frozen
class PacedSteps:
    """Dynamic local steps: H in proportion to a peer's speed, so that all are ready at the same time.

    (DyLU of "Asynchronous Local-SGD", arXiv 2401.09135.)
    """

    H: int = attrs.field(validator=ge(1))
    delay: int = attrs.field(default=0, init=False)

    def steps(self, moment: Moment) -> int:
        return max(1, math.floor(self.H * moment.pace))
