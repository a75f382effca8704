"""A swarm of stage servers and trainers on simulated time, with faults at random, from one seed.

Servers and trainers are the real ones. The network between them is a queue of events: messages take a random time, are
lost with those to whom they go, and answers may be lost alone. Everything that a daemon would do around the cores is
here in its simplest form: who is there, settlements, and the step once all stages have settled.
"""

import heapq
import itertools
import random

import attrs
import torch

from optim.swarm import cut
from optim.swarm.arrivals import Bounds
from optim.swarm.ledger import Settled, settle
from optim.swarm.local import open_numbers
from optim.swarm.messages import Withdraw
from optim.swarm.server import clipping
from optim.swarm.state import whole_state
from optim.swarm.trainer import PipelineTrainer, Settings
from protocol.errors import Overloaded, RequestRefused
from tests.optim.swarm.toys import adamw, peer_id, sample, serve

ONE_BY_ONE = Bounds(batch=1)


@attrs.frozen(kw_only=True)
class Faults:
    """Probabilities, each for one thing that happens."""

    death_in_forward: float = 0.0
    death_in_backward: float = 0.0
    death_in_settlement: float = 0.0
    lost_answer: float = 0.0
    stall: float = 0.0
    cut_off: float = 0.0
    """That a server that stalls does not hear what it is asked to withdraw, either."""
    trainer_death: float = 0.0
    newcomer: float = 0.5
    """That a server that has died is replaced in the same stage after some time."""


NO_FAULTS = Faults()


@attrs.define(eq=False)
class Server:
    peer: object
    stage: int
    core: object
    alive: bool = True
    stalled_until: float = 0.0
    deaf_until: float = 0.0


@attrs.define(eq=False)
class Trainer:
    core: PipelineTrainer
    alive: bool = True
    wake: float | None = None


