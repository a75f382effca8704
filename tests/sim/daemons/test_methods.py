"""Methods other than DiLoCo: their rounds, and what becomes of a peer's own part of them when peers come and go."""

import attrs
import pytest
import torch
import trio

from peer import checkpoint
from peer.settings import AlgorithmSettings, InnerSettings, ModelSettings, RunSettings

LIMIT = 900
STREAMING = AlgorithmSettings(
    "streaming", inner_steps=4, fragments=2, delay=1, alpha=0.5, outer_lr=0.7, outer_momentum=0.5
)
NOLOCO = AlgorithmSettings("noloco", inner_steps=3)
DILOCO = AlgorithmSettings("diloco", inner_steps=2, outer_momentum=0.5)
DILOCOX = AlgorithmSettings("dilocox", inner_steps=2, rank=3)
PACED = AlgorithmSettings("paced", inner_steps=2, outer_momentum=0.5)
COMMON = [
    DILOCO,
    STREAMING,
    AlgorithmSettings("fedavg", inner_steps=2),
    AlgorithmSettings("fedprox", inner_steps=2),
    AlgorithmSettings("fedsam", inner_steps=2),
    AlgorithmSettings("fedopt", inner_steps=2),
    AlgorithmSettings("slowmo", inner_steps=2),
    AlgorithmSettings("quadratic", base_steps=2, alpha=0.02),
    AlgorithmSettings("delayed", inner_steps=2),
    AlgorithmSettings("sparseloco", inner_steps=2),
    PACED,
    DILOCOX,
    AlgorithmSettings("dilocox", inner_steps=2, rank=3, adaptive=False),
]
OWN = [
    NOLOCO,
    AlgorithmSettings("gossip", inner_steps=1),
    AlgorithmSettings("gossip", inner_steps=2, corrected=True),
    AlgorithmSettings("eager", inner_steps=2),
    AlgorithmSettings("co2", inner_steps=2, momentum=0.2),
]


def named(algorithm):
    return algorithm.name


def running(settings, algorithm, rounds=6):
    return attrs.evolve(
        settings,
        run=RunSettings(name="simulated", seed=1, rounds=rounds),
        model=ModelSettings(layers=2, width=16, heads=2, context=8),
        inner=InnerSettings(batch=2, warmup=0),
        algorithm=algorithm,
    )


def agree(*peers):
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    for revision in common:
        assert len({peer.digests()[revision] for peer in peers}) == 1, f"fork at {revision}"
    return common


def saved(peer):
    """The newest checkpoint of a peer."""
    return checkpoint.load_latest(peer.home.checkpoints)


def losses(peer):
    return [event["loss"] for event in peer.events("validation")]


@pytest.mark.parametrize("algorithm", COMMON, ids=named)
async def test_peers_end_with_the_same_state(autojump_clock, seeded_swarm, simulated_swarm, algorithm):
    swarm = seeded_swarm(0, running(simulated_swarm.settings, algorithm))
    with trio.fail_after(LIMIT):
        peers = [await swarm.start(name) for name in "abc"]
        for peer in peers:
            await peer.ended.wait()
    last = 12 if algorithm.name == "dilocox" else 6
    assert last in agree(*peers)
    states = [saved(peer).state.outer for peer in peers]
    assert all(torch.equal(state.parameters, states[0].parameters) for state in states)
    assert losses(peers[0])[-1] < losses(peers[0])[0]
    members = [set(event["contributors"]) for event in peers[0].events("round_committed")]
    alone = last // 6  # the founder may make a round before the others are there
    assert members[alone:] == [{str(peer.id) for peer in peers}] * (last - alone)


