"""What the peers of a pipeline say to each other. Tensors follow messages as raw bytes.

`run` is the run's id in `stage.hello`, and that of a stage (`stage_run`) in all other requests.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Literal

import attrs
import msgspec

from optim.swarm.messages import Answer, Request, Withdrawn
from optim.swarm.payloads import MOST_DIMENSIONS, Encoding, Payload
from optim.swarm.server import MOST_SQUARES
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.wire import message

MOST_STAGES = 1024
MOST_MICROBATCHES = 4096
"""Of a step."""
LARGEST_PAYLOAD = 1 << 28
"""Bytes of one tensor between stages."""
MOST_DISTRUSTED = 64
"""Peers that one peer says it distrusts."""
MOST_LOSS = 1e6
"""What a validation loss may be; else it counts as not finite."""

BLOCK_SCALE = 64
"""Bytes that a short tensor may take in addition."""

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48 - 1)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=MOST_STAGES - 1)]
Microbatch = Annotated[int, msgspec.Meta(ge=0, le=MOST_MICROBATCHES - 1)]
SumOfSquares = Annotated[float, msgspec.Meta(ge=0, le=MOST_SQUARES)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


@attrs.frozen
class Measured:
    """The loss on held-out text."""

    step: Count
    loss: Annotated[float, msgspec.Meta(ge=0, le=MOST_LOSS)] | None
    """In nats per token; None if it was not finite."""


@attrs.frozen
class Squares:
    """The sum of the squares of the whole model's gradient, in a step that was made."""

    step: Count
    sum: SumOfSquares


@attrs.frozen
class Standing:
    """What a peer says about itself."""

    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Grows with every change: claims travel on streams of their own, and may overtake each other."""
    trains_from: Count | None = None
    """From which step on it leads microbatches through the pipeline; None if it does not."""
    stage: StageNumber | None = None
    """Which stage it serves, or is about to."""
    ready: bool = False
    """Whether it has that stage's state."""
    step: Count = 0
    attempt: Count = 0
    """How many settlements of this step have failed in its stage."""
    counted: Annotated[int, msgspec.Meta(ge=0, le=MOST_MICROBATCHES)] = 0
    """Microbatches of this step in its ledger."""
    settled: bool = False
    """Whether its stage has settled this step."""
    missing: Annotated[tuple[Microbatch, ...], msgspec.Meta(max_length=MOST_MICROBATCHES)] = ()
    """Which microbatches the last settlement of this step lacked."""
    rate: Rate = 0.0
    """Samples per second that it leads through its stage, forwards and backwards."""
    rested: Count = 0
    """Steps that it has made since it came to this stage."""
    life: Count = 0
    """How often it has taken in a state, and with that dropped what it had counted."""
    leaving: bool = False
    moving: StageNumber | None = None
    """For which stage it is about to leave its own: others do not leave at the same time."""
    copies: Annotated[tuple[StageNumber, ...], msgspec.Meta(max_length=MOST_STAGES)] = ()
    """Stages of which it keeps a copy of the state, for when all their servers are lost."""
    measured: Measured | None = None
    """What it has measured last, if it was for it to do that."""
    squares: SumOfSquares | None = None
    """The sum of the squares of its stage's mean gradient, once it has settled this step."""
    last_squares: Squares | None = None
    """The same of the model, in the last step that it has made: for those who have not yet made that."""
    distrusts: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=MOST_DISTRUSTED)] = ()
    """Whom it asks for nothing any more, as what they sent made no sense."""


@message("stage.hello")
class Hello:
    """A peer's first word to another one of the run, and again whenever its standing changes."""

    run: Bytes32
    standing: Standing


@message("stage.welcome")
class Welcome:
    """The answer: the same about us."""

    standing: Standing


@attrs.frozen
class Shape:
    """A tensor that follows as raw bytes."""

    encoding: Encoding
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)], ...],
        msgspec.Meta(min_length=1, max_length=MOST_DIMENSIONS),
    ]
    size: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_PAYLOAD)]


@attrs.frozen(kw_only=True)
class Sizes:
    """What a microbatch has at most."""

    samples: int
    tokens: int
    """Of a sample."""
    width: int
    """Values of a token, between stages."""
    exact: bool = True
    """Whether activations have just that shape; else they have no more values for each sample."""

    def check(self, *shapes: Shape | None) -> None:
        """Refuses tensors that are announced, before memory is taken for them.

        Raises:
            ProtocolError: One is larger than it can be, or has more bytes than values of its shape take.
        """
        for shape in filter(None, shapes):
            length, is_tokens = math.prod(shape.shape), shape.encoding == "tokens"
            values = self.tokens if is_tokens else self.tokens * self.width
            if shape.shape[0] > self.samples or length > shape.shape[0] * values:
                raise ProtocolError(f"a tensor of shape {list(shape.shape)} where microbatches are smaller")
            if is_tokens and shape.shape[1:] != (self.tokens,):
                raise ProtocolError(f"samples of other lengths: tokens of shape {list(shape.shape)}")
            if shape.size > 4 * length + BLOCK_SCALE:  # whether they fit is found out when they are unpacked
                raise ProtocolError(f"{shape.size} bytes for {length} values")


