"""What the peers of a pipeline agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from optim.swarm.balance import Policy
from optim.swarm.local import LocalSteps
from optim.swarm.payloads import Encoding
from optim.swarm.stages import Chain, Stage
from optim.swarm.trainer import Sample
from peer.pipeline.messages import Sizes
from protocol.coordinator import RoundTimes


@attrs.frozen(kw_only=True)
class Pipeline:
    """What a pipeline trains: the same at all peers.

    Args:
        run_id: 32 bytes.
        chain: Makes the model, always the same.
        initial: Its first values, by name; None: those that `chain` gives it.
        stages: Into how many stages it is cut.
        microbatches: Of a step, or of each local step.
        sample: The contents of microbatch (step, number), or (local step of the run, number in it).
        optimizer: Makes the optimizer of a stage.
        rate: The learning rate of a step; with local steps, they have their own.
        local_steps: If steps are rounds of local steps, how these go.
        clip: The largest norm of the whole model's mean gradient; None: any.
        sizes: Of a microbatch.
        steps: After which it ends; 0: never.
        encoding: How activations and their gradients look on the wire.
        balance: When peers move between stages.
        held_out: What the validation loss is measured with; None: it is not.
        validate_every: Steps between two measurements of that.
        save_every: Steps between two copies of a stage's state, on its servers' disks and at a peer of another stage.
        times: Of the operations among a stage's servers.
    """

    run_id: bytes
    chain: Callable[[], Chain]
    initial: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    stages: int
    microbatches: int
    sample: Callable[[int, int], Sample]
    optimizer: Callable[[Stage], torch.optim.Optimizer]
    rate: Callable[[int], float]
    sizes: Sizes
    local_steps: LocalSteps | None = None
    clip: float | None = None
    steps: int = 0
    encoding: Encoding = "fp32"
    balance: Policy = attrs.field(factory=Policy)
    held_out: Callable[[], Sequence[Sample]] | None = None
    validate_every: int = 10
    save_every: int = 10
    times: RoundTimes = attrs.field(factory=lambda: RoundTimes(grace=2.0))

    @property
    def total(self) -> int:
        """Microbatches of a step, which may be a round of local steps."""
        return self.microbatches * (1 if self.local_steps is None else self.local_steps.count)

    def contents(self, step: int, number: int) -> Sample:
        """Those of a microbatch of a step, which may be a round of local steps."""
        local, place = divmod(step * self.total + number, self.microbatches)
        return self.sample(local, place)
