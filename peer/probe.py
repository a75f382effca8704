"""Measuring the way to another peer: where it sees us, what its clock says, and how fast bytes go either way.

Every peer answers, members or not, so that `shoal doctor` can be of use before one has joined. The answers are bounded
in size, number and time: in the long run, one every five seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import attrs
import msgspec
import trio

from protocol.door import origin
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, RequestTimeout, ShoalError
from protocol.identity import PeerId
from protocol.rate import Quota
from protocol.stream import Stream
from protocol.transport import Address
from protocol.wire import message

MAX_PROBE = 8 << 20
"""Bytes that one probe may carry each way."""

SERVE_LIMIT = 15.0
"""Seconds that an answer may take; meanwhile others are told that we are busy."""

FIRST = 128 << 10
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
                await _receive(stream, probe.send, _Passed())
                await stream.send(ProbeAnswer(statistics.remote, self._clock()))
                await _send(stream, probe.want, _Passed())
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
    upload: float | None
    """Bytes per second, from us to it; None if none went in time."""
    download: float | None
    """Bytes per second, from it to us; None if none came in time."""


async def measure(
    endpoint: Endpoint, peer: PeerId, *, limit: float = 8.0, clock: Callable[[], float] = time.time
) -> Measurement:
    """Measures the way to a peer, with at most `MAX_PROBE` + `FIRST` bytes each way.

    What does not end in time still says how fast the bytes went until then; those on their way up count as there.

    Args:
        endpoint: Ours.
        peer: To whom; connected to if need be.
        limit: Seconds for all of it.
        clock: Unix seconds.

    Raises:
        RequestRefused: It does not answer probes now.
        RequestTimeout: It does not answer in that time.
        ShoalError: It cannot be reached.
    """
    deadline = trio.current_time() + limit
    try:
        with trio.fail_at(deadline):
            answer, rtt = await _exchange(endpoint, peer, 0, 0, _Passed())
    except trio.TooSlowError:
        raise RequestTimeout(f"{peer.short} did not answer a probe within {limit:g} s") from None
    ahead = answer.clock - clock() + rtt / 2
    upload = await _rate(endpoint, peer, up=True, latency=rtt, until=(trio.current_time() + deadline) / 2)
    try:
        download = await _rate(endpoint, peer, up=False, latency=0.0, until=deadline)
    except ShoalError:  # the connection may not have survived what we have sent
        download = None
    statistics = endpoint.statistics(peer)
    heartbeat = statistics.rtt if statistics is not None else None
    return Measurement(answer.seen, ahead, rtt if heartbeat is None else min(rtt, heartbeat), upload, download)


@attrs.define
class _Passed:
    """Bytes that have gone one way, and the seconds that this took."""

    bytes: int = 0
    begun: float = attrs.field(factory=trio.current_time)

    @property
    def rate(self) -> float:
        return self.bytes / max(1e-6, trio.current_time() - self.begun)


async def _rate(endpoint: Endpoint, peer: PeerId, *, up: bool, latency: float, until: float) -> float | None:
    """Bytes per second, by as many bytes as fill about a second; or what is known of that at time `until`."""
    size, rate, passed = FIRST, 0.0, _Passed()
    for _ in range(2):
        with trio.move_on_at(until) as patience:
            try:
                _, seconds = await _exchange(endpoint, peer, size if up else 0, 0 if up else size, passed)
            except ShoalError:
                if not passed.bytes:
                    raise
                return passed.rate
        if patience.cancelled_caught:
            return passed.rate if passed.bytes else None
        seconds = max(1e-6, seconds - latency)
        rate = size / seconds
        if seconds >= LONG_ENOUGH:
            break
        size = int(min(MAX_PROBE, max(FIRST, rate)))
    return rate


async def _exchange(
    endpoint: Endpoint, peer: PeerId, send: int, want: int, passed: _Passed
) -> tuple[ProbeAnswer, float]:
    """One probe: the answer; and the seconds until it was there, or that the wanted bytes took after it."""
    await endpoint.connect(peer)
    begun = trio.current_time()
    async with endpoint.open(peer, Probe(send, want), bulk=send + want > 0) as stream:
        await _send(stream, send, passed)
        answer = await stream.receive(ProbeAnswer)
        answered = trio.current_time()
        await _receive(stream, want, passed)
        ended = trio.current_time()
        await stream.finish()
        await stream.receive_some(bytearray(1))  # the end: from then on, the next probe is welcome
    return answer, ended - answered if want else answered - begun


async def _send(stream: Stream, count: int, passed: _Passed) -> None:
    chunk = memoryview(bytes(_CHUNK))
    for sent in range(0, count, _CHUNK):
        await stream.send_bytes(chunk[: count - sent])
        passed.bytes += min(_CHUNK, count - sent)


async def _receive(stream: Stream, count: int, passed: _Passed) -> None:
    chunk = memoryview(bytearray(_CHUNK))
    for received in range(0, count, _CHUNK):
        await stream.receive_into(chunk[: count - received])
        passed.bytes += min(_CHUNK, count - received)
