"""A peer's home: the directory that holds its identity, what it has learned, and its checkpoints.

    identity.key   who this peer is (0600)             status.json    what the daemon does now
    swarm.key      key of a private run founded here   ticket         a ticket for the run, to invite others
    manifest.toml  the run that this home belongs to   book.json      peers that were met, to find back
    checkpoints/   the latest states                   crash.log      tracebacks of bugs
    rotation       what `shoal rotate-key` orders      rotated.json   the swarm key since it was rotated
    port           where the last daemon listened     partial        what has come of a state being fetched
    lock           held by the daemon that uses it

One daemon at a time uses a home. The lock is the kernel's (flock): it cannot outlive its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.errors import ShoalError
from protocol.forks import not_for_children
from protocol.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY_SIZE: Final = 32


class HomeError(ShoalError):
    """The home directory, or a file in it, cannot be used."""


class CheckpointError(ShoalError):
    """A checkpoint cannot be written or read."""


class CheckpointNotSaved(CheckpointError):
    """A checkpoint cannot be written: nothing that was given is wrong."""


class HomeInUse(HomeError):
    """Another daemon uses the home."""


class Home:
    """The home at `path`; the directory is created with mode 0700 if it is not there, unless `create` is False.

    Attributes:
        path, checkpoints, partial, status, manifest, book, port, ticket, rotation, rotated, crash_log: Where things
            are. Only `path` and the directory `checkpoints` are sure to exist.

    Raises:
        HomeError: It cannot be created, is no directory, belongs to somebody else, or others may write to it.
    """

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path).expanduser().absolute()
        self.checkpoints = self.path / "checkpoints"
        self.partial = self.path / "partial"
        self.status = self.path / "status.json"
        self.manifest = self.path / "manifest.toml"
        self.book = self.path / "book.json"
        self.port = self.path / "port"
        self.ticket = self.path / "ticket"
        self.rotation = self.path / "rotation"
        self.rotated = self.path / "rotated.json"
        self.crash_log = self.path / "crash.log"
        self._lock = self.path / "lock"
        self._swarm_key = self.path / "swarm.key"
        self._identity: Identity | None = None
        self._locked = False
        if create:
            with _explained(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.check_owner()
            with _explained(self.checkpoints):
                self.checkpoints.mkdir(mode=0o700, exist_ok=True)

    @property
    def identity(self) -> Identity:
        """This peer's identity, made at the first use.

        Raises:
            IdentityError: `identity.key` is damaged, or others may read it.
        """
        if self._identity is None:
            self._identity = Identity.load_or_create(self.path / "identity.key")
        return self._identity

    def swarm_key(self) -> bytes:
        """The key (32 bytes) of the private run that was founded in this home, made at the first use.

        Raises:
            HomeError: `swarm.key` is damaged or cannot be written.
        """
        with _explained(self._swarm_key):
            try:
                key = self._swarm_key.read_bytes()
            except FileNotFoundError:
                key = secrets.token_bytes(_KEY_SIZE)
                write_atomically(self._swarm_key, key)
        if len(key) != _KEY_SIZE:
            raise HomeError(f"{self._swarm_key} is damaged: it has {len(key)} bytes, not {_KEY_SIZE}")
        return key

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other daemons out for the length of a `with` block. It may be taken again inside of that block.

        Raises:
            HomeInUse: A daemon is in; the message names its process id.
            HomeError: The lock file cannot be written.
        """
        if self._locked:
            yield
            return
        with _explained(self._lock):
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        not_for_children(file)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise HomeInUse(
                    f"{self.path} is in use by the daemon with process id {holder}",
                    hint="stop that daemon, or use another --home",
                ) from error
            with _explained(self._lock):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self._locked = True
            yield
        finally:
            self._locked = False
            fcntl.flock(file, fcntl.LOCK_UN)  # for children too that have it all the same
            file.close()  # and stays on the disk, so that nobody locks an unlinked one

    def is_locked(self) -> bool:
        """Whether a daemon uses this home now."""
        try:
            with self._lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def check_owner(self) -> None:
        """Whoever can write here can put another identity in place, so nobody else may.

        Raises:
            HomeError: Somebody else may, or there is no such directory.
        """
        with _explained(self.path):
            status = self.path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise HomeError(f"{self.path} is not a directory")
        if status.st_uid not in (os.geteuid(), 0):
            raise HomeError(f"{self.path} belongs to another user", hint="use another --home")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HomeError(f"others may write to {self.path}", hint=f"chmod go-w {self.path}")


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` with a file (mode 0600) that holds `data`; whatever happens, the old or the new one is there.

    Raises:
        OSError: The directory cannot be written to, or the disk is full. The old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns the system's errors about `path` into one line of ours."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise HomeError(f"{path} cannot be used: a file is in the way", hint="use another --home") from error
    except PermissionError as error:
        raise HomeError(
            f"{path} cannot be used: permission denied", hint="use another --home, or change its owner"
        ) from error
    except OSError as error:
        raise HomeError(f"{path} cannot be used: {error.strerror}", hint="use another --home") from error
