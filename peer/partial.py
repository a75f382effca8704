"""What has come of a state whose fetch is not over, in memory and, so that a restart can go on from there, in a file.

The file holds the run's id, and then the state as it is hashed and sent, with holes where ranges have not come yet. It
says nothing about itself that would have to be believed, or to be written in some order: a range counts if it has the
hash that is asked for, whatever a crash, or somebody else, has left there, and whatever revision it came for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from optim import OuterState
from peer.state import byte_length, read_range
from protocol import merkle

Compute = Callable[[Callable[[], None]], Awaitable[None]]


async def _at_once(function: Callable[[], None]) -> None:
    function()


class Partial:
    """Ranges that were received for a state that was not completed. Whatever is fetched next need not fetch them anew,
    if they are the same there.

    Args:
        path: The file; None: they are lost with this process.
        run: The run's id.
        compute: Calls a function that takes a while.
    """

    def __init__(self, path: Path | None = None, *, run: bytes = b"", compute: Compute = _at_once) -> None:
        self._path, self._run, self._compute = path, run, compute
        self._fits = True  # on the disk
        self.outer: OuterState | None = None
        self.hashes: dict[int, bytes] = {}
        """Of the ranges that are there, by number."""

    async def begin(self, elements: int, buffers: Collection[str], leaves: Sequence[bytes]) -> OuterState:
        """Where the ranges of a state go. Those that an earlier process has left of it are there already.

        Args:
            elements: The number of the state's parameters, the same each time.
            buffers: The names of its buffers, the same each time.
            leaves: The hashes of its ranges.
        """
        if self.outer is None:
            outer = OuterState(torch.empty(elements), {name: torch.empty(elements) for name in buffers})
            if self._path is not None and self._path.exists():
                await self._compute(partial(self._read, self._path, outer, leaves))
            self.outer = outer  # not before: whoever is cancelled meanwhile has begun nothing
        return self.outer

    async def keep(self, number: int) -> None:
        """A range is there, and others are missing: it is to outlive this process. If the disk is full, it does not."""
        if self._path is not None and self.outer is not None and self._fits:
            await self._compute(partial(self._write, self._path, self.outer, number))

    def clear(self) -> None:
        """Forgets everything."""
        self.outer, self._fits = None, True
        self.hashes.clear()
        if self._path is not None:
            _remove(self._path)

    def _read(self, path: Path, outer: OuterState, leaves: Sequence[bytes]) -> None:
        found: dict[int, bytes] = {}
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
                size, head = os.fstat(file.fileno()).st_size, len(self._run)
                if size != head + byte_length(outer) or file.read(head) != self._run:
                    _remove(path)  # of another run, or another model
                    return
                for number, leaf in enumerate(leaves):
                    start = number * merkle.LEAF
                    views = list(read_range(outer, start, merkle.LEAF))
                    os.preadv(file.fileno(), views, head + start)
                    if merkle.leaf(b"".join(views)) == leaf:
                        found[number] = leaf
        except OSError:
            _remove(path)
        self.hashes.update(found)

    def _write(self, path: Path, outer: OuterState, number: int) -> None:
        start, head = number * merkle.LEAF, len(self._run)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o600), "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_size == 0:
                    file.write(self._run)
                    file.truncate(head + byte_length(outer))
                os.pwritev(file.fileno(), list(read_range(outer, start, merkle.LEAF)), head + start)
        except OSError:
            self._fits = False
            _remove(path)  # others have more use for the room


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
