"""Requests to a stage's server, on streams that are used again."""

import hashlib
import random

import attrs
import pytest
import torch
import trio
import trio.testing

from optim.swarm.messages import Request
from optim.swarm.payloads import Packer
from optim.swarm.server import Batch, StageServer
from optim.swarm.stages import cut, sequential
from peer.pipeline.calls import IDLE, Calls
from peer.pipeline.messages import (
    FetchTied,
    Sizes,
    WithdrawReply,
    WithdrawRequest,
    ask_of,
    receive_answer,
    send_payloads,
    stage_run,
)
from peer.pipeline.service import LONGEST_BATCH, StageService
from peer.pipeline.tensors import load_tensors
from peer.pipeline.transfer import fetch_tensors
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, RequestTimeout
from protocol.identity import Identity
from protocol.memory import MemoryNetwork
from protocol.transport import Address

RUN = hashlib.sha256(b"calls").digest()
LATENCY = 0.1  # seconds, one way
LENGTH = 1 << 16  # values of fp32: four times what a stream may carry at first
SIZES = Sizes(samples=1, tokens=LENGTH, width=1)


def chain():
    """What does nothing to values above 0."""
    return sequential(torch.nn.Sequential(torch.nn.PReLU(), torch.nn.PReLU()), lambda outputs, targets: outputs.sum(1))


def request(number):
    return Request(kind="forward", step=0, number=number, inputs=Packer().pack(torch.rand(1, LENGTH), "fp32"))


class Pair:
    """A server of a stage, and a trainer on another host that asks it."""

    def __init__(self, nursery):
        self.network = network = MemoryNetwork(latency=LATENCY)
        self.nursery, self.run = nursery, stage_run(RUN, 0)
        self.seconds, self.batches = 0.0, []  # of a request, and how many were computed together
        self.endpoints = [
            Endpoint(
                Identity.from_seed(bytes([number] * 32)), network.transport(f"host{number}"), rng=random.Random(number)
            )
            for number in range(2)
        ]
        self.calls = Calls(self.endpoints[1], SIZES)

    async def start(self):
        server, trainer = self.endpoints
        for number, endpoint in enumerate(self.endpoints):
            await self.nursery.start(endpoint.run, Address(f"host{number}", 7070))
        await self.serve()
        trainer.learn(server.peer_id, Address("host0", 7070))
        await trainer.connect(server.peer_id)

    async def serve(self):
        stage = cut(chain(), 2)[0]
        self.service = StageService(
            self.endpoints[0],
            self.run,
            StageServer(stage, torch.optim.SGD(stage.parameters(), lr=0.1), microbatches=8),
            sizes=SIZES,
            admits=lambda peer: True,
            compute=self.compute,
            courtesy=Courtesy(lambda: 0),
            changed=lambda: None,
            began=lambda kind, step: None,
        )
        self.serving = trio.CancelScope()

        async def run(*, task_status):
            with self.serving:
                await self.service.run(task_status=task_status)

        await self.nursery.start(run)

    async def compute(self, function, *arguments):
        if arguments and isinstance(arguments[0], Batch):
            self.batches.append(len(arguments[0].requests))
            await trio.sleep(self.seconds * self.batches[-1])
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    async def ask(self, number):
        """The simulated seconds that it took."""
        began = trio.current_time()
        asked = request(number)
        answer = await self.calls.ask(self.endpoints[0].peer_id, self.run, asked)
        assert answer.values.data == asked.inputs.data
        return trio.current_time() - began


@pytest.fixture
async def pair(nursery):
    pair = Pair(nursery)
    await pair.start()
    return pair


ROUND_TRIP = pytest.approx(2 * LATENCY, rel=0.1)


async def test_only_the_first_request_waits_for_windows(autojump_clock, pair):
    times = [await pair.ask(number) for number in range(3)]
    assert times[0] == pytest.approx(4 * LATENCY, rel=0.1)  # the request waits once, the answer does not
    assert times[1:] == [ROUND_TRIP] * 2


async def test_requests_at_the_same_time_have_streams_of_their_own(autojump_clock, pair):
    times = {}

    async def ask(number):
        times[number] = await pair.ask(number)

    for some in (range(3), range(3, 6)):  # more than that is not under way at a time on this network
        async with trio.open_nursery() as nursery:
            for number in some:
                nursery.start_soon(ask, number)
    assert [times[number] for number in range(3, 6)] == [ROUND_TRIP] * 3


async def test_a_stream_that_was_not_used_for_long_is_closed(autojump_clock, pair):
    first = await pair.ask(0)
    await trio.sleep(IDLE / 2)
    assert await pair.ask(1) == ROUND_TRIP
    await trio.sleep(IDLE + 1)
    assert await pair.ask(2) == pytest.approx(first)


