"""Training text: read once, held out in part, cut into shards, and sampled.

A corpus is a set of files, each a run of bytes. A `Dataset` cuts the files into pieces of a limited size and lays the
pieces out in an order that follows from the run's seed and each piece's name and offset. The first of them are held
out for validation, the rest is cut into shards of equal size. So held-out text never appears in a training window, a
piece goes to the same place on every machine that has the same files, and to nearly the same place if a few files
differ, as they do between versions of Python.

A shard belongs to the member of the swarm with the lowest hash of shard and peer id: no messages, no overlap, and a
member that comes or goes moves only its own shards.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from peer.settings import DataSettings
from protocol.errors import DataError
from protocol.identity import PeerId

STDLIB = "stdlib"
MAX_BYTES = 1 << 32
"""Corpora are held in memory; larger ones than this are refused rather than half read."""

PROBE_BYTES = 8192
"""A file with a zero byte among its first so many is taken for binary, as git does."""

STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

PIECES_HELD_OUT = 8
"""The held-out part consists of at least about so many pieces, so that it is never a single file."""


@attrs.frozen(eq=False)
class Corpus:
    """The bytes of some text files, one after the other."""

    text: NDArray[np.uint8]
    """All bytes, of type uint8."""

    names: tuple[str, ...]
    """Each file's path below the folder, with forward slashes; empty for a corpus that is a single file."""

    ends: tuple[int, ...]
    """Where each file ends in `text`."""

    skipped: int
    """How many files were left out: binary, or unreadable."""

    @classmethod
    def open(cls, source: str | Path) -> Corpus:
        """Reads a text file, all text files below a folder, or Python's standard library for "stdlib".

        Hidden files and folders, and links to folders, are not followed. Empty files are ignored.

        Raises:
            DataError: There is no such file or folder, no text in it, or more than `MAX_BYTES`.
        """
        if str(source) == STDLIB:
            root = Path(sysconfig.get_paths()["stdlib"])
            paths = [path for path in _walk(root, STDLIB_SKIPPED) if path.suffix == ".py"]
        else:
            root = Path(source)
            if not root.exists():
                raise DataError(f"there is no file or folder {source}", hint="pass a text file, a folder, or stdlib")
            paths = list(_walk(root, frozenset())) if root.is_dir() else [root]
        texts: dict[str, bytes] = {}
        skipped, total = 0, 0
        for path in paths:
            text = _read_text(path)
            if text is None:
                skipped += 1
            elif text:
                total += len(text)
                if total > MAX_BYTES:
                    raise DataError(f"{source} holds more than {MAX_BYTES} bytes of text", hint="pass a part of it")
                texts["" if path == root else path.relative_to(root).as_posix()] = text
        if not texts:
            raise DataError(f"{source} holds no readable text: {_why_no_text(root, skipped)}")
        ends = np.cumsum([len(text) for text in texts.values()])
        joined = np.frombuffer(b"".join(texts.values()), dtype=np.uint8)
        return cls(joined, tuple(texts), tuple(int(end) for end in ends), skipped)


