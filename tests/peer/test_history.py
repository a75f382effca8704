"""What a branch weighs is what its contributors have signed, whoever tells about it."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import history
from peer.chain import Header, Link, Tip, unpack_links
from peer.history import History, Rules, verified
from protocol.errors import ProtocolError
from protocol.identity import Identity
from protocol.weights import SignedWeight, sign_weight

RUN = b"r" * 32
PEERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 5)]
RULES = Rules(max_weight=10.0, max_members=4, admits=lambda peer: True)
GENESIS = History((Header.genesis(RUN, b"g" * 32),))


def link(before, *weights, plan=b"p", run=RUN, revision=None, base=None):
    """The next revision, to which the first peers contribute with these weights."""
    number = before.tip.revision + 1 if revision is None else revision
    digest = before.tip.digest if base is None else base
    signed = [
        sign_weight(peer, run, "", number, digest, weight)
        for peer, weight in zip(PEERS, weights, strict=False)
        if weight
    ]
    return Link(plan * 32, b"x" * 32, tuple(signed))


def grown(before, *rounds, plan=b"p"):
    for weights in rounds:
        before = before.extended([link(before, *weights, plan=plan)])
    return before


COMMON = grown(GENESIS, (1.0, 1.0), (1.0, 2.0))
OURS = grown(COMMON, (1.0, 1.0), (1.0,), (1.0,))
THEIRS = grown(COMMON, (4.0, 4.0), plan=b"q")


def show(theirs, ours, tip=None, rules=RULES, start=None):
    """As a donor answers us."""
    place = (theirs.find(ours.landmarks()) or 0) if ours is not None else 0
    place = place if start is None else start
    return verified(ours, theirs.headers[place], b"".join(theirs.links[place:]), tip or theirs.tip, rules)


def test_a_branch_is_shown_from_where_it_left_ours():
    found = show(THEIRS, OURS)
    assert found.tip == THEIRS.tip == Tip(3, 13.0, THEIRS.tip.digest)
    assert found.tip.beats(OURS.tip)
    assert not show(OURS, THEIRS).tip.beats(THEIRS.tip)
    assert found.headers == THEIRS.headers
    assert found.links == THEIRS.links
    assert found.common(OURS) == COMMON.header


def test_who_knows_nothing_is_shown_everything():
    assert show(THEIRS, None).headers == THEIRS.headers
    assert show(GENESIS, None).tip == GENESIS.tip


def test_a_run_that_was_founded_twice():
    other = grown(History((Header.genesis(RUN, b"h" * 32),)), (5.0, 5.0), (5.0, 5.0))
    assert show(other, OURS).tip.beats(OURS.tip)
    assert other.common(OURS) is None


def test_a_round_without_contributors_adds_nothing():
    found = show(grown(COMMON, (), ()), COMMON)
    assert (found.tip.revision, found.tip.weight) == (4, COMMON.tip.weight)


# Lies.


def test_more_weight_than_is_proven_is_not_believed():
    claimed = attrs.evolve(THEIRS.tip, weight=1e6)
    with pytest.raises(ProtocolError, match="does not lead"):
        show(THEIRS, OURS, tip=claimed)


def test_more_weight_than_was_signed_is_not_believed():
    """Also if the digests are made anew, so that everything fits together."""
    honest = link(COMMON, 1.0, 1.0)
    raised = attrs.evolve(honest, contributions=tuple(attrs.evolve(s, weight=9.0) for s in honest.contributions))
    with pytest.raises(ProtocolError, match="wrong signature in revision 3"):
        show(COMMON.extended([raised]), OURS)


@pytest.mark.parametrize("replay", [{"revision": 2}, {"base": GENESIS.tip.digest}, {"run": b"s" * 32}])
def test_signatures_for_something_else_are_not_believed(replay):
    with pytest.raises(ProtocolError, match="wrong signature"):
        show(COMMON.extended([link(COMMON, 9.0, 9.0, **replay)]), OURS)


def test_a_round_cannot_be_told_twice():
    again = unpack_links(COMMON.links[-1], 4)
    with pytest.raises(ProtocolError, match="wrong signature"):
        show(COMMON.extended(again * 5), OURS)


def test_nobody_counts_twice_in_a_round():
    once = link(COMMON, 9.0).contributions
    with pytest.raises(ProtocolError, match="twice"):
        show(COMMON.extended([Link(b"p" * 32, b"x" * 32, once * 2)]), OURS)


@pytest.mark.parametrize("weight", [10.5, 0.0, -1.0, float("nan"), float("inf")])
def test_weights_beyond_what_the_run_allows(weight):
    signed = sign_weight(PEERS[0], RUN, "", 3, COMMON.tip.digest, weight)
    theirs = COMMON.extended([Link(b"p" * 32, b"x" * 32, (signed,))])
    with pytest.raises(ProtocolError, match="beyond the limit"):
        show(theirs, OURS)


@pytest.mark.parametrize("weights", [(float("inf"), -float("inf")), (1e308, 1e308), (float("nan"), 1.0), (1.0, 1e308)])
def test_weights_that_have_no_sum(weights):
    signed = tuple(SignedWeight(weight, PEERS[n].public_key + bytes(64)) for n, weight in enumerate(weights))
    data = Link(b"p" * 32, b"x" * 32, signed).pack()
    for tip in (COMMON.tip, THEIRS.tip):
        with pytest.raises(ProtocolError, match="beyond the limit in revision 3"):
            verified(OURS, COMMON.header, data, tip, RULES)


def test_more_contributors_than_the_run_allows():
    with pytest.raises(ProtocolError, match="4 contributors"):
        show(grown(COMMON, (1.0, 1.0, 1.0, 1.0)), OURS, rules=attrs.evolve(RULES, max_members=3))


def test_contributors_who_are_not_admitted():
    rules = attrs.evolve(RULES, admits=lambda peer: peer == PEERS[0].peer_id)
    with pytest.raises(ProtocolError, match="not admitted"):
        show(THEIRS, OURS, rules=rules)


def test_a_chain_that_does_not_link():
    data = b"".join(THEIRS.links)
    with pytest.raises(ProtocolError, match="does not lead"):
        verified(OURS, OURS.headers[1], data, THEIRS.tip, RULES)
    with pytest.raises(ProtocolError, match="does not lead"):
        verified(OURS, GENESIS.header, THEIRS.links[0] + THEIRS.links[2], THEIRS.tip, RULES)


def test_a_made_up_beginning_with_a_great_weight():
    made_up = attrs.evolve(COMMON.header, weight=1e6)
    theirs = grown(History((made_up,)), (9.0, 9.0))
    for ours in (OURS, None):
        with pytest.raises(ProtocolError, match="1 revisions, which does not reach back"):
            show(theirs, ours)
    founded = grown(History((attrs.evolve(GENESIS.header, weight=1e6),)), (9.0, 9.0))
    with pytest.raises(ProtocolError, match="does not reach back"):
        show(founded, OURS)


def test_the_signatures_come_last_as_they_cost_most(monkeypatch):
    checked = []
    monkeypatch.setattr(SignedWeight, "is_valid", lambda *arguments: checked.append(arguments) or True)
    with pytest.raises(ProtocolError, match="does not lead"):
        show(THEIRS, OURS, tip=OURS.tip)
    assert not checked
    show(THEIRS, OURS)
    assert len(checked) == 2  # and none of what both have


@given(st.binary(max_size=400), st.integers(0, 3))
def test_bytes_that_are_no_history(data, place):
    with pytest.raises(ProtocolError):
        verified(OURS, COMMON.headers[min(place, 2)], data, THEIRS.tip, RULES)


@given(st.data())
def test_nothing_can_be_changed(data):
    """One who has no keys can cut, repeat, reorder and damage links; only the truth is believed."""
    truth = THEIRS.links
    links = list(truth)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(links) - 1)))
        change = data.draw(st.sampled_from(["drop", "repeat", "swap", "flip"]))
        if not links:
            break
        if change == "drop":
            del links[place]
        elif change == "repeat":
            links.insert(place, links[place])
        elif change == "swap":
            links[place], links[-1] = links[-1], links[place]
        else:
            damaged = bytearray(links[place])
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            links[place] = bytes(damaged)
    try:
        found = verified(OURS, GENESIS.header, b"".join(links), THEIRS.tip, RULES)
    except ProtocolError:
        assert tuple(links) != truth
    else:
        assert found.links == truth


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 10.0])] * 3), max_size=6), st.integers(0, 6))
def test_the_weight_of_a_branch_is_the_sum_of_what_was_signed(rounds, shared):
    theirs = grown(GENESIS, *rounds)
    ours = grown(theirs.until(min(shared, len(rounds))), (1.0,), plan=b"o")
    found = show(theirs, ours)
    assert found.tip.weight == sum(map(sum, rounds))
    assert found.tip.revision == len(rounds)


# How much is kept.


@pytest.fixture
def short(monkeypatch):
    """Only five links are kept."""
    monkeypatch.setattr(history, "KEPT_LINKS", 5)


def test_the_newest_links_are_kept(short):
    long = grown(GENESIS, *[(1.0,)] * 12)
    assert [header.revision for header in long.headers] == [7, 8, 9, 10, 11, 12]
    assert long.tip.weight == 12.0
    assert long.header.digest == grown(long.until(2), *[(1.0,)] * 3).header.digest


def test_no_more_bytes_are_kept_than_are_allowed(monkeypatch):
    monkeypatch.setattr(history, "KEPT_BYTES", 3 * len(link(GENESIS, 1.0).pack()))
    long = grown(GENESIS, *[(1.0,)] * 5)
    assert [header.revision for header in long.headers] == [2, 3, 4, 5]


def test_after_a_parting_longer_than_that_as_much_as_is_kept_has_to_be_shown(short):
    ours, theirs = grown(COMMON, *[(1.0,)] * 9), grown(COMMON, *[(1.0, 1.0)] * 8)
    assert theirs.common(ours) is None
    assert show(theirs, ours).tip == theirs.tip
    assert show(theirs, ours).tip.beats(ours.tip)
    assert not show(ours, theirs).tip.beats(theirs.tip)
    assert show(theirs, None).tip == theirs.tip
    with pytest.raises(ProtocolError, match="4 revisions, which does not reach back"):
        show(theirs, ours, start=1)


def test_a_made_up_beginning_and_rounds_that_nobody_has_signed(short):
    """Whoever has no key can make as many of these as anybody keeps."""
    made_up = History((attrs.evolve(COMMON.header, weight=1e6),))
    for rounds in ([()] * 5, [(1.0,)] * 2 + [()] * 3):
        theirs = grown(made_up, *rounds)
        for ours in (OURS, None):
            with pytest.raises(ProtocolError, match="5 revisions, which does not reach back"):
                show(theirs, ours)


def test_some_rounds_may_be_without_contributors(short):
    long = grown(COMMON, *[(1.0,)] * 5, (), (1.0,), (), (1.0,))
    assert long.headers[0].revision > 0
    assert show(long, None).tip == show(long, OURS).tip == long.tip


def test_a_branch_that_we_could_not_show_to_others_then(short):
    """Rounds that nobody has signed, appended by anybody, must not displace those that are signed."""
    ours = grown(COMMON, *[(1.0,)] * 6)
    assert show(grown(ours, (), ()), ours).tip.revision == ours.tip.revision + 2
    with pytest.raises(ProtocolError, match="3 revisions, which does not reach back"):
        show(grown(ours, (), (), ()), ours)


def test_only_what_is_signed_counts_among_the_bytes(monkeypatch):
    made_up = History((attrs.evolve(COMMON.header, weight=1e6),))
    signed, empty = grown(made_up, *[(1.0,)] * 3), grown(made_up, *[()] * 8)
    monkeypatch.setattr(history, "KEPT_BYTES", 3 * len(signed.links[0]))
    assert show(signed, None).tip == signed.tip
    with pytest.raises(ProtocolError, match="8 revisions, which does not reach back"):
        show(empty, None)


def test_more_than_anybody_keeps_is_not_looked_at(monkeypatch):
    long = grown(GENESIS, *[()] * 6)
    monkeypatch.setattr(history, "KEPT_LINKS", 5)
    monkeypatch.setattr(Header, "next", None)
    with pytest.raises(ProtocolError, match="6 revisions, which are more"):
        show(long, None)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 30, 200])
def test_landmarks_find_where_branches_part(length):
    ours = GENESIS.extended(Link(bytes([number % 250]) * 32, b"x" * 32, ()) for number in range(length))
    landmarks = ours.landmarks()
    assert landmarks[0] == ours.tip.digest
    assert landmarks[-1] == GENESIS.tip.digest
    assert len(landmarks) <= 2 + length.bit_length()
    parted = ours.until(length // 2).extended([Link(b"n" * 32, b"x" * 32, ())])
    place = parted.find(landmarks)
    assert place is not None
    assert length // 2 - place <= length - length // 2  # what is sent although both have it
    assert verified(ours, parted.headers[place], b"".join(parted.links[place:]), parted.tip, RULES).tip == parted.tip
