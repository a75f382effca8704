"""Dialling a peer that may have several addresses: all of them, one shortly after the other, and the first wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from protocol.channel import SecureChannel
from protocol.errors import HandshakeError, PeerUnreachable, ShoalError
from protocol.transport import Address

STAGGER = 0.25
"""Seconds that an address gets before the next is tried as well: RFC 8305's connection attempt delay."""


async def first_to_answer(
    addresses: Sequence[Address], attempt: Callable[[Address], Awaitable[SecureChannel]]
) -> tuple[SecureChannel, Address]:
    """The first channel that an attempt makes, and its address. The other attempts are cancelled.

    Args:
        addresses: In the order of preference; at least one.
        attempt: Dials one address, does the handshake, and closes what it opened when it fails or is cancelled.

    Raises:
        HandshakeError: If somebody answered at some address, but no handshake succeeded.
        PeerUnreachable: If nobody answered.
    """
    winner: list[tuple[SecureChannel, Address]] = []
    failures: dict[Address, ShoalError] = {}

    async def try_one(address: Address, failed: trio.Event, everything: trio.CancelScope) -> None:
        try:
            channel = await attempt(address)
        except ShoalError as error:
            failures[address] = error
            failed.set()
            return
        if winner:
            await channel.aclose()
            return
        winner.append((channel, address))
        everything.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                failed = trio.Event()
                nursery.start_soon(try_one, address, failed, nursery.cancel_scope)
                with trio.move_on_after(STAGGER):
                    await failed.wait()
    except BaseException:  # cancelled just when there was a winner: nobody would close it
        with trio.CancelScope(shield=True):
            for channel, _ in winner:
                await channel.aclose()
        raise
    if winner:
        return winner[0]
    raise _summary(failures)


def _summary(failures: Mapping[Address, ShoalError]) -> ShoalError:
    """The most telling of the failures: one handshake that failed says more than ten dials that nobody answered."""
    answered = [error for error in failures.values() if isinstance(error, HandshakeError)]
    if answered:
        return type(answered[0])(str(answered[0]), hint=answered[0].hint)
    return PeerUnreachable("; ".join(str(error) for error in failures.values()))
