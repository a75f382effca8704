"""Measuring an endpoint's lines while data is moved."""

from __future__ import annotations

from ipaddress import ip_address
from types import SimpleNamespace

import pytest
import trio

from protocol.identity import PeerId
from protocol.metering import Meter
from protocol.rates import PERIOD

PEER = PeerId(bytes([1]) * 32)
FAST, SLOW = 4e6, 1e6


class Connected:
    """An endpoint with one peer, to which bytes are sent by hand."""

    connected = (PEER,)
    sent = 0

    def statistics(self, peer):
        remote = ip_address("192.0.2.1")
        return SimpleNamespace(
            bytes_sent=self.sent, bytes_received=0, rtt=0.05, path="direct", remote=remote, carried=0.0
        )

    async def send(self, rate):
        for _ in range(60):
            self.sent += int(rate * PERIOD)
            await trio.sleep(PERIOD)


@pytest.mark.parametrize(("only_state", "known"), [(True, FAST), (False, FAST - (FAST - SLOW) / 4)])
async def test_only_an_attempt_makes_a_line_look_worse(autojump_clock, nursery, only_state, known):
    """To a slow newcomer, a state goes as slowly as that can take it."""
    endpoint = Connected()
    meter = Meter(endpoint)
    nursery.start_soon(meter.run)
    with meter.during():
        await endpoint.send(FAST)
    with meter.during(raise_only=True):
        await endpoint.send(SLOW)
        if not only_state:
            with meter.during():
                await endpoint.send(SLOW)
    assert meter.rates([PEER]).up == pytest.approx(known, rel=0.11)
