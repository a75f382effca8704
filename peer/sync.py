"""Fetching what a newcomer, or a peer that fell behind, lacks: the manifest, the history, and the committed state.

A donor serves its latest committed states, which are immutable, and its training never waits for that. The fetching
peer asks several donors at once for 1 MiB ranges and checks each against the Merkle leaves, the leaves against the
header, and the header against the digest it was after, so that a torn or forged state is never taken. Before that it
has asked for the history of the state: see `peer.history`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated

import attrs
import msgspec
import trio

from optim import OuterState
from peer.chain import Header, Tip
from peer.finding import ManifestReply, ManifestRequest
from peer.history import KEPT_BYTES, MAX_KNOWN, History, Rules, verified
from peer.partial import Partial
from peer.state import CommittedState, byte_length, read_range, tensors
from protocol import merkle
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, RequestTimeout, ShoalError
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.vectors import all_finite
from protocol.wire import message

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48 - 1)]

KEPT_STATES = 2
"""Committed states that a donor keeps, so that a fetch survives the donor's next commit. Beyond these it keeps one
that is being fetched: on a slow link that takes longer than a few rounds, and would have to begin anew each time.
It is the newest of those, so that nobody can keep donors at an old one for good."""

IN_USE = 10.0
"""Seconds since a state was last asked for in which it counts as being fetched."""

IN_FLIGHT = 4
"""Ranges that are asked of one donor at a time, at most, so that its link is not idle for round trips after each."""

QUICK = 1.0
"""Seconds; after each range that takes less, one more is asked for at once. On slow links they wait for each other."""

SLOW = 5.0
"""Seconds after which a donor that has nothing else to do is asked for what another donor has not delivered yet."""

HISTORY_RATE = 1 << 16
"""Bytes per second that a history, or a description, comes with at least; one that is slower is given up."""

LEAST_RATE = 1 << 12
"""The same for ranges, of which a line may be all that there is."""

_PATIENCE = 10.0  # seconds beyond what that takes

_CHUNK = 1 << 18  # bytes of links


class SyncFailed(ShoalError):
    """No donor could provide the state. Asking again, for a newer one, may succeed.

    Args:
        message: What happened.
        gone: Those who said at once that they do not keep it any more. That has cost no time, and they may be honest.
    """

    def __init__(self, message: str, *, gone: Collection[PeerId] = ()) -> None:
        super().__init__(message)
        self.gone = frozenset(gone)


@attrs.frozen
class HeaderClaim:
    """A header on the wire; its run is known."""

    revision: Count
    previous: Bytes32
    plan: Bytes32
    contributions: Bytes32
    weight: Annotated[float, msgspec.Meta(ge=0)]
    root: Bytes32

    @classmethod
    def of(cls, header: Header) -> HeaderClaim:
        """What is sent of a header."""
        return cls(header.revision, header.previous, header.plan, header.contributions, header.weight, header.root)

    def header(self, run: bytes) -> Header:
        """The header that is meant."""
        return Header(run=run, **attrs.asdict(self))


@message("state.history")
class HistoryRequest:
    """Asks how the state with this digest came about, from the newest of the known digests on that led to it."""

    run: Bytes32
    digest: Bytes32
    known: Annotated[tuple[Bytes32, ...], msgspec.Meta(max_length=MAX_KNOWN)]


@message("state.links")
class HistoryReply:
    """So many bytes of packed links follow, which begin at this header."""

    start: HeaderClaim
    length: Annotated[int, msgspec.Meta(ge=0, le=KEPT_BYTES)]


@message("state.describe")
class DescribeRequest:
    """Asks for the sizes and the leaves of the state with this digest."""

    run: Bytes32
    digest: Bytes32


@message("state.header")
class Description:
    """A state's sizes; its Merkle leaves follow as raw bytes."""

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
        manifest: The manifest's text, which everybody may have.
        admits: Whether a peer may have states.
        courtesy: What states give way to.
        measuring: Within it, states are sent.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: bytes,
        manifest: str,
        *,
        admits: Callable[[PeerId], bool] = lambda peer: True,
        courtesy: Courtesy | None = None,
        measuring: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._admits = admits
        self._courtesy = courtesy or Courtesy(lambda: endpoint.bytes_sent)
        self._measuring = measuring
        self.served = -math.inf
        """When a state, or a part of one, was asked for last, on trio's clock."""
        self._states: list[CommittedState] = []
        self._used: dict[bytes, float] = {}  # when, by digest
        self._serving: Counter[bytes] = Counter()  # ranges, by digest
        self._telling: set[PeerId] = set()  # to whom a history is being sent
        endpoint.handle(ManifestRequest, self._on_manifest)
        endpoint.handle(HistoryRequest, self._on_history)
        endpoint.handle(DescribeRequest, self._on_describe)
        endpoint.handle(RangeRequest, self._on_range)

    def offer(self, state: CommittedState) -> None:
        """Makes a committed state available to others."""
        if any(kept.header.digest == state.header.digest for kept in self._states):
            return
        states = [*self._states, state]
        old = [kept for kept in states[:-KEPT_STATES] if self._in_use(kept.header.digest)]
        self._states = old[-1:] + states[-KEPT_STATES:]
        kept = {state.header.digest for state in self._states}
        self._used = {digest: when for digest, when in self._used.items() if digest in kept}

    def _in_use(self, digest: bytes) -> bool:
        used = self._used.get(digest, -math.inf)
        return self._serving[digest] > 0 or trio.current_time() - used < IN_USE

    def _find(self, request: HistoryRequest | DescribeRequest | RangeRequest, peer: PeerId) -> CommittedState:
        _check_run(request.run, self._run)
        if not self._admits(peer):
            raise RequestRefused("states are for members: say hello first", code="not_a_member")
        for state in self._states:
            if state.header.digest == request.digest:
                self.served = self._used[request.digest] = trio.current_time()
                return state
        raise RequestRefused("this state is not kept here", code="gone")

    async def _on_manifest(self, request: ManifestRequest, stream: Stream) -> ManifestReply:
        _check_run(request.run, self._run)
        return ManifestReply(self._manifest)

    async def _on_history(self, request: HistoryRequest, stream: Stream) -> None:
        history = self._find(request, stream.peer).history
        if stream.peer in self._telling:
            raise RequestRefused("one history at a time for each peer", code="busy")
        self._telling.add(stream.peer)
        try:
            start = history.find(frozenset(request.known)) or 0
            links = history.links[start:]
            await stream.send(HistoryReply(HeaderClaim.of(history.headers[start]), sum(map(len, links))))
            for chunk in _chunks(links):
                await self._courtesy.send(stream, chunk)
            await stream.finish()
        finally:
            self._telling.discard(stream.peer)

    async def _on_describe(self, request: DescribeRequest, stream: Stream) -> None:
        state = self._find(request, stream.peer)
        await stream.send(Description(tuple(sorted(state.outer.buffers)), state.outer.parameters.numel()))
        await self._courtesy.send(stream, b"".join(state.leaves))
        await stream.finish()

    async def _on_range(self, request: RangeRequest, stream: Stream) -> None:
        state = self._find(request, stream.peer)
        start = request.leaf * merkle.LEAF
        views = list(read_range(state.outer, start, merkle.LEAF))
        self._serving[request.digest] += 1
        try:
            await stream.send(RangeReply(sum(len(view) for view in views)))
            with self._measuring():
                for view in views:
                    await self._courtesy.send(stream, view)
            await stream.finish()
        finally:
            self._serving[request.digest] -= 1
            if not self._serving[request.digest]:
                del self._serving[request.digest]
            self._used[request.digest] = trio.current_time()


