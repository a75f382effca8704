"""Replicas of a method in a swarm, and in plain code."""

import torch
from torch import nn

from optim import LocalSwarm, LowCommunicationOptimizer, recipe
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
