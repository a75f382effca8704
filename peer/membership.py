"""Who takes part in the run, as far as this peer knows.

The DHT is where members find each other: each publishes a signed record under the run's key. From then on they talk
directly: every member keeps a connection to every other, says hello on it, learns the others' members from the answer,
and is told when a member's tip or readiness changes. A member whose connection breaks is redialled a few times and then
forgotten until the DHT, or another member, names it again.

What a member says about itself is a claim that steers who is asked first; states and results are verified where they
are fetched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Annotated

import attrs
import msgspec
import trio

from dht import DHT, members_key
from peer.state import Tip
from protocol.endpoint import Endpoint, PeerConnected, PeerLost
from protocol.errors import PeerGone, ProtocolError, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.transport import Address
from protocol.wire import message

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

REDIALS = 3
"""Attempts to reach a member whose connection broke, before it is forgotten."""

SETTLE = 5.0
"""Seconds that are worth waiting for a member that may have lost its connection only."""

SEARCH_PERIOD = 10.0
"""Seconds between looks into the DHT for members that nobody has told us of."""

RECORD_TTL = 120.0
"""Seconds that a membership record lives unless it is renewed."""


@attrs.frozen
class TipClaim:
    """A member's tip on the wire."""

    revision: Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
    weight: Annotated[float, msgspec.Meta(ge=0)]
    digest: Bytes32


@attrs.frozen
class StatusClaim:
    """What a member says of itself. Of two claims, the one with the higher number is the later one."""

    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    tip: TipClaim | None
    active: bool


@attrs.frozen
class KnownMember:
    """A member by name, with where it was last reached."""

    peer: PeerId
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)]


@message("member.hello")
class Hello:
    """A member's first word on a connection, and again whenever its status changes."""

    run: Bytes32
    status: StatusClaim


@message("member.welcome")
class Welcome:
    """The answer to a hello: the same about us, and the members that we know."""

    status: StatusClaim
    members: Annotated[tuple[KnownMember, ...], msgspec.Meta(max_length=256)]


@attrs.frozen
class Member:
    """What another member last said of itself: its tip, if it has a state, and whether it takes part in rounds."""

    peer: PeerId
    tip: Tip | None
    active: bool
    number: int


