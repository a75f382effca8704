"""The link emulator: its arithmetic at given times, and real packets through a real link within generous bounds."""

import os
import random
import socket
import statistics
import threading
import time
from contextlib import closing

import pytest

from tests.net.emulator import Direction
from tests.net.topology import Link

FRAME = 1000  # bytes


@pytest.fixture
def wire():
    """Makes a direction between two ends; gives functions that put frames in, and that say how many came out by now."""
    near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    destination, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ends = (near, source, destination, far)
    for end in ends:
        end.setblocking(False)

    def make(*, rate=float("inf"), delay=0.0, queue=1e9, loss=0.0):
        direction = Direction(
            source.fileno(),
            destination.fileno(),
            rate=rate,
            delay=delay,
            queue=queue,
            loss=loss,
            rng=random.Random(1),
            frame=1518,
        )

        def put(frames, now):
            for index in frames:
                near.send(index.to_bytes(2, "big") + bytes(FRAME - 2))
                direction.take(now)

        def get(now):
            direction.deliver(now)
            arrived = []
            while True:
                try:
                    frame = far.recv(2000)
                except BlockingIOError:
                    return arrived
                assert len(frame) == FRAME
                arrived.append(int.from_bytes(frame[:2], "big"))

        return put, get

    yield make
    for end in ends:
        end.close()


def test_frames_arrive_after_the_delay(wire):
    put, get = wire(delay=0.25)
    put([1], 100.0)
    put([2], 100.125)
    assert get(100.2) == []
    assert get(100.25) == [1]
    assert get(100.5) == [2]


def test_frames_are_sent_one_after_the_other(wire):
    put, get = wire(rate=8 * FRAME, delay=1.0)
    put(range(4), 100.0)  # each takes an eighth of a second
    assert get(101.0) == []
    assert get(101.25) == [0, 1]
    assert get(101.5) == [2, 3]
    put([4], 200.0)  # an idle link saves nothing up
    assert get(201.0) == []
    assert get(201.125) == [4]


def test_full_queue_drops_what_comes_last(wire):
    put, get = wire(rate=8 * FRAME, queue=0.25)
    put(range(10), 100.0)
    assert get(110.0) == [0, 1, 2]  # one on its way, and a quarter of a second behind it
    put([10], 110.0)
    assert get(120.0) == [10]


def test_lost_frames_take_their_time(wire):
    put, get = wire(rate=8 * FRAME, loss=0.5)
    put(range(100), 100.0)
    arrived = get(100.0 + 100 / 8)
    assert 25 < len(arrived) < 75
    assert arrived == sorted(arrived)
    put([100], 100.0 + 101 / 8)
    assert set(get(200.0)) <= {100}


def echo(listener):
    """Answers every datagram with itself, until the socket is shut down."""
    while True:
        data, address = listener.recvfrom(2000)
        if data == b"end":
            return
        listener.sendto(data, address)


@pytest.mark.netns
def test_link_has_its_delay(internet):
    near, far = internet.host("near"), internet.host("far", link=Link(delay=40.0))
    with closing(far.socket(socket.SOCK_DGRAM)) as server, closing(near.socket(socket.SOCK_DGRAM)) as client:
        server.bind((far.address, 7))
        client.connect((far.address, 7))
        client.settimeout(5.0)
        thread = threading.Thread(target=echo, args=[server])
        thread.start()
        times = []
        for _ in range(10):
            begun = time.monotonic()
            client.send(b"ping")
            client.recv(2000)
            times.append(time.monotonic() - begun)
        client.send(b"end")
        thread.join()
    assert min(times) >= 0.080
    assert statistics.median(times) < 0.130


@pytest.mark.netns
def test_link_loses_packets(internet):
    count = 200  # they fit into a socket's buffer
    near, far = internet.host("near"), internet.host("far", link=Link(loss=(20.0, 0.0)))
    with closing(far.socket(socket.SOCK_DGRAM)) as server, closing(near.socket(socket.SOCK_DGRAM)) as client:
        server.bind((far.address, 7))
        client.bind((near.address, 7))
        for sender, receiver, host, loss in ((server, client, near, 0.0), (client, server, far, 0.2)):
            for index in range(count):
                sender.sendto(bytes([index]), (host.address, 7))
            arrived = set()
            receiver.settimeout(5.0)  # hosts may have to ask twice for each other's hardware address
            while len(arrived) < count:
                try:
                    arrived.add(receiver.recv(2000))
                except TimeoutError:
                    break
                receiver.settimeout(0.5)
            assert (1 - loss * 1.7) * count <= len(arrived) <= (1 - loss / 3) * count


@pytest.mark.netns
def test_link_has_its_rates(internet):
    near, far = internet.host("near"), internet.host("far", link=Link(rate=(40.0, 10.0), delay=5.0))
    with closing(far.socket()) as listener, closing(near.socket()) as one:
        listener.bind((far.address, 7))
        listener.listen()
        one.connect((far.address, 7))
        with closing(listener.accept()[0]) as other:
            for sender, receiver, rate in ((one, other, 40e6), (other, one, 10e6)):
                length = int(rate / 8 * 0.75)  # what the link carries in three quarters of a second
                begun = time.monotonic()
                thread = threading.Thread(target=sender.sendall, args=[bytes(length)])
                thread.start()
                missing = length
                while missing:
                    missing -= len(receiver.recv(1 << 16))
                thread.join()
                assert 0.75 <= time.monotonic() - begun < 3.0


@pytest.mark.netns
def test_link_ends_with_the_topology(internet):
    host = internet.host("host", link=Link(delay=1.0))
    (process,) = host.network.core.processes
    internet.close()
    assert not os.path.exists(f"/proc/{process.pid}")
