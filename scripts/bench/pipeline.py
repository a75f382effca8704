"""Measures a model in stages over lines with latency, against a synchronous pipeline as GPipe's (arXiv 1811.06965).

    sudo python scripts/bench/pipeline.py --quick --json

Three machines, each a network namespace with a line of 200 Mbit/s each way, serve a stage each of the same model. Ours
are three daemons, as `shoal start` and `shoal join` start them: each serves a stage, and each leads its part of the
microbatches. The rival is plain PyTorch: a stage sends its outputs to the next one, and gradients to the one before,
by torch.distributed with gloo; all microbatches forwards, then all backwards, then the optimizer's step. Receives are
posted before they are needed, and sends overlap with what is computed. Like GPipe, and like ours, it repeats forward
passes instead of keeping what is between (the last stage has no need to). What goes between stages has the same codec,
so both train the same, which their losses are checked for.

Everything is computed, nothing waits in place of that. Each process has one thread. All share the processors of this
machine, and while one stage waits another one may be faster, as it may not on machines of their own: so the figure that
depends least on this machine is how many seconds more a step takes than without latency, which is printed in round
trips. Exit code 1 if the goal is missed; 0 if there can be no network namespaces, which it says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from rows import conclude, row  # noqa: E402

from optim.swarm.payloads import Packer, Payload  # noqa: E402
from optim.swarm.stages import cut  # noqa: E402
from peer.child import Child  # noqa: E402
from peer.data import Corpus  # noqa: E402
from peer.manifest import dump_settings, settings_from  # noqa: E402
from peer.pipeline.run import make_pipeline  # noqa: E402
from peer.settings import Settings  # noqa: E402
from protocol.codecs import make_codec  # noqa: E402
from tests.net.topology import Host, Internet, Link, missing, sweep  # noqa: E402

STAGES = 3
RATE = 200.0  # Mbit/s
QUEUE = 100.0  # ms, of each of the two lines between two machines
RTTS = (0.0, 50.0, 100.0, 200.0)  # ms
JUDGED = 100.0
GOAL = ">= 0.7"
PORT = 4711
WARM_UP = 2  # steps
POLL = 0.02  # seconds between looks at the event files
HANG = 200.0  # seconds after which something is wrong
SAME = 0.01  # by which losses may differ: sums are in another order
FIRST = ("sh", "-c", 'echo -19 > /proc/self/autogroup; exec "$@"', "sh")
"""Runs a command before what else is done here, where niceness only counts within a session."""


@attrs.frozen(kw_only=True)
class Work:
    """What is trained."""

    layers: int = 6
    width: int = 384
    context: int = 128
    batch: int = 2
    """Sequences of a microbatch."""
    microbatches: int = 24
    encoding: str = "int8"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.context * self.batch * self.microbatches

    @property
    def settings(self) -> Settings:
        """The run."""
        sizes = {"layers": self.layers, "width": self.width, "heads": self.width // 64, "context": self.context}
        constants = {"stages": STAGES, "microbatches": self.microbatches, "activations": self.encoding}
        return settings_from(
            {
                "run": {"name": "pipeline bench", "seed": 1},
                "model": sizes,
                "inner": {"lr": 1e-3, "batch": self.batch},
                "round": {"grace": 2.0},
                "algorithm": {"name": "swarm", **constants},
            }
        )


@attrs.frozen
class Measured:
    """A few steps."""

    seconds: float
    """Of a step, the median."""
    losses: list[float]
    """Of each step from the first."""


# Ours.


def ours(hosts: Sequence[Host], manifest: Path, steps: int) -> Measured:
    """Daemons, one on each host."""
    with tempfile.TemporaryDirectory(dir=manifest.parent) as directory:
        children = [Child(host.name, Path(directory)) for host in hosts]
        founder, began = children[0], time.monotonic()
        try:
            _start(hosts[0], founder, "start", str(manifest), "--wait-for", str(STAGES))
            _until(children, lambda: bool(founder.read_ticket()), began)
            for host, child in zip(hosts[1:], children[1:], strict=True):
                _start(host, child, "join", founder.read_ticket())
            last = WARM_UP + steps - 1
            _until(children, lambda: all(last in _made(child) for child in children), began)
            made = _made(founder)
            return Measured(_median([made[step] for step in range(last + 1)]), _losses(children, last + 1))
        finally:
            for child in children:
                child.kill()


def _start(host: Host, child: Child, *what: str) -> None:
    options = {
        "--home": child.home,
        "--listen": f"0.0.0.0:{PORT}",
        "--events": child.events,
        "--ticket-file": child.ticket,
        "--data": "stdlib",
        "--device": "cpu",
        "--threads": 1,
    }
    words = [str(word) for option in options.items() for word in option]
    python = (*FIRST, "env", f"PYTHONPATH={ROOT}", sys.executable)
    child.start(host.namespace.command(*python, "-m", "peer", *what, *words, "--debug"))


def _until(children: Sequence[Child], condition: Callable[[], bool], began: float) -> None:
    while not condition():
        for child in children:
            child.poll()
            if child.exit_code is not None or time.monotonic() > began + HANG:
                raise RuntimeError(f"{child.name} does not get on:\n{child.log_tail()}")
        time.sleep(POLL)


def _made(child: Child) -> dict[int, float]:
    """When it has made each step."""
    return {event.integer("step"): event.t for event in child.recording.of("stage_step")}


def _losses(children: Sequence[Child], steps: int) -> list[float]:
    """The mean loss of each step; of the last one not all trainers may have told theirs."""
    parts = [event for child in children for event in child.recording.of("inner")]
    losses = []
    for step in range(steps - 1):
        found = [(part.number("loss"), part.integer("samples")) for part in parts if part.integer("step") == step]
        losses.append(sum(loss * samples for loss, samples in found) / sum(samples for _, samples in found))
    return losses


# The rival.


def rival(hosts: Sequence[Host], manifest: Path, steps: int) -> Measured:
    """Processes of torch.distributed, one on each host."""
    with tempfile.TemporaryDirectory(dir=manifest.parent) as directory:
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, host in enumerate(hosts):
                work = ["--work", str(rank), f"{directory}/meeting", str(manifest), str(WARM_UP + steps)]
                python = (*FIRST, "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable)
                command = host.namespace.command(*python, __file__, *work)
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
            said = [process.communicate(timeout=HANG)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    ends, _ = json.loads(said[0])
    _, losses = json.loads(said[-1])
    return Measured(_median(ends), losses[:-1])


class Stage:
    """One process of the rival."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self._pipeline = make_pipeline(settings, bytes(32), Corpus.open("stdlib"))
        assert self._pipeline.initial is not None
        self._stage = cut(self._pipeline.chain(), STAGES)[rank]
        self._stage.load(dict(self._pipeline.initial()))
        self._optimizer = self._pipeline.optimizer(self._stage)
        self._rank, self._packer, self._codec = rank, Packer(), make_codec(self._pipeline.encoding)  # type: ignore[arg-type]
        self._shape = (settings.inner.batch, settings.model.context, settings.model.width)
        self._sends: list[tuple[torch.distributed.Work, torch.Tensor]] = []

    def step(self, step: int) -> float:
        """All microbatches forwards, all backwards, and the optimizer's step; returns the mean loss at the last."""
        pipeline, stage, rank, numbers = self._pipeline, self._stage, self._rank, range(self._pipeline.microbatches)
        is_first, is_last = rank == 0, rank == STAGES - 1
        samples = [pipeline.sample(step, number) for number in numbers]
        before = [] if is_first else [self._receive(rank - 1, number) for number in numbers]
        after = [] if is_last else [self._receive(rank + 1, number) for number in numbers]
        inputs: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        for number in numbers:
            sample = samples[number]
            inputs.append(self._packer.unpack(sample.tokens) if is_first else before[number]().requires_grad_())
            if is_last:
                losses.append(stage(inputs[number], self._packer.unpack(sample.targets)))
                continue
            with torch.no_grad():
                self._send(stage(inputs[number]), rank + 1, number)
        for number in numbers:
            if is_last:
                losses[number].sum().backward()  # type: ignore[no-untyped-call]
            else:
                stage(inputs[number]).backward(after[number]())
            gradient = inputs[number].grad
            if gradient is not None:
                self._send(gradient, rank - 1, number)
        self._finish(step, sum(sample.tokens.samples for sample in samples))
        return float(torch.cat(losses).detach().mean()) if is_last else math.nan

    def _finish(self, step: int, samples: int) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        for name, parameter in self._stage.model.named_parameters():
            assert parameter.grad is not None
            parameter.grad /= samples
            if name in self._stage.tied:  # the first stage and the last have it
                other = torch.empty_like(parameter.grad)
                partner = STAGES - 1 - self._rank
                sending = torch.distributed.isend(parameter.grad.clone(), partner, tag=MOST)
                torch.distributed.recv(other, partner, tag=MOST)
                assert sending is not None
                sending.wait()
                parameter.grad += other
        for group in self._optimizer.param_groups:
            group["lr"] = self._pipeline.rate(step)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _send(self, values: torch.Tensor, partner: int, number: int) -> None:
        data = self._packer.pack(values, self._pipeline.encoding).data
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        work = torch.distributed.isend(encoded, partner, tag=number)
        assert work is not None
        self._sends.append((work, encoded))

    def _receive(self, partner: int, number: int) -> Callable[[], torch.Tensor]:
        encoded = torch.empty(self._codec.encoded_size(math.prod(self._shape)), dtype=torch.uint8)
        work = torch.distributed.irecv(encoded, partner, tag=number)
        assert work is not None

        def take() -> torch.Tensor:
            work.wait()
            payload = Payload(self._pipeline.encoding, self._shape, encoded.numpy().tobytes())
            return self._packer.unpack(payload)

        return take


