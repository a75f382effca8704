"""The committed state of a run, and the chain of digests that vouches for it.

A peer's committed state is the outer state after some revision together with a header. One digest stands for
everything: it hashes the previous digest, the plan that made the revision, the weight accumulated on this branch, and
the Merkle root of the outer state's bytes. Two peers with equal digests hold the same bits and the same history.

States are immutable: a commit makes a new one, so that a snapshot for other peers is only a reference.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import attrs
import torch

from optim import OuterState
from protocol import merkle
from protocol.vectors import vector_bytes

DIGEST_DOMAIN = b"shoal-state-v1"


@attrs.frozen
class Tip:
    """Where a peer's branch ends: its revision, the weight behind it, and its digest."""

    revision: int
    weight: float
    digest: bytes

    def beats(self, other: Tip) -> bool:
        """Whether this branch is preferred to the other: more accumulated weight, then the lower digest.

        Before the digest comes the revision, because a round to which nobody contributed adds no weight, and must not
        send those who committed it back to where they came from.
        """
        mine, theirs = (self.weight, self.revision), (other.weight, other.revision)
        return (*mine, _inverted(self.digest)) > (*theirs, _inverted(other.digest))


def _inverted(digest: bytes) -> bytes:
    return bytes(255 - byte for byte in digest)


@attrs.frozen(kw_only=True)
class Header:
    """What a digest hashes. `weight` is the sum of all contributions' weights since the run was founded, in tokens."""

    run: bytes
    revision: int
    previous: bytes
    plan: bytes
    weight: float
    root: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 over the fields, each of fixed length."""
        fixed = struct.pack(">Qd", self.revision, self.weight)
        return hashlib.sha256(DIGEST_DOMAIN + self.run + fixed + self.previous + self.plan + self.root).digest()

    @property
    def tip(self) -> Tip:
        """The end of the branch that this header closes."""
        return Tip(self.revision, self.weight, self.digest)


@attrs.frozen(eq=False)
class CommittedState:
    """An outer state, the hashes of its 1 MiB ranges, and the header over them."""

    header: Header
    outer: OuterState
    leaves: tuple[bytes, ...]

    @classmethod
    def genesis(cls, run: bytes, outer: OuterState) -> CommittedState:
        """Revision 0: the founder's initial parameters."""
        leaves = _leaves(outer)
        root = merkle.root(leaves)
        header = Header(run=run, revision=0, previous=run, plan=bytes(32), weight=0.0, root=root)
        return cls(header, outer, leaves)

    @classmethod
    def seal(cls, header: Header, outer: OuterState) -> CommittedState | None:
        """The state under a header that came from elsewhere, or None if the bytes do not have the header's root."""
        leaves = _leaves(outer)
        return cls(header, outer, leaves) if merkle.root(leaves) == header.root else None

    def commit(self, outer: OuterState, *, plan: bytes, weight: float) -> CommittedState:
        """The next revision: `outer` made by the plan with this id, whose contributions weigh `weight` in all."""
        leaves = _leaves(outer)
        header = Header(
            run=self.header.run,
            revision=self.header.revision + 1,
            previous=self.header.digest,
            plan=plan,
            weight=self.header.weight + weight,
            root=merkle.root(leaves),
        )
        return CommittedState(header, outer, leaves)

    @property
    def tip(self) -> Tip:
        """Where this state stands."""
        return self.header.tip


def tensors(outer: OuterState) -> list[torch.Tensor]:
    """The state's flat tensors in the order in which they are hashed and sent: parameters, then buffers by name."""
    return [outer.parameters, *(outer.buffers[name] for name in sorted(outer.buffers))]


def byte_length(outer: OuterState) -> int:
    """How many bytes the state's tensors take in all."""
    return sum(tensor.numel() * 4 for tensor in tensors(outer))


def read_range(outer: OuterState, start: int, length: int) -> Iterator[memoryview]:
    """The bytes [start, start + length) of the state's tensors laid end to end, as views."""
    offset = 0
    for tensor in tensors(outer):
        view = vector_bytes(tensor)
        first, last = max(start - offset, 0), min(start + length - offset, len(view))
        if first < last:
            yield view[first:last]
        offset += len(view)


def _leaves(outer: OuterState) -> tuple[bytes, ...]:
    length = byte_length(outer)
    return tuple(
        merkle.leaf(b"".join(read_range(outer, start, merkle.LEAF))) for start in range(0, max(length, 1), merkle.LEAF)
    )
