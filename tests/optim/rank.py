"""One process of a machine that is one peer: `python -m tests.optim.rank SPEC`, for `test_machine.py`.

SPEC is JSON: `rank`, `size`, `kind` (fsdp, hsdp, ddp), `store` (a file for torch.distributed to meet at),
`listen`, `peers`, `seed` of the machine's data, `out` (a file for what came of it) and `task`.
"""

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from optim import GradientOptimizer, LowCommunicationOptimizer, Machine, check_start, gradient_recipe, recipe
from optim.flat import unwrapped
from optim.methods import GRADIENT_RECIPES
from optim.mtdao import MultiTimescaleOptimizer, QuasiHyperbolicAdam
from optim.shards import local
from protocol.channels import ChannelSettings
from protocol.errors import SettingsError, ShoalError
from protocol.standalone import join_collective
from tests.optim.replicas import Flaky
from tests.optim.toys import batches, make_model, train


def prepared(kind, model=None):
    model = make_model() if model is None else model
    if kind in ("fsdp", "hsdp"):  # the latter: in two groups of which each has all
        size = dist.get_world_size()
        shape, names = ((size,), ("shard",)) if kind == "fsdp" else ((2, size // 2), ("copy", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[-1], model):
            fully_shard(layer, mesh=mesh)
        return model
    return DistributedDataParallel(model)


def optimizer_of(model, swarm, name, constants):
    if name == "mtdao":
        inner = QuasiHyperbolicAdam(model.parameters(), lr=0.01, momenta=((0.5, 0.3), (0.9, 0.5)), beta=0.99)
        return MultiTimescaleOptimizer(model, inner, swarm, **constants)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name in GRADIENT_RECIPES:
        return GradientOptimizer(model, inner, swarm, gradient_recipe(name, **constants))
    return LowCommunicationOptimizer(model, inner, swarm, recipe(name, **constants))


def values(model):
    """All of the model, in one process."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def compare(spec, machine):
    """Trains with one method after the other, and says what each ends with, with the outer state of this process."""
    results = {}
    for name, constants in spec["methods"]:
        model = prepared(spec["kind"])
        optimizer = optimizer_of(model, machine, name, constants)
        train(model, optimizer, batches(spec["seed"], spec["steps"]))
        if isinstance(optimizer, LowCommunicationOptimizer):
            optimizer.finish()
            assert optimizer.outer.parameters.numel() == sum(
                (p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters()
            )
        elif isinstance(optimizer, MultiTimescaleOptimizer):
            optimizer.finish()
        results[name] = values(model).tolist()
    return results


def resume(spec, machine):
    """In the middle each process saves what it has itself, and goes on from that with a new model."""
    results = {}
    for name, constants in spec["methods"]:
        model = prepared(spec["kind"])
        optimizer = optimizer_of(model, machine, name, constants)
        stream = list(batches(spec["seed"], spec["steps"]))
        train(model, optimizer, stream[: len(stream) // 2])
        path = f"{spec['out']}.{spec['rank']}"
        torch.save([optimizer.state_dict(), [local(p.detach()) for p in model.parameters()]], path)
        model = prepared(spec["kind"])
        optimizer = optimizer_of(model, machine, name, constants)
        state, saved = torch.load(path, weights_only=True)
        with torch.no_grad():
            for part, old in zip(model.parameters(), saved, strict=True):
                local(part).copy_(old)
        optimizer.load_state_dict(state)
        train(model, optimizer, stream[len(stream) // 2 :])
        if not isinstance(optimizer, GradientOptimizer):
            optimizer.finish()
        results[name] = values(model).tolist()
    return results


def overflow(spec, machine):
    """One process's part of a gradient is not finite: no process of the machine takes that step."""
    model = prepared(spec["kind"])
    optimizer = optimizer_of(model, machine, "mtdao", {"sync_every": 3})
    for step, (inputs, targets) in enumerate(batches(spec["seed"], spec["steps"])):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if step == 1 and spec["rank"] == 1:
            next(p.grad for p in model.parameters() if p.grad.to_local().numel()).to_local().fill_(float("inf"))
        optimizer.step()
    assert optimizer.inner.taken == spec["steps"] - 1
    return {"values": values(model).tolist()}


def survive(spec, machine):
    """Trains until this machine is to die, or the end; a line in the file for each round."""
    model = prepared(spec["kind"])
    optimizer = optimizer_of(model, machine, "diloco", {"inner_steps": 2})
    with open(spec["out"] + ".rounds", "w") as file:
        for batch in batches(spec["seed"], spec["steps"]):
            train(model, optimizer, [batch])
            print(optimizer.rounds, file=file, flush=True)
            if spec["rank"] == 1 and optimizer.rounds == spec.get("dies_after"):
                os._exit(1)  # the other one finds out
    return {"rounds": optimizer.rounds, "values": values(model).tolist()}


def poison(spec, machine):
    """One process's part is spoiled in the middle: the machine does not count, and is healed; then a state is saved
    and loaded in the middle of a delayed exchange."""
    model = prepared(spec["kind"])
    optimizer = optimizer_of(model, machine, "streaming", {"inner_steps": 4, "fragments": 2, "delay": 1})
    stream = batches(spec["seed"], spec["steps"])
    train(model, optimizer, [next(stream) for _ in range(3)])
    if spec["spoils"] and spec["rank"] == 1:
        with torch.no_grad():
            next(p for p in model.parameters() if p.to_local().numel()).to_local().fill_(float("nan"))
    train(model, optimizer, [next(stream)])
    saved, held = optimizer.state_dict(), {k: v.to_local().clone() for k, v in model.state_dict().items()}
    assert "flight" in saved["outer"]
    optimizer.close()
    optimizer = optimizer_of(model, machine, "streaming", {"inner_steps": 4, "fragments": 2, "delay": 1})
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for name, part in model.state_dict().items():
            part.to_local().copy_(held[name])
    optimizer.synchronize()
    optimizer.finish()
    return {"values": values(model).tolist()}


def late(spec, machine):
    """The second machine comes after the first exchange, from other values, and goes on with the first's state."""
    model = prepared(spec["kind"], nn.Sequential(nn.BatchNorm1d(4), make_model()))
    optimizer = optimizer_of(model, machine, "diloco", {"inner_steps": 3})
    stream = batches(spec["seed"], 100)
    if spec["seed"] == 0:
        train(model, optimizer, [next(stream) for _ in range(3)])
    else:
        with torch.no_grad():
            for part in model.parameters():
                local(part).zero_()
    while optimizer.welcome() < 2:
        pass
    rounds = optimizer.rounds
    train(model, optimizer, [next(stream) for _ in range(3)])
    optimizer.finish()
    buffers = [buffer.flatten().tolist() for _, buffer in sorted(unwrapped(model).named_buffers())]
    return {"rounds": [rounds, optimizer.rounds], "values": values(model).tolist(), "buffers": buffers}


def fail(swarm):
    """An exchange of the first process fails once: it does in all, and is made up for."""

    model = prepared("fsdp")
    optimizer = optimizer_of(model, Machine(swarm and Flaky(swarm)), "diloco", {"inner_steps": 2})
    before = optimizer.outer.parameters
    try:
        train(model, optimizer, batches(0, 2))
    except ShoalError as error:
        text = str(error)
    assert torch.equal(optimizer.outer.parameters, before)
    train(model, optimizer, batches(1, 1))
    assert optimizer.rounds == 1
    assert swarm is not None or text == "the exchange of this machine failed: all are gone"
    return text


def start(spec, machine):
    """Compares what the machines begin with: they are alike, then one process of one machine has other values."""
    model, method = prepared(spec["kind"]), recipe("diloco")
    check_start(model, machine, method)
    if spec["seed"] == 1 and spec["rank"] == 1:
        with torch.no_grad():
            next(p for p in model.parameters() if p.to_local().numel()).to_local().add_(1e-6)
    texts = []
    for swarm in (machine, machine.swarm):
        try:
            check_start(model, swarm, method)
        except SettingsError as error:
            texts.append(f"{error} {error.hint}")
    if machine.first:
        machine.swarm.barrier(tag="told")  # nobody leaves whom another still asks
    return texts


def refuse(spec, machine):
    """What cannot work."""
    texts = []
    for name, constants in spec["methods"]:
        try:
            optimizer_of(prepared(spec["kind"]), machine, name, constants)
        except SettingsError as error:
            texts.append(str(error))
    try:
        optimizer_of(prepared(spec["kind"]), machine.swarm, "diloco", {})
    except SettingsError as error:
        texts.append(str(error))
    model = make_model()
    if spec["rank"] == 1:
        model.append(nn.Linear(1, 1))
    try:
        optimizer_of(model, machine, "diloco", {})
    except SettingsError as error:
        texts.append(str(error))
    texts.append(fail(machine.swarm))
    try:
        Machine(None)
    except SettingsError as error:
        texts.append(str(error))
    return texts


def main(spec):
    torch.set_num_threads(1)
    store = dist.FileStore(spec["store"], spec["size"])
    dist.init_process_group(
        "gloo", store=store, rank=spec["rank"], world_size=spec["size"], timeout=timedelta(seconds=60)
    )
    with contextlib.ExitStack() as stack:
        swarm = None
        if spec["rank"] == 0:
            usual = ChannelSettings()
            settings = attrs.evolve(usual, times=attrs.evolve(usual.times, grace=spec.get("grace", usual.times.grace)))
            swarm = stack.enter_context(
                join_collective("machines", listen=spec["listen"], peers=spec["peers"], settings=settings)
            )
            swarm.wait_for(spec["machines"], timeout=60)
        result = globals()[spec["task"]](spec, Machine(swarm))
    if spec["rank"] == 0:
        Path(spec["out"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
