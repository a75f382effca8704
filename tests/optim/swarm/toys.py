"""Small models that are cut into stages, and one process that trains the whole of them."""

import hashlib

import torch
from torch import nn

from optim.swarm import sequential
from optim.swarm.payloads import Packer
from optim.swarm.server import StageServer
from optim.swarm.trainer import Sample
from peer.model import Transformer
from peer.settings import ModelSettings
from protocol.identity import PeerId

SETTINGS = ModelSettings(layers=4, width=16, heads=2, context=12)
PACKER = Packer()


def peer_id(name):
    return PeerId(hashlib.sha256(str(name).encode()).digest())


def perceptron(seed=0):
    """Nothing is tied. Tokens go in as one-hot vectors."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        nn.Embedding(16, 8),
        nn.Flatten(),
        nn.Linear(32, 24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 4),
    ]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def squared(outputs, targets):
    return (outputs - targets.float()).square().mean(1)


def perceptron_chain(seed=0):
    return sequential(perceptron(seed), squared)


def perceptron_batch(step, number, samples=4):
    """The microbatch (step, number) of the perceptron's task."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, 16, (samples, 4), generator=generator)
    return tokens, tokens.sort(1).values


def text_batch(step, number, samples=2):
    """The same of a transformer's: sequences with a rule to be learned."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    start = torch.randint(0, 256, (samples, 1), generator=generator)
    tokens = (start + 7 * torch.arange(SETTINGS.context + 1)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def transformer_chain(seed=0):
    return Transformer(SETTINGS, seed=seed).chain()


def sample(batch):
    tokens, targets = batch
    return Sample(PACKER.pack(tokens, "tokens"), PACKER.pack(targets, "tokens"))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    """Unlike AdamW it takes larger steps if all gradients are larger."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def serve(stage, microbatches, optimizer=adamw, **options):
    return StageServer(stage, optimizer(stage), microbatches=microbatches, **options)


def train_alone(chain, batch, steps, microbatches, optimizer=adamw, clip=None):
    """What one process makes of the same microbatches: each sample's loss, and the model's final state."""
    model, optimizer, losses = chain.model, optimizer(chain.model), []
    for step in range(steps):
        optimizer.zero_grad()
        samples = 0
        for number in range(microbatches):
            tokens, targets = batch(step, number)
            loss = chain.loss(model(tokens), targets)
            loss.sum().backward()
            losses.append(loss.detach())
            samples += len(tokens)
        for parameter in model.parameters():
            parameter.grad.div_(samples)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat(losses), model.state_dict()
