"""Which part of the model takes its turn in an exchange."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
from attrs.validators import ge

from optim.slots import Layout


@attrs.frozen
class Whole:
    """All of it, each time."""

    def fragment(self, layout: Layout, round: int) -> Sequence[int]:
        return range(len(layout))


@attrs.frozen
class Blocks:
    """One of n groups of blocks, each in turn (Streaming DiLoCo, arXiv 2501.18512).

    A block is what has the same first number in its names ("layers.3.attention.weight" belongs to block 3). Block i is
    in group i mod n if strided, else groups are of consecutive blocks. Tensors that belong to no block (embeddings,
    the head, the last norm) are in the first group. A model with fewer blocks than groups is cut by tensors,
    and one with fewer tensors into as many groups as it has.
    """

    groups: int = attrs.field(validator=ge(1))
    strided: bool = True

    def fragment(self, layout: Layout, round: int) -> Sequence[int]:
        blocks = [_block(place.name) for place in layout]
        numbers = sorted({block for block in blocks if block is not None})
        if len(numbers) < self.groups:
            blocks, numbers = list(range(len(layout))), list(range(len(layout)))
        groups = min(self.groups, len(numbers))
        turn = (round - 1) % groups
        group = {block: self._group(index, len(numbers), groups) for index, block in enumerate(numbers)}
        return [place for place, block in enumerate(blocks) if (0 if block is None else group[block]) == turn]

    def _group(self, index: int, blocks: int, groups: int) -> int:
        return index % groups if self.strided else index * groups // blocks


@attrs.frozen
class Packed:
    """One of n groups of about the same size, each in turn: the largest tensors first, each into the emptiest group."""

    groups: int = attrs.field(validator=ge(1))

    def fragment(self, layout: Layout, round: int) -> Sequence[int]:
        groups: list[list[int]] = [[] for _ in range(min(self.groups, len(layout)))]
        filled = [0] * len(groups)
        for place in sorted(range(len(layout)), key=lambda place: (layout[place].start - layout[place].stop, place)):
            emptiest = filled.index(min(filled))
            groups[emptiest].append(place)
            filled[emptiest] += max(1, layout[place].stop - layout[place].start)
        return sorted(groups[(round - 1) % len(groups)])


def _block(name: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])
