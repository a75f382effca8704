"""Small models and data, and what trains them."""

import torch
from torch import nn


def make_model(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def batches(seed, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(16, 4, generator=generator)
        yield inputs.to(dtype), inputs.sum(1, keepdim=True).sin().to(dtype)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def values_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def put(model, values):
    nn.utils.vector_to_parameters(values.clone(), model.parameters())
