"""What a notebook does: an event loop runs in the main thread, cells are interrupted, and run again."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import optim.local
import optim.optimizer
from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from peer import Swarm
from protocol.blocking import Handle
from protocol.collective import Window
from protocol.errors import ShoalError
from protocol.standalone import join_collective
from tests.optim.toys import batches, make_model, train, values_of

HERE = {"listen": "127.0.0.1:0", "map_port": False}
DELAYED = {"inner_steps": 2, "fragments": 2, "delay": 1}


def ones(peer):
    return peer.all_reduce(torch.ones(2)).mean.tolist()


def trained(peer, seed, name="diloco", constants=None):
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = LowCommunicationOptimizer(model, inner, peer, recipe(name, **(constants or {"inner_steps": 2})))
    train(model, optimizer, batches(seed, 6))
    optimizer.finish()
    return values_of(model).tolist()


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def in_an_event_loop(function):
    """Calls it as a cell is called. Other than `asyncio.run`, this leaves interrupts to the cell."""

    async def cell():
        return function()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def test_a_local_swarm_in_a_cell_that_is_interrupted_and_run_again(monkeypatch):
    swarm = LocalSwarm(3)
    errors, at_work = [], threading.Event()

    def endless(peer):
        try:
            while True:
                ones(peer)
                at_work.set()
        except ShoalError as error:
            errors.append(str(error))
            raise

    def interrupted_wait(lives):
        if lives:
            at_work.wait()
            raise KeyboardInterrupt

    def cell():
        with monkeypatch.context() as patch:
            patch.setattr(optim.local, "wait", interrupted_wait)
            with pytest.raises(KeyboardInterrupt):
                swarm.run(endless)
        assert swarm.run(ones) == [[1.0, 1.0]] * 3
        return swarm.run(lambda peer: trained(peer, swarm.peers.index(peer)))

    one, *others = in_an_event_loop(cell)
    assert [one, one] == others
    assert errors.count("the run was interrupted") > 0


def test_replicas_do_not_begin_if_their_start_is_interrupted(monkeypatch):
    swarm, begun = LocalSwarm(3), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Barrier, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            swarm.run(begun.append)
    assert begun == []
    assert swarm.run(ones) == [[1.0, 1.0]] * 3


def test_an_operation_that_is_interrupted_can_be_repeated(monkeypatch):
    swarm = LocalSwarm(2)
    one, other = swarm.peers
    with monkeypatch.context() as patch:
        patch.setattr(swarm._changed, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.all_reduce(torch.full((2,), 7.0))
    means = together(
        lambda: one.all_reduce(torch.zeros(2)).mean.tolist(),
        lambda: other.all_reduce(torch.full((2,), 4.0)).mean.tolist(),
    )
    assert means == [[2.0, 2.0]] * 2


def test_a_run_in_which_operations_with_a_window_failed_can_be_repeated():
    swarm, window = LocalSwarm(3), Window(grace=1.0)

    def replica(peer):
        for _ in range(2):
            reduced = peer.all_reduce(torch.ones(2), window=window)
        if fails and peer is swarm.peers[1]:
            raise ValueError("a mistake")
        return peer.all_reduce(torch.ones(2), window=window).mean.tolist(), reduced.mean.tolist()

    fails = True
    with pytest.raises(ValueError, match="a mistake"):
        swarm.run(replica)
    fails = False
    assert swarm.run(replica) == [([1.0, 1.0], [1.0, 1.0])] * 3


def test_a_step_that_is_interrupted_while_it_waits_for_a_late_result_loses_nothing(alone, monkeypatch):
    def result(interrupted):
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = LowCommunicationOptimizer(model, inner, alone, recipe("streaming", **DELAYED))
        train(model, optimizer, batches(0, 2))
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(optim.optimizer, "wait", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.finish()
        optimizer.finish()
        assert optimizer.rounds == 1
        return values_of(model)

    assert torch.equal(result(True), result(False))


@pytest.mark.parametrize("kind", ["swarm", "collective"])
def test_real_peers_in_a_cell_that_is_interrupted_and_run_again(kind, monkeypatch):
    def train_in(one, other):
        one.wait_for(2, timeout=30)
        with monkeypatch.context() as patch:
            patch.setattr(Handle, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                one.all_reduce(torch.ones(2))
        return together(lambda: trained(one, 0), lambda: trained(other, 1))

    def cell():
        if kind == "swarm":
            with Swarm.found("a cell", **HERE) as one, Swarm.join(one.ticket, **HERE) as other:
                return train_in(one, other)
        with join_collective("a cell") as one, join_collective("a cell", peers=[one.address]) as other:
            return train_in(one, other)

    for _ in range(2):
        one, other = in_an_event_loop(cell)
        assert one == other
