"""The all-gather as a schedule: blocks of all sizes, whatever the order in which pieces arrive."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.gather import Gather, bounds
from protocol.identity import PeerId
from protocol.plan import Plan


def plan_of(sizes) -> Plan:
    count = len(sizes)
    return Plan(
        run=bytes(32),
        revision=1,
        attempt=1,
        rank=0,
        coordinator=PeerId(bytes(32)),
        members=tuple(PeerId(bytes([number]) * 32) for number in range(count)),
        weights=(1.0,) * count,
        length=sum(sizes),
        operation="gather",
        sizes=tuple(sizes),
    )


class Circle:
    """The members of a plan, each with the pieces that are on their way to it."""

    def __init__(self, sizes, piece: int, rng: random.Random) -> None:
        self.plan, self.rng = plan_of(sizes), rng
        self.blocks = [torch.tensor([place + 1] * size, dtype=torch.uint8) for place, size in enumerate(sizes)]
        self.members = [Gather(self.plan, place, block, piece=piece) for place, block in enumerate(self.blocks)]
        self.sent = [0] * len(sizes)

    def step(self) -> bool:
        """Lets one piece that can be sent arrive; False if there is none."""
        able = [place for place, member in enumerate(self.members) if self.sent[place] < member.sendable]
        if not able:
            return False
        self.move(self.rng.choice(able))
        return True

    def move(self, place: int) -> None:
        member, right = self.members[place], self.members[(place + 1) % len(self.members)]
        piece = member.outgoing_piece(self.sent[place])
        assert piece == right.expected
        right.data(piece)[:] = member.data(piece)
        right.filled()
        self.sent[place] += 1


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=7),
    piece=st.integers(1, 17),
    seed=st.integers(0, 2**32),
)
def test_all_end_with_all_blocks(sizes, piece, seed):
    circle = Circle(sizes, piece, random.Random(seed))
    while circle.step():
        pass
    for place, member in enumerate(circle.members):
        assert member.complete
        assert circle.sent[place] == member.outgoing
        assert torch.equal(member.values, torch.cat(circle.blocks))
        assert member.blocks == len(sizes) - 1


@given(
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=7),
    piece=st.integers(1, 17),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_nobody_is_complete_without_everybody(sizes, piece, seed, data):
    """One member takes part up to some moment, and no more: whoever is complete has its block all the same."""
    circle = Circle(sizes, piece, random.Random(seed))
    stuck = data.draw(st.integers(0, len(sizes) - 1))
    allowed = data.draw(st.integers(0, circle.members[stuck].outgoing - 1))
    while True:
        able = [place for place, member in enumerate(circle.members) if circle.sent[place] < member.sendable]
        able = [place for place in able if place != stuck or circle.sent[place] < allowed]
        if not able:
            break
        circle.move(circle.rng.choice(able))
    for member in circle.members:
        assert not member.complete or torch.equal(member.values, torch.cat(circle.blocks))
    # Those who starve have the less, the nearer they are to the one that is stuck.
    order = [circle.members[(stuck + distance) % len(sizes)] for distance in range(1, len(sizes) + 1)]
    starved = [member.blocks for member in order if not member.complete]
    assert starved
    assert starved == sorted(set(starved))


def test_bounds_follow_each_other():
    assert bounds(plan_of([3, 0, 5])) == [(0, 3), (3, 3), (3, 8)]


@pytest.mark.parametrize("count", [1, 4])
def test_without_data_there_is_still_something_to_wait_for(count):
    circle = Circle([0] * count, 10, random.Random(0))
    assert [member.complete for member in circle.members] == [count == 1] * count
    assert circle.members[0].incoming == count - 1
