"""Machines of several processes: FSDP2 and DDP over gloo, and machines among themselves over real sockets."""

import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from optim import GradientOptimizer, LocalSwarm
from tests.optim.rank import optimizer_of
from tests.optim.toys import batches, make_model, train, values_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
METHODS = [
    ("diloco", {"inner_steps": 3}),
    ("fedprox", {"inner_steps": 3, "mu": 0.5}),
    ("streaming", {"inner_steps": 4, "fragments": 2, "delay": 1}),
    ("eager", {"inner_steps": 3}),
    ("dilocox", {"inner_steps": 3, "rank": 1}),
    ("noloco", {"inner_steps": 3}),
    ("sparseloco", {"inner_steps": 3}),
    ("powersgd", {"rank": 1}),
    ("demo", {"k": 4}),
    ("mtdao", {"sync_every": 3}),
]
OTHERS = [*METHODS[:3], METHODS[-1]]


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Machines:
    """Starts machines' processes, and ends them."""

    def __init__(self, folder):
        self.folder, self.first = folder, free_address()
        self.processes = {}

    def start(self, index, task, *, size=2, machines=2, **spec):
        """The processes of one machine."""
        out = str(self.folder / f"machine {index}")
        listen, peers = (self.first, []) if index == 0 else ("127.0.0.1:0", [self.first])
        common = {"kind": "fsdp", "task": task, "size": size, "machines": machines, "seed": index}
        for rank in range(size):
            place = {"rank": rank, "listen": listen, "peers": peers, "store": out + ".store", "out": out}
            whole = {**common, **place, **spec}
            command = [sys.executable, "-W", "error", "-m", "tests.optim.rank", json.dumps(whole)]
            with open(self.folder / f"log {index} {rank}", "w") as log:
                self.processes[index, rank] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def result(self, index):
        """What a machine has left, once its processes are over."""
        codes = {place: process.wait(timeout=180) for place, process in self.processes.items()}
        well = all(code == 0 for (machine, _), code in codes.items() if machine == index)
        assert well, "\n".join(path.read_text() for path in sorted(self.folder.glob("log *")))
        file = self.folder / f"machine {index}"
        return json.loads(file.read_text())

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path)
    yield machines
    machines.close()


def trained(swarm, peer, name, constants, steps=STEPS):
    """What a peer of one process ends with."""
    model = make_model()
    optimizer = optimizer_of(model, peer, name, constants)
    train(model, optimizer, batches(swarm.peers.index(peer), steps))
    if not isinstance(optimizer, GradientOptimizer):
        optimizer.finish()
    return values_of(model)


def check(machines, methods, steps=STEPS):
    """Machines end with what peers of one process do."""
    ended = [machines.result(index) for index in range(2)]
    for name, constants in methods:
        swarm = LocalSwarm(2)
        expected = swarm.run(partial(trained, swarm, name=name, constants=constants, steps=steps))
        for ours, theirs in zip(ended, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours[name]), theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.processes
def test_two_machines_of_two_processes_are_two_peers(machines):
    for index in range(2):
        machines.start(index, "compare", methods=METHODS, steps=STEPS)
    check(machines, METHODS)


@pytest.mark.processes
def test_machines_that_share_in_other_ways_fit_together(machines):
    machines.start(0, "compare", methods=OTHERS, steps=STEPS, kind="ddp")
    machines.start(1, "compare", methods=OTHERS, steps=STEPS, kind="hsdp", size=4)
    check(machines, OTHERS)


@pytest.mark.processes
def test_machines_take_part_in_exchanges_with_a_window(machines):
    methods = [
        ("decoupled", {"inner_steps": 4, "fragments": 2, "delay": 0, "grace": 60.0}),
        ("asynchronous", {"inner_steps": 3, "buffer": 3, "grace": 60.0}),
    ]
    for index in range(2):
        machines.start(index, "compare", methods=methods, steps=STEPS)
    check(machines, methods)


@pytest.mark.processes
def test_machines_that_do_not_wait_for_each_other_end_with_the_same(machines):
    """Which exchanges a machine misses, time decides; all its processes find the same, and the end makes up for it."""
    methods = [("decoupled", {"inner_steps": 4, "fragments": 2, "delay": 1, "quorum": 1, "grace": 0.01, "keep": 64})]
    machines.start(0, "compare", methods=methods, steps=4 * STEPS, grace=120.0)  # for which the end waits, too
    machines.start(1, "compare", methods=methods, steps=2 * STEPS, grace=120.0)
    assert machines.result(0) == machines.result(1)


@pytest.mark.processes
def test_each_process_saves_and_loads_what_it_has(machines):
    methods = [
        METHODS[0],
        METHODS[2],
        *METHODS[-2:],
    ]  # of each kind of optimizer one, and one in the middle of exchanges
    for index in range(2):
        machines.start(index, "resume", methods=methods, steps=STEPS - 2)
    check(machines, methods, STEPS - 2)


@pytest.mark.processes
def test_a_gradient_that_overflows_in_one_process_is_no_step_of_the_machine(machines):
    for index in range(2):
        machines.start(index, "overflow", steps=6)
    one, other = (torch.tensor(machines.result(index)["values"]) for index in range(2))
    assert torch.isfinite(one).all()
    assert torch.equal(one, other)


@pytest.mark.processes
def test_a_machine_goes_on_when_the_other_dies(machines):
    machines.start(0, "survive", steps=STEPS)
    machines.start(1, "survive", steps=STEPS, kind="ddp", dies_after=2)
    swarm = LocalSwarm(2)
    steps = dict(zip(swarm.peers, (STEPS, 4), strict=True))
    expected, _ = swarm.run(lambda peer: trained(swarm, peer, "diloco", {"inner_steps": 2}, steps[peer]))
    ended = machines.result(0)
    assert ended["rounds"] == STEPS // 2
    torch.testing.assert_close(torch.tensor(ended["values"]), expected, rtol=1e-5, atol=1e-7)
    assert (machines.folder / "machine 1.rounds").read_text().split()[-1] == "2"


@pytest.mark.processes
def test_a_machine_with_a_spoiled_part_is_healed(machines):
    for index in range(2):
        machines.start(index, "poison", steps=4, spoils=index == 1)
    one, other = (torch.tensor(machines.result(index)["values"]) for index in range(2))
    assert torch.isfinite(other).all()
    assert torch.isfinite(one).all()


@pytest.mark.processes
def test_a_machine_comes_later(machines):
    for index, kind in enumerate(("fsdp", "ddp")):
        machines.start(index, "late", kind=kind, machines=1)
    one, other = machines.result(0), machines.result(1)
    assert one == other
    assert one["rounds"] == [1, 2]
    batches_seen, mean, variance = one["buffers"]
    assert batches_seen == [6]
    assert len(mean) == len(variance) == 4


@pytest.mark.processes
def test_machines_compare_what_they_begin_with(machines):
    for index in range(2):
        machines.start(index, "start")
    for index in range(2):
        different, alone = machines.result(index)
        assert "the values of" in different and "load the same checkpoint" in different
        assert "shared among several processes" in alone and "Machine(swarm)" in alone


@pytest.mark.processes
def test_what_cannot_work_is_refused(machines):
    machines.start(0, "refuse", machines=1, methods=[("co2", {}), ("fedsam", {}), ("lion", {})])
    norm, sam, unwrapped, other, failed, nobody = machines.result(0)
    assert "a part of this recipe needs all of it" in norm
    assert "sharpness-aware" in sam
    assert "shared among several processes" in unwrapped
    assert "different models" in other
    assert failed == "all are gone"
    assert "the first, and no other" in nobody
