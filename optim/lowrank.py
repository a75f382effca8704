"""Matrices as products of two thin ones, averaged one after the other."""

from __future__ import annotations

import math

import attrs
import torch
from attrs.validators import ge

from optim.exact import orthonormal, outer_product, tree_sum
from optim.mixers import share_of
from optim.slots import AllReduce, Layout, Memory, Mixed, Mixing
from protocol.collective import Reduced
from protocol.errors import ProtocolError


@attrs.frozen
class LowRankMean:
    """The mean of rank-r approximations, in two all-reduces (PowerSGD, Vogels et al., arXiv 1905.13727).

    P = mean(Mᵢ·Q), made orthonormal; then Q = mean(Mᵢᵀ·P), and the mean is P·Qᵀ. Q goes on from exchange to exchange:
    it follows the directions that matter. Tensors that this would not make half as small travel as they are, with P.

    Use it with error feedback; what the others understand of ours is P·(Mᵢᵀ·P)ᵀ.
    """

    rank: int = attrs.field(validator=ge(1))

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        whole, matrices = self._sorted(layout)
        plain = [values[start:stop] for start, stop in whole]
        ours = [values[start : start + rows * columns].view(rows, columns) for start, rows, columns in matrices]
        factors = [self._factor(memory, start, columns, round) for start, _, columns in matrices]
        products = [matrix @ factor for matrix, factor in zip(ours, factors, strict=True)]
        reduced = yield AllReduce(_joined([*plain, *products]), weight)
        first = reduced
        lefts = _divided(reduced, [*plain, *products])
        sides = [orthonormal(left) for left in lefts[len(plain) :]]
        rights = [matrix.T @ side for matrix, side in zip(ours, sides, strict=True)]
        result, own = torch.empty_like(values), values.clone()
        memory = dict(memory)
        for (start, stop), mean in zip(whole, lefts, strict=False):
            result[start:stop] = mean
        if matrices:
            reduced = yield AllReduce(_joined(rights), weight)
            both = zip(matrices, sides, rights, _divided(reduced, rights), strict=True)
            for (start, rows, columns), side, right, mean in both:
                result[start : start + rows * columns] = outer_product(side, mean).flatten()
                own[start : start + rows * columns] = outer_product(side, right).flatten()
                memory[f"factor {start}"] = mean
        assert isinstance(first, Reduced) and isinstance(reduced, Reduced)
        share = min(share_of(first, weight), share_of(reduced, weight))
        return Mixed(mean=result, own=own, members=reduced.contributors, share=share, memory=memory)

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
    window: int = attrs.field(default=5, validator=ge(1))

    def mix(self, values: torch.Tensor, weight: float, layout: Layout, round: int, memory: Memory) -> Mixing[Mixed]:
        seen = memory.get("ranks", torch.empty(0))
        plain = LowRankMean(self._next(seen))
        mixed = yield from plain.mix(values, weight, layout, round, plain.resized(memory))
        assert mixed.memory is not None
        found = [effective_rank(factor) for name, factor in mixed.memory.items() if name.startswith("factor ")]
        if found:
            seen = torch.cat([seen, tree_sum(torch.stack(found)).div(len(found)).view(1)])[-self.window :]
        load = self._next(seen) / self.rank
        return attrs.evolve(mixed, load=load, memory={**mixed.memory, "ranks": seen})

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


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _divided(reduced: object, like: list[torch.Tensor]) -> list[torch.Tensor]:
    assert isinstance(reduced, Reduced)
    sizes = [part.numel() for part in like]
    if len(reduced.mean) != sum(sizes):
        raise ProtocolError(f"the swarm's mean has {len(reduced.mean)} values, not {sum(sizes)}")
    return [mean.view(part.shape) for mean, part in zip(torch.split(reduced.mean, sizes), like, strict=True)]
