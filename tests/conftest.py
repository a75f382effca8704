"""What all tests share."""

import signal

import pytest
from hypothesis import settings

# Whoever starts the tests in the background of a shell has SIGINT ignored, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis' deadline for an example is a timing assertion, and machines differ.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Where tests are spread over processes, those that need the whole machine follow one another in one of these."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if any(item.get_closest_marker(name) for name in ("processes", "netns", "docker")):
            item.add_marker(pytest.mark.xdist_group("machine"))
