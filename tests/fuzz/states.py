"""Fuzz targets: a state and its history from donors that lie about links, sizes, Merkle leaves and bytes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import torch
import trio
from trio.testing import MockClock

from optim import OuterState
from peer.chain import Header, Link, unpack_links
from peer.history import History, Rules, verified
from peer.state import CommittedState, read_range
from peer.sync import DescribeRequest, Description, RangeReply, RangeRequest, SyncFailed, fetch_state
from protocol import merkle, wire
from protocol.endpoint import Endpoint
from protocol.errors import ProtocolError, RequestRefused, StreamEnded
from protocol.identity import Identity, PeerId
from protocol.weights import sign_weight
from tests.fuzz.choices import Choices

RUN = b"r" * 32
_ELEMENTS = 262_144 + 100  # two ranges
STATE = CommittedState.genesis(RUN, OuterState(torch.arange(_ELEMENTS, dtype=torch.float32), {}))
_DONORS = tuple(PeerId(bytes([number]) * 32) for number in range(1, 4))


def run(data: bytes) -> None:
    """What is fetched is the state that the digest stands for, bit by bit; or it is a `SyncFailed`."""
    trio.run(_run, Choices(data), clock=MockClock(autojump_threshold=0))


async def _run(choices: Choices) -> None:
    donors = _Donors(choices)
    received: list[int] = []
    try:
        state = await fetch_state(
            cast(Endpoint, donors),
            RUN,
            STATE.history,
            _DONORS[: 1 + choices.number(2)],
            elements=_ELEMENTS,
            buffers=(),
            progress=received.append,
        )
    except SyncFailed as error:
        assert donors.lied, error
        return
    assert state.header == STATE.header
    assert state.leaves == STATE.leaves
    assert torch.equal(state.outer.parameters, STATE.outer.parameters)
    assert sum(received) == 4 * _ELEMENTS


def history(data: bytes) -> None:
    """What is believed of a history is what happened: nobody can leave something out, or add to it without a key."""
    choices = Choices(data)
    place = choices.number(len(_HISTORY.links))
    start = truth = _HISTORY.headers[place]
    links = whole = b"".join(_HISTORY.links[place:])
    if choices.one_in(3):
        wrong: dict[str, Any] = choices.of(
            ({"revision": 0}, {"weight": 1e9}, {"previous": RUN}, {"plan": bytes(32)}, {"root": b"1" * 32})
        )
        start = attrs.evolve(start, **wrong)
    while choices.one_in(2):
        links = _weighed(choices, links) if choices.one_in(3) else choices.damaged(links)
    ours = choices.of((None, _HISTORY.until(0), _HISTORY.until(1), _HISTORY))
    known = place == 0 or (ours is not None and ours.find((start.digest,)) is not None)
    try:
        found = verified(ours, start, links, _HISTORY.tip, _RULES)
    except ProtocolError:
        assert (start, links) != (truth, whole) or not known
        return
    assert start == truth
    assert known
    assert found.tip == _HISTORY.tip
    assert b"".join(_HISTORY.links).endswith(b"".join(found.links))


def _weighed(choices: Choices, links: bytes) -> bytes:
    """The links, with other weights in one of them: also such as cannot be added up."""
    try:
        made = unpack_links(links, _RULES.max_members)
    except ProtocolError:
        return links
    if made:
        place = choices.number(len(made) - 1)
        weighed = (attrs.evolve(signed, weight=choices.of(_WEIGHTS)) for signed in made[place].contributions)
        made[place] = attrs.evolve(made[place], contributions=tuple(weighed))
    return b"".join(link.pack() for link in made)


def _make_history() -> History:
    made = History((Header.genesis(RUN, bytes(32)),))
    for number in range(3):
        tip = made.tip
        signed = (sign_weight(signer, RUN, "", tip.revision + 1, tip.digest, 1.0 + number) for signer in _SIGNERS)
        made = made.extended([Link(bytes([number]) * 32, bytes(32), tuple(signed))])
    return made


_WEIGHTS = (math.inf, -math.inf, math.nan, 1e308, -1e308, 0.0, -1.0, 5.0)
_SIGNERS = tuple(Identity.from_seed(bytes([number]) * 32) for number in range(1, 4))
_HISTORY = _make_history()
_RULES = Rules(max_weight=5.0, max_members=4, admits=lambda peer: True)


class _Donors:
    """Stands for an endpoint whose peers answer the truth, or what the choices make of it."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.lied = False

    @asynccontextmanager
    async def open(self, donor: PeerId, request: object, *, bulk: bool = False) -> AsyncIterator[_Answer]:
        await trio.sleep(self._choices.number(8))
        if self._lies():
            raise RequestRefused("no", code="gone")
        yield self._describe() if isinstance(request, DescribeRequest) else self._range(cast(RangeRequest, request))

    def _describe(self) -> _Answer:
        leaves, said = b"".join(STATE.leaves), Description((), _ELEMENTS)
        if self._lies():
            wrong: dict[str, Any] = self._choices.of(({"buffers": ("x",)}, {"elements": 2**48 - 1}, {"elements": 0}))
            said = wire.decode(wire.encode(attrs.evolve(said, **wrong)), [Description])
        return _Answer(self._choices, said, self._changed(leaves))

    def _range(self, request: RangeRequest) -> _Answer:
        content = b"".join(read_range(STATE.outer, request.leaf * merkle.LEAF, merkle.LEAF))
        length = self._choices.boundary() % 2**48 if self._lies() else len(content)
        return _Answer(self._choices, RangeReply(length), self._changed(content))

    def _changed(self, content: bytes) -> bytes:
        return self._choices.damaged(content) if self._lies() else content

    def _lies(self) -> bool:
        lies = self._choices.one_in(5)
        self.lied = self.lied or lies
        return lies


@attrs.define
class _Answer:
    """Stands for a stream on which a message comes, and then bytes."""

    _choices: Choices
    _message: object
    _content: bytes

    async def receive(self, *types: type, timeout: float) -> object:
        await trio.sleep(self._choices.number(2))
        if type(self._message) not in types:
            raise ProtocolError("unexpected message")
        return self._message

    async def receive_into(self, buffer: memoryview) -> None:
        await trio.sleep(self._choices.number(2))
        if len(self._content) < len(buffer):
            raise StreamEnded("the stream ended too early")
        buffer[:] = self._content[: len(buffer)]
