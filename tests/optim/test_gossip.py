"""Methods whose peers meet in pairs, against what their equations say."""

import pytest
import torch

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from optim.methods.gossip import PairMomentum
from optim.slots import Mixed, Moment
from protocol.errors import SettingsError
from protocol.identity import PeerId
from tests.optim.replicas import CLOSE, Replica, run
from tests.optim.toys import adamw, batches, make_model, put, train, values_of


def pair_step(outer, state, delta, other):
    mean = torch.cat([delta, other])
    mixed = Mixed(mean=mean, own=mean, members=(), share=0.5)
    return outer.step(state, mixed, Moment(round=1, lr=0.1), mean)


def test_noloco_with_equal_outer_parameters_is_heavy_ball_on_the_pairs_mean():
    outer = PairMomentum(alpha=0.5, beta=0.7, gamma=0.7)
    state = outer.init(torch.tensor([1.0]))
    seen = []
    for _ in range(2):
        state = pair_step(outer, state, torch.tensor([0.5]), state.parameters)
        seen.append(state.parameters.item())
    assert seen == pytest.approx([1 - 0.35, 1 - 0.35 - 0.525])


def test_noloco_pulls_a_pair_together():
    outer = PairMomentum(alpha=0.0, beta=0.7, gamma=1.0)
    ours, theirs = outer.init(torch.tensor([1.0])), outer.init(torch.tensor([3.0]))
    mean = torch.tensor([2.0])
    after = [pair_step(outer, state, torch.zeros(1), mean).parameters.item() for state in (ours, theirs)]
    assert after == [2.0, 2.0]


def test_noloco_is_what_the_paper_says():
    alpha, beta, gamma, steps = 0.5, 0.7, 0.7, 4
    replicas = [Replica(index) for index in range(2)]
    outers = [values_of(replica.model) for replica in replicas]
    momenta = [torch.zeros_like(outers[0]) for _ in replicas]
    for _ in range(3):
        news = [replica.local_steps(steps) - outer for replica, outer in zip(replicas, outers, strict=True)]
        delta, middle = sum(news) / 2, sum(outers) / 2
        momenta = [alpha * m + beta * delta - gamma * (o - middle) for m, o in zip(momenta, outers, strict=True)]
        outers = [outer + momentum for outer, momentum in zip(outers, momenta, strict=True)]
        for replica, outer in zip(replicas, outers, strict=True):
            put(replica.model, outer)
    results, _ = run("noloco", 2, 3 * steps, finish=False, inner_steps=steps, alpha=alpha, beta=beta, gamma=gamma)
    for values, outer in zip(results, outers, strict=True):
        torch.testing.assert_close(values, outer, **CLOSE)


@pytest.mark.parametrize("constants", [{"alpha": 0.9}, {"gamma": 1.5}, {"beta": 0.0}])
def test_noloco_refuses_what_diverges(constants):
    with pytest.raises(SettingsError, match="cannot work"):
        recipe("noloco", **constants)


def test_gossip_on_pairs_mixes_what_was_sent_and_keeps_the_step_since():
    replicas = [Replica(index) for index in range(2)]
    sent = None
    for _ in range(6):
        local = [replica.local_steps(1) for replica in replicas]
        if sent is not None:
            mean = sum(sent) / 2
            local = [values + mean - own for values, own in zip(local, sent, strict=True)]
            for replica, values in zip(replicas, local, strict=True):
                put(replica.model, values)
        sent = local
    results, _ = run("gossip", 2, 6, finish=False)
    for values, expected in zip(results, local, strict=True):
        torch.testing.assert_close(values, expected, **CLOSE)


@pytest.mark.parametrize("pairing", ["exponential", "exponential-ring"])
def test_gossip_on_a_graph_meets_one_peer_after_the_other(pairing):
    turns = {
        "exponential": [[(0, 1), (2, 3)], [(0, 2), (1, 3)]],
        "exponential-ring": [[(0, 1), (2, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(1, 2), (3, 0)]],
    }[pairing]
    ids = [PeerId(bytes([number]) * 32) for number in range(4)]
    replicas = [Replica(index) for index in range(4)]
    sent = None
    for step in range(7):
        local = [replica.local_steps(1) for replica in replicas]
        if sent is not None:
            for one, other in turns[(step - 1) % len(turns)]:
                mean = (sent[one] + sent[other]) / 2
                local[one], local[other] = local[one] + mean - sent[one], local[other] + mean - sent[other]
            for replica, values in zip(replicas, local, strict=True):
                put(replica.model, values)
        sent = local
    swarm = LocalSwarm(4, peer_ids=ids)

    def replica(peer):
        model = make_model()
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, recipe("gossip", pairing=pairing))
        train(model, optimizer, batches(swarm.peers.index(peer), 7))
        optimizer.close()
        return values_of(model)

    for values, expected in zip(swarm.run(replica), local, strict=True):
        torch.testing.assert_close(values, expected, **CLOSE)


def test_a_graph_that_there_is_not_is_refused():
    with pytest.raises(SettingsError, match="pairing"):
        recipe("gossip", pairing="star")


@pytest.mark.parametrize("method", ["noloco", "gossip", "eager", "co2"])
def test_peers_with_parameters_of_their_own_end_with_the_same(method):
    constants = {} if method == "gossip" else {"inner_steps": 2}
    results, _ = run(method, 3, 8, **constants)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_final_mean_keeps_the_variance_of_matrices():
    plain, _ = run("gossip", 3, 5)
    corrected, _ = run("gossip", 3, 5, corrected=True)
    torch.testing.assert_close(plain[0][32:40], corrected[0][32:40])  # a bias
    assert corrected[0][:32].var() >= plain[0][:32].var()


@pytest.mark.parametrize("name", ["noloco", "gossip"])
def test_who_is_spoiled_and_has_no_partner_goes_back_to_its_outer_parameters(alone, name):
    model = make_model()
    optimizer = LowCommunicationOptimizer(model, adamw(model), alone, recipe(name, inner_steps=2))
    train(model, optimizer, batches(0, 3))
    before = optimizer.outer.parameters.clone()
    put(model, values_of(model) * float("nan"))
    optimizer.synchronize()
    optimizer.finish()
    assert torch.equal(values_of(model), optimizer.outer.parameters)
    torch.testing.assert_close(values_of(model), before, atol=0.1, rtol=0.1)
