"""What a demo showed: pure functions from the recorded events of its daemons to a verdict.

Rounds are timed from commit to commit, each commit being that of the last survivor: that is what a user waits for, and
it counts all that a death can cost, be it detection, a repeated reduce or inner steps done again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence

import attrs

from peer.console import size
from peer.recording import Recording

FP32_BYTES = 4


@attrs.frozen(kw_only=True)
class Scenario:
    """What the demo did to its daemons. Daemons are named as their recordings are; times are Unix seconds.

    Args:
        rounds: Rounds that the run was to have.
        inner_steps: Inner steps per round.
        killed: The daemon that got SIGKILL, if it came to that.
        killed_round: The round whose reduce it was about to take part in.
        killed_at: When.
        joined: The daemon that was started after that.
        joined_at: When.
        seconds: How long everything took.
        failure: Why the demo ended early, or None.
    """

    rounds: int
    inner_steps: int
    killed: str | None = None
    killed_round: int | None = None
    killed_at: float | None = None
    joined: str | None = None
    joined_at: float | None = None
    seconds: float = 0.0
    failure: str | None = None


@attrs.frozen(kw_only=True)
class Death:
    """What killing one peer cost.

    Args:
        peer: Id of the killed peer.
        round: The round during which it died.
        in_reduce: True if it died in the reduce: it had started that round and never committed it, and the survivors
            had to try again.
        attempts: Attempts that the survivors needed.
        seconds: How long that round took; None if it was never committed.
        usual: How long the median of the other rounds took; None if there was none to compare with.
    """

    peer: str
    round: int
    in_reduce: bool
    attempts: int
    seconds: float | None
    usual: float | None

    @property
    def recovery(self) -> float | None:
        """Seconds lost: how much longer than the median round the round of the death took."""
        return None if self.seconds is None or self.usual is None else self.seconds - self.usual


@attrs.frozen(kw_only=True)
class Verdict:
    """The outcome of a demo.

    Args:
        rounds: Committed rounds.
        digests: Digest of the last revision of every peer alive at the end, by peer id.
        losses: Validation loss in nats per byte by round; round 0 is the untrained model.
        bytes_sent: Bytes sent per peer alive at the end, mean.
        bytes_data_parallel: What one all-reduce of the gradients per inner step would have sent in the same rounds.
        death: The killed peer and what its death cost, if one was killed.
        joined: Id of the peer that joined later, if one did.
        joined_rounds: Rounds that it took part in.
        round_seconds: How long each round took, where that is known.
        seconds: How long the demo took.
        problems: Why the demo failed, for people; empty if it passed.
    """

    rounds: int
    digests: Mapping[str, str]
    losses: Mapping[int, float]
    bytes_sent: float
    bytes_data_parallel: float
    death: Death | None
    joined: str | None
    joined_rounds: int
    round_seconds: Mapping[int, float]
    seconds: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if all digests agree, the validation loss fell, and everything that was to happen did."""
        return not self.problems

    @property
    def loss_first(self) -> float | None:
        """Validation loss before training."""
        return self.losses[min(self.losses)] if self.losses else None

    @property
    def loss_last(self) -> float | None:
        """Validation loss after the last round that was validated."""
        return self.losses[max(self.losses)] if self.losses else None

    def to_json(self) -> str:
        """The verdict as one JSON object on one line."""
        death = self.death
        return json.dumps(
            {
                "passed": self.passed,
                "rounds": self.rounds,
                "digests": dict(self.digests),
                "loss_first": self.loss_first,
                "loss_last": self.loss_last,
                "bytes_sent": round(self.bytes_sent),
                "bytes_data_parallel": round(self.bytes_data_parallel),
                "killed": [] if death is None else [death.peer],
                "killed_round": None if death is None else death.round,
                "killed_in_reduce": death is not None and death.in_reduce,
                "joined": [] if self.joined is None else [self.joined],
                "joined_rounds": self.joined_rounds,
                "recovery_seconds": None if death is None else _rounded(death.recovery),
                "round_seconds": [_rounded(self.round_seconds[r]) for r in sorted(self.round_seconds)],
                "seconds": _rounded(self.seconds),
                "problems": list(self.problems),
            },
            allow_nan=False,
        )

    def to_text(self) -> str:
        """The verdict in a few lines for people."""
        rows = [
            ("digests", self._digests()),
            ("loss", self._loss()),
            ("bytes sent", self._bytes()),
            ("death", self._death()),
            ("join", self._join()),
        ]
        head = f"{'PASSED' if self.passed else 'FAILED'}: {self.rounds} rounds in {self.seconds:.0f} s"
        problems = [f"  {'problem':<11} {problem}" for problem in self.problems]
        return "\n".join([head, *(f"  {name:<11} {text}" for name, text in rows), *problems])

    def _digests(self) -> str:
        different = set(self.digests.values())
        if len(different) == 1:
            return f"{len(self.digests)} peers alive at the end, all with {min(different)[:16]}…"
        each = ", ".join(f"{peer[:8]} {digest[:16]}…" for peer, digest in self.digests.items())
        return f"NOT EQUAL: {each}" if different else "none"

    def _loss(self) -> str:
        first, last = self.loss_first, self.loss_last
        if first is None or last is None:
            return "never validated"
        return f"{first:.3f} → {last:.3f} nats per byte of validation text ({last / first - 1:+.0%})"

    def _bytes(self) -> str:
        sent, data_parallel = size(self.bytes_sent), size(self.bytes_data_parallel)
        text = f"{sent} per peer; data-parallel would have sent {data_parallel}"
        ratio = self.bytes_data_parallel / self.bytes_sent if self.bytes_sent else 0.0
        return f"{text} ({ratio:.1f} times as much)" if ratio else text

    def _death(self) -> str:
        death = self.death
        if death is None:
            return "no peer was killed"
        where = "in mid-reduce" if death.in_reduce else "outside of a reduce"
        text = f"{death.peer[:8]} killed {where} of round {death.round}; {death.attempts} attempts"
        if death.recovery is None:
            return text
        lost = f"{death.recovery:.1f} s lost" if death.recovery > 0 else "no time lost"
        return f"{text}, {lost} ({death.seconds:.1f} s, the median round {death.usual:.1f} s)"

    def _join(self) -> str:
        if self.joined is None:
            return "no peer joined later"
        return f"{self.joined[:8]} joined later and took part in {self.joined_rounds} rounds"


