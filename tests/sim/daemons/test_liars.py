"""Members that lie, and strangers: they may cost time, but never stop the training of the others."""

import random

import attrs
import pytest
import trio

from peer.chain import Header, Link, Tip, unpack_links
from peer.history import History
from peer.membership import Hello, StatusClaim, TipClaim, Welcome
from peer.sync import DescribeRequest, Description, HeaderClaim, HistoryReply, HistoryRequest
from protocol.endpoint import Endpoint
from protocol.errors import RequestRefused, ShoalError
from protocol.identity import Identity
from protocol.plan import NO_BALLOT
from protocol.round_messages import Ahead, FetchResult, Forked, Noted, Queued, Ready, RoundOpen
from protocol.transport import Address
from protocol.weights import SIZE, SignedWeight, sign_weight

LIMIT = 600


class Liar:
    """A member that says what it likes, to everybody, every second."""

    def __init__(self, swarm, victims):
        self.swarm, self.victims = swarm, victims
        self.endpoint = Endpoint(
            Identity.from_seed(b"l" * 32), swarm.network.transport("liar"), rng=random.Random("liar")
        )
        self.id = self.endpoint.peer_id
        self.asked = 0
        self.refusals = []
        self.count = 0
        self.endpoint.handle(Hello, self.on_hello)
        for victim in victims:
            self.endpoint.learn(victim.id, Address(victim.name, 4000))

    @property
    def run_id(self):
        return self.swarm.ticket.run_id

    @property
    def tip(self):
        """Of the victim that is ahead: revision and digest."""
        return max(max(victim.digests().items(), default=(0, "")) for victim in self.victims)

    def claim(self):
        return None

    def status(self):
        self.count += 1
        return StatusClaim(self.count, self.claim(), True)

    async def on_hello(self, hello, stream):
        return Welcome(self.status(), ())

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.endpoint.run, Address("liar", 4000))
            task_status.started()
            while True:
                for victim in self.victims:
                    try:
                        await self.endpoint.request(victim.id, Hello(self.run_id, self.status()), Welcome)
                        await self.pester(victim)
                    except ShoalError as error:
                        self.refusals.append(error)
                await trio.sleep(1)

    async def pester(self, victim):
        pass


class Boaster(Liar):
    """Claims a state that nobody has: the best that can exist, another one each time."""

    weight, revision = None, 3

    def claim(self):
        weight = self.weight or self.revision * 64 * 1e9
        return TipClaim(self.revision, weight, self.count.to_bytes(32, "big"))


class Inflator(Liar):
    """Has the others' own state, and says that it weighs more."""

    def __init__(self, swarm, victims):
        super().__init__(swarm, victims)
        self.endpoint.handle(HistoryRequest, self.on_history)

    def claim(self):
        revision, digest = self.tip
        return TipClaim(revision, 1e6, bytes.fromhex(digest)) if digest else None

    async def on_history(self, request, stream):
        self.asked += 1
        async with self.endpoint.open(self.victims[0].id, request) as true:
            reply = await true.receive(HistoryReply)
            links = bytearray(reply.length)
            await true.receive_into(memoryview(links))
        await stream.send(reply)
        await stream.send_bytes(links)


class Infinite(Inflator):
    """Shows contributions that cannot be added up."""

    async def on_history(self, request, stream):
        self.asked += 1
        signed = tuple(SignedWeight(weight, bytes(SIZE)) for weight in (float("inf"), -float("inf")))
        forged = Link(b"p" * 32, b"x" * 32, signed).pack()
        await stream.send(HistoryReply(HeaderClaim.of(Header.genesis(self.run_id, bytes(32))), len(forged)))
        await stream.send_bytes(forged)


class Forger(Liar):
    """Shows the others' history, continued by a revision of its own that weighs more than anything: see `forged`."""

    def __init__(self, swarm, victims):
        super().__init__(swarm, victims)
        self.endpoint.handle(HistoryRequest, self.on_history)
        self.made = {}

    def forged(self, header, links):
        """What is said to have been contributed to the next revision."""
        every = [signed for link in links for signed in link.contributions]
        return [attrs.evolve(signed, weight=1e9) for signed in every[-2:]]

    def claim(self):
        revision, digest = self.tip
        if not digest:
            return None
        made = self.made.get(digest)
        tip = Tip(revision + 1, 3e9, bytes.fromhex(digest)) if made is None else made.tip
        return TipClaim(tip.revision, tip.weight, tip.digest)

    async def pester(self, victim):
        """Gets the newest history, as everybody can."""
        _, digest = self.tip
        request = HistoryRequest(self.run_id, bytes.fromhex(digest), ())
        async with self.endpoint.open(victim.id, request) as true:
            reply = await true.receive(HistoryReply)
            data = bytearray(reply.length)
            await true.receive_into(memoryview(data))
        links = unpack_links(data, 64)
        history = History((reply.start.header(self.run_id),)).extended(links)
        forged = Link(b"p" * 32, b"x" * 32, tuple(self.forged(history.header, links)))
        self.made[digest] = history.extended([forged])

    async def on_history(self, request, stream):
        self.asked += 1
        made = next((made for made in self.made.values() if made.tip.digest == request.digest), None)
        if made is None:
            raise RequestRefused("a lie that was not prepared", code="gone")
        links = b"".join(made.links)
        await stream.send(HistoryReply(HeaderClaim.of(made.headers[0]), len(links)))
        await stream.send_bytes(links)


