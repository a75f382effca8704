"""Matrices as products of thin ones, and of which rank."""

import pytest
import torch

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from optim.exact import orthonormal, outer_product
from optim.flat import Slice
from optim.lowrank import AdaptiveLowRankMean, LowRankMean, effective_rank, packed, unpacked
from optim.policies import HiddenSteps
from optim.sender import carry_out
from optim.slots import Moment
from tests.optim.toys import adamw, batches, make_model, put, train, values_of

LAYOUT = (Slice("a", torch.Size([40, 30]), 0, 1200),)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(singular):
    """40 × 30, with these singular values."""
    left, right = torch.linalg.qr(random(40, 30)).Q, torch.linalg.qr(random(30, 30, seed=1)).Q
    spectrum = torch.zeros(30)
    spectrum[: len(singular)] = torch.tensor(singular)
    return left @ torch.diag(spectrum) @ right.T


@pytest.mark.parametrize(
    ("singular", "expected"),
    [([3.0] * 4, 4.0), ([5.0], 1.0), ([2.0, 1.0], 25 / 17), ([0.0], 1.0)],
)
def test_the_effective_rank(singular, expected):
    matrix = matrix_of(singular)
    side = orthonormal(matrix @ random(30, 6, seed=2))
    assert float(effective_rank(matrix.T @ side)) == pytest.approx(expected, rel=1e-4)


def test_columns_that_depend_on_others_are_left_out():
    sides = orthonormal(matrix_of([3.0] * 4) @ random(30, 6, seed=2))
    products = sides.T @ sides
    torch.testing.assert_close(products, torch.diag(torch.tensor([1.0] * 4 + [0.0] * 2)), rtol=0, atol=1e-5)


def test_a_matrix_of_lower_rank_arrives_as_it_is():
    (peer,) = LocalSwarm(1).peers
    matrix = matrix_of([1.0, 2.0])
    _, mixed, _ = ranks_of(peer, AdaptiveLowRankMean(6), [matrix])
    torch.testing.assert_close(mixed.mean.view(40, 30), matrix, rtol=1e-3, atol=1e-5)


def ranks_of(peer, mixer, matrices):
    """The loads after each of these matrices, and the last mean."""
    memory, loads = {}, []
    for round, matrix in enumerate(matrices, 1):
        mixed = carry_out(peer, mixer.mix(matrix.flatten(), 1.0, LAYOUT, round, memory))
        memory = mixed.memory
        loads.append(mixed.load)
    return loads, mixed, memory


def test_the_rank_follows_what_is_needed_and_grows_again():
    (peer,) = LocalSwarm(1).peers
    narrow, wide = matrix_of([1.0]), matrix_of([1.0] * 6)
    loads, mixed, memory = ranks_of(peer, AdaptiveLowRankMean(6, window=2), [narrow, narrow, *[wide] * 9])
    assert loads[:2] == [pytest.approx(2 / 6)] * 2
    assert loads[-1] == 1.0
    assert sorted(loads[1:]) == loads[1:]
    assert memory["ranks"].shape == (2,)
    torch.testing.assert_close(mixed.mean.view(40, 30), wide, rtol=1e-3, atol=1e-4)


def test_without_need_to_shrink_it_is_of_a_fixed_rank():
    (peer,) = LocalSwarm(1).peers
    matrices = [matrix_of([1.0 + index] * 8) for index in range(3)]
    _, adaptive, _ = ranks_of(peer, AdaptiveLowRankMean(4), matrices)
    _, fixed, _ = ranks_of(peer, LowRankMean(4), matrices)
    assert torch.equal(adaptive.mean, fixed.mean)


def test_local_steps_shrink_with_what_is_sent():
    policy = HiddenSteps(50)
    assert [policy.steps(Moment(round=2, lr=0.1, load=load)) for load in (1.0, 0.5, 0.33, 0.001)] == [50, 25, 16, 1]
    assert policy.delay == 50


