"""Replicas of a method in a swarm, and in plain code."""

import torch
from torch import nn

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
from protocol.errors import PeerGone
from tests.optim.toys import adamw, batches, make_model, train, values_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def run(method, size, steps, *, finish=True, inner=adamw, **constants):
    """The replicas' parameters after so many steps of a method, and the swarm."""
    swarm = LocalSwarm(size)

    def replica(peer):
        model = make_model()
        optimizer = LowCommunicationOptimizer(model, inner(model), peer, recipe(method, **constants))
        train(model, optimizer, batches(swarm.peers.index(peer), steps))
        if finish:
            optimizer.finish()
        else:
            optimizer.close()
        return values_of(model)

    return swarm.run(replica), swarm


class Flaky:
    """A peer of which some operations of one kind fail: by default the first one."""

    def __init__(self, peer, operation="all_reduce", failing=(1,)):
        self._peer, self._operation, self._failing = peer, operation, failing
        self.brought = []
        """What these operations were asked for: values and weight, or a block."""

    def __getattr__(self, name):
        return self._flaky if name == self._operation else getattr(self._peer, name)

    def _flaky(self, *brought, **options):
        self.brought.append(brought)
        if len(self.brought) in self._failing:
            raise PeerGone("all are gone")
        return getattr(self._peer, self._operation)(*brought, **options)


class Replica:
    """A model with its inner optimizer and data, for references."""

    def __init__(self, index):
        self.model = make_model()
        self.inner = adamw(self.model)
        self.data = batches(index, 1000)

    def local_steps(self, count):
        train(self.model, self.inner, (next(self.data) for _ in range(count)))
        return values_of(self.model)


class Outer:
    """Nesterov as PyTorch has it."""

    def __init__(self, values, lr, momentum):
        self.parameter = nn.Parameter(values.clone())
        self.optimizer = torch.optim.SGD([self.parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, gradient):
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        return self.values

    @property
    def values(self):
        return self.parameter.detach().clone()
