"""How a process reaches the swarm: as a peer of its own, or as one of those of a machine that are a peer together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import attrs
import torch
import torch.distributed as dist

from optim.flat import FlatParameters, Selection, select
from optim.sender import Message, Sender, carry_out
from optim.shards import Span
from optim.slots import AllReduce, Finalizer, Layout, Memory, Mixed, Mixing
from protocol.collective import Collective, Reduced
from protocol.errors import ProtocolError, RoundAborted, SettingsError
from protocol.identity import PeerId
from protocol.vectors import vector_bytes

_T = TypeVar("_T")
_PATIENCE = timedelta(days=1)  # what an exchange of a large model over slow lines may take


class Link(Protocol):
    """How one process reaches the swarm."""

    def mix(self, sender: Sender, message: Message, fragment: Selection, tag: str) -> Mixed:
        """Mixes what this process has of a fragment with the others'.

        Raises:
            ShoalError: The exchange failed.
        """
        ...

    def finish(self, finalizer: Finalizer, parameters: torch.Tensor) -> torch.Tensor:
        """The parameters that the run ends with, as far as this process has them.

        Raises:
            ShoalError: The exchange failed.
        """
        ...

    def mean(self, values: torch.Tensor, weight: float) -> torch.Tensor | None:
        """The peers' mean of one or more vectors like the model, one after the other; None if nobody has anything.

        Raises:
            ShoalError: The exchange failed, or what came does not fit.
        """
        ...

    def digest(self, values: torch.Tensor) -> bytes:
        """SHA-256 over the values of the whole model: the same for a peer of one process and for one of several."""
        ...

    def gather(self, block: bytes, tag: str) -> Mapping[PeerId, bytes]:
        """Everybody's block; of the processes of one peer, that of the first counts.

        Raises:
            ShoalError: The exchange failed.
        """
        ...

    def broadcast(self, values: torch.Tensor, tag: str, *, ours: bool) -> torch.Tensor:
        """The values of the one peer that says `ours`, as far as this process has them.

        Raises:
            ShoalError: The exchange failed, or what came does not fit.
        """
        ...

    def all(self, condition: bool) -> bool:
        """Whether it holds in all processes of this peer."""
        ...

    def same(self, number: float) -> float:
        """The number that the first process of this peer has."""
        ...


class Direct:
    """The link of a process that is a peer by itself."""

    def __init__(self, swarm: Collective, flat: FlatParameters) -> None:
        self._swarm, self._flat = swarm, flat

    def mix(self, sender: Sender, message: Message, fragment: Selection, tag: str) -> Mixed:
        return carry_out(self._swarm, sender.mix(message), tag=tag, shares=sender.shares)

    def finish(self, finalizer: Finalizer, parameters: torch.Tensor) -> torch.Tensor:
        return carry_out(self._swarm, finalizer.finish(parameters, self._flat.slices), tag="finish")

    def mean(self, values: torch.Tensor, weight: float) -> torch.Tensor | None:
        return carry_out(self._swarm, _mean(values, weight), shares=True)

    def digest(self, values: torch.Tensor) -> bytes:
        return _digest(values)

    def gather(self, block: bytes, tag: str) -> Mapping[PeerId, bytes]:
        return _blocks(self._swarm, block, tag)

    def broadcast(self, values: torch.Tensor, tag: str, *, ours: bool) -> torch.Tensor:
        return _broadcast(self._swarm, values, tag, ours)

    def all(self, condition: bool) -> bool:
        return condition

    def same(self, number: float) -> float:
        return number


class Machine:
    """Processes that train one model together with `torch.distributed`, and are one peer of the swarm together.

    The first one talks to the swarm. With FSDP2 (`fully_shard`) each keeps the outer state of its own part of the
    model, and hands that part's values to the first and gets them back; with DistributedDataParallel each keeps all of
    it. To the swarm it looks like any other peer, so machines with different numbers of processes fit together.

    All processes of the group make one, and an optimizer with it, and step together. Only one optimizer uses it.

    Args:
        swarm: In the first process the collective, in the others None.
        group: The processes; if None, all.

    Raises:
        SettingsError: The first process has no swarm, or another one has.
    """

    def __init__(self, swarm: Collective | None, group: dist.ProcessGroup | None = None) -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        """The processes, as `torch.distributed` numbers them. The first talks to the swarm."""
        # Exchanges may go on in a thread while the main one steps: each needs a group of its own.
        self.control, self.bulk = self._group(), self._group()
        """For small things, by the thread that steps; for vectors, by the one that exchanges."""
        self.first = dist.get_rank() == self.ranks[0]
        """Whether this process talks to the swarm."""
        self.swarm = swarm
        if not all(_gathered(self.control, (swarm is not None) == self.first)):
            raise SettingsError("of a machine's processes the first, and no other, is given the swarm")

    def link(self, flat: FlatParameters) -> Link:
        """The link for a model.

        Raises:
            SettingsError: The processes have different models, or not all of one together.
        """
        return _Shared(self, flat)

    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            self.ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=True
        )
        return group


def link_of(swarm: Collective | Machine, flat: FlatParameters) -> Link:
    """The link of this process.

    Raises:
        SettingsError: This process has only a part of the model, and no machine.
    """
    if isinstance(swarm, Machine):
        return swarm.link(flat)
    if flat.slices != flat.whole:
        raise SettingsError("the model is shared among several processes", hint="Wrap the swarm: Machine(swarm).")
    return Direct(swarm, flat)


@attrs.frozen
class _Vector:
    """Stands for a vector in what is told without them; without an index, for the one that was sent."""

    index: int | None


@attrs.frozen
class _Parcel:
    """What came of an exchange, its vectors apart."""

    rest: Any
    vectors: Sequence[torch.Tensor]

    @classmethod
    def packed(cls, mixed: Mixed, sent: torch.Tensor) -> _Parcel:
        """Takes the vectors out."""
        vectors: list[torch.Tensor] = []

        def taken_out(value: object) -> object:
            match value:
                case torch.Tensor() if value is sent:
                    return _Vector(None)
                case torch.Tensor():
                    vectors.append(value)
                    return _Vector(len(vectors) - 1)
                case Mixed():
                    return {field.name: taken_out(getattr(value, field.name)) for field in attrs.fields(Mixed)}
                case tuple():
                    return tuple(taken_out(each) for each in value)
            return value

        return cls(taken_out(mixed), vectors)

    def unpacked(self, sent: torch.Tensor) -> Mixed:
        """Puts the vectors in."""

        def put_in(value: object) -> Any:  # noqa: ANN401  like what was taken out
            match value:
                case _Vector(None):
                    return sent
                case _Vector(int(index)):
                    return self.vectors[index]
                case dict():
                    return Mixed(**{name: put_in(each) for name, each in value.items()})
                case tuple():
                    return tuple(put_in(each) for each in value)
            return value

        mixed: Mixed = put_in(self.rest)
        return mixed


class _Shared:
    """The link of one process of a machine. Vectors are put together, and cut up again, in its first process."""

    def __init__(self, machine: Machine, flat: FlatParameters) -> None:
        self._machine, self._flat = machine, flat
        models = _gathered(machine.control, flat.whole)
        if any(model != models[0] for model in models):
            raise SettingsError("the processes of this machine train different models")
        self._spans: list[tuple[Span, ...]] = _gathered(machine.control, flat.spans)
        self._brings = _brings(flat.whole, self._spans)
        self._index = machine.ranks.index(dist.get_rank())

    def mix(self, sender: Sender, message: Message, fragment: Selection, tag: str) -> Mixed:
        whole = select(self._flat.whole, fragment.places)

        def exchange(swarm: Collective, values: torch.Tensor) -> _Parcel:
            full = attrs.evolve(message, values=values, layout=whole.layout)
            mixed = carry_out(swarm, sender.mix(full), tag=tag, shares=sender.shares)
            memory.append(mixed.memory)
            return _Parcel.packed(attrs.evolve(mixed, memory=None), values)

        memory: list[Memory | None] = []  # of the mixer, which works in the first process
        parcel = self._in_the_first(exchange, message.values, whole)
        count, mixed = self._told(None if parcel is None else (len(parcel.vectors), parcel.rest))
        vectors: Sequence[torch.Tensor | None] = [None] * count if parcel is None else parcel.vectors
        parts = [self._handed_out(vector, message.values, whole) for vector in vectors]
        result = _Parcel(mixed, parts).unpacked(message.values)
        return attrs.evolve(result, memory=memory[0] if memory else None)

    def finish(self, finalizer: Finalizer, parameters: torch.Tensor) -> torch.Tensor:
        whole = select(self._flat.whole, range(len(self._flat.whole)))

        def end(swarm: Collective, values: torch.Tensor) -> torch.Tensor:
            return carry_out(swarm, finalizer.finish(values, self._flat.whole), tag="finish")

        return self._handed_out(self._in_the_first(end, parameters, whole), parameters, whole)

    def mean(self, values: torch.Tensor, weight: float) -> torch.Tensor | None:
        whole = select(self._flat.whole, range(len(self._flat.whole)))

        def average(swarm: Collective, full: torch.Tensor) -> tuple[torch.Tensor | None]:
            return (carry_out(swarm, _mean(full, weight), shares=True),)

        (mean,) = self._in_the_first(average, values, whole) or (None,)
        if not self._told(mean is not None):
            return None
        return self._handed_out(mean, values, whole)

    def digest(self, values: torch.Tensor) -> bytes:
        full = self._collected(values, select(self._flat.whole, range(len(self._flat.whole))))
        return self._told(b"" if full is None else _digest(full))

    def gather(self, block: bytes, tag: str) -> Mapping[PeerId, bytes]:
        def gather(swarm: Collective) -> Mapping[PeerId, bytes]:
            return _blocks(swarm, block, tag)

        return self._told(self._attempted(gather))

    def broadcast(self, values: torch.Tensor, tag: str, *, ours: bool) -> torch.Tensor:
        whole = select(self._flat.whole, range(len(self._flat.whole)))

        def broadcast(swarm: Collective, full: torch.Tensor) -> torch.Tensor:
            return _broadcast(swarm, full, tag, ours)

        return self._handed_out(self._in_the_first(broadcast, values, whole), values, whole)

    def all(self, condition: bool) -> bool:
        return all(_gathered(self._machine.control, condition))

    def same(self, number: float) -> float:
        return float(_gathered(self._machine.control, number)[0])

    def _in_the_first(
        self, work: Callable[[Collective, torch.Tensor], _T], values: torch.Tensor, whole: Selection
    ) -> _T | None:
        """What the first process makes of the values of all; None in the others. If it fails, it does in all."""
        full = self._collected(values, whole)
        return self._attempted(lambda swarm: work(swarm, cast(torch.Tensor, full)))

    def _attempted(self, work: Callable[[Collective], _T]) -> _T | None:
        """What the first process makes; None in the others. If it fails, it does in all."""
        if self._machine.swarm is None:
            failure: str = self._told(None)
            if failure:
                raise RoundAborted(f"the exchange of this machine failed: {failure}")
            return None
        try:
            result = work(self._machine.swarm)
        except Exception as error:
            self._told(str(error) or type(error).__name__)
            raise
        self._told("")
        return result

    def _told(self, what: _T | None) -> _T:
        """What the first process says."""
        box = [what]
        dist.broadcast_object_list(box, src=self._machine.ranks[0], group=self._machine.bulk)
        return cast(_T, box[0])

    def _collected(self, values: torch.Tensor, whole: Selection) -> torch.Tensor | None:
        """The values of a fragment as a lone process would have them, in the first process."""
        bulk, first = self._machine.bulk, self._machine.ranks[0]
        rows = max(_gathered(bulk, self._rows(values, whole)))
        if self._index > 0:
            ours = self._cut(values, self._index, whole.places, rows)
            brought = [part for place, part in ours.items() if place in self._brings[self._index]]
            if sum(part.numel() for part in brought):
                dist.send(torch.cat(brought, dim=1).flatten(), first, group=bulk)
            return None
        full = torch.empty(rows, whole.layout[-1].stop)
        self._put(full, self._cut(values, 0, whole.places, rows), 0, whole)
        for index, rank in enumerate(self._machine.ranks[1:], 1):
            places = [place for place in whole.places if place in self._brings[index]]
            received = torch.empty(rows * sum(self._sizes(index, places)))
            if len(received):
                dist.recv(received, rank, group=bulk)
                self._put(full, self._cut(received, index, places, rows), index, whole)
        return full.flatten()

    def _handed_out(self, full: torch.Tensor | None, like: torch.Tensor, whole: Selection) -> torch.Tensor:
        """This process's part of the first one's vector."""
        bulk, ranks = self._machine.bulk, self._machine.ranks
        if full is None:
            ours = torch.empty_like(like)
            if len(ours):
                dist.recv(ours, ranks[0], group=bulk)
            return ours
        full = full.view(-1, whole.layout[-1].stop)
        for index, rank in enumerate(ranks[1:], 1):
            theirs = self._taken(full, index, whole)
            if len(theirs):
                dist.send(theirs, rank, group=bulk)
        return self._taken(full, 0, whole)

    def _rows(self, values: torch.Tensor, whole: Selection) -> int:
        """How many values are exchanged for each of the model's; 0 if we have none."""
        size = sum(self._sizes(self._index, whole.places))
        return len(values) // size if size else 0

    def _cut(self, values: torch.Tensor, index: int, places: Sequence[int], rows: int) -> dict[int, torch.Tensor]:
        """A process's values by tensor."""
        sizes = self._sizes(index, places)
        return dict(zip(places, torch.split(values.view(rows, sum(sizes)), sizes, dim=1), strict=True))

    def _put(self, full: torch.Tensor, parts: Mapping[int, torch.Tensor], index: int, whole: Selection) -> None:
        targets = self._places(index, whole)
        for place, part in parts.items():
            start, stop = targets[place]
            full[:, start:stop] = part

    def _taken(self, full: torch.Tensor, index: int, whole: Selection) -> torch.Tensor:
        return torch.cat([full[:, start:stop] for start, stop in self._places(index, whole).values()], dim=1).flatten()

    def _places(self, index: int, whole: Selection) -> dict[int, tuple[int, int]]:
        """Where in a fragment the values lie that a process has of each tensor."""
        spans = self._spans[index]
        return {
            place: (slice_.start + spans[place].start, slice_.start + spans[place].stop)
            for place, slice_ in zip(whole.places, whole.layout, strict=True)
        }

    def _sizes(self, index: int, places: Sequence[int]) -> list[int]:
        return [self._spans[index][place].stop - self._spans[index][place].start for place in places]


