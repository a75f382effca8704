"""The swarm key of a private run is replaced while daemons train."""

import random
import stat

import attrs
import pytest
import trio

from peer import keys
from peer.events import EventLog
from peer.finding import ManifestReply, ManifestRequest
from peer.helper import HelperConfig, run_helper
from peer.home import Home
from peer.manifest import Manifest
from peer.membership import Hello, StatusClaim, Welcome
from peer.rotation import KeyRotation, KeyTaken, order_rotation, read_stored
from peer.settings import MembershipSettings
from protocol.endpoint import Endpoint
from protocol.errors import PeerGone, RequestRefused, WrongSwarmKey
from protocol.identity import Identity
from protocol.keyring import Keyring
from protocol.transport import Address

LIMIT = 10_000
NEW, NEWER = b"n" * 32, b"m" * 32


@pytest.fixture
def swarm(simulated_swarm, monkeypatch):
    """A private run without end, where old keys are retired sooner."""
    monkeypatch.setattr(keys, "GRACE", 100.0)
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(
        settings, run=attrs.evolve(settings.run, rounds=0), membership=MembershipSettings(policy="private")
    )
    return simulated_swarm


async def together(peers):
    """Waits for a round that these, and nobody else, contribute to, begun after now."""
    everybody, after = {str(peer.id) for peer in peers}, max(max(peer.digests(), default=0) for peer in peers)
    for peer in peers:
        await peer.until(
            lambda peer=peer: any(
                set(event["contributors"]) == everybody and event["round"] > after + 1
                for event in peer.events("round_committed")
            )
        )


async def rotated(peers, number):
    for peer in peers:
        await peer.until(lambda peer=peer: any(e["number"] == number for e in peer.events("key_rotated")))


async def retired(peers, number):
    for peer in peers:
        await peer.until(lambda peer=peer: any(e["number"] == number for e in peer.events("key_retired")))


def fresh(swarm, rotation):
    return attrs.evolve(swarm.ticket, swarm_key=rotation.key, key_number=rotation.number)


def rotate(swarm, name="a", excluded=()):
    return order_rotation(swarm.home(name), swarm.ticket.run_id, excluded)


async def expendable(swarm, name):
    """A peer that may end with an error."""
    peer = swarm.launch(name)
    await peer.until(lambda: peer.events("started"))
    return peer


async def refused(swarm, name, **options):
    """The error with which a peer ends that is not let in."""
    peer, config = swarm.prepare(name, **options)
    await swarm._run(peer, config)
    return peer.error


async def test_members_go_on_and_old_tickets_stop_working(autojump_clock, swarm):
    tickets = []
    with trio.fail_after(LIMIT):
        a = await swarm.start("a", on_ticket=tickets.append)
        b, c = [await swarm.start(name) for name in "bc"]
        members = [a, b, c]
        await together(members)
        rotation = rotate(swarm)
        await rotated(members, 1)
        assert (tickets[-1].swarm_key, tickets[-1].key_number) == (rotation.key, 1)
        await together(members)
        await a.until(lambda: {e["peer"] for e in a.events("key_taken")} == {str(b.id), str(c.id)})

        error = await refused(swarm, "late")
        assert isinstance(error, RequestRefused)
        assert "fresh ticket" in str(error)
        newcomer = await swarm.start("d", ticket=fresh(swarm, rotation))
        members.append(newcomer)
        await together(members)

        await retired([a, b, c], 0)
        error = await refused(swarm, "late")
        assert isinstance(error, WrongSwarmKey)
        assert "fresh ticket" in error.hint
        await together(members)
    for peer in members:
        assert not peer.events("peer_lost")
        swarm.leave(peer.name)
    path = b.home.rotated
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_stored(b.home, swarm.ticket.run_id).older is None


async def test_who_was_away_needs_a_fresh_ticket(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name) for name in "abc"]
        await together([a, b, c])
        swarm.leave("c")
        await c.ended.wait()
        await together([a, b])
        rotation = rotate(swarm)
        await rotated([a, b], 1)
        error = await refused(swarm, "c")
        assert (error.code, "fresh ticket" in str(error)) == ("not_allowed", True)
        await retired([a, b], 0)
        assert isinstance(await refused(swarm, "c"), WrongSwarmKey)
        c = await swarm.start("c", ticket=fresh(swarm, rotation))
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


async def test_a_member_that_loses_its_connection_meanwhile_still_gets_the_key(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name) for name in "abc"]
        await together([a, b, c])
        swarm.network.partition(["c"], ["a", "b"])
        rotate(swarm)
        await rotated([a, b], 1)
        await trio.sleep(30)
        assert not c.events("key_rotated")
        swarm.network.heal()
        await rotated([c], 1)
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


