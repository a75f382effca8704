"""The linter, the formatter and the type checker have nothing to say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_tool_is_content(tool):
    result = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
