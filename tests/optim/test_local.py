"""Swarms inside one process."""

import threading
import warnings

import pytest
import torch

from optim import LocalSwarm
from protocol.channels import ChannelSettings
from protocol.collective import Window
from protocol.errors import Misfit, RequestTimeout
from protocol.standalone import join_collective


def test_a_weighted_mean_of_tensors():
    swarm = LocalSwarm(2)

    def replica(peer):
        index = swarm.peers.index(peer)
        return peer.all_reduce([torch.full((2, 2), float(index)), torch.ones(3)], 1.0 + 2 * index)

    one, other = swarm.run(replica)
    assert one.tensors[0].tolist() == [[0.75, 0.75], [0.75, 0.75]]
    assert one.tensors[1].tolist() == [1.0, 1.0, 1.0]
    assert one.weight == 4.0
    assert set(one.contributors) == {peer.peer_id for peer in swarm.peers}
    assert torch.equal(one.mean, other.mean)


def test_values_that_are_not_finite_do_not_count():
    swarm = LocalSwarm(2)
    values = dict(zip(swarm.peers, (torch.ones(4), torch.full((4,), float("inf"))), strict=True))
    one, _ = swarm.run(lambda peer: peer.all_reduce(values[peer]))
    assert one.mean.tolist() == [1.0] * 4
    assert one.contributors == (swarm.peers[0].peer_id,)


def test_blocks_of_all():
    swarm = LocalSwarm(3)
    blocks = dict(zip(swarm.peers, (b"one", b"", None), strict=True))
    results = swarm.run(lambda peer: peer.gather(blocks[peer]))
    expected = {peer.peer_id: block for peer, block in blocks.items() if block is not None}
    for gathered in results:
        assert {peer: bytes(block) for peer, block in gathered.blocks.items()} == expected


def test_pairs_swap_and_the_odd_one_is_alone():
    swarm = LocalSwarm(3)
    index = {peer: place for place, peer in enumerate(swarm.peers)}
    for _ in range(5):
        results = swarm.run(lambda peer: peer.exchange(torch.tensor([float(index[peer])])))
        alone = [result for result in results if result.partner is None]
        assert len(alone) == 1
        assert alone[0].values is None
        for peer, result in zip(swarm.peers, results, strict=True):
            if result.partner is not None:
                assert result.values.item() != index[peer]


def test_one_tells_all():
    swarm = LocalSwarm(3)
    told = swarm.run(lambda peer: bytes(peer.broadcast(b"news" if peer is swarm.peers[1] else None).data))
    assert told == [b"news"] * 3


def test_operations_with_different_tags_and_groups_do_not_mix():
    swarm = LocalSwarm(3)
    pair = [peer.peer_id for peer in swarm.peers[:2]]

    def replica(peer):
        values = torch.tensor([float(swarm.peers.index(peer))])
        means = [peer.all_reduce(values).mean.item()]
        if peer.peer_id in pair:
            means.append(peer.all_reduce(values, group=pair, tag="pair").mean.item())
        peer.barrier()
        return means

    assert swarm.run(replica) == [[1.0, 0.5], [1.0, 0.5], [1.0]]


def test_who_has_finished_is_not_waited_for():
    swarm = LocalSwarm(2)
    steps = dict(zip(swarm.peers, (1, 3), strict=True))
    results = swarm.run(lambda peer: [len(peer.all_reduce(torch.ones(1)).members) for _ in range(steps[peer])])
    assert results == [[2], [2, 1, 1]]


def test_the_failure_of_one_ends_all_and_is_told():
    swarm = LocalSwarm(3)

    def replica(peer):
        if peer is swarm.peers[1]:
            raise ZeroDivisionError("out of luck")
        peer.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="out of luck"):
        swarm.run(replica)


def test_what_does_not_fit_together_is_refused():
    swarm = LocalSwarm(2)
    with pytest.raises(Misfit, match=r"different numbers of values: \[1, 2\]") as misfit:
        swarm.run(lambda peer: peer.all_reduce(torch.ones(1 + swarm.peers.index(peer))))
    assert len(misfit.value.peers) == 1  # the other one
    with pytest.raises(ValueError, match="1 names for 2 peers"):
        LocalSwarm(2, peer_ids=[swarm.peers[0].peer_id])


