"""Internets of network namespaces, and swarms of daemons in them."""

import random
import sys
from pathlib import Path

import attrs
import pytest
import trio

from peer.child import Child
from tests.net.topology import Host, Internet, missing, missing_port_mapper, sweep

ROOT = Path(__file__).resolve().parents[2]
PORT = 4711
POLL = 0.05  # seconds between looks at the event files
PATIENCE = 60.0  # seconds; what is waited for takes a few, on a machine with two busy cores
MODEL = "--layers 1 --width 32 --heads 2 --context 16 --batch 2"


@pytest.fixture(scope="session")
def namespaces():
    """Skips tests where there can be no network namespaces."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    sweep()


@pytest.fixture(scope="session")
def port_mapping(namespaces):
    """Skips tests where routers cannot offer port mapping."""
    reason = missing_port_mapper()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def internet(namespaces, tmp_path):
    with Internet(tmp_path) as internet:
        yield internet


@attrs.frozen
class Peer:
    """A daemon on a host."""

    host: Host
    child: Child

    @property
    def recording(self):
        return self.child.recording

    @property
    def id(self):
        return self.recording.peer

    def rounds_of(self, peers):
        """The rounds that it committed with exactly these peers as members, itself included."""
        members = {peer.id for peer in peers}
        return {
            number: event.text("digest")
            for number, event in self.recording.committed.items()
            if set(event.names("members")) == members
        }

    def path_to(self, other):
        """How the connection to another peer went when it was last made."""
        paths = [event.text("path") for event in self.recording.of("connected") if event.peer == other.id]
        return paths[-1] if paths else None

    @property
    def reachability(self):
        """What it last found out about itself."""
        last = self.recording.last("reachability")
        return None if last is None else last.text("verdict")


class NetSwarm:
    """Daemons in network namespaces: what `shoal start` and `shoal join` start. Files are kept in `directory`."""

    def __init__(self, directory):
        self.peers = []
        self._directory = directory
        self._text = directory / "text"
        letters = random.Random(5)
        self._text.write_text("".join(letters.choice("abcdefgh \n") for _ in range(60_000)))

    async def found(self, host, *, inner_steps=20):
        """Starts the founder; returns when its ticket is there. The run ends when the test does."""
        run = f"{MODEL} --inner-steps {inner_steps} --grace 5 --outer-momentum 0.5"
        founder = self._start(host, "start", *run.split())
        await self.until(founder.child.read_ticket)
        return founder

    def join(self, host):
        """Starts another peer, with the founder's ticket."""
        return self._start(host, "join", self.peers[0].child.read_ticket())

    async def until(self, condition, *, patience=PATIENCE):
        """Waits until `condition()` holds, which may change with every event of any peer."""
        with trio.move_on_after(patience):
            while True:
                for peer in self.peers:
                    peer.child.poll()
                if condition():
                    return
                if not all(peer.child.running for peer in self.peers):
                    break
                await trio.sleep(POLL)
        pytest.fail("\n\n".join(["what was waited for did not come", *map(self._account, self.peers)]))

    async def rounds_together(self, peers, count, *, patience=PATIENCE):
        """Waits until these peers, and no others, have completed `count` more rounds, with equal digests."""
        before = max((max(peer.recording.committed, default=0) for peer in peers), default=0)

        def common():
            rounds = [peer.rounds_of(peers) for peer in peers]
            return {number for number in set.intersection(*map(set, rounds)) if number > before}

        await self.until(lambda: len(common()) >= count, patience=patience)
        for number in common():
            assert len({peer.recording.committed[number].text("digest") for peer in peers}) == 1

    def close(self):
        for peer in self.peers:
            peer.child.kill()

    def _start(self, host, *what):
        child = Child(host.name, self._directory)
        listen = f"[{host.address}]" if ":" in host.address else "0.0.0.0"
        options = {
            "--home": child.home,
            "--listen": f"{listen}:{PORT}",
            "--events": child.events,
            "--ticket-file": child.ticket,
            "--data": self._text,
            "--device": "cpu",
            "--threads": 1,
        }
        words = (str(word) for option in options.items() for word in option)
        child.start(host.namespace.command(sys.executable, "-m", "peer", *what, *words, "--debug"))
        self.peers.append(Peer(host, child))
        return self.peers[-1]

    def _account(self, peer):
        events = "\n".join(f"{e.t:.2f} {e.kind} {dict(e.fields)}" for e in peer.recording.events[-12:])
        return f"{peer.host.name} ({peer.id}):\n{events}\n{peer.child.log_tail()}"


@pytest.fixture
def net_swarm(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where `python -m peer` finds the package
    swarm = NetSwarm(tmp_path)
    yield swarm
    swarm.close()
