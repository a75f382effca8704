"""Lightning Fabric takes the optimizer as it would any other."""

import pytest
import torch

from optim import DiLoCo
from tests.optim.toys import adamw, batches, make_model, train, values_of

pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")

from lightning_fabric import Fabric

pytestmark = pytest.mark.filterwarnings("default")  # theirs


def test_fabric_trains_and_loads_what_it_saved(tmp_path, alone):
    def made():
        model = make_model()
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        optimizer = DiLoCo(model, adamw(model), alone, sync_every=3)
        return fabric, model, optimizer, *fabric.setup(model, optimizer)

    def steps(fabric, model, optimizer, data):
        for inputs, targets in data:
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()

    data = list(batches(1, 8))
    fabric, model, ours, wrapped, optimizer = made()
    steps(fabric, wrapped, optimizer, data[:5])
    fabric.save(tmp_path / "saved", {"model": wrapped, "optimizer": optimizer})
    steps(fabric, wrapped, optimizer, data[5:])
    assert ours.rounds == 2

    fabric, other, resumed, wrapped, optimizer = made()
    fabric.load(tmp_path / "saved", {"model": wrapped, "optimizer": optimizer})
    steps(fabric, wrapped, optimizer, data[5:])
    assert torch.equal(values_of(other), values_of(model))
    assert torch.equal(resumed.outer.parameters, ours.outer.parameters)
    train(model, ours, data)  # it can be used without Fabric just as well
