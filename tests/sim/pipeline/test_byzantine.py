"""A server that sends what makes no sense costs the others no more than one that has died."""

import attrs
import pytest
import safetensors.torch
import torch
import trio

from optim.swarm.ledger import audit
from optim.swarm.payloads import Packer, Payload
from peer.pipeline.audit import records
from peer.pipeline.node import PipelineNode
from protocol.errors import RequestRefused, RoundAborted
from tests.sim.pipelines import pipeline

PACKER = Packer()
STEPS = 6


def spoil(payload, data=None, **changes):
    return payload and attrs.evolve(payload, data=payload.data if data is None else data(payload.data), **changes)


def misshapen(payload):
    return payload and PACKER.pack(torch.ones(2, 3), "fp32")


ANSWERS = {
    "not finite": lambda payload: spoil(payload, lambda data: b"\xff" * len(data)),
    "short": lambda payload: spoil(payload, lambda data: data[:-1]),
    "encoding": lambda payload: spoil(payload, encoding="bf16"),
    "tokens": lambda payload: spoil(payload, encoding="tokens"),
    "shape": misshapen,
    "samples": lambda payload: payload and PACKER.pack(torch.ones(1, *payload.shape[1:]), "fp32"),
    "large": lambda payload: payload and Payload("fp32", (2, 1 << 20), payload.data),
    "nothing": lambda payload: None,
}


async def served(swarm, peer):
    await swarm.until(lambda: peer.node._serving)
    return next(iter(peer.node._serving.values()))


def made(peer):
    return peer.node.crew.own.step


def is_left(peer, liar):
    """Whether a peer asks the liar for nothing more, as it has found out itself, or most others have."""
    return peer.of("distrusted") or peer.node.crew.is_shunned(liar.id)


async def goes_on(swarm, liar, asked):
    """Trainers find out who lies, say why, ask it for nothing any more, and train without it."""
    trainers = [peer for peer in swarm.peers if peer is not liar]
    with trio.fail_after(600):
        await swarm.until(lambda: all(is_left(peer, liar) for peer in trainers))
        await trio.sleep(1)  # what was on its way
        before, count = max(made(peer) for peer in trainers), len(asked)
        await swarm.until(lambda: min(made(peer) for peer in trainers) >= before + 5)
    told = [event for peer in trainers for event in peer.of("distrusted")]
    assert {event["peer"] for event in told} == {str(liar.id)}
    assert all(event["reason"] for event in told)
    assert len(asked) == count


async def ends(swarm, liar, steps=STEPS):
    """All others make all steps."""
    others = [peer for peer in swarm.peers if peer is not liar]
    with trio.fail_after(300):
        await swarm.until(lambda: all(peer.saved is not None and peer.saved[1].step == steps for peer in others))


def liar_of(swarm, place):
    liar = swarm.peers[place]
    liar.node = attrs.evolve(liar.node, trains=False)
    return liar


@pytest.mark.parametrize(
    ("place", "part", "way"),
    [
        *((1 + 2 * (number % 2), "values", way) for number, way in enumerate(ANSWERS)),
        *((3, "losses", way) for way in ("not finite", "samples", "nothing")),
    ],
)
async def test_answers(autojump_clock, swarm_of, place, part, way):
    async with swarm_of(pipeline(2, 0), [0, 0, 1, 1], seed=place) as swarm:
        liar = liar_of(swarm, place)
        service, asked = await served(swarm, liar), []
        honest = service.ask

        async def ask(request):
            answer = await honest(request)
            asked.append(request)
            return attrs.evolve(answer, **{part: ANSWERS[way](getattr(answer, part))})

        service.ask = ask
        await goes_on(swarm, liar, asked)


async def test_refusals_of_what_makes_sense(autojump_clock, swarm_of):
    async with swarm_of(pipeline(3, 0), [0, 1, 1, 2]) as swarm:
        liar = liar_of(swarm, 2)
        service, asked = await served(swarm, liar), []

        async def ask(request):
            asked.append(request)
            raise RequestRefused("nonsense", code="misfit")

        service.ask = ask
        await goes_on(swarm, liar, asked)


def strange(step):
    return safetensors.torch.save({"model/a": torch.zeros(2, dtype=torch.float8_e4m3fn)})


STATES = {
    "bytes": lambda state: (state[0], b"\xff" * 100),
    "kind": lambda state: (state[0], strange(state[0])),
    "nothing": lambda state: (state[0], safetensors.torch.save({})),
    "not finite": lambda state: (state[0], safetensors.torch.save({"model/a": torch.full((2,), torch.nan)})),
    "step": lambda state: (1 << 40, state[1]),
}


@pytest.mark.parametrize("way", STATES)
async def test_states(autojump_clock, swarm_of, way):
    """The only server of a stage gives a newcomer nonsense; it takes a copy, or that of another one."""
    async with swarm_of(pipeline(2, 12), [0, 1, 1], seed=1) as swarm:
        liar = liar_of(swarm, 1)
        service = await served(swarm, liar)
        honest = service._dumped

        async def dumped():
            return STATES[way](await honest())

        service._dumped = dumped
        newcomer = swarm.add(1)
        swarm.start(newcomer)
        with trio.fail_after(200):
            await swarm.until(lambda: newcomer.saved is not None and newcomer.saved[1].step == 12)


