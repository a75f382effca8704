"""Whether what this peer brings to operations fits what others bring.

Coordinators leave out who does not fit, and say so. As a coordinator may lie, whoever is told that asks all others what
they bring: each speaks for itself, and who lies, or has made a mistake, has one voice. It is an error unless more bring
the same as we do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

import trio

from protocol.coordinator import RoundTimes
from protocol.endpoint import Endpoint, Stream
from protocol.errors import Misfit, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.kinds import Brought, Kind, differences, left_out
from protocol.plan import Plan
from protocol.roster import Roster
from protocol.round_events import RoundEvent
from protocol.round_messages import Brings, Compare

_HISTORY = 16
"""Operations of which we remember what we have brought: others may ask after we have gone on."""

_NAMED = 4
"""Peers that an error names."""

_ADVICE = (
    "All have to make the same calls in the same order, or give each sort of call a tag of its own, with as many "
    "values and with the same codec, window and pairing: start whoever is wrong again"
)

_logger = logging.getLogger(__name__)


class Agreement:
    """What this peer brings to the operations of one run and tag, and whether that fits.

    Args:
        endpoint: Carries questions and answers.
        run: The run.
        tag: Of the operations.
        times: How long to wait for what.
        roster: Who can take part.
        report: Told once of each peer that brings something else to an operation.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: bytes,
        tag: str,
        *,
        times: RoundTimes,
        roster: Roster,
        report: Callable[[RoundEvent], None],
    ) -> None:
        self._endpoint, self._run, self._tag, self._times = endpoint, run, tag, times
        self._roster, self._report = roster, report
        self._ours: dict[int, Brought] = {}  # by revision
        self._known: dict[int, set[PeerId]] = {}  # who brings something else, by revision

    def bring(self, revision: int, kind: Kind, *, late: bool) -> None:
        """We begin to take part."""
        self._ours[revision] = Brought(self._endpoint.peer_id, kind, late)
        self._known.setdefault(revision, set())
        for old in sorted(self._ours)[:-_HISTORY]:
            del self._ours[old], self._known[old]

    async def answer(self, request: Compare, stream: Stream) -> Brings:
        """Says what we bring to an operation.

        Raises:
            RequestRefused: The peer that asks is no member.
        """
        if not self._roster.knows(stream.peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        ours = self._ours.get(request.revision)
        if ours is None:
            return Brings(None, late=False)
        self._note(request.revision, [Brought(stream.peer, request.kind)])
        return Brings(ours.kind, ours.late)

    async def check(self, revision: int, coordinator: PeerId, said: Iterable[Brought], until: float) -> None:
        """A coordinator leaves us out; returns if more bring the same as we do, so that it is wrong.

        Args:
            revision: Of the round.
            coordinator: Who says so; what we say ourselves is right.
            said: What others bring, as far as it says.
            until: How long those that have not begun may still come, on trio's clock.

        Raises:
            Misfit: It is right.
        """
        us, ours, partners = self._endpoint.peer_id, self._ours[revision], set(self._roster.partners())
        known = {each.peer: each for each in said if each.peer in partners | {coordinator} and each.peer != us}
        heard, awaited, right = dict(known), partners - {us}, None
        while right is None:
            undecided = await self._ask(revision, awaited, heard)
            self._note(revision, heard.values())
            if coordinator == us:  # it is only for the others to hear of it
                heard, right = known, True
            else:
                right = left_out(ours, heard.values(), len(undecided) if trio.current_time() < until else 0)
            if right is None:
                await trio.sleep(min(self._times.poll, max(0.0, until - trio.current_time())))
                awaited = undecided & set(self._roster.partners())
        if right:
            raise self._misfit(revision, ours.kind, heard.values())

    def compare(self, peer: PeerId, plan: Plan, ours: Kind) -> None:
        """A peer has the result of an operation that others have made without us, to which we would bring this.

        Raises:
            Misfit: It does not fit.
        """
        kind = Kind.of(plan.operation, plan.length, plan.codec, ours.terms)
        if kind != ours:
            raise self._misfit(plan.revision, ours, [Brought(peer, kind)])

    async def _ask(self, revision: int, peers: Collection[PeerId], known: dict[PeerId, Brought]) -> set[PeerId]:
        """Asks peers what they bring, and notes it in `known`. Returns those that have not begun."""
        undecided: set[PeerId] = set()
        question = Compare(self._run, self._tag, revision, self._ours[revision].kind)

        async def ask(peer: PeerId) -> None:
            try:
                answer = await self._endpoint.request(peer, question, Brings, timeout=self._times.quiet)
            except ShoalError:  # what was said about it holds
                return
            if answer.kind is None:
                known.pop(peer, None)
                undecided.add(peer)
            else:
                known[peer] = Brought(peer, answer.kind, answer.late)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        return undecided

    def _note(self, revision: int, known: Iterable[Brought]) -> None:
        """Reports who brings something else than we do."""
        ours, noted = self._ours[revision], self._known[revision]
        for each in known:
            if each.peer not in noted and (difference := differences(ours.kind, each.kind)):
                noted.add(each.peer)
                self._report(RoundEvent(event="misfit", round=revision, members=(each.peer,), reason=difference))
                name, who = self._name(revision, each.kind), each.peer.short
                _logger.warning("%s of %s does not fit what we bring: %s", name, who, difference)

    def _misfit(self, revision: int, ours: Kind, others: Iterable[Brought]) -> Misfit:
        peers: dict[str, list[PeerId]] = {}
        for each in others:
            if difference := differences(ours, each.kind):
                peers.setdefault(difference, []).append(each.peer)
        told = (f"{_named(who)} ({difference})" for difference, who in peers.items())
        return Misfit(
            f"{self._name(revision, ours)} does not fit what others bring: {', '.join(told)}. {_ADVICE}",
            tuple(peer for who in peers.values() for peer in who),
        )

    def _name(self, revision: int, kind: Kind) -> str:
        tag = self._tag.partition("@")[0]
        return f"{kind.call} number {revision}" + (f" of tag {tag!r}" if tag else "")


def _named(peers: list[PeerId]) -> str:
    names = ", ".join(peer.short for peer in peers[:_NAMED])
    return names if len(peers) <= _NAMED else f"{names} and {len(peers) - _NAMED} more"
