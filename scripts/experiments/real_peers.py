"""The experiment of methods.py with real peers: four processes that exchange over TCP, encrypted and signed.

    python scripts/experiments/real_peers.py

Beside each row's loss are that of a `LocalSwarm` whose peers have the same names, whether all peers end with its very
bits, and how many bytes a peer has sent in all, connections, signatures and acknowledgements included, as counted where
they are handed to the sockets. NoLoCo draws other random pairs in each run, and ends with other bits. Results go to
docs/results/real_peers.csv; what is there already is not run again.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optim import LocalSwarm
from protocol.channels import ChannelSettings
from protocol.identity import PeerId
from protocol.standalone import Joined, open_collective
from scripts.experiments.methods import ROWS, Life, every_step, replica
from scripts.experiments.table import Line, Table, command
from scripts.experiments.task import Task

CHOSEN = ("sync", "diloco-50", "diloco-50 e3m0", "streaming-48", "streaming-48 e3m0", "noloco-25")
FIELDS = ("row", "seed", "loss", "local loss", "same bits", "bytes", "payload", "reduction", "seconds")


@attrs.frozen(kw_only=True)
class Told:
    """What a peer has to say in the end."""

    peer_id: PeerId
    run: bytes
    life: Life
    sent: int


async def live(pipe: Connection, name: str, seed: int, task: Task, peers: Sequence[str]) -> None:
    """One peer's life. It says where it listens, and in the end what came of it."""
    row = ROWS[name]
    async with open_collective("experiment", peers=peers, settings=ChannelSettings(codec=row.codec)) as place:
        pipe.send(str(place.address))
        await place.mesh.wait_for(row.replicas)
        begin = await place.collective.barrier(tag="begin")
        swarm = Joined(place, trio.lowlevel.current_trio_token())
        life = await trio.to_thread.run_sync(partial(replica, row, seed, task, swarm))
        await place.collective.barrier(tag="end")  # nobody leaves whom another still needs
        told = Told(peer_id=swarm.peer_id, run=begin.plan.run, life=life, sent=place.endpoint.bytes_sent)
    pipe.send(told)


def process(pipe: Connection, name: str, seed: int, task: Task, peers: Sequence[str]) -> None:
    """What a peer's process does."""
    torch.set_num_threads(1)
    trio.run(live, pipe, name, seed, task, peers)


def real_peers(name: str, seed: int, task: Task) -> list[Told]:
    """What became of a row's peers.

    Raises:
        EOFError: One of them has failed.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    addresses: list[str] = []
    for _ in range(ROWS[name].replicas):
        ours, theirs = context.Pipe()
        context.Process(target=process, args=(theirs, name, seed, task, addresses[:1]), daemon=True).start()
        theirs.close()
        pipes.append(ours)
        addresses.append(ours.recv())
    return [pipe.recv() for pipe in pipes]


def run(name: str, seed: int, task: Task) -> list[Line]:
    """One row."""
    row = ROWS[name]
    task.data(seed), task.pretrained(seed)
    started = time.monotonic()
    told = real_peers(name, seed, task)
    seconds = time.monotonic() - started
    names = [one.peer_id for one in told]
    swarm = LocalSwarm(row.replicas, codec=row.codec, run=told[0].run, peer_ids=names)
    lives = swarm.run(partial(replica, row, seed, task))
    same = all(one.life.digest == life.digest for one, life in zip(told, lives, strict=True))
    sent = statistics.fmean(one.sent for one in told)
    line = {
        "row": name,
        "seed": seed,
        "loss": f"{told[0].life.loss:.4f}",
        "local loss": f"{lives[0].loss:.4f}",
        "same bits": "yes" if same else "no",
        "bytes": round(sent),
        "payload": round(statistics.fmean(peer.bytes_sent for peer in swarm.peers)),
        "reduction": f"{every_step(row, task) / sent:.1f}",
        "seconds": f"{seconds:.0f}",
    }
    return [line]


ABOUT = (__doc__ or "").partition("\n")[0]
TABLE = Table(script=__file__, about=ABOUT, rows=CHOSEN, fields=FIELDS, run=run)

if __name__ == "__main__":
    sys.exit(command(TABLE))
