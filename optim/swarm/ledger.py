"""Which microbatches of a step a stage has counted, and whose sums make its mean.

A server's sum counts as a whole or not at all, and sums that count have no microbatch in common. A stage has settled a
step once such sums cover all its microbatches, and are reduced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import attrs

from protocol.identity import PeerId

Ledger: TypeAlias = Mapping[int, int]
"""How many samples a server has counted of each microbatch, by its number in the step; 0 of one that is void."""


@attrs.frozen(eq=False)
class Settlement:
    """Whose sums count, as all members of a stage find it from the same ledgers."""

    ledgers: Mapping[PeerId, Ledger]
    """Of those whose sums count."""
    total: int
    """Microbatches of the step."""

    @property
    def missing(self) -> frozenset[int]:
        """Microbatches that have to be done again."""
        return frozenset(range(self.total)).difference(*self.ledgers.values())

    @property
    def samples(self) -> int:
        """What the sums count together."""
        return sum(sum(ledger.values()) for ledger in self.ledgers.values())

    def among(self, contributors: Collection[PeerId]) -> Settlement:
        """What is left of it if only these have contributed. The stage has settled if nothing is missing then."""
        kept = {peer: ledger for peer, ledger in self.ledgers.items() if peer in contributors}
        return Settlement(kept, self.total)


def settle(ledgers: Mapping[PeerId, Ledger], total: int) -> Settlement:
    """Decides whose sums count: those that cover most first, equal ones in the order of the peers' names.

    A ledger with a number that the step does not have is passed over.
    """
    chosen: dict[PeerId, Ledger] = {}
    covered: set[int] = set()
    for peer in sorted(ledgers, key=lambda peer: (-len(ledgers[peer]), peer)):
        ledger = ledgers[peer]
        if ledger and covered.isdisjoint(ledger) and all(0 <= number < total for number in ledger):
            chosen[peer] = ledger
            covered.update(ledger)
    return Settlement(chosen, total)


@attrs.frozen(eq=False, kw_only=True)
class Settled:
    """What a stage records of a step: an event."""

    stage: int
    step: int
    ledgers: Mapping[PeerId, Ledger]
    """Of the servers whose sums are in the mean."""


def audit(records: Iterable[Settled], *, stages: int, steps: range, samples: Mapping[int, int]) -> list[str]:
    """What is wrong with the counting, a sentence for each fault; nothing if every sample was counted once.

    Args:
        records: One for each stage and step. Several that say the same, from several servers, are one.
        stages: How many the model has.
        steps: Those that were made.
        samples: How many each microbatch of a step has, by number.
    """
    found: dict[tuple[int, int], Mapping[PeerId, Ledger]] = {}
    faults = []
    for record in records:
        ledgers: Mapping[PeerId, Ledger] = {peer: dict(ledger) for peer, ledger in record.ledgers.items()}
        if found.setdefault((record.stage, record.step), ledgers) != ledgers:
            faults.append(f"stage {record.stage} has settled step {record.step} in two ways")
    for stage in range(stages):
        for step in steps:
            if (stage, step) not in found:
                faults.append(f"stage {stage} has not settled step {step}")
                continue
            faults += _differences(f"stage {stage}, step {step}", found[stage, step], samples)
    return faults


def _differences(where: str, ledgers: Mapping[PeerId, Ledger], samples: Mapping[int, int]) -> list[str]:
    counted = [(number, count) for ledger in ledgers.values() for number, count in ledger.items()]
    numbers = [number for number, _ in counted]
    faults = [
        f"{where}: microbatch {number} counted {numbers.count(number)} times"
        for number in set(numbers)
        if numbers.count(number) > 1
    ]
    faults += [f"{where}: microbatch {number} is missing" for number in samples.keys() - set(numbers)]
    faults += [f"{where}: microbatch {number} does not exist" for number in set(numbers) - samples.keys()]
    faults += [
        f"{where}: {count} of {samples[number]} samples of microbatch {number}"
        for number, count in counted
        if number in samples and count not in (0, samples[number])
    ]
    return faults