@pytest.mark.parametrize("algorithm", OWN, ids=named)
async def test_peers_with_states_of_their_own_end_with_one(autojump_clock, seeded_swarm, simulated_swarm, algorithm):
    swarm = seeded_swarm(0, running(simulated_swarm.settings, algorithm))
    with trio.fail_after(LIMIT):
        peers = [await swarm.start(name) for name in "abc"]
        await peers[0].until_round(6)
        own = [saved(peer).state.outer.parameters for peer in peers]
        for peer in peers:
            await peer.ended.wait()
    if algorithm.name != "co2":  # whose peers differ only while updates get larger
        assert not all(torch.equal(parameters, own[0]) for parameters in own)
    assert 7 in agree(*peers)  # the last exchange makes one of them
    states = [saved(peer).state.outer for peer in peers]
    assert all(torch.equal(state.parameters, states[0].parameters) for state in states)
    assert losses(peers[0])[-1] < losses(peers[0])[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", [DILOCO, STREAMING, NOLOCO, DILOCOX, PACED], ids=named)
async def test_peers_come_and_go_between_and_in_rounds(autojump_clock, seeded_swarm, simulated_swarm, algorithm, seed):
    swarm = seeded_swarm(seed, running(simulated_swarm.settings, algorithm, rounds=14))
    with trio.fail_after(LIMIT):
        a, b, c, _ = [await swarm.start(name) for name in "abcd"]
        await a.until_round(2)
        late = await swarm.start("late")
        round_ = len(c.events("round_started"))
        await c.until(lambda: len(c.events("round_started")) > round_)
        swarm.kill("c")  # in the midst of an operation
        await a.until_round(max(a.digests()) + 2)
        swarm.leave("d")
        again = await swarm.start("c")
        await again.until(lambda: again.events("round_committed"))
        swarm.kill("a")
        for peer in (b, late, again):
            await peer.ended.wait()
            assert peer.error is None
    last = {NOLOCO: 15, DILOCOX: 28}.get(algorithm, 14)
    assert last in agree(b, late, again)
    states = [saved(peer).state.outer for peer in (b, late, again)]
    assert all(torch.equal(state.parameters, states[0].parameters) for state in states)
    assert losses(b)[-1] < losses(b)[0]
    for peer in (late, again):
        assert any(str(peer.id) in event["contributors"] for event in peer.events("round_committed"))


@pytest.mark.parametrize("algorithm", [STREAMING, NOLOCO, DILOCOX], ids=named)
async def test_the_sides_of_a_partition_become_one_again(autojump_clock, seeded_swarm, simulated_swarm, algorithm):
    swarm = seeded_swarm(0, running(simulated_swarm.settings, algorithm, rounds=0))
    with trio.fail_after(LIMIT):
        peers, _ = await swarm.split_and_heal()
    assert any(peer.events("branch_left") for peer in peers)


async def test_local_steps_go_on_during_an_exchange(autojump_clock, seeded_swarm, simulated_swarm):
    """Streaming: when a slow exchange is over, the steps of the delay are done."""
    swarm = seeded_swarm(0, running(simulated_swarm.settings, STREAMING, rounds=4))
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name, wait_for=2) for name in "ab"]
        await a.ended.wait()
        await b.ended.wait()
    kinds = [event["event"] for event in a.log if event["event"] in ("round_started", "inner", "round_committed")]
    assert "round_started inner round_committed" in " ".join(kinds)
    assert max(event["step"] for event in a.events("inner")) == 4 + 3 * 2 + 1  # with one for a round that never comes


@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        (AlgorithmSettings("sparseloco", inner_steps=2), "memory.error"),
        (DILOCOX, "memory.error"),
        (OWN[3], "flight.own"),
        (NOLOCO, "share"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_what_a_peer_remembers_for_itself_outlives_it(
    autojump_clock, seeded_swarm, simulated_swarm, algorithm, kept
):
    """It goes on where it was if nobody has gone on without it; else it takes a state, and forgets."""
    swarm = seeded_swarm(0, running(simulated_swarm.settings, algorithm, rounds=0))
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name, wait_for=2) for name in "ab"]
        await a.until(lambda: losses(a)[3:])
        await b.until(lambda: losses(b)[3:])
        for name in "ab":
            swarm.kill(name)
        before = saved(a)
        assert any(name.startswith(kept) for name in before.own)
        again = await swarm.start("a")
        trainer = swarm.trainers["a"]
        await again.until(lambda: again.events("validation"))
        assert trainer.own_state().keys() == before.own.keys()
        assert all(torch.equal(values, before.own[name]) for name, values in trainer.own_state().items())
        await again.until_round(before.state.header.revision + 3)
        assert not again.events("synced")
        other = await swarm.start("b")
        await other.until(lambda: other.events("synced"))
        assert swarm.trainers["b"].own_state() == {}
    for name in "ab":
        swarm.leave(name)
