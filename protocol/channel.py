"""The secure channel: a handshake that proves who is at the other end, then encrypted records.

The bytes are described in docs/protocol.md. Sans-IO parts are in `noise` and `records`; here they meet a stream and
the clock.
"""

from __future__ import annotations

import contextlib

import attrs
import trio
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protocol.errors import HandshakeError, PeerGone, ProtocolError, WrongPeer, WrongSwarmKey, WrongVersion
from protocol.identity import PUBLIC_KEY_SIZE, SIGNATURE_SIZE, Identity, PeerId, verify
from protocol.keyring import Keyring, prove, proved
from protocol.noise import KEY_SIZE, CipherState, Handshake
from protocol.records import RecordReader, RecordWriter
from protocol.transport import Address, Buffer, ByteStream, LineState, PacedStream

VERSION = 1
HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which the other side must complete the handshake."""

MAX_FEATURES = 2048
"""Bytes of the caller's own that go along in the handshake, at most."""

_MAGIC = b"shoal"
_PREAMBLE_SIZE = 8  # magic, version, flags, status
_PRIVATE = 1  # flag: this side has a swarm key
# Status, in the responder's preamble; the last one: the second of the initiator's keys is the one that we share.
_ACCEPTED, _WRONG_KEY, _SECOND_KEY = 0, 1, 2
LANE_OPENING = _MAGIC + bytes([VERSION, 2, 0])
"""What comes first on a lane (see `lane`) in the place of a preamble."""

_PROLOGUE = b"shoal-channel-v1"
_SIGNATURE = "channel-static-key-v1"
_MAX_HANDSHAKE_MESSAGE = 4096
_LINGER = 1.0  # seconds that a refusing responder waits for the dialler to read why
_LINGER_BYTES = 16_384

_PIECE = 1 << 16  # bytes

_SWARM_KEY_HINT = "Check that both peers use a ticket of the same run."
_ROTATED_HINT = "If the run's key was changed, ask somebody in the run for a fresh ticket: `shoal ticket`."


async def handshake(
    stream: ByteStream,
    identity: Identity,
    *,
    initiator: bool,
    psk: bytes | Keyring | None = None,
    expected: PeerId | None = None,
    features: bytes = b"",
    opening: bytes | None = None,
) -> SecureChannel:
    """Find out who is at the other end of a new connection, and encrypt it from then on.

    The stream belongs to the channel, or is closed if there will be none.

    Args:
        stream: The connection, nothing sent or received yet.
        identity: Who we are.
        initiator: Whether we dialled.
        psk: The run's swarm key, 32 bytes, or those that are good now, or None for a public run. A side without any of
            them learns nothing but that there is one.
        expected: Who it must be; None takes anybody.
        features: Up to `MAX_FEATURES` bytes for the other side. In a public run, whoever dials us can read them.
        opening: What the other side sent first, if the caller has received that: see `lanes.greet`.

    Raises:
        WrongPeer: it is somebody else than `expected`.
        WrongVersion: it speaks another version of the protocol.
        WrongSwarmKey: it has another swarm key.
        HandshakeError: the other side speaks another protocol, has no swarm key, cannot prove its identity, or took
            longer than `HANDSHAKE_TIMEOUT`. The message says which.
    """
    if len(features) > MAX_FEATURES:
        raise ValueError(f"features have at most {MAX_FEATURES} bytes, not {len(features)}")
    keys = psk.keys if isinstance(psk, Keyring) else () if psk is None else (psk,)
    session = _Session(stream, identity, initiator, keys, expected, features, opening)
    channel: SecureChannel | None = None
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT):
            channel = await (session.initiate() if initiator else session.respond())
    except trio.TooSlowError:
        raise HandshakeError(
            f"{stream.remote} did not complete the handshake within {HANDSHAKE_TIMEOUT:.0f} s"
        ) from None
    except PeerGone as error:
        raise HandshakeError(f"{stream.remote} broke off the handshake: {error}") from error
    finally:
        if channel is None:
            with trio.CancelScope(shield=True):
                await stream.aclose()
    return channel


async def receive_exactly(stream: ByteStream, size: int) -> bytes:
    """So many bytes of a handshake, and no more.

    Raises:
        HandshakeError: The connection ended before.
        PeerGone: It broke.
    """
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = await stream.receive_into(rest)
        if count == 0:
            raise HandshakeError(f"{stream.remote} closed the connection during the handshake")
        rest = rest[count:]
    return bytes(data)


