"""Methods other than DiLoCo, with real daemons that lose a peer and gain one."""

import json
from pathlib import Path

import pytest

from peer.demo import DemoOptions, run_demo

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
ROUNDS = 5


@pytest.mark.parametrize(
    ("algorithm", "rounds", "last"),
    [
        ("streaming", ROUNDS, ROUNDS),
        ("noloco", ROUNDS, ROUNDS + 1),
        ("dilocox", ROUNDS, 2 * ROUNDS),
        ("paced", ROUNDS, ROUNDS),
        ("asynchronous", ROUNDS, ROUNDS),
        ("decoupled", 4 * ROUNDS, 4 * ROUNDS),  # each is about a fragment, after a quarter of the steps
    ],
)
def test_real_daemons_carry_out_other_methods(capsys, tmp_path, monkeypatch, algorithm, rounds, last):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)  # where the report goes
    code = run_demo(DemoOptions(peers=3, rounds=rounds, inner_steps=20, algorithm=algorithm, json=True))
    out, err = capsys.readouterr()
    assert code == 0, err
    verdict = json.loads(out.splitlines()[-1])
    assert verdict["rounds"] == last
    assert len(verdict["digests"]) == 3 and len(set(verdict["digests"].values())) == 1
    assert verdict["loss_last"] < verdict["loss_first"]
