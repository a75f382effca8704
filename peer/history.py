"""What a peer can show of how its state came about, and what it believes of what others show.

A `History` is the newest part of the chain with all its signatures: enough for who knows where it begins to count what
a branch really weighs. Peers keep it with their state, in checkpoints as well, and fetch it together with a state, so
all on one branch can show the same.

How much is kept is limited. Branches that have parted longer ago have no part in common any more. Then the weight
before what is shown has to be taken as the header says it; but as much has to be shown as everybody keeps, and at least
half of it signed. No branch is followed that could not be shown to a newcomer then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from peer.chain import EMPTY_LINK, Header, Link, Tip, unpack_links
from protocol.errors import ProtocolError
from protocol.identity import PeerId

KEPT_LINKS = 4096
"""Revisions that a history goes back."""

KEPT_BYTES = 1 << 24
"""Bytes of packed links that a history has at most, if that is less."""

MAX_KNOWN = 32
"""Digests by which a donor is told from where on its history is of interest."""


@attrs.frozen(kw_only=True)
class Rules:
    """What contributions a run allows. Whoever takes part in rounds goes by the same ones."""

    max_weight: float
    max_members: int
    admits: Callable[[PeerId], bool]


@attrs.frozen(eq=False)
class History:
    """Consecutive headers, and the packed links between them: one less. Immutable."""

    headers: tuple[Header, ...]
    links: tuple[bytes, ...] = ()

    @property
    def header(self) -> Header:
        """The newest one."""
        return self.headers[-1]

    @property
    def tip(self) -> Tip:
        """Where the branch ends."""
        return self.header.tip

    @property
    def reaches_back(self) -> bool:
        """Whether somebody who knows nothing of it can be asked to believe it.

        It has to begin with the founding, or to have as many links as are kept, at least half of them signed by
        somebody, or half as many bytes as are kept of such links.
        """
        first = self.headers[0]
        signed = [len(link) for link in self.links if len(link) > EMPTY_LINK]
        enough = len(self.links) >= KEPT_LINKS and 2 * len(signed) >= KEPT_LINKS
        return first == Header.genesis(first.run, first.root) or enough or sum(signed) > KEPT_BYTES // 2

    def extended(self, links: Iterable[Link]) -> History:
        """This history with some links more, and without what it need not keep then."""
        headers, packed = list(self.headers), list(self.links)
        for link in links:
            headers.append(headers[-1].next(link))
            packed.append(link.pack())
        size, first = sum(map(len, packed)), max(0, len(packed) - KEPT_LINKS)
        size -= sum(map(len, packed[:first]))
        while size > KEPT_BYTES:
            size -= len(packed[first])
            first += 1
        return History(tuple(headers[first:]), tuple(packed[first:]))

    def find(self, digests: Collection[bytes]) -> int | None:
        """The place of the newest header that has one of these digests; None if there is none."""
        places = range(len(self.headers) - 1, -1, -1)
        return next((place for place in places if self.headers[place].digest in digests), None)

    def until(self, place: int) -> History:
        """The part of this history that ends with the header at a place."""
        return History(self.headers[: place + 1], self.links[:place])

    def landmarks(self) -> tuple[bytes, ...]:
        """Digests by which others can find what they have in common with us: ever fewer, the older they are."""
        last, step, places = len(self.headers) - 1, 1, [len(self.headers) - 1]
        while places[-1] > 0:
            places.append(max(0, last - step))
            step *= 2
        return tuple(self.headers[place].digest for place in places[:MAX_KNOWN])

    def common(self, other: History) -> Header | None:
        """The newest header that two histories have in common."""
        place = self.find({header.digest for header in other.headers})
        return None if place is None else self.headers[place]


def verified(ours: History | None, start: Header, data: bytes, tip: Tip, rules: Rules) -> History:
    """The history of a tip, from what somebody has shown of it. Takes a while if there are many signatures.

    Args:
        ours: What we have ourselves.
        start: Where theirs begins.
        data: The packed links from there on.
        tip: What they are to lead to.
        rules: What the run allows.

    Raises:
        ProtocolError: The links do not lead there, or something is not signed by those who may contribute, or it does
            not reach back far enough, together with what we have ourselves.
    """
    headers, links = [start], unpack_links(data, rules.max_members)
    if len(links) > KEPT_LINKS:
        raise ProtocolError(f"a history of {len(links)} revisions, which are more than anybody keeps")
    for link in links:
        _check_contributions(link, headers[-1].revision + 1, rules)  # first, as not all weights have a sum
        headers.append(headers[-1].next(link))
    if headers[-1].tip != tip:
        raise ProtocolError("a history that does not lead to the state that it was said to")
    digests = [header.digest for header in headers]
    place = None if ours is None else ours.find(frozenset(digests))
    if ours is not None and place is not None:
        begun = ours.until(place)
        news = digests.index(begun.header.digest)
    else:
        begun, news = History((start,)), 0
    found = begun.extended(links[news:])
    if not found.reaches_back:
        raise ProtocolError(f"a history of {len(links)} revisions, which does not reach back far enough")
    _check_signatures(headers[news:], links[news:])  # last, as it takes longest
    return found


def _check_contributions(link: Link, revision: int, rules: Rules) -> None:
    if not all(0 < signed.weight <= rules.max_weight for signed in link.contributions):
        raise ProtocolError(f"a history with a weight beyond the limit in revision {revision}")
    peers = {signed.peer for signed in link.contributions}
    if len(peers) < len(link.contributions):
        raise ProtocolError(f"a history in which somebody contributed to revision {revision} twice")
    if not all(map(rules.admits, peers)):
        raise ProtocolError(f"a history with contributors to revision {revision} who are not admitted to the run")


def _check_signatures(headers: Sequence[Header], links: Sequence[Link]) -> None:
    for header, link in zip(headers, links, strict=False):
        for signed in link.contributions:
            if not signed.is_valid(header.run, "", header.revision + 1, header.digest):
                raise ProtocolError(f"a history with a wrong signature in revision {header.revision + 1}")
