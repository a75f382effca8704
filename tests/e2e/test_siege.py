"""Thousands of connections that never say a word, on real sockets: the daemon goes on serving, and stays small."""

import os
import random
import socket
import sys

import pytest
import trio

from dht.messages import Ping, Pong
from peer.contact import parse_contact
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.tcp import TcpTransport

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, and all of 127.0.0.0/8"),
]

MOST = 10_000
ADDRESSES = 40  # that they come from
AT_ONCE = 64
MIB = 1 << 20


def descriptors():
    """How many sockets this process may open."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return MOST if hard == resource.RLIM_INFINITY else min(MOST, hard - 200)


def memory(pid):
    """Bytes that a process has in memory."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def dial(address, number, held, slots):
    async with slots:
        sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.append(sock)
        await sock.bind((f"127.9.0.{1 + number % ADDRESSES}", 0))
        await sock.connect((address.host, address.port))
        if number % 2:
            await sock.send(b"shoal\1")


async def test_ten_thousand_half_open_connections(swarm, nursery):
    helper = swarm.daemon("helper")
    helper.launch("serve", "--home", helper.home, "--events", helper.events, "--listen", "127.0.0.1:0", "--no-map")
    output = helper.root / "stdout"
    await swarm.until(lambda: output.exists() and output.read_text().endswith("\n"), "the helper's address")
    peer, address = parse_contact(output.read_text().strip())
    assert peer is not None

    async def is_served(seed):
        endpoint = Endpoint(Identity.from_seed(bytes([seed]) * 32), TcpTransport(), rng=random.Random(seed))
        await nursery.start(endpoint.run, None)
        endpoint.learn(peer, address)
        assert await endpoint.request(peer, Ping(), Pong, timeout=30) == Pong()
        endpoint.disconnect(peer, "thank you")

    await is_served(1)
    before = memory(helper.process.pid)
    held, slots = [], trio.Semaphore(AT_ONCE)
    count = descriptors()
    try:
        async with trio.open_nursery() as siege:
            for number in range(count):
                siege.start_soon(dial, address, number, held, slots)
        assert len(held) == count
        await is_served(2)
        assert len(os.listdir(f"/proc/{helper.process.pid}/fd")) < 700  # 256 connections, as many handshakes
        assert memory(helper.process.pid) - before < 64 * MIB
    finally:
        for sock in held:
            sock.close()
    await is_served(3)
    await swarm.stop(helper)
    nursery.cancel_scope.cancel()