async def test_a_member_that_is_cut_off_for_too_long_ends_and_is_told_what_to_do(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        swarm.network.partition(["c"], ["a", "b"])
        rotation = rotate(swarm)
        await retired([a, b], 0)
        swarm.network.heal()
        await c.ended.wait()
        assert isinstance(c.error, WrongSwarmKey)
        assert "fresh ticket" in c.error.hint
        assert len(c.events("rejected")) == 2  # once for each of the others
        c = await swarm.start("c", ticket=fresh(swarm, rotation))
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


async def test_of_two_with_different_keys_the_one_that_is_behind_ends(autojump_clock, swarm):
    """Even the founder is gone, and nobody else could say who of them is right."""
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        b, c = [await expendable(swarm, name) for name in "bc"]
        await together([a, b, c])
        swarm.network.partition(["c"], ["a", "b"])
        rotate(swarm)
        await retired([a, b], 0)
        swarm.leave("a")
        await a.ended.wait()
        swarm.network.heal()
        await c.ended.wait()
        await b.until(lambda: b.events("rejected"))
        await trio.sleep(100)
        assert not b.ended.is_set()
    swarm.leave("b")


async def test_one_member_alone_can_expel_nobody(autojump_clock, swarm, insider):
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        b = await expendable(swarm, "b")
        await together([a, b])
        liar, endpoint = await insider("liar", swarm.ticket.swarm_key)
        said = trio.Event()

        async def refuse(hello, stream):
            if stream.peer == b.id:
                said.set()
            raise RequestRefused("you were excluded", code="not_allowed")

        endpoint.handle(Hello, refuse)
        for peer in (a, b):
            endpoint.learn(peer.id, Address(peer.name, 4000))
            status = StatusClaim(0, None, False)
            await endpoint.request(peer.id, Hello(swarm.ticket.run_id, status), Welcome)
        await said.wait()
        await trio.sleep(100)
        assert not b.ended.is_set()
        swarm.network.partition(["a"], ["b"])  # the founder cannot be expelled, whatever is said to it
        await a.until(lambda: any(e["peer"] == str(liar.peer_id) for e in a.events("rejected")))
        await trio.sleep(100)
        assert not a.ended.is_set()
    for name in "ab":
        swarm.leave(name)


async def test_restarts_use_the_newest_key(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name) for name in "abc"]
        await together([a, b, c])
        rotate(swarm)
        await rotated([a, b, c], 1)
        swarm.kill("b")
        await b.ended.wait()
        b = await swarm.start("b")  # with the ticket that it had first
        await together([a, b, c])
        await retired([a, b, c], 0)
        swarm.kill("a")
        await a.ended.wait()
        a = await swarm.start("a")
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


async def test_restarts_do_not_prolong_what_the_old_key_is_good_for(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        rotate(swarm)
        await rotated([a], 1)
        end = a.events("key_rotated")[0]["t"] + keys.GRACE
        for _ in range(2):
            await trio.sleep(40)
            swarm.leave("a")
            await a.ended.wait()
            a = await swarm.start("a")
        await retired([a], 0)
        assert end <= a.events("key_retired")[0]["t"] <= end + keys.PERIOD
    swarm.leave("a")


async def test_a_rotation_that_is_ordered_while_the_founder_is_away(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name) for name in "abc"]
        await together([a, b, c])
        swarm.leave("a")
        await a.ended.wait()
        rotation = rotate(swarm)
        await together([b, c])
        assert not b.events("key_rotated")
        a, config = swarm.prepare("a")
        ready = await swarm._nursery.start(swarm._run, a, config)
        assert (ready.swarm_key, ready.key_number) == (rotation.key, 1)
        await rotated([b, c], 1)
        await together([a, b, c])
        await retired([a, b, c], 0)
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


