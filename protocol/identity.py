"""Who a peer is: an Ed25519 key pair, and the peer id that is its name.

A peer id is the SHA-256 of the public key under a fixed prefix, so it can be checked against a key and says nothing
else. Whatever a peer signs is signed under a domain, and every field goes in with its length, so that a signature
made for one purpose never means something in another.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from protocol.errors import IdentityError

PEER_ID_SIZE = 32
PUBLIC_KEY_SIZE = 32
SIGNATURE_SIZE = 64

_PEER_ID_PREFIX = b"shoal-peer-v1"
_SIGNATURE_PREFIX = b"shoal"
_TEXT_LENGTH = 52  # 256 bits in base32, 5 bits a character
_SHORT_LENGTH = 8
_MAX_FILE_SIZE = 4096  # our own file is 119 bytes; anything much larger is something else


class PeerId(bytes):
    """The name of a peer: SHA-256(b"shoal-peer-v1" || public key), 32 raw bytes.

    Args:
        raw: The 32 bytes.

    Raises:
        ValueError: `raw` has another length.
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Self:
        if len(raw) != PEER_ID_SIZE:
            raise ValueError(f"a peer id has {PEER_ID_SIZE} bytes, not {len(raw)}")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, public_key: bytes) -> Self:
        """The id of the peer that holds this Ed25519 public key (32 raw bytes)."""
        if len(public_key) != PUBLIC_KEY_SIZE:
            raise ValueError(f"a public key has {PUBLIC_KEY_SIZE} bytes, not {len(public_key)}")
        return cls(hashlib.sha256(_PEER_ID_PREFIX + public_key).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str()` wrote.

        Raises:
            ValueError: the text is not a peer id: 52 lower-case base32 characters.
        """
        try:
            peer_id = cls(base64.b32decode(text.upper() + "===="))
        except ValueError:
            peer_id = None
        # The comparison refuses upper case, and text whose last four spare bits are not zero.
        if peer_id is None or str(peer_id) != text:
            raise ValueError(f"not a peer id ({_TEXT_LENGTH} characters a-z and 2-7): {text[:80]!r}")
        return peer_id

    @property
    def short(self) -> str:
        """The first 8 characters of the text form, for people."""
        return str(self)[:_SHORT_LENGTH]

    def __str__(self) -> str:
        return base64.b32encode(self).decode("ascii").rstrip("=").lower()

    def __repr__(self) -> str:
        return f"PeerId({str(self)!r})"


class Identity:
    """The key pair of one peer. Made by `generate`, `from_seed`, `load` or `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id = PeerId.of(self.public_key)

    @classmethod
    def generate(cls) -> Self:
        """A new identity from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The identity that belongs to 32 bytes of secret: for tests and simulations, where runs must repeat."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an identity file.

        Raises:
            IdentityError: there is none, it is no identity file, or others may read it.
        """
        text = _read_private(Path(path))
        try:
            key = load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _damaged(path) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _damaged(path)
        return cls(key)

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Self:
        """Read an identity file, or make a new identity and write it there with mode 0600.

        An existing file is never overwritten, whatever is in it. Of several processes that create the same file at
        once one wins, and all return its identity.

        Raises:
            IdentityError: as `load`, or the file cannot be written.
        """
        path = Path(path)
        if not os.path.lexists(path):
            identity = cls.generate()
            if _write_private(path, identity._pem()):
                return identity
        return cls.load(path)

    def sign(self, domain: str, *fields: bytes) -> bytes:
        """Sign `fields` for the purpose `domain`; 64 bytes. See `verify`."""
        return self._key.sign(_signed_bytes(domain, fields))

    def _pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id.short})"


def verify(public_key: bytes, signature: bytes, domain: str, *fields: bytes) -> bool:
    """Whether `signature` was made by the holder of `public_key` over just these fields for this purpose.

    Malformed keys and signatures are simply not valid.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed_bytes(domain, fields))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(domain: str, fields: tuple[bytes, ...]) -> bytes:
    name = domain.encode()
    parts = [_SIGNATURE_PREFIX, len(name).to_bytes(2, "big"), name]
    for field in fields:
        parts += (len(field).to_bytes(4, "big"), field)
    return b"".join(parts)


def _damaged(path: str | os.PathLike[str]) -> IdentityError:
    return IdentityError(
        f"{path} is not an identity file",
        hint="Restore it from a backup, or move it away: a peer with a new identity will be made.",
    )


def _read_private(path: Path) -> bytes:
    """The contents of a regular file that nobody but its owner can read or change."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        reason = "is a symbolic link to nothing" if path.is_symlink() else "does not exist"
        raise IdentityError(f"identity file {path} {reason}") from error
    except OSError as error:
        raise IdentityError(f"cannot read identity file {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path} is not a regular file, so it cannot be an identity file")
        if os.name == "posix" and status.st_mode & 0o077:
            raise IdentityError(
                f"identity file {path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
                hint=f"chmod 600 {path}",
            )
        contents = os.read(descriptor, _MAX_FILE_SIZE + 1)
    except OSError as error:
        raise IdentityError(f"cannot read identity file {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(contents) > _MAX_FILE_SIZE:
        raise _damaged(path)
    return contents


def _write_private(path: Path, contents: bytes) -> bool:
    """Create the file with mode 0600, complete or not at all. False if something of that name exists by now."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(descriptor)
            # A hard link, unlike a rename, fails if the name is taken.
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
    except OSError as error:
        raise IdentityError(
            f"cannot write identity file {path}: {error.strerror}",
            hint="Free some space there."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "The folder must exist, be writable, and lie on a file system with hard links.",
        ) from error
    return True
