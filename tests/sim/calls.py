"""Operations that simulated peers call, and what holds of what they get."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable

import torch
import trio

from protocol.collective import Broadcasted, Exchanged, Gathered, Outcome, Reduced
from protocol.errors import ShoalError
from protocol.operations import AsyncCollective
from protocol.plan import Plan
from protocol.ring import reference
from tests.sim.swarm import bits

STATE = random.Random(9).randbytes(700)
PATIENCE = 400.0
"""Simulated seconds in which an operation ends, whatever happens."""


def vector(number: int) -> torch.Tensor:
    return torch.randn(31, generator=torch.Generator().manual_seed(number))


def block(number: int) -> bytes:
    rng = random.Random(number)
    return rng.randbytes(rng.choice([0, 1, 300]))


CALLS: dict[str, Callable[[AsyncCollective, int, str], Awaitable[Outcome]]] = {
    "all_reduce": lambda collective, number, tag: collective.all_reduce(vector(number), 1.0 + number, tag=tag),
    "gather": lambda collective, number, tag: collective.gather(block(number), tag=tag),
    "broadcast": lambda collective, number, tag: collective.broadcast(STATE if number % 2 == 0 else None, tag=tag),
    "barrier": lambda collective, number, tag: collective.barrier(tag=tag),
    "exchange": lambda collective, number, tag: collective.exchange(vector(number), tag=tag),
}


class Calls:
    """What all peers of a swarm call under their tags, and get."""

    def __init__(self, tags: dict[str, str]) -> None:
        self.tags = tags
        """The operation of each tag."""
        self.outcomes: list[tuple[object, str, Outcome]] = []  # who got it, and under which tag
        self.plans: dict[bytes, Plan] = {}
        self.accepted: dict[bytes, set[object]] = {}
        self.failures = 0

    async def one(self, peer, tag: str) -> Outcome | None:
        """A peer takes part once; None if nothing came of it."""
        try:
            with trio.fail_after(PATIENCE):
                outcome = await CALLS[self.tags[tag]](peer.collective, peer.number, tag)
        except ShoalError:
            self.failures += 1
            await trio.sleep(1)
            return None
        self.outcomes.append((peer, tag, outcome))
        return outcome

    def observe(self, peer) -> None:
        """Remembers which plans this peer accepts."""
        channels = peer.collective._channels
        opened = channels._open

        async def observed(*arguments):
            channel = await opened(*arguments)
            rounds, begin = channel.rounds, channel.rounds._begin

            def begun(plan, work):
                self.plans[plan.id] = plan
                self.accepted.setdefault(plan.id, set()).add(peer)
                return begin(plan, work)

            rounds._begin = begun
            return channel

        channels._open = observed

    def check(self, numbers) -> None:
        """The invariants. `numbers` are the peers' by their ids."""
        contents: dict[bytes, object] = {}
        rounds: dict[tuple[str, int], dict[bytes, tuple[Plan, set[object]]]] = {}
        for peer, tag, outcome in self.outcomes:
            plan = outcome.plan
            content = _content(outcome)
            assert contents.setdefault(plan.id, content) == content, "two results of one plan"
            plans = rounds.setdefault((tag, plan.revision), {})
            plans.setdefault(plan.id, (plan, set()))[1].add(peer)
            self._check_values(peer, outcome, numbers)
        for plans in rounds.values():
            for one, holders in plans.values():
                for other, _ in plans.values():
                    if one.ballot < other.ballot and not self._forgotten(one, other):
                        assert not holders & self.accepted[other.id], "a later plan includes who has an earlier result"

    def _forgotten(self, one: Plan, other: Plan) -> bool:
        """Whether somebody has died that had accepted the later plan, come back, and accepted the earlier one.

        Nobody has promised anything any more then: a peer that comes back begins its operations anew.
        """
        return any(
            before is not after and before.id == after.id
            for after in self.accepted[one.id]
            for before in self.accepted[other.id]
        )

    def _check_values(self, peer, outcome: Outcome, numbers) -> None:
        match outcome:
            case Reduced():
                inputs = {member: vector(number) for member, number in numbers.items()}
                assert bits(outcome.mean) == bits(reference(outcome.plan, inputs, self.plans))
                assert all(
                    weight == 1.0 + numbers[member]
                    for part in outcome.plan.parts
                    for member, weight in zip(part.members, part.weights, strict=True)
                )
            case Gathered():
                assert set(outcome.blocks) == set(outcome.members)
                assert all(bytes(data) == block(numbers[member]) for member, data in outcome.blocks.items())
            case Broadcasted():
                assert bytes(outcome.data) == STATE
                assert numbers[outcome.source] % 2 == 0
            case Exchanged(values=torch.Tensor()):
                assert torch.equal(outcome.values, vector(numbers[outcome.partner]))
            case Exchanged():
                assert outcome.problem or outcome.partner is None


def _content(outcome: Outcome) -> object:
    """What has to be the same at all members."""
    match outcome:
        case Reduced():
            return bits(outcome.mean)
        case Gathered():
            joined = b"".join(bytes(member) + bytes(data) for member, data in outcome.blocks.items())
            return hashlib.sha256(joined).digest()
        case Broadcasted():
            return outcome.source
        case _:
            return None
