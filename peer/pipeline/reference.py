"""A pipeline in one process, one microbatch after the other: what a run without any fault comes to."""

from __future__ import annotations

from optim.swarm.messages import Answer, Request
from optim.swarm.payloads import Packer, Payload
from optim.swarm.server import StageServer, clipping
from optim.swarm.stages import cut
from peer.data import Corpus
from peer.pipeline.run import make_pipeline
from peer.pipeline.settings import Pipeline
from peer.settings import Settings


def undisturbed(settings: Settings, corpus: Corpus) -> list[float]:
    """The mean loss of each step of a run of known length."""
    pipeline = make_pipeline(settings, bytes(32), corpus)
    servers = make_servers(pipeline)
    return [make_step(pipeline, servers) for _ in range(pipeline.steps)]


def make_servers(pipeline: Pipeline) -> list[StageServer]:
    """One server for each stage, with the first values."""
    assert pipeline.initial is not None
    values, servers = dict(pipeline.initial()), []
    for stage in cut(pipeline.chain(), pipeline.stages):
        stage.load(values)
        optimizer = pipeline.optimizer(stage)
        servers.append(
            StageServer(
                stage,
                optimizer,
                microbatches=pipeline.total,
                encoding=pipeline.encoding,
                local_steps=pipeline.local_steps,
            )
        )
    return servers


def make_step(pipeline: Pipeline, servers: list[StageServer]) -> float:
    """Makes one step, and returns its mean loss."""
    step, losses = servers[0].step, list[float]()
    for number in range(pipeline.total):
        sample = pipeline.contents(step, number)
        inputs: list[Payload | None] = [sample.tokens]
        for server in servers[:-1]:
            request = Request(kind="forward", step=step, number=number, inputs=inputs[-1])
            inputs.append(_ask(server, request).values)
        gradient = None
        for stage, server in reversed(list(enumerate(servers))):
            answer = _ask(
                server,
                Request(
                    kind="backward",
                    step=step,
                    number=number,
                    inputs=inputs[stage],
                    targets=sample.targets if server.stage.is_last else None,
                    gradient=gradient,
                    count=True,
                ),
            )
            gradient = answer.values
            if answer.losses is not None:
                losses += Packer().unpack(answer.losses).tolist()
    for server in servers:
        server.freeze()
        server.settled(server.contribution().values)
    tied = {stage: server.tied_gradients() for stage, server in enumerate(servers) if server.stage.tied}
    scale = 1.0
    if pipeline.clip is not None:
        squares = [server.squares({} if stage else tied) for stage, server in enumerate(servers)]
        scale = clipping(squares, pipeline.clip)
    for server in servers:
        for group in server.optimizer.param_groups:
            group["lr"] = pipeline.rate(step)
        server.advance(tied, scale)
    return sum(losses) / len(losses)


def _ask(server: StageServer, request: Request) -> Answer:
    server.submit(request.number, request, 0.0)
    batch = server.take(0.0)
    assert batch is not None
    ((_, answer),) = server.finish(batch, server.compute(batch))
    assert isinstance(answer, Answer)
    return answer
