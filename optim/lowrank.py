"""Matrices as products of two thin ones, averaged one after the other."""

from __future__ import annotations

import math

import attrs
import torch
from attrs.validators import ge, le

from optim.exact import orthonormal, outer_product, tree_sum
from optim.mixers import share_of
from optim.slots import AllReduce, Layout, Memory, Mixed, Mixing
from protocol.collective import Reduced
from protocol.errors import ProtocolError

MAX_WINDOW = 10
"""Exchanges whose effective ranks are remembered, at most: the smallest matrix with factors has room for so many."""


@attrs.frozen
class LowRankMean:
    """The mean of rank-r approximations, in two all-reduces (PowerSGD, Vogels et al., arXiv 1905.13727).

    P = mean(Mᵢ·Q), made orthonormal; then Q = mean(Mᵢᵀ·P), and the mean is P·Qᵀ. Q goes on from exchange to exchange:
    it follows the directions that matter. Tensors that this would not make half as small travel as they are, with P.

    Use it with error feedback; what the others understand of ours is P·(Mᵢᵀ·P)ᵀ.
    """

    rank: int = attrs.field(validator=ge(1))

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        first = reduced = yield AllReduce(self.first(values, layout, round, memory), weight)
        memory = self.between(_mean_of(reduced), layout, memory)
        if self.has_matrices(layout):
            reduced = yield AllReduce(self.second(values, layout, memory), weight)
            memory = self.after(_mean_of(reduced), layout, memory)
        assert isinstance(first, Reduced) and isinstance(reduced, Reduced)
        share = min(share_of(first, weight), share_of(reduced, weight))
        mean, own = self.mean(layout, memory), self.own(values, layout, memory)
        memory = settled(memory)
        return Mixed(mean=mean, own=own, members=reduced.contributors, share=share, memory=memory)

    # One after the other, for those to whom the two operations are two exchanges.

    def at(self, memory: Memory) -> LowRankMean:
        """With the rank of the exchange that goes on from this memory."""
        return self

    def load(self, memory: Memory) -> float:
        """How much that exchange sends, as a share of the first one."""
        return 1.0

    def has_matrices(self, layout: Layout) -> bool:
        """Whether there is anything that this makes smaller."""
        return bool(self._sorted(layout)[1])

    def first(self, values: torch.Tensor, layout: Layout, round: int, memory: Memory) -> torch.Tensor:
        """What the first all-reduce is about: tensors as they are, and Mᵢ·Q."""
        whole, matrices = self._sorted(layout)
        memory = self.resized(memory)
        factors = [self._factor(memory, start, columns, round) for start, _, columns in matrices]
        products = [matrix @ factor for matrix, factor in zip(self._matrices(values, layout), factors, strict=True)]
        return _joined([*(values[start:stop] for start, stop in whole), *products])

    def between(self, mean: torch.Tensor, layout: Layout, memory: Memory) -> Memory:
        """What all know after it."""
        whole, matrices = self._sorted(layout)
        sizes = [*((stop - start,) for start, stop in whole), *((rows, self.rank) for _, rows, _ in matrices)]
        parts = _divided(mean, sizes)
        plain = {f"plain {start}": part for (start, _), part in zip(whole, parts, strict=False)}
        lefts = zip(matrices, parts[len(whole) :], strict=True)
        return {**memory, **plain, **{f"side {start}": orthonormal(left) for (start, _, _), left in lefts}}

    def second(self, values: torch.Tensor, layout: Layout, memory: Memory) -> torch.Tensor:
        """What the second one is about: Mᵢᵀ·P."""
        return _joined(self._rights(values, layout, memory))

    def after(self, mean: torch.Tensor, layout: Layout, memory: Memory) -> Memory:
        """What all know after that."""
        matrices = self._sorted(layout)[1]
        rights = _divided(mean, [(columns, self.rank) for _, _, columns in matrices])
        return {**memory, **{f"factor {start}": right for (start, _, _), right in zip(matrices, rights, strict=True)}}

    def mean(self, layout: Layout, memory: Memory) -> torch.Tensor:
        """The mean, after both of them."""
        return self._product(layout, memory, [memory[f"factor {start}"] for start, _, _ in self._sorted(layout)[1]])

    def own(self, values: torch.Tensor, layout: Layout, memory: Memory) -> torch.Tensor:
        """What the others understand of ours."""
        own = self._product(layout, memory, self._rights(values, layout, memory))
        for start, stop in self._sorted(layout)[0]:
            own[start:stop] = values[start:stop]
        return own

    def is_whole(self, layout: Layout) -> torch.Tensor:
        """Of each value, whether it travels as it is, in the first all-reduce."""
        found = torch.zeros(layout[-1].stop, dtype=torch.bool)
        for start, stop in self._sorted(layout)[0]:
            found[start:stop] = True
        return found

    def _matrices(self, values: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        places = self._sorted(layout)[1]
        return [values[start : start + rows * columns].view(rows, columns) for start, rows, columns in places]

    def _rights(self, values: torch.Tensor, layout: Layout, memory: Memory) -> list[torch.Tensor]:
        sides = [memory[f"side {start}"] for start, _, _ in self._sorted(layout)[1]]
        return [matrix.T @ side for matrix, side in zip(self._matrices(values, layout), sides, strict=True)]

    def _product(self, layout: Layout, memory: Memory, rights: list[torch.Tensor]) -> torch.Tensor:
        whole, matrices = self._sorted(layout)
        result = torch.empty(layout[-1].stop)
        for start, stop in whole:
            result[start:stop] = memory[f"plain {start}"]
        for (start, rows, columns), right in zip(matrices, rights, strict=True):
            result[start : start + rows * columns] = outer_product(memory[f"side {start}"], right).flatten()
        return result

    def _sorted(self, layout: Layout) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Where tensors lie that travel as they are, and where matrices do, with their rows and columns."""
        whole, matrices = [], []
        for place in layout:
            size = place.stop - place.start
            columns = place.shape[-1] if len(place.shape) > 1 and size else 0
            rows = size // columns if columns else 0
            if columns and 2 * self.rank * (rows + columns) < size:
                matrices.append((place.start, rows, columns))
            else:
                whole.append((place.start, place.stop))
        return whole, matrices

    def resized(self, memory: Memory) -> Memory:
        """What was remembered with another rank: columns too many are left out, those that lack are zero."""
        changed = dict(memory)
        for name, factor in memory.items():
            if name.startswith("factor "):
                lacking = torch.zeros(len(factor), max(0, self.rank - factor.shape[1]))
                changed[name] = torch.cat([factor[:, : self.rank], lacking], dim=1)
        return changed

    def fits(self, name: str, values: torch.Tensor, layout: Layout) -> bool:
        """Whether it could have remembered this: one of the factors."""
        columns = self.columns(layout).get(name)
        return values.dim() == 2 and tuple(values.shape) == (columns, self.rank)

    def columns(self, layout: Layout) -> dict[str, int]:
        """The matrices' columns, by the names of their factors."""
        return {f"factor {start}": columns for start, _, columns in self._sorted(layout)[1]}

    def _factor(self, memory: Memory, start: int, columns: int, round: int) -> torch.Tensor:
        """That of the last exchange. A column that it did not need is zero, would remain so, and is drawn anew."""
        factor = memory.get(f"factor {start}", torch.zeros(columns, self.rank))
        idle = factor.abs().amax(dim=0) == 0
        return torch.where(idle, self._first(start + round - 1, columns), factor) if bool(idle.any()) else factor

    def _first(self, start: int, columns: int) -> torch.Tensor:
        return torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(start))


