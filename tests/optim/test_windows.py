"""Swarms inside one process whose peers do not wait for the slowest, on simulated time."""

import threading

import pytest
import torch

from optim import LocalSwarm
from protocol.collective import Window
from protocol.errors import Behind, Misfit, RequestTimeout


def told(reduced):
    return [(one.number, one.mean[0].item(), len(one.contributors)) for one in (*reduced.missed, reduced)]


def work(swarm, costs, until, window):
    """Peers that do something that takes so long, reduce, and begin again: what they got, and when."""

    def replica(peer):
        results = []
        cost = costs[swarm.peers.index(peer)]
        while peer.time < until:
            peer.advance(cost)
            results.append((peer.all_reduce(torch.tensor([cost]), window=window), peer.time))
        return results

    return swarm.run(replica)


def test_without_time_everybody_is_waited_for():
    swarm = LocalSwarm(3)
    window = Window(quorum=1, grace=0.5)
    results = swarm.run(lambda peer: [told(peer.all_reduce(torch.ones(1), window=window)) for _ in range(4)])
    assert results == [[[(number, 1.0, 3)] for number in (1, 2, 3, 4)]] * 3


def test_who_is_slow_takes_part_when_it_is_ready_and_gets_what_it_has_missed():
    results = work(LocalSwarm(3), (1.0, 1.0, 4.0), 8.0, Window(quorum=2, grace=0.5))
    *quick, slow = results
    for one in quick:
        # After each step of 1 the two wait 0.5 for the third one, which is ready in time for the third operation.
        assert [time for _, time in one[:5]] == [1.5, 3.0, 4.0, 5.5, 7.0]
        assert [told(reduced) for reduced, _ in one[:3]] == [[(1, 1.0, 2)], [(2, 1.0, 2)], [(3, 2.0, 3)]]
    reduced, time = slow[0]
    assert (told(reduced), time) == ([(1, 1.0, 2), (2, 1.0, 2), (3, 2.0, 3)], 4.0)


def test_everybody_has_the_same_bits_in_the_same_order_however_threads_run():
    runs = [work(LocalSwarm(4), (1.0, 1.1, 1.7, 3.9), 40.0, Window(quorum=1, grace=0.3)) for _ in range(3)]
    assert len({str([[(told(reduced), time) for reduced, time in one] for one in results]) for results in runs}) == 1
    orders = []
    for results in runs[0]:
        operations = [one for reduced, _ in results for one in (*reduced.missed, reduced)]
        assert [one.number for one in operations] == list(range(1, len(operations) + 1))
        orders.append([one.mean.item() for one in operations])
    longest = max(orders, key=len)
    assert all(order == longest[: len(order)] for order in orders)


def test_a_quorum_waits_for_so_many():
    results = work(LocalSwarm(3), (1.0, 2.0, 10.0), 2.0, Window(quorum=2, grace=0.5))
    assert [told(results[0][0][0]), results[0][0][1]] == [[(1, 1.5, 2)], 2.5]


def test_too_few_are_enough_if_nobody_else_can_come():
    swarm = LocalSwarm(2)

    def replica(peer):
        if peer is swarm.peers[0]:
            reduced = peer.all_reduce(torch.ones(1), window=Window(quorum=2, grace=0.5))
            peer.barrier()
            return told(reduced)
        peer.barrier()
        return None

    assert swarm.run(replica) == [[(1, 1.0, 1)], None]


def test_who_has_come_to_its_end_is_not_waited_for():
    results = work(LocalSwarm(2), (1.0, 5.0), 4.0, Window(quorum=2, grace=0.5))
    assert [len(one) for one in results] == [1, 1]
    results = work(LocalSwarm(2), (1.0, 5.0), 6.0, Window(quorum=1, grace=0.5))
    assert told(results[1][-1][0])[-1][2] == 1


def test_who_has_missed_more_than_is_kept_is_told():
    with pytest.raises(Behind):
        work(LocalSwarm(2), (1.0, 10.0), 30.0, Window(quorum=1, grace=0.1, keep=4))


def test_simulated_time_passes_for_all_who_wait_for_each_other():
    swarm = LocalSwarm(3)

    def replica(peer):
        peer.advance(1.0 + swarm.peers.index(peer))
        peer.barrier()
        return peer.time

    assert swarm.run(replica) == [3.0, 3.0, 3.0]


def test_what_does_not_fit_together_is_refused():
    swarm = LocalSwarm(2)
    with pytest.raises(Misfit, match=r"different numbers of values"):
        swarm.run(lambda peer: peer.all_reduce(torch.ones(1 + swarm.peers.index(peer)), window=Window()))
    swarm = LocalSwarm(1)
    swarm.peers[0].all_reduce(torch.ones(1), window=Window())
    with pytest.raises(ValueError, match="another window"):
        swarm.peers[0].all_reduce(torch.ones(1), window=Window(quorum=2))


def test_patience_ends():
    swarm, given_up = LocalSwarm(2), threading.Event()

    def replica(peer):
        if peer is swarm.peers[0]:
            with pytest.raises(RequestTimeout):
                peer.all_reduce(torch.ones(1), window=Window(quorum=2), timeout=0.01)
            given_up.set()
        given_up.wait()
        peer.advance(1.0)
        return told(peer.all_reduce(torch.ones(1), window=Window(quorum=2)))

    assert swarm.run(replica) == [[(1, 1.0, 2)]] * 2


def test_the_failure_of_one_ends_all():
    swarm = LocalSwarm(2)

    def replica(peer):
        if peer is swarm.peers[1]:
            raise ZeroDivisionError("out of luck")
        peer.all_reduce(torch.ones(1), window=Window(quorum=2))

    with pytest.raises(ZeroDivisionError, match="out of luck"):
        swarm.run(replica)
