"""The environment that the scripts make for themselves, short of really installing."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(monkeypatch):
    """The module `scripts/_environment.py`, with a `pip` that only writes down what it would install."""
    spec = importlib.util.spec_from_file_location("_environment", ROOT / "scripts" / "_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.installed = []
    monkeypatch.setattr(module, "install", lambda directory, lock, *what: module.installed.append(what[-1]))
    monkeypatch.setattr(module, "create", lambda directory: make_python(directory))
    monkeypatch.setattr(module, "starts", lambda directory: (directory / "bin" / "python").exists())
    return module


def make_python(directory):
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "python").symlink_to(sys.executable)


def test_second_start_installs_nothing(environment, tmp_path):
    python = environment.prepare(tmp_path / ".venv")
    assert python.resolve() == Path(sys.executable).resolve()
    assert environment.installed == ["setuptools", f"{ROOT}[dev]"]
    assert environment.prepare(tmp_path / ".venv") == python
    assert len(environment.installed) == 2


def test_unfinished_installation_is_done_again(environment, tmp_path, monkeypatch):
    def interrupted(directory, lock, *what):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.prepare(tmp_path / ".venv")
    assert not environment.is_ready(tmp_path / ".venv")
    monkeypatch.setattr(environment, "create", lambda directory: None)
    environment.prepare(tmp_path / ".venv")
    assert environment.is_ready(tmp_path / ".venv")


def test_new_pins_are_installed_into_the_same_environment(environment, tmp_path, monkeypatch):
    environment.prepare(tmp_path / ".venv")
    pins = tmp_path / "constraints.txt"
    pins.write_text("trio==0.35.0\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", pins)
    environment.prepare(tmp_path / ".venv")  # would fail to make the Python a second time
    assert len(environment.installed) == 4


def test_moved_environment_is_made_anew(environment, tmp_path, monkeypatch):
    environment.prepare(tmp_path / ".venv")
    (tmp_path / ".venv").rename(tmp_path / "moved")
    made = []
    monkeypatch.setattr(environment, "create", made.append)
    environment.prepare(tmp_path / "moved")
    assert made == [tmp_path / "moved"]


def test_directory_of_somebody_else_is_left_alone(environment, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("")
    with pytest.raises(SystemExit, match="was not made by this script"):
        environment.prepare(tmp_path / ".venv")
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["pyvenv.cfg"]


@pytest.mark.parametrize("script", ["demo.py", "test.py"])
def test_scripts_parse_on_old_pythons(script):
    ast.parse((ROOT / "scripts" / script).read_text(), feature_version=(3, 4))


def test_missing_ensurepip_is_explained(tmp_path):
    code = (
        "import importlib.util, pathlib, sys; sys.path.insert(0, 'scripts'); import _environment;"
        "importlib.util.find_spec = lambda name: None; _environment.prepare(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, tmp_path / ".venv"]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert result.returncode == 1
    assert "sudo apt install python3." in result.stderr and "Traceback" not in result.stderr


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    direct = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {re.split(r"[<>=]", requirement)[0] for requirement in direct} <= pins.keys()
    assert pins["torch"] == "2.13.0"
