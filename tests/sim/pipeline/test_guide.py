"""The scripts of docs/swarm.md work as they are printed."""

import json
import re
from pathlib import Path

import pytest
import torch

from optim.swarm.stages import assemble
from peer.data import Corpus
from peer.home import Home
from peer.manifest import Manifest, settings_from
from peer.model import Transformer
from peer.pipeline.audit import ledgers_told
from peer.pipeline.files import StageFiles, export_model
from peer.pipeline.reference import make_servers, make_step
from peer.pipeline.run import make_pipeline
from protocol.identity import Identity
from tests.optim.swarm.toys import peer_id

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "swarm.md"
AUDIT, SCRIPT, DECODER, WHOLE = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def run(code, names):
    exec(compile(code, str(GUIDE), "exec"), names)
    return names


def has_learned(names):
    assert sorted(names["states"]) == [0, 1]
    return names["losses"][-1] < names["losses"][0] / 10


def test_the_scripts_train():
    names = run(SCRIPT, {})
    assert has_learned(names)
    names["chain"]().model.load_state_dict(assemble(state.model for state in names["states"].values()))
    pytest.importorskip("transformers")
    run(DECODER, names)
    assert has_learned(names)
    names["model"].load_state_dict(assemble(state.model for state in names["states"].values()))


def test_the_counting_is_checked(tmp_path):
    def files(steps):
        for stage in range(3):
            ledger = ledgers_told({peer_id(stage): dict.fromkeys(range(16), 16)})
            events = [{"event": "stage_step", "stage": stage, "step": step, "ledgers": ledger} for step in range(steps)]
            path = tmp_path / f"{stage}.jsonl"
            path.write_text("".join(f"{json.dumps(event)}\n" for event in [{"event": "started"}, *events]))
            yield path

    assert run(AUDIT, {"paths": list(files(1000))})["faults"] == []
    faults = run(AUDIT, {"paths": list(files(999))})["faults"]
    assert faults == [f"stage {stage} has not settled step 999" for stage in range(3)]


def test_plain_pytorch_loads_an_exported_model(tmp_path):
    algorithm = {"name": "swarm", "stages": 2, "microbatches": 2}
    model = {"layers": 2, "width": 32, "heads": 2, "context": 16}
    settings = settings_from({"algorithm": algorithm, "model": model, "inner": {"batch": 2}, "run": {"rounds": 100}})
    manifest, home = Manifest.create(settings, Identity.generate()), Home(tmp_path / "home")
    pipeline = make_pipeline(settings, manifest.run_id, Corpus.open(Path(json.__file__).parent))
    servers = make_servers(pipeline)
    make_step(pipeline, servers)
    home.manifest.write_text(manifest.dump())
    for number, server in enumerate(servers):
        StageFiles(home.checkpoints).save(number, server.snapshot())
    names = run(WHOLE, {"path": export_model(home, [])})
    whole = Transformer(settings.model)
    whole.load_state_dict(assemble(server.snapshot().model for server in servers))
    tokens = torch.arange(20, 36)[None]
    torch.testing.assert_close(names["logits"](tokens), whole(tokens))
    for server in servers:
        for name, values in server.snapshot().inner["exp_avg"].items():
            assert torch.equal(names["exp_avg"][name], values)
