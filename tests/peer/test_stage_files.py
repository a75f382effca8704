"""A model in stages on disk: put together, cut anew, and trained on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optim.swarm.state import whole_state
from peer.checkpoint import load
from peer.data import Corpus
from peer.home import CheckpointError, Home, HomeError
from peer.manifest import Manifest, settings_from
from peer.model import Transformer
from peer.pipeline.files import StageFiles, cut_checkpoint, export_model
from peer.pipeline.reference import make_servers, make_step
from peer.pipeline.run import make_pipeline
from protocol.identity import Identity

FOUNDER = Identity.from_seed(bytes(32))
STEPS = 3


def manifest_of(stages, **tables):
    algorithm = {"name": "swarm", "stages": stages, "microbatches": 2, "activations": "fp32"}
    model = {"layers": 3, "width": 32, "heads": 2, "context": 16}
    # Gradients are clipped stage by stage, so that another number of stages clips them in another way.
    settings = {"algorithm": algorithm, "model": model, "inner": {"batch": 2, "warmup": 2, "clip": 1e9}}
    return Manifest.create(settings_from({**settings, "run": {"rounds": 100}, **tables}), FOUNDER)


@pytest.fixture
def corpus():
    return Corpus.open(Path(json.__file__).parent)


@pytest.fixture
def peers(tmp_path, corpus):
    """A factory of all servers of a run, each with a home of its own: `pipeline, servers, homes`."""
    torch.set_num_threads(1)

    def make(name, manifest):
        pipeline = make_pipeline(manifest.settings, manifest.run_id, corpus)
        homes = [Home(tmp_path / f"{name}-{number}") for number in range(pipeline.stages)]
        return pipeline, make_servers(pipeline), homes

    return make


def begun(manifest, servers, homes, path):
    """The servers go on from a checkpoint, which the first home has been given."""
    cut_checkpoint(path, manifest, homes[0])
    for number, server in enumerate(servers):
        server.restore(StageFiles(homes[0].checkpoints).load(number))


def exported(manifest, servers, homes):
    """The servers save their states, and a whole model is made of them."""
    for number, (server, home) in enumerate(zip(servers, homes, strict=True)):
        home.manifest.write_text(manifest.dump())
        StageFiles(home.checkpoints).save(number, server.snapshot())
    return export_model(homes[0], homes[1:])


def same(state, other):
    assert state.step == other.step
    assert state.model.keys() == other.model.keys()
    assert state.inner.keys() == other.inner.keys() == {"exp_avg", "exp_avg_sq", "step"}
    pairs = [(state.model, other.model), *((state.inner[kind], other.inner[kind]) for kind in state.inner)]
    assert all(torch.equal(one[name], two[name]) for one, two in pairs for name in one)


def test_training_goes_on_with_ever_fewer_stages_as_if_there_had_been_one_all_along(peers):
    whole, (server,), _ = peers("whole", manifest_of(1))
    expected = [make_step(whole, [server]) for _ in range(STEPS * 4)]
    losses, path, before = [], None, None
    for stages in (3, 2, 1, 3):
        manifest = manifest_of(stages, run={"rounds": 100, "name": f"after-{len(losses)}"})
        pipeline, servers, homes = peers(f"{len(losses)}", manifest)
        if path is not None:
            begun(manifest, servers, homes, path)
            same(whole_state(each.snapshot() for each in servers), before)
        losses += [make_step(pipeline, servers) for _ in range(STEPS)]
        before = whole_state(each.snapshot() for each in servers)
        path = exported(manifest, servers, homes)
        assert load(path).state.header.revision == len(losses)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    for name, values in server.snapshot().model.items():
        torch.testing.assert_close(before.model[name], values, rtol=1e-3, atol=1e-4)
    model = Transformer(load(path).settings.model)  # as docs/swarm.md says
    model.load_state_dict({name[6:]: values for name, values in load_file(path).items() if name.startswith("model.")})
    assert torch.equal(model.embedding.weight, before.model["embedding.weight"])


def test_local_steps_go_on_with_the_outer_momentum_and_at_the_same_learning_rate(peers):
    def manifest(local_steps, name):
        algorithm = {"name": "swarm", "stages": 2, "microbatches": 2, "activations": "fp32", "local_steps": local_steps}
        return manifest_of(2, algorithm=algorithm, run={"rounds": 100, "name": name})

    pipeline, servers, homes = peers("before", manifest(2, "before"))
    for _ in range(STEPS):
        make_step(pipeline, servers)
    path = exported(manifest(2, "before"), servers, homes)
    before = whole_state(each.snapshot() for each in servers)
    for local_steps, step in ((2, 3), (3, 2), (1, 6), (100, 1)):
        after = manifest(local_steps, f"after-{local_steps}")
        _, servers, homes = peers(f"after-{local_steps}", after)
        begun(after, servers, homes, path)
        state = whole_state(each.snapshot() for each in servers)
        assert state.step == step
        assert state.outer.keys() == (before.outer.keys() if local_steps > 1 else set())
        for kind, named in state.outer.items():
            assert all(torch.equal(values, before.outer[kind][name]) and values.any() for name, values in named.items())


def test_what_does_not_belong_to_a_run_is_refused(peers, tmp_path):
    manifest = manifest_of(2)
    pipeline, servers, homes = peers("peers", manifest)
    for _ in range(STEPS):
        make_step(pipeline, servers)
    path = exported(manifest, servers, homes)
    fresh = Home(tmp_path / "fresh")
    for other, match in (
        (manifest_of(2, model={"layers": 2, "width": 32, "heads": 2, "context": 16}), "another model: .*layers"),
        (manifest_of(2, run={"rounds": STEPS}), f"be step {STEPS}, and the run has {STEPS}"),
    ):
        with pytest.raises(CheckpointError, match=match):
            cut_checkpoint(path, other, fresh)
        assert list(fresh.checkpoints.iterdir()) == []
    with pytest.raises(CheckpointError, match="not a usable checkpoint"):
        cut_checkpoint(homes[0].manifest, manifest_of(1), fresh)
    stage, *_ = homes[0].checkpoints.glob("stage-*")
    with pytest.raises(CheckpointError, match="one stage of a model"):
        cut_checkpoint(stage, manifest_of(1), fresh)
    with pytest.raises(HomeError, match="is in a run already"):
        cut_checkpoint(path, manifest_of(1), homes[0])


def test_of_the_newest_step_all_stages_are_named(peers):
    pipeline, servers, homes = peers("peers", manifest_of(3))
    files = StageFiles(homes[0].checkpoints)
    assert files.newest() == (0, [])
    make_step(pipeline, servers)
    for number in (0, 2):
        files.save(number, servers[number].snapshot())
    assert files.newest() == (1, [0, 2])
    make_step(pipeline, servers)
    files.save(2, servers[2].snapshot())
    assert files.newest() == (2, [2])