class World:
    """Makes `steps` steps of a model in stages.

    Args:
        make_chain: Makes the model, with the same values each time.
        batch: Tokens and targets of the microbatch (step, number).
        servers: How many each stage has.
        microbatches: Of a step, or of a local step.
        local_steps: If steps are rounds of local steps, how these go.
        clip: The largest norm of the model's gradient.
    """

    def __init__(
        self,
        make_chain,
        batch,
        *,
        servers,
        trainers=1,
        steps=2,
        microbatches=8,
        seed=0,
        faults=NO_FAULTS,
        encoding="fp32",
        in_flight=4,
        bounds=ONE_BY_ONE,
        local_steps=None,
        clip=None,
        optimizer=adamw,
    ):
        self.clip, self.optimizer = clip, optimizer
        self.now, self.random, self.faults = 0.0, random.Random(seed), faults
        self.batch, self.steps, self.local_steps, self.size = batch, steps, local_steps, microbatches
        self.microbatches = microbatches * (1 if local_steps is None else local_steps.count)
        self.records, self.losses, self.bytes, self.deaths, self.failed_settlements = [], {}, 0, 0, 0
        self.step, self.begun, self.most_waiting, self._open = 0, 0, 0, 0
        self._events, self._order, self._names = [], itertools.count(), itertools.count()
        self._encoding, self._bounds, self._make_chain = encoding, bounds, make_chain
        self._settled, self._settling, self._progress = set(), set(), {}
        self.stages = len(servers)
        self.servers = [
            Server(peer_id(next(self._names)), index, self._serve(stage))
            for index, count in enumerate(servers)
            for stage in [cut(make_chain(), self.stages)[index] for _ in range(count)]
        ]
        settings = Settings(in_flight=in_flight, patience=10.0, grace=2.0, same_path=local_steps is not None)
        self.trainers = [
            Trainer(PipelineTrainer(self.stages, random.Random(seed + index), settings)) for index in range(trainers)
        ]
        for trainer in self.trainers:
            for server in self.servers:
                trainer.core.routers[server.stage].add(server.peer)

    def run(self, limit=20_000.0):
        self._begin()
        self.after(5.0, self._look)
        while self.begun < self.steps:
            assert self._events, "nothing happens any more"
            self.now, _, event = heapq.heappop(self._events)
            assert self.now < limit, f"step {self.step} does not end"
            event()
        return self

    def members(self, stage):
        return [server for server in self.servers if server.alive and server.stage == stage]

    def state(self):
        """The whole model's, from the stages; all servers of a stage have the same bits."""
        for stage in range(self.stages):
            first, *others = [server.core.snapshot() for server in self.members(stage)]
            for other in others:
                assert all(torch.equal(values, other.model[name]) for name, values in first.model.items())
                shared, others_shared = (each.outer if self.local_steps else each.inner for each in (first, other))
                assert all(
                    torch.equal(values, others_shared[kind][name])
                    for kind, named in shared.items()
                    for name, values in named.items()
                )
        return whole_state(self.members(stage)[0].core.snapshot() for stage in range(self.stages))

    def go_on(self, state):
        """From the state of a whole model, before `run`."""
        self.step = self.begun = state.step
        for server in self.servers:
            server.core.restore(state)

    def kill(self, server):
        """Unless it is the last of its stage: then nothing could go on."""
        if server.alive and len(self.members(server.stage)) > 1:
            server.alive = False
            self.deaths += 1
            for trainer in self.trainers:
                self.after(self._delay(), lambda trainer=trainer: self._lost(trainer, server))
            if self._chance(self.faults.newcomer):
                self.after(self.random.uniform(1, 30), lambda: self.join(server.stage))

    def join(self, stage):
        """A newcomer comes to a stage, with the state of a member."""
        part = cut(self._make_chain(), self.stages)[stage]
        core = self._serve(part)
        core.restore(self.random.choice(self.members(stage)).core.snapshot())
        server = Server(peer_id(next(self._names)), stage, core)
        self.servers.append(server)
        for trainer in self.trainers:
            trainer.core.routers[stage].add(server.peer)
            self._poll(trainer)

    # What happens around the cores

    def _serve(self, stage):
        return serve(
            stage,
            self.microbatches,
            self.optimizer,
            encoding=self._encoding,
            bounds=self._bounds,
            local_steps=self.local_steps,
        )

    def sample(self, number):
        """The contents of a microbatch of this step."""
        local, place = divmod(number, self.size)
        return sample(self.batch(self.step * self.microbatches // self.size + local, place))

    def _open_more(self):
        """Lets trainers go on to the next local step, once all stages have counted those before."""
        ledgers = [[len(server.core.ledger) for server in self.members(stage)] for stage in range(self.stages)]
        counted = [self.microbatches if stage in self._settled else sum(each) for stage, each in enumerate(ledgers)]
        now, before = open_numbers(counted, self.size, self.microbatches), self._open
        if now > before:
            self._open = now
            self._lead(range(before, now))

    def _lead(self, numbers):
        alive = [trainer for trainer in self.trainers if trainer.alive]
        for index, trainer in enumerate(alive):
            for number in numbers[index :: len(alive)]:
                trainer.core.add(number, self.sample(number), set(range(self.stages)) - self._settled)
            self._poll(trainer)

    def _begin(self):
        for trainer in self.trainers:
            self.losses |= {(self.step - 1, number): loss for number, loss in trainer.core.losses.items()}
        self.begun = self.step
        if self.step == self.steps:
            return
        alive = [trainer for trainer in self.trainers if trainer.alive]
        for trainer in alive:
            trainer.core.begin(self.step, {})
        self._open = self.size
        self._lead(range(self.size))
        if len(alive) > 1 and self._chance(self.faults.trainer_death):
            self.after(self.random.uniform(0, 10), lambda: setattr(alive[-1], "alive", False))

    def _poll(self, trainer):
        if not trainer.alive or self.step >= self.steps:
            return
        for send in trainer.core.poll(self.now):
            self.after(self._delay(), lambda send=send: self._arrive(trainer, trainer.core.step, send))
        wake = trainer.core.wake
        if wake is not None and wake != trainer.wake:
            trainer.wake = wake
            self.after(max(wake - self.now, 0.0), lambda: self._poll(trainer))

    def _arrive(self, trainer, step, send):
        (server,) = (server for server in self.servers if server.peer == send.peer)
        if not server.alive:
            self._answer(trainer, step, send.call, None)
            return
        if isinstance(send.message, Withdraw):
            if self.now >= server.deaf_until:
                self._answer(trainer, step, send.call, server.core.withdraw(send.message))
            return
        payloads = (send.message.inputs, send.message.gradient)
        self.bytes += sum(len(each.data) for each in payloads if each is not None and each.encoding != "tokens")
        try:
            server.core.submit((trainer, step, send.call), send.message, self.now)
        except (RequestRefused, Overloaded):
            self._answer(trainer, step, send.call, None)
        self.most_waiting = max(self.most_waiting, len(server.core.arrivals))
        self._work(server)

    def _answer(self, trainer, step, call, answer):
        def arrive():
            if trainer.alive and trainer.core.step == step:
                if answer is None:
                    trainer.core.failed(call, self.now)
                else:
                    trainer.core.answered(call, answer, self.now)
                self._poll(trainer)

        if answer is not None and getattr(answer, "values", None) is not None:
            self.bytes += len(answer.values.data)
        self.after(self._delay(), arrive)

    def _work(self, server):
        if not server.alive or server.core.busy or server.stage in self._settling or self.now < server.stalled_until:
            return
        if self._chance(self.faults.stall):
            server.stalled_until = self.now + self.random.uniform(5, 30)
            if self._chance(self.faults.cut_off):
                server.deaf_until = server.stalled_until
            self.after(server.stalled_until - self.now + 1e-3, lambda: self._work(server))
            return
        server.core.arrivals.expired(self.now)
        batch = server.core.take(self.now)
        if batch is not None:
            answers = server.core.compute(batch)
            self.after(self.random.uniform(0.1, 0.5), lambda: self._finish(server, batch, answers))

    def _finish(self, server, batch, answers):
        faults, kind = self.faults, batch.requests[0].kind
        if self._chance(faults.death_in_forward if kind == "forward" else faults.death_in_backward):
            self.kill(server)
        if not server.alive:
            return
        for (trainer, step, call), answer in server.core.finish(batch, answers):
            if not self._chance(faults.lost_answer):
                self._answer(trainer, step, call, answer)
        self._open_more()
        self._settle_if_due(server.stage)
        self._work(server)

    def _lost(self, trainer, server):
        trainer.core.lost(server.peer)
        self._poll(trainer)

    def _look(self):
        """A stage in which nothing is counted any more tries to settle, to find out what it lacks."""
        for stage in set(range(self.stages)) - self._settled:
            ledgers = [(server.peer, server.core.ledger) for server in self.members(stage)]
            if self._progress.get(stage) == ledgers:
                self._settling.add(stage)
                self._settle_if_due(stage)
            self._progress[stage] = ledgers
        self.after(40.0, self._look)

    def _settle_if_due(self, stage):
        members = self.members(stage)
        if stage in self._settled:
            return
        if len(set().union(*(server.core.ledger for server in members))) == self.microbatches:
            self._settling.add(stage)
        if stage in self._settling and not any(server.core.busy for server in members):
            self._settle(stage, members)

    def _settle(self, stage, members):
        settlement = settle({server.peer: server.core.freeze() for server in members}, self.microbatches)
        if self._chance(self.faults.death_in_settlement):
            self.kill(self.random.choice(members))
        alive = self.members(stage)
        result = settlement.among({server.peer for server in alive})
        self._settling.discard(stage)
        if result.missing:
            self.failed_settlements += 1
            attempt = max(server.core.attempt for server in alive)
            for server in alive:
                server.core.thaw(attempt=attempt + 1, keep=server.peer in result.ledgers)
            step = self.step
            self.after(self._delay(), lambda: self._announce(stage, step, attempt, result.missing))
        else:
            shares = [server.core.contribution() for server in alive if server.peer in result.ledgers]
            mean = sum(share.values * (share.weight / result.samples) for share in shares)
            for server in alive:
                server.core.settled(mean.clone())
            self.records.append(Settled(stage=stage, step=self.step, ledgers=result.ledgers))
            self._settled.add(stage)
            for trainer in self.trainers:
                trainer.core.settled(stage)
        if len(self._settled) == self.stages:
            self._advance()
        else:
            for server in self.servers:
                self._work(server)

    def _announce(self, stage, step, attempt, missing):
        alive = [trainer for trainer in self.trainers if trainer.alive]
        if step != self.step:
            return
        for number in missing & set(range(self._open)):
            if not any(number in trainer.core.numbers for trainer in alive):
                alive[number % len(alive)].core.add(number, self.sample(number), [stage])
        for trainer in alive:
            trainer.core.missing(stage, attempt, missing)
            self._poll(trainer)

    def _advance(self):
        tied = {stage: self.members(stage)[0].core.tied_gradients() for stage in range(self.stages)}
        tied = {stage: gradients for stage, gradients in tied.items() if gradients}
        scale = 1.0
        if self.clip is not None:
            cores = [self.members(stage)[0].core for stage in range(self.stages)]
            scale = clipping([core.squares({} if stage else tied) for stage, core in enumerate(cores)], self.clip)
        for server in self.servers:
            if server.alive:
                server.core.advance(tied, scale)
        self.step += 1
        self._settled, self._settling, self._progress = set(), set(), {}
        self.after(1.0, self._begin)  # until then trainers are behind, and answers are on their way

    def after(self, delay, event):
        """Lets something happen."""
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def _delay(self):
        return self.random.uniform(0.01, 0.3)

    def _chance(self, probability):
        return probability > 0 and self.random.random() < probability
