"""What a peer remembers for itself: saved, taken back, and looked at before it is believed."""

import attrs
import pytest
import torch

from optim import GradientOptimizer, LocalSwarm, LowCommunicationOptimizer, gradient_recipe, recipe
from optim.flat import FlatParameters
from optim.replica import Replica
from optim.slots import Mixed, Moment
from protocol.errors import SettingsError
from protocol.identity import PeerId
from tests.optim.toys import adamw, batches, make_model, put, train, values_of

LENGTH = 49
ONE, OTHER = (PeerId(bytes([number]) * 32) for number in (1, 2))
MOMENT = Moment(round=2, lr=0.01)


def made(method, **constants):
    model = make_model()
    return model, Replica(recipe(method, **constants), FlatParameters(model))


def with_a_result(mixed, method="eager", **constants):
    """A replica of which an exchange has come to this, which is not applied yet."""
    model, replica = made(method, inner_steps=2, **constants)
    replica._share = 0.5
    for _ in range(2):
        put(model, values_of(model) + 0.01)
        replica.stepped()
    replica.send(replica.begin(MOMENT))
    replica.arrived(mixed)
    return replica


def result(seed, **changes):
    mean, own = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(seed))
    return attrs.evolve(Mixed(mean=mean, own=own, members=(ONE, OTHER), share=0.25), **changes)


@pytest.mark.parametrize(
    "mixed",
    [
        result(1),
        result(1, share=0.0),  # we brought nothing, and the others did
        result(1, share=0.0, members=()),  # nobody did
        result(1, load=0.5, missed=(result(2, share=0.0), result(3, share=0.0, members=(OTHER,)))),
    ],
)
def test_a_result_that_is_not_applied_yet_is_taken_back_as_it_was(mixed):
    replica = with_a_result(mixed)
    _, resumed = made("eager", inner_steps=2)
    resumed.restart(replica.outer, replica.begun)
    own = replica.own_state()
    resumed.load_own_state(own)
    assert resumed.own_state().keys() == own.keys()
    assert all(torch.equal(values, own[name]) for name, values in resumed.own_state().items())
    history = resumed.history = replica.history
    for one in (replica, resumed):
        one.start_over(MOMENT)
    assert torch.equal(replica.outer.parameters, resumed.outer.parameters)
    assert torch.equal(replica.outer.buffers["momentum"], resumed.outer.buffers["momentum"])
    assert (replica.share, replica.load) == (resumed.share, resumed.load) == (mixed.share, mixed.load)
    assert replica.history == resumed.history != history


def nan(values):
    return torch.full_like(values, float("nan"))


