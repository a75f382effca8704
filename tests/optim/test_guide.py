"""The example of the guide works as it is printed."""

import re
import textwrap
from pathlib import Path

import torch

from optim import LocalSwarm, LowCommunicationOptimizer
from tests.optim.toys import adamw, batches, make_model, train, values_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "write-your-own.md"


def test_the_method_of_the_guide_trains():
    code = "\n".join(re.findall(r"^(?:    .*)?$", GUIDE.read_text(), re.MULTILINE))
    definitions, use = textwrap.dedent(code).split("optimizer = ")
    names = {}
    exec(compile(definitions, str(GUIDE), "exec"), names)
    swarm = LocalSwarm(2)

    def replica(peer):
        model = make_model()
        optimizer = LowCommunicationOptimizer(model, adamw(model), peer, names["short_lion"](inner_steps=3))
        train(model, optimizer, batches(swarm.peers.index(peer), 12))
        assert optimizer.rounds == 4
        return values_of(model)

    one, other = swarm.run(replica)
    assert torch.equal(one, other)
    assert not torch.equal(one, values_of(make_model()))
    assert use.strip() == "LowCommunicationOptimizer(model, inner, swarm, short_lion())"
