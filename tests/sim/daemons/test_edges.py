"""The edges of a daemon's life: beginnings that cannot work, ends in the middle of something, and the last round."""

import random

import attrs
import pytest
import torch
import trio

import peer.daemon
import peer.reach
from dht import members_key
from dht.node import DHT
from peer.checkpoint import load_latest
from peer.membership import Hello, StatusClaim, Welcome
from peer.settings import LimitSettings, MembershipSettings
from peer.sync import DescribeRequest, RangeRequest
from peer.trainer import Trainer
from protocol.endpoint import Endpoint
from protocol.errors import DataError, PeerUnreachable, RequestRefused, SettingsError, ShoalError
from protocol.identity import Identity
from protocol.plan import NO_BALLOT
from protocol.round_messages import FetchResult, Ready
from protocol.transport import Address

LIMIT = 600


def endless(settings):
    return attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))


async def rejected(swarm, name, **options):
    """The error with which a daemon ends that cannot begin."""
    with trio.fail_after(LIMIT):
        peer, config = swarm.prepare(name, **options)
        await swarm._run(peer, config)
    assert peer.events("stopped")[0]["reason"] == str(peer.error)
    return peer.error


@pytest.mark.parametrize(("source", "data"), [("text", "stdlib"), ("stdlib", None)])
async def test_the_data_must_be_what_the_run_is_about(autojump_clock, simulated_swarm, source, data):
    swarm = simulated_swarm
    founded = attrs.evolve(swarm.settings, data=attrs.evolve(swarm.settings.data, source=source))
    with trio.fail_after(LIMIT):
        await swarm.start("a", settings=founded, **({} if source == "text" else {"data": "stdlib"}))
    error = await rejected(swarm, "b", **({} if data is None else {"data": data}))
    assert isinstance(error, DataError)
    assert "the run trains on" in str(error)
    swarm.leave("a")