class SecureChannel:
    """An encrypted connection to a peer that has proved who it is. Made by `handshake`.

    One task may send and one may receive at the same time.
    """

    def __init__(
        self,
        stream: ByteStream,
        ciphers: tuple[CipherState, CipherState],
        secret: bytes,
        peer: Introduction,
        *,
        sent: int,
        received: int,
        rtt: float,
        swarm_key: bytes | None,
    ) -> None:
        self.peer_id = PeerId.of(peer.public_key)
        self.public_key = peer.public_key
        self.features = peer.features
        """What the other side gave as `features`."""
        self.swarm_key = swarm_key
        """The swarm key that both sides went by; None in a public run."""
        self.bytes_sent = sent
        """Bytes on the wire so far, with the handshake and all overhead of ours."""
        self.bytes_received = received
        self.rtt = rtt
        """Seconds from our first message to the answer, which the other side had to compute."""
        self.secret = secret
        """What both sides know and nobody else does, for deriving other keys; see `noise.Handshake.export`."""
        self.introduction = peer
        self._stream = stream
        self._paced = stream if isinstance(stream, PacedStream) else None
        sending, receiving = ciphers
        self._writer = RecordWriter(sending)
        self._reader = RecordReader(receiving)
        self._writing = False

    @property
    def remote(self) -> Address:
        """The other end's address; see `ByteStream.remote`."""
        return self._stream.remote

    async def send(self, *plaintexts: Buffer) -> None:
        """Send one record for each plaintext, all in one write. Each has at most `records.MAX_PLAINTEXT` bytes.

        If this is cancelled while bytes are on their way, the channel is of no more use for sending.

        Raises:
            PeerGone: the connection is broken or closed, or an earlier send was interrupted.
            ValueError: a plaintext is too long; nothing was sent.
        """
        # A cancellation that is already pending must not cost the channel.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._writing:
            raise PeerGone(f"the connection to {self._name} is unusable: a write to it was interrupted")
        sealed = self._writer.seal(*plaintexts)
        # The flag stays up if the write does not return: how much of a record left is unknown then.
        self._writing = True
        if self._paced is not None:
            await self._stream.send(sealed)
            self.bytes_sent += len(sealed)
        else:  # a stream that cannot be measured: in pieces, so that `taken` shows whether it moves
            for start in range(0, len(sealed), _PIECE):
                piece = sealed[start : start + _PIECE]
                await self._stream.send(piece)
                self.bytes_sent += len(piece)
        self._writing = False

    async def receive(self) -> bytes:
        """The plaintext of the next record.

        Raises:
            PeerGone: the connection is broken or closed, or it ended.
            ProtocolError: something arrived that the peer did not send, or not now.
        """
        # Before a record is taken, so that none is lost. No full checkpoint: rescheduling for every small record costs
        # more than decrypting it, and the reader's buffer bounds how many there can be in a row.
        await trio.lowlevel.checkpoint_if_cancelled()
        while (record := self.take()) is None:
            await self.fill()
        return record

    def take(self) -> bytes | None:
        """The plaintext of the next record if it has arrived, else None: `fill` gets more.

        Raises:
            ProtocolError: as `receive`.
        """
        try:
            return self._reader.next_record()
        except ProtocolError as error:
            raise ProtocolError(f"from {self._name}: {error}") from error

    def take_into(self, target: memoryview) -> int:
        """Writes the plaintexts of the next records to a buffer, as far as they have arrived and fit in.

        Returns the number of bytes. If it is 0, the next record may still be there for `take`: see `RecordReader.fill`.

        Raises:
            ProtocolError: as `receive`.
        """
        try:
            return self._reader.fill(target)
        except ProtocolError as error:
            raise ProtocolError(f"from {self._name}: {error}") from error

    async def fill(self) -> None:
        """Wait for more bytes to arrive. Only when `take` has returned None.

        Raises:
            PeerGone: as `receive`.
        """
        count = await self._stream.receive_into(self._reader.space())
        if count == 0:
            where = " in the middle of a record" if self._reader.pending else ""
            raise PeerGone(f"{self._name} closed the connection{where}")
        self.bytes_received += count
        self._reader.received(count)

    def measure(self) -> LineState | None:
        """See `PacedStream.measure`."""
        return None if self._paced is None else self._paced.measure()

    @property
    def taken(self) -> int:
        """Bytes that have arrived at the other side, where that is known, else have been sent; from any count."""
        line = self.measure()
        return self.bytes_sent if line is None else line.acked

    def pace(self, rate: float, unsent: int) -> None:
        """See `PacedStream.pace`."""
        if self._paced is not None:
            self._paced.pace(rate, unsent)

    def release(self) -> None:
        """Give back memory that is kept for large writes and reads: none are expected soon."""
        self._writer.release()
        self._reader.release()

    async def aclose(self) -> None:
        """Close the connection. May be called again."""
        await self._stream.aclose()

    @property
    def _name(self) -> str:
        return f"peer {self.peer_id.short} at {self.remote}"


