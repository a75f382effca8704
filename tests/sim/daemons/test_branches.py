"""A swarm that is cut into parts goes on in each; when they meet again, the branch with most work behind it remains."""

import attrs
import pytest
import trio

from peer.chain import unpack_links

LIMIT = 900


@pytest.fixture
def endless(simulated_swarm):
    settings = simulated_swarm.settings
    simulated_swarm.settings = attrs.evolve(settings, run=attrs.evolve(settings.run, rounds=0))
    return simulated_swarm


class Parts:
    """Peers that are cut off from each other in groups, and what becomes of them."""

    def __init__(self, swarm, names):
        self.swarm, self.names = swarm, names

    async def start(self):
        for name in self.names:
            await self.swarm.start(name)
        await self.together()

    def __getitem__(self, names):
        return [self.swarm.peers[name] for name in names]

    def cut(self, *groups):
        """Separates these groups, and remembers where."""
        for number, group in enumerate(groups):
            for other in groups[number + 1 :]:
                self.swarm.network.partition(group, other)
        self.marks = {name: len(self.swarm.peers[name].log) for name in self.names}

    def heal(self):
        self.swarm.network.heal()

    def since(self, name, kind):
        """A peer's events of one kind since the cut."""
        return [e for e in self.swarm.peers[name].log[self.marks[name] :] if e["event"] == kind]

    def weight(self, name):
        """What this peer's branch has gained since the cut."""
        return sum(event["weight"] for event in self.since(name, "round_committed"))

    async def rounds(self, name, count):
        """Waits until a peer has made so many rounds since the cut."""
        await self.swarm.peers[name].until(lambda: len(self.since(name, "round_committed")) >= count)

    async def together(self):
        """Waits until all make a round together, with the same bits."""
        peers, everybody = self[self.names], {str(peer.id) for peer in self[self.names]}
        seen = {peer.name: len(peer.log) for peer in peers}

        def joint(peer):
            rounds = [e for e in peer.log[seen[peer.name] :] if e["event"] == "round_committed"]
            return {e["round"]: e["digest"] for e in rounds if everybody <= set(e["contributors"])}

        for peer in peers:
            await peer.until(lambda peer=peer: joint(peer))
        last = max(max(joint(peer)) for peer in peers)
        for peer in peers:
            await peer.until_round(last)
        assert len({peer.digests()[last] for peer in peers}) == 1

    def left(self):
        """Those who have given up their branch since the cut."""
        return "".join(name for name in self.names if self.since(name, "branch_left"))

    def leave(self):
        for name in self.names:
            self.swarm.leave(name)


@pytest.fixture
async def parts(endless, autojump_clock):
    async def make(names):
        made = Parts(endless, names)
        await made.start()
        return made

    return make


async def test_split_heal_and_split_again(autojump_clock, parts):
    with trio.fail_after(LIMIT):
        swarm = await parts("abcde")
        for many, few in (("abc", "de"), ("cde", "ab")):
            swarm.cut(many, few)
            await swarm.rounds(many[0], 2)
            await swarm.rounds(few[0], 2)
            swarm.heal()
            await swarm.together()
            assert swarm.left() == few
    swarm.leave()


async def test_more_revisions_do_not_make_up_for_less_weight(autojump_clock, parts):
    with trio.fail_after(LIMIT):
        swarm = await parts("abcd")
        for one, two in ("ab", "bc", "ca"):
            swarm.swarm.network.set_link(one, two, latency=1.0)
        swarm.cut("abc", "d")
        await swarm.rounds("a", 2)
        await swarm.rounds("d", len(swarm.since("a", "round_committed")) + 2)
        assert swarm.weight("d") < swarm.weight("a")
        alone = len(swarm.since("d", "round_committed"))
        assert alone > len(swarm.since("a", "round_committed"))
        swarm.heal()
        await swarm.together()
        assert swarm.left() == "d"
        given_up = swarm.since("d", "branch_left")[0]
        assert given_up["weight"] >= 32.0 * alone
        assert given_up["round"] - given_up["common"] >= alone
    swarm.leave()


async def test_three_parts(autojump_clock, parts):
    with trio.fail_after(LIMIT):
        swarm = await parts("abcdef")
        swarm.cut("abc", "de", "f")
        for name in "adf":
            await swarm.rounds(name, 2)
        swarm.heal()
        await swarm.together()
        assert swarm.left() == "def"
    swarm.leave()


@pytest.mark.parametrize("moment", [0.5, 2.5, 4.5])
async def test_healed_in_the_middle_of_a_round(autojump_clock, parts, moment):
    with trio.fail_after(LIMIT):
        swarm = await parts("abc")
        swarm.cut("ab", "c")
        await swarm.rounds("c", 2)
        await swarm.rounds("a", 2)
        await trio.sleep(moment)
        swarm.heal()
        await swarm.together()
        assert swarm.left() == "c"
    swarm.leave()


async def test_a_branch_from_a_checkpoint(autojump_clock, parts, endless):
    """One that was cut off ended meanwhile; when it comes back, it has to show what it has made, and to give it up."""
    with trio.fail_after(LIMIT):
        swarm = await parts("abc")
        swarm.cut("ab", "c")
        await swarm.rounds("c", 2)
        await swarm.rounds("a", 2)
        endless.leave("c")
        await endless.peers["c"].ended.wait()
        swarm.heal()
        swarm.marks["c"] = 0
        await endless.start("c")
        await swarm.together()
        assert swarm.left() == "c"
    swarm.leave()


async def test_a_heavier_branch_that_only_a_checkpoint_has(autojump_clock, parts, endless):
    """All that made it are gone but one, which comes back to those that have made less."""
    with trio.fail_after(LIMIT):
        swarm = await parts("abcd")
        swarm.cut("abc", "d")
        await swarm.rounds("a", 4)
        for name in "abc":
            endless.leave(name)
            await endless.peers[name].ended.wait()
        assert swarm.weight("d") < swarm.weight("a")
        swarm.heal()
        await endless.start("a")
        swarm.names, swarm.marks["a"] = "ad", 0
        await swarm.together()
        assert swarm.left() == "d"
    swarm.leave()


async def test_a_branch_that_says_it_was_made_by_others_wins_nobody(autojump_clock, parts, endless, monkeypatch):
    """A member that is cut off puts the others' names to its rounds, and has states to go with that."""

    def forged(state, outer, reduced, own):
        contributions = list(reduced.plan.contributions)
        if reduced.plan.members == (endless.peers["d"].id,):
            made_together = max(
                (unpack_links(link, 64)[0] for link in state.history.links), key=lambda link: link.weight
            )
            contributions = [attrs.evolve(signed, weight=1e6) for signed in made_together.contributions]
        return state.commit(outer, plan=reduced.plan.id, contributions=contributions)

    monkeypatch.setattr("peer.node._committed", forged)
    with trio.fail_after(LIMIT):
        swarm = await parts("abcd")
        swarm.cut("abc", "d")
        await swarm.rounds("a", 2)
        await swarm.rounds("d", 2)
        swarm.heal()
        for name in "abc":
            await swarm.rounds(name, 8)
        last = min(max(peer.digests()) for peer in swarm["abc"])
        assert len({peer.digests()[last] for peer in swarm["abc"]}) == 1
        assert not swarm.left()
        reasons = [event["reason"] for event in swarm.since("a", "round_failed")]
        assert any("wrong signature" in reason for reason in reasons)
    swarm.leave()
