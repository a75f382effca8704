"""Who takes part in the run, as far as this peer knows.

The DHT is where members find each other: each publishes a signed record under the run's key. From then on they talk
directly: every member keeps a connection to every other, says hello on it, learns the others' members from the answer,
and is told when a member's tip or readiness changes. A member whose connection breaks is redialled a few times at once,
and then now and again: after a partition, the DHT may have fallen apart as well, and nobody else may know both sides.

What a member says about itself is a claim that steers who is asked first; states and results are verified where they
are fetched. A member whose claim turns out to be empty is passed over for a while, ever longer: see `doubt`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import attrs
import msgspec
import trio

from dht import DHT, members_key
from peer.chain import Tip
from peer.pace import FASTEST
from protocol.awake import Awake
from protocol.endpoint import Endpoint, PeerLost
from protocol.errors import PeerGone, ProtocolError, RequestRefused, ShoalError, WrongSwarmKey
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.transport import Address
from protocol.wire import message

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_T = TypeVar("_T")

NOT_ALLOWED, FULL = "not_allowed", "full"  # codes of refusals that end a newcomer's hopes

REDIALS = 3
"""Attempts to reach a member whose connection broke, before it is forgotten."""

SETTLE = 5.0
"""Seconds that are worth waiting for a member that may have lost its connection only."""

AVOIDED = 10.0
"""Seconds for which a peer that could not be reached, or refused us, is not dialled again because somebody names it."""

STABLE = 5.0
"""A connection that breaks sooner than this, in seconds, after the one before it is not made anew at once."""

NEAR = 2
"""A member that is no further behind catches up by fetching the results of the rounds that it lacks, unless the run's
method keeps more of them."""

PATIENCE = 3
"""Rounds in which a member that is behind is waited for although it does not get ahead."""

STRANGERS = 16
"""Peers from the DHT that are looked up and greeted in one search; anybody can publish a record."""

DOUBTS = 3
"""Empty claims in a row after which a member is passed over in rounds as well, and not only as a source of states."""

LONGEST_DOUBT = 3600.0
"""Seconds."""

MAX_FORMER = 64
"""Members that were lost and are dialled again now and then, the last ones."""

MAX_REMEMBERED = 4096
"""Peers whose empty claims, or unreachability, are remembered."""

HOPELESS = 30.0
"""Seconds for which all that answer must have refused us before we believe that we are no member any more."""

SEARCH_PERIOD = 10.0
"""Seconds between looks into the DHT for members that nobody has told us of."""

RECORD_TTL = 120.0
"""Seconds that a membership record lives unless it is renewed."""


@attrs.frozen
class TipClaim:
    """A member's tip on the wire."""

    revision: Annotated[int, msgspec.Meta(ge=0, le=2**48 - 1)]
    weight: Annotated[float, msgspec.Meta(ge=0)]
    digest: Bytes32


@attrs.frozen
class KnownMember:
    """A member by name, with where it was last reached."""

    peer: PeerId
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=8)]


