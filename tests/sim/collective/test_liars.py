"""Members that break the rules of an operation."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import attrs
import pytest
import torch
import trio

from protocol.codecs import ErrorFeedback, make_codec
from protocol.collective import Window
from protocol.coordinator import Coordinator, Send
from protocol.errors import PeerGone, ShoalError
from protocol.identity import PeerId
from protocol.plan import MAX_ATTEMPT, MAX_REVISION, NO_BALLOT, NO_DIGEST, coordinators
from protocol.round_messages import Ahead, GatherBlock, Halt, Propose, Queued, Ready, RingData
from protocol.rounds import Rounds
from protocol.weights import SIZE


class Twisted:
    """A stream on which something else is sent than was meant."""

    def __init__(self, stream, message, data) -> None:
        self.stream, self.message, self.data = stream, message, data

    async def send(self, message) -> None:
        await self.stream.send(self.message(message))

    async def send_bytes(self, data, **how) -> None:
        await self.stream.send_bytes(self.data(data), **how)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def twist(peer, *, message=lambda message: message, data=lambda data: data) -> None:
    original = peer.endpoint.open

    @asynccontextmanager
    async def opened(target, request, **how):
        async with original(target, request, **how) as stream:
            yield Twisted(stream, message, data) if isinstance(request, RingData) else stream

    peer.endpoint.open = opened


@pytest.mark.parametrize("number", range(3))
async def test_blocks_out_of_turn_are_not_taken(autojump_clock, swarm_of, number):
    async with swarm_of(4) as swarm:
        liar = swarm.peers[number]
        others = [peer for peer in swarm.peers if peer is not liar]
        twist(liar, message=lambda block: GatherBlock((block.place + 1) % 4))
        outcomes = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.together, lambda peer: peer.collective.gather(b"a lie"), [liar])
            with trio.fail_after(60):
                outcomes = await swarm.together(lambda peer: peer.collective.gather(b"%d" % peer.number), others)
            nursery.cancel_scope.cancel()
        truth = {peer.id: b"%d" % peer.number for peer in others}
        for gathered in outcomes.values():
            assert truth.items() <= {peer: bytes(block) for peer, block in gathered.blocks.items()}.items()


async def test_blocks_beyond_the_limit_end_the_connection(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        await swarm.together(lambda peer: peer.collective.barrier())
        ready = Ready(swarm.run_id, "", 2, NO_DIGEST, 1.0, 1 << 25, NO_BALLOT, (), operation="gather")
        with pytest.raises(PeerGone, match="33554432 bytes"):
            async with one.endpoint.open(other.id, ready) as stream:
                await stream.receive(Queued)


@pytest.mark.parametrize(("signature", "problem"), [(None, "has not signed"), (bytes(SIZE), "is wrong")])
async def test_a_weight_that_is_not_signed_ends_the_connection(autojump_clock, swarm_of, signature, problem):
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        await swarm.together(lambda peer: peer.collective.barrier())
        ready = Ready(swarm.run_id, "", 2, NO_DIGEST, 1.0, 5, NO_BALLOT, (), signature=signature)
        with pytest.raises(PeerGone, match=problem):
            async with one.endpoint.open(other.id, ready) as stream:
                await stream.receive(Queued)


async def test_a_coordinator_that_mixes_up_signatures_does_not_make_a_round(autojump_clock, swarm_of, monkeypatch):
    """Those that follow their own coordinators go on."""
    async with swarm_of(4) as swarm:
        liar = swarm.peers[2]
        propose, lies = Coordinator._propose, []

        def mixed_up(self, now, view):
            propose(self, now, view)
            if self._peer == liar.id and self.plan is not None and len(self.plan.members) > 1:
                lies.append(self.plan)
                plan = attrs.evolve(self.plan, signatures=self.plan.signatures[::-1])
                self._actions = [
                    attrs.evolve(action, message=Propose(plan))
                    if isinstance(action, Send) and isinstance(action.message, Propose)
                    else action
                    for action in self._actions
                ]

        monkeypatch.setattr(Coordinator, "_propose", mixed_up)
        others = [peer for peer in swarm.peers if peer is not liar]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.collective.all_reduce, torch.zeros(50))
            with trio.fail_after(300):
                for _ in range(3):
                    await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(50)), others)
            nursery.cancel_scope.cancel()
        assert lies


@pytest.mark.parametrize("attempt", [2**20, MAX_ATTEMPT - 1, MAX_ATTEMPT])
@pytest.mark.parametrize("way", ["plan", "halt"])
async def test_a_coordinator_that_uses_up_the_attempts_does_not_end_the_run(
    autojump_clock, swarm_of, monkeypatch, attempt, way
):
    """It proposes a plan that leaves no room for others', or halts one, and dies of it."""
    async with swarm_of(4) as swarm:
        liar = swarm.peers[2]
        propose, told = Coordinator._propose, trio.Event()

        def far_ahead(self, now, view):
            propose(self, now, view)
            if self._peer == liar.id and self.plan is not None and len(self.plan.members) > 1:
                told.set()
                liar.jam_ring(after=0)
                if way == "plan":
                    self.plan = attrs.evolve(self.plan, attempt=attempt)
                    said = Propose(self.plan)
                else:
                    said = Halt(attrs.evolve(self.plan.ballot, attempt=attempt))
                self._actions += [Send(peer, said) for peer in self.plan.members]
                self._actions = [one for one in self._actions if isinstance(one, Send) and one.message == said]

        monkeypatch.setattr(Coordinator, "_propose", far_ahead)
        others = [peer for peer in swarm.peers if peer is not liar]
        outcomes = {}
        async with trio.open_nursery() as nursery:

            async def live():
                with suppress(ShoalError):
                    while True:
                        await liar.collective.barrier()

            async def die():
                await told.wait()
                await trio.sleep(1)  # it is heard
                swarm.kill(liar)

            nursery.start_soon(live)
            nursery.start_soon(die)
            with trio.fail_after(300):
                while not told.is_set():
                    outcomes = await swarm.together(lambda peer: peer.collective.barrier(), others)
        assert {outcome.members for outcome in outcomes.values()} == {next(iter(outcomes.values())).members}
        assert set(outcomes[others[0]].members) == {peer.id for peer in others}


