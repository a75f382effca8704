"""The iterative lookup of the peers closest to a point, without any network.

The driver asks whom `next_queries` names, and reports back with `answered` or `failed`, until `done`. At most `alpha`
questions are under way, not counting those that the driver called `slow`: one silent peer does not hold up the rest.
The lookup is over when the `k` closest candidates that have not failed have all answered.

What others say is not to be trusted, so:

- an answer counts for at most `k` contacts, and only if it was asked for;
- of one network only `per_network` candidates may be among the `k` closest (private networks are not counted);
- a peer that keeps naming others who do not answer is believed no longer: each name that fails counts against those
  who gave it, each that answers counts for them, and at `distrust` the names that only such peers vouch for are
  dropped. So a liar costs at most a few timeouts;
- at most `max_queries` are asked and `max_candidates` remembered.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator

import attrs

from dht.ids import MAX_ADDRESSES, Contact, distance
from protocol.identity import PeerId


@attrs.frozen
class LookupSettings:
    """The bounds of a lookup."""

    k: int = 20
    alpha: int = 3
    per_network: int = 2
    distrust: int = 6
    max_queries: int = 128
    max_candidates: int = 256


class _State(enum.Enum):
    NEW = enum.auto()
    ASKED = enum.auto()
    SLOW = enum.auto()  # asked, and no longer counted among `alpha`
    ANSWERED = enum.auto()
    FAILED = enum.auto()


_PENDING = frozenset({_State.ASKED, _State.SLOW})


@attrs.define
class _Candidate:
    contact: Contact
    distance: int
    state: _State = _State.NEW
    vouchers: set[PeerId] = attrs.field(factory=set)  # who named it; nobody for those we knew ourselves
    known: bool = False  # whether we knew it ourselves


class Lookup:
    """One search for the peers closest to `target`.

    Args:
        target: The point, 32 bytes.
        own: Ourselves, who is never a candidate.
        seeds: The contacts that we know ourselves.
        settings: Bounds.
    """

    def __init__(
        self, target: bytes, own: PeerId, seeds: Iterable[Contact], settings: LookupSettings | None = None
    ) -> None:
        self._target = target
        self._own = own
        self._settings = settings or LookupSettings()
        self._candidates: dict[PeerId, _Candidate] = {}
        self._strikes: Counter[PeerId] = Counter()
        self._asked = 0
        self._in_flight = 0
        for contact in seeds:
            self._add(contact, None)

    def next_queries(self) -> list[Contact]:
        """Whom to ask now; they count as asked from here on."""
        queries: list[Contact] = []
        for candidate in self._window():
            if self._in_flight >= self._settings.alpha or self._asked >= self._settings.max_queries:
                break
            if candidate.state is _State.NEW:
                candidate.state = _State.ASKED
                self._in_flight += 1
                self._asked += 1
                queries.append(candidate.contact)
        return queries

    def answered(self, peer: PeerId, contacts: Iterable[Contact]) -> None:
        """A peer that was asked has named the contacts that are closest to the target as far as it knows."""
        candidate = self._settle(peer, _State.ANSWERED)
        if candidate is None:
            return
        for voucher in candidate.vouchers:
            self._strikes[voucher] -= 1
        if self._distrusted(peer):
            return
        for contact, _ in zip(contacts, range(self._settings.k), strict=False):
            self._add(contact, peer)
        self._prune()

    def failed(self, peer: PeerId) -> None:
        """A peer that was asked did not answer, or answered nonsense."""
        candidate = self._settle(peer, _State.FAILED)
        if candidate is None:
            return
        for voucher in candidate.vouchers:
            self._strikes[voucher] += 1
        self._prune()

    def slow(self, peer: PeerId) -> None:
        """A peer that was asked takes its time. Its answer still counts, but somebody else may be asked meanwhile."""
        candidate = self._candidates.get(peer)
        if candidate is not None and candidate.state is _State.ASKED:
            candidate.state = _State.SLOW
            self._in_flight -= 1

    @property
    def done(self) -> bool:
        """Whether there is nothing left to ask and nothing worth waiting for."""
        states = {candidate.state for candidate in self._window()}
        if states & _PENDING:
            return False
        return _State.NEW not in states or (self._asked >= self._settings.max_queries and not self._in_flight)

    @property
    def result(self) -> list[Contact]:
        """The closest peers that have answered so far, closest first, at most `k`."""
        answered = (candidate for candidate in self._nearest() if candidate.state is _State.ANSWERED)
        return [candidate.contact for candidate in self._diverse(answered)]

    def _settle(self, peer: PeerId, state: _State) -> _Candidate | None:
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.state not in _PENDING:
            return None
        self._in_flight -= candidate.state is _State.ASKED
        candidate.state = state
        return candidate

    def _add(self, contact: Contact, voucher: PeerId | None) -> None:
        if contact.peer == self._own or not contact.addresses:
            return
        candidate = self._candidates.get(contact.peer)
        if candidate is None:
            candidate = _Candidate(contact, distance(contact.peer, self._target))
            self._candidates[contact.peer] = candidate
        elif candidate.state is _State.NEW:
            # Whoever names a wrong address first must not hide the right one.
            addresses = dict.fromkeys(candidate.contact.addresses + contact.addresses)
            candidate.contact = Contact(contact.peer, tuple(addresses)[:MAX_ADDRESSES])
        if voucher is None:
            candidate.known = True
        else:
            candidate.vouchers.add(voucher)

    def _distrusted(self, peer: PeerId) -> bool:
        return self._strikes[peer] >= self._settings.distrust

    def _prune(self) -> None:
        """Drop candidates that only distrusted peers vouch for, and the farthest of too many."""
        kept = 0
        for candidate in self._nearest():
            trusted = candidate.known or not all(map(self._distrusted, candidate.vouchers))
            if candidate.state is _State.NEW and (not trusted or kept >= self._settings.max_candidates):
                del self._candidates[candidate.contact.peer]
            else:
                kept += 1

    def _nearest(self) -> list[_Candidate]:
        return sorted(self._candidates.values(), key=lambda candidate: candidate.distance)

    def _window(self) -> list[_Candidate]:
        """The `k` closest candidates that have not failed."""
        return list(self._diverse(c for c in self._nearest() if c.state is not _State.FAILED))

    def _diverse(self, candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
        """The first `k`, leaving out those of networks that have their share already."""
        networks: Counter[str] = Counter()
        taken = 0
        for candidate in candidates:
            groups = candidate.contact.groups
            if any(networks[group] >= self._settings.per_network for group in groups):
                continue
            networks.update(groups)
            yield candidate
            taken += 1
            if taken == self._settings.k:
                return
