"""Encoded values by way of the owners of blocks: bits, errors, salvage, and what is refused."""

from __future__ import annotations

import random as randomness
import struct
import tracemalloc

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs import make_codec
from protocol.direct import Direct, reference_direct
from protocol.errors import ProtocolError
from protocol.identity import PeerId
from protocol.plan import Plan, Salvaged, Source
from protocol.ring import Ring
from protocol.salvage import salvage
from protocol.vectors import vector_bytes

CODECS = ["fp32", "bf16", "int8", "int4", "e3m0"]
LENGTHS = st.sampled_from([0, 1, 2, 255, 256, 257, 511, 512, 1000, 2048, 5000])


@pytest.fixture
def rng() -> randomness.Random:
    return randomness.Random(1)


def make_plan(weights: list[float], length: int, codec: str) -> Plan:
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
        codec=codec,
        schedule="direct",
    )


def encoded(plan: Plan, values: torch.Tensor) -> bytearray:
    codec = make_codec(plan.codec)
    data = bytearray(codec.encoded_size(plan.length))
    codec.encode(values, data)
    return data


def bits(values: torch.Tensor) -> bytes:
    return bytes(vector_bytes(values))


def expected_mean(plan: Plan, inputs: dict[PeerId, torch.Tensor], earlier: dict[bytes, Plan]) -> torch.Tensor:
    """What members end with, of which all attempts went by way of the owners of blocks."""
    mean = torch.empty(plan.length)
    reference_direct(plan, inputs, mean)
    for part in plan.salvaged:
        source = expected_mean(earlier[plan.sources[part.source].plan], inputs, earlier)
        mean[part.start : part.stop] = source[part.start : part.stop]
    return mean


def begin(plan: Plan, inputs: dict[PeerId, torch.Tensor], kept: dict[PeerId, Direct]) -> list[Direct]:
    return [
        Direct(plan, place, encoded(plan, inputs[peer]), previous=kept.get(peer))
        for place, peer in enumerate(plan.members)
    ]


def move(parts: list[Direct], random, steps: int, silent: int | None = None) -> int:
    """Lets members send and receive in random order, so many times at most; returns how many bytes were sent.

    The member at the place `silent` sends nothing.
    """
    sent = {(place, sink): 0 for place, part in enumerate(parts) for sink in part.sinks}
    wires: dict[tuple[int, int], list[bytes]] = {way: [] for way in sent}
    total = 0
    for _ in range(steps):
        moves = [(True, way) for way in sent if way[0] != silent and sent[way] < parts[way[0]].sendable(way[1])]
        moves += [(False, way) for way, wire in wires.items() if wire]
        if not moves:
            break
        sends, (source, sink) = random.choice(moves)
        if sends:
            wires[source, sink].append(bytes(parts[source].segment(sink, sent[source, sink])))
            total += len(wires[source, sink][-1])
            sent[source, sink] += 1
        else:
            data, target = wires[source, sink].pop(0), parts[sink].target(source)
            assert len(data) == len(target)
            target[:] = data
            parts[sink].filled(source)
    return total


@settings(deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0, 0.1, 1e9]), min_size=1, max_size=8),
    length=LENGTHS,
    data=st.data(),
)
def test_all_members_end_with_the_bits_of_the_reference(unequal, codec, weights, length, data):
    plan = unequal(make_plan(weights, length, codec), data.draw(st.randoms(use_true_random=False)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    inputs = {peer: torch.randn(length, generator=generator) for peer in plan.members}
    parts = begin(plan, inputs, {})
    assert move(parts, data.draw(st.randoms(use_true_random=False)), 10**6) == sum(part.bytes_out for part in parts)
    assert all(part.complete for part in parts)
    assert {bits(part.mean) for part in parts} == {bits(expected_mean(plan, inputs, {}))}


@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.005), ("int8", 0.02), ("int4", 0.3), ("e3m0", 0.5)])
def test_values_are_rounded_once_on_each_way_however_many_members_there_are(codec, most, rng):
    plan = make_plan([1.0] * 8, 20_000, codec)
    common = torch.randn(plan.length, generator=torch.Generator().manual_seed(1))
    inputs = dict.fromkeys(plan.members, common)
    parts = begin(plan, inputs, {})
    move(parts, rng, 10**6)
    error = (parts[0].mean - common).square().mean().sqrt() / common.square().mean().sqrt()
    assert error < most


