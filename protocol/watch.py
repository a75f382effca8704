"""Watches what comes in of one attempt, and finds out who is stuck; see `protocol.silence`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeAlias

import attrs
import trio

from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Stream
from protocol.errors import RequestTimeout
from protocol.identity import PeerId
from protocol.silence import Silence

Ask: TypeAlias = Callable[[int], Awaitable[float | None]]
"""Asks the member at a place for how long nothing has come in there: see `Attempt.waiting`. None if it refuses to say.
Raises `RequestTimeout` without an answer."""


@attrs.define
class _Incoming:
    stream: Stream | None = None
    done: int = 0


class Watch:
    """One member's watch over those that send to it, who go by their places in the plan.

    Args:
        sources: Who sends to us.
        times: How long silence may last.
        pace: Bytes per second that came in when something was carried out last; 0 if that is not known.
        ask: See `Ask`.
        line: How many bytes have come from a source in all, whatever they are part of.
        gap: Bytes that others may have to move before a source has something to send again.
        suspect: Who is at fault, as far as we can tell, if a source sends nothing.
    """

    def __init__(
        self,
        sources: Collection[int],
        *,
        times: RoundTimes,
        pace: float,
        ask: Ask,
        line: Callable[[int], int],
        gap: int,
        suspect: Callable[[int], int] = lambda source: source,
    ) -> None:
        self._incoming = {source: _Incoming() for source in sources}
        lines = {source: line(source) for source in sources}
        self._silence = Silence(times, lines, pace=pace, gap=gap, now=trio.current_time())
        self._ask, self._line, self._suspect, self._quiet = ask, line, suspect, times.quiet
        self._longest = self._silence.longest + 2 * times.quiet  # who waits for longer should have found out why
        self._left = set(sources)
        self._asked: set[int] = set()  # who has not answered yet
        self._stuck: tuple[int, str] | None = None
        self._done = trio.Event()

    @property
    def silent(self) -> float:
        """Seconds since something came from anybody, or we knew why not."""
        self._look()
        return self._silence.last(trio.current_time())

    def waiting(self, *, sent: int, sendable: int, outgoing: int, began: float | None) -> float | None:
        """What is said to somebody who gets nothing from us; see `Attempt.waiting`.

        Args:
            sent: Pieces that the other one was sent.
            sendable: Those that could be sent to it by now.
            outgoing: All that there are for it.
            began: Since when the next one is being sent; None if none is.
        """
        if sent == outgoing:
            return None
        if sent == sendable:
            return self.silent
        # What we have to send may have come this very moment.
        return 0.0 if began is None or trio.current_time() - began < self._quiet else None

    def begun(self, source: int, stream: Stream) -> None:
        """Its bytes come on this stream."""
        self._incoming[source].stream = stream
        self._silence.begun(source)

    def came(self, source: int, count: int) -> None:
        """So many bytes are complete."""
        self._incoming[source].done += count

    def over(self, source: int) -> None:
        """All has come."""
        self._silence.over(source)
        self._left.discard(source)
        if not self._left:
            self._done.set()

    async def run(self) -> tuple[int, str] | None:
        """Until somebody is stuck: who it is, and how that shows; or until all has come."""
        async with trio.open_nursery() as nursery:
            while True:
                with trio.move_on_at(self._silence.due):
                    await self._done.wait()
                if self._done.is_set():
                    break
                for source in self._look():
                    suspect, now = self._suspect(source), trio.current_time()
                    if suspect != source and not self._silence.overdue(suspect, now):
                        continue  # it sends to us, slowly: so it does to others
                    if self._silence.exhausted(source, now):  # whatever it says, and when
                        self._blame(source, suspect)
                    elif suspect not in self._asked:
                        self._asked.add(suspect)
                        nursery.start_soon(self._question, source, suspect)
            nursery.cancel_scope.cancel()
        return self._stuck

    async def _question(self, source: int, suspect: int) -> None:
        """Asks a suspect, and decides whether it is stuck. Meanwhile, looks go on."""
        answered, waits = True, None
        try:
            waits = await self._ask(suspect)
        except RequestTimeout:
            answered = False
        self._asked.discard(suspect)
        if source not in self._look():
            return
        now = trio.current_time()
        # The question may stand behind data that goes the same way, however little that should be.
        if not answered and self._silence.silent(source, now) < self._silence.longest:
            return
        if waits is None or waits > self._longest or not self._silence.believe(source, now):
            self._blame(source, suspect)

    def _blame(self, source: int, suspect: int) -> None:
        seconds = self._silence.nothing(source, trio.current_time())
        self._stuck = suspect, f"nothing came for {seconds:.3g} s"
        self._done.set()

    def _look(self) -> list[int]:
        now, counts, lines = trio.current_time(), {}, {}
        for source, one in self._incoming.items():
            counts[source] = one.done + (0 if one.stream is None else one.stream.arrived)
            lines[source] = self._line(source)
            if one.stream is not None and one.stream.withheld:  # nothing can come
                self._silence.excuse(source, now)
        return self._silence.look(counts, lines, now)


def received(endpoint: Endpoint, peer: PeerId) -> int:
    """Bytes that have come from a peer in all, over the connection that there is now."""
    known = endpoint.statistics(peer)
    return 0 if known is None else known.bytes_received
