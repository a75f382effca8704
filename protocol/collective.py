"""What a collective operation gives, and the interface that optimizers see of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import attrs
import torch
from attrs.validators import ge, gt

from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.pairs import Pairing
from protocol.plan import Plan

Buffer: TypeAlias = bytes | bytearray | memoryview
Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""What is averaged or exchanged: tensors of fp32, bf16 or fp16 numbers, of any shapes and on any devices. Their shapes
have to be the same at all members."""

Block: TypeAlias = Buffer | torch.Tensor
"""What is gathered: bytes, or those of a tensor. The size may be another one at each member."""


@attrs.frozen(kw_only=True)
class Window:
    """When all-reduces begin without those who are not ready, for peers that do not wait for the slowest.

    Whoever is late takes part in a later one, and gets the results of those that it has missed with that. The same at
    all members, in all operations of a tag and group.
    """

    quorum: int = attrs.field(default=1, validator=ge(1))
    """How many have to be ready; all who are there if they are fewer. Who is ready waits for them no longer than for
    anybody in an operation without a window: real peers may die, or wait for each other at two different tags."""
    grace: float = attrs.field(default=1.0, validator=gt(0))
    """How many seconds these then wait for the others."""
    keep: int = attrs.field(default=8, validator=ge(1))
    """How many results everybody keeps for those who come late: the most that one may miss in a row."""


@attrs.frozen(kw_only=True, eq=False)
class Outcome:
    """What one operation was: the same at every member of `plan`, but for what it has cost."""

    plan: Plan
    attempts: int
    """How many attempts the operation took, as far as this peer saw it."""
    bytes_sent: int
    """Payload bytes that this peer had sent when it held the result, failed attempts included."""
    bytes_received: int
    seconds: float
    """From this peer's being ready to its holding the result."""
    counted: bool = True
    """Whether what we brought to a reduction or a gather is in the result. It need not be: see `members`."""
    skipped: int = 0
    """How many operations of its tag and group are over since our last result, and we do not know what came of: others
    have finished them without us, or we had given them up. With a window, see `Reduced.missed`."""

    @property
    def number(self) -> int:
        """Which operation of its tag and group it was, from 1."""
        return self.plan.revision

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Those who took part. All others, the caller too if it is not among them, have the result at second hand."""
        return self.plan.members

    @property
    def weights(self) -> tuple[float, ...]:
        """What each member's values counted. Of a gather: 1 for who brought a block, else 0."""
        return self.plan.weights


@attrs.frozen(kw_only=True, eq=False)
class Reduced(Outcome):
    """The result of one round: the same bits at every member of `plan`."""

    mean: torch.Tensor
    """1-D, fp32, CPU: the weighted mean of the contributors' values; zeros if nobody's weight is above 0. Of a round
    that gathers: all blocks one after the other, uint8. Change a copy of it: others may still get it from here."""
    contributors: tuple[PeerId, ...]
    """Members with a weight above 0, in ring order."""
    weight: float
    """Sum of the weights."""
    shapes: tuple[torch.Size, ...] = ()
    """Of the tensors that were averaged."""
    missed: tuple[Reduced, ...] = ()
    """What has come of operations since our last result, if they have a window: of those that others have made without
    us, and of those that we had given up. The oldest first."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The mean in the shapes of what was averaged: fp32 views of `mean`, and not to be changed either."""
        return split(self.mean, self.shapes)


