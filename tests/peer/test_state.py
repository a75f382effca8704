import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim import OuterState
from peer.chain import Tip
from peer.history import History
from peer.state import CommittedState, byte_length, read_range, tensors
from protocol import merkle
from protocol.weights import SIZE, SignedWeight


def signed(weight, key=b"\0"):
    return [SignedWeight(weight, key * SIZE)]


def outer(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return OuterState(
        torch.randn(lengths[0], generator=generator),
        {f"b{index}": torch.randn(length, generator=generator) for index, length in enumerate(lengths[1:])},
    )


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 420), st.integers(0, 420))
def test_a_range_is_that_part_of_all_bytes(first, second, start, length):
    state = outer(first, second)
    everything = b"".join(bytes(memoryview(tensor.numpy()).cast("B")) for tensor in tensors(state) if tensor.numel())
    assert b"".join(read_range(state, start, length)) == everything[start : start + length]
    assert byte_length(state) == len(everything)


def test_leaves_cover_the_state_across_tensors():
    state = CommittedState.genesis(bytes(32), outer(300_000, 300_000))
    assert len(state.leaves) == 3  # 2.4 MB
    whole = b"".join(read_range(state.outer, 0, byte_length(state.outer)))
    assert state.leaves == merkle.leaves(whole)


def test_the_digest_vouches_for_every_bit_and_for_history():
    first = CommittedState.genesis(bytes(32), outer(10, 10))
    other_run = CommittedState.genesis(b"r" * 32, outer(10, 10))

    def step(before, *, seed=1, plan=b"p" * 32, contributions=signed(5.0)):  # noqa: B008 - never changed
        return before.commit(outer(10, 10, seed=seed), plan=plan, contributions=contributions)

    second = step(first)
    others = [
        step(first, seed=2),
        step(first, plan=b"q" * 32),
        step(first, contributions=signed(6.0)),
        step(first, contributions=signed(5.0, b"k")),
        step(first, contributions=signed(2.0) + signed(3.0, b"k")),
        step(second),
        step(other_run),
    ]
    assert len({state.header.digest for state in [first, second, *others]}) == 9
    assert step(first).header.digest == second.header.digest
    flipped = outer(10, 10, seed=1)
    flipped.buffers["b0"][3] = torch.nextafter(flipped.buffers["b0"][3], torch.tensor(9.0))
    changed = first.commit(flipped, plan=b"p" * 32, contributions=signed(5.0))
    assert changed.header.digest != second.header.digest


def test_seal_takes_only_what_the_header_vouches_for():
    state = CommittedState.genesis(bytes(32), outer(10))
    sealed = CommittedState.seal(state.history, outer(10))
    assert sealed is not None
    assert sealed.tip == state.tip
    assert CommittedState.seal(state.history, outer(10, seed=1)) is None
    assert CommittedState.seal(History((attrs.evolve(state.header, root=bytes(32)),)), outer(10)) is None


def test_weight_accumulates():
    state = CommittedState.genesis(bytes(32), outer(1))
    for _ in range(3):
        state = state.commit(state.outer, plan=bytes(32), contributions=signed(2.5))
    assert state.tip.weight == 7.5
    assert state.tip.revision == 3


@given(
    st.lists(st.builds(Tip, st.integers(0, 3), st.sampled_from([0.0, 1.0, 2.0]), st.binary(min_size=32, max_size=32)))
)
def test_all_peers_prefer_the_same_branch(tips):
    for one in tips:
        assert not one.beats(one)
        for two in tips:
            if (one.weight, one.digest) != (two.weight, two.digest):
                assert one.beats(two) != two.beats(one)
            for three in tips:
                if one.beats(two) and two.beats(three):
                    assert one.beats(three)


def test_more_weight_wins_then_the_lower_digest():
    assert Tip(1, 2.0, b"z" * 32).beats(Tip(9, 1.0, b"a" * 32))
    assert Tip(1, 2.0, b"a" * 32).beats(Tip(1, 2.0, b"b" * 32))


def test_a_round_without_weight_is_not_undone():
    assert Tip(2, 2.0, b"z" * 32).beats(Tip(1, 2.0, b"a" * 32))