async def test_a_run_with_a_list_admits_those_on_it_and_its_founder(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    listed = swarm.home("b").identity.peer_id
    swarm.settings = attrs.evolve(swarm.settings, membership=MembershipSettings(policy="allow", allow=(str(listed),)))
    with trio.fail_after(LIMIT):
        _, b = await swarm.start("a"), await swarm.start("b")
        error = await rejected(swarm, "c")
        assert isinstance(error, RequestRefused)
        assert (error.code, str(swarm.home("c").identity.peer_id) in str(error)) == ("not_allowed", True)
        await b.ended.wait()
    assert len(b.events("round_committed")[-1]["contributors"]) == 2


async def test_who_is_not_on_the_list_gets_nothing_by_asking(autojump_clock, simulated_swarm, nursery):
    """A stranger that does not ask itself whether it is on the list."""
    swarm = simulated_swarm
    listed = str(swarm.home("b").identity.peer_id)
    only_b = MembershipSettings(policy="allow", allow=(listed,))
    swarm.settings = attrs.evolve(endless(swarm.settings), membership=only_b)
    stranger = Endpoint(Identity.from_seed(bytes(32)), swarm.network.transport("x"), rng=random.Random())
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        await swarm.start("b")
        await a.until_round(2)
        await nursery.start(stranger.run, Address("x", 4000))
        stranger.learn(a.id, Address("a", 4000))
        run, digest = swarm.ticket.run_id, bytes.fromhex(a.digests()[2])
        for request, code in (
            (Hello(run, StatusClaim(1, None, True)), "not_allowed"),
            (DescribeRequest(run, digest), "not_a_member"),
            (RangeRequest(run, digest, 0), "not_a_member"),
            (Ready(run, "", 3, digest, 1.0, 1, NO_BALLOT, ()), "not_a_member"),
            (FetchResult(run, "", 2), "not_a_member"),
        ):
            with pytest.raises(RequestRefused) as caught:
                await stranger.request(a.id, request, Welcome)
            assert caught.value.code == code
    nursery.cancel_scope.cancel()


async def test_a_newcomer_that_nobody_has_room_for_says_so(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    swarm.settings = attrs.evolve(endless(swarm.settings), limits=LimitSettings(peers=2))
    with trio.fail_after(LIMIT):
        for name in "ab":
            await swarm.start(name)
        error = await rejected(swarm, "c")
    assert isinstance(error, RequestRefused)
    assert error.code == "full"
    for name in "ab":
        swarm.leave(name)


async def test_a_newcomer_whom_everybody_leaves_gives_up(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    swarm.network.set_link("a", "b", latency=1.0)
    with trio.fail_after(LIMIT):
        await swarm.start("a", settings=endless(swarm.settings))
        b = swarm.launch("b")
        await b.until(lambda: b.events("peer_seen"))
        swarm.kill("a")
        await b.ended.wait()
    assert isinstance(b.error, PeerUnreachable)


async def test_peers_that_only_exist_in_records_do_not_hold_up_rounds(autojump_clock, simulated_swarm, nursery):
    swarm = simulated_swarm
    with trio.fail_after(LIMIT):
        a = await swarm.start("a", settings=endless(swarm.settings))
        b = await swarm.start("b")
        await b.until_round(2)
        swarm.network.transport("nobody")
        swarm.network.partition(["nobody"], ["a", "b"])
        for number in range(5):
            identity = Identity.from_seed(bytes([number + 1]) * 32)
            endpoint = Endpoint(identity, swarm.network.transport(f"ghost{number}"), rng=random.Random(number))
            dht = DHT(endpoint, identity, rng=random.Random(number))
            await nursery.start(endpoint.run, Address(f"ghost{number}", 4000))
            await nursery.start(dht.run)
            await dht.bootstrap([(a.id, Address("a", 4000))])
            await dht.put(members_key(swarm.ticket.run_id), b"member")
        swarm.network.partition([f"ghost{number}" for number in range(5)], ["a", "b"])
        begun, rounds = trio.current_time(), max(a.digests())
        await a.until_round(rounds + 6)
    assert (trio.current_time() - begun) / 6 < 15  # as long as a round takes without ghosts, and some
    nursery.cancel_scope.cancel()


async def test_a_founder_restarts_before_anybody_has_a_state(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    with trio.fail_after(LIMIT):
        await swarm.start("a")
        b = swarm.launch("b")
        await b.until(lambda: b.events("started"))
        swarm.kill("a")
        assert not b.events("validation")
        again = await swarm.start("a")
        for peer in (again, b):
            await peer.ended.wait()
            assert peer.error is None
    assert again.digests()[6] == b.digests()[6]


async def test_all_restart_from_checkpoints_of_different_revisions(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    swarm.settings = endless(swarm.settings)
    with trio.fail_after(LIMIT):
        a, b, c = [await swarm.start(name) for name in "abc"]
        await a.until_round(2)
        swarm.kill("c")
        await a.until_round(3)
        await a.until_round(max(a.digests()) + 1)
        swarm.kill("b")
        await a.until_round(max(a.digests()) + 4)
        swarm.kill("a")
        last = load_latest(a.home.checkpoints).state.header.revision
        for peer in (a, b, c):
            await peer.ended.wait()
        peers = [swarm.launch(name) for name in "abc"]
        for peer in peers:
            await peer.until(lambda peer=peer: any(len(e["members"]) == 3 for e in peer.events("round_committed")))
            await peer.until_round(last + 4)
    assert len({peer.digests()[last + 4] for peer in peers}) == 1
    for name in "abc":
        swarm.leave(name)


async def test_who_comes_when_the_last_round_is_over_still_gets_the_result(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    with trio.fail_after(LIMIT):
        a, b = [await swarm.start(name) for name in "ab"]
        await a.until_round(5)
        late = swarm.launch("c")
        for peer in (a, b, late):
            await peer.ended.wait()
            assert peer.error is None
            assert peer.events("stopped")[0]["reason"] == "finished"
    final = [load_latest(peer.home.checkpoints).state.header for peer in (a, b, late)]
    assert {header.revision for header in final} == {6}
    assert len({header.digest for header in final}) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_leaving_at_any_moment(autojump_clock, seeded_swarm, seed):
    """Ctrl-C takes a second, whatever the daemon is at, and it can come back."""
    swarm = seeded_swarm(seed)
    swarm.settings = endless(swarm.settings)
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        b = swarm.launch("b")
        await trio.sleep(random.Random(seed).uniform(0, 24))
        begun = trio.current_time()
        swarm.leave("b")
        await b.ended.wait()
        assert trio.current_time() - begun <= 1.1  # goodbye
        assert [e["reason"] for e in b.events("stopped")] == ["cancelled"]
        b = await swarm.start("b")
        await a.until(lambda: len(a.events("round_committed")[-1:]) and max(a.digests()) > 3)
        await b.until(lambda: b.events("round_committed"))
    for name in "ab":
        swarm.leave(name)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
async def test_without_memory_a_daemon_says_so_and_leaves(autojump_clock, simulated_swarm, monkeypatch, error):
    swarm = simulated_swarm
    swarm.settings = endless(swarm.settings)
    run = Trainer.run

    def fail(trainer, *arguments, **options):
        if trainer._peer_id == swarm.home("b").identity.peer_id:
            raise error
        run(trainer, *arguments, **options)

    monkeypatch.setattr(Trainer, "run", fail)
    with trio.fail_after(LIMIT):
        a = await swarm.start("a")
        b = swarm.launch("b")
        await b.ended.wait()
        assert isinstance(b.error, peer.daemon.ComputeFailed)
        assert "memory ran out" in b.events("stopped")[0]["reason"]
        await a.until(lambda: a.events("peer_lost"))
        await a.until_round(max(a.digests(), default=0) + 2)
    swarm.leave("a")


async def test_a_full_disk_does_not_end_a_daemon(autojump_clock, simulated_swarm, monkeypatch):
    def fail(path, data):
        if path.name == "book.json":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(peer.daemon, "write_atomically", fail)
    with trio.fail_after(LIMIT):
        peers = [await simulated_swarm.start(name) for name in "ab"]
        for each in peers:
            await each.ended.wait()
            assert each.events("stopped")[0]["reason"] == "finished"


async def test_values_that_are_no_numbers_cost_their_sender_the_round(autojump_clock, simulated_swarm, monkeypatch):
    """A member that hides that its update is not finite is left out; nobody takes its values."""
    swarm = simulated_swarm
    sick = swarm.home("b").identity.peer_id
    segment = peer.daemon.Rounds._begin

    def begin(rounds, plan, work):
        values = torch.full_like(work.values, float("nan"))
        return segment(rounds, plan, attrs.evolve(work, values=values) if rounds._endpoint.peer_id == sick else work)

    monkeypatch.setattr(peer.daemon.Rounds, "_begin", begin)
    swarm.settings = endless(swarm.settings)
    with trio.fail_after(LIMIT):
        a, _, c = [await swarm.start(name) for name in "abc"]
        for each in (a, c):
            await each.until(lambda each=each: sum(len(e["members"]) == 2 for e in each.events("round_committed")) > 1)
    assert all(e["loss"] is not None for each in (a, c) for e in each.events("validation"))
    assert any("finite" in e["reason"] or "failed" in e["reason"] for e in a.events("round_failed"))
    for name in "abc":
        swarm.leave(name)


async def test_the_ticket_of_a_peer_that_listens_everywhere(autojump_clock, simulated_swarm, monkeypatch):
    monkeypatch.setattr(peer.reach, "outward_host", lambda: "a")
    with trio.fail_after(LIMIT):
        a = await simulated_swarm.start("a", listen=Address("0.0.0.0", 4000))
        assert simulated_swarm.ticket.bootstrap[0] == (a.id, Address("a", 4000))
        b = await simulated_swarm.start("b")
        await b.ended.wait()
    assert len(b.events("round_committed")[-1]["contributors"]) == 2


async def test_a_model_that_needs_more_memory_than_is_allowed(autojump_clock, simulated_swarm):
    _, config = simulated_swarm.prepare("a", max_memory=1000)
    with pytest.raises(SettingsError, match=r"needs about .* kB, and --max-memory allows 1\.0 kB"):
        await peer.daemon.run_daemon(config, transport=simulated_swarm.network.transport("a"))


async def test_errors_come_plain(autojump_clock, simulated_swarm):
    one, config = simulated_swarm.prepare("a", data="/does/not/exist")
    with pytest.raises(ShoalError, match="no file"):
        await peer.daemon.run_daemon(config, transport=simulated_swarm.network.transport("a"))
    assert one.events("stopped")


async def test_a_run_that_gets_worse_says_so_once(autojump_clock, simulated_swarm, monkeypatch):
    losses = iter([5.0, 3.0, 4.5, float("nan"), 5.0, 5.0, 5.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer, state: next(losses))
    with trio.fail_after(LIMIT):
        alone = await simulated_swarm.start("a")
        await alone.ended.wait()
    (event,) = alone.events("diverging")
    assert (event["round"], event["loss"], event["best"]) == (4, 5.0, 3.0)


async def test_who_only_fetches_the_last_round_validates_its_result_as_well(autojump_clock, simulated_swarm):
    with trio.fail_after(LIMIT):
        a, b = [await simulated_swarm.start(name, wait_for=2, linger=200.0) for name in "ab"]
        await b.until_round(5)
        simulated_swarm.step["b"] = 20.0  # it is too slow for the last one
        await a.until_round(6)
        simulated_swarm.step["b"] = 1.0
        await b.ended.wait()
    assert b.events("round_committed")[-1]["fetched"]
    assert b.events("validation")[-1]["round"] == 6
    assert b.events("validation")[-1]["loss"] == a.events("validation")[-1]["loss"]