def _chunks(links: Iterable[bytes]) -> Iterator[bytes]:
    """Links put together, so that they are neither all copied at once nor sent one by one."""
    chunk = bytearray()
    for link in links:
        chunk += link
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)


def _check_run(asked: bytes, ours: bytes) -> None:
    if asked != ours:
        raise RequestRefused("this peer takes part in another run", code="unknown_run")


async def fetch_history(
    endpoint: Endpoint,
    run: bytes,
    tip: Tip,
    donor: PeerId,
    *,
    ours: History | None,
    rules: Rules,
    compute: Callable[[Callable[[], History]], Awaitable[History]],
) -> History:
    """The history of a tip, so far as it is not ours as well, and with every signature checked.

    Args:
        endpoint: Our endpoint.
        run: The run's id.
        tip: The state in question; if it is not what the history leads to, the donor's word is worth nothing.
        donor: Who is said to have it.
        ours: The history of our own state.
        rules: What the run allows.
        compute: Calls a function that takes a while.

    Raises:
        ShoalError: The donor does not have it, cannot be reached, or has made something up.
    """
    known = () if ours is None else ours.landmarks()
    async with endpoint.open(donor, HistoryRequest(run, tip.digest, known), bulk=True) as stream:
        reply = await stream.receive(HistoryReply, timeout=10.0)
        data = bytearray(reply.length)
        await _receive(stream, data, HISTORY_RATE, "its history")
    return await compute(partial(verified, ours, reply.start.header(run), bytes(data), tip, rules))


