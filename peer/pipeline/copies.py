"""Copies of stages' states at peers of other stages: what a stage goes on from that has lost all its servers.

The first server of each stage keeps a copy of the next stage's state, and renews it now and then. Until the first of
these, whoever has the states of several stages on its disk has these to offer: a run may begin with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import trio

from optim.swarm.state import Form, StageState
from peer.node import Compute
from peer.pipeline.crew import Crew
from peer.pipeline.messages import FetchState, stage_run
from peer.pipeline.service import send_tensors
from peer.pipeline.tensors import dump, load
from peer.pipeline.transfer import Fetcher
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, ShoalError
from protocol.stream import Stream


class Copies:
    """The copies that this peer keeps. `run` must run.

    Args:
        endpoint: Carries everything.
        run_id: 32 bytes.
        stages: How many the model has.
        crew: Who does what.
        courtesy: Lets operations go before states that are sent.
        forms: What the state of a stage looks like.
        compute: Runs what takes long.
        fetcher: Fetches states of others.
        saved: What the disk has of a stage.
        offered: Stages of which it has something that others may need.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: bytes,
        stages: int,
        crew: Crew,
        courtesy: Courtesy,
        forms: Callable[[int], Form],
        *,
        compute: Compute,
        fetcher: Fetcher,
        saved: Callable[[int], Awaitable[StageState | None]],
        offered: Collection[int] = (),
    ) -> None:
        self._endpoint, self._run, self._stages, self._crew = endpoint, run_id, stages, crew
        self._courtesy, self._forms, self._compute = courtesy, forms, compute
        self._saved, self._offered, self._fetcher = saved, set(offered), fetcher
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._handlers: dict[int, contextlib.ExitStack] = {}
        self._wanted: tuple[int, Mapping[str, bool]] | None = None
        self._asked = trio.Event()

    def renew(self, stage: int, kinds: Mapping[str, bool], *, due: bool) -> None:
        """Fetches the state of the stage after this one, in which we serve, if that is for us to do; not at once.

        Args:
            stage: Ours.
            kinds: What optimizers remember, see `inner_kinds`.
            due: Whether a copy that we have is to be renewed.
        """
        for each in list(self._offered) if due else ():  # all stages are ahead of it, and others have copies
            self.forget(each)
        servers, wanted = list(self._crew.servers(stage)), (stage + 1) % self._stages
        is_first = bool(servers) and servers[0] == self._crew.peer
        for each in list(self._kept):
            first = next(iter(self._crew.servers((each - 1) % self._stages)), self._crew.peer)
            if first != self._crew.peer and each in self._crew.standings[first].copies:
                self.forget(each)
        if self._stages > 1 and is_first and (due or wanted not in self._kept):
            self._wanted = wanted, kinds
            self._asked.set()

    async def run(self) -> None:
        """Fetches copies until cancelled."""
        try:
            for stage in self._offered:
                self._offer(stage)
            while True:
                await self._asked.wait()
                self._asked = trio.Event()
                if self._wanted is not None:
                    await self._fetch(*self._wanted)
        finally:
            for stage in [*self._kept, *self._offered]:
                self.forget(stage)

    async def find(self, stage: int, kinds: Mapping[str, bool]) -> StageState | None:
        """The newest copy of a stage's state, ours or somebody else's; None if nobody has one that is any good.

        Args:
            stage: Its number.
            kinds: What optimizers remember, see `inner_kinds`.
        """
        found: list[StageState] = []
        for peer, standing in self._crew.standings.items():
            own = self._kept.get(stage) if peer == self._crew.peer else None
            if own is not None or (stage in standing.copies and peer != self._crew.peer):
                with contextlib.suppress(ShoalError):
                    if own is not None:
                        found.append(await self._compute(load, own[1], own[0]))
                    else:
                        found.append((await self._fetcher.state(peer, stage, self._forms(stage), kinds))[0])
        credible = [state for state in found if self._crew.is_credible(self._crew.peer, state.step)]
        return max(credible or found, key=lambda state: state.step, default=None)

    async def _fetch(self, stage: int, kinds: Mapping[str, bool]) -> None:
        if self._crew.own.stage == stage:  # we have moved since it was asked for
            return
        for peer in self._crew.servers(stage):
            with contextlib.suppress(ShoalError):
                state, data = await self._fetcher.state(peer, stage, self._forms(stage), kinds)
                break
        else:
            return
        if self._crew.own.stage == stage:  # we have moved meanwhile
            return
        for other in list(self._kept.keys() - {stage}):
            self.forget(other)
        self._kept[stage] = state.step, data
        self._offer(stage)

    def _offer(self, stage: int) -> None:
        if stage not in self._handlers:
            stack = self._handlers[stage] = contextlib.ExitStack()
            run = stage_run(self._run, stage)
            stack.enter_context(self._endpoint.serving(run, "", {FetchState: partial(self._on_fetch, stage)}))
        self._crew.announce(copies=tuple(sorted(self._handlers)))

    def forget(self, stage: int) -> None:
        """Keeps no copy of a stage any more, such as of one that we serve ourselves."""
        self._kept.pop(stage, None)
        self._offered.discard(stage)
        if stage in self._handlers:
            self._handlers.pop(stage).close()
            self._crew.announce(copies=tuple(sorted(self._handlers)))

    async def _on_fetch(self, stage: int, request: FetchState, stream: Stream) -> None:
        if stream.peer in self._crew.standings:
            kept = self._kept.get(stage)
            if kept is None and (state := await self._saved(stage)) is not None:
                kept = state.step, await self._compute(partial(dump, state))
            if kept is not None:
                await send_tensors(stream, *kept, self._courtesy)
                return
        raise RequestRefused("this state is not kept here", code="gone")
