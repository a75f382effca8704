"""A round of the run, as the operation that its method asks for."""

from __future__ import annotations

import trio

from optim.slots import AllReduce, Exchange, Gather, Operation
from protocol.collective import Outcome
from protocol.flatten import block_bytes
from protocol.operations import exchanged_of, gathered_of
from protocol.rounds import Rounds


async def perform(rounds: Rounds, operation: Operation, revision: int, *, digest: bytes, part: str) -> Outcome:
    """Takes part in the round that makes `revision`, from the state with this digest.

    Args:
        rounds: The rounds of the run.
        operation: What is asked for.
        revision: What the round makes.
        digest: Of the state before it.
        part: Names what the values are a part of.

    Raises: As `Rounds.all_reduce`.
    """
    match operation:
        case AllReduce(values, weight):  # without a window: manifests refuse methods that have one
            return await rounds.all_reduce(revision, values, weight, digest=digest, part=part)
        case Gather(block):
            return gathered_of(await rounds.gather(revision, block_bytes(block), digest=digest))
        case Exchange(values, weight, pairing):
            started = trio.current_time()
            agreed, swap = await rounds.exchange(revision, values, weight, digest=digest, pairing=pairing)
            return exchanged_of(agreed, swap, trio.current_time() - started)
