"""The daemon: membership, training, state, and the command line."""