async def test_an_excluded_member_is_out(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        rotate(swarm, excluded=[c.id])
        await rotated([a, b], 1)
        await together([a, b])
        assert any("excluded" in event["reason"] for event in c.events("peer_lost"))
        await c.until(lambda: c.events("rejected"))
        assert "excluded" in c.events("rejected")[0]["reason"]
        await c.ended.wait()
        assert isinstance(c.error, RequestRefused)
        assert "excluded" in str(c.error)
        assert list(c.home.checkpoints.iterdir())
        await retired([a, b], 0)
        await together([a, b])
        assert not c.events("key_rotated")
        # It may not even come back with somebody else's ticket, but for another identity.
        error = await refused(swarm, "c", ticket=fresh(swarm, read_stored(a.home, swarm.ticket.run_id).rotation))
        assert isinstance(error, RequestRefused)
        assert "excluded" in str(error)
    for name in "ab":
        swarm.leave(name)


async def test_tickets_name_members_where_they_are_and_nobody_who_is_excluded(autojump_clock, swarm):
    tickets = []
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        c = await expendable(swarm, "c")
        moved = await swarm.start("moved")
        gone = ((moved.id, Address("nowhere", 4000)), (c.id, Address("c", 4000)))
        old = attrs.evolve(swarm.ticket, bootstrap=(*gone, *swarm.ticket.bootstrap))
        b = await swarm.start("b", ticket=old, on_ticket=tickets.append)
        await together([a, b, c, moved])
        rotate(swarm, excluded=[c.id])
        await rotated([b], 1)
        assert dict(tickets[-1].bootstrap) == {peer.id: Address(peer.name, 4000) for peer in (a, b, moved)}
        assert tickets[-1].bootstrap[0][0] == b.id
    for name in ("a", "b", "c", "moved"):
        swarm.leave(name)


async def test_two_rotations_in_a_row(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        rotate(swarm, excluded=[c.id])
        await rotated([a, b], 1)
        other = swarm.home("other").identity.peer_id
        rotation = rotate(swarm, excluded=[other])  # who was excluded a moment ago still is
        assert set(rotation.excluded) == {c.id, other}
        await rotated([a, b], 2)
        await together([a, b])
        await retired([a, b], 1)
        assert not c.events("key_rotated")
        assert rotate(swarm).excluded == ()
        await rotated([a, b], 3)
        await together([a, b])
        assert not c.events("key_rotated")
    for name in "abc":
        swarm.leave(name)


async def test_who_was_excluded_is_admitted_again(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        rotate(swarm, excluded=[c.id])
        await rotated([a, b], 1)
        await c.ended.wait()
        rotation = rotate(swarm)
        await rotated([a, b], 2)
        assert not a.events("key_retired")  # a moment after it was excluded
        c = await swarm.start("c", ticket=fresh(swarm, rotation))
        await together([a, b, c])
    for name in "abc":
        swarm.leave(name)


@pytest.fixture
async def insider(swarm, nursery):
    """`await insider(name, key)` starts an endpoint that holds a key and says what it likes."""

    async def make(name, key):
        identity = Identity.from_seed(name.encode().ljust(32))
        endpoint = Endpoint(identity, swarm.network.transport(name), psk=Keyring(key), rng=random.Random(name))
        await nursery.start(endpoint.run, Address(name, 4000))
        return identity, endpoint

    return make


async def test_only_the_founder_can_rotate(autojump_clock, swarm, insider):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        await together([a, b])
        run = swarm.ticket.run_id
        right = KeyRotation.sign(a.home.identity, run, 1, NEW)
        forgeries = (
            KeyRotation.sign(Identity.from_seed(b"x" * 32), run, 1, NEW),
            KeyRotation.sign(b.home.identity, run, 1, NEW),
            attrs.evolve(right, number=2),
            attrs.evolve(right, key=NEWER),
            attrs.evolve(right, excluded=(a.id,)),
        )
        for number, forged in enumerate(forgeries):
            _, endpoint = await insider(f"liar{number}", swarm.ticket.swarm_key)
            endpoint.learn(b.id, Address("b", 4000))
            with pytest.raises(PeerGone, match="has not signed"):
                await endpoint.request(b.id, forged, KeyTaken)
        with pytest.raises(RequestRefused):
            await endpoint.request(b.id, attrs.evolve(right, run=bytes(32)), KeyTaken)
        assert not b.events("key_rotated")
        assert not b.home.rotated.exists()
        assert await endpoint.request(b.id, right, KeyTaken) == KeyTaken(1)
        await rotated([a, b], 1)
    for name in "ab":
        swarm.leave(name)


async def test_who_is_excluded_cannot_come_back_by_another_name(autojump_clock, swarm, insider):
    """It learns of the rotation as it is disconnected, while a member that is missing may still come back."""
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        _, other = await insider("other", swarm.ticket.swarm_key)
        other.learn(a.id, Address("a", 4000))
        await other.connect(a.id)
        swarm.network.partition(["b"], ["a", "c"])
        await a.until(lambda: any(event["peer"] == str(b.id) for event in a.events("peer_lost")))
        rotate(swarm, excluded=[c.id])
        await rotated([a], 1)
        assert read_stored(a.home, swarm.ticket.run_id).recipients is None  # b is waited for
        with pytest.raises(RequestRefused, match="fresh ticket"):
            await other.request(a.id, Hello(swarm.ticket.run_id, StatusClaim(0, None, False)), Welcome)
        swarm.network.heal()
        await rotated([b], 1)
        assert read_stored(a.home, swarm.ticket.run_id).recipients == {b.id}
    for name in "abc":
        swarm.leave(name)


async def test_who_is_excluded_is_told_when_the_others_know(autojump_clock, swarm):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        c = await expendable(swarm, "c")
        await together([a, b, c])
        swarm.network.set_link("a", "b", latency=2.0)
        rotate(swarm, excluded=[c.id])
        await c.until(lambda: any("excluded" in event["reason"] for event in c.events("peer_lost")))
        assert b.events("key_rotated")
    for name in "abc":
        swarm.leave(name)


async def test_one_that_does_not_answer_holds_up_nobody(autojump_clock, swarm, insider):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        await together([a, b])
        _, silent = await insider("silent", swarm.ticket.swarm_key)
        asked, first = [], trio.Event()

        async def welcome(hello, stream):
            return Welcome(StatusClaim(0, None, False), ())

        async def keep_waiting(rotation, stream):
            asked.append(stream.peer)
            first.set()
            await trio.sleep_forever()

        silent.handle(Hello, welcome)
        silent.handle(KeyRotation, keep_waiting)
        silent.learn(a.id, Address("a", 4000))
        await silent.request(a.id, Hello(swarm.ticket.run_id, StatusClaim(0, None, False)), Welcome)
        swarm.network.set_link("a", "b", latency=2.0)
        rotate(swarm)
        await first.wait()
        swarm.kill("b")
        await b.ended.wait()
        swarm.network.set_link("a", "b", latency=0.02)
        b = await swarm.start("b")
        await rotated([b], 1)
        assert asked == [a.id]
    for name in "ab":
        swarm.leave(name)


async def test_an_older_key_is_never_taken_again(autojump_clock, swarm, insider):
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        await together([a, b])
        first, second = rotate(swarm), rotate(swarm)
        await rotated([a, b], second.number)
        await retired([a, b], second.number - 1)
        _, endpoint = await insider("replayer", second.key)
        endpoint.learn(b.id, Address("b", 4000))
        assert await endpoint.request(b.id, first, KeyTaken) == KeyTaken(2)
        other = KeyRotation.sign(a.home.identity, swarm.ticket.run_id, 2, NEW)
        assert await endpoint.request(b.id, other, KeyTaken) == KeyTaken(2)
        assert read_stored(b.home, swarm.ticket.run_id).rotation == second
        assert [event["number"] for event in b.events("key_rotated")] == [2]
    for name in "ab":
        swarm.leave(name)


async def test_a_helper_that_was_named_gets_the_key(autojump_clock, swarm, insider, nursery, tmp_path):
    with trio.fail_after(LIMIT):
        home, log = Home(tmp_path / "helper"), []
        contact = (home.identity.peer_id, Address("helper", 4000))
        a = await swarm.start("a", bootstrap=(contact,))

        async def help_out(scope, ticket, task_status):
            events = EventLog(None, home.identity.peer_id, clock=trio.current_time)
            events.subscribe(log.append)
            config = HelperConfig(home=home, listen=contact[1], events=events, ticket=ticket)
            with scope:
                transport = swarm.network.transport("helper")
                await run_helper(config, transport=transport, rng=random.Random(), task_status=task_status)

        scope = trio.CancelScope()
        old = swarm.ticket
        await nursery.start(help_out, scope, old)
        b = await swarm.start("b")
        await together([a, b])
        await a.until(lambda: any(e["peer"] == str(contact[0]) for e in a.events("connected")))
        liar, endpoint = await insider("liar", old.swarm_key)
        endpoint.learn(*contact)
        forged = KeyRotation.sign(liar, old.run_id, 1, NEW)
        manifests = [Manifest.create(swarm.settings, liar).dump(), "nonsense"]

        async def lie(request, stream):
            return ManifestReply(manifests.pop())

        endpoint.handle(ManifestRequest, lie)
        for _ in range(2):
            with pytest.raises(RequestRefused, match="cannot be told"):
                await endpoint.request(contact[0], forged, KeyTaken)
        rotation = rotate(swarm)
        await a.until(lambda: any(e["peer"] == str(contact[0]) for e in a.events("key_taken")))
        await retired([a, b], 0)
        scope.cancel()
        await trio.sleep(10)
        await nursery.start(help_out, trio.CancelScope(), old)  # its home has the key
        only_helper = attrs.evolve(fresh(swarm, rotation), bootstrap=(contact,))
        c = await swarm.start("c", ticket=only_helper)
        await together([a, b, c])
    told = [event["event"] for event in log if event["event"].startswith("key")]
    assert told == ["key_rotated", "key_taken", "key_retired"]
    nursery.cancel_scope.cancel()
