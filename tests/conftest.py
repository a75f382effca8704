"""What all tests share."""

import signal

from hypothesis import settings

# Whoever starts the tests in the background of a shell has SIGINT ignored, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis' deadline for an example is a timing assertion, and machines differ.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
