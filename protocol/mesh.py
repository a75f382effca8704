"""Members of a run that nothing else keeps: peers that are told one address find all others, and stay connected.

Whoever connects says which run it is here for, and whom else it knows; both learn from the other. For programs that use
the collective operations alone; a training run has its own members (`peer.membership`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated

import attrs
import trio
from msgspec import Meta

from protocol.awake import Awake
from protocol.endpoint import Endpoint, PeerConnected, PeerLost, Stream
from protocol.errors import RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.plan import Hash
from protocol.transport import Address
from protocol.wire import message

MAX_KNOWN = 256
"""Peers that are remembered, or told of at a time."""

_PERIOD = 2.0  # seconds after which whoever could not be connected is dialled again; twice as long each time
_LONGEST = 8.0  # at most
_ATTEMPTS = 10  # in vain, after which a peer is forgotten
_RETURN = 1.0  # seconds in which one that was lost is connected again, if it was our connections only that broke
_RETURN_WOKEN = 3.0  # the same if it is certain that they did


@attrs.frozen
class Known:
    """A peer, and where it may be reached."""

    peer: PeerId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=8)]


Others = Annotated[tuple[Known, ...], Meta(max_length=MAX_KNOWN)]


@message("mesh.hello")
class MeshHello:
    """The sender is here for a run, and knows these others that are."""

    run: Hash
    others: Others


@message("mesh.welcome")
class MeshWelcome:
    """Answer to `MeshHello`: the receiver is, too."""

    others: Others


@attrs.define(eq=False)
class _Search:
    """For somebody who is not connected."""

    due: float = -math.inf
    """When to dial the next time."""
    failures: int = 0

    def failed(self) -> None:
        pause = min(_PERIOD * 2.0**self.failures, _LONGEST)
        self.failures, self.due = self.failures + 1, trio.current_time() + pause


class Mesh:
    """Keeps connections to all members. Implements `Roster`; `run` must run.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes.
        first: Addresses to begin with.
    """

    def __init__(self, endpoint: Endpoint, run_id: bytes, first: Sequence[Address] = ()) -> None:
        self._endpoint, self._run = endpoint, run_id
        self._members: dict[PeerId, float] = {}  # since when
        self._greeting: set[PeerId] = set()
        self._first = {address: _Search() for address in first}
        self._missing: dict[PeerId, _Search] = {}
        self._returning: dict[PeerId, float] = {}  # until when they may be back in a moment
        self._found: dict[Address, PeerId] = {}
        self._doubted: dict[PeerId, float] = {}  # until when
        self._dialling: set[PeerId | Address] = set()
        self._changed = trio.Event()
        self._awake = Awake()
        endpoint.handle(MeshHello, self._on_hello)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Those who are connected and here for the run, and ourselves."""
        return (self._endpoint.peer_id, *self._members)

    async def wait_for(self, count: int) -> None:
        """Waits until there are so many members, ourselves included."""
        while len(self.members) < count:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    async def changes(self) -> None:
        """Returns when somebody has come or gone after this call, or may have."""
        await self._changed.wait()

    def meet(self, others: Sequence[Known]) -> None:
        """Somebody says that these are here, too: those that are not connected yet will be dialled."""
        for known in others:
            unknown = known.peer not in self.members and known.peer not in self._missing
            if unknown and known.addresses and len(self._missing) < MAX_KNOWN:
                self._endpoint.learn(known.peer, *known.addresses)
                self._missing[known.peer] = _Search()
        self._tell()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Finds members and loses them, until cancelled."""
        with self._endpoint.watch() as events:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._seek, nursery)
                nursery.start_soon(self._awake.run)
                task_status.started()
                for peer in self._endpoint.connected:
                    nursery.start_soon(self._greet, peer)
                async for event in events:
                    match event:
                        case PeerConnected(peer):
                            nursery.start_soon(self._greet, peer)
                        case PeerLost(peer):
                            self._lose(peer)

    # As a roster.

    def partners(self) -> Collection[PeerId]:
        now = trio.current_time()
        return [peer for peer in self.members if self._doubted.get(peer, now) <= now]

    def expected(self) -> Collection[PeerId]:
        return self.members

    def arriving(self) -> Collection[PeerId]:
        if self._members and not self.woken():
            return self._greeting - self._members.keys()
        # Whoever has lost everybody has perhaps been away itself. The others may have gone on: one of them will say so.
        # Of several that were stopped together, each still has the others, so it takes a look at the clock to know.
        now = trio.current_time()
        returning = {peer for peer, until in self._returning.items() if until > now}
        return self._greeting.union(returning) - self._members.keys()

    def woken(self) -> bool:
        return self._awake.lately

    def knows(self, peer: PeerId) -> bool:
        return peer in self._members

    def doubt(self, peer: PeerId, seconds: float) -> None:
        self._doubted[peer] = trio.current_time() + seconds

    # Finding each other.

    async def _greet(self, peer: PeerId) -> None:
        self._greeting.add(peer)
        try:
            hello = MeshHello(self._run, self._others(peer))
            welcome = await self._endpoint.request(peer, hello, MeshWelcome)
        except ShoalError:
            return  # it is somebody else, or will be connected again
        finally:
            self._greeting.discard(peer)
        if self._endpoint.is_connected(peer):
            self._learn(peer, welcome.others)

    async def _on_hello(self, request: MeshHello, stream: Stream) -> MeshWelcome:
        if request.run != self._run:
            raise RequestRefused("this peer does not take part in that run", code="unknown_run")
        if not self._endpoint.is_connected(stream.peer):
            raise RequestRefused("the connection is not there any more", code="not_a_member")
        others = self._others(stream.peer)
        self._learn(stream.peer, request.others)
        return MeshWelcome(others)

    def _others(self, peer: PeerId) -> tuple[Known, ...]:
        members = sorted(self._members.keys() - {peer})[:MAX_KNOWN]
        return tuple(Known(member, self._endpoint.addresses(member)[:8]) for member in members)

    def _learn(self, peer: PeerId, others: Sequence[Known]) -> None:
        self._members.setdefault(peer, trio.current_time())
        self._missing.pop(peer, None)
        self._returning.pop(peer, None)
        self.meet(others)

    def _lose(self, peer: PeerId) -> None:
        if peer in self._members:
            # At once, unless it comes and goes.
            self._missing[peer] = _Search(due=self._members.pop(peer) + _PERIOD)
            if len(self._missing) > MAX_KNOWN:
                self._forget(next(iter(self._missing)))
            self._returning[peer] = trio.current_time() + (_RETURN_WOKEN if self.woken() else _RETURN)
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _seek(self, nursery: trio.Nursery) -> None:
        """Connects to those who are missing, again and again."""
        while True:
            searches: dict[PeerId | Address, _Search] = {}
            searches.update(self._missing.items())
            searches.update((address, one) for address, one in self._first.items() if not self._is_found(address))
            now = trio.current_time()
            for target, search in searches.items():
                if target not in self._dialling and search.due <= now:
                    self._dialling.add(target)
                    nursery.start_soon(self._dial, target, search)
            later = [search.due for search in searches.values() if search.due > now]
            with trio.move_on_at(min([now + _PERIOD, *later])):
                await self._changed.wait()

    def _is_found(self, address: Address) -> bool:
        peer = self._found.get(address)
        return peer is not None and (peer == self._endpoint.peer_id or self._endpoint.is_connected(peer))

    async def _dial(self, target: PeerId | Address, search: _Search) -> None:
        search.due = trio.current_time() + _PERIOD  # at the earliest, whatever comes of it
        try:
            peer = await self._endpoint.connect(target)
        except ShoalError:
            self._failed(target, search)
        else:
            if isinstance(target, Address):
                self._found[target], search.failures = peer, 0
            elif peer not in self._members and peer not in self._greeting:
                self._failed(target, search)  # it is there, but not for the run
        finally:
            self._dialling.discard(target)

    def _failed(self, target: PeerId | Address, search: _Search) -> None:
        search.failed()
        if isinstance(target, PeerId):
            self._returning.pop(target, None)
            if search.failures >= _ATTEMPTS and self._missing.get(target) is search:
                self._forget(target)

    def _forget(self, peer: PeerId) -> None:
        del self._missing[peer]
        self._returning.pop(peer, None)