def judge(recordings: Sequence[Recording], scenario: Scenario) -> Verdict:
    """Weighs the recorded events of all daemons.

    Raises:
        EventError: An event lacks a field.
    """
    alive = [recording for recording in recordings if recording.name != scenario.killed]
    survivors = [recording for recording in alive if recording.name != scenario.joined]
    by_name = {recording.name: recording for recording in recordings}
    joined = by_name.get(scenario.joined or "")
    round_seconds = _round_seconds(survivors)
    verdict = Verdict(
        rounds=max((recording.revision or 0 for recording in alive), default=0),
        digests={r.peer: r.digest for r in alive if r.peer is not None and r.digest is not None},
        losses=validation_losses(alive),
        bytes_sent=_mean([recording.bytes_sent for recording in alive]),
        bytes_data_parallel=_mean([_data_parallel(recording, scenario.inner_steps) for recording in alive]),
        death=_death(by_name.get(scenario.killed or ""), survivors, scenario.killed_round, round_seconds),
        joined=joined.peer if joined else None,
        joined_rounds=len(joined.committed) if joined else 0,
        round_seconds=round_seconds,
        seconds=scenario.seconds,
        problems=(),
    )
    return attrs.evolve(verdict, problems=tuple(_problems(verdict, alive, scenario)))


def _problems(verdict: Verdict, alive: Sequence[Recording], scenario: Scenario) -> list[str]:
    if scenario.failure is not None:
        return [scenario.failure]  # all else follows from it
    problems = [f"{recording.name} never had a revision" for recording in alive if recording.revision is None]
    revisions = {recording.name: recording.revision for recording in alive if recording.revision is not None}
    if len(set(revisions.values())) > 1:
        each = ", ".join(f"{name} at {revision}" for name, revision in revisions.items())
        problems.append(f"the peers ended at different revisions: {each}")
    if len(set(verdict.digests.values())) > 1:
        problems.append("the digests of the peers alive at the end are not equal")
    if verdict.rounds < scenario.rounds:
        problems.append(f"only {verdict.rounds} of {scenario.rounds} rounds were committed")
    first, last = verdict.loss_first, verdict.loss_last
    if first is None or last is None or len(verdict.losses) < 2:
        problems.append("the validation loss was not measured before and after training")
    elif not last < first:
        problems.append(f"the validation loss did not fall: {first:.3f} → {last:.3f}")
    if verdict.death is None:
        problems.append("no peer was killed")
    if verdict.joined is None:
        problems.append("no peer joined later")
    return problems


def validation_losses(recordings: Sequence[Recording]) -> dict[int, float]:
    """Validation loss by round: the median over the peers that measured a finite one."""
    measured: dict[int, list[float]] = {}
    for recording in recordings:
        for event in recording.of("validation"):
            if math.isfinite(loss := event.number("loss")):
                measured.setdefault(event.integer("round"), []).append(loss)
    return {round_: statistics.median(measured[round_]) for round_ in sorted(measured)}


def _round_seconds(survivors: Sequence[Recording]) -> dict[int, float]:
    """Seconds from the commit of the round before to the commit of each, by the last survivor's clock."""
    ends: dict[int, float] = {}
    for recording in survivors:
        for round_, event in recording.committed.items():
            ends[round_] = max(ends.get(round_, event.t), event.t)
    return {round_: ends[round_] - ends[round_ - 1] for round_ in sorted(ends) if round_ - 1 in ends}


def _data_parallel(recording: Recording, inner_steps: int) -> float:
    """Bytes that a ring all-reduce of fp32 gradients at every inner step would have sent in the committed rounds."""
    started = recording.last("started")
    if started is None or not recording.committed:
        return 0.0
    per_reduce = FP32_BYTES * started.number("parameters")
    rounds = [len(event.names("members")) for event in recording.committed.values()]
    return sum(inner_steps * per_reduce * 2 * (members - 1) / members for members in rounds if members)


def _death(
    victim: Recording | None,
    survivors: Sequence[Recording],
    killed_round: int | None,
    round_seconds: Mapping[int, float],
) -> Death | None:
    if victim is None or victim.peer is None or killed_round is None:
        return None
    late = killed_round in victim.committed  # the kill came after its last reduce: it is the next round that suffers
    round_ = killed_round + 1 if late else killed_round
    attempts = max((_attempts(recording, round_) for recording in survivors), default=0)
    return Death(
        peer=victim.peer,
        round=round_,
        in_reduce=not late and attempts > 1,
        attempts=attempts,
        seconds=round_seconds.get(round_),
        usual=_median([seconds for r, seconds in round_seconds.items() if r != round_]),
    )


def _attempts(recording: Recording, round_: int) -> int:
    """How many attempts a peer saw at a round."""
    failed = [event for event in recording.of("round_failed") if event.integer("round") == round_]
    others = [event for kind in ("round_started", "round_committed") for event in recording.of(kind)]
    numbers = {event.integer("attempt") for event in others if event.integer("round") == round_}
    return max(len(numbers), len(failed) + 1) if numbers else len(failed)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
