"""The daemon: puts a node together from its configuration and runs it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
import trio

from dht import DHT
from optim.feedback import Forget
from optim.policies import FixedSteps
from optim.recipe import Recipe
from peer import checkpoint
from peer.algorithm import PIPELINE, window_of
from peer.bootstrap import why_unreachable
from peer.chain import Tip
from peer.checkpoint import Checkpoint
from peer.console import size
from peer.contact import Contact
from peer.data import STDLIB, Corpus
from peer.events import EventLog
from peer.failure import first_cause
from peer.farewell import Farewell
from peer.finding import find_manifest, tell_manifest
from peer.history import Rules
from peer.home import Home, HomeError, write_atomically
from peer.keys import RunKeys
from peer.manifest import Manifest, kept_manifest
from peer.membership import NEAR, Membership
from peer.node import Compute, Node, in_worker_thread
from peer.partial import Partial
from peer.pipeline.ending import HANDOVER
from peer.pipeline.files import cut_checkpoint
from peer.pipeline.messages import Standing
from peer.pipeline.run import make_node, make_pipeline, memory_of, parameters_of
from peer.probe import Prober
from peer.reach import (
    UNSPECIFIED,
    Reach,
    book_entries,
    outward_host,
    read_book,
    start_listening,
    tell_paths,
    write_book,
)
from peer.rotation import open_keyring
from peer.schedule import Schedule
from peer.settings import Settings
from peer.status import member_status
from peer.sync import Donor
from peer.ticket import MAX_BOOTSTRAP, Ticket
from peer.trainer import Trainer, default_threads
from protocol.coordinator import RoundTimes
from protocol.courtesy import Courtesy
from protocol.endpoint import Endpoint, Limits
from protocol.errors import (
    DataError,
    HandshakeError,
    PeerUnreachable,
    RequestRefused,
    SettingsError,
    ShoalError,
)
from protocol.identity import PeerId
from protocol.keyring import Keyring
from protocol.rounds import Rounds
from protocol.tcp import TcpTransport
from protocol.transport import Address, Transport

BOOK_PERIOD = 1.0
"""Seconds between two writes of the address book, at least."""

MEMORY_PER_PARAMETER = 112
"""Bytes, for DiLoCo. For good: local parameters, gradients, two moments, the copy under evaluation, the round's anchor
(24); outer parameters and momentum of three states (24); three results (12). For a moment: a contribution and the
ring's buffer (8), what others contribute to a block of ours (8, see `protocol.plan.largest_part`), or the next state
and the tensors that a checkpoint is written from (up to 36)."""

MEMBERS_PERIOD = 1.0
"""Seconds between two looks at the members for the status."""


class ComputeFailed(ShoalError):
    """Memory ran out, or a device failed."""


@attrs.frozen(kw_only=True)
class DaemonConfig:
    """What a daemon is told by its user. A daemon either founds a run (`manifest`) or joins one (`ticket`)."""

    home: Home
    listen: Address
    events: EventLog
    data: str = "stdlib"
    announce: Address | None = None
    map_port: bool = False
    """Ask the home's gateway for a port, unless an address is announced."""
    bootstrap: tuple[Contact, ...] = ()
    """Peers to ask besides those of the ticket; in every ticket of ours."""
    on_ticket: Callable[[Ticket], None] = lambda ticket: None
    """Called with each ticket that replaces the first one, as addresses change."""
    relay: bool = True
    device: str = "cpu"
    threads: int | None = None
    """Of the processor; None: as many as suit the run's model."""
    max_upload: int | None = None
    max_download: int | None = None
    max_memory: int | None = None
    manifest: Manifest | None = None
    ticket: Ticket | None = None
    origin: Path | None = None
    """A checkpoint that a founded run begins with, if it is of stages."""
    serve: bool = True
    """Whether to serve a stage, in a run whose model is cut into stages."""
    farewell: Farewell = attrs.field(factory=Farewell)
    """How it is asked to leave before it is cancelled."""
    wait_for: int = 1
    """Peers, this one included, that a founder waits for at the very beginning: until they have the first state."""
    linger: float = 0.0
    """Seconds to stay after the last round at least, for newcomers."""


