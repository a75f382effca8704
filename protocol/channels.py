"""Operations of one run told apart by tag and group, each with rounds of its own, over one endpoint.

Peers begin to use a tag at different times. Whoever is asked about one that it does not use yet says that it may come,
and lets a member that takes it for the coordinator wait a little.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection

import attrs
import trio

from protocol.codecs import CodecName
from protocol.collective import Window
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Stream
from protocol.errors import Overloaded, RequestRefused
from protocol.handlers import Handler
from protocol.identity import PeerId
from protocol.metering import Meter
from protocol.plan import MAX_BLOCK, MAX_WEIGHT, NO_DIGEST
from protocol.roster import Roster
from protocol.round_events import RoundEvent
from protocol.round_messages import Brings, Compare, FetchResult, Noted, Ready, RingData, RoundOpen
from protocol.rounds import Rounds
from protocol.wire import Message

MAX_CHANNELS = 64
"""Tags and groups in use at a time. Each keeps the results of its last operations until another needs its place."""

MAX_WAITING = 64
"""Members of others that wait at a time for us to begin to use a tag."""

STEADY = 3.0
"""How many times as long as the quickest others may take from one operation to the next. Programs cannot hurry."""

MAX_TAG = 40
"""Characters of a tag; the rest of what a message has room for names the group."""


def checked_group(group: Collection[PeerId] | None) -> frozenset[PeerId] | None:
    """The members of a group; None stands for all.

    Raises:
        ValueError: It is none.
    """
    if group is None:
        return None
    listed = isinstance(group, Collection) and not isinstance(group, (str, bytes))
    if not listed or not all(isinstance(peer, PeerId) for peer in group):
        raise ValueError(f"a group is a list of peer ids, as `members` has them, or None for all, not {group!r}")
    return frozenset(group)


@attrs.frozen(kw_only=True)
class ChannelSettings:
    """What all members of a run have to agree on."""

    times: RoundTimes = attrs.field(factory=lambda: RoundTimes(steady=STEADY))
    codec: CodecName = "fp32"
    """How vectors look on the wire, see `protocol.codecs`. Blocks are sent as they are."""
    max_weight: float = MAX_WEIGHT
    max_block: int = MAX_BLOCK
    """The most bytes that one member's block may have."""
    report: Callable[[RoundEvent], None] = attrs.field(default=lambda event: None)
    courtesy: Courtesy | None = None
    """What else is sent on the endpoint, and can wait, uses the same one."""
    fixed: bool = False
    """Whether the run says what operations are about, so that whoever brings something else lies, and is passed over.
    Else what most members bring is right, and the others get `Misfit`."""


class Queue:
    """Operations of one tag and group that wait for their turn, in the order in which they were started."""

    def __init__(self) -> None:
        self._turns: deque[trio.Event] = deque()

    def join(self) -> trio.Event:
        """A place at the end; it is our turn when the event is set."""
        turn = trio.Event()
        self._turns.append(turn)
        self._turns[0].set()
        return turn

    def leave(self, turn: trio.Event) -> None:
        """Gives up a place, whether it was our turn or not."""
        self._turns.remove(turn)
        if self._turns:
            self._turns[0].set()

    def __bool__(self) -> bool:
        """Whether anything waits, or has its turn."""
        return bool(self._turns)


