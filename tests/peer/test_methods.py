"""The daemon and `LowCommunicationOptimizer` are two drivers of the same methods: they give the same bits."""

from functools import partial

import attrs
import pytest
import torch

from optim import LocalSwarm, LowCommunicationOptimizer
from optim.sender import perform
from peer.algorithm import AlgorithmSettings, names
from peer.data import Corpus
from peer.model import Transformer
from peer.settings import DataSettings, InnerSettings, ModelSettings, Settings
from peer.trainer import Trainer, _loss, adamw
from protocol.collective import Reduced
from protocol.identity import PeerId
from protocol.plan import Salvaged, Source

ROUNDS = 6
EXACT = {"decoupled": {"delay": 0}}
"""With a delay, how much is done before a result comes depends on the machine."""
SMALL = {"inner_steps": 4, "base_steps": 3, "rank": 2, "fragments": 2, "delay": 1, "quorum": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {index}: the sheep are {index * 7 % 100}\n" for index in range(2000)))
    return Corpus.open(path)


def settings_of(name):
    algorithm = AlgorithmSettings(name)
    small = {key: value for key, value in SMALL.items() if algorithm.get(key) is not None}
    return Settings(
        model=ModelSettings(layers=2, width=16, heads=2, context=16),
        data=DataSettings(shards=8, validation=0.1),
        inner=InnerSettings(lr=1e-2, warmup=0, batch=2, clip=1e9),
        algorithm=AlgorithmSettings(name, **small | EXACT.get(name, {})),
    )


@pytest.mark.parametrize("name", names())
def test_the_daemon_does_what_the_optimizer_does(name, corpus):
    settings, seen = settings_of(name), {}

    def daemon(peer):
        """Rounds as a node makes them, with all local steps that go on beside an exchange."""
        trainer = Trainer(settings, corpus, peer.peer_id)
        windows = seen[peer.peer_id] = []
        original = trainer._step

        def step(batch, on_step):
            windows.append(batch)
            original(batch, on_step)

        trainer._step = step
        state = trainer.initial_state()
        revisions = ROUNDS * trainer.schedule.operations
        for revision in range(1, revisions + 1):
            trainer.start_round(state, revision, peer.members)
            run(trainer, trainer.steps(revision, 1.0))
            contribution = trainer.contribution()
            is_last = revision > revisions - trainer.schedule.operations
            run(trainer, 0 if is_last else min(contribution.meanwhile, trainer.recipe.policy.delay))
            outcome = perform(peer, contribution.operation, contribution.part)
            state = trainer.commit(state, outcome, revision)
        return trainer.flat.read(), state

    def script(peer):
        model = Transformer(settings.model, seed=settings.run.seed)
        optimizer = LowCommunicationOptimizer(
            model, adamw(model, settings.inner), peer, settings.algorithm.recipe(), tokens_per_step=2 * 16
        )

        def closure(batch):
            optimizer.zero_grad()
            loss = _loss(model, batch)
            loss.backward()
            return loss.item()

        for batch in seen[peer.peer_id]:
            optimizer.step(partial(closure, batch))
        local = optimizer._flat.read()
        if optimizer.recipe.shared and optimizer._pending is not None:
            optimizer._land()  # as what the daemon commits, and applies later
        optimizer.close()
        return local, optimizer.outer

    torch.set_num_threads(1)
    daemons, scripts = LocalSwarm(3).run(daemon), LocalSwarm(3).run(script)
    for (theirs, state), (ours, outer) in zip(daemons, scripts, strict=True):
        assert torch.equal(theirs, ours)
        assert torch.equal(state.parameters, outer.parameters)
        assert all(torch.equal(state.buffers[key], outer.buffers[key]) for key in outer.buffers)
    (_, first), (_, second), _ = daemons
    assert torch.equal(first.parameters, second.parameters) == (settings.algorithm.recipe().shared)


def run(trainer, steps):
    trainer.run(steps, should_stop=lambda: False, on_step=lambda info: None)


@pytest.mark.parametrize("name", ["eager", "co2", "gossip", "delayed", "streaming"])
def test_what_a_round_has_made_is_applied_although_our_own_steps_went_wrong_meanwhile(name, corpus):
    settings = settings_of(name)

    def daemon(peer):
        trainer = Trainer(settings, corpus, peer.peer_id)
        spoils = peer is swarm.peers[0]
        state = trainer.initial_state()
        for revision in range(1, 5):
            trainer.start_round(state, revision, peer.members)
            if revision == 4:
                break
            run(trainer, trainer.schedule.steps(revision))
            contribution = trainer.contribution()
            if spoils and revision == 3:  # while the exchange is on its way
                before, trainer._gradient = trainer._replica.outer, lambda windows: None
            run(trainer, contribution.meanwhile)
            outcome = perform(peer, contribution.operation, contribution.part)
            state = trainer.commit(state, outcome, revision)
        replica = trainer._replica
        if spoils:
            assert not replica.flying
            assert replica.local_steps == 0
            assert torch.equal(trainer.flat.read(), replica.outer.parameters)
            assert not torch.equal(replica.outer.parameters, before.parameters)
            if name == "gossip":  # the pair's mean, without a step
                torch.testing.assert_close(replica.outer.parameters, (outcome.ours + outcome.values) / 2)
            del trainer._gradient
        run(trainer, trainer.schedule.steps(4))
        contribution = trainer.contribution()
        state = trainer.commit(state, perform(peer, contribution.operation, contribution.part), 4)
        assert contribution.finite
        return replica.outer

    torch.set_num_threads(1)
    swarm = LocalSwarm(2)
    one, other = swarm.run(daemon)
    assert torch.equal(one.parameters, other.parameters) == settings.algorithm.recipe().shared


@pytest.mark.parametrize("salvaged", [False, True])
@pytest.mark.parametrize("name", ["diloco", "streaming", "eager", "sparseloco", "delayed"])
def test_what_is_in_a_result_that_was_only_heard_of_does_not_count_again(name, salvaged, corpus):
    """One peer's line breaks when the others have what it brought: it learns of the round from them."""
    settings = settings_of(name)
    if salvaged and name == "sparseloco":
        pytest.skip("nothing is salvaged of a gather")

    def daemon(breaks):
        def replica(peer):
            trainer = Trainer(settings, corpus, peer.peer_id)
            state = trainer.initial_state()
            weights = []
            for revision in range(1, 5):
                trainer.start_round(state, revision, peer.members)
                run(trainer, trainer.schedule.steps(revision))
                contribution = trainer.contribution()
                weights.append(contribution.weight)
                run(trainer, contribution.meanwhile)
                outcome = perform(peer, contribution.operation, contribution.part)
                if breaks and revision == 3 and peer is swarm.peers[0]:
                    state = trainer.commit_missed(state, heard_of(outcome, peer.peer_id), revision)
                else:
                    state = trainer.commit(state, outcome, revision)
            return trainer.flat.read(), state, weights

        return replica

    def heard_of(outcome, peer):
        plan = outcome.plan
        if salvaged:  # those who were left have finished it, with nearly all of what was reduced before
            weights = dict(zip(plan.members, plan.weights, strict=True))
            source = Source(plan.id, plan.members, plan.weights)
            left = tuple(member for member in plan.members if member != peer)
            parts = (Salvaged(0, plan.length - 1, 0, tuple(range(len(left)))),)
            plan = attrs.evolve(
                plan,
                members=left,
                weights=tuple(weights[member] for member in left),
                sources=(source,),
                salvaged=parts,
            )
        mean = outcome.mean if isinstance(outcome, Reduced) else joined(outcome.blocks)
        return Reduced(
            plan=plan,
            mean=mean,
            contributors=plan.contributors,
            weight=plan.weight,
            attempts=1,
            bytes_sent=0,
            bytes_received=0,
            seconds=0.0,
        )

    def joined(blocks):
        return torch.frombuffer(bytearray(b"".join(blocks.values())), dtype=torch.uint8)

    torch.set_num_threads(1)
    results = []
    for breaks in (False, True):
        swarm = LocalSwarm(3)
        results.append(swarm.run(daemon(breaks)))
    for (plain, _, weights), (broken, _, heard) in zip(*results, strict=True):
        assert heard == weights
        if not salvaged or name != "eager":  # which goes by its share of the mean, and takes that of the last plan
            assert torch.equal(plain, broken)


@pytest.mark.parametrize("begins", [5, 6])
def test_a_newcomer_to_rounds_of_two_operations_has_the_same_bits(corpus, begins):
    """Also between the two: the state has the factors of the first one. Then it brings nothing to the second."""
    settings, states, results = settings_of("dilocox"), {}, {}

    def replica(peer):
        trainer = Trainer(settings, corpus, peer.peer_id)
        state = trainer.initial_state()
        for revision in range(1, 11):
            states[revision - 1] = state
            trainer.start_round(state, revision, peer.members)
            run(trainer, trainer.steps(revision, 1.0))
            asked = trainer.contribution()
            results[revision] = perform(peer, asked.operation, asked.part)
            state = trainer.commit(state, results[revision], revision)
        states[10] = state

    swarm = LocalSwarm(2)
    swarm.run(replica)
    late = Trainer(settings, corpus, PeerId(bytes(32)))
    state = states[begins - 1]
    for revision in range(begins, 11):
        late.start_round(state, revision, swarm.peers[0].members)
        run(late, late.steps(revision, 1.0))
        asked = late.contribution()
        assert len(asked.operation.values) == results[revision].plan.length
        assert (asked.weight > 0) == (revision > 6 or begins == 5)
        state = late.commit_missed(state, results[revision], revision)
        assert torch.equal(state.parameters, states[revision].parameters)
        assert state.buffers.keys() == states[revision].buffers.keys()
        assert all(torch.equal(kept, states[revision].buffers[name]) for name, kept in state.buffers.items())


def test_what_others_have_made_meanwhile_moves_the_parameters_and_nothing_that_was_done_is_lost(corpus):
    """Rounds that go on without those who are late: they apply the results, and bring the same as before."""
    settings, results = settings_of("asynchronous"), {}

    def replica(peer):
        trainer = Trainer(settings, corpus, peer.peer_id)
        state = trainer.initial_state()
        for revision in range(1, 4):
            trainer.start_round(state, revision, peer.members)
            run(trainer, trainer.steps(revision, 1.0))
            asked = trainer.contribution()
            results[revision] = perform(peer, asked.operation, asked.part)
            state = trainer.commit(state, results[revision], revision)
        return state

    swarm = LocalSwarm(2)
    expected, _ = swarm.run(replica)
    late = Trainer(settings, corpus, PeerId(bytes(32)))
    state = late.initial_state()
    late.start_round(state, 1, swarm.peers[0].members)
    run(late, late.steps(1, 1.0))
    brought = late.contribution().operation.values
    for revision in (1, 2, 3):
        state = late.commit_missed(state, results[revision], revision)
        late.start_round(state, revision + 1, swarm.peers[0].members)
        run(late, late.steps(revision + 1, 1.0))  # none: they are done
        asked = late.contribution()
        assert asked.weight == 1.0 and asked.steps == 4
        assert len(asked.operation.values) == late.length(revision + 1)
        torch.testing.assert_close(asked.operation.values, brought, rtol=1e-4, atol=1e-6)
    assert torch.equal(state.parameters, expected.parameters)
    assert all(torch.equal(kept, expected.buffers[name]) for name, kept in state.buffers.items())
