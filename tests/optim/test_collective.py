"""Optimizers over the real collective: two peers in threads of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from optim import DiLoCo
from protocol.standalone import join_collective


def train(swarm, seed: int) -> torch.Tensor:
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), swarm, sync_every=2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    assert optimizer.rounds == 3
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_peers_with_different_data_end_with_the_same_parameters():
    with join_collective("optim") as one, join_collective("optim", peers=[one.address]) as other:
        for swarm in (one, other):
            swarm.wait_for(2, timeout=30)
        with ThreadPoolExecutor(2) as threads:
            ours, theirs = threads.map(train, (one, other), (1, 2))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, torch.full_like(ours, 0.5))