def _brings(layout: Layout, spans: Sequence[Sequence[Span]]) -> list[set[int]]:
    """Of which tensors each process hands on what it has: of processes that have the same, the first one does."""
    brings: list[set[int]] = [set() for _ in spans]
    for place, tensor in enumerate(layout):
        first: dict[Span, int] = {}
        for index, theirs in enumerate(spans):
            first.setdefault(theirs[place], index)
        if sum(span.stop - span.start for span in first) != tensor.stop - tensor.start:
            raise SettingsError(f"the processes of this machine do not have all of parameter {tensor.name} together")
        for index in first.values():
            brings[index].add(place)
    return brings


def _mean(values: torch.Tensor, weight: float) -> Mixing[torch.Tensor | None]:
    """The peers' mean; None if nobody has anything."""
    reduced = yield AllReduce(values, weight)
    assert isinstance(reduced, Reduced)
    if reduced.mean.shape != values.shape:
        raise ProtocolError(f"the swarm's mean has {len(reduced.mean)} values, not {len(values)}")
    return reduced.mean if reduced.contributors else None


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.sha256(vector_bytes(values)).digest()


def _blocks(swarm: Collective, block: bytes, tag: str) -> Mapping[PeerId, bytes]:
    return {peer: bytes(theirs) for peer, theirs in swarm.gather(block, tag=tag).blocks.items()}


def _broadcast(swarm: Collective, values: torch.Tensor, tag: str, ours: bool) -> torch.Tensor:
    sent = swarm.broadcast(values if ours else None, tag=tag)
    if len(sent.data) != 4 * len(values):
        raise ProtocolError(f"{sent.source.short} sent {len(sent.data)} bytes, not {len(values)} values")
    return torch.frombuffer(bytearray(sent.data), dtype=torch.float32)


def _gathered(group: dist.ProcessGroup, what: _T) -> list[_T]:
    """What each process of a group says, in order."""
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, what, group=group)
    return everybody
