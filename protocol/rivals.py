"""Two daemons with one identity, as when somebody copies a home and runs both: only one of them can be that peer.

A peer to which one of them is connected keeps it while it lives. When the other one comes, it asks the one that it has
to vouch for itself: to sign, with the identity's key, that it is there besides the newcomer. If that comes in time, the
newcomer is told to go, and given the signature. Otherwise the newcomer is the same daemon, started anew after its
machine died without a word, and takes the place.

So nobody but a living copy can make a daemon believe that there is one. Whoever has been shown that, and is taken in by
nobody for a while, has no place in the swarm: `Rivals.outcome`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated

import attrs
import trio
from msgspec import Meta

from protocol.channel import SecureChannel
from protocol.connection import Connection
from protocol.errors import IdentityInUse, RequestRefused, ShoalError
from protocol.identity import SIGNATURE_SIZE, Identity, verify
from protocol.links import Link, Links
from protocol.stream import Stream
from protocol.wire import message

PATIENCE = 10.0
"""Seconds after which a daemon gives up that has a living copy and is taken in by nobody: as long as a dial takes."""

_ANSWER_BEATS = 2.0  # heartbeats: fewer than after which the newcomer, which hears nothing meanwhile, gives us up
_DOMAIN = "identity-vouch-v1"
_HINT = "stop one of the two daemons, or give this one a home of its own; a copy of a home is the same peer"

Instance = Annotated[bytes, Meta(min_length=8, max_length=8)]


@message("identity.vouch")
class Vouch:
    """Asks a daemon to sign that it is there besides another one with its identity."""

    newcomer: Instance
    """The other one's instance, see `Hello`."""


@message("identity.vouched")
class Vouched:
    """The answer."""

    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """Over the newcomer's instance and the signer's own."""


@attrs.frozen
class Rival:
    """The daemon that a newcomer with the same identity has to give way to."""

    reason: str
    """For people."""
    evidence: bytes
    """Its instance, and its signature."""


class Rivals:
    """An endpoint's part in this: between two of which one is to stay, and as one of two.

    Args:
        identity: Ours.
        instance: Which of all daemons with this identity we are.
        links: The endpoint's connections.
        heartbeat: Seconds between pings.
    """

    def __init__(self, identity: Identity, instance: bytes, links: Links, heartbeat: float) -> None:
        self._identity = identity
        self._instance = instance
        self._links = links
        self._timeout = _ANSWER_BEATS * heartbeat
        self.refusal: IdentityInUse | None = None
        """The first proven one since we were last taken in by somebody who is gone."""
        self._refused_at = 0.0
        self._refused = trio.Event()

    def register(self, handle: Callable[..., None]) -> None:
        """Registers the handler; `handle` is `Endpoint.handle`."""
        handle(Vouch, self._on_vouch)

    # Between two.

    async def of(self, channel: SecureChannel, newcomer: bytes) -> Rival | None:
        """Who has the place of a peer that has just completed the handshake, if another daemon with its identity has.

        Ends the connection to one that is there no more. Closes the channel when cancelled. No checkpoint unless there
        is another one.

        Args:
            channel: The newcomer's.
            newcomer: Its instance.
        """
        try:
            while (link := self._links.get(channel.peer_id)) is not None and link.theirs.instance != newcomer:
                rival = await self._vouched(link, newcomer)
                if rival is not None:
                    return rival
                link.connection.close("another daemon with your identity has come, and you did not answer in time")
        except BaseException:
            with trio.CancelScope(shield=True):
                await channel.aclose()
            raise
        return None

    async def _vouched(self, link: Link, newcomer: bytes) -> Rival | None:
        """Whether the other end of a connection proves in time that it lives."""
        connection = link.connection
        with trio.move_on_after(self._timeout), contextlib.suppress(ShoalError):
            async with await connection.open() as stream:
                await stream.send(Vouch(newcomer))
                signature = (await stream.receive(Vouched)).signature
            living = link.theirs.instance
            if verify(connection.channel.public_key, signature, _DOMAIN, newcomer, living):
                where = "through a relay" if link.relayed else f"from {connection.channel.remote.host}"
                return Rival(f"another daemon with this identity is connected, {where}", living + signature)
        return None

    # As one of two.

    async def _on_vouch(self, request: Vouch, stream: Stream) -> Vouched:
        if request.newcomer == self._instance:
            raise RequestRefused("that is this very daemon", code="same")
        return Vouched(self._identity.sign(_DOMAIN, request.newcomer, self._instance))

    def ended(self, connection: Connection) -> None:
        """A connection has ended, and is still among the links if it was in use."""
        link = self._links.get(connection.peer)
        if connection.evidence:
            if self._proves(connection.evidence):
                if self.refusal is None:
                    self.refusal, self._refused_at = IdentityInUse(str(connection.failure)), trio.current_time()
                self._refused.set()
        elif link is not None and link.connection is connection and link.heard:
            self.refusal = None  # we were somebody's peer until now

    @property
    def verdict(self) -> IdentityInUse | None:
        """What to end with, if a living copy of us has been proven, and nobody takes us in. Else None."""
        if self.refusal is None or self._links.any_heard():
            return None
        return IdentityInUse(str(self.refusal), hint=_HINT)

    async def outcome(self) -> IdentityInUse:
        """Waits until there has been a verdict for a while, and returns it."""
        while True:
            await self._refused.wait()
            self._refused = trio.Event()
            while self.verdict is not None:
                if trio.current_time() >= self._refused_at + PATIENCE:
                    return self.verdict
                await trio.sleep_until(self._refused_at + PATIENCE)

    def _proves(self, evidence: bytes) -> bool:
        living, signature = evidence[:-SIGNATURE_SIZE], evidence[-SIGNATURE_SIZE:]
        if living == self._instance:
            return False
        return verify(self._identity.public_key, signature, _DOMAIN, self._instance, living)