async def fetch_state(
    endpoint: Endpoint,
    run: bytes,
    history: History,
    donors: Sequence[PeerId],
    *,
    elements: int,
    buffers: Collection[str],
    progress: Callable[[int], None] = lambda received: None,
    earlier: Partial | None = None,
    own: bool = False,
) -> CommittedState:
    """Fetches the state that a history leads to from several donors at once.

    Args:
        endpoint: Our endpoint.
        run: The run's id.
        history: Of the state to fetch.
        buffers: The names of the outer buffers that our recipe has.
        donors: Peers that are said to have it. Those that fail are left out, their ranges go to the others.
        elements: The number of parameters that our model has.
        progress: Called with the number of bytes of each range that was received.
        earlier: What is left of earlier attempts, with the same elements and buffers; this one leaves what it got.
        own: Whether each donor has a state of its own: one is taken, as it is.

    Raises:
        SyncFailed: No donor has it, or all of them failed.
    """
    problems: dict[PeerId, ShoalError] = {}
    run, tip = history.header.run, history.tip
    first, leaves = await _first_description(endpoint, history.header, donors, problems, elements, buffers, own)
    donors = [first] if own else donors
    gave = {first}
    earlier = Partial() if earlier is None else earlier
    outer, hashes = await earlier.begin(elements, buffers, leaves), earlier.hashes
    ranges = _Ranges(number for number, leaf in enumerate(leaves) if hashes.get(number) != leaf)
    in_flight = Counter(donors)

    async def fetch_from(donor: PeerId) -> None:
        while donor not in problems and (leaf := await ranges.take(donor)) is not None:
            begun = trio.current_time()
            try:
                await _fetch_range(endpoint, run, tip, donor, leaf, leaves[leaf], outer)
            except ShoalError as error:
                problems.setdefault(donor, error)
                ranges.give_back(leaf, donor)
                return
            gave.add(donor)
            hashes[leaf] = leaves[leaf]
            if ranges.finish(leaf):
                progress(min(merkle.LEAF, byte_length(outer) - leaf * merkle.LEAF))
            if not ranges.unfinished:
                nursery.cancel_scope.cancel()  # donors that are still at what others were quicker with
            if trio.current_time() - begun < QUICK and in_flight[donor] < IN_FLIGHT:
                in_flight[donor] += 1
                nursery.start_soon(fetch_from, donor)
            if ranges.unfinished:
                await earlier.keep(leaf)

    async with trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(fetch_from, donor)
    if ranges.unfinished:
        reason = f"revision {tip.revision} could not be fetched: {_summary(problems)}"
        raise SyncFailed(reason, gone=_gone(problems) - gave)
    earlier.clear()
    if not all(all_finite(tensor) for tensor in tensors(outer)):
        raise SyncFailed(f"revision {tip.revision} is of no use: it has parameters that are not finite")
    return CommittedState(history, outer, leaves)


class _Ranges:
    """Which ranges are still to be fetched. At the end, several donors may be at the same one."""

    def __init__(self, wanted: Iterable[int]) -> None:
        self._todo = deque(wanted)
        self.unfinished = set(self._todo)
        self._donors: dict[int, set[PeerId]] = defaultdict(set)  # who is at it
        self._returned = trio.Event()

    async def take(self, donor: PeerId) -> int | None:
        """A range that nobody is at; if there is none for a while, one that as few others as can be are slow with."""
        with trio.move_on_after(SLOW):
            while not self._todo and self.unfinished:
                await self._returned.wait()
        if self._todo:
            leaf = self._todo.popleft()
        else:
            others = [leaf for leaf in self.unfinished if donor not in self._donors[leaf]]
            if not others:
                return None
            leaf = min(others, key=lambda leaf: (len(self._donors[leaf]), leaf))
        self._donors[leaf].add(donor)
        return leaf

    def give_back(self, leaf: int, donor: PeerId) -> None:
        """A donor has failed: others are to fetch this range."""
        self._donors[leaf].discard(donor)
        if leaf in self.unfinished and not self._donors[leaf]:
            self._todo.append(leaf)
            self._returned.set()
            self._returned = trio.Event()

    def finish(self, leaf: int) -> bool:
        """A range is here; False if it was here already."""
        first = leaf in self.unfinished
        self.unfinished.discard(leaf)
        return first