@pytest.mark.parametrize("window", [None, Window()])
def test_results_are_each_peers_own(window):
    swarm, done = LocalSwarm(2), threading.Barrier(2)

    def replica(peer):
        index = swarm.peers.index(peer)
        values, block = torch.full((3,), 2.0 * index), torch.full((3,), index, dtype=torch.uint8)
        reduced = peer.all_reduce(values, window=window)
        exchanged = peer.exchange(values)
        gathered = peer.gather(block)
        done.wait(60)
        for one in (reduced.mean, exchanged.values, exchanged.ours, values, block):
            one.fill_(7 + index)
        for theirs in gathered.blocks.values():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is not to be written to
                torch.frombuffer(theirs, dtype=torch.uint8).add_(7 + index)
        done.wait(60)
        changed = [torch.frombuffer(bytearray(block), dtype=torch.uint8).tolist() for block in gathered.blocks.values()]
        return reduced.mean.tolist(), exchanged.values.tolist(), sorted(changed)

    for index, result in enumerate(swarm.run(replica)):
        assert result == ([7.0 + index] * 3, [7.0 + index] * 3, [[7 + index] * 3, [8 + index] * 3])


def test_what_a_peer_changes_as_soon_as_it_has_a_result_others_still_get_as_it_was(monkeypatch):
    swarm, changed = LocalSwarm(2), threading.Event()
    meet = swarm.meet

    def slow(peer, *arguments):
        result = meet(peer, *arguments)
        if peer == swarm.peers[1].peer_id:
            assert changed.wait(60)
        return result

    monkeypatch.setattr(swarm, "meet", slow)
    for operation in ("exchange", "gather"):
        changed.clear()

        def replica(peer, operation=operation):
            values = torch.ones(3)
            result = getattr(peer, operation)(values)
            if peer is swarm.peers[0]:
                values.zero_()
                changed.set()
            return result

        _, late = swarm.run(replica)
        theirs = late.values if operation == "exchange" else late.tensors(torch.float32)[swarm.peers[0].peer_id]
        assert theirs.tolist() == [1.0] * 3


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_partner_of_values_that_are_not_finite_gets_nothing_from_them(codec):
    swarm = LocalSwarm(2, codec=codec)
    spoiled = torch.tensor([float("nan"), 1.0, 2.0])
    values = dict(zip(swarm.peers, (spoiled, torch.full((3,), 2.0)), strict=True))
    one, other = swarm.run(lambda peer: peer.exchange(values[peer]))
    assert one.partner == swarm.peers[1].peer_id
    assert one.values.tolist() == pytest.approx([2.0] * 3, rel=1e-4)
    assert (one.weight, one.ours, one.counted) == (1.0, None, False)
    assert other.partner == swarm.peers[0].peer_id
    assert (other.values, other.ours, other.weight) == (None, None, 0.0)
    assert "not finite" in other.problem
    assert (one.bytes_sent, other.bytes_received) == (0, 0)
    assert one.bytes_received == other.bytes_sent > 0


@pytest.mark.parametrize("operation", ["all_reduce", "exchange"])
def test_values_that_are_not_finite_with_what_was_left_out_do_not_count(operation):
    swarm, largest = LocalSwarm(1, codec="int8"), torch.finfo(torch.float32).max
    if operation == "exchange":
        swarm = LocalSwarm(2, codec="int8")

    def replica(peer):
        getattr(peer, operation)(torch.tensor([largest, largest * 0.995]))  # a third of a step of int8 is left out
        return getattr(peer, operation)(torch.tensor([largest, largest]))

    for result in swarm.run(replica):
        assert result.weights == (0.0,) * len(result.members)
        assert not result.counted


def test_patience_ends():
    swarm = LocalSwarm(2)
    with pytest.raises(RequestTimeout):
        swarm.peers[0].all_reduce(torch.ones(1), timeout=0.01)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_real_peers_get_the_same_bits(codec):
    settings = ChannelSettings(codec=codec)
    values = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def rounds(peer, ours):
        return [peer.all_reduce(ours * scale, 1.0 + scale) for scale in (1.0, 0.3, 0.7)]

    with (
        join_collective("local", settings=settings) as one,
        join_collective("local", peers=[one.address], settings=settings) as other,
    ):
        real, threads = {}, []
        for peer, ours in zip((one, other), values, strict=True):
            peer.wait_for(2, timeout=30)
            threads.append(threading.Thread(target=lambda p=peer, v=ours: real.update({p.peer_id: rounds(p, v)})))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = [one.peer_id, other.peer_id]
    swarm = LocalSwarm(2, codec=codec, run=real[ids[0]][0].plan.run, peer_ids=ids)
    local = swarm.run(lambda peer: rounds(peer, values[ids.index(peer.peer_id)]))
    for ours, theirs in zip(local[0], real[ids[0]], strict=True):
        assert torch.equal(ours.mean, theirs.mean)
