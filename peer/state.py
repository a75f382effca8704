"""The committed state of a run.

A peer's committed state is the outer state after some revision together with the history that vouches for it, see
`peer.chain`. States are immutable: a commit makes a new one, so that a snapshot for other peers is only a reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from optim import OuterState
from peer.chain import Header, Link, Tip
from peer.history import History
from protocol import merkle
from protocol.vectors import vector_bytes
from protocol.weights import SignedWeight

NO_ROOT = bytes(32)
"""In a history, stands for states of which each peer has its own."""


@attrs.frozen(eq=False)
class CommittedState:
    """An outer state, the hashes of its 1 MiB ranges, and its history.

    With some methods each peer has an outer state of its own. Then peers have the history in common, and nothing else.
    """

    history: History
    outer: OuterState
    leaves: tuple[bytes, ...]

    @classmethod
    def genesis(cls, run: bytes, outer: OuterState) -> CommittedState:
        """Revision 0: the founder's initial parameters."""
        leaves = _leaves(outer)
        return cls(History((Header.genesis(run, merkle.root(leaves)),)), outer, leaves)

    @classmethod
    def seal(cls, history: History, outer: OuterState, *, own_root: bytes = NO_ROOT) -> CommittedState | None:
        """The state with a history that came from elsewhere, or None if the bytes do not have the right root.

        That is the one in the history, or `own_root` if it says that each peer has its own state.
        """
        leaves = _leaves(outer)
        root = own_root if history.header.root == NO_ROOT else history.header.root
        return cls(history, outer, leaves) if merkle.root(leaves) == root else None

    def commit(
        self, outer: OuterState, *, plan: bytes, contributions: Sequence[SignedWeight], own: bool = False
    ) -> CommittedState:
        """The next revision: `outer` made by the plan with this id from these contributions.

        Args:
            outer: The state.
            plan: The plan's id.
            contributions: In the order of the plan's members.
            own: The state is ours alone.
        """
        leaves = _leaves(outer)
        link = Link(plan, NO_ROOT if own else merkle.root(leaves), tuple(contributions))
        return CommittedState(self.history.extended([link]), outer, leaves)

    @property
    def root(self) -> bytes:
        """The root of the hashes."""
        return merkle.root(self.leaves)

    @property
    def header(self) -> Header:
        """The newest header of its history."""
        return self.history.header

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
