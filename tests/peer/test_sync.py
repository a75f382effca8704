import attrs
import pytest
import torch
import trio

from optim import OuterState
from peer.finding import fetch_manifest
from peer.history import KEPT_BYTES, Rules
from peer.partial import Partial
from peer.state import CommittedState
from peer.sync import (
    IN_USE,
    KEPT_STATES,
    DescribeRequest,
    Description,
    Donor,
    HeaderClaim,
    HistoryReply,
    HistoryRequest,
    RangeReply,
    RangeRequest,
    SyncFailed,
    fetch_history,
    fetch_state,
)
from protocol import merkle, wire
from protocol.errors import ProtocolError, RequestRefused, RequestTimeout, ShoalError
from protocol.identity import Identity
from protocol.weights import SIZE, SignedWeight, sign_weight

RUN = b"r" * 32
SIGNED = [SignedWeight(3.0, bytes(SIZE))]
ELEMENTS = 700_000  # with momentum 5.6 MB: six ranges, some of them across tensors
SHAPE = {"elements": ELEMENTS, "buffers": ["momentum"]}


@pytest.fixture(scope="module")
def state():
    generator = torch.Generator().manual_seed(3)
    outer = OuterState(
        torch.randn(ELEMENTS, generator=generator), {"momentum": torch.randn(ELEMENTS, generator=generator)}
    )
    return CommittedState.genesis(RUN, outer).commit(outer, plan=b"p" * 32, contributions=SIGNED)


def same(one, two):
    return (
        one.header == two.header
        and one.leaves == two.leaves
        and torch.equal(one.outer.parameters, two.outer.parameters)
        and torch.equal(one.outer.buffers["momentum"], two.outer.buffers["momentum"])
    )


def donate(endpoint, state, run=RUN):
    donor = Donor(endpoint, run, "the manifest")
    if state is not None:
        donor.offer(state)
    return donor


async def test_a_state_comes_from_several_donors_at_once(autojump_clock, mesh, state):
    swarm = await mesh(4)
    newcomer, *donors = swarm.endpoints
    for endpoint in donors:
        donate(endpoint, state)
    sizes = []
    found = await fetch_state(
        newcomer,
        RUN,
        state.history,
        [d.peer_id for d in donors],
        elements=ELEMENTS,
        buffers=["momentum"],
        progress=sizes.append,
    )
    assert same(found, state)
    assert sum(sizes) == 8 * ELEMENTS
    assert all(donor.bytes_sent > merkle.LEAF for donor in donors)


async def test_a_donor_that_dies_is_replaced_by_the_others(autojump_clock, mesh, state):
    swarm = await mesh(3)
    newcomer, *donors = swarm.endpoints
    for endpoint in donors:
        donate(endpoint, state)

    def kill_one(received):
        if not donors_killed:
            donors_killed.append(True)
            swarm.network.kill("h1")

    donors_killed = []
    found = await fetch_state(
        newcomer,
        RUN,
        state.history,
        [d.peer_id for d in donors],
        elements=ELEMENTS,
        buffers=["momentum"],
        progress=kill_one,
    )
    assert same(found, state)


async def test_forged_ranges_are_not_taken(autojump_clock, mesh, state):
    swarm = await mesh(3)
    newcomer, honest, liar = swarm.endpoints
    donate(honest, state)
    forged = attrs.evolve(state.outer, parameters=state.outer.parameters + 1)
    donate(liar, CommittedState(state.history, forged, state.leaves))
    found = await fetch_state(newcomer, RUN, state.history, [liar.peer_id, honest.peer_id], **SHAPE)
    assert same(found, state)
    with pytest.raises(SyncFailed, match="do not have its hash"):
        await fetch_state(newcomer, RUN, state.history, [liar.peer_id], **SHAPE)