class Replayer(Forger):
    """Adds what others have signed before, as they have signed it."""

    def forged(self, header, links):
        return max((link.contributions for link in links), key=len, default=())


class Giant(Forger):
    """Signs for itself, more than anybody may weigh."""

    def forged(self, header, links):
        identity = Identity.from_seed(b"l" * 32)
        return [sign_weight(identity, header.run, "", header.revision + 1, header.digest, 2e9)]


class Obstructor(Liar):
    """On the others' tip, and in their rounds, where it says that they are over, or should not be."""

    answer = "ahead"

    def __init__(self, swarm, victims):
        super().__init__(swarm, victims)
        self.endpoint.handle(Ready, self.on_ready)
        self.endpoint.handle(RoundOpen, self.on_open)

    def claim(self):
        revision, digest = self.tip
        return TipClaim(revision, 100.0, bytes.fromhex(digest)) if digest else None

    async def on_ready(self, request, stream):
        self.asked += 1
        return Ahead(request.revision, self.id) if self.answer == "ahead" else Forked(b"f" * 32)

    async def on_open(self, request, stream):
        self.asked += 1
        return Ahead(request.revision, self.id) if self.answer == "ahead" else Noted()


class Staller(Obstructor):
    """A coordinator that always has something else to do."""

    async def on_ready(self, request, stream):
        self.asked += 1
        while True:
            await stream.send(Queued(0))
            await trio.sleep(1)

    async def on_open(self, request, stream):
        return Noted()


class Hurrier(Obstructor):
    """Says that it is ready for the round after the next, as if the next one were over."""

    answer = "forked"

    async def pester(self, victim):
        revision = self.tip[0] + 2
        ready = Ready(self.run_id, "", revision, b"f" * 32, 1.0, 1, NO_BALLOT, ())
        with trio.move_on_after(0.5):
            async with self.endpoint.open(victim.id, ready) as stream:
                await stream.receive(Ahead, Forked)


@pytest.fixture
async def victims(autojump_clock, simulated_swarm):
    swarm = simulated_swarm
    swarm.settings = attrs.evolve(swarm.settings, run=attrs.evolve(swarm.settings.run, rounds=0))
    return swarm


async def begin(swarm, kind, nursery):
    victims = [await swarm.start(name) for name in "ab"]
    await victims[1].until_round(2)
    liar = kind(swarm, victims)
    await nursery.start(liar.run)
    return liar, victims


async def goes_on(victims, rounds):
    """The victims make so many more rounds, and both contribute to at least half of them."""
    begun = max(victims[0].digests())
    for victim in victims:
        await victim.until_round(begun + rounds)
    made = [e for e in victims[0].events("round_committed") if e["round"] > begun]
    both = [e for e in made if {str(victim.id) for victim in victims} <= set(e["contributors"])]
    assert len(both) >= rounds // 2
    assert victims[0].digests()[begun + rounds] == victims[1].digests()[begun + rounds]


@pytest.mark.parametrize("kind", [Boaster, Inflator, Infinite, Forger, Replayer, Giant, Obstructor, Staller, Hurrier])
async def test_lies_do_not_stop_training(autojump_clock, victims, nursery, kind):
    with trio.fail_after(LIMIT):
        liar, peers = await begin(victims, kind, nursery)
        await goes_on(peers, 14)
    assert not any(peer.ended.is_set() for peer in peers)
    assert liar.asked or kind in (Boaster, Hurrier)
    nursery.cancel_scope.cancel()


async def test_a_coordinator_that_sees_forks_everywhere_is_passed_over(autojump_clock, victims, nursery):
    class Forker(Obstructor):
        answer = "forked"

    with trio.fail_after(LIMIT):
        _, peers = await begin(victims, Forker, nursery)
        await goes_on(peers, 10)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("claim", [{"weight": 1e300}, {"revision": 2**47, "weight": 1e300}])
async def test_states_that_cannot_exist_are_not_believed(autojump_clock, victims, nursery, claim):
    with trio.fail_after(LIMIT):
        kind = type("Dreamer", (Boaster,), claim)
        liar, peers = await begin(victims, kind, nursery)
        await goes_on(peers, 4)
    assert {error.code for error in liar.refusals} == {"implausible"}
    assert not any(str(liar.id) == event["peer"] for peer in peers for event in peer.events("peer_seen"))
    nursery.cancel_scope.cancel()


async def test_strangers_take_no_part(autojump_clock, victims, nursery):
    """A peer that never says hello gets the manifest, and nothing else."""
    with trio.fail_after(LIMIT):
        a = await victims.start("a")
        await a.until_round(1)
        stranger = Endpoint(Identity.from_seed(b"s" * 32), victims.network.transport("s"), rng=random.Random(1))
        await nursery.start(stranger.run, None)
        stranger.learn(a.id, Address("a", 4000))
        run = victims.ticket.run_id
        digest = bytes.fromhex(a.digests()[1])
        for request in (
            Ready(run, "", 2, digest, 1.0, 1, NO_BALLOT, ()),
            RoundOpen(run, "", 2, digest, 0.0),
            FetchResult(run, "", 1),
            DescribeRequest(run, digest),
        ):
            with pytest.raises(RequestRefused) as refused:
                await stranger.request(a.id, request, (Ahead, Noted, Description))
            assert refused.value.code == "not_a_member"
    nursery.cancel_scope.cancel()
