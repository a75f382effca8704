import random

import attrs
import pytest
import trio

from dht import DHT, members_key
from peer.chain import Tip
from peer.membership import SETTLE, Membership
from protocol.identity import Identity
from protocol.transport import Address

RUN = b"r" * 32


@attrs.define
class Site:
    endpoint: object
    dht: DHT
    membership: Membership
    news: list


@pytest.fixture
async def site(nursery):
    """`await site(mesh, n, …)` runs the membership of the n-th endpoint of a mesh."""

    async def make(mesh, number, **options):
        endpoint = mesh.endpoints[number]
        identity = Identity.from_seed(bytes([number + 1]) * 32)
        dht = DHT(endpoint, identity, rng=random.Random(number))
        await nursery.start(dht.run)
        news = []
        membership = Membership(
            endpoint,
            dht,
            RUN,
            rng=random.Random(number),
            seen=lambda peer: news.append(("seen", peer)),
            lost=lambda peer, reason: news.append(("lost", peer)),
            **options,
        )
        await nursery.start(membership.run)
        return Site(endpoint, dht, membership, news)

    return make


async def until(membership, condition):
    while not condition():
        await membership.changes()


async def test_members_of_members_become_members(autojump_clock, mesh, site):
    swarm = await mesh(4)
    sites = [await site(swarm, number) for number in range(4)]
    with trio.fail_after(30):
        for each in sites[1:]:
            each.membership.meet([sites[0].endpoint.peer_id])
        for each in sites:
            await until(each.membership, lambda each=each: len(each.membership.others) == 3)
    for each in sites:
        everyone_else = {s.endpoint.peer_id for s in sites if s is not each}
        assert {member.peer for member in each.membership.others} == everyone_else
        assert {peer for kind, peer in each.news if kind == "seen"} == everyone_else


async def test_status_reaches_everybody_and_decides_who_makes_the_next_round(autojump_clock, mesh, site):
    swarm = await mesh(3)
    a, b, c = [await site(swarm, number) for number in range(3)]
    everyone = sorted(endpoint.peer_id for endpoint in swarm.endpoints)
    tip = Tip(3, 10.0, b"d" * 32)
    with trio.fail_after(30):
        b.membership.meet([a.endpoint.peer_id])
        c.membership.meet([a.endpoint.peer_id])
        for each in (a, b, c):
            await each.membership.announce(tip, active=True)
        await until(a.membership, lambda: a.membership.partners() == everyone)
        await b.membership.announce(Tip(3, 10.0, b"e" * 32), active=True)  # another branch
        await until(a.membership, lambda: a.membership.partners() == sorted([a.endpoint.peer_id, c.endpoint.peer_id]))
        await b.membership.announce(Tip(4, 12.0, b"e" * 32), active=True)  # about to follow, or to lead
        await until(a.membership, lambda: a.membership.partners() == everyone)
        await b.membership.announce(Tip(4, 12.0, b"e" * 32), active=False)
        await until(a.membership, lambda: b.endpoint.peer_id not in a.membership.partners())


async def test_a_better_tip_is_one_to_fetch(autojump_clock, mesh, site):
    swarm = await mesh(2)
    a, b = [await site(swarm, number) for number in range(2)]
    with trio.fail_after(30):
        await a.membership.announce(Tip(3, 10.0, b"d" * 32), active=True)
        a.membership.meet([b.endpoint.peer_id])
        await until(a.membership, lambda: a.membership.others)
        for tip, better in [
            (Tip(3, 10.0, b"d" * 32), False),  # ours
            (Tip(4, 12.0, b"e" * 32), False),  # the round that we are about to finish
            (Tip(5, 14.0, b"f" * 32), False),  # the results of two rounds will do
            (Tip(6, 16.0, b"f" * 32), True),  # we fell behind
            (Tip(3, 11.0, b"g" * 32), True),  # a heavier branch
            (Tip(2, 11.0, b"h" * 32), True),
            (Tip(3, 10.0, b"c" * 32), True),  # as heavy, lower digest
            (Tip(3, 9.0, b"a" * 32), False),
            (Tip(9, 9.0, b"b" * 32), False),  # longer, but lighter
        ]:
            await b.membership.announce(tip, active=True)
            await until(a.membership, lambda tip=tip: a.membership.others[0].tip == tip)
            assert (a.membership.better() is not None) == better, tip
        await b.membership.announce(Tip(4, 12.0, b"e" * 32), active=True)
        await until(a.membership, lambda: a.membership.others[0].tip.revision == 4)
        assert a.membership.better(branched=b.endpoint.peer_id) is not None


async def test_those_who_are_not_on_the_list_are_refused(autojump_clock, mesh, site):
    swarm = await mesh(3)
    listed = frozenset(endpoint.peer_id for endpoint in swarm.endpoints[:2])
    a, b = [await site(swarm, number, allowed=listed) for number in range(2)]
    stranger = await site(swarm, 2)
    with trio.fail_after(60):
        stranger.membership.meet([a.endpoint.peer_id])
        b.membership.meet([a.endpoint.peer_id])
        await until(b.membership, lambda: b.membership.others)
        await stranger.membership.settled()
    assert stranger.membership.others == ()
    assert [member.peer for member in a.membership.others] == [b.endpoint.peer_id]


