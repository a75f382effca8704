"""A link of given rate, delay, queue and loss between two network namespaces, for kernels without netem.

    python tests/net/emulator.py NAMESPACE:DEVICE NAMESPACE:DEVICE --rate 100 --delay 25 --loss 1

makes a TAP device in each namespace, prints "ready", and carries frames from one to the other for as long as it runs.
Set the devices up, with addresses, yourself. Every option takes one value, or two: one for each direction, first that
from the first end to the second.

A frame waits until the link has sent the frames before it, takes `length / rate` to be sent itself, and arrives `delay`
later. If more is waiting than the queue holds, it is dropped. What is lost is lost after it was sent, as on radio.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import gc
import os
import random
import select
import struct
import time
from collections import deque
from collections.abc import Sequence

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
HEADER = 18
"""Bytes of an Ethernet header, with a VLAN tag."""

BATCH = 256
"""Frames that are taken from one end before the other end gets its turn."""

TICK = 0.0002
"""Seconds that a sleep lasts at least, so that frames that are due at almost the same time share a wake-up."""


class Direction:
    """One direction of the link: frames come in at the file descriptor `source` and leave at `destination`.

    Args:
        source, destination: TAP devices, non-blocking.
        rate: Bytes per second; infinity for no limit.
        delay: Seconds between the end of sending and arrival.
        queue: Seconds at `rate` that frames may wait to be sent.
        loss: The probability for each frame to be lost.
        rng: Decides which.
        frame: Bytes of the largest frame.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        *,
        rate: float,
        delay: float,
        queue: float,
        loss: float,
        rng: random.Random,
        frame: int,
    ) -> None:
        self.source = source
        self.destination = destination
        self._seconds_per_byte = 1 / rate
        self._delay = delay
        self._queue = queue
        self._loss = loss
        self._random = rng.random
        self._frame = frame
        self._free = 0.0  # when the link will have sent what it has accepted
        self._due: deque[float] = deque()
        self._frames: deque[bytes] = deque()

    @property
    def next_due(self) -> float:
        """When the next frame arrives; infinity if none is under way."""
        return self._due[0] if self._due else float("inf")

    def take(self, now: float) -> None:
        """Accepts what is waiting at the source."""
        read, source, size = os.read, self.source, self._frame
        per_byte, delay, loss, chance = self._seconds_per_byte, self._delay, self._loss, self._random
        add_time, add_frame = self._due.append, self._frames.append
        free, latest = max(self._free, now), now + self._queue
        try:
            for _ in range(BATCH):
                frame = read(source, size)
                if free > latest:
                    continue
                free += len(frame) * per_byte
                if loss and chance() < loss:
                    continue
                add_time(free + delay)
                add_frame(frame)
        except BlockingIOError:
            pass
        self._free = free

    def deliver(self, now: float) -> None:
        """Hands over what is due."""
        write, destination = os.write, self.destination
        due, frames = self._due, self._frames
        while due and due[0] <= now:
            due.popleft()
            # A device that is down refuses frames (EIO): they are lost, as with an unplugged cable.
            with contextlib.suppress(OSError):
                write(destination, frames.popleft())


def carry(directions: Sequence[Direction]) -> None:
    """Runs the link until the process is killed."""
    clock, wait = time.monotonic, select.select
    sources = {direction.source: direction for direction in directions}
    descriptors = list(sources)
    while True:
        now = clock()
        for direction in directions:
            direction.deliver(now)
        due = min(direction.next_due for direction in directions)
        timeout = None if due == float("inf") else max(due - clock(), TICK)
        ready, _, _ = wait(descriptors, (), (), timeout)
        now = clock()
        for descriptor in ready:
            sources[descriptor].take(now)


def enter(namespace: str) -> None:
    """Moves the calling thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def open_tap(namespace: str, device: str) -> int:
    """Makes a TAP device in a namespace, for as long as the descriptor is open. Leaves the thread in that namespace."""
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs=2, metavar="NAMESPACE:DEVICE")
    for option, default, text in (
        ("--rate", float("inf"), "Mbit/s; unlimited if left out"),
        ("--delay", 0.0, "ms, one way"),
        ("--queue", 200.0, "ms at the rate"),
        ("--loss", 0.0, "percent of the frames"),
    ):
        parser.add_argument(option, nargs="+", type=float, default=[default], help=text)
    parser.add_argument("--mtu", type=int, default=1500, help="bytes, of the devices")
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    options = parser.parse_args()
    if max(map(len, (options.rate, options.delay, options.queue, options.loss))) > 2:
        parser.error("a link has two directions")
    near, far = (open_tap(*end.split(":")) for end in options.ends)
    directions = [
        Direction(
            source,
            destination,
            rate=options.rate[way] * 1e6 / 8,
            delay=options.delay[way] / 1e3,
            queue=options.queue[way] / 1e3,
            loss=options.loss[way] / 100,
            rng=random.Random(options.seed + way),
            frame=options.mtu + HEADER,
        )
        for source, destination, way in ((near, far, 0), (far, near, -1))  # the last value is the way back's
    ]
    # A wire does not wait for the machines that it connects. Niceness would count within our session only.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here is cyclic
    print("ready", flush=True)
    carry(directions)


if __name__ == "__main__":
    main()