@attrs.frozen
class AdaptiveLowRankMean:
    """As `LowRankMean`, of a rank that follows what the means need, up to r (DiLoCoX, arXiv 2506.21263).

    The effective rank of a matrix with singular values σ is (Σσ²)² / Σσ⁴: r if all are the same, 1 if there is but one.
    The next rank is twice its mean over the matrices and over the last exchanges: so there is room for it to grow.
    """

    rank: int = attrs.field(validator=ge(1))
    window: int = attrs.field(default=5, validator=[ge(1), le(MAX_WINDOW)])

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        mixed = yield from self.at(memory).mix(values, weight, layout, round, memory)
        assert mixed.memory is not None
        memory = self.adapted(mixed.memory)
        return attrs.evolve(mixed, load=self.load(memory), memory=memory)

    def at(self, memory: Memory) -> LowRankMean:
        """See `LowRankMean`."""
        return LowRankMean(self._next(memory.get("ranks", torch.empty(0))))

    def load(self, memory: Memory) -> float:
        """See `LowRankMean`."""
        return self.at(memory).rank / self.rank

    def adapted(self, memory: Memory) -> Memory:
        """What is remembered after an exchange, with the rank that it has needed."""
        found = [effective_rank(factor) for name, factor in memory.items() if name.startswith("factor ")]
        if not found:
            return memory
        needed = tree_sum(torch.stack(found)).div(len(found)).view(1)
        return {**memory, "ranks": torch.cat([memory.get("ranks", torch.empty(0)), needed])[-self.window :]}

    def fits(self, name: str, values: torch.Tensor, layout: Layout) -> bool:
        """Whether it could have remembered this: a factor, or the ranks of the last exchanges."""
        if name == "ranks":
            return values.dim() == 1 and len(values) <= self.window and bool((values > 0).all())
        # With a smaller rank there may have been more matrices.
        columns = LowRankMean(1).columns(layout).get(name)
        return values.dim() == 2 and values.shape[0] == columns and 1 <= values.shape[1] <= self.rank

    def _next(self, seen: torch.Tensor) -> int:
        if not len(seen):
            return self.rank
        return min(self.rank, math.ceil(2 * float(tree_sum(seen).div(len(seen)))))


