"""The ring: schedule, arithmetic, bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.identity import PeerId
from protocol.plan import Plan
from protocol.ring import Ring, partition, receives, reference, sends, vector_bytes


def make_plan(weights: list[float], length: int) -> Plan:
    members = tuple(PeerId(bytes([number + 1]) * 32) for number in range(len(weights)))
    return Plan(
        run=bytes(32),
        revision=1,
        attempt=1,
        rank=0,
        coordinator=members[0],
        members=members,
        weights=tuple(weights),
        length=length,
    )


def run_ring(plan: Plan, inputs: list[torch.Tensor], piece: int, order) -> list[torch.Tensor]:
    """All members of a ring in one process; `order` picks who moves next among those who can."""
    size = len(inputs)
    rings = [Ring(plan, place, values, piece=piece) for place, values in enumerate(inputs)]
    sent = [0] * size
    wires: list[list[bytes]] = [[] for _ in range(size)]  # from place i to i + 1
    while True:
        moves = [("send", place) for place in range(size) if sent[place] < rings[place].sendable]
        moves += [("receive", place) for place in range(size) if wires[place - 1]]
        if not moves:
            break
        kind, place = order(moves)
        ring = rings[place]
        if kind == "send":
            wires[place].append(bytes(ring.segment(sent[place])))
            sent[place] += 1
        else:
            data, target = wires[place - 1].pop(0), ring.target()
            assert len(data) == len(target)
            target[:] = data
            ring.filled()
    assert all(ring.complete for ring in rings)
    assert sent == [ring.outgoing for ring in rings]
    return [ring.mean for ring in rings]


sizes = st.integers(1, 8)
lengths = st.integers(0, 50)


@given(lengths, sizes)
def test_partitions_tile_the_vector(length, size):
    bounds = [partition(length, size, index) for index in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(one[1] == two[0] for one, two in itertools.pairwise(bounds))
    expected = [len(part) for part in torch.tensor_split(torch.empty(length), size)]
    assert [stop - start for start, stop in bounds] == expected


@settings(deadline=None)
@given(lengths, sizes, st.integers(1, 20))
def test_what_is_received_is_forwarded(length, size, piece):
    for place in range(size):
        outgoing = list(sends(length, size, place, piece=piece))
        incoming = list(receives(length, size, place, piece=piece))
        first, end = partition(length, size, place)
        own = -(-(end - first) // piece) if size > 1 else 0
        bounds = [(s.start, s.stop) for s in outgoing]
        assert bounds[own:] == [(s.start, s.stop) for s in incoming][: len(outgoing) - own]
        assert all(s.stop - s.start <= piece for s in outgoing)


@settings(deadline=None)
@given(lengths, sizes, st.integers(1, 20))
def test_every_element_is_received_twice_but_for_the_ends_of_its_chain(length, size, piece):
    added, stored = torch.zeros(size, length), torch.zeros(size, length)
    for place in range(size):
        for segment in receives(length, size, place, piece=piece):
            (added if segment.add else stored)[place, segment.start : segment.stop] += 1
    # Every element is added at all places but where its chain begins, and stored at all but where it ended.
    assert (added.sum(0) == size - 1).all()
    assert (stored.sum(0) == size - 1).all()
    assert added.max() <= 1 if added.numel() else True
    assert stored.max() <= 1 if stored.numel() else True


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0, 0.1, 1e9]), min_size=1, max_size=8),
    length=lengths,
    piece=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_all_members_end_with_the_bits_of_the_reference(weights, length, piece, seed, data):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(length, generator=generator) for _ in weights]
    before = [values.clone() for values in inputs]
    plan = make_plan(weights, length)
    random = data.draw(st.randoms(use_true_random=False))
    means = run_ring(plan, inputs, piece, random.choice)
    expected = reference(plan, inputs)
    for mean in means:
        assert bytes(vector_bytes(mean)) == bytes(vector_bytes(expected))
    for values, copy in zip(inputs, before, strict=True):
        assert torch.equal(values, copy)
    total = sum(weights)
    exact = torch.zeros(length, dtype=torch.float64)
    for weight, values in zip(weights, inputs, strict=True):
        exact += (weight / total if total else 0) * values.double()
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [int, float, lambda w: torch.tensor(w, dtype=torch.float64).item()])
def test_weights_of_any_number_type(dtype):
    plan = make_plan([float(dtype(1)), float(dtype(3))], 3)
    mean = reference(plan, [torch.zeros(3), torch.full((3,), 4.0)])
    assert mean.tolist() == [3.0, 3.0, 3.0]


def test_alone_the_mean_is_the_values():
    values = torch.tensor([1.5, -0.0, 1e-40, float(torch.finfo(torch.float32).max)])
    plan = make_plan([0.3], 4)
    ring = Ring(plan, 0, values)
    assert ring.complete
    assert not ring.outgoing
    assert bytes(vector_bytes(ring.mean)) == bytes(vector_bytes(values))
    assert ring.mean.data_ptr() != values.data_ptr()


def test_values_without_weight_do_not_matter_even_if_they_are_not_finite():
    plan = make_plan([0.0, 2.0], 3)
    inputs = [torch.tensor([float("nan"), float("inf"), 1.0]), torch.tensor([1.0, 2.0, 3.0])]
    means = run_ring(plan, inputs, 2, lambda moves: moves[0])
    assert [mean.tolist() for mean in means] == [[1.0, 2.0, 3.0]] * 2


def test_nobody_has_weight():
    plan = make_plan([0.0, 0.0], 3)
    assert run_ring(plan, [torch.ones(3), torch.ones(3)], 2, lambda moves: moves[-1])[0].tolist() == [0.0] * 3