@pytest.mark.parametrize("operation", ["all_reduce", "gather"])
async def test_a_coordinator_that_makes_no_plan_is_left_when_an_attempt_could_be_over(
    autojump_clock, swarm_of, monkeypatch, operation
):
    """Of a gather too, though nobody knows what others might have brought."""
    length = 200_000
    call = {
        "all_reduce": lambda peer: peer.collective.all_reduce(torch.ones(length)),
        "gather": lambda peer: peer.collective.gather(bytes(length)),
    }[operation]
    async with swarm_of(6) as swarm:
        times = swarm.times
        liar = swarm.peers[2]
        propose, silent = Coordinator._propose, []

        def nothing(self, now, view):
            if self._peer == liar.id:
                silent.append(now)
            else:
                propose(self, now, view)

        monkeypatch.setattr(Coordinator, "_propose", nothing)
        others = [peer for peer in swarm.peers if peer is not liar]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, liar)
            begun = trio.current_time()
            while not silent:
                begun = trio.current_time()
                await swarm.together(call, others)
            took = trio.current_time() - begun
            nursery.cancel_scope.cancel()
        assert took < 2 * (times.grace + times.slack) + times.attempt(length, 6) + 5


@pytest.mark.parametrize("window", [None, Window(quorum=2, grace=1.0)])
async def test_who_says_that_all_operations_are_over_does_not_end_them(autojump_clock, swarm_of, monkeypatch, window):
    """Others may count from there on, but they can still do so."""
    liars: list[PeerId] = []

    def lying(original):
        async def answer(rounds, request, stream):
            if rounds._endpoint.peer_id in liars:
                return Ahead(MAX_REVISION, liars.pop())
            return await original(rounds, request, stream)

        return answer

    monkeypatch.setattr(Rounds, "_on_ready", lying(Rounds._on_ready))
    monkeypatch.setattr(Rounds, "_on_open", lying(Rounds._on_open))
    async with swarm_of(4) as swarm:
        others = [peer for peer in swarm.peers if peer.number != 2]

        async def together(peers):
            return await swarm.together(lambda peer: peer.collective.all_reduce(torch.ones(5), window=window), peers)

        await together(swarm.peers)
        liars.append(swarm.peers[2].id)
        with trio.fail_after(300):
            while liars:
                await together(others)
            for _ in range(10):
                outcomes = await together(others)
        assert len({outcome.plan.id for outcome in outcomes.values()}) == 1
        assert {len(outcome.contributors) for outcome in outcomes.values()} == {3}


async def test_strangers_wait_for_no_tag(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        one, other = swarm.peers
        other.knows = lambda peer: False
        ready = Ready(swarm.run_id, "a tag", 1, NO_DIGEST, 1.0, 1, NO_BALLOT, ())
        begun = trio.current_time()
        async with one.endpoint.open(other.id, ready) as stream:
            with pytest.raises(ShoalError, match="members"):
                await stream.receive(Queued)
        assert trio.current_time() - begun < 1


def in_order(swarm):
    """The two peers as plans without a tag have them: the first one opens the stream, so it can lie."""
    by_id = {peer.id: peer for peer in swarm.peers}
    return [by_id[peer] for peer in coordinators(swarm.run_id, 0, by_id)]


async def test_values_that_are_not_finite_do_not_reach_the_caller_of_an_exchange(autojump_clock, swarm_of):
    async with swarm_of(2) as swarm:
        liar, honest = in_order(swarm)
        twist(liar, data=lambda data: torch.full((len(data) // 4,), torch.inf).numpy().tobytes())
        twist(honest)
        for _ in range(3):
            outcomes = await swarm.together(lambda peer: peer.collective.exchange(torch.ones(5)))
            assert outcomes[honest].values is None
            assert "finite" in outcomes[honest].problem


async def test_what_an_exchange_leaves_out_counts_only_if_the_partner_keeps_to_the_rules(autojump_clock, swarm_of):
    length, codec = 3000, make_codec("int4")
    async with swarm_of(2, codec="int4") as swarm:
        liar, honest = in_order(swarm)
        lies = False
        twist(liar, data=lambda data: b"\xff" * len(data) if lies else data)  # scales that are no numbers
        values = torch.randn(length, generator=torch.Generator().manual_seed(1))
        feedback = ErrorFeedback(codec, length)
        for lies in (False, True, False, True, True, False):
            outcomes = await swarm.together(lambda peer: peer.collective.exchange(values))
            assert ("scale" in outcomes[honest].problem) == lies
            data, expected = bytearray(codec.encoded_size(length)), torch.empty(length)
            feedback.encode(0, values, data)
            codec.decode(data, expected)
            if outcomes[honest].values is not None:
                assert torch.equal(outcomes[honest].ours, expected)
                feedback.commit()