@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.501), ("int8", 0.27), ("int4", 0.14), ("e3m0", 0.14)])
def test_as_many_bytes_as_around_a_ring_but_shorter(codec, most, rng):
    plan = make_plan([1.0] * 4, 1 << 18, codec)
    inputs = dict.fromkeys(plan.members, torch.ones(plan.length))
    parts = begin(plan, inputs, {})
    total = move(parts, rng, 10**6)
    assert total == sum(part.bytes_out for part in parts)
    assert total <= most * 4 * plan.length * 2 * 3


@settings(deadline=None)
@given(codec=st.sampled_from(CODECS), size=st.integers(2, 5), length=LENGTHS, data=st.data())
def test_what_an_attempt_has_reduced_is_salvaged_by_the_next(unequal, codec, size, length, data):
    """Members are lost one after the other, each at any moment of an attempt; the last attempt is complete."""
    random = data.draw(st.randoms(use_true_random=False))
    plan = unequal(make_plan([random.choice([0.0, 1.0, 2.5]) for _ in range(size)], length, codec), random)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    inputs = {peer: torch.randn(length, generator=generator) for peer in plan.members}
    weights = dict(zip(plan.members, plan.weights, strict=True))
    plans, kept = {plan.id: plan}, {}
    while True:
        parts = begin(plan, inputs, kept)
        steps = data.draw(st.integers(0, 60))
        move(parts, random, steps if steps < 50 else 10**6)
        if all(part.complete for part in parts):
            break
        kept = dict(zip(plan.members, parts, strict=True))
        if len(kept) > 1:
            del kept[random.choice(sorted(kept))]
        members = sorted(kept, key=lambda peer: random.random())
        held = {peer: part.holdings() for peer, part in kept.items()}
        sources, salvaged = salvage(members, held, length, block=make_codec(codec).block)
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
    assert {bits(part.mean) for part in parts} == {bits(expected_mean(plan, inputs, plans))}


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=5),
    length=st.sampled_from([1, 2, 256, 1000]),
    codec=st.sampled_from(["fp32", "int8"]),
    data=st.data(),
)
def test_nobody_has_the_result_before_all_have_begun(unequal, weights, length, codec, data):
    """Also if one owns nothing and brings nothing: ballots rely on it."""
    random = data.draw(st.randoms(use_true_random=False))
    plan = unequal(make_plan(weights, length, codec), random)
    parts = begin(plan, dict.fromkeys(plan.members, torch.ones(length)), {})
    silent = random.randrange(len(weights))
    move(parts, random, 10**6, silent)
    assert not any(part.complete for place, part in enumerate(parts) if place != silent)


def test_who_sends_a_bad_contribution_is_blamed_though_others_come_later():
    plan = make_plan([1.0] * 3, 300, "int8")
    inputs = {peer: torch.ones(plan.length) for peer in plan.members}
    owner = begin(plan, inputs, {})[0]
    data = owner.target(1)
    data[:] = bytes(len(data))
    data[:4] = struct.pack("<f", float("nan"))
    with pytest.raises(ProtocolError, match="scale"):
        owner.filled(1)


def test_values_without_weight_do_not_matter(rng):
    plan = make_plan([0.0, 2.0], 3, "int8")
    parts = [Direct(plan, 0, b""), Direct(plan, 1, encoded(plan, torch.tensor([1.0, 1.0, 1.0])))]
    move(parts, rng, 100)
    assert [part.mean.tolist() for part in parts] == [pytest.approx([1.0, 1.0, 1.0], rel=0.02)] * 2


