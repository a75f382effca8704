"""Stands in for `python -m peer` in tests of the demo: a swarm that only writes events.

    python fake_peer.py MODE start MANIFEST --home … --events … --ticket-file … …
    python fake_peer.py MODE join TICKET …
    python fake_peer.py MODE sample --home … --length N

The founder conducts: it writes one file per step of a round into a directory beside the manifest, and the others follow
these files. The ticket is the name of that directory. A MODE other than "good" makes one daemon misbehave.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path

REDUCE = 0.3  # seconds: long for an orchestrator that looks every 20 ms
DEADLY = 3  # the round whose reduce lasts until somebody is killed: on a busy machine, nobody may look for seconds
LOOK = 0.005


class Daemon:
    def __init__(self, mode, options):
        self.mode, self.events = mode, options.events
        self.name = options.home.parent.name
        self.peer = f"id-{self.name}"
        self.revision = 0

    def tell(self, event, **fields):
        with self.events.open("a") as file:
            file.write(json.dumps({"t": time.time(), "peer": self.peer, "event": event, **fields}) + "\n")

    def follow(self, swarm, rounds):
        """Lives through the rounds that the founder conducts. Who comes later first fetches the state."""
        if self.mode == "quick" and self.name == "peer-3":
            self.tell("synced", round=rounds, digest=f"digest-{rounds}", seconds=0.1, bytes=4000)
            signal.pause()  # it lingers
        number = len(list(swarm.glob("step-*")))
        past = [json.loads((swarm / f"step-{index}").read_text()) for index in range(number)]
        if done := [step["round"] for step in past if step["kind"] == "commit"]:
            self.revision = done[-1]
            self.tell("synced", round=self.revision, digest=f"digest-{self.revision}", seconds=0.1, bytes=4000)
        (swarm / "members" / self.peer).write_text(str(os.getpid()))
        while self.revision < rounds:
            path = swarm / f"step-{number}"
            if path.exists():
                self.take(json.loads(path.read_text()), rounds)
                number += 1
            else:
                time.sleep(LOOK)
        self.tell("stopped", reason="the run is over", bytes_sent=70_000, bytes_received=70_000)

    def take(self, step, rounds):
        digest = f"digest-{step['round']}"
        if self.mode == "diverge" and self.name == "peer-1" and step["round"] == rounds:
            digest = "digest-of-another-branch"
        about = {name: step[name] for name in ("round", "attempt", "members")}
        if self.peer not in step["members"]:
            return
        if step["kind"] == "plan":
            speed = {"tokens": 2048, "tokens_per_second": 1000.0}
            self.tell("inner", step=step["round"] * 10, loss=5 / step["round"], **speed)
            self.tell("round_started", **about)
            return
        sent = {"seconds": REDUCE, "bytes_sent": 6000, "bytes_received": 6000, "weight": 1.0}
        self.tell("round_committed", contributors=step["members"], digest=digest, **about, **sent)
        loss = 5.5 if self.mode == "flat" else 5.5 / (1 + step["round"])
        self.tell("validation", round=step["round"], loss=loss)
        self.revision = step["round"]
        if self.mode == "early" and self.name == "peer-1" and self.revision == 2:
            sys.exit(0)
        if self.mode == "crash" and self.name == "peer-1" and self.revision == 1:
            print("some progress\nerror: the disk is full\nhint: make room", file=sys.stderr)
            sys.exit(1)
        if self.mode == "complain" and self.name == "peer-1" and self.revision == 1:
            print("Traceback (most recent call last):\nValueError: a bug", file=sys.stderr, flush=True)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def conduct(swarm, rounds, peers):
    """The founder's second thread: decides who is in each round, and notices who has died."""

    def members():
        found = {path.name: int(path.read_text() or 0) for path in (swarm / "members").iterdir()}
        return sorted(peer for peer, pid in found.items() if pid and alive(pid))

    def publish(**step):
        number = len(list(swarm.glob("step-*")))
        (swarm / "new").write_text(json.dumps(step))
        (swarm / "new").rename(swarm / f"step-{number}")

    while len(members()) < peers:
        time.sleep(LOOK)
    for round_ in range(1, rounds + 1):
        while round_ == rounds and "id-newcomer" not in members():
            time.sleep(LOOK)  # so that it always gets its share
        attempt, now = 1, members()
        publish(kind="plan", round=round_, attempt=attempt, members=now)
        time.sleep(REDUCE)
        while round_ == DEADLY and len(members()) == peers:
            time.sleep(LOOK)
        while now != (left := [peer for peer in now if peer in members()]):
            attempt, now = attempt + 1, left
            publish(kind="plan", round=round_, attempt=attempt, members=now)
            time.sleep(REDUCE)
        publish(kind="commit", round=round_, attempt=attempt, members=now)


def main():
    mode, command, *arguments = sys.argv[1:]
    if command == "sample":
        sys.exit("error: no checkpoint" if mode == "no-sample" else print("def sampled(): <b>"))
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    for flag in ("--home", "--events", "--ticket-file"):
        parser.add_argument(flag, type=Path, required=True)
    for flag in ("--listen", "--data", "--device", "--threads", "--max-upload", "--linger"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--wait-for")
    options = parser.parse_args(arguments)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    swarm = Path(options.what).parent / "swarm" if command == "start" else Path(options.what.removeprefix("shoal:"))
    (swarm / "members").mkdir(parents=True, exist_ok=True)
    (options.home.parent / "pid").write_text(str(os.getpid()))
    daemon = Daemon(mode, options)
    daemon.tell("started", address="127.0.0.1:1", run="run", parameters=1000)
    if command == "start":
        daemon.tell("validation", round=0, loss=5.5)
    if mode in ("silent", "stubborn"):
        while True:
            time.sleep(1)
    options.ticket_file.write_text(f"shoal:{swarm}\n")
    rounds = tomllib.loads((swarm.parent / "manifest.toml").read_text())["run"]["rounds"]
    if command == "start":
        threading.Thread(target=conduct, args=(swarm, rounds, 4), daemon=True).start()
    daemon.follow(swarm, rounds)


if __name__ == "__main__":
    main()
