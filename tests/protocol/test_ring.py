"""The ring: schedule, arithmetic, bits."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan, Salvaged, Source
from protocol.reduction import partition
from protocol.ring import Ring, Schedule, reference
from protocol.round_messages import Halted
from protocol.salvage import MAX_HOLDINGS, Holding, merged, salvage
from protocol.vectors import vector_bytes
from protocol.wire import encode


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
        moves = [("send", place) for place in range(size) if sent[place] < rings[place].sendable((place + 1) % size)]
        moves += [("receive", place) for place in range(size) if wires[place - 1]]
        if not moves:
            break
        kind, place = order(moves)
        ring, left, right = rings[place], (place - 1) % size, (place + 1) % size
        if kind == "send":
            wires[place].append(bytes(ring.segment(right, sent[place])))
            sent[place] += 1
        else:
            data, target = wires[place - 1].pop(0), ring.target(left)
            assert len(data) == len(target)
            target[:] = data
            ring.filled(left)
    assert all(ring.complete for ring in rings)
    assert all(count == ring.outgoing(sink) for count, ring in zip(sent, rings, strict=True) for sink in ring.sinks)
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
    schedule = Schedule(make_plan([1.0] * size, length), piece=piece)
    for place in range(size):
        for step in range(1, schedule.steps):
            incoming = [(s.start, s.stop) for s in schedule.receives(place, step - 1)]
            outgoing = [(s.start, s.stop) for s in schedule.sends(place, step)]
            assert incoming == outgoing
            assert all(stop - start <= piece for start, stop in outgoing)


@settings(deadline=None)
@given(lengths, sizes, st.integers(1, 20))
def test_every_element_is_received_twice_but_for_the_ends_of_its_chain(length, size, piece):
    added, stored = torch.zeros(size, length), torch.zeros(size, length)
    schedule = Schedule(make_plan([1.0] * size, length), piece=piece)
    for place, step in itertools.product(range(size), range(schedule.steps)):
        for segment in schedule.receives(place, step):
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
def test_all_members_end_with_the_bits_of_the_reference(unequal, weights, length, piece, seed, data):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(length, generator=generator) for _ in weights]
    before = [values.clone() for values in inputs]
    random = data.draw(st.randoms(use_true_random=False))
    plan = unequal(make_plan(weights, length), random)
    means = run_ring(plan, inputs, piece, random.choice)
    expected = reference(plan, dict(zip(plan.members, inputs, strict=True)))
    for mean in means:
        assert bytes(vector_bytes(mean)) == bytes(vector_bytes(expected))
    for values, copy in zip(inputs, before, strict=True):
        assert torch.equal(values, copy)
    total = sum(weights)
    exact = torch.zeros(length, dtype=torch.float64)
    for weight, values in zip(weights, inputs, strict=True):
        exact += (weight / total if total else 0) * values.double()
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=300)
@given(size=st.integers(2, 6), length=st.integers(0, 40), piece=st.integers(1, 9), data=st.data())
def test_what_an_attempt_has_reduced_is_salvaged_by_the_next(unequal, size, length, piece, data):
    """Members are lost one after the other, each at any moment of an attempt; the last attempt is complete."""
    random = data.draw(st.randoms(use_true_random=False))
    plan = unequal(make_plan([random.choice([0.0, 1.0, 2.5]) for _ in range(size)], length), random)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    inputs = {peer: torch.randn(length, generator=generator) for peer in plan.members}
    plans, kept = {plan.id: plan}, {}
    while True:
        rings = interrupted(plan, inputs, kept, piece, random, data.draw(st.integers(0, 200)))
        if all(ring.complete for ring in rings.values()):
            break
        kept = dict(rings)
        if len(kept) > 1:
            del kept[random.choice(sorted(kept))]
        held = {peer: ring.holdings() for peer, ring in kept.items()}
        for peer, holdings in held.items():
            for holding, span in ((h, s) for h in holdings for s in h.spans):
                expected = reference(plans[holding.source.plan], inputs, plans)[span.start : span.stop]
                assert bytes(vector_bytes(kept[peer].mean[span.start : span.stop])) == bytes(vector_bytes(expected))
        members = sorted(kept, key=lambda peer: random.random())
        weights = dict(zip(plan.members, plan.weights, strict=True))
        sources, salvaged = salvage(members, held, length)
        covered = {n for holdings in held.values() for h in holdings for s in h.spans for n in range(s.start, s.stop)}
        left = {max(covered)} if len(covered) == length and len(members) > 1 else set()  # somebody has to be asked
        assert covered - left == {n for part in salvaged for n in range(part.start, part.stop)}
        plan = attrs.evolve(
            plan,
            attempt=plan.attempt + 1,
            members=tuple(members),
            weights=tuple(weights[peer] for peer in members),
            sources=sources,
            salvaged=salvaged,
            blocks=(),
        )
        plan = unequal(plan, random)
        plans[plan.id] = plan
    expected = bytes(vector_bytes(reference(plan, inputs, plans)))
    assert {bytes(vector_bytes(ring.mean)) for ring in rings.values()} == {expected}


def interrupted(plan, inputs, kept, piece, random, steps):
    """The rings of all members after so many moves (or all), in random order."""
    rings = {
        peer: Ring(plan, place, inputs[peer], previous=kept.get(peer), piece=piece)
        for place, peer in enumerate(plan.members)
    }
    line, sent, wires, size = list(rings.values()), [0] * len(rings), [[] for _ in rings], len(rings)
    for _ in range(steps if steps < 150 else 10**6):
        moves = [("send", place) for place in range(size) if sent[place] < line[place].sendable((place + 1) % size)]
        moves += [("receive", place) for place in range(size) if wires[place - 1]]
        if not moves:
            break
        kind, place = random.choice(moves)
        if kind == "send":
            wires[place].append(bytes(line[place].segment((place + 1) % size, sent[place])))
            sent[place] += 1
        else:
            left = (place - 1) % size
            line[place].target(left)[:] = wires[left].pop(0)
            line[place].filled(left)
    return rings


def test_only_what_is_missing_is_sent_again():
    """All but the last step is done when one of three is lost: what the others hold is not sent to them again."""
    plan = make_plan([1.0, 1.0, 1.0], 6)
    inputs = {peer: torch.arange(6.0) * (number + 1) for number, peer in enumerate(plan.members)}
    schedule = Schedule(plan, piece=2)
    done = sum(1 for step in range(schedule.steps) for _ in schedule.sends(0, step))
    assert done == 4
    rings = {peer: Ring(plan, place, inputs[peer], piece=2) for place, peer in enumerate(plan.members)}
    line = list(rings.values())
    for number in range(3):
        data = [bytes(ring.segment(*ring.sinks, number)) for ring in line]
        for place, ring in enumerate(line):
            ring.target(*ring.sources)[:] = data[place - 1]
            ring.filled(*ring.sources)
    survivors = plan.members[:2]
    sources, salvaged = salvage(survivors, {peer: rings[peer].holdings() for peer in survivors}, 6)
    assert [(part.start, part.stop, part.holders) for part in salvaged] == [(0, 2, (0,)), (2, 4, (0, 1)), (4, 5, (1,))]
    second = attrs.evolve(plan, attempt=2, members=survivors, weights=(1.0, 1.0), sources=sources, salvaged=salvaged)
    third = [Ring(second, place, inputs[peer], previous=rings[peer], piece=2) for place, peer in enumerate(survivors)]
    for ring in third:
        (sink,), (source,) = ring.sinks, ring.sources
        sent = [ring.segment(sink, number).nbytes // 4 for number in range(ring.outgoing(sink))]
        assert sorted(sent) in ([1, 1], [1, 2])  # what the other lacks, and the element that is always reduced anew
        assert ring.incoming(source) == 2


def test_nobody_completes_a_plan_that_somebody_has_not_accepted():
    """Whoever has completed an earlier plan must be able to keep all others from completing this one.

    Of three survivors, each lacks another third of the result. So each could get it from a neighbour, past the third.
    """
    plan = make_plan([1.0] * 4, 12)
    source = Source(bytes(32), plan.members, plan.weights)
    parts = [(0, 4, (0, 2)), (4, 8, (0, 1)), (8, 12, (1, 2))]
    survivors = plan.members[:3]
    held = {
        peer: [Holding(source, merged((start, stop) for start, stop, holders in parts if place in holders))]
        for place, peer in enumerate(survivors)
    }
    sources, salvaged = salvage(survivors, held, 12)
    second = attrs.evolve(plan, attempt=2, members=survivors, weights=(1.0,) * 3, sources=sources, salvaged=salvaged)
    for absent in range(3):
        line = [Holder(second, place, held[peer]) for place, peer in enumerate(survivors)]
        sent, wires = [0] * 3, [[] for _ in range(3)]
        for place in [0, 1, 2] * 20:
            if place == absent:
                continue
            ring, right, left = line[place], (place + 1) % 3, (place - 1) % 3
            while sent[place] < ring.sendable(right):
                wires[place].append(bytes(ring.segment(right, sent[place])))
                sent[place] += 1
            while wires[left]:
                ring.target(left)[:] = wires[left].pop(0)
                ring.filled(left)
        assert not any(ring.complete for ring in line)


class Holder(Ring):
    """A ring that begins with some parts."""

    def __init__(self, plan, place, holdings):
        previous = Ring(attrs.evolve(plan, sources=(), salvaged=()), place, torch.zeros(plan.length))
        previous.holdings = lambda: tuple(holdings)
        previous.mean.zero_()  # memory may hold anything, also what is no number
        super().__init__(plan, place, torch.zeros(plan.length), previous=previous)


def test_after_many_attempts_no_more_is_told_than_a_message_takes():
    plan = make_plan([1.0, 1.0], 2 * MAX_HOLDINGS)
    sources = tuple(Source(bytes([number]) * 32, plan.members, plan.weights) for number in range(2 * MAX_HOLDINGS - 1))
    held = [Holding(source, merged([(number, number + 1)])) for number, source in enumerate(sources)]
    salvaged = tuple(Salvaged(number, number + 1, number, (0,)) for number in range(len(sources)))
    ring = Holder(attrs.evolve(plan, sources=sources, salvaged=salvaged), 0, held)
    encode(Halted(plan.ballot, ring.holdings()))


def test_a_plan_that_relies_on_what_a_member_does_not_hold_is_refused():
    plan = make_plan([1.0, 1.0], 4)
    source = Source(bytes(32), plan.members, plan.weights)
    relying = attrs.evolve(plan, sources=(source,), salvaged=(Salvaged(0, 2, 0, (0,)),))
    with pytest.raises(ValueError, match="does not hold"):
        Ring(relying, 0, torch.zeros(4))
    Ring(relying, 1, torch.zeros(4))


@pytest.mark.parametrize("dtype", [int, float, lambda w: torch.tensor(w, dtype=torch.float64).item()])
def test_weights_of_any_number_type(dtype):
    plan = make_plan([float(dtype(1)), float(dtype(3))], 3)
    mean = reference(plan, dict(zip(plan.members, [torch.zeros(3), torch.full((3,), 4.0)], strict=True)))
    assert mean.tolist() == [3.0, 3.0, 3.0]


def test_alone_the_mean_is_the_values():
    values = torch.tensor([1.5, -0.0, 1e-40, float(torch.finfo(torch.float32).max)])
    plan = make_plan([0.3], 4)
    ring = Ring(plan, 0, values)
    assert ring.complete
    assert not ring.sinks
    assert bytes(vector_bytes(ring.mean)) == bytes(vector_bytes(values))
    assert ring.mean.data_ptr() != values.data_ptr()


def test_values_without_weight_do_not_matter_even_if_they_are_not_finite():
    plan = make_plan([0.0, 2.0], 3)
    inputs = [torch.tensor([float("nan"), float("inf"), 1.0]), torch.tensor([1.0, 2.0, 3.0])]
    means = run_ring(plan, inputs, 2, lambda moves: moves[0])
    assert [mean.tolist() for mean in means] == [[1.0, 2.0, 3.0]] * 2


def test_sums_beyond_the_range_are_its_end():
    """Ten shares of a tenth, as fp32 has them, are more than one."""
    largest = torch.finfo(torch.float32).max
    plan, values = make_plan([1.0] * 10, 40), torch.tensor([largest, -largest, 1.0, 0.0] * 10)
    assert sum(plan.shares) > 1
    means = run_ring(plan, [values] * 10, 2, lambda moves: moves[0])
    assert means[0].isfinite().all()
    assert torch.equal(means[0], reference(plan, dict.fromkeys(plan.members, values)))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_result_that_is_not_finite_is_its_senders_fault(value):
    plan = make_plan([1.0, 1.0], 2)
    ring = Ring(plan, 0, torch.ones(2))
    torch.frombuffer(ring.target(1), dtype=torch.float32).fill_(1.0)
    ring.filled(1)
    torch.frombuffer(ring.target(1), dtype=torch.float32).fill_(float(value))
    with pytest.raises(ProtocolError, match="not finite"):
        ring.filled(1)


def test_nobody_has_weight():
    plan = make_plan([0.0, 0.0], 3)
    assert run_ring(plan, [torch.ones(3), torch.ones(3)], 2, lambda moves: moves[-1])[0].tolist() == [0.0] * 3