def test_fp32_is_the_sum_in_the_order_of_the_members_and_takes_values_as_they_are(rng):
    plan = make_plan([1.0, 2.0, 0.0, 5.0], 1001, "fp32")
    generator = torch.Generator().manual_seed(1)
    inputs = {peer: torch.randn(plan.length, generator=generator) for peer in plan.members}
    expected = torch.zeros(plan.length)
    for peer, share in zip(plan.members, plan.shares, strict=True):
        expected += inputs[peer] * torch.tensor(share, dtype=torch.float32)
    parts = [Direct(plan, place, vector_bytes(inputs[peer])) for place, peer in enumerate(plan.members)]
    move(parts, rng, 10**6)
    assert {bits(part.mean) for part in parts} == {bits(expected)}


def test_what_a_ring_has_reduced_is_salvaged(rng):
    plan = make_plan([1.0, 2.0, 3.0], 3000, "fp32")
    inputs = {peer: torch.full((plan.length,), float(place)) for place, peer in enumerate(plan.members)}
    rings = [Ring(plan, place, inputs[peer], piece=100) for place, peer in enumerate(plan.members)]
    move(rings, rng, 100)
    kept = dict(zip(plan.members[:2], rings, strict=False))
    sources, salvaged = salvage(list(kept), {peer: ring.holdings() for peer, ring in kept.items()}, plan.length)
    again = attrs.evolve(
        plan, attempt=2, members=plan.members[:2], weights=(1.0, 2.0), sources=sources, salvaged=salvaged
    )
    assert salvaged
    parts = begin(again, inputs, kept)
    move(parts, rng, 10**6)
    assert all(part.complete for part in parts)
    expected = torch.full((plan.length,), 2 / 3)
    for part in salvaged:
        expected[part.start : part.stop] = 8 / 6
    assert {bits(part.mean) for part in parts} == {bits(parts[0].mean)}
    assert torch.allclose(parts[0].mean, expected)


@pytest.mark.parametrize("codec", CODECS)
def test_the_largest_numbers_do_not_overflow(codec, rng):
    plan = make_plan([1.0] * 3, 300, codec)  # a third, rounded to fp32, is more than a third
    inputs = dict.fromkeys(plan.members, torch.full((plan.length,), torch.finfo(torch.float32).max))
    parts = begin(plan, inputs, {})
    move(parts, rng, 10**6)
    assert all(part.complete for part in parts)
    assert {bits(part.mean) for part in parts} == {bits(expected_mean(plan, inputs, {}))}
    assert parts[0].mean.isfinite().all()


def test_only_whole_blocks_are_salvaged():
    plan = make_plan([1.0, 1.0], 1000, "int8")
    source = Source(bytes(32), plan.members, plan.weights)
    for start, stop in ((0, 100), (1, 256), (256, 999)):
        with pytest.raises(ValueError, match="whole blocks"):
            attrs.evolve(plan, sources=(source,), salvaged=(Salvaged(start, stop, 0, (0,)),))
    attrs.evolve(plan, sources=(source,), salvaged=(Salvaged(256, 1000, 0, (0,)),))


def test_what_others_brought_to_a_failed_attempt_is_not_kept():
    plan = make_plan([1.0, 1.0, 1.0], 3 << 18, "int8")
    values = torch.ones(plan.length)
    ours = Direct(plan, 0, encoded(plan, values))
    theirs = Direct(plan, 1, encoded(plan, values))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(theirs.sendable(0)):  # its values of our block; those of the third do not come
            ours.target(1)[:] = theirs.segment(0, number)
            ours.filled(1)
        grown = tracemalloc.get_traced_memory()[0] - before
        assert grown > 1 << 18
        ours.release()
        assert tracemalloc.get_traced_memory()[0] - before < grown / 4
    finally:
        tracemalloc.stop()
