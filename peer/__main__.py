"""`python -m peer` is `shoal`."""

from peer.cli import main

main()