async def test_tied_gradients(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, STEPS), [0, 1, 1], seed=2) as swarm:
        liar = min(swarm.peers[1:], key=lambda peer: peer.id)  # who is asked first
        service = await served(swarm, liar)
        honest = service.keep_tied
        service.keep_tied = lambda gradients: honest({step: {"a": torch.ones(1)} for step in gradients})
        await ends(swarm, liar)


@pytest.mark.parametrize("ledger", [{5000: 2}, {-1: 2}, {0: 1 << 40}, dict.fromkeys(range(6), 2)])
async def test_ledgers(autojump_clock, swarm_of, ledger):
    async with swarm_of(pipeline(2, STEPS), [0, 1, 1], seed=1) as swarm:
        liar = swarm.peers[1]
        service = await served(swarm, liar)
        honest = service.server.freeze

        def freeze():
            honest()
            return ledger

        service.server.freeze = freeze
        await ends(swarm, liar)


def sicken(service, times):
    """So many times, what the server brings to the mean is not finite."""
    honest, left = service.server.contribution, [times]

    def contribution():
        ours = honest()
        left[0] -= 1
        return attrs.evolve(ours, values=ours.values * torch.nan) if left[0] >= 0 else ours

    service.server.contribution = contribution


@pytest.mark.parametrize("seed", range(3))
async def test_whose_gradients_are_never_finite_serves_no_stage_any_more(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, STEPS), [0, 1, 1], seed=seed) as swarm:
        sick = swarm.peers[1 + seed % 2]
        sicken(await served(swarm, sick), 1 << 30)
        await ends(swarm, sick)
        assert [event["stage"] for event in sick.of("unfit")] == [1]
        assert not any(peer.of("unfit") for peer in swarm.peers if peer is not sick)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("assignment", [[0, 1], [0, 1, 1]])
async def test_gradients_that_are_not_finite_once_are_computed_again(autojump_clock, swarm_of, assignment, seed):
    async with swarm_of(pipeline(2, STEPS), assignment, seed=seed) as swarm:
        sicken(await served(swarm, swarm.peers[1]), 1)
        with trio.fail_after(300):
            await swarm.until(
                lambda: all(peer.saved is not None and peer.saved[1].step == STEPS for peer in swarm.peers)
            )
        assert not any(peer.of("unfit") or peer.of("distrusted") for peer in swarm.peers)
        told = records(event for peer in swarm.peers for event in peer.events)
        samples = dict.fromkeys(range(swarm.pipeline.total), 2)
        assert audit(told, stages=2, steps=range(STEPS), samples=samples) == []


class NotAdmitted(RoundAborted):
    def __init__(self):
        super().__init__("it goes on as if nothing were wrong")


async def never_ends(*_):
    await trio.sleep_forever()


@pytest.mark.parametrize("seed", range(3))
async def test_who_never_brings_what_it_has_counted_is_shunned(autojump_clock, swarm_of, seed, monkeypatch):
    async with swarm_of(pipeline(2, 0), [0, 1, 1, 1], seed=seed) as swarm:
        liar = swarm.peers[1 + seed]
        service = await served(swarm, liar)
        sicken(service, 1 << 30)
        monkeypatch.setattr("peer.pipeline.settling.Unfit", NotAdmitted)
        monkeypatch.setattr(PipelineNode, "_watch_for_distrust", never_ends)
        others = [peer for peer in swarm.peers if peer is not liar]
        with trio.fail_after(300):
            await swarm.until(lambda: all(peer.node.crew.is_shunned(liar.id) for peer in others))
            before = max(made(peer) for peer in others)
            await swarm.until(lambda: min(made(peer) for peer in others) >= before + 5)


@pytest.mark.parametrize("seed", range(3))
async def test_a_stage_that_has_only_a_liar_gets_help(autojump_clock, swarm_of, seed):
    async with swarm_of(pipeline(2, 0), [0, 0, 0, 1], seed=seed) as swarm:
        liar = liar_of(swarm, 3)
        liar.node.stage = 1
        service = await served(swarm, liar)

        async def ask(request):
            raise RequestRefused("nonsense", code="misfit")

        service.ask = ask
        others = [peer for peer in swarm.peers if peer is not liar]
        with trio.fail_after(300):
            await swarm.until(lambda: any(peer.of("moved") for peer in others))
            await swarm.until(lambda: min(made(peer) for peer in others) >= 5)


async def test_of_two_that_distrust_each_other_both_are_heeded(autojump_clock, swarm_of):
    async with swarm_of(pipeline(2, STEPS), [0, 1, 1], seed=1) as swarm:
        one = swarm.peers[1]
        await served(swarm, one)
        one.node.crew.announce(distrusts=(swarm.peers[2].id,))
        with trio.fail_after(300):
            await swarm.until(
                lambda: all(peer.saved is not None and peer.saved[1].step == STEPS for peer in swarm.peers)
            )


@pytest.mark.parametrize("attempt", [1 << 20, 1 << 47])
async def test_attempts(autojump_clock, swarm_of, attempt):
    """Whoever says once that so many settlements of a step have failed leaves room for others."""
    async with swarm_of(pipeline(2, STEPS), [0, 1, 1], seed=1) as swarm:
        service = await served(swarm, swarm.peers[1])
        honest = service.server.freeze

        def freeze():
            honest()
            service.server.attempt, service.server.freeze = attempt, honest
            return {}

        service.server.freeze = freeze
        await ends(swarm, swarm.peers[1])