def effective_rank(factor: torch.Tensor) -> torch.Tensor:
    """Of the product of orthonormal columns with these; 1 for zeros. The same bits on every processor."""
    products = torch.stack([tree_sum(factor * factor[:, i : i + 1]) for i in range(factor.shape[1])])
    trace = tree_sum(torch.diagonal(products))
    squares = tree_sum((products * products).flatten())
    return trace * trace / squares if float(squares) > 0 else torch.ones(())


def settled(memory: Memory) -> Memory:
    """What is remembered when an exchange is over."""
    return {name: kept for name, kept in memory.items() if not name.startswith(("plain ", "side "))}


def unshared(memory: Memory) -> Memory:
    """What a peer remembers by itself: without what all have in common, which they forget where somebody lacks it."""
    return {name: kept for name, kept in memory.items() if not name.startswith(("factor ", "ranks"))}


def packed(mixer: LowRankMean | AdaptiveLowRankMean, layout: Layout, memory: Memory) -> torch.Tensor:
    """What all peers remember, in a vector with the layout of the model: so that it can be part of their state.

    A matrix has room for both of its factors, as they are at most half as large, and for a few ranks.
    """
    full = LowRankMean(mixer.rank)
    whole, matrices = full._sorted(layout)
    vector = torch.zeros(layout[-1].stop)
    for start, stop in whole:
        if (plain := memory.get(f"plain {start}")) is not None:
            vector[start:stop] = plain
    for start, rows, columns in matrices:
        for name, at, length in (("factor", start, columns), ("side", start + full.rank * columns, rows)):
            if (factor := memory.get(f"{name} {start}")) is not None:
                vector[at : at + length * full.rank].view(length, full.rank)[:, : factor.shape[1]] = factor
    ranks = memory.get("ranks")
    if ranks is not None and matrices:
        at = _ranks_at(full.rank, matrices)
        vector[at : at + len(ranks)] = ranks
    return vector


def unpacked(mixer: LowRankMean | AdaptiveLowRankMean, layout: Layout, vector: torch.Tensor) -> Memory:
    """The memory that was packed; what it did not have is zero, which means the same."""
    full, memory = LowRankMean(mixer.rank), {}
    whole, matrices = full._sorted(layout)
    if isinstance(mixer, AdaptiveLowRankMean) and matrices:
        at = _ranks_at(full.rank, matrices)
        ranks = vector[at : at + mixer.window]
        memory["ranks"] = ranks[ranks > 0]  # each is 1 at least
    rank = mixer.at(memory).rank
    for start, stop in whole:
        memory[f"plain {start}"] = vector[start:stop]
    for start, rows, columns in matrices:
        for name, at, length in (("factor", start, columns), ("side", start + full.rank * columns, rows)):
            memory[f"{name} {start}"] = vector[at : at + length * full.rank].view(length, full.rank)[:, :rank]
    return memory


def _ranks_at(rank: int, matrices: list[tuple[int, int, int]]) -> int:
    start, rows, columns = matrices[0]
    return start + rank * (rows + columns)


def _mean_of(reduced: object) -> torch.Tensor:
    assert isinstance(reduced, Reduced)
    return reduced.mean


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _divided(mean: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    if len(mean) != sum(sizes):
        raise ProtocolError(f"the swarm's mean has {len(mean)} values, not {sum(sizes)}")
    return [part.view(shape) for part, shape in zip(torch.split(mean, sizes), shapes, strict=True)]
