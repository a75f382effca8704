"""What all tests share."""

import os
import signal
import socket
import warnings

import pytest
from hypothesis import settings

# Whoever starts the tests in the background of a shell has SIGINT ignored, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis' deadline for an example is a timing assertion, and machines differ.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.fixture
def forked():
    """Forks a child that lives until the test ends, as the workers of a `DataLoader`; it may do something first."""
    children = []

    def fork(action=lambda: None):
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which the child does without
            child = os.fork()
        if not child:
            try:
                action()
                there.send(b".")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        there.close()
        with here:
            assert here.recv(1) == b"."

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
