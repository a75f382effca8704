"""Run the demo: a local swarm in real processes that loses a peer and gains one.

    python3 scripts/demo.py [ARGUMENTS OF `shoal demo`]

Needs nothing but Python >= 3.11: the first run makes `.venv` beside this folder, later runs start at once.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  this file parses on older Pythons in order to say so
    sys.exit("Shoal needs Python 3.11 or newer; this is Python " + sys.version.split()[0])

from _environment import run

if __name__ == "__main__":
    run("peer", "demo", *sys.argv[1:])