@pytest.mark.parametrize("lie", ["leaves", "size", "buffers"])
async def test_forged_descriptions_are_not_taken(autojump_clock, mesh, state, lie):
    swarm = await mesh(2)
    newcomer, liar = swarm.endpoints
    claimed = state
    if lie == "leaves":
        claimed = attrs.evolve(state, leaves=(bytes(32), *state.leaves[1:]))
    elif lie == "buffers":  # the same bytes under another name
        outer = OuterState(state.outer.parameters, {"velocity": state.outer.buffers["momentum"]})
        claimed = attrs.evolve(state, outer=outer)
    donate(liar, claimed)
    elements = 5 if lie == "size" else ELEMENTS
    with pytest.raises(SyncFailed):
        await fetch_state(newcomer, RUN, state.history, [liar.peer_id], **{**SHAPE, "elements": elements})


async def test_nobody_has_it(autojump_clock, mesh, state):
    swarm = await mesh(3)
    newcomer, *donors = swarm.endpoints
    donate(donors[0], None)
    donate(donors[1], state, run=b"x" * 32)
    with pytest.raises(SyncFailed, match=r"not kept here.*another run"):
        await fetch_state(newcomer, RUN, state.history, [d.peer_id for d in donors], **SHAPE)
    with pytest.raises(SyncFailed, match="nobody is known"):
        await fetch_state(newcomer, RUN, state.history, [], **SHAPE)


async def test_a_fetch_survives_the_donors_next_commit(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donor = donate(endpoint, state)

    def commit(received):
        if not committed:
            committed.append(state.commit(state.outer, plan=bytes(32), contributions=SIGNED))
            donor.offer(committed[0])

    committed = []
    found = await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE, progress=commit)
    assert same(found, state)
    assert committed


