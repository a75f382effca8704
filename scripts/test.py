"""Run the test suite.

    python3 scripts/test.py [ARGUMENTS OF pytest]

Needs nothing but Python >= 3.11: the first run makes `.venv` beside this folder, later runs start at once.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  this file parses on older Pythons in order to say so
    sys.exit("Shoal needs Python 3.11 or newer; this is Python " + sys.version.split()[0])

import os

from _environment import ROOT, run

if __name__ == "__main__":
    os.chdir(ROOT)
    run("pytest", *sys.argv[1:])
