"""Measuring the way to another peer: where it sees us, what its clock says, and how fast bytes go either way.

Every peer answers, members or not, so that `shoal doctor` can be of use before one has joined. The answers are bounded
in size, number and time: in the long run, one every five seconds.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import attrs
import msgspec
import trio

from protocol.door import origin
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, RequestTimeout
from protocol.identity import PeerId
from protocol.rate import Quota
from protocol.stream import Stream
from protocol.transport import Address
from protocol.wire import message

MAX_PROBE = 8 << 20
"""Bytes that one probe may carry each way."""

SERVE_LIMIT = 15.0
"""Seconds that an answer may take; meanwhile others are told that we are busy."""

FIRST = 256 << 10
"""Bytes of a first measurement, which decides on the size of the next."""

LONG_ENOUGH = 0.5
"""Seconds after which a measurement is not repeated with more bytes."""

_CHUNK = 1 << 16

Bytes8M = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE)]


@message("probe.start")
class Probe:
    """Asks for a measurement. `send` raw bytes follow."""

    send: Bytes8M
    want: Bytes8M


@message("probe.answer")
class ProbeAnswer:
    """Sent when all bytes have arrived; as many as were wanted follow."""

    seen: Address
    """Where the connection comes from."""
    clock: float
    """Unix seconds."""


class Prober:
    """Answers probes.

    Args:
        endpoint: Where they arrive.
        clock: Unix seconds.
    """

    def __init__(self, endpoint: Endpoint, *, clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._busy = False
        # One measurement makes five probes at most.
        self._per_origin: Quota[str] = Quota(rate=0.1, burst=10)
        self._in_all: Quota[None] = Quota(rate=0.2, burst=20)
        endpoint.handle(Probe, self._on_probe)

    async def _on_probe(self, probe: Probe, stream: Stream) -> None:
        statistics = self._endpoint.statistics(stream.peer)
        now = trio.current_time()
        if statistics is None:
            raise RequestRefused("the connection is over", code="busy")
        allowed = self._per_origin.allow(origin(statistics.remote.host), now) and self._in_all.allow(None, now)
        if self._busy or not allowed:
            raise RequestRefused("this peer has answered enough probes for now", code="busy")
        self._busy = True
        try:
            with trio.fail_after(SERVE_LIMIT):
                await _receive(stream, probe.send)
                await stream.send(ProbeAnswer(statistics.remote, self._clock()))
                await _send(stream, probe.want)
                await stream.finish()
        except trio.TooSlowError:
            raise RequestRefused(f"the probe took longer than {SERVE_LIMIT:.0f} s", code="busy") from None
        finally:
            self._busy = False


@attrs.frozen
class Measurement:
    """What was found out about the way to a peer."""

    seen: Address
    """Where the peer sees us."""
    clock: float
    """How many seconds its clock is ahead of ours, give or take `rtt`."""
    rtt: float
    """Seconds for a small request, the quickest of some."""
    upload: float
    """Bytes per second, from us to it."""
    download: float
    """Bytes per second, from it to us."""


async def measure(
    endpoint: Endpoint, peer: PeerId, *, limit: float = 8.0, clock: Callable[[], float] = time.time
) -> Measurement:
    """Measures the way to a peer, with at most `MAX_PROBE` + `FIRST` bytes each way.

    Args:
        endpoint: Ours.
        peer: To whom; connected to if need be.
        limit: Seconds for all of it.
        clock: Unix seconds.

    Raises:
        RequestRefused: It does not answer probes now.
        RequestTimeout: The way is too slow to be measured in that time.
        ShoalError: It cannot be reached.
    """
    try:
        with trio.fail_after(limit):
            answer, rtt, _ = await _exchange(endpoint, peer, 0, 0)
            ahead = answer.clock - clock() + rtt / 2
            upload = await _rate(lambda size: _exchange(endpoint, peer, size, 0), rtt)
            download = await _rate(lambda size: _exchange(endpoint, peer, 0, size), 0.0)
    except trio.TooSlowError:
        raise RequestTimeout(f"{FIRST >> 10} KiB each way took longer than {limit:g} s") from None
    statistics = endpoint.statistics(peer)
    heartbeat = statistics.rtt if statistics is not None else None
    return Measurement(answer.seen, ahead, rtt if heartbeat is None else min(rtt, heartbeat), upload, download)


async def _rate(exchange: Callable[[int], Awaitable[tuple[ProbeAnswer, float, float]]], latency: float) -> float:
    """Bytes per second, by as many bytes as fill about a second."""
    size, rate = FIRST, 0.0
    for _ in range(2):
        _, up, down = await exchange(size)
        seconds = max(1e-6, (up if down == 0.0 else down) - latency)
        rate = size / seconds
        if seconds >= LONG_ENOUGH:
            break
        size = int(min(MAX_PROBE, max(FIRST, rate)))
    return rate


async def _exchange(endpoint: Endpoint, peer: PeerId, send: int, want: int) -> tuple[ProbeAnswer, float, float]:
    """One probe: the answer, the seconds until it was there, and the seconds that the wanted bytes took after it."""
    await endpoint.connect(peer)
    begun = trio.current_time()
    async with endpoint.open(peer, Probe(send, want), bulk=send + want > 0) as stream:
        await _send(stream, send)
        answer = await stream.receive(ProbeAnswer)
        answered = trio.current_time()
        await _receive(stream, want)
        await stream.finish()
    return answer, answered - begun, trio.current_time() - answered if want else 0.0


async def _send(stream: Stream, count: int) -> None:
    chunk = memoryview(bytes(_CHUNK))
    for sent in range(0, count, _CHUNK):
        await stream.send_bytes(chunk[: count - sent])


async def _receive(stream: Stream, count: int) -> None:
    chunk = memoryview(bytearray(_CHUNK))
    for received in range(0, count, _CHUNK):
        await stream.receive_into(chunk[: count - received])
