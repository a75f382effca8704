import resource
import struct

import pytest
import torch
from safetensors import safe_open

from optim import FlatParameters, OuterState
from peer import checkpoint
from peer.checkpoint import Checkpoint
from peer.data import Corpus
from peer.home import CheckpointError, CheckpointNotSaved
from peer.model import Transformer
from peer.settings import ModelSettings, Settings
from peer.state import CommittedState
from peer.trainer import Trainer
from protocol.identity import Identity
from protocol.weights import SIZE, SignedWeight

SIGNED = [SignedWeight(1.0, bytes(SIZE))]
SETTINGS = Settings(model=ModelSettings(layers=1, width=16, heads=2, context=8))


@pytest.fixture
def layout():
    return FlatParameters(Transformer(SETTINGS.model, seed=1))


@pytest.fixture
def state(layout):
    outer = OuterState(layout.read(), {"momentum": torch.arange(layout.length, dtype=torch.float32)})
    return CommittedState.genesis(bytes(32), outer).commit(outer, plan=b"p" * 32, contributions=SIGNED)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path, layout, state):
    inner = {"exp_avg": torch.randn(layout.length), "step": torch.tensor(7.0)}
    checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, inner), layout)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.settings == SETTINGS
    assert loaded.state.header == state.header
    assert loaded.state.header.digest == state.header.digest
    assert loaded.state.history.headers == state.history.headers
    assert loaded.state.history.links == state.history.links
    assert torch.equal(loaded.state.outer.parameters, state.outer.parameters)
    assert torch.equal(loaded.state.outer.buffers["momentum"], state.outer.buffers["momentum"])
    assert loaded.inner.keys() == inner.keys()
    assert all(torch.equal(loaded.inner[name], inner[name]) for name in inner)


def test_it_holds_one_tensor_per_parameter(tmp_path, layout, state):
    path = checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    with safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for place in layout.slices:
        assert shapes[f"model.{place.name}"] == shapes[f"outer.momentum.{place.name}"] == tuple(place.shape)


def test_only_the_newest_are_kept(tmp_path, layout, state):
    for _ in range(checkpoint.KEPT + 2):
        checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
        state = state.commit(state.outer, plan=bytes(32), contributions=SIGNED)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == checkpoint.KEPT
    assert kept[-1] == "round-00000005.safetensors"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_one_is_passed_over(tmp_path, layout, state, damage):
    checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    newer = state.commit(state.outer, plan=bytes(32), contributions=SIGNED)
    path = checkpoint.save(tmp_path, Checkpoint(SETTINGS, newer, {}), layout)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[-5] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"not a checkpoint at all")
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.state.header == state.header


def test_leftovers_of_a_crash_while_writing_are_ignored(tmp_path, layout, state):
    (tmp_path / "round-00000009.partial").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.state.header.revision == 1


def test_no_directory_is_no_checkpoint(tmp_path):
    assert checkpoint.load_latest(tmp_path / "missing") is None


def test_a_full_disk_is_reported_and_keeps_the_old_one(layout, state, tmp_path):
    checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    newer = state.commit(state.outer, plan=bytes(32), contributions=SIGNED)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # no file may grow beyond: as if the disk were full
    try:
        with pytest.raises(CheckpointNotSaved, match="cannot write"):
            checkpoint.save(tmp_path, Checkpoint(SETTINGS, newer, {}), layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000001.safetensors"]


def test_the_inner_optimizer_comes_back_through_a_file(tmp_path, text_corpus):
    settings = SETTINGS
    trainer = Trainer(settings, text_corpus, peer_id(), device="cpu")
    outer = trainer.initial_state()
    trainer.start_round(outer, 1, [])
    trainer.run(2, should_stop=lambda: False, on_step=lambda info: None)
    state = CommittedState.genesis(bytes(32), outer)
    checkpoint.save(tmp_path, Checkpoint(settings, state, trainer.inner_state()), trainer.flat)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    other = Trainer(settings, text_corpus, peer_id(), device="cpu")
    other.restore_inner(loaded.inner)
    assert all(torch.equal(value, other.inner_state()[name]) for name, value in trainer.inner_state().items())


def peer_id():
    return Identity.from_seed(b"1" * 32).peer_id


@pytest.fixture
def text_corpus(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 3000)
    return Corpus.open(str(text))


def test_a_branch_that_was_given_up_does_not_come_back(tmp_path, layout, state):
    """A heavier branch may have fewer revisions than the one that was left for it."""
    branch = state
    for _ in range(5):
        branch = branch.commit(branch.outer, plan=bytes(32), contributions=SIGNED)
        checkpoint.save(tmp_path, Checkpoint(SETTINGS, branch, {}), layout)
    heavier = state.commit(state.outer, plan=b"q" * 32, contributions=[SignedWeight(99.0, bytes(SIZE))])
    checkpoint.save(tmp_path, Checkpoint(SETTINGS, heavier, {}), layout)
    assert checkpoint.load_latest(tmp_path).state.header == heavier.header


def test_what_crashes_left_half_written_goes(tmp_path, layout, state):
    (tmp_path / "round-00000009.partial").write_bytes(b"torn")
    path = checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    assert list(tmp_path.iterdir()) == [path]


def test_a_header_that_was_changed_is_noticed(tmp_path, layout, state):
    path = checkpoint.save(tmp_path, Checkpoint(SETTINGS, state, {}), layout)
    data = path.read_bytes()
    assert data.count(b'\\"weight\\": 0.0') == 1
    path.write_bytes(data.replace(b'\\"weight\\": 0.0', b'\\"weight\\": 9.0'))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize("part", ["inner", "own"])
def test_what_is_remembered_besides_the_model_is_checked_too(tmp_path, layout, state, part):
    kept = Checkpoint(SETTINGS, state, **{"inner": {}, part: {"moment": torch.full((3,), 1.25)}})
    path = checkpoint.save(tmp_path, kept, layout)
    assert torch.equal(getattr(checkpoint.load(path), part)["moment"], torch.full((3,), 1.25))
    data, value = path.read_bytes(), struct.pack("<f", 1.25) * 3
    assert data.count(value) == 1
    path.write_bytes(data.replace(value, struct.pack("<f", -1.0) * 3))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)
