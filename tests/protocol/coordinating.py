"""A coordinator whose clock is moved by hand, and what it has said."""

from __future__ import annotations

from protocol.candidates import Candidate
from protocol.coordinator import Coordinator, RoundTimes, Send, View
from protocol.identity import PeerId
from protocol.plan import NO_BALLOT, Plan
from protocol.round_messages import Halt

RUN = bytes(32)
PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 6)]
US, A, B, C, D = PEERS
BASE, OTHER = bytes(32), bytes([9] * 32)
TIMES = RoundTimes(grace=10, slack=2, stall=10, settle=1)


class Table:
    """A coordinator and what it has said."""

    def __init__(self, live=PEERS[:4], *, fixed=True) -> None:
        self.core = Coordinator(run=RUN, tag="", revision=1, peer=US, times=TIMES, fixed=fixed)
        self.live, self.base, self.arriving, self.patience = set(live), BASE, set(), 0.0
        self.now = 100.0
        self.log = []
        self.woken = False
        self.holdings = {}  # what members say when they are told to halt
        self.silent = set()  # members that say nothing then

    def poll(self, *, leading=True):
        view = View(
            expected=frozenset(self.live),
            arriving=frozenset(self.arriving),
            woken=self.woken,
            leading=leading,
            rank=0,
            base=self.base,
            patience=self.patience,
        )
        actions = self.core.poll(self.now, view)
        self.log += actions
        halting = {peer: halt.ballot for peer, halt in sent(actions, Halt).items() if peer not in self.silent}
        for peer, ballot in halting.items():
            self.core.halted(peer, ballot, self.holdings.get(peer, ()))
        return actions + self.poll(leading=leading) if halting else actions

    def ready(self, *peers, weight=1.0, length=4, base=BASE, tried=(), heard=NO_BALLOT, **brings):
        for peer in peers:
            self.core.ready(peer, Candidate(weight, length, base, frozenset(tried), **brings), heard)

    def wait(self, seconds):
        self.now += seconds
        return self.poll()

    def start(self, *peers) -> Plan:
        """A plan of these peers, which all have accepted."""
        self.live = set(peers)
        self.ready(*peers)
        self.poll()
        self.accept(*peers)
        return self.plan

    def accept(self, *peers):
        for peer in peers:
            self.core.accepted(peer, self.plan.ballot)

    @property
    def plan(self) -> Plan:
        assert self.core.plan is not None
        return self.core.plan

    def complete(self, *peers, plan=None):
        plan = plan or self.plan
        for peer in peers:
            self.core.completed(peer, plan.ballot, plan.id)


def sent(actions, kind):
    return {
        action.peer: action.message for action in actions if isinstance(action, Send) and type(action.message) is kind
    }
