"""The errors that Shoal raises on purpose.

Every one of them carries a message that says what happened and to which peer, and may carry a hint that says what to
do about it. Anything else that escapes is a bug.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.identity import PeerId


class ShoalError(Exception):
    """Base of all of Shoal's own errors.

    Args:
        message: What happened, to whom.
        hint: What the reader can do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def first_error(group: BaseExceptionGroup[ShoalError]) -> ShoalError:
    """One of several errors that tasks raised, to stand for all."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ShoalError)
    return error


class SettingsError(ShoalError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(ShoalError):
    """Training data is missing, unreadable, or too small for the run's settings."""


class IdentityError(ShoalError):
    """An identity file is missing, damaged, or readable by others."""


class AddressError(ShoalError):
    """Text that should be HOST:PORT is not, or the address cannot be listened on."""


class PeerUnreachable(ShoalError):
    """No connection to a peer could be made."""


class MappingFailed(ShoalError):
    """A gateway did not map a port for us: it refused, it did not answer, or there is none."""


class HandshakeError(ShoalError):
    """The other side did not complete the handshake: other protocol, wrong swarm key, wrong identity, or too slow."""


class WrongSwarmKey(HandshakeError):
    """The other side has another swarm key: it belongs to another run, or the run's key was rotated."""


class WrongPeer(HandshakeError):
    """The handshake succeeded, but with another peer than the one that was dialled."""


class WrongVersion(HandshakeError):
    """The other side speaks another version of the protocol."""


class ProtocolError(ShoalError):
    """A peer sent bytes or messages that the protocol does not allow. The connection ends."""

    blamed = False
    """The connection to the peer that is to blame has been ended."""


class MessageTooLong(ShoalError):
    """A message is too long to be sent. Nothing was sent, and the connection lives on."""


class PeerGone(ShoalError):
    """The connection to a peer ended while something was waiting for it."""


class IdentityInUse(PeerGone):
    """A peer ended the connection because another daemon with our identity is connected to it, and has proved that."""


class StreamReset(ShoalError):
    """The other side gave up one stream; the connection lives on."""


class StreamEnded(StreamReset):
    """The other side finished a stream, all that it sent was read, and more was expected."""


class RequestRefused(ShoalError):
    """The other side understood a request and declined it.

    Args:
        message: The reason, for people.
        code: The reason, for programs: a short lower-case word such as "unknown_run" or "busy".
    """

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class RequestTimeout(ShoalError):
    """A peer is connected but did not answer in time."""


class Overloaded(ShoalError):
    """A bound was reached: too many streams, connections or bytes in flight."""


class RoundAborted(ShoalError):
    """A round could not be finished, and nobody is known who finished it. The inputs are untouched: try again."""


class Misfit(ShoalError):
    """What we bring to a collective operation does not fit what others bring, so nothing came of it for us.

    Args:
        message: What does not fit, and with whom.
        peers: Those others, as far as they are known.
    """

    def __init__(self, message: str, peers: tuple[PeerId, ...], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.peers = peers


class Behind(ShoalError):
    """Others have finished a round without this peer.

    Args:
        peer: Who holds the result (or something newer).
        revision: The newest revision that is known to be finished there.
    """

    def __init__(self, peer: PeerId, revision: int) -> None:
        super().__init__(
            f"revision {revision} is finished at {peer.short} without us", hint="Fetch its result or the state."
        )
        self.peer = peer
        self.revision = revision


class Fork(ShoalError):
    """Another peer holds a different state of the same revision.

    Args:
        peer: Who.
        revision: The revision of both states.
        ours: Digest of our state; 32 bytes.
        theirs: Digest of the other's state; 32 bytes.
    """

    def __init__(self, peer: PeerId, revision: int, *, ours: bytes, theirs: bytes) -> None:
        super().__init__(f"{peer.short} holds another state of revision {revision} than we do")
        self.peer = peer
        self.revision = revision
        self.ours = ours
        self.theirs = theirs
