"""The messages of rounds. See section 6 of `docs/protocol.md`.

A member opens a stream with `Ready` to the peer that it takes for the coordinator of a round, and keeps it open until
it holds the result: everything the two have to say about the round goes over that stream, in order, and its end tells
either side that the other is out. `RoundOpen` is a plain request; `RingData` and `FetchResult` begin bulk streams.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol.codecs import CodecName
from protocol.identity import PeerId
from protocol.kinds import NO_TERMS, Brought, Kind, Terms
from protocol.plan import Ballot, Hash, Length, Operation, Plan, Rank, Revision, Tag, Weight
from protocol.rates import UNKNOWN, Rates
from protocol.salvage import MAX_HOLDINGS, Holding
from protocol.transport import Address
from protocol.weights import WeightSignature
from protocol.wire import message

MAX_TRIED = 32
MAX_ADDRESSES = 8
MAX_MISFITS = 64

Holdings = Annotated[tuple[Holding, ...], Meta(max_length=MAX_HOLDINGS)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Reason = Annotated[str, Meta(max_length=200)]


@message("round.ready")
class Ready:
    """A member is ready for a round. Opens its stream to the coordinator."""

    run: Hash
    tag: Tag
    revision: Revision
    base: Hash
    weight: Weight
    length: Length
    """Elements of its vector; of a gather, bytes of its block."""
    ballot: Ballot
    """The highest ballot that the member has accepted or renounced in this round."""
    tried: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_TRIED)]
    """Better placed coordinators that the member cannot reach: it is not to be sent to them."""
    holdings: Holdings = ()
    """What the member has of attempts under coordinators that were lost."""
    operation: Operation = "reduce"
    signature: WeightSignature | None = None
    """Over the weight; none if that is 0."""
    rates: Rates = UNKNOWN
    """What the member knows about its lines."""
    codec: CodecName = "fp32"
    terms: Terms = NO_TERMS
    late: bool = False
    """The member has missed the round before."""


@message("round.queued")
class Queued:
    """The coordinator has noted the member. Repeated, so that silence means that the coordinator is stuck."""

    load: Length
    """Of what is going on there, or is to come, as far as is known: see `Plan.load`. It may take as long."""


@message("round.redirect")
class Redirect:
    """Another peer coordinates this round. Ends the stream."""

    coordinator: PeerId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]


@message("round.ahead")
class Ahead:
    """The round is finished; `holder` has its result. Ends the stream. Also an answer to `RoundOpen`."""

    revision: Revision
    """The newest revision that is finished there, at least the one in question."""
    holder: PeerId


@message("round.forked")
class Forked:
    """The coordinator's state at the revision before the round is another one. Ends the stream."""

    base: Hash


@message("round.misfit")
class Misfits:
    """What the member brings does not fit what others bring, so it is left out. Ends the stream."""

    brought: Annotated[tuple[Brought, ...], Meta(max_length=MAX_MISFITS)]
    """Some of those others; those whose operation it is first, if it is anybody's."""


@message("round.propose")
class Propose:
    """A plan for the member to accept."""

    plan: Plan


@message("round.accepted")
class Accepted:
    """The member has accepted the plan with this ballot and begun."""

    ballot: Ballot


@message("round.rejected")
class Rejected:
    """The member has not accepted the plan with this ballot."""

    ballot: Ballot
    promised: Ballot
    reason: Reason


@message("round.failed")
class Failed:
    """The member cannot finish its part in the ring."""

    ballot: Ballot
    suspect: PeerId
    """The neighbour that it blames."""
    progress: Annotated[int, Meta(ge=0, le=2**40)]
    """Number of ring segments that had come in: whoever starved first has the least."""


@message("round.halt")
class Halt:
    """The attempt with this ballot has failed: the member is to stop, and to say what it has of it."""

    ballot: Ballot


@message("round.halted")
class Halted:
    """The member has stopped, and carries out no plan up to this ballot any more."""

    ballot: Ballot
    holdings: Holdings


@message("round.completed")
class Completed:
    """The member holds the complete result of the plan with this ballot. The last thing that a member says."""

    ballot: Ballot
    plan_id: Hash


@message("round.calloff")
class CallOff:
    """No plan up to this ballot is to be completed any more.

    With a holder: it has the round's complete result, to be fetched there. Without: the member is left out of the next
    attempt, and waits.
    """

    ballot: Ballot
    holder: PeerId | None


@message("round.open")
class RoundOpen:
    """The sender coordinates a round, and waits `remaining` seconds more for the receiver to become ready."""

    run: Hash
    tag: Tag
    revision: Revision
    base: Hash
    remaining: Seconds


@message("round.noted")
class Noted:
    """Answer to `RoundOpen`: the receiver may come."""


@message("round.late")
class Late:
    """Answer to `RoundOpen`: the receiver still lacks the state before the round, and comes when it has it."""


@message("round.led")
class Led:
    """Answer to `RoundOpen`: the receiver takes part in the round under another coordinator, perhaps itself."""

    coordinator: PeerId
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]


@message("round.compare")
class Compare:
    """Asks a peer what it brings to an operation; the sender brings `kind`."""

    run: Hash
    tag: Tag
    revision: Revision
    kind: Kind


@message("round.brings")
class Brings:
    """Answer to `Compare`."""

    kind: Kind | None
    """None: nothing so far."""
    late: bool


@message("ring.data")
class RingData:
    """Begins the stream of one member's data to its right neighbour, or to its partner in an exchange.

    What follows is the segments of the schedule, blocks that are gathered, each after a `GatherBlock`, or a vector.
    """

    run: Hash
    tag: Tag
    plan_id: Hash


@message("ring.waiting")
class Waiting:
    """Asks a member from which nothing comes whether it is waiting itself."""

    run: Hash
    tag: Tag
    plan_id: Hash


@message("ring.waits")
class Waits:
    """Answer to `Waiting`."""

    silent: Seconds | None
    """For how long nothing has come in here, if that is why nothing is sent; None: that is not why."""


@message("gather.block")
class GatherBlock:
    """The next block on a stream of a gather; the plan says how many bytes follow."""

    place: Rank
    """Whose it is: the place in the plan's members."""


@message("round.fetch")
class FetchResult:
    """Asks for the kept result of a round."""

    run: Hash
    tag: Tag
    revision: Revision


@message("round.result")
class Result:
    """Answer to `FetchResult`; the result follows as `plan.nbytes` bytes."""

    plan: Plan
