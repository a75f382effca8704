"""Fetching what a newcomer, or a peer that fell behind, lacks: the manifest and the committed state.

A donor serves its latest committed states, which are immutable, and its training never waits for that. The fetching
peer asks several donors at once for 1 MiB ranges and checks each against the Merkle leaves, the leaves against the
header, and the header against the digest it was after, so that a torn or forged state is never taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import torch
import trio

from optim import OuterState
from peer.state import CommittedState, Header, Tip, byte_length, read_range
from protocol import merkle
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.wire import message

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]

KEPT_STATES = 2
"""Committed states that a donor keeps, so that a fetch survives the donor's next commit."""

RANGE_TIMEOUT = 60.0
"""Seconds for one range of 1 MiB: 140 kbit/s is the slowest donor that is of use."""


class SyncFailed(ShoalError):
    """No donor could provide the state. Asking again, for a newer one, may succeed."""


@message("run.manifest")
class ManifestRequest:
    """Asks for the manifest of a run."""

    run: Bytes32


@message("run.manifest.reply")
class ManifestReply:
    """The manifest's TOML text."""

    text: Annotated[str, msgspec.Meta(max_length=65536)]


@message("state.describe")
class DescribeRequest:
    """Asks for the header and the leaves of the state with this digest."""

    run: Bytes32
    digest: Bytes32


@message("state.header")
class Description:
    """A state's header and sizes; its Merkle leaves follow as raw bytes."""

    revision: Count
    previous: Bytes32
    plan: Bytes32
    weight: Annotated[float, msgspec.Meta(ge=0)]
    root: Bytes32
    buffers: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=16)]
    elements: Count


@message("state.range")
class RangeRequest:
    """Asks for one range of the state with this digest; its bytes follow the reply."""

    run: Bytes32
    digest: Bytes32
    leaf: Count


@message("state.bytes")
class RangeReply:
    """So many raw bytes follow."""

    length: Count


class Donor:
    """Answers other peers' requests for this run's manifest and states.

    Args:
        endpoint: Where requests arrive.
        run: The run's id.
        manifest: The manifest's text.
    """

    def __init__(self, endpoint: Endpoint, run: bytes, manifest: str) -> None:
        self._run = run
        self._manifest = manifest
        self._states: deque[CommittedState] = deque(maxlen=KEPT_STATES)
        endpoint.handle(ManifestRequest, self._on_manifest)
        endpoint.handle(DescribeRequest, self._on_describe)
        endpoint.handle(RangeRequest, self._on_range)

    def offer(self, state: CommittedState) -> None:
        """Makes a committed state available to others."""
        self._states.append(state)

    def _find(self, run: bytes, digest: bytes) -> CommittedState:
        _check_run(run, self._run)
        for state in self._states:
            if state.header.digest == digest:
                return state
        raise RequestRefused("this state is not kept here", code="gone")

    async def _on_manifest(self, request: ManifestRequest, stream: Stream) -> ManifestReply:
        _check_run(request.run, self._run)
        return ManifestReply(self._manifest)

    async def _on_describe(self, request: DescribeRequest, stream: Stream) -> None:
        state = self._find(request.run, request.digest)
        header = state.header
        await stream.send(
            Description(
                header.revision,
                header.previous,
                header.plan,
                header.weight,
                header.root,
                tuple(sorted(state.outer.buffers)),
                state.outer.parameters.numel(),
            )
        )
        await stream.send_bytes(b"".join(state.leaves))
        await stream.finish()

    async def _on_range(self, request: RangeRequest, stream: Stream) -> None:
        state = self._find(request.run, request.digest)
        start = request.leaf * merkle.LEAF
        views = list(read_range(state.outer, start, merkle.LEAF))
        await stream.send(RangeReply(sum(len(view) for view in views)))
        for view in views:
            await stream.send_bytes(view)
        await stream.finish()


def _check_run(asked: bytes, ours: bytes) -> None:
    if asked != ours:
        raise RequestRefused("this peer takes part in another run", code="unknown_run")


async def fetch_manifest(endpoint: Endpoint, peer: PeerId, run: bytes) -> str:
    """The manifest's text as `peer` has it. Whether it is the run's is for the caller to check.

    Raises:
        ShoalError: The peer cannot be reached, or refuses.
    """
    return (await endpoint.request(peer, ManifestRequest(run), ManifestReply)).text


