"""What one member promises about one round, without any input or output.

Rules of a member:
1. It accepts a plan only if the plan's ballot is higher than every ballot it has accepted or renounced before.
2. By accepting a plan, or by renouncing, it gives up all lower ballots for good: it never completes them afterwards.
3. Once it has completed a plan it accepts no other, and says so.
4. It neither accepts nor renounces what is more than `MAX_JUMP` attempts ahead of that, lest a liar use up the numbers.

Why that is enough. A member can complete ballot b only with the data of every member of b, in whose sums all of them
take part (a plan always leaves something to be summed, see `protocol.salvage`), so all of them have accepted b. A later
plan b' > b starts at a member when it accepts b'. Let b' be complete at some peer, so that all members of b' accepted
b'. If a member of b' had completed b, it would have had to do so before accepting b' (rule 2), and then it would not
have accepted b' (rule 3). So of those that take part in b', none holds a result of b: only peers that the later plan
*excludes* can hold a different result of the round. They learn that from the first message about the next round, whose
base digest differs from theirs, and fetch the state.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from protocol.codecs import CodecName
from protocol.identity import PeerId
from protocol.kinds import NO_TERMS, Kind, Terms
from protocol.plan import MAX_BLOCK, MAX_JUMP, MAX_WEIGHT, NO_BALLOT, Ballot, Operation, Plan
from protocol.salvage import Holding, missing


@attrs.frozen
class Refusal:
    """Why a plan was not accepted; `ballot` is the highest one that this member knows."""

    reason: str
    ballot: Ballot


@attrs.frozen(kw_only=True)
class Offer:
    """What this member brings to a round; a plan must fit it."""

    run: bytes
    tag: str
    revision: int
    base: bytes
    weight: float
    length: int
    codec: CodecName = "fp32"
    operation: Operation = "reduce"
    signature: bytes | None = None
    """Ours, over the weight; None if that is 0."""
    terms: Terms = NO_TERMS
    late: bool = False
    """We have missed the round before."""
    max_weight: float = MAX_WEIGHT
    """The most that anybody's values may count."""
    max_block: int = MAX_BLOCK
    """The most bytes that anybody's block may have in a gather."""

    @property
    def kind(self) -> Kind:
        """What others have to bring as well."""
        return Kind.of(self.operation, self.length, self.codec, self.terms)

    def misfit(self, plan: Plan) -> str | None:
        """Why the plan, or the result of a plan, is not for what we bring; None if it is."""
        if plan.operation != self.operation:
            return f"the plan is for another operation: {plan.operation}"
        if self.operation != "gather" and plan.length != self.length:
            return "the plan is for vectors of another length"
        if max(plan.sizes, default=0) > self.max_block:
            return "the plan gives somebody a block beyond the limit"
        if plan.heaviest > self.max_weight:
            return "the plan gives somebody a weight beyond the limit"
        return None


def unusable(plan: Plan, offer: Offer | None, length: int | None, max_weight: float) -> str | None:
    """Why the result of a plan is none that we can use; None if it is.

    Args:
        plan: The plan.
        offer: What we have brought last, which it has to fit, if the length is not known.
        length: That of the mean; None if it is not known.
        max_weight: The most that anybody's values may count.
    """
    if offer is not None and length is None:
        return offer.misfit(plan)
    if plan.operation != "reduce" or plan.heaviest > max_weight:
        return "it is of another kind, or somebody has a weight beyond the limit"
    return "it is of another length" if length not in (None, plan.length) else None


class Acceptor:
    """One member's ballots for one round."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self.promised: Ballot = NO_BALLOT
        """Nothing up to this ballot is accepted any more."""
        self.plan: Plan | None = None
        """The plan that is being carried out, or has been."""
        self.completed = False

    def accept(
        self, plan: Plan, offer: Offer, coordinator: PeerId, holdings: Collection[Holding] = ()
    ) -> Refusal | None:
        """Accepts a plan (None), which aborts the one before, or says why not.

        Args:
            plan: The plan.
            offer: What we said we would bring.
            coordinator: Who sent it.
            holdings: What we have of earlier attempts.
        """
        problem = self._problem(plan, offer, coordinator, holdings)
        if problem is not None:
            return Refusal(problem, self.promised)
        self.promised = plan.ballot
        self.plan = plan
        return None

    def renounce(self, ballot: Ballot) -> None:
        """Gives up the plan, if its ballot is none above this one, and all up to this one, if it is not too far ahead.

        Nothing happens if the round is complete here.
        """
        if self.completed:
            return
        if not self._ahead(ballot):
            self.promised = max(self.promised, ballot)
        if self.plan is not None and self.plan.ballot <= ballot:
            self.plan = None

    def complete(self, plan: Plan) -> bool:
        """Tries to complete a plan; False if it has been given up in the meantime."""
        if self.completed or self.plan != plan:
            return False
        self.completed = True
        return True

    def adopt(self, plan: Plan) -> None:
        """The complete result of a plan was fetched from another peer, after our own attempts had been given up."""
        self.plan, self.completed = plan, True

    def _ahead(self, ballot: Ballot) -> bool:
        return ballot.attempt - self.promised.attempt > MAX_JUMP

    def _problem(self, plan: Plan, offer: Offer, coordinator: PeerId, holdings: Collection[Holding]) -> str | None:
        if self.completed:
            return "the round is complete here"
        if (plan.run, plan.tag, plan.revision) != (offer.run, offer.tag, offer.revision):
            return "the plan is for another round"
        if plan.coordinator != coordinator:
            return "the plan is another coordinator's"
        if plan.ballot <= self.promised:
            return "a higher ballot has been accepted"
        if self._ahead(plan.ballot):
            return "nobody can have made so many attempts"
        if plan.base != offer.base:
            return "the plan builds on another state"
        if plan.codec != offer.codec:
            return "the plan is for another codec"
        if (misfit := offer.misfit(plan)) is not None:
            return misfit
        if self._peer not in plan.members:
            return "the plan does not include this peer"
        place = plan.members.index(self._peer)
        if plan.weights[place] != offer.weight:
            return "the plan gives this peer another weight"
        if plan.operation == "gather" and plan.sizes[place] != offer.length:
            return "the plan gives this peer's block another size"
        if missing(plan, place, holdings):
            return "the plan relies on parts that this peer does not hold"
        return None