MOST = 1 << 20  # a tag that no microbatch has


def work(rank: int, meeting: str, manifest: Path, steps: int) -> None:
    """A process of the rival; prints when it had made each step, and the losses."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=STAGES)
    stage = Stage(rank, settings_from(tomllib.loads(manifest.read_text())))
    torch.distributed.barrier()
    ends, losses = [], []
    for step in range(steps):
        losses.append(stage.step(step))
        ends.append(time.monotonic())
    print(json.dumps([ends, losses]))


# Both.


@contextlib.contextmanager
def machines(rtt: float, rate: float) -> Iterator[tuple[list[Host], Path]]:
    """One for each stage, and a directory."""
    line = Link(rate=(rate, rate), delay=rtt / 4, queue=QUEUE)
    with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
        yield [internet.host(f"peer{number}", link=line) for number in range(STAGES)], Path(directory)


def measure(work: Work, rtts: Sequence[float], rate: float, steps: int) -> Iterator[dict[str, object]]:
    """The rows of one kind of payload."""
    found: dict[float, tuple[Measured, Measured]] = {}
    for rtt in rtts:
        with machines(rtt, rate) as (hosts, directory):
            manifest = directory / "manifest.toml"
            manifest.write_text(dump_settings(work.settings))
            both = ours(hosts, manifest, steps), rival(hosts, manifest, steps)
        _check(*both)
        found[rtt] = both
        speeds = [work.tokens / each.seconds for each in both]
        case = f"{work.encoding}, {rtt:g} ms"
        yield row(f"{case}: tokens", speeds[0], speeds[1], "1/s", "", "GPipe")
        for name, each, start in zip(("SWARM", "GPipe"), both, found[rtts[0]], strict=True):
            if rtt == rtts[0]:
                continue
            goal = GOAL if name == "SWARM" and rtt == JUDGED else ""
            at_first, speed = work.tokens / start.seconds, work.tokens / each.seconds
            yield row(f"{case}: tokens of {name}", speed, at_first, "1/s", goal, f"at {rtts[0]:g} ms")
            trips = 1e3 * (each.seconds - start.seconds) / rtt
            print(f"{case}: a step of {name} takes {each.seconds:.2f} s, {trips:.1f} round trips more")


def _median(ends: Sequence[float]) -> float:
    """Of the seconds that steps took, those to warm up left out."""
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends[WARM_UP - 1 :]))


def _check(one: Measured, other: Measured) -> None:
    for step, (mine, theirs) in enumerate(zip(one.losses, other.losses, strict=True)):
        if not math.isclose(mine, theirs, rel_tol=SAME):
            raise RuntimeError(f"the losses of step {step} are {mine:.4f} and {theirs:.4f}")


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="0 and 100 ms, int8, a smaller step")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rtt", type=float, nargs="+", help="ms; the first is what the others are compared with")
    parser.add_argument("--encodings", nargs="+", choices=["fp32", "bf16", "int8"], help="of what goes between stages")
    parser.add_argument("--rate", type=float, default=RATE, help="of the lines, Mbit/s")
    parser.add_argument("--steps", type=int, help="that are measured; 2 with --quick, else 5")
    for field in attrs.fields(Work):
        if field.name != "encoding":
            parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        rank, meeting, manifest, steps = options.work
        work(int(rank), meeting, Path(manifest), int(steps))
        return 0
    reason = missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    sweep()
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    sizes = {field.name: getattr(options, field.name) for field in attrs.fields(Work) if field.name != "encoding"}
    rtts = options.rtt or ([0.0, JUDGED] if options.quick else RTTS)
    steps = options.steps or (2 if options.quick else 5)
    encodings = options.encodings or (["int8"] if options.quick else ["int8", "fp32"])
    rows = (measure(Work(encoding=encoding, **sizes), rtts, options.rate, steps) for encoding in encodings)
    return conclude("pipeline", itertools.chain.from_iterable(rows), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