async def fetch_state(
    endpoint: Endpoint,
    run: bytes,
    tip: Tip,
    donors: Sequence[PeerId],
    *,
    elements: int,
    progress: Callable[[int], None] = lambda received: None,
) -> CommittedState:
    """Fetches the state with the tip's digest from several donors at once.

    Args:
        endpoint: Our endpoint.
        run: The run's id.
        tip: The state to fetch; what it says must be what the digest covers.
        donors: Peers that are said to have it. Those that fail are left out, their ranges go to the others.
        elements: The number of parameters that our model has.
        progress: Called with the number of bytes of each range that was received.

    Raises:
        SyncFailed: No donor has it, or all of them failed.
    """
    problems: list[str] = []
    for donor in donors:
        try:
            header, buffers, leaves = await _describe(endpoint, run, tip, donor, elements)
            break
        except (ShoalError, trio.TooSlowError) as error:
            problems.append(f"{donor.short}: {str(error) or 'too slow'}")
    else:
        raise SyncFailed(f"no peer could describe revision {tip.revision}: {'; '.join(problems) or 'none was known'}")

    outer = OuterState(torch.empty(elements), {name: torch.empty(elements) for name in buffers})
    unfinished = set(range(len(leaves)))
    give_back, waiting = trio.open_memory_channel[int](len(leaves))
    for leaf in unfinished:
        give_back.send_nowait(leaf)

    async def fetch_from(donor: PeerId) -> None:
        async for leaf in waiting:
            try:
                with trio.fail_after(RANGE_TIMEOUT):
                    await _fetch_range(endpoint, run, tip, donor, leaf, leaves[leaf], outer)
            except (ShoalError, trio.TooSlowError) as error:
                problems.append(f"{donor.short}: {str(error) or 'too slow'}")
                give_back.send_nowait(leaf)  # for the other donors
                return
            unfinished.discard(leaf)
            progress(min(merkle.LEAF, byte_length(outer) - leaf * merkle.LEAF))
            if not unfinished:
                give_back.close()

    async with trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(fetch_from, donor)
    if unfinished:
        raise SyncFailed(f"revision {tip.revision} could not be fetched: {'; '.join(problems)}")
    return CommittedState(header, outer, leaves)


async def _describe(
    endpoint: Endpoint, run: bytes, tip: Tip, donor: PeerId, elements: int
) -> tuple[Header, tuple[str, ...], tuple[bytes, ...]]:
    async with endpoint.open(donor, DescribeRequest(run, tip.digest)) as stream:
        said = await stream.receive(Description, timeout=10.0)
        header = Header(
            run=run, revision=said.revision, previous=said.previous, plan=said.plan, weight=said.weight, root=said.root
        )
        if header.digest != tip.digest:
            raise ProtocolError(f"peer {donor} described another state than the one with the digest asked for")
        if said.elements != elements:
            raise ProtocolError(f"peer {donor} has {said.elements} parameters, our model has {elements}")
        length = elements * 4 * (1 + len(said.buffers))
        raw = bytearray(32 * max(1, -(-length // merkle.LEAF)))
        with trio.fail_after(RANGE_TIMEOUT):
            await stream.receive_into(memoryview(raw))
    leaves = tuple(bytes(raw[start : start + 32]) for start in range(0, len(raw), 32))
    if merkle.root(leaves) != header.root:
        raise ProtocolError(f"peer {donor} sent Merkle leaves that do not have the state's root")
    return header, said.buffers, leaves


async def _fetch_range(
    endpoint: Endpoint, run: bytes, tip: Tip, donor: PeerId, leaf: int, expected: bytes, outer: OuterState
) -> None:
    views = list(read_range(outer, leaf * merkle.LEAF, merkle.LEAF))
    length = sum(len(view) for view in views)
    buffer = bytearray(length)
    async with endpoint.open(donor, RangeRequest(run, tip.digest, leaf)) as stream:
        reply = await stream.receive(RangeReply, timeout=10.0)
        if reply.length != length:
            raise ProtocolError(f"peer {donor} offered {reply.length} bytes for range {leaf}, which has {length}")
        await stream.receive_into(memoryview(buffer))
    if merkle.leaf(buffer) != expected:
        raise ProtocolError(f"peer {donor} sent bytes for range {leaf} that do not have its hash")
    offset = 0
    for view in views:
        view[:] = memoryview(buffer)[offset : offset + len(view)]
        offset += len(view)
