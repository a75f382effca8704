"""The container image."""

import pytest

pytestmark = pytest.mark.docker


def test_runs_shoal_without_privileges(engine, image):
    assert "Usage" in engine.run("docker", "run", "--rm", image)
    code = "import os, protocol, dht, optim, peer; print(os.getuid())"
    assert engine.run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", code) == "10001\n"


def test_state_is_private_and_writable(engine, image):
    script = 'stat -c "%a %U" "$SHOAL_HOME" && touch "$SHOAL_HOME/file"'
    assert engine.run("docker", "run", "--rm", "--entrypoint", "sh", image, "-c", script) == "700 shoal\n"