async def test_a_range_beyond_the_end_is_empty(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donate(endpoint, state)
    async with newcomer.open(endpoint.peer_id, RangeRequest(RUN, state.tip.digest, 2**40)) as stream:
        assert (await stream.receive(RangeReply)).length == 0


async def test_the_manifest_comes_from_whoever_has_it(autojump_clock, mesh):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donate(endpoint, None)
    with trio.fail_after(5):
        assert await fetch_manifest(newcomer, endpoint.peer_id, RUN) == "the manifest"
        with pytest.raises(RequestRefused, match="another run"):
            await fetch_manifest(newcomer, endpoint.peer_id, b"x" * 32)


async def test_a_donor_keeps_the_state_before_however_often_it_offers_the_last(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donor = donate(endpoint, state)
    for _ in range(3):
        donor.offer(state.commit(state.outer, plan=bytes(32), contributions=SIGNED))
    assert same(await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE), state)


async def test_a_donor_that_is_slow_does_not_hold_up_the_others(autojump_clock, mesh, state):
    swarm = await mesh(3)
    newcomer, quick, slow = swarm.endpoints
    donate(quick, state)
    donate(slow, state)
    swarm.network.set_link("h0", "h2", bandwidth=30_000)  # half a minute for a range
    begun = trio.current_time()
    donors = [quick.peer_id, slow.peer_id]
    assert same(await fetch_state(newcomer, RUN, state.history, donors, **SHAPE), state)
    assert trio.current_time() - begun < 10


async def test_the_only_donor_may_be_slow(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, slow = swarm.endpoints
    donate(slow, state)
    swarm.network.set_link("h0", "h1", bandwidth=5000)  # minutes for a range
    assert same(await fetch_state(newcomer, RUN, state.history, [slow.peer_id], **SHAPE), state)
    assert trio.current_time() > 8 * ELEMENTS / 5000


class Stuck(Donor):
    """Answers pings and all questions, but the bytes of a range do not come."""

    async def _on_range(self, request, stream):
        await stream.send(RangeReply(merkle.LEAF))
        await trio.sleep_forever()


async def test_a_donor_whose_bytes_do_not_come_is_given_up(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    Stuck(endpoint, RUN, "the manifest").offer(state)
    begun = trio.current_time()
    with pytest.raises(SyncFailed, match=f"{endpoint.peer_id.short} sent hardly anything for 60 s"):
        await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE)
    assert trio.current_time() - begun < 70
    assert newcomer.is_connected(endpoint.peer_id)


@pytest.mark.parametrize("what", ["description", "range"])
async def test_a_donor_that_only_dribbles_is_given_up(autojump_clock, mesh, state, what):
    """Quick enough not to count as stalled. Others are asked meanwhile, or next, and what has come is kept."""
    swarm = await mesh(3)
    newcomer, dribbling, honest = swarm.endpoints
    large = 2**36

    async def dribble(request, stream):
        await stream.send(RangeReply(merkle.LEAF) if what == "range" else Description(("momentum",), large))
        while True:
            await stream.send_bytes(bytes(2048))
            await trio.sleep(1)

    donate(dribbling, state)
    donate(honest, state)
    kind = RangeRequest if what == "range" else DescribeRequest
    del dribbling._handlers._handlers[wire.name_of(kind)]
    dribbling.handle(kind, dribble)
    elements = ELEMENTS if what == "range" else large
    begun = trio.current_time()
    with pytest.raises(SyncFailed, match=f"{dribbling.peer_id.short} did not send"):
        await fetch_state(newcomer, RUN, state.history, [dribbling.peer_id], **{**SHAPE, "elements": elements})
    assert trio.current_time() - begun < 300
    if what == "range":
        donors = [dribbling.peer_id, honest.peer_id]
        assert same(await fetch_state(newcomer, RUN, state.history, donors, **SHAPE), state)


async def test_states_are_for_those_who_are_admitted(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    Donor(endpoint, RUN, "the manifest", admits=lambda peer: False).offer(state)
    with pytest.raises(SyncFailed, match="say hello first"):
        await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE)


async def test_a_state_that_is_not_finite_is_of_no_use(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    sick = state.commit(
        attrs.evolve(state.outer, parameters=state.outer.parameters * float("nan")),
        plan=bytes(32),
        contributions=SIGNED,
    )
    donate(endpoint, sick)
    with pytest.raises(SyncFailed, match="not finite"):
        await fetch_state(newcomer, RUN, sick.history, [endpoint.peer_id], **SHAPE)


async def test_what_was_received_is_not_fetched_again(autojump_clock, mesh, state):
    swarm = await mesh(3)
    newcomer, first, second = swarm.endpoints
    donate(first, state)
    earlier, before, after = Partial(), [], []

    def lose_the_donor(received):
        before.append(received)
        if len(before) == 3:
            swarm.network.kill("h1")

    with pytest.raises(SyncFailed):
        donors = [first.peer_id]
        await fetch_state(newcomer, RUN, state.history, donors, **SHAPE, progress=lose_the_donor, earlier=earlier)
    # Of the next revision, all is the same but the first and the last range.
    parameters, momentum = state.outer.parameters.clone(), state.outer.buffers["momentum"].clone()
    parameters[0], momentum[-1] = 7, 7
    newer = state.commit(OuterState(parameters, {"momentum": momentum}), plan=bytes(32), contributions=SIGNED)
    donate(second, newer)
    donors = [second.peer_id]
    found = await fetch_state(newcomer, RUN, newer.history, donors, **SHAPE, progress=after.append, earlier=earlier)
    assert same(found, newer)
    had = {number for number in range(1, 5) if number < len(before)}
    assert len(after) == len(state.leaves) - len(had)
    assert earlier.outer is None


async def test_a_state_that_is_being_fetched_outlives_many_commits(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donor = donate(endpoint, state)
    newest = [state]

    def commit(received):
        newest.append(newest[-1].commit(state.outer, plan=bytes(32), contributions=SIGNED))
        donor.offer(newest[-1])

    found = await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE, progress=commit)
    assert same(found, state)
    assert len(newest) > KEPT_STATES + 2
    assert len(donor._states) == KEPT_STATES + 1
    await trio.sleep(IN_USE)
    donor.offer(newest[-1].commit(state.outer, plan=bytes(32), contributions=SIGNED))
    with pytest.raises(SyncFailed, match="not kept here"):
        await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE)


async def test_nobody_can_keep_a_donor_at_an_old_state(autojump_clock, mesh, state):
    """The state that is kept beyond the last two is the newest of those that are being fetched."""
    swarm = await mesh(3)
    pinner, newcomer, endpoint = swarm.endpoints
    donor = donate(endpoint, state)
    states = [state]
    for _ in range(2):
        states.append(states[-1].commit(state.outer, plan=bytes(32), contributions=SIGNED))
        donor.offer(states[-1])
        await pinner.request(endpoint.peer_id, DescribeRequest(RUN, state.tip.digest), Description)
    wanted = states[1]

    def commit(received):
        states.append(states[-1].commit(state.outer, plan=bytes(32), contributions=SIGNED))
        donor.offer(states[-1])

    found = await fetch_state(newcomer, RUN, wanted.history, [endpoint.peer_id], **SHAPE, progress=commit)
    assert same(found, wanted)
    assert len(donor._states) == KEPT_STATES + 1
    assert not donor._serving  # nothing is left of what has been served


async def test_those_that_have_replaced_the_state_are_told_apart(autojump_clock, mesh, state):
    """They may be honest; those that break off have taken our time."""
    swarm = await mesh(3)
    newcomer, honest, broken = swarm.endpoints
    donate(honest, state)
    donate(broken, state)
    later = state.commit(state.outer, plan=bytes(32), contributions=SIGNED)
    with pytest.raises(SyncFailed) as failed:
        await fetch_state(newcomer, RUN, later.history, [honest.peer_id, broken.peer_id], **SHAPE)
    assert failed.value.gone == {honest.peer_id, broken.peer_id}
    swarm.network.kill("h2")
    with pytest.raises(SyncFailed) as failed:
        await fetch_state(newcomer, RUN, later.history, [honest.peer_id, broken.peer_id], **SHAPE)
    assert failed.value.gone == {honest.peer_id}


async def test_who_has_given_something_before_it_is_gone_has_taken_our_time(autojump_clock, mesh, state):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints

    class Forgetful(Donor):
        async def _on_range(self, request, stream):
            raise RequestRefused("this state is not kept here", code="gone")

    Forgetful(endpoint, RUN, "the manifest").offer(state)
    with pytest.raises(SyncFailed, match="not kept here") as failed:
        await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE)
    assert not failed.value.gone


async def test_a_long_way_is_kept_busy(autojump_clock, mesh, state, monkeypatch):
    swarm = await mesh(2)
    newcomer, endpoint = swarm.endpoints
    donate(endpoint, state)
    swarm.network.set_link("h0", "h1", latency=0.1)

    async def seconds() -> float:
        begun = trio.current_time()
        assert same(await fetch_state(newcomer, RUN, state.history, [endpoint.peer_id], **SHAPE), state)
        return trio.current_time() - begun

    several = await seconds()
    monkeypatch.setattr("peer.sync.IN_FLIGHT", 1)
    assert several < 0.85 * await seconds()


# Histories.

RULES = Rules(max_weight=10.0, max_members=4, admits=lambda peer: True)
SIGNERS = [Identity.from_seed(bytes([number]) * 32) for number in range(7, 9)]


def work_on(state, *weights, plan=b"w"):
    """The next state, to which some have contributed with these weights."""
    number, base = state.tip.revision + 1, state.tip.digest
    signed = [
        sign_weight(signer, RUN, "", number, base, weight) for signer, weight in zip(SIGNERS, weights, strict=True)
    ]
    return state.commit(state.outer, plan=plan * 32, contributions=signed)


async def compute(function):
    await trio.lowlevel.checkpoint()
    return function()


async def ask(swarm, state, ours, *, tip=None):
    """The first endpoint asks the second one for the history of a state."""
    newcomer, endpoint = swarm.endpoints
    history = None if ours is None else ours.history
    tip = tip or state.tip
    return await fetch_history(newcomer, RUN, tip, endpoint.peer_id, ours=history, rules=RULES, compute=compute)


@pytest.fixture
def founded():
    return CommittedState.genesis(RUN, OuterState(torch.ones(5), {}))


async def test_a_history_is_told_from_where_it_is_of_interest(autojump_clock, mesh, founded):
    swarm = await mesh(2)
    common = founded
    for _ in range(40):
        common = work_on(common, 1.0, 1.0)
    ours, theirs = work_on(common, 2.0, 1.0, plan=b"o"), work_on(common, 3.0, 1.0, plan=b"t")
    donate(swarm.endpoints[1], theirs)
    everything = await ask(swarm, theirs, None)
    assert everything.headers == theirs.history.headers
    before = swarm.endpoints[1].bytes_sent
    found = await ask(swarm, theirs, ours)
    assert found.headers == theirs.history.headers
    assert found.links == theirs.history.links
    assert found.common(ours.history) == common.header
    assert swarm.endpoints[1].bytes_sent - before < 2000  # and not 40 links again


async def test_a_donor_knows_how_its_last_states_came_about_and_no_others(autojump_clock, mesh, founded):
    swarm = await mesh(2)
    state = work_on(founded, 1.0, 1.0)
    donor = donate(swarm.endpoints[1], state)
    donor.offer(work_on(state, 1.0, 1.0))
    assert (await ask(swarm, state, None)).tip == state.tip
    other = work_on(founded, 2.0, 1.0)
    with pytest.raises(RequestRefused, match="not kept here"):
        await ask(swarm, other, None)


async def test_a_tip_that_weighs_more_than_its_history(autojump_clock, mesh, founded):
    swarm = await mesh(2)
    state = work_on(founded, 1.0, 1.0)
    donate(swarm.endpoints[1], state)
    with pytest.raises(ProtocolError, match="does not lead"):
        await ask(swarm, state, founded, tip=attrs.evolve(state.tip, weight=1e9))


async def test_histories_are_for_those_who_are_admitted(autojump_clock, mesh, founded):
    swarm = await mesh(2)
    Donor(swarm.endpoints[1], RUN, "the manifest", admits=lambda peer: False).offer(founded)
    with pytest.raises(RequestRefused, match="say hello first"):
        await ask(swarm, founded, None)


@pytest.mark.parametrize("length", [3, KEPT_BYTES])
async def test_a_history_that_does_not_come_or_is_nonsense(autojump_clock, mesh, founded, length):
    swarm = await mesh(2)

    async def lie(request, stream):
        await stream.send(HistoryReply(HeaderClaim.of(founded.header), length))
        await stream.send_bytes(bytes(3))
        await stream.finish()

    swarm.endpoints[1].handle(HistoryRequest, lie)
    with pytest.raises(ShoalError):
        await ask(swarm, founded, None)


async def test_a_history_that_only_dribbles_in(autojump_clock, mesh, founded):
    """Quick enough not to count as stalled, but so that it would take hours."""
    swarm = await mesh(2)

    async def dribble(request, stream):
        await stream.send(HistoryReply(HeaderClaim.of(founded.header), KEPT_BYTES))
        while True:
            await stream.send_bytes(bytes(4096))
            await trio.sleep(1)

    swarm.endpoints[1].handle(HistoryRequest, dribble)
    with pytest.raises(RequestTimeout, match=swarm.endpoints[1].peer_id.short):
        await ask(swarm, founded, None)
    assert trio.current_time() < 300


async def test_a_long_history_may_take_its_time(autojump_clock, mesh, founded):
    swarm = await mesh(2)
    state = founded
    for _ in range(500):
        state = work_on(state, 1.0, 1.0)
    donate(swarm.endpoints[1], state)
    swarm.network.set_link("h0", "h1", bandwidth=20_000)
    assert (await ask(swarm, state, None)).headers == state.history.headers
    assert trio.current_time() > 5


async def test_one_history_at_a_time(autojump_clock, mesh, founded):
    """For each peer; what it costs to read and to send is not multiplied by who asks for it again and again."""
    swarm = await mesh(3)
    asker, endpoint, other = swarm.endpoints
    state = founded
    for _ in range(500):
        state = work_on(state, 1.0, 1.0)
    donate(endpoint, state)
    request = HistoryRequest(RUN, state.tip.digest, ())
    swarm.network.set_link("h0", "h1", bandwidth=50_000)
    async with asker.open(endpoint.peer_id, request, bulk=True) as stream:
        await stream.receive(HistoryReply)
        with pytest.raises(RequestRefused) as refused:
            await asker.request(endpoint.peer_id, request, HistoryReply)
        assert refused.value.code == "busy"
        assert await other.request(endpoint.peer_id, request, HistoryReply)
    await trio.sleep(10)
    assert await asker.request(endpoint.peer_id, request, HistoryReply)
