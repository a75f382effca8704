"""A pipeline as a run's settings say, for the daemon."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import cast

import torch
import trio

from optim.exact import tree_sum
from optim.outers import Nesterov
from optim.swarm.local import LocalSteps
from optim.swarm.payloads import Encoding, Packer
from optim.swarm.stages import Stage, bounds
from optim.swarm.trainer import Sample
from peer.data import Corpus, Dataset
from peer.events import EventLog
from peer.membership import Membership
from peer.model import Transformer
from peer.node import Compute
from peer.pipeline.files import StageFiles
from peer.pipeline.messages import Sizes
from peer.pipeline.node import PipelineNode
from peer.pipeline.settings import Pipeline
from peer.schedule import Schedule
from peer.settings import InnerSettings, Settings
from peer.trainer import VALIDATION_WINDOWS, adamw
from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint
from protocol.identity import PeerId

SAVE_EVERY = 10
"""Steps between two copies of a stage's state, local ones included."""

VALIDATE_EVERY = 10
"""Steps between two measurements of the validation loss, local ones included."""

MEMORY_PER_PARAMETER = 44
"""Bytes, of a stage: parameters, two moments, the sum of the gradients, their mean, what is sent of it and received,
and a state that is fetched or written down."""

MEMORY_OF_ROUNDS = 24
"""What local steps add to it: the parameters at the beginning of the round and the momentum, both three times."""


def make_pipeline(settings: Settings, run_id: bytes, corpus: Corpus) -> Pipeline:
    """What a run trains.

    Raises:
        DataError: The text is too small.
    """
    dataset = Dataset(corpus, settings.data, seed=settings.run.seed, context=settings.model.context)
    packer, model, recipe = Packer(), settings.model, settings.algorithm.recipe()
    schedule, count = Schedule(settings, recipe), cast("int", settings.algorithm["local_steps"])
    assert isinstance(recipe.outer, Nesterov)

    def sample_of(windows: torch.Tensor) -> Sample:
        return Sample(packer.pack(windows[:, :-1], "tokens"), packer.pack(windows[:, 1:], "tokens"))

    def sample(step: int, number: int) -> Sample:
        return sample_of(dataset.microbatch(step, number, settings.inner.batch))

    def held_out() -> list[Sample]:
        batches = torch.split(dataset.validation_windows(VALIDATION_WINDOWS), settings.inner.batch)
        return [sample_of(windows) for windows in batches]

    return Pipeline(
        run_id=run_id,
        chain=lambda: Transformer(model, seed=None).chain(),
        initial=lambda: Transformer(model, seed=None).initial_values(settings.run.seed),
        stages=cast("int", settings.algorithm["stages"]),
        microbatches=cast("int", settings.algorithm["microbatches"]),
        sample=sample,
        optimizer=partial(clipping_optimizer if count > 1 else stage_optimizer, settings.inner),
        clip=settings.inner.clip if count == 1 else None,
        rate=schedule.rate,
        local_steps=LocalSteps(count=count, outer=recipe.outer, rate=schedule.rate) if count > 1 else None,
        sizes=Sizes(samples=settings.inner.batch, tokens=model.context, width=model.width),
        steps=settings.run.rounds,
        encoding=cast("Encoding", settings.algorithm["activations"]),
        held_out=held_out,
        validate_every=max(1, VALIDATE_EVERY // count),
        save_every=max(1, SAVE_EVERY // count),
        times=RoundTimes(grace=settings.round.grace),
    )


def clipping_optimizer(settings: InnerSettings, stage: Stage) -> torch.optim.Optimizer:
    """A stage's AdamW for local steps, which clips gradients by their norm over the stage.

    What other stages use as well is clipped by a norm of its own, so that all of them do the same.
    """
    optimizer = adamw(stage.model, settings)
    named = dict(stage.model.named_parameters())
    own = [parameter for name, parameter in named.items() if name not in stage.tied]
    groups = [own, *([parameter] for name, parameter in named.items() if name in stage.tied)]

    def clip(*_: object) -> None:
        for group in groups:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            if gradients:
                squares = torch.stack([tree_sum(each.flatten().double().square()) for each in gradients])
                norm = float(tree_sum(squares)) ** 0.5
                for each in gradients if norm > settings.clip else ():
                    each.mul_(settings.clip / norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def stage_optimizer(settings: InnerSettings, stage: Stage) -> torch.optim.Optimizer:
    """A stage's AdamW."""
    return adamw(stage.model, settings)


def parameters_of(pipeline: Pipeline) -> int:
    """How many the whole model has."""
    return sum(each.numel() for each in pipeline.chain().model.parameters())


def memory_of(pipeline: Pipeline) -> int:
    """Bytes that the largest stage takes, about."""
    chain = pipeline.chain()
    weights = [chain.weight(link) for link in chain.links]
    each = MEMORY_PER_PARAMETER + (0 if pipeline.local_steps is None else MEMORY_OF_ROUNDS)
    return max(sum(weights[run.start : run.stop]) for run in bounds(weights, pipeline.stages)) * each


def make_node(
    pipeline: Pipeline,
    *,
    endpoint: Endpoint,
    membership: Membership,
    events: EventLog,
    compute: Compute,
    rng: random.Random,
    directory: Path,
    device: str,
    serves: bool,
    founds: bool,
    asked: trio.Event,
) -> PipelineNode:
    """A peer of a run, which goes on with what it has saved."""
    files = StageFiles(directory)
    step, stages = files.newest()
    return PipelineNode(
        pipeline=pipeline,
        endpoint=endpoint,
        mesh=Present(endpoint, membership),
        events=events,
        compute=compute,
        rng=rng,
        stage=min(stages, default=None),
        saved=files.load,
        begun=step,
        offered=stages,
        save=files.save,
        device=device,
        serves=serves,
        founds=founds,
        asked=asked,
        refusal=lambda: membership.refusal,
    )


class Present:
    """The members of a run, all of which can take part in operations. Implements `peer.pipeline.crew.Members`."""

    def __init__(self, endpoint: Endpoint, membership: Membership) -> None:
        self._endpoint, self._membership = endpoint, membership
        self._doubted: dict[PeerId, float] = {}  # until when

    @property
    def members(self) -> tuple[PeerId, ...]:
        return (self._endpoint.peer_id, *(member.peer for member in self._membership.others))

    async def changes(self) -> None:
        await self._membership.changes()

    def partners(self) -> Collection[PeerId]:
        now = trio.current_time()
        return [peer for peer in self.members if self._doubted.get(peer, now) <= now]

    def expected(self) -> Collection[PeerId]:
        return self.members

    def arriving(self) -> Collection[PeerId]:
        return self._membership.arriving()

    def woken(self) -> bool:
        return self._membership.woken()

    def knows(self, peer: PeerId) -> bool:
        return self._membership.knows(peer)

    def doubt(self, peer: PeerId, seconds: float) -> None:
        self._doubted[peer] = trio.current_time() + seconds