@attrs.frozen(kw_only=True, eq=False)
class Gathered(Outcome):
    """What every member brought."""

    blocks: Mapping[PeerId, memoryview]
    """Of each member that brought one, in ring order."""

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Members that brought a block, be it empty."""
        return tuple(self.blocks)

    def tensors(self, dtype: torch.dtype) -> dict[PeerId, torch.Tensor]:
        """The blocks as vectors of numbers; copies.

        Raises:
            ProtocolError: A block is not made of whole numbers of that type.
        """
        size = torch.empty(0, dtype=dtype).element_size()
        for peer, block in self.blocks.items():
            if len(block) % size:
                raise ProtocolError(f"{peer.short} brought {len(block)} bytes, which are no {dtype} numbers")
        return {
            peer: torch.frombuffer(bytearray(block), dtype=dtype) if block else torch.empty(0, dtype=dtype)
            for peer, block in self.blocks.items()
        }


@attrs.frozen(kw_only=True, eq=False)
class Broadcasted(Outcome):
    """What one member had, and all have now."""

    source: PeerId
    data: memoryview


@attrs.frozen(kw_only=True, eq=False)
class Exchanged(Outcome):
    """What came of an exchange in pairs. Its plan is the same at all members, and so are the pairs."""

    partner: PeerId | None
    """Whom we were matched with; None for the odd one out."""
    values: torch.Tensor | None
    """The partner's vector, 1-D, fp32. None if it did not come: there is no partner, or it was lost, or not finite."""
    ours: torch.Tensor | None
    """Our vector as the partner has it, changed by a lossy codec: so both can compute the same. None as `values` is,
    or if it is not finite."""
    weight: float
    """The partner's weight; 0 without its vector."""
    problem: str
    """Why the partner's vector did not come."""
    shapes: tuple[torch.Size, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None:
        """The partner's values in the shapes of ours; None if they did not come."""
        return None if self.values is None else split(self.values, self.shapes)


class Collective(Protocol):
    """Operations of all peers of a run together. Blocking; called from the training thread.

    Everybody who is there takes part, whoever dies meanwhile. Values are not changed, and not to be changed before the
    operation ends. All take as keywords `group`, the members that take part if it is not all, ourselves among them;
    `tag`, which tells operations apart that run at the same time (those of one tag and group come one after the other);
    and `timeout` in seconds, after which we give up, and the others go on.

    Raises:
        Misfit: Most others bring something else, such as another number of values; or nobody brings the same.
        RoundAborted: Nothing came of it; it may be tried again.
        RequestTimeout: The time is over.
        ValueError: The arguments make no sense.
    """

    def all_reduce(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Collection[PeerId] | None = None,
        tag: str = "",
        timeout: float | None = None,
        window: Window | None = None,
    ) -> Reduced:
        """The mean of all members' values, each counting `weight`, summed in fp32.

        A weight of 0 takes part without contributing, and so do values that are not finite. With a window, values are
        held for the next operation if one ends without them, so they are in the mean that is returned.

        Raises:
            Behind: With a window: the others do not keep all that we have missed.
        """
        ...

    def exchange(
        self,
        values: Tensors,
        weight: float = 1.0,
        *,
        group: Collection[PeerId] | None = None,
        tag: str = "",
        timeout: float | None = None,
        pairing: Pairing = "random",
    ) -> Exchanged:
        """Matches the members in pairs, and swaps values within each. One that dies harms only its partner.

        `pairing`, the same at all members, says who belongs to whom: see `protocol.pairs`.
        """
        ...

    def gather(
        self,
        block: Block | None,
        *,
        group: Collection[PeerId] | None = None,
        tag: str = "",
        timeout: float | None = None,
    ) -> Gathered:
        """Each member's block, at all members. None takes part without bringing one."""
        ...

    def broadcast(
        self,
        block: Block | None,
        *,
        group: Collection[PeerId] | None = None,
        tag: str = "",
        timeout: float | None = None,
    ) -> Broadcasted:
        """The block of a member that has it, or of one of several that have the same; all others call this with None.

        Raises:
            RoundAborted: Nobody who took part has it.
            Misfit: Two have different ones.
        """
        ...

    def barrier(
        self, *, group: Collection[PeerId] | None = None, tag: str = "", timeout: float | None = None
    ) -> Outcome:
        """Returns once all members have called this, or are lost, or have kept the others waiting too long."""
        ...


def split(values: torch.Tensor, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    """A flat vector in the shapes of which it was made. Views."""
    if not shapes:
        return (values,)
    parts = torch.split(values, [shape.numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