@attrs.define(eq=False)
class _Channel:
    """One tag and group in use."""

    rounds: Rounds
    window: Window | None
    used: float = -math.inf
    """When an operation began last, on trio's clock."""
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _over: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serves others until `end`."""
        try:
            with self._scope:
                await self.rounds.run(task_status=task_status)
        finally:
            self._over.set()

    async def end(self) -> None:
        """Ends what `run` does, and waits until it has."""
        self._scope.cancel()
        await self._over.wait()


class Channels:
    """All tags and groups of one run at one peer. `run` owns their tasks."""

    def __init__(self, endpoint: Endpoint, run_id: bytes, roster: Roster, settings: ChannelSettings) -> None:
        self._endpoint, self._run, self._roster, self._settings = endpoint, run_id, roster, settings
        self._courtesy = settings.courtesy or Courtesy(lambda: endpoint.bytes_sent)
        self._meter = Meter(endpoint)
        self._channels: dict[str, _Channel] = {}
        self._queues: dict[str, Queue] = {}
        self._opened = trio.Event()
        self._opening = trio.Lock()
        self._waiting = 0
        self.nursery: trio.Nursery | None = None
        """Where tasks of the run belong; None while it does not run."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves the run until cancelled."""
        handlers: dict[type, Handler] = {
            Ready: self._on_ready,
            RoundOpen: self._on_open,
            RingData: _refuse,
            FetchResult: _refuse,
            Compare: self._on_compare,
        }
        try:
            async with trio.open_nursery() as self.nursery:
                with self._endpoint.serving(self._run, None, handlers):
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self.nursery = None
            self._channels.clear()

    def queue(self, tag: str, group: Collection[PeerId] | None) -> Queue:
        """Where operations of a tag and group wait.

        Raises:
            ValueError: The tag is too long, or we are not in the group.
        """
        name = self._name(tag, group)
        if name not in self._queues:
            self._queues = {other: queue for other, queue in self._queues.items() if queue}
        return self._queues.setdefault(name, Queue())

    async def get(self, tag: str, group: Collection[PeerId] | None, window: Window | None = None) -> Rounds:
        """The rounds of a tag and group, which begin if need be, in the place of those that were not used for longest.

        Raises:
            Overloaded: Too many are in use at this moment.
            ValueError: They have another window.
        """
        assert self.nursery is not None, "the collective must be running"
        name = self._name(tag, group)
        async with self._opening:
            if name not in self._channels:
                if len(self._channels) >= MAX_CHANNELS:
                    await self._make_room()
                roster = self._roster if group is None else _Group(self._roster, frozenset(group))
                self._channels[name] = await self._open(name, roster, window, self.nursery)
                self._opened.set()
                self._opened = trio.Event()
            channel = self._channels[name]
            if channel.window != window:
                raise ValueError(f"the operations of tag {tag!r} have another window: {channel.window}")
            channel.used = trio.current_time()
            return channel.rounds

    async def _make_room(self) -> None:
        """Ends the channel that was not used for longest. Who uses it again then is a newcomer there.

        One with a window stays: of what it missed, a newcomer would have to know the result.
        """
        idle = [
            name
            for name, channel in self._channels.items()
            if channel.window is None and not self._queues.get(name) and not channel.rounds.statistics().busy
        ]
        if not idle:
            raise Overloaded(f"more than {MAX_CHANNELS} tags and groups are in use")
        longest = min(idle, key=lambda name: self._channels[name].used)
        await self._channels.pop(longest).end()

    async def _open(self, name: str, roster: Roster, window: Window | None, nursery: trio.Nursery) -> _Channel:
        settings = self._settings
        rounds = Rounds(
            self._endpoint,
            self._run,
            settings=settings.times if window is None else settings.times.within(window),
            roster=roster,
            report=settings.report,
            tag=name,
            codec=settings.codec,
            fixed=settings.fixed,
            max_weight=settings.max_weight,
            max_block=settings.max_block,
            courtesy=self._courtesy,
            meter=self._meter,
        )
        rounds.committed(0, NO_DIGEST)
        channel = _Channel(rounds, window)
        await nursery.start(channel.run)
        return channel

    @property
    def busy(self) -> bool:
        """Whether anything is going on, at whatever tag."""
        return bool(self._waiting) or any(one.rounds.statistics().busy for one in self._channels.values())

    def _name(self, tag: str, group: Collection[PeerId] | None) -> str:
        if not isinstance(tag, str) or len(tag) > MAX_TAG or "@" in tag:
            raise ValueError(f"a tag is text of at most {MAX_TAG} characters, without @, not {tag!r}")
        if group is None:
            return tag
        if self._endpoint.peer_id not in group:
            raise ValueError("the group does not include ourselves")
        return f"{tag}@{hashlib.sha256(b''.join(sorted(set(group)))).hexdigest()[:16]}"

    async def _on_ready(self, request: Ready, stream: Stream) -> Message | None:
        if not self._roster.knows(stream.peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        if self._waiting >= MAX_WAITING:
            raise RequestRefused("too many members wait here", code="busy")
        self._waiting += 1
        try:
            # A coordinator that says nothing for the stall time would count as stuck.
            with trio.move_on_after(self._settings.times.stall / 2):
                while request.tag not in self._channels:
                    await self._opened.wait()
        finally:
            self._waiting -= 1
        if request.tag not in self._channels:
            return await _refuse(request, stream)
        return await self._channels[request.tag].rounds.handlers[Ready](request, stream)

    async def _on_open(self, request: RoundOpen, stream: Stream) -> Message | None:
        if not self._roster.knows(stream.peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        return Noted()  # we may come, and will be asked again

    async def _on_compare(self, request: Compare, stream: Stream) -> Message | None:
        if not self._roster.knows(stream.peer):
            raise RequestRefused("rounds are for members: say hello first", code="not_a_member")
        return Brings(None, late=False)


async def _refuse(request: object, stream: Stream) -> Message | None:
    raise RequestRefused("nothing of that tag is going on here", code="unknown_run")


class _Group:
    """A roster of some members only."""

    def __init__(self, roster: Roster, group: frozenset[PeerId]) -> None:
        self._roster, self._group = roster, group

    def partners(self) -> Collection[PeerId]:
        return self._group.intersection(self._roster.partners())

    def expected(self) -> Collection[PeerId]:
        return self._group.intersection(self._roster.expected())

    def arriving(self) -> Collection[PeerId]:
        return self._group.intersection(self._roster.arriving())

    def woken(self) -> bool:
        return self._roster.woken()

    def knows(self, peer: PeerId) -> bool:
        return peer in self._group and self._roster.knows(peer)

    def doubt(self, peer: PeerId, seconds: float) -> None:
        self._roster.doubt(peer, seconds)
