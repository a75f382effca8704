"""The handshakes of one endpoint: what it says of itself in them, and what the other side says."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from protocol import wire
from protocol.channel import SecureChannel, handshake
from protocol.errors import HandshakeError, ProtocolError
from protocol.hello import Hello
from protocol.identity import Identity, PeerId
from protocol.keyring import Keyring
from protocol.transport import Address, ByteStream


@attrs.frozen
class Introductions:
    """Makes channels out of streams.

    Args:
        identity: Who we are.
        psk: The run's swarm key, or keys; None for a public run.
        describe: What we say at the moment, given `Hello.dial`, `Hello.seen` and `Hello.probe`.
    """

    _identity: Identity
    _psk: bytes | Keyring | None
    _describe: Callable[[int, Address | None, bool], Hello]

    async def exchange(
        self,
        stream: ByteStream,
        *,
        initiator: bool,
        expected: PeerId | None = None,
        dial: int = 0,
        seen: Address | None = None,
        probe: bool = False,
        opening: bytes | None = None,
    ) -> SecureChannel:
        """Does the handshake; see `channel.handshake`, and `Hello` for what goes along.

        Raises:
            HandshakeError: Also if the other side says something about itself that nobody can understand.
        """
        channel = await handshake(
            stream,
            self._identity,
            initiator=initiator,
            psk=self._psk,
            expected=expected,
            features=wire.encode(self._describe(dial, seen, probe)),
            opening=opening,
        )
        try:
            theirs_of(channel)
        except ProtocolError as error:
            with trio.CancelScope(shield=True):
                await channel.aclose()
            raise HandshakeError(f"{channel.remote} introduced itself wrongly: {error}") from None
        return channel


def theirs_of(channel: SecureChannel) -> Hello:
    """What the other side has said in the handshake.

    Raises:
        ProtocolError: Nobody can understand it.
    """
    return wire.decode(channel.features, [Hello])
