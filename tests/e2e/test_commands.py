"""What the other commands say of a daemon while it runs and afterwards."""

import json

import pytest

from peer.status import read_status

pytestmark = pytest.mark.processes


async def test_commands_about_a_daemon_that_runs_and_has_run(swarm, shoal):
    founder = await swarm.found()
    (one,) = await swarm.joined(founder, "one")

    # The file is written once a second.
    await swarm.until(lambda: read_status(one.home / "status.json").neighbours, "a status that tells the neighbours")
    status = json.loads(shoal("status", "--json", home=one.home).out)
    assert (status["running"], status["pid"], status["peer"]) == (True, one.process.pid, one.peer)
    assert (status["run"], status["neighbours"]) == (founder.run, [founder.peer])
    assert shoal("sample", "--prompt", "The ", "--length", 5, home=one.home).out.startswith("The ")
    await swarm.stop(one, founder)

    outcome = shoal("status", "--json", home=one.home)
    status = json.loads(outcome.out)
    assert (outcome.code, status["running"], status["activity"]) == (1, False, "stopped")
    assert (status["revision"], status["digest"]) == (one.revision, one.digests[one.revision])
    assert len(json.loads(shoal("sample", "--json", home=one.home).out)["text"]) > 0


async def test_a_run_that_is_over_stays_over(swarm):
    founder = await swarm.found(run={"rounds": 2})
    assert await swarm.ended(founder) == 0
    digests = founder.digests
    assert list(digests) == [1, 2]
    losses = [event.number("loss") for event in founder.of("validation")]
    assert losses[-1] < losses[0]

    swarm.start(founder)
    assert await swarm.ended(founder) == 0
    await swarm.until(lambda: len(founder.of("stopped")) == 2, "the end")
    assert [event.text("reason") for event in founder.of("stopped")] == ["finished", "finished"]
    assert founder.digests == digests
