"""The swarm key of a private run while a peer is up: following a rotation, and passing it on.

Whoever learns of a rotation that the founder has signed takes the new key, and gives it to the members that are here at
that moment, but for those that the founder excludes. For a grace period, the old key is good as well, for them alone: a
member may lose its connection before it has the new key. Everybody else needs a ticket with the new key, at once; so
what leaked is worthless as soon as the rotation has spread. When the period is over, the connections of those that have
not taken the key are closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Final

import trio

from peer.events import EventLog
from peer.home import Home, HomeError
from peer.membership import NOT_ALLOWED
from peer.rotation import KeyRotation, KeyTaken, Stored, read_order, read_stored, write_stored
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, ShoalError, WrongSwarmKey
from protocol.identity import PeerId
from protocol.keyring import Keyring
from protocol.stream import Stream

GRACE: Final = 600.0
"""Seconds for which the old key is good for those who were here when the new one came."""

PERIOD: Final = 1.0
"""Seconds between two looks for members that lack the new key, or for what the founder's user orders."""

STALE: Final = "this run's swarm key was rotated: ask somebody in the run for a fresh ticket (shoal ticket)"
EXCLUDED: Final = "this run's swarm key was rotated, and this peer was excluded: ask the run's founder"


class RunKeys:
    """Keeps a private run's keys.

    Args:
        endpoint: Ours, made with `keyring`.
        keyring: The run's keys. This changes it.
        home: Where the keys are stored.
        run: The run's id.
        founder: Finds the founder's public key; it is given the peer that says something in the founder's name.
        events: Where rotations are told.
        changed: Called when there is a new key, and tickets are to have it.
        lately: The members that are here, or were a moment ago: nobody else can come by the old key once there is a new
            one. None until there are any.

    Raises:
        HomeError: What the home has stored is damaged.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keyring: Keyring,
        home: Home,
        run: bytes,
        *,
        founder: Callable[[PeerId], Awaitable[bytes]],
        events: EventLog,
        changed: Callable[[], None] = lambda: None,
        lately: Callable[[], Collection[PeerId] | None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._keyring = keyring
        self._home = home
        self._run = run
        self._founder = founder
        self._events = events
        self._changed = changed
        self._lately = lately
        self._returning: Collection[PeerId] | None = None  # who may come until the recipients are settled, if not all
        self._holders: set[PeerId] = set()  # who has the newest key for sure
        self._recipients: frozenset[PeerId] | None = None
        self._giving: set[PeerId] = set()  # who is being given the newest key
        self._begun = False  # to give it
        self._out = True  # whether those excluded are told so: not before the others have had the time to hear of it
        self._begin_grace()
        self._rotated = trio.Event()
        self._rotation: KeyRotation | None = None
        stored = read_stored(home, run)
        if stored is not None and stored.rotation.number == keyring.number:
            self._rotation, self._recipients = stored.rotation, stored.recipients
            self._begin_grace(stored.until)
        endpoint.handle(KeyRotation, self._on_rotation)

    @property
    def excluded(self) -> tuple[PeerId, ...]:
        """Whom the founder has excluded."""
        return () if self._rotation is None else self._rotation.excluded

    def refusal(self, peer: PeerId) -> str | None:
        """Why a peer cannot be a member; None if the keys have nothing against it."""
        if peer in self.excluded:
            return EXCLUDED if self._out or peer not in (self._returning or ()) else None
        admitted = self._returning if self._recipients is None else self._recipients
        if self._keyring.older is None or admitted is None or peer in admitted or self._holds(peer):
            return None
        return None if self._endpoint.swarm_key(peer) is None else STALE

    def seen(self, peer: PeerId) -> None:
        """This peer has said hello, on a connection that there is."""
        if self._endpoint.swarm_key(peer) == self._keyring.newest:
            self._holders.add(peer)

    def expels(self, peer: PeerId, error: ShoalError) -> bool:
        """Whether this answer means that we are no member any more, if all who answer say the like.

        Of two that have different keys, either can be the one that is behind. Who had ours has gone on from it.
        """
        if isinstance(error, WrongSwarmKey):
            return peer in self._holders
        return isinstance(error, RequestRefused) and error.code == NOT_ALLOWED

    def follow_order(self) -> None:
        """Carries out what was ordered in this home, which is the founder's, unless that has been done.

        Raises:
            HomeError: The order is damaged.
        """
        order = read_order(self._home, self._run)
        if order is not None and order.number > self._keyring.number:
            self._take(order)

    async def follow_orders(self) -> None:
        """Carries out orders as they are given, until cancelled."""
        while True:
            await trio.sleep(PERIOD)
            try:
                self.follow_order()
            except HomeError as error:
                self._events.emit("key_problem", reason=str(error))
                return

    async def run(self, present: Callable[[], Awaitable[Collection[PeerId]]]) -> None:
        """Passes new keys on and retires old ones, until cancelled.

        Args:
            present: The members that are here, once those that were a moment ago have had the time to come back.
        """
        async with trio.open_nursery() as nursery:
            while True:
                if self._keyring.older is None:
                    await self._rotated.wait()
                elif trio.current_time() >= self._deadline:
                    self._end_grace()
                else:
                    await self._spread(present, nursery)
                    await trio.sleep(PERIOD)

    async def _spread(self, present: Callable[[], Awaitable[Collection[PeerId]]], nursery: trio.Nursery) -> None:
        """Begins to give the newest key to those who are to have it and are connected."""
        rotation = self._rotation
        if self._recipients is None:
            here = await present()
            if rotation is not self._rotation or rotation is None:
                return
            self._recipients = frozenset(here) - frozenset(rotation.excluded)
            self._store()
        if rotation is None:
            return
        idle = self._recipients - self._giving
        lacking = [peer for peer in idle if self._endpoint.is_connected(peer) and not self._holds(peer)]
        self._giving.update(lacking)
        nursery.start_soon(self._give_all, lacking, rotation, self._giving, not self._begun)
        self._begun = True

    async def _give_all(
        self, peers: Collection[PeerId], rotation: KeyRotation, giving: set[PeerId], first: bool
    ) -> None:
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(self._give, peer, rotation, giving)
        if first and rotation is self._rotation:
            self._put_out()

    async def _give(self, peer: PeerId, rotation: KeyRotation, giving: set[PeerId]) -> None:
        try:
            taken = await self._endpoint.request(peer, rotation, KeyTaken)
        except ShoalError:
            return  # until the grace is over, it is tried again
        finally:
            giving.discard(peer)
        if taken.number >= rotation.number and rotation is self._rotation:
            self._note_holder(peer)

    async def _on_rotation(self, rotation: KeyRotation, stream: Stream) -> KeyTaken:
        if rotation.run != self._run:
            raise RequestRefused("this peer takes part in another run", code="unknown_run")
        if rotation.number > self._keyring.number:
            if not rotation.is_by(await self._founder(stream.peer)):
                raise ProtocolError("a new swarm key that the founder has not signed")
            if rotation.number > self._keyring.number:  # still
                self._take(rotation)
        if rotation == self._rotation:
            self._note_holder(stream.peer)
        return KeyTaken(self._keyring.number)

    def _take(self, rotation: KeyRotation) -> None:
        self._keyring.rotate(rotation.number, rotation.key)
        self._rotation, self._recipients, self._returning = rotation, None, self._lately()
        self._giving, self._begun, self._out = set(), False, False
        self._holders.clear()
        self._begin_grace()
        self._store()
        self._events.emit("key_rotated", number=rotation.number, excluded=rotation.excluded)
        self._changed()
        self._rotated.set()
        self._rotated = trio.Event()

    def _put_out(self) -> None:
        """From now on, those who are excluded are told so."""
        self._out = True
        for peer in self.excluded:
            self._endpoint.disconnect(peer, EXCLUDED)

    def _begin_grace(self, until: float | None = None) -> None:
        """Begins the grace period, or what is left of it: the wall clock can make it shorter, but not longer."""
        now = self._events.now()
        left = GRACE if until is None else max(0.0, min(GRACE, until - now))
        self._deadline, self._until = trio.current_time() + left, now + left

    def _end_grace(self) -> None:
        self._keyring.retire()
        self._out = True
        self._store()
        self._events.emit("key_retired", number=self._keyring.number - 1)
        for peer in self._endpoint.connected:
            if not self._holds(peer):
                self._endpoint.disconnect(peer, STALE)

    def _holds(self, peer: PeerId) -> bool:
        return peer in self._holders or self._endpoint.swarm_key(peer) == self._keyring.newest

    def _note_holder(self, peer: PeerId) -> None:
        if peer not in self._holders:
            self._holders.add(peer)
            self._events.emit("key_taken", peer=peer, number=self._keyring.number)

    def _store(self) -> None:
        if self._rotation is None:
            return
        try:
            write_stored(self._home, Stored(self._rotation, self._keyring.older, self._recipients, self._until))
        except OSError as error:  # no reason to stop; but a restart would go back to the old key
            self._events.emit("key_problem", reason=f"{self._home.rotated}: {error.strerror}")