async def run_daemon(
    config: DaemonConfig,
    *,
    transport: Transport | None = None,
    compute: Compute = in_worker_thread,
    rng: random.Random | None = None,
    task_status: trio.TaskStatus[Ticket] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs a peer until its run is over or it is cancelled.

    Args:
        config: What to do.
        transport: How bytes travel; TCP if None.
        compute: How long computations are run.
        rng: Spreads load over time and peers; keys never come from it. A fresh one if None.
        task_status: Started with a ticket, as soon as others can join through this peer.

    Raises:
        PeerUnreachable: Joining, and nobody answers.
        IdentityInUse: Another daemon with the identity of this home takes part, and nobody takes us for that peer.
        HandshakeError, RequestRefused: The swarm does not let us in, or we are no member any more.
        DataError, SettingsError: The data are not what the run is about, or settings cannot be used.
        ComputeFailed: Memory ran out, or a device failed.
        ShoalError: Home or address cannot be used.
    """
    network: Transport = TcpTransport() if transport is None else transport
    daemon = _Daemon(config, network, compute, rng or random.Random())
    reason = "cancelled"
    try:
        async with trio.open_nursery() as nursery:
            await daemon.run(nursery, task_status)
            nursery.cancel_scope.cancel()
        reason = "cancelled" if config.farewell.asked.is_set() else "finished"
    except BaseException as error:
        cause = _explained(first_cause(error))
        if cause is error or isinstance(cause, trio.Cancelled):
            raise
        reason = str(cause)
        raise cause from error
    finally:
        sent, received = daemon.endpoint.bytes_sent, daemon.endpoint.bytes_received
        config.events.emit("stopped", reason=reason, bytes_sent=sent, bytes_received=received)


class _Daemon:
    def __init__(self, config: DaemonConfig, transport: Transport, compute: Compute, rng: random.Random) -> None:
        self._config = config
        self._compute = compute
        self._home = config.home
        self._events = config.events
        self._identity = config.home.identity
        self._rng = rng
        self._keyring = _keyring(config)
        self._rejected_by: set[PeerId] = set()
        self._membership: Membership | None = None
        self._keys: RunKeys | None = None
        self.endpoint = Endpoint(
            self._identity,
            transport,
            psk=self._keyring,
            limits=Limits(max_upload=config.max_upload, max_download=config.max_download, relay=config.relay),
            announce=config.announce,
            local_host=outward_host() if config.listen.host in UNSPECIFIED else None,
            rng=self._rng,
        )
        self._dht = DHT(self.endpoint, self._identity, rng=self._rng)
        self._reach = Reach(self.endpoint, self._events, config.announce)
        Prober(self.endpoint)

    async def run(self, nursery: trio.Nursery, task_status: trio.TaskStatus[Ticket]) -> None:
        config = self._config
        corpus = await self._compute(Corpus.open, config.data)
        await nursery.start(tell_paths, self.endpoint, self._events, self._reach, self._rng)
        await start_listening(nursery, self.endpoint, self._home, config.listen)
        await nursery.start(self._dht.run)
        await self._bootstrap()
        manifest = config.manifest or await self._find_manifest()
        settings, allowed = manifest.settings, _allowed(manifest)
        _check_data(settings, config.data)
        if allowed is not None and self.endpoint.peer_id not in allowed:
            raise RequestRefused(
                f"this run admits only the peers on its list, and {self.endpoint.peer_id} is not on it",
                code="not_allowed",
                hint="whoever founds a run can list you under membership.allow",
            )
        torch.set_num_threads(config.threads or default_threads(settings.model))  # before a worker thread computes
        if settings.algorithm.name == PIPELINE:
            await self._run_pipeline(nursery, manifest, allowed, corpus, task_status)
            return
        trainer = await self._compute(self._make_trainer, settings, corpus)
        self._keep_manifest(manifest)  # not before everything that the user may have got wrong is known to be right
        local = await self._compute(self._own_checkpoint, manifest)
        membership = self._make_membership(manifest, allowed, trainer.recipe)
        node = self._make_node(manifest, allowed, membership, trainer)
        await nursery.start(node.rounds.run)
        await self._take_part(nursery, manifest, membership, trainer.flat.length, task_status)
        founded = manifest.founder == self._identity.public_key
        await node.run(local, founding=config.wait_for if founded else None)

    async def _run_pipeline(
        self,
        nursery: trio.Nursery,
        manifest: Manifest,
        allowed: frozenset[PeerId] | None,
        corpus: Corpus,
        task_status: trio.TaskStatus[Ticket],
    ) -> None:
        """Takes part in a run whose model is cut into stages."""
        config, settings = self._config, manifest.settings
        pipeline = await self._compute(make_pipeline, settings, manifest.run_id, corpus)
        needed, limit = memory_of(pipeline), config.max_memory
        if config.serve and limit is not None and needed > limit:
            raise SettingsError(
                f"a stage of this run's model needs about {size(needed)}, and --max-memory allows {size(limit)}",
                hint="allow more, or join with --no-serve",
            )
        if config.origin is not None:
            await self._compute(cut_checkpoint, config.origin, manifest, self._home)
        self._keep_manifest(manifest)
        membership = self._make_membership(manifest, allowed, settings.algorithm.recipe())
        founded = manifest.founder == self._identity.public_key
        node = make_node(
            pipeline,
            endpoint=self.endpoint,
            membership=membership,
            events=self._events,
            compute=self._compute,
            rng=self._rng,
            directory=self._home.checkpoints,
            device=config.device,
            serves=config.serve,
            founds=founded,
            asked=config.farewell.asked,
        )
        tell_manifest(self.endpoint, manifest.run_id, manifest.dump())
        parameters = parameters_of(pipeline)
        await self._take_part(nursery, manifest, membership, parameters, task_status, lambda: node.crew.standings)
        if founded:
            while (here := len(membership.others) + 1) < config.wait_for:
                self._events.emit("waiting", here=here, wanted=config.wait_for)
                await membership.changes()
        await membership.settled()
        config.farewell.patience = HANDOVER
        await node.run()
        config.farewell.patience = 0.0
        if not config.farewell.asked.is_set():
            await trio.sleep(config.linger)

    async def _take_part(
        self,
        nursery: trio.Nursery,
        manifest: Manifest,
        membership: Membership,
        parameters: int,
        task_status: trio.TaskStatus[Ticket],
        standings: Callable[[], Mapping[PeerId, Standing]] = dict,
    ) -> None:
        """Meets the members, and lets others join through us. The standings are those of a run of stages."""
        config, keys = self._config, self._keys
        await nursery.start(membership.run)
        membership.meet(self.endpoint.connected)
        nursery.start_soon(self._keep_book, membership)
        nursery.start_soon(self._tell_members, membership, standings)
        if keys is not None:
            nursery.start_soon(keys.run, partial(self._present, membership))
            if manifest.founder == self._identity.public_key:
                nursery.start_soon(keys.follow_orders)
            else:
                nursery.start_soon(self._end_if_expelled, membership)
        self._events.emit(
            "started",
            address=str(self._reach.addresses[0]),
            run=manifest.run_id,
            parameters=parameters,
        )
        task_status.started(self._ticket(manifest))
        if config.map_port:
            nursery.start_soon(self._reach.keep_mapped, lambda: config.on_ticket(self._ticket(manifest)))

    def _make_membership(self, manifest: Manifest, allowed: frozenset[PeerId] | None, recipe: Recipe) -> Membership:
        window, keys = window_of(recipe), self._run_keys(manifest)
        membership = self._membership = Membership(
            self.endpoint,
            self._dht,
            manifest.run_id,
            rng=self._rng,
            limit=manifest.settings.limits.peers - 1,
            near=NEAR if window is None else max(NEAR, window.keep - 1),
            allowed=allowed,
            refuses=keys.refusal if keys else lambda peer: None,
            plausible=partial(_plausible, manifest.settings),
            seen=self._seen,
            rejected=self._rejected,
            final=keys.expels if keys else lambda peer, error: False,
            lost=lambda peer, reason: self._events.emit("peer_lost", peer=peer, reason=reason),
        )
        return membership

    def _make_node(
        self, manifest: Manifest, allowed: frozenset[PeerId] | None, membership: Membership, trainer: Trainer
    ) -> Node:
        settings = manifest.settings
        rules = Rules(
            max_weight=settings.limits.weight,
            max_members=settings.limits.peers,
            admits=lambda peer: allowed is None or peer in allowed,
        )
        courtesy = Courtesy(lambda: self.endpoint.bytes_sent)
        times, window = RoundTimes(grace=settings.round.grace), window_of(trainer.recipe)
        rounds = Rounds(
            self.endpoint,
            manifest.run_id,
            settings=times if window is None else times.within(window),
            roster=membership,
            report=self._events.report,
            max_weight=rules.max_weight,
            courtesy=courtesy,
            max_members=rules.max_members,
            admits=rules.admits,
            codec=settings.round.codec,
        )
        donor = Donor(
            self.endpoint,
            manifest.run_id,
            manifest.dump(),
            admits=membership.knows,
            courtesy=courtesy,
            measuring=rounds.measuring,
        )
        return Node(
            run_id=manifest.run_id,
            settings=settings,
            rules=rules,
            endpoint=self.endpoint,
            membership=membership,
            rounds=rounds,
            donor=donor,
            trainer=trainer,
            founder=manifest.founder_id,
            checkpoints=self._home.checkpoints,
            partial=Partial(self._home.partial, run=manifest.run_id, compute=self._compute),
            events=self._events,
            compute=self._compute,
            linger=self._config.linger,
        )

    async def _bootstrap(self) -> None:
        """Reaches the peers that the ticket and the address book name."""
        ticket = self._config.ticket
        contacts = [*(ticket.bootstrap if ticket else ()), *self._config.bootstrap, *read_book(self._home)]
        try:
            await self._dht.bootstrap(contacts)
        except PeerUnreachable as error:
            if (in_use := self.endpoint.in_use) is not None:
                raise in_use from None
            problem = why_unreachable(contacts, error)
            known = ticket is None or kept_manifest(self._home, ticket.run_id) is not None
            if not known or isinstance(problem, HandshakeError):
                raise problem from error
            # Whoever has been there goes on, alone if need be, when everybody has left. The DHT goes on trying.
            if ticket is not None or self._config.bootstrap:
                self._events.emit("bootstrap_failed", reason=str(error.__cause__ or error))

    async def _find_manifest(self) -> Manifest:
        """The manifest of the ticket's run: our own copy, or the first right one that a peer has."""
        assert self._config.ticket is not None
        run = self._config.ticket.run_id
        return kept_manifest(self._home, run) or (await find_manifest(self.endpoint, self._dht, run))[0]

    def _keep_manifest(self, manifest: Manifest) -> None:
        if kept_manifest(self._home, manifest.run_id) is not None:
            return
        try:
            write_atomically(self._home.manifest, manifest.dump().encode())
        except OSError as error:
            raise HomeError(f"{self._home.manifest} cannot be written: {error.strerror}") from error

    def _make_trainer(self, settings: Settings, corpus: Corpus) -> Trainer:
        trainer = Trainer(settings, corpus, self.endpoint.peer_id, device=self._config.device)
        needed, limit = trainer.flat.length * _bytes_per_parameter(trainer), self._config.max_memory
        if limit is not None and needed > limit:
            raise SettingsError(
                f"this run's model needs about {size(needed)}, and --max-memory allows {size(limit)}",
                hint="allow more, or join a run with a smaller model",
            )
        return trainer

    def _own_checkpoint(self, manifest: Manifest) -> Checkpoint | None:
        found = checkpoint.load_latest(self._home.checkpoints)
        return found if found is not None and found.state.header.run == manifest.run_id else None

    def _ticket(self, manifest: Manifest) -> Ticket:
        """A ticket that names us first, then the peers that our user named, and then others, where they are now.

        Those are members first, and among them, as among the rest, those of the ticket that we have joined with.
        """
        known = dict(reversed(self._dht.contacts()))
        members = [member.peer for member in self._membership.others] if self._membership else []
        known |= {peer: places[0] for peer in members if (places := self.endpoint.addresses(peer))}
        joined = [peer for peer, _ in self._config.ticket.bootstrap] if self._config.ticket else []
        names = dict.fromkeys(peer for peer in [*joined, *members, *reversed(known)] if peer in known)
        others = [(peer, known[peer]) for peer in sorted(names, key=lambda peer: peer not in members)]
        own = [(self.endpoint.peer_id, address) for address in self._reach.addresses]
        given = [*self._config.bootstrap]
        hidden = {self.endpoint.peer_id, *(peer for peer, _ in given)}
        bootstrap = dict.fromkeys([*own, *given, *(contact for contact in others if contact[0] not in hidden)])
        excluded = self._keys.excluded if self._keys else ()
        named = [contact for contact in bootstrap if contact[0] not in excluded]
        ticket = Ticket(manifest.run_id, tuple(named[:MAX_BOOTSTRAP]))
        if self._keyring is None:
            return ticket
        return attrs.evolve(ticket, swarm_key=self._keyring.newest, key_number=self._keyring.number)

    def _run_keys(self, manifest: Manifest) -> RunKeys | None:
        """What keeps the run's keys, if it is private."""
        if self._keyring is None:
            return None

        async def founder(peer: PeerId) -> bytes:
            return manifest.founder

        keys = self._keys = RunKeys(
            self.endpoint,
            self._keyring,
            self._home,
            manifest.run_id,
            founder=founder,
            events=self._events,
            changed=lambda: self._config.on_ticket(self._ticket(manifest)),
            lately=lambda: self._membership.lately() if self._membership is not None else None,
        )
        if manifest.founder == self._identity.public_key:
            keys.follow_order()  # before the first ticket
        return keys

    async def _present(self, membership: Membership) -> list[PeerId]:
        """The members that are here, and the helpers that were named to us."""
        await membership.settled()
        return [*(member.peer for member in membership.others), *(peer for peer, _ in self._config.bootstrap)]

    async def _end_if_expelled(self, membership: Membership) -> None:
        raise await membership.expelled()

    def _seen(self, peer: PeerId) -> None:
        if self._keys is not None:
            self._keys.seen(peer)
        self._rejected_by.discard(peer)
        self._events.emit("peer_seen", peer=peer)

    def _rejected(self, peer: PeerId, error: ShoalError) -> None:
        """Told once for each peer: it is asked again now and then."""
        if peer not in self._rejected_by:
            self._rejected_by.add(peer)
            self._events.emit("rejected", peer=peer, reason=str(error), hint=error.hint)

    async def _tell_members(self, membership: Membership, standings: Callable[[], Mapping[PeerId, Standing]]) -> None:
        """Keeps the status up to date about the members."""
        told: list[Mapping[str, object]] = []
        while True:
            there, members = standings(), list[Mapping[str, object]]()
            for member in membership.others:
                standing = there.get(member.peer)
                revision = None if member.tip is None else member.tip.revision
                if standing is not None:
                    revision = standing.step
                stage = None if standing is None else standing.stage
                members.append(member_status(self.endpoint, member.peer, revision, stage))
            if members != told:
                told = members
                self._events.tell("members", members=members)
            await trio.sleep(MEMBERS_PERIOD)

    async def _keep_book(self, membership: Membership) -> None:
        """Writes down whom we know whenever that changes, so that a restart, also after a crash, finds back."""
        written: list[list[str]] = []
        while True:
            await membership.changes()
            members = [member.peer for member in membership.others]
            known = [(peer, address) for peer in members for address in self.endpoint.addresses(peer)]
            known += self._dht.contacts()
            entries = book_entries(known)
            if entries and entries != written:
                with contextlib.suppress(OSError):  # a full disk is no reason to stop, and the old book is still there
                    await self._compute(write_book, self._home, entries)
                    written = entries
            await trio.sleep(BOOK_PERIOD)


def _keyring(config: DaemonConfig) -> Keyring | None:
    """The keys of a private run: from the ticket or, where it was founded, from the home."""
    ticket, manifest = config.ticket, config.manifest
    if ticket is not None and ticket.swarm_key is not None:
        return open_keyring(config.home, ticket.run_id, ticket.swarm_key, ticket.key_number)
    if manifest is not None and manifest.settings.membership.policy == "private":
        return open_keyring(config.home, manifest.run_id, config.home.swarm_key(), 0)
    return None


def _check_data(settings: Settings, data: str) -> None:
    """The data that the user gave must be of the kind that the run is about."""
    if settings.data.source == "text" and data == STDLIB:
        raise DataError("the run trains on text that each peer brings", hint="say where yours is: --data PATH")
    if settings.data.source == "stdlib" and data != STDLIB:
        raise DataError(
            f"the run trains on the Python standard library, and not on {data}",
            hint="leave out --data, or join another",
        )


def _allowed(manifest: Manifest) -> frozenset[PeerId] | None:
    """Who may take part: those on the list, and the founder. None: everybody."""
    membership = manifest.settings.membership
    if membership.policy != "allow":
        return None
    return frozenset(PeerId.parse(text) for text in membership.allow) | {manifest.founder_id}


def _plausible(settings: Settings, tip: Tip) -> bool:
    """Whether a state with this tip can exist: not beyond the last round, nor with more weight than rounds can give."""
    limits, last = settings.limits, Schedule(settings, settings.algorithm.recipe()).last
    return (not last or tip.revision <= last) and tip.weight <= tip.revision * limits.peers * limits.weight


def _bytes_per_parameter(trainer: Trainer) -> int:
    """Memory that the run's method takes for each parameter of the model."""
    recipe = trainer.recipe
    buffers = 16 * (len(trainer.buffers) - 1)  # of three states, and in the checkpoint
    late = 16 if recipe.policy.delay else 0  # the state that the local parameters began from, and what is under way
    own = 24 if not recipe.shared else 0  # what is sent, received and mixed is twice as long, or kept for a while
    left_out = 12 if recipe.feedback != Forget() else 0
    window = window_of(recipe)
    fragments = recipe.policy.fragments if isinstance(recipe.policy, FixedSteps) else 1
    results = 4 * max(0, window.keep - RoundTimes().keep) // fragments if window is not None else 0
    return MEMORY_PER_PARAMETER + buffers + late + own + left_out + results


def _explained(error: BaseException) -> BaseException:
    """What PyTorch and Python say when memory or a device fails, in our words; other errors as they are."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return ComputeFailed(f"memory ran out: {error}", hint="use a machine, or a device, with more memory")
    if isinstance(error, RuntimeError) and "CUDA error" in str(error):
        return ComputeFailed(f"the accelerator failed: {error}", hint="use another --device, or restart the machine")
    return error
