"""A run from its first to its last round, and what the other commands say of it meanwhile and afterwards."""

import json

import pytest

pytestmark = pytest.mark.processes

ROUNDS = 16


async def test_commands_about_a_daemon_that_runs_and_has_run(swarm, shoal):
    founder = await swarm.found(run={"rounds": ROUNDS}, algorithm={"inner_steps": 80})
    (one,) = await swarm.joined(founder, "one")

    status = json.loads(shoal("status", "--json", home=one.home).out)
    assert (status["running"], status["pid"], status["peer"]) == (True, one.process.pid, one.peer)
    assert (status["run"], status["neighbours"]) == (founder.run, [founder.peer])
    assert shoal("sample", "--prompt", "The ", "--length", 5, home=one.home).out.startswith("The ")

    assert [await swarm.ended(daemon) for daemon in (founder, one)] == [0, 0]
    assert founder.revision == one.revision == ROUNDS
    assert founder.digests[ROUNDS] == one.digests[ROUNDS]
    swarm.check_agreement()
    for daemon in (founder, one):
        assert daemon.of("stopped")[-1].text("reason") == "finished"
        losses = [event.number("loss") for event in daemon.of("validation")]
        assert losses[-1] < losses[0]

    outcome = shoal("status", "--json", home=one.home)
    status = json.loads(outcome.out)
    assert (outcome.code, status["running"], status["activity"]) == (1, False, "stopped")
    assert (status["revision"], status["digest"]) == (ROUNDS, one.digests[ROUNDS])
    samples = [json.loads(shoal("sample", "--json", home=daemon.home).out)["text"] for daemon in (founder, one)]
    assert len(samples[0]) > 0
    assert samples[0] == samples[1]  # of the same state

    swarm.start(founder)  # a run that is over stays over
    await swarm.until(lambda: len(founder.of("stopped")) == 2, "the end of the founder, started again")
    assert await swarm.ended(founder) == 0
    assert founder.revision == ROUNDS
