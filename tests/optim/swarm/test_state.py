"""What others send as a stage's state has to look like one."""

import attrs
import pytest
import torch

from optim.swarm import cut
from optim.swarm.messages import Request
from optim.swarm.state import Form, inner_kinds
from protocol.errors import ProtocolError
from tests.optim.swarm.toys import PACKER, serve, text_batch, transformer_chain


def server_after(steps, number=0):
    """A stage's server after some steps without samples."""
    server = serve(cut(transformer_chain(), 3)[number], 1)
    for _ in range(steps):
        server.freeze()
        server.settled(torch.ones_like(server.contribution().values))
        server.advance({number: server.tied_gradients(), 2 - number: server.tied_gradients()})
    return server


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("number", range(3))
def test_states_of_a_server_are_taken(steps, number):
    server = server_after(steps, number)
    server.form.check(server.snapshot(), server.kinds)
    server.freeze()
    server.settled(server.contribution().values)
    state = attrs.evolve(server.snapshot(), tied={steps: server.tied_gradients()} if server.stage.tied else {})
    server.form.check(state, server.kinds)


def test_what_an_optimizer_remembers_is_found_out_without_a_step():
    server = serve(cut(transformer_chain(), 3)[0], 1)
    assert server.kinds == {"step": False, "exp_avg": True, "exp_avg_sq": True}
    assert len(server.optimizer.param_groups) == 1
    assert not server.optimizer.state


def spoiled():
    server = server_after(1)
    state, shared = server.snapshot(), server.form.parameters["embedding.weight"]
    name = next(iter(state.model))
    values, moments = state.model[name], state.inner["exp_avg"]
    others = {each: state.model[each] for each in state.model if each != name}
    yield "missing", attrs.evolve(state, model=others)
    yield "more", attrs.evolve(state, model={**state.model, "x": values})
    yield "shape", attrs.evolve(state, model={**others, name: values[:1]})
    yield "type", attrs.evolve(state, model={**others, name: values.double()})
    yield "kind", attrs.evolve(state, inner={**state.inner, "x": moments})
    yield "moment", attrs.evolve(state, inner={**state.inner, "exp_avg": {**moments, name: values[:1]}})
    yield "whole", attrs.evolve(state, inner={**state.inner, "exp_avg": {**moments, name: moments[name].long()}})
    yield "part", attrs.evolve(state, inner={kind: state.inner[kind] for kind in ("step", "exp_avg")})
    yield "mean", attrs.evolve(state, mean=torch.ones(3))
    yield "outer", attrs.evolve(state, outer={"momentum": {name: values}})
    yield "later", attrs.evolve(state, tied={state.step + 1: {"embedding.weight": values.new_zeros(shared)}})
    yield "tied", attrs.evolve(state, tied={1: {}})
    yield "tied shape", attrs.evolve(state, tied={1: {"embedding.weight": torch.ones(2)}})


def test_what_is_no_state_of_the_stage_is_refused():
    server = server_after(1)
    for what, state in spoiled():
        with pytest.raises(ProtocolError):
            server.form.check(state, server.kinds)
            pytest.fail(what)


def test_the_bound_on_a_states_size_holds_and_is_not_far():
    server = server_after(1)
    state = server.snapshot()
    tensors = [*state.model.values(), *(each for named in state.inner.values() for each in named.values())]
    size = sum(each.numel() * each.element_size() for each in tensors)
    assert size < Form.of(server.stage).most < 8 * size + (1 << 20)


def test_gradients_that_another_stage_has_not_given_do_not_double_ours():
    server = server_after(0)
    server.freeze()
    server.settled(torch.ones_like(server.contribution().values))
    ours = server.tied_gradients()["embedding.weight"]
    seen = []
    server.optimizer.register_step_pre_hook(
        lambda *_: seen.append(dict(server.stage.model.named_parameters())["embedding.weight"].grad.clone())
    )
    server.advance({0: {"embedding.weight": ours}})
    assert torch.equal(seen[0], ours)


@pytest.mark.parametrize("token", [-1, 256, 2**31 - 1])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_tokens_that_do_not_exist_are_refused_before_anything_is_computed(token, where):
    tokens, targets = (each.clone() for each in text_batch(0, 0))
    (tokens if where == "inputs" else targets)[0, 0] = token
    server = serve(cut(transformer_chain(), 1)[0], 1)
    server.stage.register_forward_pre_hook(lambda *_: pytest.fail("it was computed"))
    inputs, targets = PACKER.pack(tokens, "tokens"), PACKER.pack(targets, "tokens")
    server.submit("a", Request(kind="backward", step=0, number=0, inputs=inputs, targets=targets, count=True), 0.0)
    batch = server.take(0.0)
    ((_, answer),) = server.finish(batch, server.compute(batch))
    assert isinstance(answer, ProtocolError)
    assert "tokens" in str(answer)
    assert not server.ledger


def test_other_optimizers_remember_other_things():
    stage = cut(transformer_chain(), 3)[1]
    sgd = torch.optim.SGD(stage.model.parameters(), lr=0.1, momentum=0.9)
    assert inner_kinds(sgd, list(stage.model.parameters())) == {"momentum_buffer": True}
