"""Whether others can connect to us: some of those who are connected are asked to try.

Each dials the host that it sees us at from a fresh port and says the word that we gave it, which shows that it was us
whom it reached. Nobody is dialled but who asks, so this is of no use against third parties. What comes out is advice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import trio
from msgspec import Meta

from protocol.door import origin
from protocol.endpoint import Endpoint
from protocol.errors import HandshakeError, PeerGone, PeerUnreachable, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.rate import Quota
from protocol.stream import Stream
from protocol.wire import message

Verdict: TypeAlias = Literal["public", "private", "unknown"]

WITNESSES = 3
"""Peers that are asked each time."""

PERIOD = 600.0
"""Seconds between two checks."""

UNKNOWN_PERIOD = 15.0
"""Seconds until the next check when the last one said nothing."""

DIAL_SECONDS = 5.0
"""How long a witness tries."""

_FIRST = 2.0  # seconds for more witnesses to be there
_REPLY_SECONDS = 10.0
_ARRIVAL_SECONDS = 2.0  # the word may come a little later than the witness's answer
_AT_A_TIME = 16  # dials for others
_RATE, _BURST = 0.05, 6  # requests of one peer a second


@message("net.dialback")
class DialBack:
    """Asks to be dialled at the host that we are seen at."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    word: Annotated[bytes, Meta(min_length=16, max_length=16)]


@message("net.dialback.result")
class DialBackResult:
    """Whether the handshake succeeded."""

    reached: bool


class Reachability:
    """Asks others whether they can reach us, and does the same for them.

    Whoever turns out to be private does not relay for others any more.

    Args:
        endpoint: Our endpoint.
        rng: Chooses whom to ask, and spreads it over time.
        report: Called with each new verdict.
    """

    def __init__(
        self, endpoint: Endpoint, *, rng: random.Random, report: Callable[[Verdict], None] = lambda verdict: None
    ) -> None:
        self._endpoint = endpoint
        self._rng = rng
        self._report = report
        self._quota: Quota[PeerId] = Quota(rate=_RATE, burst=_BURST)
        self._dialling = 0
        self.verdict: Verdict = "unknown"
        endpoint.handle(DialBack, self._on_dial_back)

    async def run(self) -> None:
        """Checks now and then, until cancelled."""
        await self._until_connected()
        await trio.sleep(_FIRST)
        while True:
            verdict = await self.check()
            if verdict != self.verdict:
                self.verdict = verdict
                self._endpoint.relaying = verdict != "private"
                self._report(verdict)
            await trio.sleep((UNKNOWN_PERIOD if verdict == "unknown" else PERIOD) * self._rng.uniform(0.8, 1.2))

    async def check(self) -> Verdict:
        """What a few others find out now."""
        # The host that we are seen at is what others dial, but a router may map another port of it.
        address = self._endpoint.advertised() or self._endpoint.address
        if address is None:
            return "private"
        votes: list[bool] = []

        async def ask(peer: PeerId) -> None:
            vote = await self._ask(peer, address.port)
            if vote is not None:
                votes.append(vote)

        async with trio.open_nursery() as nursery:
            for peer in self._witnesses():
                nursery.start_soon(ask, peer)
        reached = sum(votes)
        if 2 * reached == len(votes):
            return "unknown"
        return "public" if 2 * reached > len(votes) else "private"

    def _witnesses(self) -> list[PeerId]:
        """Connected peers, at as many different places as possible."""
        places: dict[str, PeerId] = {}
        rest: list[PeerId] = []
        peers = [(peer, host) for peer in self._endpoint.connected if (host := self._endpoint.host(peer)) is not None]
        self._rng.shuffle(peers)
        for peer, host in peers:
            if places.setdefault(origin(host), peer) != peer:
                rest.append(peer)
        return [*places.values(), *rest][:WITNESSES]

    async def _ask(self, peer: PeerId, port: int) -> bool | None:
        """Whether a peer reaches us; None if it does not say."""
        word = self._rng.randbytes(16)
        with self._endpoint.expect_call(word) as called:
            try:
                result = await self._endpoint.request(
                    peer, DialBack(port, word), DialBackResult, timeout=_REPLY_SECONDS
                )
            except ShoalError:
                return True if called.is_set() else None
            if not result.reached:
                return False
            with trio.move_on_after(_ARRIVAL_SECONDS):
                await called.wait()
                return True
        return None  # it says so, but has not called

    async def _until_connected(self) -> None:
        with self._endpoint.watch() as events:
            while not self._endpoint.connected:
                await events.receive()

    async def _on_dial_back(self, request: DialBack, stream: Stream) -> DialBackResult:
        if self._dialling >= _AT_A_TIME or not self._quota.allow(stream.peer, trio.current_time()):
            raise RequestRefused("too many requests to dial back", code="busy")
        if self._endpoint.host(stream.peer) is None:
            raise RequestRefused("it is not known where you are", code="relayed")
        self._dialling += 1
        try:
            with trio.fail_after(DIAL_SECONDS):
                await self._endpoint.call(stream.peer, request.port, request.word)
        except (PeerUnreachable, HandshakeError, PeerGone, trio.TooSlowError):
            return DialBackResult(False)
        finally:
            self._dialling -= 1
        return DialBackResult(True)
