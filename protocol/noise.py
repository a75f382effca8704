"""The Noise handshakes Noise_XX_25519_AESGCM_SHA256 and Noise_XXpsk3_25519_AESGCM_SHA256.

From "The Noise Protocol Framework", revision 34 (noiseprotocol.org); section numbers below refer to it. No input,
output, clock or randomness in here: the caller brings keys and carries messages.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import HandshakeError, ProtocolError

KEY_SIZE = 32
TAG_SIZE = 16

_MAX_NONCE = 2**64 - 1
_INTO = hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into")  # cryptography >= 47

_FORGED = "bytes arrived that the peer did not encrypt for us"

# Section 7.5 and 9.4. The initiator sends the first and the third message.
_XX = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
_XX_PSK3 = (*_XX[:2], (*_XX[2], "psk"))


class CipherState:
    """A key and the number of the next message (section 5.1).

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = AESGCM(key)
        self._nonce = 0

    def encrypt(self, plaintext: bytes, associated_data: bytes = b"") -> bytes:
        """The ciphertext, `TAG_SIZE` bytes longer than the plaintext."""
        ciphertext = self._aead.encrypt(self._nonce_bytes(), plaintext, associated_data)
        self._nonce += 1
        return ciphertext

    def encrypt_into(self, plaintext: bytes | bytearray | memoryview, buffer: memoryview) -> None:
        """As `encrypt`, into a buffer of just the ciphertext's length."""
        if _INTO:
            self._aead.encrypt_into(self._nonce_bytes(), plaintext, None, buffer)
        else:
            buffer[:] = self._aead.encrypt(self._nonce_bytes(), plaintext, None)
        self._nonce += 1

    def decrypt(self, ciphertext: bytes | bytearray | memoryview, associated_data: bytes = b"") -> bytes:
        """The plaintext.

        Raises:
            ProtocolError: the ciphertext is not what the holder of the key encrypted as this message. The state has
                not changed.
        """
        try:
            plaintext = self._aead.decrypt(self._nonce_bytes(), ciphertext, associated_data)
        except InvalidTag:
            raise ProtocolError(_FORGED) from None
        self._nonce += 1
        return plaintext

    def decrypt_into(self, ciphertext: bytes | bytearray | memoryview, buffer: memoryview) -> None:
        """As `decrypt`, into a buffer of just the plaintext's length. What it holds after an error is undefined."""
        if not _INTO:
            buffer[:] = self.decrypt(ciphertext)
            return
        try:
            self._aead.decrypt_into(self._nonce_bytes(), ciphertext, None, buffer)
        except InvalidTag:
            raise ProtocolError(_FORGED) from None
        self._nonce += 1

    def rekey(self) -> None:
        """Replace the key by one that follows from it, and go on counting (section 4.2)."""
        self._key = self._aead.encrypt(_nonce_bytes(_MAX_NONCE), bytes(KEY_SIZE), None)[:KEY_SIZE]
        self._aead = AESGCM(self._key)

    def _nonce_bytes(self) -> bytes:
        if self._nonce >= _MAX_NONCE:
            raise ProtocolError("a key was used for too many messages")
        return _nonce_bytes(self._nonce)


_nonce_bytes = struct.Struct(">4xQ").pack  # section 12.4


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    """Section 4.3."""
    secret = hmac.digest(chaining_key, material, "sha256")
    result: list[bytes] = []
    previous = b""
    for number in range(1, outputs + 1):
        previous = hmac.digest(secret, previous + bytes([number]), "sha256")
        result.append(previous)
    return result


def derive_ciphers(secret: bytes, context: bytes) -> tuple[CipherState, CipherState]:
    """Ciphers for both directions of something that belongs to a session, that of the initiator first.

    Args:
        secret: What `Handshake.export` returned.
        context: What it is for; never the same twice.
    """
    first, second = _hkdf(secret, context, 2)
    return CipherState(first), CipherState(second)


class _SymmetricState:
    """What both sides have said so far, as a hash and as a key (section 5.2)."""

    def __init__(self, protocol_name: bytes) -> None:
        self.hash = (
            protocol_name.ljust(32, b"\0") if len(protocol_name) <= 32 else hashlib.sha256(protocol_name).digest()
        )
        self._chaining_key = self.hash
        self._cipher: CipherState | None = None

    def mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, material, 2)
        self._cipher = CipherState(key)

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key_and_hash(self, material: bytes) -> None:
        self._chaining_key, mixed, key = _hkdf(self._chaining_key, material, 3)
        self.mix_hash(mixed)
        self._cipher = CipherState(key)

    @property
    def overhead(self) -> int:
        return TAG_SIZE if self._cipher else 0

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = self._cipher.encrypt(plaintext, self.hash) if self._cipher else plaintext
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plaintext = self._cipher.decrypt(ciphertext, self.hash) if self._cipher else ciphertext
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = _hkdf(self._chaining_key, b"", 2)
        return CipherState(first), CipherState(second)

    def export(self) -> bytes:
        return _hkdf(self._chaining_key, b"", 3)[2]


