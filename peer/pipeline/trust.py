"""Whose answers make sense: who has sent nonsense is asked no more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from optim.swarm.messages import Answer, Request
from optim.swarm.payloads import Packer, Payload
from peer.node import Compute
from peer.pipeline.messages import Sizes
from protocol.errors import ProtocolError
from protocol.identity import PeerId

OFFENCES = 3
"""How often a peer may send what makes no sense before nothing is asked of it any more."""


@attrs.frozen(eq=False)
class Trust:
    """Counts what peers have sent that made no sense. Connections are authenticated, so it was they who did.

    Args:
        tell: Told who is asked no more, of which stage it was asked last, and why.
    """

    tell: Callable[[PeerId, int, str], None]
    _offences: dict[PeerId, int] = attrs.field(factory=dict, init=False)

    def __contains__(self, peer: PeerId) -> bool:
        """Whether a peer may be asked for something."""
        return self._offences.get(peer, 0) < OFFENCES

    @property
    def distrusted(self) -> tuple[PeerId, ...]:
        """Who is asked for nothing any more, since when it is."""
        return tuple(peer for peer in self._offences if peer not in self)

    def doubt(self, peer: PeerId, stage: int, reason: str) -> None:
        """A peer has sent what makes no sense, when it was asked for something of a stage."""
        self._offences[peer] = self._offences.get(peer, 0) + 1
        if self._offences[peer] == OFFENCES:
            self.tell(peer, stage, reason)

    def distrust(self, peer: PeerId, stage: int, reason: str) -> None:
        """A peer has sent what makes no sense so often that it is asked for nothing any more."""
        if peer in self:
            self._offences[peer] = OFFENCES
            self.tell(peer, stage, reason)


@attrs.frozen(kw_only=True)
class Checks:
    """What answers have to be like. A trainer passes on only what is so: who refuses that is wrong."""

    sizes: Sizes
    stages: int
    compute: Compute

    async def check(self, stage: int, request: Request, answer: Answer) -> None:
        """Refuses an answer that cannot be one to a request to a stage.

        Raises:
            ProtocolError: It says why.
        """
        await self.compute(partial(self._check, stage, request, answer))

    def _check(self, stage: int, request: Request, answer: Answer) -> None:
        if (answer.step, answer.number) != (request.step, request.number):
            raise ProtocolError("an answer to something else")
        counts = request.count or request.kind == "void"
        if counts and not answer.counted:
            raise ProtocolError("a microbatch that was not counted as it should be")
        if request.kind == "void" or not answer.finite:
            return
        samples, is_last = request.samples, stage == self.stages - 1
        values: tuple[int, ...] | None = (samples, self.sizes.tokens, self.sizes.width)
        losses: tuple[int, ...] | None = None
        if request.kind == "backward":
            assert request.inputs is not None
            values = None if stage == 0 else request.inputs.shape
            losses = (samples,) if is_last else None
        elif is_last:
            values = (samples,)
        elif not self.sizes.exact and answer.values is not None and answer.values.samples == samples:
            values = answer.values.shape
        _check_payload("values", answer.values, values)
        _check_payload("losses", answer.losses, losses)

    def vouches_for(self, request: Request) -> bool:
        """Whether all that a request brings is known to make sense, so that who refuses it is wrong."""
        return self.sizes.exact or request.inputs is None or request.inputs.encoding == "tokens"


def _check_payload(what: str, payload: Payload | None, shape: tuple[int, ...] | None) -> None:
    found = None if payload is None else payload.shape
    if found != shape:
        raise ProtocolError(f"{what} of shape {found and list(found)} where {shape and list(shape)} is due")
    if payload is not None:
        if payload.encoding == "tokens":
            raise ProtocolError(f"{what} that are tokens")
        Packer().unpack(payload)