@message("stage.ask")
class Ask:
    """Something to be done for a microbatch, see `optim.swarm.messages.Request`. The tensors follow, in this order."""

    run: Bytes32
    kind: Literal["forward", "backward", "void"]
    step: Count
    number: Microbatch
    count: bool
    patience: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    inputs: Shape | None
    targets: Shape | None
    gradient: Shape | None


@message("stage.answer")
class Reply:
    """What has become of it, see `optim.swarm.messages.Answer`. The tensors follow."""

    step: Count
    number: Microbatch
    counted: bool
    attempt: Count
    finite: bool
    values: Shape | None
    losses: Shape | None


@message("stage.withdraw")
class WithdrawRequest:
    """Asks not to count a microbatch, see `optim.swarm.messages.Withdraw`."""

    run: Bytes32
    step: Count
    number: Microbatch


@message("stage.withdrawn")
class WithdrawReply:
    """See `optim.swarm.messages.Withdrawn`."""

    step: Count
    number: Microbatch
    counted: bool
    attempt: Count


@message("stage.fetch")
class FetchState:
    """Asks for the state of a stage: the server's own, or a copy that the peer keeps."""

    run: Bytes32


@message("stage.tied")
class FetchTied:
    """Asks a server for its stage's part of the gradients of what several stages use, at a step that it has settled."""

    run: Bytes32
    step: Count


@message("stage.tensors")
class TensorsReply:
    """So many bytes follow: tensors in the format of safetensors."""

    step: Count
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


def shape_of(payload: Payload | None) -> Shape | None:
    """How a tensor is announced."""
    return None if payload is None else Shape(payload.encoding, payload.shape, len(payload.data))


async def send_payloads(stream: Stream, *payloads: Payload | None) -> None:
    """Sends the tensors that a message has announced."""
    for payload in payloads:
        if payload is not None:
            await stream.send_bytes(payload.data)


async def receive_payloads(stream: Stream, *shapes: Shape | None) -> list[Payload | None]:
    """Receives the tensors that a message has announced.

    Raises:
        ShoalError: They do not come.
    """
    payloads: list[Payload | None] = []
    for shape in shapes:
        if shape is None:
            payloads.append(None)
            continue
        data = bytearray(shape.size)
        await stream.receive_into(data)
        payloads.append(Payload(shape.encoding, shape.shape, bytes(data)))
    return payloads


def stage_run(run: bytes, stage: int) -> bytes:
    """Under which id a stage's servers are asked, and make their operations."""
    return hashlib.sha256(b"shoal-stage-v1" + run + stage.to_bytes(4, "big")).digest()


def ask_of(run: bytes, request: Request) -> Ask:
    """A request as it is sent."""
    return Ask(
        run=run,
        kind=request.kind,
        step=request.step,
        number=request.number,
        count=request.count,
        patience=request.patience,
        inputs=shape_of(request.inputs),
        targets=shape_of(request.targets),
        gradient=shape_of(request.gradient),
    )


async def receive_request(stream: Stream, ask: Ask, sizes: Sizes) -> Request:
    """A request with its tensors.

    Raises:
        ProtocolError: The tensors are not of such sizes.
        ShoalError: They do not come.
    """
    shapes = (ask.inputs, ask.targets, ask.gradient)
    sizes.check(*shapes)
    inputs, targets, gradient = await receive_payloads(stream, *shapes)
    return Request(
        kind=ask.kind,
        step=ask.step,
        number=ask.number,
        inputs=inputs,
        targets=targets,
        gradient=gradient,
        count=ask.count,
        patience=ask.patience,
    )


async def send_answer(stream: Stream, answer: Answer) -> None:
    """Sends an answer with its tensors."""
    reply = Reply(
        step=answer.step,
        number=answer.number,
        counted=answer.counted,
        attempt=answer.attempt,
        finite=answer.finite,
        values=shape_of(answer.values),
        losses=shape_of(answer.losses),
    )
    await stream.send(reply)
    await send_payloads(stream, answer.values, answer.losses)


async def receive_answer(stream: Stream, sizes: Sizes) -> Answer:
    """The answer to a request, with its tensors.

    Raises:
        ProtocolError: The tensors are not of such sizes.
        ShoalError: It does not come.
    """
    reply = await stream.receive(Reply)
    sizes.check(reply.values, reply.losses)
    values, losses = await receive_payloads(stream, reply.values, reply.losses)
    return Answer(
        step=reply.step,
        number=reply.number,
        values=values,
        losses=losses,
        counted=reply.counted,
        attempt=reply.attempt,
        finite=reply.finite,
    )


def withdrawn_of(reply: WithdrawReply) -> Withdrawn:
    """What `WithdrawReply` says."""
    return Withdrawn(step=reply.step, number=reply.number, counted=reply.counted, attempt=reply.attempt)