class Peer:
    """One replica of the reference."""

    def __init__(self, index):
        self.model = make_model()
        self.inner, self.data, self.error = adamw(self.model), batches(index, 1000), torch.zeros(49)

    def delta(self, outer, steps):
        put(self.model, outer)
        train(self.model, self.inner, (next(self.data) for _ in range(steps)))
        return outer - values_of(self.model) + self.error


def test_adaptive_low_rank_a_round_late_is_what_the_paper_says():
    # Of the model only layer 0's matrix of 8 × 4 is worth being compressed, with a rank of 1.
    lr, momentum, every = 0.2, 0.5, 8
    peers = [Peer(index) for index in range(2)]
    outer = values_of(peers[0].model)
    buffer, factor = torch.zeros(49), torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
    late, total = None, 0
    for _ in range(4):
        total += every
        deltas = [peer.delta(outer, every) for peer in peers]
        if late is not None:
            buffer = momentum * buffer + late
            outer = outer - lr * (late + momentum * buffer)
        late = sum(deltas) / 2
        matrices = [delta[:32].view(8, 4) for delta in deltas]
        side = orthonormal(sum(matrix @ factor for matrix in matrices) / 2)
        rights = [matrix.T @ side for matrix in matrices]
        factor = sum(rights) / 2
        late[:32] = outer_product(side, factor).flatten()
        for peer, delta, right in zip(peers, deltas, rights, strict=True):
            peer.error = torch.zeros(49)
            peer.error[:32] = delta[:32] - outer_product(side, right).flatten()
    swarm = LocalSwarm(2)

    def replica(peer):
        model = make_model()
        method = recipe("dilocox", inner_steps=every, rank=1, outer_lr=lr, outer_momentum=momentum)
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
        train(model, optimizer, batches(swarm.peers.index(peer), total))
        optimizer.close()
        return values_of(model)

    results = swarm.run(replica)
    torch.testing.assert_close(results[0], outer, rtol=1e-4, atol=1e-5)
    assert torch.equal(results[0], results[1])


def test_where_somebody_comes_all_begin_with_fresh_factors_and_have_the_same():
    """A newcomer gets the outer state, but not the factors from which the others would go on."""
    method = recipe("dilocox", inner_steps=4, rank=1)

    def begin(peer):
        model = make_model()
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
        train(model, optimizer, batches(peer.members.index(peer.peer_id), 14))
        return model.state_dict(), optimizer.state_dict()

    def go_on(peer):
        model, index = make_model(), peer.members.index(peer.peer_id)
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
        if index < 2:
            model.load_state_dict(saved[index][0])
            optimizer.load_state_dict(saved[index][1])
        assert optimizer.welcome() == 3
        train(model, optimizer, batches(10 + index, 12))
        optimizer.finish()
        return values_of(model), optimizer.state_dict()["outer"]["memory"].popitem()[1]

    saved = LocalSwarm(2).run(begin)
    (one, first), *others = LocalSwarm(3).run(go_on)
    shared = [name for name in first if name != "error"]
    assert "ranks" in shared and any(name.startswith("factor") for name in shared)
    for values, memory in others:
        assert torch.equal(values, one)
        assert all(torch.equal(memory[name], first[name]) for name in shared)


def test_what_all_have_in_common_fits_into_a_vector_like_the_model():
    """In the state of a run: whoever takes it from there goes on with the same bits."""
    layout = (Slice("a", torch.Size([3, 7]), 0, 21), Slice("b", torch.Size([5]), 21, 26))
    mixer = AdaptiveLowRankMean(1, window=10)
    memory = {"ranks": torch.arange(1.0, 11.0), "factor 0": random(7, 1), "side 0": random(3, 1), "plain 21": random(5)}
    unpacked_ = unpacked(mixer, layout, packed(mixer, layout, memory))
    assert unpacked_.keys() == memory.keys()
    assert all(torch.equal(unpacked_[name], kept) for name, kept in memory.items())
    with pytest.raises(ValueError):
        AdaptiveLowRankMean(1, window=11)  # for which the smallest matrix has no room
