"""The script of the guide, started as the guide says."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide-scripts.md"


@pytest.mark.processes
def test_two_machines_train_with_the_script_of_the_guide(tmp_path):
    start = GUIDE.read_text().index('    """torchrun')
    script = re.match(r"(?:(?:    .*)?\n)*", GUIDE.read_text()[start:])[0]
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    machines = []

    def begin(*arguments):
        machines.append(
            subprocess.Popen(
                [*command, str(tmp_path / "train.py"), *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    try:
        begin()
        address = machines[0].stdout.readline().split()[-1]
        begin(address)
        texts = [machine.communicate(timeout=180)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()  # its processes too
            machine.wait()
            machine.stdout.close()
    ends = [text.splitlines()[-1] for text in texts]
    assert ends[0] == ends[1]
    assert ends[0].startswith("rounds 4 sum of parameters")
