"""Peers that use the operations alone: on real sockets, in threads and in processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from protocol.errors import AddressError, RequestTimeout, RoundAborted
from protocol.standalone import join_collective, open_collective

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guide-collective.md"


def together(*calls):
    """What the calls return, each made in a thread of its own."""
    results = [None] * len(calls)

    def run(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_blocking_operations_of_two_peers():
    with join_collective("a test") as one, join_collective("a test", peers=[one.address]) as other:
        one.wait_for(2, timeout=30)
        other.wait_for(2, timeout=30)
        assert set(one.members) == set(other.members) == {one.peer_id, other.peer_id}
        values = {one: torch.ones(3), other: torch.full((3,), 3.0)}
        reduced = together(*(lambda peer=peer: peer.all_reduce(values[peer], timeout=30) for peer in values))
        assert [result.mean.tolist() for result in reduced] == [[2.0] * 3] * 2
        received = together(lambda: one.broadcast(b"all"), lambda: other.broadcast(None))
        assert [bytes(result.data) for result in received] == [b"all"] * 2
        gathered = together(lambda: one.gather(b"1", tag="x"), lambda: other.gather(b"2", tag="x"))
        assert [sorted(map(bytes, result.blocks.values())) for result in gathered] == [[b"1", b"2"]] * 2
        swapped = together(*(lambda peer=peer: peer.exchange(values[peer]) for peer in values))
        assert [result.values.tolist() for result in swapped] == [[3.0] * 3, [1.0] * 3]
        assert all(len(result.members) == 2 for result in together(one.barrier, other.barrier))


def test_handles_and_what_is_refused():
    with join_collective("a test") as one, join_collective("a test", peers=[one.address]) as other:
        one.wait_for(2, timeout=30)
        for senseless in ({"timeout": -1}, {"group": str(one.peer_id)}, {"group": [str(one.peer_id)]}, {"tag": 5}):
            with pytest.raises(ValueError, match="not"):
                one.barrier(**senseless)
        with pytest.raises(ValueError, match="not -1"):
            one.wait_for(2, timeout=-1)
        handle = one.start_barrier()
        with pytest.raises(ValueError, match="not -1"):
            handle.wait(-1)
        assert not handle.done
        with pytest.raises(RequestTimeout, match="not finished"):
            handle.wait(timeout=0.01)
        handle.cancel()
        with pytest.raises(RoundAborted, match="cancelled"):
            handle.wait()
        with pytest.raises(RequestTimeout, match="within"):
            one.barrier(timeout=0.01)
        with pytest.raises(ValueError, match="group"):
            one.barrier(group=[other.peer_id])
        with pytest.raises(RequestTimeout, match="3 members"):
            one.wait_for(3, timeout=0.01)
        left = other.start_barrier()
    with pytest.raises(RoundAborted, match="ended"):
        left.wait()
    with pytest.raises(RoundAborted, match="ended"):
        other.barrier()
    with pytest.raises(RoundAborted, match="ended"):
        other.wait_for(2)


def test_other_names_and_keys_do_not_meet():
    with (
        join_collective("a test") as one,
        join_collective("another", peers=[one.address]) as other,
        join_collective("a test", peers=[one.address], key=bytes(32)) as stranger,
    ):
        for peer in (other, stranger):
            with pytest.raises(RequestTimeout):
                peer.wait_for(2, timeout=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda peer: peer.all_reduce([1.0, 2.0]),
        lambda peer: peer.all_reduce(torch.eye(2).to_sparse()),
        lambda peer: peer.all_reduce(torch.ones(2), weight="1"),
        lambda peer: peer.all_reduce(torch.ones(2, device="meta")),
        lambda peer: peer.exchange(torch.ones(2), pairing="nobody"),
        lambda peer: peer.gather("text"),
        lambda peer: peer.broadcast(7),
        lambda peer: peer.barrier(tag=None),
        lambda peer: peer.barrier(group=[peer.peer_id, "somebody"]),
    ],
)
def test_a_wrong_argument_is_an_error_of_that_call_alone(call):
    with join_collective("a test") as peer:
        with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)):
            call(peer)
        assert peer.all_reduce(torch.ones(2)).mean.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("arguments", [{"listen": "nonsense"}, {"peers": ["nonsense"]}])
def test_addresses_that_are_none(arguments):
    with pytest.raises(AddressError), join_collective("a test", **arguments):
        pass


async def test_with_trio():
    async with (
        open_collective("a test") as one,
        open_collective("a test", peers=[str(one.address)]) as other,
    ):
        await one.mesh.wait_for(2)
        await other.mesh.wait_for(2)
        handle = other.collective.start_all_reduce(torch.ones(2))
        assert (await one.collective.all_reduce(torch.zeros(2))).mean.tolist() == [0.5, 0.5]
        assert (await handle.wait()).mean.tolist() == [0.5, 0.5]


@pytest.mark.processes
def test_the_example_of_the_guide(tmp_path):
    example = re.search(r"Save this as `average.py`:\n\n((?:    .*\n|\n)+)", GUIDE.read_text())[1]
    program = tmp_path / "average.py"
    program.write_text(textwrap.dedent(example))
    command, environment = [sys.executable, program], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "1"], env=environment, stdout=subprocess.PIPE, text=True) as first:
        try:
            address = first.stdout.readline().split()[-1]
            second = subprocess.run(
                [*command, "2", address], env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
            ).stdout
            output = first.communicate(timeout=120)[0]
        finally:
            first.kill()
    assert output.splitlines() == second.splitlines()[1:]
    assert "1: 2 members, mean 1.6667" in output
    assert "['I have 1.0', 'I have 2.0']" in output
