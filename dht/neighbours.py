"""The peers that a node of the DHT knows: asking them, noticing new ones, and finding out who is gone.

Every request to a peer goes through `Neighbours.ask`, so that the table learns from each of them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import attrs
import trio

from dht.ids import MAX_ADDRESSES, Contact
from dht.messages import Ping, Pong
from dht.settings import DhtSettings
from dht.table import RoutingTable
from protocol.endpoint import Endpoint, PeerConnected
from protocol.errors import HandshakeError, PeerUnreachable, ProtocolError, ShoalError
from protocol.identity import PeerId
from protocol.transport import Address

_R = TypeVar("_R")
_MAX_CHORES = 64


class Neighbours:
    """The routing table and the requests that keep it true.

    Args:
        endpoint: How peers are reached.
        settings: Constants.
        rng: For jitter and choices.
    """

    def __init__(self, endpoint: Endpoint, settings: DhtSettings, rng: random.Random) -> None:
        self.table = RoutingTable(endpoint.peer_id, attrs.evolve(settings.table, k=settings.k))
        self.revived = trio.Event()
        """Set when a contact that was lost is back: the network may have healed. To be replaced by who waits for it."""
        self._endpoint = endpoint
        self._settings = settings
        self._rng = rng
        self._anchors: dict[PeerId, tuple[Address, ...]] = {}  # to come back to when all others are lost
        # Small things to do when there is time. If there are too many of them, they are dropped: all come up again.
        self._chores, self._chores_to_do = trio.open_memory_channel[Callable[[], Awaitable[None]]](_MAX_CHORES)
        self._being_checked: set[PeerId] = set()

    async def run(self) -> None:
        """Do chores, watch connections come and go, and ping those who are silent, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.alpha):
                nursery.start_soon(self._do_chores)
            nursery.start_soon(self._watch_connections)
            nursery.start_soon(self._ping_in_turn)

    async def ask(self, contact: Contact, request: object, reply: type[_R]) -> _R | None:
        """One request to one peer, within the time limit, and what the table learns from it. None: no answer."""
        peer = contact.peer
        answer: _R | None = None
        connection = self._endpoint.statistics(peer)
        timeout = self._settings.request_timeout
        if connection is not None:
            timeout += min(2 * connection.rtt, timeout)
        try:
            self._endpoint.learn(peer, *contact.addresses)
            answer = await self._endpoint.request(peer, request, reply, timeout=timeout)
        except ProtocolError as error:
            self.expel(peer, error)
            return None
        except ShoalError:
            pass  # unreachable, gone, silent, unwilling: all the same to us
        if answer is None:
            self.table.failed(peer, trio.current_time())
        else:
            self._heard(peer)
        return answer

    def expel(self, peer: PeerId, error: ProtocolError) -> None:
        """Have nothing more to do with a peer that broke the protocol."""
        self.table.remove(peer)
        self._endpoint.disconnect(peer, str(error))

    def notice(self, peer: PeerId) -> None:
        """A peer has contacted us. If the table can use it, find out whether it answers."""
        if self.table.wants(peer):
            self._check(peer)

    def when_there_is_time(self, chore: Callable[[], Awaitable[None]]) -> bool:
        """Have something done inside `run`, unless there is too much to do already. Returns whether it will be."""
        try:
            self._chores.send_nowait(chore)
        except trio.WouldBlock:
            return False
        return True

    # Joining.

    async def greet(self, contacts: Sequence[tuple[PeerId | None, Address]]) -> int:
        """Contact peers by their addresses and remember them as anchors. See `DHT.bootstrap`."""
        own = self._endpoint
        known: dict[PeerId, tuple[Address, ...]] = {}
        for peer, address in contacts:
            if peer is not None and peer != own.peer_id:
                known[peer] = (*known.get(peer, ()), address)[-MAX_ADDRESSES:]
        unknown = [address for peer, address in contacts if peer is None and address != own.address]
        self._anchors |= known
        targets = [*known.items(), *((None, (address,)) for address in dict.fromkeys(unknown))]
        if not targets:
            return 0
        answered, errors = await self._greet_all(targets)
        if not answered:
            errors.sort(key=lambda error: not isinstance(error, HandshakeError))
            raise PeerUnreachable(
                f"none of {len(targets)} known peers of the swarm could be reached",
                hint="Check the network connection, and that at least one of them is running.",
            ) from (errors[0] if errors else None)
        self._anchors |= answered
        return len(answered)

    async def greet_lost_anchors(self) -> None:
        """Try a few of the anchors that do not answer: a swarm that fell apart grows together again through them."""
        lost = [
            (peer, addresses)
            for peer, addresses in self._anchors.items()
            if (entry := self.table.entry(peer)) is None or not entry.alive
        ]
        await self._greet_all(self._rng.sample(lost, min(len(lost), self._settings.alpha)))

    async def _greet_all(
        self, targets: Sequence[tuple[PeerId | None, tuple[Address, ...]]]
    ) -> tuple[Mapping[PeerId, tuple[Address, ...]], list[ShoalError]]:
        """Contact all at once. Once one has answered, the others have the grace time. Returns those that answered."""
        answered: dict[PeerId, tuple[Address, ...]] = {}
        errors: list[ShoalError] = []

        async def greet(peer: PeerId | None, addresses: tuple[Address, ...]) -> None:
            try:
                found = await self._greet(peer, addresses)
            except ShoalError as error:
                errors.append(error)
                return
            answered[found] = addresses
            scope = nursery.cancel_scope
            scope.deadline = min(scope.deadline, trio.current_time() + self._settings.bootstrap_grace)

        async with trio.open_nursery() as nursery:
            for peer, addresses in targets:
                nursery.start_soon(greet, peer, addresses)
        return answered, errors

    async def _greet(self, peer: PeerId | None, addresses: tuple[Address, ...]) -> PeerId:
        if peer is not None:
            self._endpoint.learn(peer, *addresses)
        found: PeerId | None = None
        with trio.move_on_after(self._settings.connect_timeout):
            found = await self._endpoint.connect(addresses[0] if peer is None else peer)
        if found is None or await self.ask(Contact(found, addresses), Ping(), Pong) is None:
            raise PeerUnreachable(f"no answer from {', '.join(map(str, addresses))}")
        return found

    # Who is there.

    def _heard(self, peer: PeerId) -> None:
        known = self.table.entry(peer)
        self.table.heard(self._contact(peer), trio.current_time(), host=self._endpoint.host(peer))
        if known is not None and not known.alive:
            self.revived.set()

    def _contact(self, peer: PeerId) -> Contact:
        return Contact(peer, self._endpoint.addresses(peer)[:MAX_ADDRESSES])

    def _check(self, peer: PeerId) -> None:
        if peer not in self._being_checked and self.when_there_is_time(partial(self._ping, peer)):
            self._being_checked.add(peer)

    async def _ping(self, peer: PeerId) -> None:
        try:
            await self.ask(self._contact(peer), Ping(), Pong)
        finally:
            self._being_checked.discard(peer)

    async def _do_chores(self) -> None:
        async for chore in self._chores_to_do:
            await chore()

    async def _watch_connections(self) -> None:
        """Notice peers that connect, and those that are lost."""
        while True:
            with self._endpoint.watch() as changes:
                for peer in self._endpoint.connected:
                    self.notice(peer)
                async for change in changes:
                    if isinstance(change, PeerConnected):
                        self.notice(change.peer)
                    elif change.peer in self.table:
                        self._check(change.peer)
            # We could not keep up with the changes: look at who is connected, and go on from there.

    async def _ping_in_turn(self) -> None:
        """Ping those that we have not heard of for longest, dormant ones among them: they may be back."""
        settings = self._settings
        while True:
            await trio.sleep(settings.liveness * self._rng.uniform(0.8, 1.2))
            for contact in self.table.due(trio.current_time(), settings.liveness, settings.alpha):
                self._check(contact.peer)
