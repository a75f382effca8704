"""Dialling a peer that may have several addresses: all of them, one shortly after the other, and the first wins.

Relays get their turn when all addresses have failed, or had a head start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import trio

from protocol.channel import SecureChannel
from protocol.errors import HandshakeError, PeerUnreachable, ShoalError
from protocol.identity import PeerId
from protocol.transport import Address, Path

Route: TypeAlias = Address | PeerId
"""An address to dial, or a peer to go through."""

STAGGER = 0.25
"""Seconds that an address gets before the next is tried as well: RFC 8305's connection attempt delay."""

HEAD_START = 1.0
"""Seconds that the addresses get before relays are tried: whoever drops connections silently would take ten."""


class Dial:
    """A dial in progress, for all who wait for it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.peer: PeerId | None = None
        self.error: ShoalError | None = None
        self.answered = False  # a handshake is complete


async def first_to_answer(
    addresses: Sequence[Address],
    attempt: Callable[[Route], Awaitable[SecureChannel]],
    *,
    relays: Sequence[PeerId] = (),
) -> tuple[SecureChannel, Route]:
    """The first channel that an attempt makes, and its route. The other attempts are cancelled.

    Args:
        addresses: In the order of preference.
        attempt: Takes one route, does the handshake, and closes what it opened when it fails or is cancelled.
        relays: Peers to go through, in the order of preference. There is one route at least.

    Raises:
        HandshakeError: If somebody answered at some address, but no handshake succeeded.
        PeerUnreachable: If nobody answered.
    """
    winner: list[tuple[SecureChannel, Route]] = []
    failures: dict[Route, ShoalError] = {}

    async def try_one(route: Route, failed: trio.Event, everything: trio.CancelScope) -> None:
        try:
            channel = await attempt(route)
        except ShoalError as error:
            failures[route] = error
            failed.set()
            return
        if winner:
            await channel.aclose()
            return
        winner.append((channel, route))
        everything.cancel()

    async def try_in_turn(routes: Sequence[Route], nursery: trio.Nursery) -> list[trio.Event]:
        events = []
        for route in routes:
            failed = trio.Event()
            events.append(failed)
            nursery.start_soon(try_one, route, failed, nursery.cancel_scope)
            with trio.move_on_after(STAGGER):
                await failed.wait()
        return events

    try:
        async with trio.open_nursery() as nursery:
            failed = await try_in_turn(addresses, nursery)
            with trio.move_on_after(HEAD_START):
                for event in failed if relays else ():
                    await event.wait()
            await try_in_turn(relays, nursery)
    except BaseException:  # cancelled just when there was a winner: nobody would close it
        with trio.CancelScope(shield=True):
            for channel, _ in winner:
                await channel.aclose()
        raise
    if winner:
        return winner[0]
    raise _summary(failures)


def path_of(route: Route | None, mapped: Address | None) -> Path:
    """How a connection goes, by the route that was dialled and the address that the dialled side's router maps."""
    if isinstance(route, PeerId):
        return "relayed"
    return "mapped" if route is not None and route == mapped else "direct"


def _summary(failures: Mapping[Route, ShoalError]) -> ShoalError:
    """The most telling of the failures: one handshake that failed says more than ten dials that nobody answered."""
    answered = [error for error in failures.values() if isinstance(error, HandshakeError)]
    if answered:
        return type(answered[0])(str(answered[0]), hint=answered[0].hint)
    said = [str(error) for route, error in failures.items() if isinstance(route, Address)]
    if len(said) < len(failures):
        said.append(f"none of {len(failures) - len(said)} connected peers relays to it")
    return PeerUnreachable("; ".join(said))
