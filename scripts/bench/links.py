"""Measures whole rounds of four peers over emulated lines against torch.distributed with gloo, where it is possible.

    sudo python scripts/bench/links.py --quick --json

Each peer has a network namespace, and a line of 100 Mbit/s each way to a router between them; between any two it is
50 ms and back. Gloo runs in the same namespaces, over TCP with the congestion control that the system has chosen. Bare
TCP connections with bbr, one from each peer to the next, show what the emulation carries.

A bound is the least time that the data needs on these lines if nothing else took any. Around the ring each peer sends
and receives 2(n-1)/n of the V bytes, so that takes 2(n-1)/n · V / rate, where the slowest peer's rate counts. Of all
plans: whoever's values count has to send at least V and to receive V, whatever the others do; and together they have to
send 2(n-1) · V, since each element needs n-1 additions of something that came from elsewhere, and then has to reach n-1
peers. So no plan takes less than max(V / slowest rate, 2(n-1) · V / sum of all rates). An unequal partition reaches it:
the owner of a part b of the data moves (1 + (n-2) · b) · V bytes each way. Latency is in no bound, nor are headers.

Where packets are lost (at the router), what decides is the congestion control. So there all is done twice: in
namespaces where connections begin with cubic, as most systems have it, and where they begin with bbr. Gloo takes what
it gets; ours asks for bbr in any case, which anybody may have where the kernel has it. The routes say what connections
begin with (`congctl`): as the default of a namespace, which would come to the same, the kernel only takes what all
users of the machine may choose. The loss begins when everybody is connected. Over cubic gloo takes minutes for a large
vector, so both reduce a quarter of it there, once. Exit code 1 if a goal is missed; 0 if there can be no network
namespaces, which it says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from allreduce import Group  # noqa: E402
from rows import conclude, row  # noqa: E402
from transport import Child  # noqa: E402

from tests.net.topology import Host, Internet, Link, Namespace, missing, sweep  # noqa: E402

PEERS = 4
RATE = 100.0  # Mbit/s
SLOW = 20.0
RTT = 50.0  # ms
QUEUE = 200.0  # ms
LOSS = 0.5  # percent
LOSSY_PART = 4  # the vector is so many times smaller there
WARM_UP = 2  # operations of a sixteenth of the vector: lanes are open then, and windows
ALONE = 5.0  # seconds that the bare connections get


def ring_bound(size: float, rates: Sequence[float]) -> float:
    """Seconds that so many bytes take around a ring at least, with peers of these bytes per second, both ways."""
    return 2 * (len(rates) - 1) / len(rates) * size / min(rates)


def best_bound(size: float, rates: Sequence[float]) -> float:
    """Seconds that they take with any plan at least."""
    return max(size / min(rates), 2 * (len(rates) - 1) * size / sum(rates))


@attrs.frozen
class Measured:
    """What one kind of group took for an operation."""

    seconds: float
    sent: float
    """Bytes of the peer that sent most; 0 for gloo, which does not tell."""


@attrs.frozen
class Star:
    """Peers around a router."""

    hosts: list[Host]
    router: Namespace
    directory: str

    @classmethod
    @contextlib.contextmanager
    def make(cls, rates: Sequence[float], congestion: str = "") -> Iterator[Star]:
        """One peer for each rate, in Mbit/s. Connections begin with this congestion control, if it says one."""
        with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
            lines = [Link(rate=(rate, rate), delay=RTT / 4, queue=QUEUE / 2) for rate in rates]
            hosts = [internet.host(f"peer{number}", link=line) for number, line in enumerate(lines)]
            for host in hosts if congestion else ():
                host.namespace.ip(f"route change default via 11.{host.network.number}.0.254 congctl {congestion}")
            yield cls(hosts, internet.core, directory)

    def measure(self, kind: str, length: int, repetitions: int, loss: float = 0.0) -> Measured:
        """The median of so many operations on so many elements, after smaller ones.

        A percentage of all packets is lost from the time when everybody is connected.
        """
        interface = "GLOO_SOCKET_IFNAME=eth0"  # else it takes the address that the host name stands for
        places = [(host.address, ["env", interface, *host.namespace.command()]) for host in self.hosts]
        group = Group(kind, len(places), self.directory, places)
        try:
            with self._losing(loss):
                group.do("fill", max(1, length // 16))
                group.time(WARM_UP)
                group.do("fill", length)
                before = _sent(group, kind)
                seconds = statistics.median(group.time(1) for _ in range(repetitions))
            sent = max(after - start for start, after in zip(before, _sent(group, kind), strict=True))
            group.check()
        finally:
            group.close()
        return Measured(seconds, sent / repetitions)

    @contextlib.contextmanager
    def _losing(self, loss: float) -> Iterator[None]:
        if not loss:
            yield
            return
        rule = f"FORWARD -m statistic --mode random --probability {loss / 100} -j DROP"
        self.router.shell(f"iptables -w -A {rule}")
        yield
        self.router.shell(f"iptables -w -D {rule}")

    def carried(self, seconds: float) -> float:
        """Mbit/s of the slowest of bare connections, from each peer to the next."""
        children: list[Child] = []
        try:
            for host in self.hosts:
                children.append(Child("raw/bbr", host.address, prefix=host.namespace.command()))
            servers = tuple(children)
            for place, host in enumerate(self.hosts):
                right = (place + 1) % len(self.hosts)
                prefix = host.namespace.command()
                children.append(Child("raw/bbr", self.hosts[right].address, servers[right].port, prefix=prefix))
            clients = children[len(servers) :]
            with ThreadPoolExecutor(len(clients)) as pool:
                flows = list(pool.map(lambda client: client.do("flow", seconds), clients))
        finally:
            for child in children:
                child.process.kill()
                child.process.communicate()
        return min(8 * sent / took / 1e6 for sent, took in flows)  # type: ignore[misc]


def _sent(group: Group, kind: str) -> list[int]:
    return [0] * PEERS if kind == "gloo" else group.do("sent")  # type: ignore[return-value]


def on_equal_lines(length: int, rate: float, repetitions: int) -> Iterator[dict[str, object]]:
    """The rows for lines that are alike and lose nothing."""
    bound = ring_bound(4 * length, [rate * 1e6 / 8] * PEERS)
    where = f"{PEERS} peers, {rate:g} Mbit/s, {RTT:g} ms, {length >> 18} MiB"
    with Star.make([rate] * PEERS) as star:
        yield row(f"{where}: slowest bare connection around the ring", star.carried(ALONE), rate, "Mbit/s", "", "line")
        gloo, exact, *coarse = (star.measure(kind, length, repetitions) for kind in ("gloo", "fp32", "int8", "int4"))
    yield row(f"{where}: gloo", gloo.seconds, bound, "s", "", "the ring's bound")
    yield row(f"{where}: fp32", exact.seconds, bound, "s", f"<= {1 / 0.85:.3f}", "the ring's bound")
    yield row(f"{where}: fp32", exact.seconds, gloo.seconds, "s", "<= 1", "gloo")
    for codec, most, one in zip(("int8", "int4"), (0.27, 0.14), coarse, strict=True):
        yield row(f"{where}: {codec}, bytes sent", one.sent / 1e6, exact.sent / 1e6, "MB", f"<= {most}", "fp32")
        yield row(f"{where}: {codec}", one.seconds, exact.seconds, "s", "", "fp32")


def on_lossy_lines(length: int, rate: float, loss: float) -> Iterator[dict[str, object]]:
    """The rows for lines that lose packets."""
    bound = ring_bound(4 * length, [rate * 1e6 / 8] * PEERS)
    for congestion, goal in (("cubic", "<= 0.2"), ("bbr", "<= 1")):
        where = f"{PEERS} peers, {loss:g} % loss, {congestion}, {length / 2**18:g} MiB"
        with Star.make([rate] * PEERS, congestion) as star:
            exact, gloo = (star.measure(kind, length, 1, loss) for kind in ("fp32", "gloo"))
        yield row(f"{where}: fp32", exact.seconds, gloo.seconds, "s", goal, "gloo")
        yield row(f"{where}: fp32", exact.seconds, bound, "s", "", "the ring's bound")


def with_a_slow_peer(length: int, rate: float, slow: float, repetitions: int) -> Iterator[dict[str, object]]:
    """The rows for one line that is slower than the others."""
    rates = [*[rate] * (PEERS - 1), slow]
    bound = best_bound(4 * length, [one * 1e6 / 8 for one in rates])
    where = f"{PEERS} peers, one with {slow:g} Mbit/s, {length >> 18} MiB"
    with Star.make(rates) as star:
        exact, gloo = (star.measure(kind, length, repetitions) for kind in ("fp32", "gloo"))
    yield row(f"{where}: fp32", exact.seconds, bound, "s", "<= 1.15", "the bound of any plan")
    yield row(f"{where}: fp32", exact.seconds, gloo.seconds, "s", "", "gloo")


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="25 MiB, each operation once")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--mib", type=int, help="size of the vector; 100 if not --quick")
    parser.add_argument("--rate", type=float, default=RATE, help="of the lines, Mbit/s")
    parser.add_argument("--loss", type=float, default=LOSS, help="percent; 0 to leave that out")
    parser.add_argument("--slow", type=float, default=SLOW, help="the slow peer's Mbit/s; 0 to leave that out")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"not measured: {reason}")
        return 0
    sweep()
    length = (options.mib or (25 if options.quick else 100)) << 18
    repetitions = 1 if options.quick else 3
    parts = [on_equal_lines(length, options.rate, repetitions)]
    if options.loss:
        parts.append(on_lossy_lines(length // LOSSY_PART, options.rate, options.loss))
    if options.slow:
        parts.append(with_a_slow_peer(length, options.rate, options.slow, repetitions))
    return conclude("links", itertools.chain.from_iterable(parts), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