async def test_a_connection_that_broke_is_made_again(autojump_clock, pair):
    await pair.ask(0)
    server, trainer = pair.endpoints
    server.disconnect(trainer.peer_id, "a test")
    await trio.sleep(1)
    await pair.ask(1)


async def test_what_the_trainer_has_given_up_is_not_asked_for_again(autojump_clock, pair):
    """It has been told to others: it must not be counted here as well."""
    await pair.ask(0)
    hasty = attrs.evolve(request(1), patience=1.0)
    async with trio.open_nursery() as nursery:
        pair.network.partition(["host0"], ["host1"])
        nursery.start_soon(until_back, pair)
        with pytest.raises(RequestTimeout):
            await pair.calls.ask(pair.endpoints[0].peer_id, pair.run, hasty)
    assert len(pair.batches) == 1


async def until_back(pair):
    await trio.sleep(20)  # the connection has been lost
    pair.network.heal()
    await pair.endpoints[1].connect(pair.endpoints[0].peer_id)


async def test_of_another_history_no_gradients_are_told(autojump_clock, pair):
    server, trainer = pair.endpoints
    pair.service.keep_tied({step: {"a": torch.full((2,), float(step))} for step in (7, 8)})
    earlier = attrs.evolve(await pair.service.snapshot(), step=3, tied={2: {"a": torch.full((2,), 2.0)}})
    await pair.service.restore(earlier)
    _, data = await fetch_tensors(trainer, server.peer_id, FetchTied(pair.run, 2), most=1 << 16)
    assert load_tensors(data)["a"].tolist() == [2.0, 2.0]
    with pytest.raises(RequestRefused):
        await fetch_tensors(trainer, server.peer_id, FetchTied(pair.run, 8), most=1 << 16)


async def test_a_server_that_serves_no_more_says_so_at_once(autojump_clock, pair):
    await pair.ask(0)
    pair.serving.cancel()
    await trio.lowlevel.checkpoint()
    with pytest.raises(RequestRefused) as refused:
        await pair.ask(1)
    assert refused.value.code == "gone"
    await pair.serve()
    await pair.ask(2)


async def test_large_tensors_come_with_the_answer_that_tells_of_them(autojump_clock, pair):
    server, trainer = pair.endpoints
    pair.service.keep_tied({0: {"a": torch.rand(LENGTH)}})
    began = trio.current_time()
    step, data = await fetch_tensors(trainer, server.peer_id, FetchTied(pair.run, 0), most=8 * LENGTH)
    assert (step, len(data) > 4 * LENGTH) == (0, True)
    assert trio.current_time() - began == ROUND_TRIP


async def test_requests_are_computed_together_as_long_as_that_takes_no_time_to_speak_of(autojump_clock, pair):
    pair.seconds = LONGEST_BATCH / 3.5
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(pair.service.ask, request(number))
    assert pair.batches == [1, 3, 3, 1]  # of the first one nothing is known


async def test_a_stream_stays_with_its_stage(autojump_clock, pair):
    server, trainer = pair.endpoints
    async with trainer.open(server.peer_id, ask_of(pair.run, request(0)), bulk=True) as stream:
        await send_payloads(stream, request(0).inputs)
        await receive_answer(stream, SIZES)
        await stream.send(ask_of(stage_run(RUN, 1), request(1)))
        with pytest.raises(RequestRefused) as refused:
            await receive_answer(stream, SIZES)
    assert refused.value.code == "unknown_run"


@pytest.mark.parametrize("gives_up", ["a later state", "a withdrawal"])
async def test_what_is_not_done_any_more_is_refused_at_once(autojump_clock, pair, gives_up):
    server_id, refused = pair.endpoints[0].peer_id, trio.Event()

    async def ask():
        with pytest.raises(RequestRefused) as refusal:
            await pair.calls.ask(server_id, pair.run, request(3))
        assert refusal.value.code == "stale"
        refused.set()

    async with trio.open_nursery() as nursery:
        async with pair.service.paused() as server:  # so it waits
            if gives_up == "a later state":
                nursery.start_soon(pair.service.restore, attrs.evolve(server.snapshot(), step=1))
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask)
            while not len(server.arrivals):  # noqa: ASYNC110 - on simulated time
                await trio.sleep(LATENCY)
            if gives_up == "a withdrawal":
                await pair.endpoints[1].request(server_id, WithdrawRequest(pair.run, 0, 3), WithdrawReply)
        with trio.fail_after(5):
            await refused.wait()
