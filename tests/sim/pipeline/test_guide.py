"""The script of docs/swarm.md works as it is printed."""

import re
from pathlib import Path

from optim.swarm.stages import assemble

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "swarm.md"


def test_the_script_of_the_guide_trains(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    assert sorted(names["states"]) == [0, 1]
    assert names["losses"][-1] < names["losses"][0] / 10
    names["chain"]().model.load_state_dict(assemble(state.model for state in names["states"].values()))