class Membership:
    """Keeps the connections to a run's members and knows their status.

    Args:
        endpoint: Our endpoint.
        dht: Where records are published and looked up.
        run: The run's id.
        rng: Spreads out what all members would otherwise do at once.
        limit: The most members to keep connections to.
        allowed: Peer ids that may take part, or None for everyone.
        seen: Called with a member's id when it first says hello on a connection.
        lost: Called with a member's id and a reason when its connection ends.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DHT,
        run: bytes,
        *,
        rng: random.Random,
        limit: int = 64,
        allowed: frozenset[PeerId] | None = None,
        seen: Callable[[PeerId], None] = lambda peer: None,
        lost: Callable[[PeerId, str], None] = lambda peer, reason: None,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._run = run
        self._rng = rng
        self._limit = limit
        self._allowed = allowed
        self._seen = seen
        self._lost = lost
        self._tip: Tip | None = None
        self._active = False
        self._number = 0
        self._members: dict[PeerId, Member] = {}
        self._greeting: set[PeerId] = set()
        self._awaited: set[PeerId] = set()  # those of them who were here a moment ago, or are with others
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        endpoint.handle(Hello, self._on_hello)

    @property
    def others(self) -> tuple[Member, ...]:
        """The members that are connected now, without ourselves, by id."""
        return tuple(self._members[peer] for peer in sorted(self._members))

    def partners(self) -> list[PeerId]:
        """The members that can make the next round with us, ourselves included: active, and on our branch.

        A member at our revision must have our digest; one revision to either side it is about to follow, or to lead.
        """
        mine = self._tip
        found = [self._endpoint.peer_id] if self._active else []
        for member in self._members.values():
            if mine is None or member.tip is None or not member.active:
                continue
            ahead = member.tip.revision - mine.revision
            if ahead in (-1, 1) or (ahead == 0 and member.tip.digest == mine.digest):
                found.append(member.peer)
        return sorted(found)

    def better(self, *, branched: PeerId | None = None) -> Member | None:
        """The member with the best tip, if that is a state to fetch: to catch up, or to change branches. Else None.

        A tip that is a single round ahead of ours is most likely the round that we are about to finish, and no reason
        to fetch anything, unless the member is `branched`: known to be on another branch.
        """
        best: Member | None = None
        for member in self._members.values():
            tip = member.tip
            if tip is None or (self._tip is not None and not tip.beats(self._tip)):
                continue
            if self._tip is not None and tip.revision == self._tip.revision + 1 and member.peer != branched:
                continue
            if best is None or best.tip is None or tip.beats(best.tip):
                best = member
        return best

    def holders(self, tip: Tip) -> list[PeerId]:
        """The members that say that they have this very state, in random order."""
        found = [member.peer for member in self._members.values() if member.tip == tip]
        self._rng.shuffle(found)
        return found

    async def changes(self) -> None:
        """Returns when any member came, went, or changed its status after this call."""
        await self._changed.wait()

    async def settled(self) -> None:
        """Returns when whoever should be here is, or has failed to answer: the rest is out of reach for now.

        Waits for the first attempt to greet each peer that was connected, or is connected to another member, but not
        for names that only the DHT remembers, and for no one longer than `SETTLE` seconds.
        """
        with trio.move_on_after(SETTLE):
            while self._awaited:
                await self._changed.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Greets members as they connect, looks for others, and publishes our record, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with self._endpoint.watch() as events:
                self._dht.publish(members_key(self._run), b"member", ttl=RECORD_TTL)
                nursery.start_soon(self._search)
                task_status.started()
                async for event in events:
                    if isinstance(event, PeerLost):
                        self._on_lost(event.peer, event.reason)
                    elif isinstance(event, PeerConnected) and event.peer in self._members:
                        self.meet([event.peer])

    def meet(self, peers: Iterable[PeerId], *, expected: bool = True) -> None:
        """Starts to greet these peers in the background, those that are not members yet.

        `expected` peers are likely to answer, so that `settled` waits for them.
        """
        for peer in peers:
            if (
                self._nursery is not None
                and peer != self._endpoint.peer_id
                and peer not in self._greeting
                and peer not in self._members
                and len(self._members) + len(self._greeting) < self._limit
                and self._may_join(peer)
            ):
                self._greeting.add(peer)
                if expected:
                    self._awaited.add(peer)
                self._nursery.start_soon(self._greet, peer, REDIALS)

    async def announce(self, tip: Tip | None, *, active: bool) -> None:
        """Sets our status and tells every member, without waiting for those that are slow to hear it."""
        self._tip, self._active = tip, active
        self._number += 1
        self._notify()
        if self._nursery is not None:
            for peer in self._members:
                self._nursery.start_soon(self._tell, peer)

    def _may_join(self, peer: PeerId) -> bool:
        return self._allowed is None or peer in self._allowed

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _hello(self) -> Hello:
        return Hello(self._run, self._status())

    def _status(self) -> StatusClaim:
        tip = self._tip
        claim = None if tip is None else TipClaim(tip.revision, tip.weight, tip.digest)
        return StatusClaim(self._number, claim, self._active)

    async def _tell(self, peer: PeerId) -> None:
        try:
            self._welcomed(peer, self._number, await self._endpoint.request(peer, self._hello(), Welcome))
        except ShoalError:
            return  # a broken connection is reported by the endpoint, and a slow member hears the next announcement

    async def _greet(self, peer: PeerId, attempts: int) -> None:
        try:
            for attempt in range(attempts):
                if attempt:
                    await trio.sleep(2**attempt * self._rng.uniform(0.5, 1.0))
                try:
                    told = self._number
                    welcome = await self._endpoint.request(peer, self._hello(), Welcome)
                except (RequestRefused, ProtocolError):
                    return
                except ShoalError:
                    self._awaited.discard(peer)
                    self._notify()
                    continue
                self._welcomed(peer, told, welcome)
                return
        finally:
            self._greeting.discard(peer)
            self._awaited.discard(peer)
            self._notify()

    def _welcomed(self, peer: PeerId, told: int, welcome: Welcome) -> None:
        self._note(peer, welcome.status)
        if self._nursery is not None and told < self._number:
            self._nursery.start_soon(self._tell, peer)  # our status has changed since the hello
        for known in welcome.members:
            self._endpoint.learn(known.peer, *known.addresses)
        self.meet(known.peer for known in welcome.members)

    async def _on_hello(self, hello: Hello, stream: Stream) -> Welcome:
        if hello.run != self._run:
            raise RequestRefused("this peer takes part in another run", code="unknown_run")
        if not self._may_join(stream.peer):
            raise RequestRefused("this run admits only the peers on its list", code="not_allowed")
        if stream.peer not in self._members and len(self._members) >= self._limit:
            raise RequestRefused(f"this peer keeps at most {self._limit} connections to members", code="full")
        self._note(stream.peer, hello.status)
        known = tuple(
            KnownMember(peer, self._endpoint.addresses(peer)[:8]) for peer in self._members if peer != stream.peer
        )
        return Welcome(self._status(), known[:256])

    def _note(self, peer: PeerId, status: StatusClaim) -> None:
        if not self._endpoint.is_connected(peer):
            return
        known = self._members.get(peer)
        if known is not None and known.number > status.number:
            return  # claims travel on streams of their own, and may overtake each other
        tip = None if status.tip is None else Tip(status.tip.revision, status.tip.weight, status.tip.digest)
        self._members[peer] = Member(peer, tip, status.active, status.number)
        if known is None:
            self._seen(peer)
        self._notify()

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self._members.pop(peer, None) is not None:
            self._lost(peer, reason)
            self.meet([peer])
            self._notify()

    async def _search(self) -> None:
        while True:
            try:
                records = await self._dht.get(members_key(self._run))
            except (PeerGone, ShoalError):
                records = {}
            strangers = [peer for peer in records if peer not in self._members and peer != self._endpoint.peer_id]
            for peer in strangers:
                for contact in await self._dht.find(peer):
                    self._endpoint.learn(contact.peer, *contact.addresses)
            self.meet(strangers, expected=False)
            await trio.sleep(SEARCH_PERIOD * self._rng.uniform(0.8, 1.2))
