"""What is left of a fetch when its process ends, and what the next process makes of it."""

import os

import pytest
import torch
import trio

from optim import OuterState
from peer.partial import Partial
from peer.state import CommittedState
from peer.sync import Donor, RangeRequest, fetch_state
from protocol import merkle, wire
from protocol.weights import SIZE, SignedWeight

RUN = b"r" * 32
SIGNED = [SignedWeight(3.0, bytes(SIZE))]
ELEMENTS = 700_000  # with momentum 5.6 MB: six ranges, some of them across tensors
SHAPE = {"elements": ELEMENTS, "buffers": ["momentum"]}


@pytest.fixture(scope="module")
def state():
    generator = torch.Generator().manual_seed(3)
    parameters, momentum = torch.randn(2, ELEMENTS, generator=generator)
    return CommittedState.genesis(RUN, OuterState(parameters, {"momentum": momentum}))


def donate(endpoint, state):
    donor = Donor(endpoint, RUN, "the manifest")
    donor.offer(state)
    return donor


async def interrupted(swarm, state, earlier, after=4):
    """A fetch from the second peer that ends when so many ranges have come: nobody is told, as with SIGKILL."""
    newcomer, donor = swarm.endpoints[:2]
    sizes = []

    def count(received):
        sizes.append(received)
        if len(sizes) == after:
            scope.cancel()

    with trio.CancelScope() as scope:
        await fetch_state(newcomer, RUN, state.history, [donor.peer_id], **SHAPE, progress=count, earlier=earlier)
    assert scope.cancelled_caught


async def fetched(swarm, state, earlier):
    """The numbers of the ranges that the second peer is asked for, until the state is there."""
    newcomer, donor = swarm.endpoints[:2]
    asked, on_range = [], donor._handlers._handlers[wire.name_of(RangeRequest)]

    def note(request, *arguments):
        asked.append(request.leaf)
        return on_range(request, *arguments)

    donor._handlers._handlers[wire.name_of(RangeRequest)] = note
    found = await fetch_state(newcomer, RUN, state.history, [donor.peer_id], **SHAPE, earlier=earlier)
    assert found.header == state.header
    assert torch.equal(found.outer.parameters, state.outer.parameters)
    assert torch.equal(found.outer.buffers["momentum"], state.outer.buffers["momentum"])
    return sorted(asked)


def kept(path, state):
    """The numbers of the ranges of a state that a file holds."""
    data = path.read_bytes()[len(RUN) :]
    return {number for number, leaf in enumerate(merkle.leaves(data)) if leaf == state.leaves[number]}


async def test_a_fetch_goes_on_after_a_restart(autojump_clock, mesh, state, tmp_path):
    swarm, path = await mesh(2), tmp_path / "partial"
    donate(swarm.endpoints[1], state)
    await interrupted(swarm, state, Partial(path, run=RUN))
    there = kept(path, state)
    assert len(there) >= 3
    assert path.stat().st_size == len(RUN) + 8 * ELEMENTS
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(await fetched(swarm, state, Partial(path, run=RUN))) == set(range(len(state.leaves))) - there
    assert not path.exists()


async def test_after_a_restart_a_later_state_may_be_there(autojump_clock, mesh, state, tmp_path):
    """What is the same in it need not come again."""
    swarm, path = await mesh(2), tmp_path / "partial"
    donor = donate(swarm.endpoints[1], state)
    await interrupted(swarm, state, Partial(path, run=RUN))
    parameters = state.outer.parameters.clone()
    parameters[0] = 7  # in the first range
    newer = state.commit(OuterState(parameters, state.outer.buffers), plan=bytes(32), contributions=SIGNED)
    donor.offer(newer)
    there = kept(path, newer)
    assert there == kept(path, state) - {0}
    assert set(await fetched(swarm, newer, Partial(path, run=RUN))) == set(range(len(state.leaves))) - there


@pytest.mark.parametrize("damage", ["bit", "cut", "other run", "other model", "rubbish", "directory"])
async def test_what_a_file_says_of_a_state_is_not_believed(autojump_clock, mesh, state, tmp_path, damage):
    swarm, path = await mesh(2), tmp_path / "partial"
    donate(swarm.endpoints[1], state)
    await interrupted(swarm, state, Partial(path, run=RUN))
    data, there = bytearray(path.read_bytes()), kept(path, state)
    path.unlink()
    if damage == "bit":
        data[len(RUN) + min(there) * merkle.LEAF + 5] ^= 1
        there.remove(min(there))
    else:
        there = set()
    match damage:
        case "cut":
            data = data[:-1]
        case "other run":
            data[0] ^= 1
        case "other model":
            data += bytes(4)
        case "rubbish":
            data = b"rubbish"
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes(data)
    assert set(await fetched(swarm, state, Partial(path, run=RUN))) == set(range(len(state.leaves))) - there
    assert not path.is_file()


async def test_a_full_disk_is_no_reason_to_fail_a_fetch(autojump_clock, mesh, state, tmp_path, monkeypatch):
    """What little was kept goes: others have more use for the room."""
    swarm, path, tries = await mesh(2), tmp_path / "partial", []
    donate(swarm.endpoints[1], state)
    write = os.pwritev

    def fail(descriptor, views, offset):
        tries.append(offset)
        if len(tries) > 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", fail)
    earlier = Partial(path, run=RUN)
    await interrupted(swarm, state, earlier, after=5)
    assert len(tries) == 3
    assert not path.exists()
    assert len(await fetched(swarm, state, earlier)) <= 2  # it is still in memory


async def test_what_was_kept_goes_with_what_was_received(autojump_clock, mesh, state, tmp_path):
    swarm, path = await mesh(2), tmp_path / "partial"
    donate(swarm.endpoints[1], state)
    earlier = Partial(path, run=RUN)
    await interrupted(swarm, state, earlier)
    assert path.exists()
    earlier.clear()
    assert not path.exists()
    assert len(await fetched(swarm, state, earlier)) == len(state.leaves)