DAMAGE = {
    "another length": ({"flight.mean": lambda values: values[:-1]}, r"flight.mean has shape \[48\], not \[49\]"),
    "another type": ({"flight.own": lambda values: values.double()}, "flight.own is no tensor of fp32 numbers"),
    "not finite": ({"flight.taken": nan}, "flight.taken is not finite"),
    "another exchange": ({"flight.message": lambda values: values + 5}, "flight.message is"),
    "a weight that is not finite": ({"flight.message": nan}, "flight.message is"),
    "too large a share": ({"flight.numbers": lambda values: values * 9}, "flight.numbers is"),
    "more missed than there are": ({"flight.numbers": lambda values: values + torch.tensor([0, 0, 1])}, "missed.0"),
    "no peers": ({"flight.members": lambda values: values[:, :5]}, "flight.members are no peers"),
    "half of it": ({"flight.mean": None}, "flight.mean is no tensor"),
    "a share that is none": ({"share": nan}, "our share is"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result_is_refused(damage):
    changes, message = DAMAGE[damage]
    replica = with_a_result(result(1))
    own = replica.own_state()
    for name, change in changes.items():
        values = own.pop(name)
        if change is not None:
            own[name] = change(values)
    _, resumed = made("eager", inner_steps=2)
    resumed.restart(replica.outer, replica.begun)
    with pytest.raises(SettingsError, match=message):
        resumed.load_own_state(own)


def test_what_nobody_has_remembered_is_refused():
    replica = with_a_result(result(1))
    _, resumed = made("eager", inner_steps=2)
    resumed.restart(replica.outer, replica.begun)
    with pytest.raises(SettingsError, match="'mood' is nothing"):
        resumed.load_own_state({**replica.own_state(), "mood": torch.zeros(1)})


METHODS = [
    ("sparseloco", {"inner_steps": 2, "k": 2}, "error"),
    ("dilocox", {"inner_steps": 2, "rank": 1}, "factor 0"),
    ("dilocox", {"inner_steps": 2, "rank": 1}, "ranks"),
    ("dilocox", {"inner_steps": 2, "rank": 1, "adaptive": False}, "factor 0"),
    ("demo", {"k": 2}, "error"),
    ("lion", {}, "momentum"),
    ("powersgd", {"rank": 1}, "factor 0"),
]


def optimizer_of(method, constants, swarm):
    model = make_model()
    if method in ("demo", "lion", "powersgd"):
        return model, GradientOptimizer(model, adamw(model), swarm, gradient_recipe(method, **constants))
    return model, LowCommunicationOptimizer(model, adamw(model), swarm, recipe(method, **constants))


def trained(method, constants, swarm):
    model, optimizer = optimizer_of(method, constants, swarm)
    train(model, optimizer, batches(0, 8))
    saved = optimizer.state_dict()
    memory = saved["outer" if "outer" in saved else "exchange"]["memory"]
    return saved, memory


@pytest.mark.parametrize(("method", "constants", "name"), METHODS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda values: torch.ones(99), "shape|nothing that"),
        (lambda values: values.unsqueeze(0), "shape|nothing that"),
        (lambda values: values.double(), "fp32"),
        (nan, "not finite"),
        (lambda values: values.tolist(), "fp32"),
    ],
    ids=["length", "dimensions", "type", "nan", "list"],
)
def test_damaged_memory_is_refused(alone, method, constants, name, damage, message):
    saved, memory = trained(method, constants, alone)
    key = next(iter(memory))
    memory[key][name] = damage(memory[key][name])
    with pytest.raises(SettingsError, match=message):
        optimizer_of(method, constants, alone)[1].load_state_dict(saved)


@pytest.mark.parametrize(("method", "constants", "name"), METHODS)
def test_memory_of_another_method_or_of_other_tensors_is_refused(alone, method, constants, name):
    saved, memory = trained(method, constants, alone)
    optimizer_of(method, constants, alone)[1].load_state_dict(saved)
    key = next(iter(memory))
    kept = memory.pop(key)
    memory[key] = {**kept, "mood": torch.zeros(LENGTH)}
    with pytest.raises(SettingsError, match="'mood' is nothing that this method remembers"):
        optimizer_of(method, constants, alone)[1].load_state_dict(saved)
    del memory[key]
    memory["another.tensor"] = kept
    with pytest.raises(SettingsError, match="not exchanged together"):
        optimizer_of(method, constants, alone)[1].load_state_dict(saved)


def test_a_rank_that_follows_what_is_needed_takes_its_memory_back():
    """At other ranks other tensors are factored; what is remembered of earlier ones remains."""
    (peer,) = LocalSwarm(1).peers
    method = recipe("dilocox", inner_steps=2, rank=3, window=1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 12), torch.nn.Linear(12, 13), torch.nn.Linear(13, 1))
    optimizer = LowCommunicationOptimizer(model, adamw(model), peer, method)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(2, 30) * step).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.rounds > 3


def test_a_saved_state_that_lacks_something_or_is_not_finite_is_refused(alone):
    saved, _ = trained("sparseloco", {"inner_steps": 2, "k": 2}, alone)
    for name in ("history", "warmup", "parameters"):
        lacking = {**saved, "outer": {key: value for key, value in saved["outer"].items() if key != name}}
        with pytest.raises(SettingsError, match=f"no '{name}'"):
            optimizer_of("sparseloco", {"inner_steps": 2, "k": 2}, alone)[1].load_state_dict(lacking)
    spoiled = {**saved, "outer": {**saved["outer"], "parameters": nan(saved["outer"]["parameters"])}}
    with pytest.raises(SettingsError, match="not finite"):
        optimizer_of("sparseloco", {"inner_steps": 2, "k": 2}, alone)[1].load_state_dict(spoiled)