class Dataset:
    """A corpus, split as a run's settings say.

    Args:
        corpus: The text.
        settings: How many shards, and which fraction to hold out.
        seed: The run's seed.
        context: The length of a window, in bytes. A window is one byte longer, for the last target.

    Raises:
        DataError: The text is too small to hold one window in every shard and in the held-out part.
    """

    def __init__(self, corpus: Corpus, settings: DataSettings, *, seed: int, context: int) -> None:
        window = context + 1
        total = len(corpus.text)
        held_out = max(round(total * settings.validation), window)
        needed = held_out + settings.shards * window
        if total < needed:
            raise DataError(
                f"the text is too small: {settings.shards} shards with windows of {window} bytes, and as much as is "
                f"held out, need {needed} bytes, but there are {total}",
                hint="use more text, fewer shards ([data] shards) or a shorter context ([model] context)",
            )
        pieces = sorted(_pieces(corpus, max(held_out // PIECES_HELD_OUT, 4 * window), seed))
        text = np.concatenate([corpus.text[start:stop] for _, start, stop in pieces])
        self.shards = settings.shards
        self._seed = seed
        self._window = window
        self._validation = text[:held_out]
        self._training = text[held_out:]
        self._bounds = np.arange(settings.shards + 1) * len(self._training) // settings.shards

    def owned(self, peer: PeerId, members: Collection[PeerId]) -> tuple[int, ...]:
        """The shards that belong to `peer` when the swarm consists of `members` and `peer`.

        A peer whom the hashes leave without a shard, which happens when there are hardly more shards than members,
        works on all of them: work on shared text is better than none.
        """
        everybody = sorted({*members, peer})
        winners = np.argmin([_claims(member, self.shards) for member in everybody], axis=0)
        mine = np.flatnonzero(winners == everybody.index(peer))
        return tuple(mine.tolist()) or tuple(range(self.shards))

    def training_batches(
        self, peer: PeerId, members: Collection[PeerId], revision: int, batch: int
    ) -> Iterator[torch.Tensor]:
        """Endless batches of random windows from a peer's shards, of shape (batch, context + 1) and type int64.

        The stream follows from the run's seed, the peer and the revision, so two peers never see the same sequence,
        and a peer that rejoins goes on with fresh windows.
        """
        shards = np.array(self.owned(peer, members))
        # Every possible window is equally likely: number them all, draw numbers, then find each one's shard and place.
        counts = self._bounds[shards + 1] - self._bounds[shards] - self._window + 1
        ends = np.cumsum(counts)
        digest = _hash(b"shoal-windows-v1", _number(self._seed), peer, _number(revision))
        random = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
        while True:
            numbers = random.integers(ends[-1], size=batch)
            chosen = np.searchsorted(ends, numbers, side="right")
            places = numbers - (ends - counts)[chosen]
            yield self._windows(self._training, self._bounds[shards[chosen]] + places)

    def microbatch(self, step: int, number: int, size: int) -> torch.Tensor:
        """Windows from all of the training text, of shape (size, context + 1): the same at all who have the same text.

        They follow from the run's seed, the step and the number.
        """
        digest = _hash(b"shoal-microbatch-v1", _number(self._seed), _number(step), _number(number))
        random = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "big")))
        return self._windows(self._training, random.integers(len(self._training) - self._window + 1, size=size))

    def validation_windows(self, count: int) -> torch.Tensor:
        """At most `count` windows, evenly spread over the held-out text, of shape (windows, context + 1), int64.

        They do not overlap; little held-out text makes for fewer windows. The same for the same text and settings.
        """
        room = len(self._validation) - self._window
        count = min(count, len(self._validation) // self._window)
        return self._windows(self._validation, np.linspace(0, room, count).astype(np.int64))

    def _windows(self, text: NDArray[np.uint8], starts: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(text[starts[:, None] + np.arange(self._window)].astype(np.int64))


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Regular files below a folder, in a fixed order."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _why_no_text(root: Path, skipped: int) -> str:
    if not skipped:
        return "it is empty"
    if root.is_dir():
        return f"its files are binary, unreadable or empty (binary or unreadable: {skipped})"
    return "it is binary or unreadable" if root.is_file() else "it is not a regular file"


def _read_text(path: Path) -> bytes | None:
    """A file's bytes, or None if it is unreadable or not text."""
    try:
        # Checked before opening, because to open a named pipe is to wait for a writer.
        if not path.is_file():
            return None
        with path.open("rb") as file:
            head = file.read(PROBE_BYTES)
            return None if b"\0" in head else head + file.read(MAX_BYTES + 1)
    except OSError:
        return None


def _pieces(corpus: Corpus, size: int, seed: int) -> Iterator[tuple[bytes, int, int]]:
    """Pieces of at most `size` bytes: what orders them, and where they lie in the text."""
    begin = 0
    for name, end in zip(corpus.names, corpus.ends, strict=True):
        for start in range(begin, end, size):
            place = name.encode(errors="surrogateescape"), _number(start - begin)
            digest = _hash(b"shoal-piece-v1", _number(seed), *place)
            yield digest, start, min(start + size, end)
        begin = end


def _claims(peer: PeerId, shards: int) -> NDArray[np.uint64]:
    """A peer's hash of each shard; the member with the lowest owns it."""
    return np.frombuffer(hashlib.shake_256(b"shoal-shards-v1" + peer).digest(8 * shards), dtype=">u8")


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _hash(*fields: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for field in fields:
        digest.update(len(field).to_bytes(4, "big") + field)
    return digest.digest()