@attrs.frozen
class Introduction:
    """What a side says about itself in the handshake."""

    public_key: bytes
    features: bytes


@attrs.define
class _Session:
    """One run of the handshake."""

    _stream: ByteStream
    _identity: Identity
    _initiator: bool
    _keys: tuple[bytes, ...]
    _expected: PeerId | None
    _features: bytes
    _opening: bytes | None
    _static: X25519PrivateKey = attrs.field(factory=X25519PrivateKey.generate, init=False)
    _ephemeral: X25519PrivateKey = attrs.field(factory=X25519PrivateKey.generate, init=False)
    _sent: int = attrs.field(default=0, init=False)
    _received: int = attrs.field(default=0, init=False)

    async def initiate(self) -> SecureChannel:
        noise = self._noise()
        proof = prove(self._keys, self._ephemeral.public_key().public_bytes_raw())
        asked = trio.current_time()
        await self._send(self._preamble() + _framed(noise.write_message(proof)))
        theirs = await self._receive(_PREAMBLE_SIZE)
        rtt = trio.current_time() - asked
        self._check_preamble(theirs)
        if theirs[-1] == _WRONG_KEY:
            raise self._wrong_swarm_key()
        if self._keys:
            noise.psk = self._keys[1 if theirs[-1] == _SECOND_KEY else 0]
        peer = self._introduced(noise, self._read(noise, await self._receive_framed()))
        # Nobody but the expected peer learns who we are.
        if self._expected is not None and PeerId.of(peer.public_key) != self._expected:
            raise self._wrong_peer(peer)
        await self._send(_framed(noise.write_message(self._introduction())))
        return self._channel(noise, peer, rtt)

    async def respond(self) -> SecureChannel:
        theirs = self._opening
        if theirs is None:
            theirs = await self._receive(_PREAMBLE_SIZE)
        else:
            self._received += len(theirs)
        try:
            self._check_preamble(theirs)
        except HandshakeError:
            if theirs.startswith(_MAGIC):  # strangers get no answer
                await self._refuse(_ACCEPTED)
            raise
        noise = self._noise()
        message = await self._receive_framed()
        proof = self._read(noise, message)
        # Without this the second message would tell anybody who we are: the key itself enters only the third.
        found = proved(self._keys, proof, message[:KEY_SIZE])
        if found is None:
            await self._refuse(_WRONG_KEY)
            raise self._wrong_swarm_key()
        noise.psk, place = found
        status = _SECOND_KEY if place else _ACCEPTED
        asked = trio.current_time()
        await self._send(self._preamble(status) + _framed(noise.write_message(self._introduction())))
        message = await self._receive_framed()
        rtt = trio.current_time() - asked
        peer = self._introduced(noise, self._read(noise, message))
        if self._expected is not None and PeerId.of(peer.public_key) != self._expected:
            raise self._wrong_peer(peer)
        return self._channel(noise, peer, rtt)

    def _channel(self, noise: Handshake, peer: Introduction, rtt: float) -> SecureChannel:
        return SecureChannel(
            self._stream,
            noise.split(),
            noise.export(),
            peer,
            sent=self._sent,
            received=self._received,
            rtt=rtt,
            swarm_key=noise.psk,
        )

    def _noise(self) -> Handshake:
        prologue = _PROLOGUE + self._preamble()
        psk = self._keys[0] if self._keys else None
        return Handshake(self._initiator, self._static, self._ephemeral, prologue, psk)

    def _preamble(self, status: int = _ACCEPTED) -> bytes:
        return _MAGIC + bytes([VERSION, _PRIVATE if self._keys else 0, status])

    def _check_preamble(self, theirs: bytes) -> None:
        remote = self._stream.remote
        version, flags, status = theirs[len(_MAGIC) :]
        if not theirs.startswith(_MAGIC):
            raise HandshakeError(f"{remote} speaks another protocol than Shoal's")
        if version != VERSION:
            raise WrongVersion(
                f"{remote} speaks version {version} of Shoal's protocol, and we speak version {VERSION}",
                hint="Update the older of the two.",
            )
        if flags & ~_PRIVATE or status > self._highest_status():
            raise HandshakeError(f"{remote} sent a preamble that version {VERSION} does not know: {theirs.hex()}")
        if flags and not self._keys:
            raise HandshakeError(f"{remote} asks for a swarm key, and we have none", hint=_SWARM_KEY_HINT)
        if not flags and self._keys:
            raise HandshakeError(f"{remote} has no swarm key, and our run needs one", hint=_SWARM_KEY_HINT)

    def _highest_status(self) -> int:
        """What the other side may answer: nothing if it dialled, and no choice if we have none to offer."""
        if not self._initiator:
            return _ACCEPTED
        return _SECOND_KEY if len(self._keys) > 1 else _WRONG_KEY

    def _introduction(self) -> bytes:
        role = _role(self._initiator)
        signature = self._identity.sign(_SIGNATURE, role, self._static.public_key().public_bytes_raw())
        return self._identity.public_key + signature + self._features

    def _introduced(self, noise: Handshake, payload: bytes) -> Introduction:
        public_key = payload[:PUBLIC_KEY_SIZE]
        signature = payload[PUBLIC_KEY_SIZE : PUBLIC_KEY_SIZE + SIGNATURE_SIZE]
        features = payload[PUBLIC_KEY_SIZE + SIGNATURE_SIZE :]
        if not verify(public_key, signature, _SIGNATURE, _role(not self._initiator), noise.remote_static):
            raise HandshakeError(f"{self._stream.remote} could not prove its identity")
        if len(features) > MAX_FEATURES:
            raise HandshakeError(f"{self._stream.remote} sent {len(features)} bytes of features: too many")
        return Introduction(public_key, features)

    def _read(self, noise: Handshake, message: bytes) -> bytes:
        try:
            return noise.read_message(message)
        except HandshakeError as error:
            raise HandshakeError(f"the handshake with {self._stream.remote} failed: {error}") from error

    def _wrong_swarm_key(self) -> WrongSwarmKey:
        message = f"{self._stream.remote} has another swarm key than we"
        return WrongSwarmKey(message, hint=f"{_SWARM_KEY_HINT} {_ROTATED_HINT}")

    def _wrong_peer(self, peer: Introduction) -> WrongPeer:
        found = PeerId.of(peer.public_key)
        return WrongPeer(f"{self._stream.remote} has another identity: it is peer {found}, not {self._expected}")

    async def _refuse(self, status: int) -> None:
        """Answer with our preamble, and give the other side the time to read it.

        Closing while bytes of theirs are unread would make TCP throw our answer away.
        """
        scrap = memoryview(bytearray(_LINGER_BYTES))
        # If they don't wait for it, why we refuse is still what matters.
        with contextlib.suppress(PeerGone), trio.move_on_after(_LINGER):
            await self._send(self._preamble(status))
            while scrap and (count := await self._stream.receive_into(scrap)):
                scrap = scrap[count:]

    async def _send(self, data: bytes) -> None:
        await self._stream.send(data)
        self._sent += len(data)

    async def _receive(self, size: int) -> bytes:
        """Just `size` bytes: the stream goes on where the handshake ends."""
        self._received += size
        return await receive_exactly(self._stream, size)

    async def _receive_framed(self) -> bytes:
        size = int.from_bytes(await self._receive(2), "big")
        if size > _MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError(f"{self._stream.remote} sent a handshake message of {size} bytes: too long")
        return await self._receive(size)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


def _role(initiator: bool) -> bytes:
    return b"initiator" if initiator else b"responder"
