"""What callers of the operations get back."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import trio

from protocol.channels import MAX_CHANNELS
from protocol.collective import Window
from protocol.errors import Overloaded, ProtocolError, RequestTimeout, RoundAborted


@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_gather_brings_blocks_of_any_size_to_all(autojump_clock, swarm_of, count):
    async with swarm_of(count) as swarm:
        sizes = [0, 1, 200_000, 3, 65_536][:count]
        blocks = {peer.id: bytes([peer.number]) * size for peer, size in zip(swarm.peers, sizes, strict=True)}
        outcomes = await swarm.together(lambda peer: peer.collective.gather(blocks[peer.id]))
        for gathered in outcomes.values():
            assert {peer: bytes(block) for peer, block in gathered.blocks.items()} == blocks
            assert set(gathered.contributors) == set(gathered.members) == set(blocks)
            assert gathered.attempts == 1
            assert gathered.number == 1
            assert gathered.bytes_received == sum(sizes) - len(blocks[_who(outcomes, gathered).id])
        await swarm.rest()


def _who(outcomes, wanted):
    return next(peer for peer, outcome in outcomes.items() if outcome is wanted)


async def test_bringing_nothing_is_not_bringing_an_empty_block(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        blocks = dict(zip(swarm.peers, (None, b"", b"x"), strict=True))
        outcomes = await swarm.together(lambda peer: peer.collective.gather(blocks[peer]))
        for gathered in outcomes.values():
            assert {peer: bytes(block) for peer, block in gathered.blocks.items()} == {
                swarm.peers[1].id: b"",
                swarm.peers[2].id: b"x",
            }
            assert len(gathered.members) == 3


async def test_tensors_are_gathered_as_their_bytes(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        tensors = {peer.id: torch.full((peer.number, 3), 1.5, dtype=torch.bfloat16) for peer in swarm.peers}
        outcomes = await swarm.together(lambda peer: peer.collective.gather(tensors[peer.id]))
        for gathered in outcomes.values():
            got = gathered.tensors(torch.bfloat16)
            assert all(torch.equal(got[peer], tensors[peer].reshape(-1)) for peer in tensors)
            with pytest.raises(ProtocolError, match="6 bytes"):
                gathered.tensors(torch.float32)


async def test_broadcast(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        state = bytes(range(256)) * 1000
        source = swarm.peers[2]
        outcomes = await swarm.together(lambda peer: peer.collective.broadcast(state if peer is source else None))
        for received in outcomes.values():
            assert bytes(received.data) == state
            assert received.source == source.id
        # Nobody sends it more than once.
        assert all(received.bytes_sent <= len(state) for received in outcomes.values())


async def test_there_is_nothing_to_broadcast(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        outcomes = await swarm.together(lambda peer: peer.collective.broadcast(None))
        assert all(isinstance(outcome, RoundAborted) for outcome in outcomes.values())
        outcomes = await swarm.together(lambda peer: peer.collective.broadcast(b"here" if not peer.number else None))
        assert {bytes(received.data) for received in outcomes.values()} == {b"here"}


async def test_nobody_leaves_a_barrier_before_the_last_has_come(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        left = {}

        async def call(peer):
            await trio.sleep(peer.number)
            outcome = await peer.collective.barrier()
            left[peer] = trio.current_time()
            return outcome

        begun = trio.current_time()
        outcomes = await swarm.together(call)
        assert min(left.values()) > begun + 2
        assert all(len(outcome.members) == 3 and outcome.bytes_sent == 0 for outcome in outcomes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_any_list_of_tensors_is_averaged_in_fp32(autojump_clock, swarm_of, dtype):
    async with swarm_of(2) as swarm:
        tensors = {
            peer: [torch.full((2, 3), float(peer.number), dtype=dtype), torch.tensor(4.0, dtype=dtype), torch.zeros(0)]
            for peer in swarm.peers
        }
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(tensors[peer], 1.0 + 2 * peer.number))
        for reduced in outcomes.values():
            assert [list(tensor.shape) for tensor in reduced.tensors] == [[2, 3], [], [0]]
            assert reduced.tensors[0].tolist() == [[0.75] * 3] * 2
            assert reduced.tensors[1].item() == 4.0
            assert reduced.mean.dtype == torch.float32
            assert sorted(reduced.weights) == [1.0, 3.0]


@pytest.mark.parametrize("values", [[], torch.zeros(0), torch.zeros(2, dtype=torch.float64)])
async def test_values_that_cannot_be_averaged(autojump_clock, swarm_of, values):
    async with swarm_of(1) as swarm:
        with pytest.raises(ValueError, match="values"):
            await swarm.peers[0].collective.all_reduce(values)


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, 2e15])
@pytest.mark.parametrize("operation", ["all_reduce", "exchange"])
async def test_weights_that_are_none(autojump_clock, swarm_of, operation, weight):
    async with swarm_of(2) as swarm:
        act = operator.methodcaller(operation, torch.ones(3))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"a weight is a number from 0 to 1e\+15 here, not "):
                await getattr(swarm.peers[0].collective, operation)(torch.ones(3), weight)
            outcomes = await swarm.together(lambda peer: act(peer.collective))
            assert {len(outcome.members) for outcome in outcomes.values()} == {2}


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
async def test_exchange_swaps_within_pairs(autojump_clock, swarm_of, count):
    async with swarm_of(count) as swarm:
        values = {peer.id: torch.full((40_000,), float(peer.number)) for peer in swarm.peers}
        outcomes = await swarm.together(lambda peer: peer.collective.exchange(values[peer.id], 1.0 + peer.number))
        partners = {peer.id: exchanged.partner for peer, exchanged in outcomes.items()}
        assert sum(partner is None for partner in partners.values()) == count % 2
        for peer, exchanged in outcomes.items():
            if exchanged.partner is None:
                assert (exchanged.values, exchanged.tensors, exchanged.weight) == (None, None, 0.0)
                continue
            assert partners[exchanged.partner] == peer.id
            assert torch.equal(exchanged.values, values[exchanged.partner])
            assert exchanged.weight == 1.0 + values[exchanged.partner][0]
            assert exchanged.bytes_sent == exchanged.bytes_received == 160_000
        await swarm.rest()


@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.501), ("int8", 0.27), ("int4", 0.14), ("e3m0", 0.14)])
async def test_a_codec_makes_exchanges_shorter_and_both_hold_the_same_of_both(autojump_clock, swarm_of, codec, most):
    async with swarm_of(2, codec=codec) as swarm:
        one, two = swarm.peers
        generator = torch.Generator().manual_seed(1)
        values = {peer: torch.randn(40_001, generator=generator) for peer in swarm.peers}
        total = dict.fromkeys(swarm.peers, torch.zeros(40_001))
        for number in range(20):
            outcomes = await swarm.together(lambda peer: peer.collective.exchange(values[peer]))
            assert torch.equal(outcomes[one].values, outcomes[two].ours)
            assert torch.equal(outcomes[two].values, outcomes[one].ours)
            assert outcomes[one].bytes_sent == outcomes[two].bytes_received <= most * 160_004
            total = {peer: total[peer] + outcomes[peer].ours for peer in swarm.peers}
            if not number:
                first = {peer: (total[peer] - values[peer]).abs().mean() for peer in swarm.peers}
        for peer in swarm.peers:  # what one message leaves out, the next ones bring
            assert 0 < (total[peer] / 20 - values[peer]).abs().mean() < first[peer] / 4
        await swarm.rest()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "e3m0"])
async def test_a_partner_without_numbers_is_none(autojump_clock, swarm_of, codec):
    """It takes part without contributing, and its next exchange is as any other."""
    async with swarm_of(2, codec=codec) as swarm:
        sick, well = swarm.peers
        numbers = torch.ones(5000)
        values = {sick: torch.where(torch.arange(5000) == 4999, math.nan, numbers), well: numbers}
        outcomes = await swarm.together(lambda peer: peer.collective.exchange(values[peer]))
        assert outcomes[well].values is None and outcomes[well].weight == 0
        assert "finite" in outcomes[well].problem or "scale" in outcomes[well].problem
        assert not outcomes[sick].counted and outcomes[sick].ours is None
        again = await swarm.together(lambda peer: peer.collective.exchange(numbers))
        assert all(torch.equal(again[peer].values, again[peer].ours) for peer in swarm.peers)
        await swarm.rest()


async def test_pairs_change(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        partners = set()
        for _ in range(16):
            outcomes = await swarm.together(lambda peer: peer.collective.exchange(torch.zeros(3)))
            partners.add(outcomes[swarm.peers[0]].partner)
        assert partners == {peer.id for peer in swarm.peers[1:]}


async def test_operations_of_one_tag_come_one_after_the_other(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:

        async def call(peer):
            handles = [peer.collective.start_gather(bytes([number])) for number in range(4)]
            return [await handle.wait() for handle in handles]

        for outcome in (await swarm.together(call)).values():
            assert [gathered.number for gathered in outcome] == [1, 2, 3, 4]
            assert [{bytes(block) for block in gathered.blocks.values()} for gathered in outcome] == [
                {bytes([number])} for number in range(4)
            ]


async def test_operations_of_several_tags_and_groups_at_once(autojump_clock, swarm_of):
    async with swarm_of(4) as swarm:
        left, right = swarm.peers[:2], swarm.peers[2:]

        async def call(peer):
            group = {other.id for other in (left if peer in left else right)}
            handles = [
                peer.collective.start_all_reduce(torch.full((50_000,), float(peer.number))),
                peer.collective.start_gather(b"%d" % peer.number, tag="names"),
                peer.collective.start_all_reduce(torch.full((9,), float(peer.number)), group=group, tag="names"),
            ]
            return [await handle.wait() for handle in handles]

        for peer, (mean, names, halves) in (await swarm.together(call)).items():
            assert mean.mean.unique().tolist() == [1.5]
            assert {bytes(block) for block in names.blocks.values()} == {b"0", b"1", b"2", b"3"}
            assert halves.mean.tolist() == [0.5 if peer in left else 2.5] * 9
            assert set(halves.members) == {other.id for other in (left if peer in left else right)}
        await swarm.rest()


async def test_a_tag_can_be_used_later_by_some(autojump_clock, swarm_of):
    """Whoever would coordinate does not know of the tag yet."""
    async with swarm_of(4) as swarm:
        for tag in "abcdefgh":  # each has another coordinator

            async def call(peer, tag=tag):
                await trio.sleep(peer.number)
                return await peer.collective.gather(b"", tag=tag)

            outcomes = await swarm.together(call)
            assert all(len(gathered.members) == 4 for gathered in outcomes.values())


async def test_who_comes_too_late_takes_part_in_the_next_one(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        *quick, slow = swarm.peers
        for _ in range(4):
            await swarm.together(lambda peer: peer.collective.barrier(), quick)
        outcomes = await swarm.together(lambda peer: peer.collective.barrier())
        assert {outcome.number for outcome in outcomes.values()} == {5}
        assert slow.id in outcomes[slow].members


async def test_a_deadline_ends_an_operation(autojump_clock, swarm_of):
    async with swarm_of(3) as swarm:
        one = swarm.peers[0]
        with pytest.raises(RequestTimeout, match="2 s"):
            await one.collective.all_reduce(torch.ones(3), timeout=2)
        await swarm.rest()
        outcomes = await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(3)))
        assert all(len(reduced.members) == 3 for reduced in outcomes.values())


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, "5"])
async def test_a_timeout_that_is_none(autojump_clock, swarm_of, timeout):
    async with swarm_of(1) as swarm:
        one = swarm.peers[0]
        with pytest.raises(ValueError, match=r"seconds from 0 on, .*, not "):
            await one.collective.barrier(timeout=timeout)
        assert (await one.collective.barrier(timeout=1)).number == 1


async def test_senseless_tags_and_groups(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        with pytest.raises(ValueError, match="group"):
            await one.collective.barrier(group=[other.id])
        for group in (str(other.id), one.id, [str(one.id), str(other.id)], [one.id, bytes(32)], iter([one.id]), 5):
            with pytest.raises(ValueError, match=r"peer ids.* not "):
                await one.collective.all_reduce(torch.ones(1), group=group, window=Window())
        for tag in ("x" * 41, "a@b", 5):
            with pytest.raises(ValueError, match="tag"):
                await one.collective.barrier(tag=tag)
        with pytest.raises(ValueError, match="block"):
            await one.collective.gather(bytes((1 << 24) + 1))


@pytest.mark.parametrize("together", [True, False], ids=["at both", "at one"])
async def test_any_number_of_tags_one_after_the_other(autojump_clock, swarm_of, together):
    async with swarm_of(2) as swarm:
        one, _ = swarm.peers

        async def agree(tag: str, number: int) -> None:
            outcomes = await swarm.together(lambda peer: peer.collective.gather(b"%d" % peer.number, tag=tag))
            assert {len(gathered.blocks) for gathered in outcomes.values()} == {2}
            assert {gathered.number for gathered in outcomes.values()} == {number}

        await agree("first", 1)
        for number in range(MAX_CHANNELS + 3):
            if together:
                await agree(f"{number}", 1)
            else:
                await one.collective.barrier(tag=f"{number}", group=[one.id])
        await agree("first", 1 if together else 2)


async def test_more_tags_at_once_than_there_may_be(autojump_clock, swarm_of):
    async with swarm_of(1) as swarm:
        collective, refused = swarm.peers[0].collective, []

        async def begin(number: int) -> None:
            try:
                await collective.all_reduce(torch.ones(1), tag=f"{number}", window=Window())
            except Overloaded as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for number in range(MAX_CHANNELS + 3):
                nursery.start_soon(begin, number)
        assert len(refused) == 3