@attrs.frozen
class StatusClaim:
    """What a member says about itself."""

    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Grows with every change: claims travel on streams of their own, and may overtake each other."""
    tip: TipClaim | None
    """The state that it holds, if any."""
    active: bool
    """Whether it takes part in rounds."""
    speed: Annotated[float, msgspec.Meta(ge=0, le=FASTEST)] = 0.0
    """Inner steps per second that it takes; 0 if it does not know yet."""


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
    number: int = 0
    progressed: int = 0
    """The revision that we held when it told us this tip."""
    speed: float = 0.0


@attrs.define
class _Doubt:
    failures: int = 0
    until: float = 0.0


class Membership:
    """Keeps the connections to a run's members and knows their status.

    Args:
        endpoint: Our endpoint.
        dht: Where records are published and looked up.
        run: The run's id.
        rng: Spreads out what all members would otherwise do at once.
        limit: The most members to keep connections to.
        near: How far behind a member may be to catch up by the results of rounds.
        allowed: Peer ids that may take part, or None for everyone.
        refuses: Says why a peer cannot be a member now, although it may take part, or None.
        plausible: Whether a tip can exist in this run at all.
        seen: Called with a member's id when it first says hello on a connection.
        lost: Called with a member's id and a reason when its connection ends.
        rejected: Called with a peer's id and an error when it does not take us for a member, or has another swarm key.
        final: Whether such an error means that we are no member any more, if nobody else takes us for one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dht: DHT,
        run: bytes,
        *,
        rng: random.Random,
        limit: int = 64,
        near: int = NEAR,
        allowed: frozenset[PeerId] | None = None,
        refuses: Callable[[PeerId], str | None] = lambda peer: None,
        plausible: Callable[[Tip], bool] = lambda tip: True,
        seen: Callable[[PeerId], None] = lambda peer: None,
        lost: Callable[[PeerId, str], None] = lambda peer, reason: None,
        rejected: Callable[[PeerId, ShoalError], None] = lambda peer, error: None,
        final: Callable[[PeerId, ShoalError], bool] = lambda peer, error: False,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._run = run
        self._rng = rng
        self._limit = limit
        self._near = near
        self._allowed = allowed
        self._refuses = refuses
        self._plausible = plausible
        self._seen = seen
        self._lost = lost
        self._rejected = rejected
        self._final = final
        self._tip: Tip | None = None
        self._active, self._speed = False, 0.0
        self._number = 0
        self._members: dict[PeerId, Member] = {}
        self._greeting: set[PeerId] = set()
        # Those of them who were here a moment ago, or are with others, and until when they are worth waiting for.
        self._awake = Awake()
        self._awaited: dict[PeerId, float] = {}
        self._avoided: dict[PeerId, float] = {}  # until when
        self._former: dict[PeerId, bool] = {}  # members that were lost
        self._broke: dict[PeerId, float] = {}  # when the connection to a member broke last
        self._doubts: dict[PeerId, _Doubt] = {}
        self._expelled_by: dict[PeerId, ShoalError] = {}  # what those said last for whom we are no member any more
        self.refusal: RequestRefused | None = None
        """Why the last peer of this run that did not take us for a member refused."""
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        endpoint.handle(Hello, self._on_hello)

    @property
    def others(self) -> tuple[Member, ...]:
        """The members that are connected now, without ourselves, by id."""
        return tuple(self._members[peer] for peer in sorted(self._members))

    @property
    def active(self) -> bool:
        """Whether we take part in rounds."""
        return self._active

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer has said hello and is connected: nobody else is served, or let into rounds."""
        return peer in self._members

    def partners(self) -> list[PeerId]:
        """The members that can make the next round with us, ourselves included: active, and on our branch.

        A member at our revision must have our digest. One that is a revision behind is about to follow, and one that is
        up to `near` revisions ahead knows how to.
        """
        mine = self._tip
        found = [self._endpoint.peer_id] if self._active else []
        for member in self._members.values():
            if mine is None or member.tip is None or not member.active or self._doubted(member.peer, DOUBTS):
                continue
            ahead = member.tip.revision - mine.revision
            if member.tip.digest == mine.digest if ahead == 0 else -1 <= ahead <= self._near:
                found.append(member.peer)
        return sorted(found)

    def expected(self) -> list[PeerId]:
        """The members that the next round may bring together, ourselves included.

        Those are the partners, and those that are behind and may be catching up: they come when they have. They are
        given a few rounds from each step that they get ahead.
        """
        mine = self._tip
        found = {self._endpoint.peer_id, *self.partners()}
        for member in self._members.values():
            if mine is None or member.tip is None or self._doubted(member.peer, DOUBTS):
                continue
            behind = member.tip.revision < mine.revision <= member.progressed + PATIENCE
            if behind or member.tip.digest == mine.digest:
                found.add(member.peer)
        return sorted(found)

    def lately(self) -> list[PeerId]:
        """The members, and those that were until a moment ago."""
        since = trio.current_time() - SETTLE
        return [*self._members, *(peer for peer, broke in self._broke.items() if broke > since)]

    def arriving(self) -> list[PeerId]:
        """Peers that may be members in a moment: whoever was connected, or is connected to another member."""
        now = trio.current_time()
        return sorted(peer for peer, until in self._awaited.items() if until > now)

    def woken(self) -> bool:
        """Whether this process was stopped, and went on a moment ago: whom it has lost may be there all the same."""
        return self._awake.lately

    def better(self, *, branched: PeerId | None = None) -> Member | None:
        """The member with the best tip, if that is a state to fetch: to catch up, or to change branches. Else None.

        A tip that is a single round ahead of ours is most likely the round that we are about to finish, and the results
        of `near` rounds are no more than the state: no reason to fetch that, unless the member is `branched`: known to
        be on another branch.
        """
        mine = self._tip

        def is_near(member: Member) -> bool:
            return mine is not None and member.tip is not None and 0 < member.tip.revision - mine.revision <= self._near

        return self._best(member for member in self._members.values() if member.peer == branched or not is_near(member))

    def ahead(self) -> Member | None:
        """The member with the best tip if that is better than ours, even if only by the next round. Else None."""
        return self._best(self._members.values())

    def _best(self, members: Iterable[Member]) -> Member | None:
        best, best_tip = None, self._tip
        for member in members:
            better = member.tip is not None and (best_tip is None or member.tip.beats(best_tip))
            if better and not self._doubted(member.peer):
                best, best_tip = member, member.tip
        return best

    def holders(self, tip: Tip) -> list[PeerId]:
        """The members that say that they have this very state, in random order."""
        found = [m.peer for m in self._members.values() if m.tip == tip and not self._doubted(m.peer)]
        self._rng.shuffle(found)
        return found

    def doubt(self, peer: PeerId, seconds: float = 1.0) -> None:
        """What this peer said it has could not be had; it has cost us so much time.

        It is passed over for as long, and twice as long after each further failure in a row. It may be honest: states
        are replaced, and connections break.
        """
        doubt = self._doubts.pop(peer, None) or _Doubt()
        pause = max(1.0, seconds) * 2.0 ** min(doubt.failures, 32)
        self._doubts[peer] = _Doubt(doubt.failures + 1, trio.current_time() + min(pause, LONGEST_DOUBT))
        _shorten(self._doubts)
        self._notify()

    def trust(self, peer: PeerId) -> None:
        """This peer had what it said."""
        self._doubts.pop(peer, None)

    def _doubted(self, peer: PeerId, failures: int = 1) -> bool:
        doubt = self._doubts.get(peer)
        return doubt is not None and doubt.failures >= failures and trio.current_time() < doubt.until

    async def changes(self) -> None:
        """Returns when any member came, went, or changed its status after this call."""
        await self._changed.wait()

    async def settled(self) -> None:
        """Returns when whoever should be here is, or has failed to answer: the rest is out of reach for now.

        Waits for the first attempt to greet each peer that was connected, or is connected to another member, but not
        for names that only the DHT remembers, and for no one longer than `SETTLE` seconds, however often it is called.
        """
        while self._awaited and (deadline := max(self._awaited.values())) > trio.current_time():
            with trio.move_on_at(deadline):
                await self._changed.wait()

    async def expelled(self) -> ShoalError:
        """Returns, when we are no member any more, why: some have said so, and for a while nobody took us for one.

        Those who are out of reach have no say. Others may say hello to us without taking us, as they lack a key.
        """
        while True:
            while not self._is_expelled():
                await self._changed.wait()
            with trio.move_on_after(HOPELESS):
                while self._is_expelled():
                    await self._changed.wait()
            if self._is_expelled():
                return next(reversed(self._expelled_by.values()))

    def _is_expelled(self) -> bool:
        return bool(self._expelled_by) and self._members.keys() <= self._expelled_by.keys()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Greets members as they connect, looks for others, and publishes our record, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with self._endpoint.watch() as events:
                self._dht.publish(members_key(self._run), b"member", ttl=RECORD_TTL)
                nursery.start_soon(self._search)
                nursery.start_soon(self._awake.run)
                task_status.started()
                async for event in events:
                    if isinstance(event, PeerLost):
                        self._on_lost(event.peer, event.reason)

    def meet(self, peers: Iterable[PeerId], *, expected: bool = True) -> None:
        """Starts to greet these peers in the background, those that are not members yet.

        `expected` peers are likely to answer, so that `settled` waits for them.
        """
        for peer in peers:
            if self._is_stranger(peer):
                self._begin_to_greet(peer, expected=expected)

    def _is_stranger(self, peer: PeerId) -> bool:
        """Whether there is any use in greeting this peer, of whom somebody has told us."""
        return (
            peer != self._endpoint.peer_id
            and peer not in self._greeting
            and peer not in self._members
            and self._avoided.get(peer, -math.inf) <= trio.current_time()
            and self._may_join(peer)
        )

    def _begin_to_greet(self, peer: PeerId, *, expected: bool, later: bool = False) -> None:
        if self._nursery is None or len(self._members) + len(self._greeting) >= self._limit:
            return
        if self._refuses(peer) is not None:
            return
        self._greeting.add(peer)
        if expected:
            self._awaited[peer] = trio.current_time() + SETTLE
        self._nursery.start_soon(self._greet, peer, int(later))

    async def announce(self, tip: Tip | None, *, active: bool, speed: float = 0.0) -> None:
        """Sets our status and tells every member, without waiting for those that are slow to hear it."""
        self._tip, self._active, self._speed = tip, active, speed
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
        return StatusClaim(self._number, claim, self._active, self._speed)

    async def _tell(self, peer: PeerId) -> None:
        try:
            told = self._number
            self._welcomed(peer, told, await self._endpoint.request(peer, self._hello(), Welcome))
        except RequestRefused as refusal:
            self._forget(peer, str(refusal))
            self._note_rejection(peer, refusal)
        except ShoalError:
            return  # a broken connection is reported by the endpoint, and a slow member hears the next announcement

    async def _greet(self, peer: PeerId, begun: int) -> None:
        """Says hello, up to a few times; `begun` is the number of attempts that have failed already."""
        try:
            for attempt in range(begun, begun + REDIALS):
                if attempt:
                    await trio.sleep(2**attempt * self._rng.uniform(0.5, 1.0))
                try:
                    told = self._number
                    welcome = await self._endpoint.request(peer, self._hello(), Welcome)
                except (RequestRefused, ProtocolError) as error:
                    if isinstance(error, RequestRefused):
                        self._note_rejection(peer, error)
                    break
                except ShoalError as error:
                    if isinstance(error, WrongSwarmKey):
                        self._note_rejection(peer, error)
                    self._awaited.pop(peer, None)
                    self._notify()
                    continue
                self._welcomed(peer, told, welcome)
                return
            self._avoided[peer] = trio.current_time() + AVOIDED
            _shorten(self._avoided)
        finally:
            self._greeting.discard(peer)
            self._awaited.pop(peer, None)
            self._notify()

    def _note_rejection(self, peer: PeerId, error: RequestRefused | WrongSwarmKey) -> None:
        if isinstance(error, RequestRefused):
            if error.code not in (NOT_ALLOWED, FULL):
                return
            self.refusal = error
        self._rejected(peer, error)
        self._expelled_by.pop(peer, None)
        if self._final(peer, error):
            self._expelled_by[peer] = error
            _shorten(self._expelled_by)
        self._notify()

    def _welcomed(self, peer: PeerId, told: int, welcome: Welcome) -> None:
        if self._expelled_by.pop(peer, None) is not None:
            self._notify()
        if self._refuses(peer) is not None or not self._note(peer, welcome.status):
            return
        if self._nursery is not None and told < self._number:
            self._nursery.start_soon(self._tell, peer)  # our status has changed since the hello
        for known in welcome.members:
            self._endpoint.learn(known.peer, *known.addresses)
        self.meet(known.peer for known in welcome.members)

    async def _on_hello(self, hello: Hello, stream: Stream) -> Welcome:
        if hello.run != self._run:
            raise RequestRefused("this peer takes part in another run", code="unknown_run")
        if not self._may_join(stream.peer):
            raise RequestRefused("this run admits only the peers on its list", code=NOT_ALLOWED)
        refusal = self._refuses(stream.peer)
        if refusal is not None:
            raise RequestRefused(refusal, code=NOT_ALLOWED)
        if stream.peer not in self._members and len(self._members) >= self._limit:
            raise RequestRefused(f"this run is full: it admits {self._limit + 1} peers at most", code=FULL)
        if not self._note(stream.peer, hello.status):
            raise RequestRefused("no such state can exist in this run", code="implausible")
        known = tuple(
            KnownMember(peer, self._endpoint.addresses(peer)[:8]) for peer in self._members if peer != stream.peer
        )
        return Welcome(self._status(), known[:256])

    def _note(self, peer: PeerId, status: StatusClaim) -> bool:
        """Takes down what a connected peer says of itself. False if that cannot be true; nothing is changed then."""
        tip = None if status.tip is None else Tip(status.tip.revision, status.tip.weight, status.tip.digest)
        if tip is not None and not self._plausible(tip):
            return False
        known = self._members.get(peer)
        if not self._endpoint.is_connected(peer) or (known is not None and known.number > status.number):
            return True
        progressed = 0 if self._tip is None else self._tip.revision
        if known is not None and known.tip == tip:
            progressed = known.progressed
        self._members[peer] = Member(peer, tip, status.active, status.number, progressed, status.speed)
        if known is None:
            self._former.pop(peer, None)
            self._seen(peer)
        self._notify()
        return True

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self._forget(peer, reason) is not None and peer not in self._greeting:
            # Connections that break at once, again and again, must not keep both sides busy.
            now = trio.current_time()
            flaps = now - self._broke.pop(peer, -math.inf) < STABLE
            self._broke[peer] = now
            _shorten(self._broke)
            self._begin_to_greet(peer, expected=not flaps, later=flaps)

    def _forget(self, peer: PeerId, reason: str) -> Member | None:
        member = self._members.pop(peer, None)
        if member is not None:
            self._former[peer] = True
            _shorten(self._former, MAX_FORMER)
            self._lost(peer, reason)
            self._notify()
        return member

    async def _search(self) -> None:
        while True:
            try:
                records = await self._dht.get(members_key(self._run))
            except (PeerGone, ShoalError):
                records = {}
            strangers = sorted(peer for peer in records if self._is_stranger(peer))
            for peer in self._rng.sample(strangers, min(len(strangers), STRANGERS)):
                for contact in await self._dht.find(peer):
                    self._endpoint.learn(contact.peer, *contact.addresses)
                self.meet([peer], expected=False)
            former = sorted(self._former)
            self.meet(self._rng.sample(former, min(len(former), STRANGERS)), expected=False)
            await trio.sleep(SEARCH_PERIOD * self._rng.uniform(0.8, 1.2))


def _shorten(remembered: dict[PeerId, _T], most: int = MAX_REMEMBERED) -> None:
    """Forgets what was remembered first."""
    while len(remembered) > most:
        del remembered[next(iter(remembered))]