class Handshake:
    """One side of one handshake (section 5.3): three messages, the initiator's first, then `split`.

    Args:
        initiator: Whether this is the side that dialled.
        static: Our long-term key.
        ephemeral: A fresh key that is used for nothing else.
        prologue: What both sides must agree on; if they don't, the handshake fails.
        psk: 32 bytes that both sides know, or None for a handshake without.
    """

    def __init__(
        self,
        initiator: bool,
        static: X25519PrivateKey,
        ephemeral: X25519PrivateKey,
        prologue: bytes,
        psk: bytes | None = None,
    ) -> None:
        if psk is not None and len(psk) != KEY_SIZE:
            raise ValueError(f"a pre-shared key has {KEY_SIZE} bytes, not {len(psk)}")
        self._initiator = initiator
        self._static = static
        self._ephemeral = ephemeral
        self.psk = psk
        """Another one of 32 bytes may take its place until the third message."""
        self._remote_ephemeral: bytes = b""
        self.remote_static: bytes = b""
        """The other side's static public key, 32 bytes once it has arrived."""
        modifier = b"" if psk is None else b"psk3"
        self._symmetric = _SymmetricState(b"Noise_XX" + modifier + b"_25519_AESGCM_SHA256")
        self._symmetric.mix_hash(prologue)
        self._messages = list(_XX if psk is None else _XX_PSK3)
        self._our_turn = initiator

    @property
    def finished(self) -> bool:
        """Whether all three messages are through."""
        return not self._messages

    @property
    def hash(self) -> bytes:
        """A hash over all that was said, the same on both sides; unique to this session once finished."""
        return self._symmetric.hash

    def write_message(self, payload: bytes) -> bytes:
        """The next message, to be sent to the other side.

        Raises:
            HandshakeError: the other side's key is one of the few for which every shared secret is zero.
            RuntimeError: it is the other side's turn.
        """
        parts = [self._write_token(token) for token in self._next_message(writing=True)]
        parts.append(self._symmetric.encrypt_and_hash(payload))
        return b"".join(parts)

    def read_message(self, data: bytes) -> bytes:
        """Take the other side's next message and return its payload.

        Raises:
            HandshakeError: it is not a valid message of this handshake. The handshake cannot go on.
            RuntimeError: it is our turn.
        """
        rest = data
        try:
            for token in self._next_message(writing=False):
                rest = self._read_token(token, rest)
            return self._symmetric.decrypt_and_hash(rest)
        except ProtocolError as error:
            raise HandshakeError("a handshake message does not fit what was said before") from error

    def split(self) -> tuple[CipherState, CipherState]:
        """The ciphers for what we send and for what we receive, once finished."""
        if not self.finished:
            raise RuntimeError("the handshake is not finished")
        first, second = self._symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def export(self) -> bytes:
        """A secret of this session, 32 bytes, from which other keys may be derived, once finished.

        It is the output of HKDF that follows those of `split`: it tells nothing about them, nor they about it.
        """
        if not self.finished:
            raise RuntimeError("the handshake is not finished")
        return self._symmetric.export()

    def _next_message(self, *, writing: bool) -> tuple[str, ...]:
        if self.finished or writing != self._our_turn:
            raise RuntimeError("it is not this side's turn in the handshake")
        self._our_turn = not self._our_turn
        return self._messages.pop(0)

    def _write_token(self, token: str) -> bytes:
        match token:
            case "e":
                public = self._ephemeral.public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                return public
            case "s":
                return self._symmetric.encrypt_and_hash(self._static.public_key().public_bytes_raw())
            case _:
                self._mix_secret(token)
                return b""

    def _read_token(self, token: str, data: bytes) -> bytes:
        match token:
            case "e":
                self._remote_ephemeral, rest = _take(data, KEY_SIZE)
                self._mix_ephemeral(self._remote_ephemeral)
                return rest
            case "s":
                sealed, rest = _take(data, KEY_SIZE + self._symmetric.overhead)
                self.remote_static = self._symmetric.decrypt_and_hash(sealed)
                return rest
            case _:
                self._mix_secret(token)
                return data

    def _mix_ephemeral(self, public: bytes) -> None:
        self._symmetric.mix_hash(public)
        if self.psk is not None:  # section 9.2
            self._symmetric.mix_key(public)

    def _mix_secret(self, token: str) -> None:
        match token, self._initiator:
            case "psk", _:
                assert self.psk is not None
                self._symmetric.mix_key_and_hash(self.psk)
            case "ee", _:
                self._mix_exchange(self._ephemeral, self._remote_ephemeral)
            case ("es", True) | ("se", False):
                self._mix_exchange(self._ephemeral, self.remote_static)
            case ("es", False) | ("se", True):
                self._mix_exchange(self._static, self._remote_ephemeral)

    def _mix_exchange(self, private: X25519PrivateKey, public: bytes) -> None:
        try:
            secret = private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # the shared secret is zero: a point of low order
            raise HandshakeError("the other side sent a public key that gives no secret") from error
        self._symmetric.mix_key(secret)


def _take(data: bytes, size: int) -> tuple[bytes, bytes]:
    if len(data) < size:
        raise HandshakeError("a handshake message is too short")
    return data[:size], data[size:]