async def test_members_can_be_kept_out_from_now_on(autojump_clock, mesh, site):
    swarm = await mesh(3)
    out, rejected = {}, []
    a = await site(swarm, 0, refuses=out.get)
    b = await site(swarm, 1)
    c = await site(swarm, 2, rejected=lambda peer, error: rejected.append((peer, str(error))))
    with trio.fail_after(60):
        for each in (b, c):
            each.membership.meet([a.endpoint.peer_id])
        await until(a.membership, lambda: len(a.membership.others) == 2)
        out[c.endpoint.peer_id] = "out with you"
        a.endpoint.disconnect(c.endpoint.peer_id, "for a test")
        await trio.sleep(20)  # simulated; it has tried to come back
        assert [member.peer for member in a.membership.others] == [b.endpoint.peer_id]
        assert not a.membership.knows(c.endpoint.peer_id)
    assert set(rejected) == {(a.endpoint.peer_id, f"{a.endpoint.peer_id.short} refused: out with you")}


async def test_a_lost_member_is_told_of_and_greeted_again(autojump_clock, mesh, site):
    swarm = await mesh(2)
    a, b = [await site(swarm, number) for number in range(2)]
    with trio.fail_after(60):
        a.membership.meet([b.endpoint.peer_id])
        await until(a.membership, lambda: a.membership.others)
        a.endpoint.disconnect(b.endpoint.peer_id, "for a test")
        await until(a.membership, lambda: not a.membership.others)
        assert a.membership.arriving() == [b.endpoint.peer_id]  # even if it had not been here for long
        await until(a.membership, lambda: a.membership.others)
        assert a.membership.arriving() == []
    assert [kind for kind, _ in a.news] == ["seen", "lost", "seen"]


async def test_settled_does_not_wait_for_those_that_only_the_dht_remembers(autojump_clock, mesh, site):
    swarm = await mesh(3)
    a, dead = [await site(swarm, number) for number in range(2)]
    with trio.fail_after(300):
        await dead.dht.bootstrap([(None, Address("h0", 4000))])
        await trio.sleep(60)  # simulated, so that the record has been published again
        swarm.network.partition(["h1"], ["h0", "h2"])
        newcomer = await site(swarm, 2)
        newcomer.endpoint.learn(dead.endpoint.peer_id, Address("h1", 4000))  # dialling it takes long, and fails
        await newcomer.dht.bootstrap([(a.endpoint.peer_id, Address("h0", 4000))])
        newcomer.membership.meet([a.endpoint.peer_id])
        await until(newcomer.membership, lambda: newcomer.membership.others)
        await trio.sleep(15)  # at least one search for members, in simulated time
        assert dead.endpoint.peer_id in await newcomer.dht.get(members_key(RUN))
        before = trio.current_time()
        await newcomer.membership.settled()
        assert trio.current_time() == before
        # One that was here a moment ago is waited for, but not for long.
        swarm.network.partition(["h0"], ["h2"])
        await until(newcomer.membership, lambda: not newcomer.membership.others)
        before = trio.current_time()
        await newcomer.membership.settled()
        assert 0 < trio.current_time() - before <= SETTLE


async def test_who_claims_what_it_does_not_have_is_passed_over_ever_longer(autojump_clock, mesh, site):
    swarm = await mesh(2)
    a, b = [await site(swarm, number) for number in range(2)]
    peer = b.endpoint.peer_id
    with trio.fail_after(60):
        await a.membership.announce(Tip(3, 10.0, b"d" * 32), active=True)
        await b.membership.announce(Tip(3, 11.0, b"e" * 32), active=True)
        a.membership.meet([peer])
        await until(a.membership, lambda: a.membership.others)
        for pause in (2.0, 4.0):
            assert a.membership.better().peer == peer
            a.membership.doubt(peer, 2.0)
            await trio.sleep(pause - 0.5)
            assert a.membership.better() is None
            assert a.membership.holders(Tip(3, 11.0, b"e" * 32)) == []
            await trio.sleep(1)
        await b.membership.announce(Tip(3, 10.0, b"d" * 32), active=True)
        await until(a.membership, lambda: peer in a.membership.partners())
        a.membership.doubt(peer)  # for the third time
        assert peer not in a.membership.partners()
        a.membership.trust(peer)
        assert peer in a.membership.partners()


async def test_connections_that_break_at_once_are_made_anew_at_leisure(autojump_clock, mesh, site):
    """Two processes with one identity push each other out; it must not keep everybody busy."""
    swarm = await mesh(2)
    a, b = [await site(swarm, number) for number in range(2)]
    with trio.fail_after(60):
        a.membership.meet([b.endpoint.peer_id])
        for _ in range(5):
            await until(a.membership, lambda: a.membership.others)
            a.endpoint.disconnect(b.endpoint.peer_id, "for a test")
            await until(a.membership, lambda: not a.membership.others)
    assert trio.current_time() > 3  # of four times, only the first is made anew at once


async def test_impossible_tips_are_refused(autojump_clock, mesh, site):
    swarm = await mesh(2)
    a = await site(swarm, 0, plausible=lambda tip: tip.weight < 5)
    b = await site(swarm, 1)
    with trio.fail_after(60):
        await b.membership.announce(Tip(3, 10.0, b"d" * 32), active=True)
        b.membership.meet([a.endpoint.peer_id])
        await b.membership.settled()
    assert a.membership.others == b.membership.others == ()
    assert not a.membership.knows(b.endpoint.peer_id)


async def test_a_run_that_is_full_refuses_others(autojump_clock, mesh, site):
    swarm = await mesh(3)
    a, b, late = [await site(swarm, number, limit=1) for number in range(3)]
    with trio.fail_after(60):
        b.membership.meet([a.endpoint.peer_id])
        await until(b.membership, lambda: b.membership.others)
        late.membership.meet([a.endpoint.peer_id])
        await late.membership.settled()
    assert late.membership.refusal.code == "full"
    assert late.membership.others == ()
    assert [member.peer for member in a.membership.others] == [b.endpoint.peer_id]
