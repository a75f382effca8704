"""`shoal doctor`: checks, step by step, whether this machine can take part, and says what to do where it cannot.

Every step is a small function with a time limit of its own; all together end within `LIMIT` seconds, whatever does not
answer. The doctor meets others under an identity that it makes for the occasion, so that a daemon of the same home,
which may be running, is left alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import attrs
import trio

from peer.contact import Contact, parse_contact
from peer.text import printable
from peer.ticket import PREFIX, Ticket
from protocol.endpoint import Endpoint
from protocol.identity import Identity
from protocol.tcp import TcpTransport
from protocol.transport import Address

LIMIT: Final = 28.0
"""Seconds for everything."""

REACHING: Final = frozenset(("dial", "handshake", "version"))
"""The steps that fail if nobody is reached."""

Verdict = Literal["ok", "warn", "fail"]


@attrs.frozen
class Finding:
    """What one step found out.

    Attributes:
        step: Its name.
        verdict: "ok"; "warn" for what makes taking part worse; "fail" for what makes it impossible.
        message: What is so.
        advice: What to do about it.
    """

    step: str
    verdict: Verdict
    message: str
    advice: str | None = None


Findings = Sequence[Finding]
Tell = Callable[[Finding], None]


@attrs.frozen(kw_only=True)
class Patient:
    """What is examined.

    Attributes:
        home: Where the peer keeps its state; it need not exist.
        listen: Where the peer is to listen.
        contacts: Whom it is to reach, maybe nobody.
        run: Which run they are to know; None: any, or none.
        swarm_key: The key of a private run.
        map_port: Whether to ask the router for a port.
    """

    home: Path
    listen: Address
    contacts: tuple[Contact, ...] = ()
    run: bytes | None = None
    swarm_key: bytes | None = attrs.field(default=None, repr=False)
    map_port: bool = True

    @classmethod
    def of(cls, home: Path, listen: Address, target: str | None, *, map_port: bool, now: float) -> Patient:
        """The patient of a command line.

        Args:
            home, listen, map_port: As above.
            target: A ticket, PEERID@HOST:PORT, or None.
            now: Unix seconds, for the ticket's expiry.

        Raises:
            TicketError, AddressError: The target is neither.
        """
        if target is None:
            return cls(home=home, listen=listen, map_port=map_port)
        if "@" in target and not target.strip().lower().startswith(PREFIX):
            return cls(home=home, listen=listen, map_port=map_port, contacts=(parse_contact(target),))
        ticket = Ticket.parse(target, now)
        return cls(
            home=home,
            listen=listen,
            contacts=ticket.bootstrap,
            run=ticket.run_id,
            swarm_key=ticket.swarm_key,
            map_port=map_port,
        )


class Examination:
    """Runs steps within their limits and that of the whole, and tells what they find."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._deadline = trio.current_time() + LIMIT

    async def step(
        self,
        name: str,
        limit: float,
        check: Callable[[], Awaitable[Findings]],
        advice: str,
        *,
        late: Verdict = "warn",
    ) -> None:
        """One step.

        Args:
            name: What it is called if it does not end in time.
            limit: Seconds.
            check: The step.
            advice: What to do if it does not end in time.
            late: The verdict then.
        """
        left = self._deadline - trio.current_time()
        message = f"not known within {limit:g} s" if left > 0 else "not known: the steps before took all the time"
        findings: Findings = [Finding(name, late, message, advice)]
        with trio.move_on_at(min(trio.current_time() + limit, self._deadline)):
            findings = await check()
        for finding in findings:
            self._tell(finding)


class Later:
    """A check that runs in the background until its step is due.

    Args:
        check: The check.
    """

    def __init__(self, check: Callable[[], Awaitable[Findings]]) -> None:
        self._check = check
        self._done = trio.Event()
        self._findings: Findings = ()

    async def run(self) -> None:
        """Does it."""
        self._findings = await self._check()
        self._done.set()

    async def result(self) -> Findings:
        """What it finds, as soon as it is done. What is known is told, even if no time is left."""
        if not self._done.is_set():
            await self._done.wait()
        return self._findings


async def examine(patient: Patient, tell: Tell) -> None:
    """Examines everything, and tells each finding as soon as it is there."""
    from peer import doctor_machine, doctor_network

    examination = Examination(tell)
    identity = Identity.generate()
    endpoint = Endpoint(identity, TcpTransport(), psk=patient.swarm_key, rng=random.Random())
    accelerator = Later(doctor_machine.accelerator)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accelerator.run)
        await doctor_machine.examine(patient, examination)
        await doctor_network.Network(patient, identity, endpoint, examination).examine(nursery)
        await examination.step("accelerator", 12.0, accelerator.result, "try again when the machine has less to do")
        nursery.cancel_scope.cancel()


class Report:
    """Prints findings as they come, or all of them as JSON at the end.

    Args:
        as_json: Which.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """One more finding."""
        self._findings.append(finding)
        if not self._as_json:
            print(f"{finding.verdict:5} {finding.step:12} {printable(finding.message, 500)}", flush=True)
            if finding.advice is not None and finding.verdict != "ok":
                print(f"{'':5} {'':12} -> {printable(finding.advice, 500)}", flush=True)

    def finish(self) -> int:
        """Prints the conclusion; returns the exit code: 0 this machine can take part, 1 it cannot, 3 nobody answers."""
        failed = [finding.step for finding in self._findings if finding.verdict == "fail"]
        code = 3 if not REACHING.isdisjoint(failed) else 1 if failed else 0
        if self._as_json:
            print(json.dumps({"ok": not failed, "steps": [attrs.asdict(finding) for finding in self._findings]}))
        elif code == 3:
            print("nobody of those asked can be reached")
        else:
            print(f"this machine cannot take part: {', '.join(dict.fromkeys(failed))}" if failed else "can take part")
        return code