def _gone(problems: Mapping[PeerId, ShoalError]) -> set[PeerId]:
    """Those who do not keep the state any more."""
    refused = {donor: error.code for donor, error in problems.items() if isinstance(error, RequestRefused)}
    return {donor for donor, code in refused.items() if code == "gone"}


def _summary(problems: Mapping[PeerId, ShoalError]) -> str:
    """The first few problems, for a message of bounded length."""
    told = [f"{donor.short}: {problem}" for donor, problem in problems.items()]
    return "; ".join(told[:4]) or "nobody is known who has it"


async def _first_description(
    endpoint: Endpoint,
    header: Header,
    donors: Sequence[PeerId],
    problems: dict[PeerId, ShoalError],
    elements: int,
    buffers: Collection[str],
    own: bool,
) -> tuple[PeerId, tuple[bytes, ...]]:
    """The first donor that has a right one, and that. What is wrong with others is written down."""
    for donor in donors:
        try:
            return donor, await _describe(endpoint, header, donor, elements, buffers, own)
        except ShoalError as error:
            problems[donor] = error
    raise SyncFailed(f"no peer could describe revision {header.revision}: {_summary(problems)}", gone=_gone(problems))


async def _describe(
    endpoint: Endpoint, header: Header, donor: PeerId, elements: int, buffers: Collection[str], own: bool
) -> tuple[bytes, ...]:
    async with endpoint.open(donor, DescribeRequest(header.run, header.digest)) as stream:
        said = await stream.receive(Description, timeout=10.0)
        # The digest covers the bytes, but not how they are shared out.
        if said.elements != elements:
            raise ProtocolError(f"peer {donor} has {said.elements} parameters, our model has {elements}")
        if said.buffers != tuple(sorted(buffers)):
            raise ProtocolError(f"peer {donor} has other buffers than our recipe")
        length = elements * 4 * (1 + len(said.buffers))
        raw = bytearray(32 * max(1, -(-length // merkle.LEAF)))
        await _receive(stream, raw, HISTORY_RATE, "its description")
    leaves = tuple(bytes(raw[start : start + 32]) for start in range(0, len(raw), 32))
    if merkle.root(leaves) != header.root and not own:
        raise ProtocolError(f"peer {donor} sent Merkle leaves that do not have the state's root")
    return leaves


async def _receive(stream: Stream, buffer: bytearray, rate: int, what: str) -> None:
    """Fills the buffer. Who sends a little now and then does not count as stalled, but has a time to finish."""
    limit = _PATIENCE + len(buffer) / rate
    with trio.move_on_after(limit) as scope:
        await stream.receive_into(memoryview(buffer))
    if scope.cancelled_caught:
        raise RequestTimeout(f"{stream.peer.short} did not send {what} of {len(buffer)} bytes within {limit:.0f} s")


async def _fetch_range(
    endpoint: Endpoint, run: bytes, tip: Tip, donor: PeerId, leaf: int, expected: bytes, outer: OuterState
) -> None:
    views = list(read_range(outer, leaf * merkle.LEAF, merkle.LEAF))
    length = sum(len(view) for view in views)
    buffer = bytearray(length)
    async with endpoint.open(donor, RangeRequest(run, tip.digest, leaf), bulk=True) as stream:
        reply = await stream.receive(RangeReply, timeout=10.0)
        if reply.length != length:
            raise ProtocolError(f"peer {donor} offered {reply.length} bytes for range {leaf}, which has {length}")
        await _receive(stream, buffer, LEAST_RATE, f"range {leaf}")
    if merkle.leaf(buffer) != expected:
        raise ProtocolError(f"peer {donor} sent bytes for range {leaf} that do not have its hash")
    offset = 0
    for view in views:
        view[:] = memoryview(buffer)[offset : offset + len(view)]
        offset += len(view)
