"""What trainers ask of the servers of a stage, and what these answer.

A microbatch is known by its step and its number in the step; its contents follow from these, so it does not matter who
asks. Every request can be repeated.
"""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import ge, gt, in_

from optim.swarm.payloads import Payload

Kind = Literal["forward", "backward", "void"]


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """Something to be done for one microbatch.

    - `forward` asks for the stage's outputs; of the last stage, with targets, for the losses.
    - `backward` asks for the gradient of the stage's inputs, and with `count` for adding that of its parameters.
    - `void` says that the microbatch has come to nothing: it is counted with no samples.
    """

    kind: Kind = attrs.field(validator=in_(("forward", "backward", "void")))
    step: int = attrs.field(validator=ge(0))
    number: int = attrs.field(validator=ge(0))
    inputs: Payload | None = None
    """What the stage before has made; tokens for the first. None for `void`."""
    targets: Payload | None = None
    """For the last stage."""
    gradient: Payload | None = None
    """Of the loss by the stage's outputs; None at the last stage, and in `forward`."""
    count: bool = False
    """Whether this stage is to count the microbatch."""
    patience: float = attrs.field(default=30.0, validator=gt(0))
    """Seconds after which the server need not begin with it any more."""

    @property
    def samples(self) -> int:
        """How many samples the microbatch has; 0 for `void`."""
        return 0 if self.inputs is None else self.inputs.samples

    @property
    def size(self) -> int:
        """Bytes of its payloads."""
        return sum(len(each.data) for each in (self.inputs, self.targets, self.gradient) if each is not None)


@attrs.frozen(eq=False, kw_only=True)
class Answer:
    """What has become of a request."""

    step: int
    number: int
    values: Payload | None = None
    """Outputs, losses, or the gradient of the inputs. None if there is none (of tokens), or it is not finite."""
    losses: Payload | None = None
    """Of each sample: of `backward` at the last stage."""
    counted: bool = False
    """Whether the stage has counted the microbatch, now or earlier."""
    attempt: int = 0
    """How many settlements of the step had failed by then, as the server knows."""
    finite: bool = True
    """False if losses, outputs or gradients are not finite. It is counted then as `void` if it was to be counted."""


@attrs.frozen(kw_only=True)
class Withdraw:
    """Asks not to count a microbatch that the trainer takes elsewhere. The answer is `Withdrawn`."""

    step: int
    number: int


@attrs.frozen(kw_only=True)
class Withdrawn:
    """What was asked before is not done any more, unless it is `counted`."""

    step: int
    number: int
    counted: bool
    """Whether the server has counted the microbatch, or is just doing so."""
    attempt: int = 0
