"""A model in stages at real daemons: some are killed, some come later, all stop and go on."""

import pytest

from optim.swarm.ledger import audit
from peer.checkpoint import load
from peer.pipeline.audit import records
from peer.pipeline.files import StageFiles

pytestmark = pytest.mark.processes

MICROBATCHES, BATCH = 4, 2


def run_of(steps, constants):
    return {
        "run": {"rounds": steps},
        "model": {"layers": 2},
        "inner": {"batch": BATCH},
        "algorithm": {"name": "swarm", "stages": 2, "microbatches": MICROBATCHES, **constants},
    }


async def found(swarm, steps, *options, **constants):
    """A founder whose run's manifest has nothing of other methods."""
    founder = swarm.daemon("founder")
    path = swarm.manifest(**run_of(steps, constants))
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("inner_steps", "outer_momentum"))]
    path.write_text("\n".join(lines))
    swarm.start(founder, path, *options)
    await swarm.started(founder)
    return founder


async def join(swarm, founder, *names, options=()):
    joiners = [swarm.daemon(name) for name in names]
    for joiner in joiners:
        swarm.join(joiner, founder.ticket, *options)
    await swarm.started(*joiners)
    return joiners


async def served(swarm, *daemons):
    """Waits until these have the state of a stage; returns which each has."""
    await swarm.until(lambda: all(daemon.of("stage_synced") for daemon in daemons), "stages")
    return [daemon.of("stage_synced")[-1].integer("stage") for daemon in daemons]


async def over(swarm, *daemons):
    """Waits until the run is over for these, in any order."""
    for daemon in daemons:
        daemon.expected = True
    assert [await swarm.ended(daemon) for daemon in daemons] == [0] * len(daemons)


def made(daemon):
    return max((event.integer("step") + 1 for event in daemon.of("stage_step")), default=0)


def check(swarm, steps, local_steps=1):
    """Every sample counted once in every step, and the servers of a stage at one in the end."""
    events = ({"event": event.kind, **event.fields} for daemon in swarm.daemons for event in daemon.recording.events)
    samples = dict.fromkeys(range(local_steps * MICROBATCHES), BATCH)
    assert audit(records(events), stages=2, steps=range(steps), samples=samples) == []


async def test_servers_and_trainers_are_killed_and_others_come(swarm):
    founder = await found(swarm, 0, "--wait-for", 4)
    one, two, trainer = [
        *await join(swarm, founder, "one", "two"),
        *await join(swarm, founder, "trainer", options=("--no-serve",)),
    ]
    stages = await served(swarm, founder, one, two)
    assert set(stages) == {0, 1}
    await swarm.until(lambda: trainer.of("inner") and made(founder) >= 3, "steps")
    trainer.kill()
    after = made(founder)
    await swarm.until(lambda: made(founder) >= after + 3, "steps without the trainer")
    victim = one if stages.count(stages[1]) == 2 else two
    victim.kill()
    (newcomer,) = await join(swarm, founder, "newcomer")
    await served(swarm, newcomer)
    after = made(founder)
    await swarm.until(lambda: made(newcomer) >= after + 3, "steps with the newcomer")
    alive = [founder, newcomer, two if victim is one else one]
    common = min(made(daemon) for daemon in alive)
    await swarm.stop(*alive)
    check(swarm, common)


async def test_all_stop_and_go_on_and_the_model_is_put_together(swarm, shoal):
    steps = 100
    founder = await found(swarm, steps, "--wait-for", 2)
    (other,) = await join(swarm, founder, "other")
    await served(swarm, founder, other)
    await swarm.until(lambda: min(made(founder), made(other)) >= 12, "steps that are saved")
    founder.kill()
    other.kill()
    files = [StageFiles(daemon.home / "checkpoints") for daemon in (founder, other)]
    kept = {stage: step for step, stages in (each.newest() for each in files) for stage in stages}
    assert kept.keys() == {0, 1}
    assert min(kept.values()) >= 10
    assert made(founder) < steps

    told = {daemon: len(daemon.of("stage_synced")) for daemon in (founder, other)}
    swarm.start(founder)
    await swarm.started(founder)
    swarm.join(other, founder.ticket)
    await over(swarm, founder, other)
    for daemon, count in told.items():
        assert daemon.of("stage_synced")[count].integer("step") == max(kept.values())
    assert made(founder) == made(other) == steps

    outcome = shoal("export", other.home, home=founder.home)
    assert outcome.code == 0, outcome.err
    path = founder.home / "checkpoints" / f"round-{steps:08d}.safetensors"
    assert str(path) in outcome.out
    assert load(path).state.header.revision == steps
    assert shoal("sample", "--length", 5, home=founder.home).code == 0

    again = swarm.daemon("again")  # all of it on one machine, for some steps more
    one_stage = founder.home / "one-stage.toml"
    kept = (founder.home / "manifest.toml").read_text().partition("[founder]")[0]
    one_stage.write_text(kept.replace("stages = 2", "stages = 1").replace(f"rounds = {steps}", f"rounds = {steps + 3}"))
    swarm.start(again, one_stage, "--from", path)
    assert await swarm.ended(again) == 0
    assert again.of("stage_synced")[0].integer("step") == steps
    assert made(again) == steps + 3
    assert 0 < again.of("inner")[0].fields["loss"] < 1.1 * founder.of("inner")[-1].fields["loss"]


async def test_rounds_of_local_steps_and_the_validation_loss(swarm, shoal):
    rounds, local_steps = 8, 5
    founder = await found(swarm, rounds, "--wait-for", 3, local_steps=local_steps)
    daemons = [founder, *await join(swarm, founder, "one", "two")]
    await over(swarm, *daemons)
    check(swarm, rounds, local_steps)
    told = [{event.integer("round"): event.number("loss") for event in each.of("validation")} for each in daemons]
    (last,) = {losses[rounds] for losses in told}  # all know that one; who comes late has not heard the first
    assert last < next(losses[0] for losses in told if 0 in losses)
    outcome = shoal("export", *(daemon.home for daemon in daemons[1:]), home=founder.home)
    assert outcome.code == 0, outcome.err
    exported = load(founder.home / "checkpoints" / f"round-{rounds:08d}.safetensors")
    assert exported.state.outer.buffers["momentum"].abs().max() > 0
    assert shoal("sample", "--length", 5, home=founder.home).code == 0
