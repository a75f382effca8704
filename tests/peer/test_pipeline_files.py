"""Stages' states on a disk: what stays, and what goes."""

import struct

import pytest
import torch

from optim.swarm.state import StageState
from peer.pipeline.files import StageFiles


@pytest.fixture
def files(tmp_path):
    return StageFiles(tmp_path / "checkpoints")


def save(files, stage, step):
    files.save(stage, StageState(step, {"a": torch.ones(2)}, {}))


def names(files):
    return sorted(path.name for path in files._directory.iterdir())


def test_the_newest_two_stay(files):
    for step in (10, 20, 30):
        save(files, 1, step)
    assert files.steps(1) == [30, 20]


def test_files_of_a_former_stage_go_when_there_are_newer_ones(files):
    for step in (10, 20):
        save(files, 0, step)
    save(files, 1, 30)
    assert (files.steps(0), files.steps(1)) == ([20, 10], [30])
    save(files, 1, 40)
    assert (files.steps(0), files.steps(1), files.newest()) == ([], [40, 30], (40, [1]))


def test_files_of_steps_that_have_not_been_made_in_this_history_go(files):
    save(files, 1, 1000)
    for step in (10, 20):
        save(files, 1, step)
    assert files.steps(1) == [20, 10]


def test_parts_of_files_that_a_killed_process_has_left_go_and_nothing_else(files):
    save(files, 1, 10)
    (files._directory / ".stage-0001-0000000020.safetensors.0a1b2c3d").write_bytes(b"half")
    (files._directory / "round-00000010.safetensors").write_bytes(b"whole")
    save(files, 1, 20)
    assert [name for name in names(files) if not name.startswith("stage-")] == ["round-00000010.safetensors"]


def test_a_damaged_file_is_passed_over(files):
    for step in (1, 2):
        files.save(0, StageState(step, {"a": torch.full((4,), 1.25)}, {}))
    (newest,) = (path for path in files._directory.iterdir() if path.name.endswith("2.safetensors"))
    data, value = newest.read_bytes(), struct.pack("<f", 1.25)
    assert data.count(value) == 4
    newest.write_bytes(data.replace(value, struct.pack("<f", 1.5), 1))
    assert files.load(0).step == 1
