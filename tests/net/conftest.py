"""Internets of network namespaces, and daemons in them."""

import pytest

from tests.net.topology import Internet, missing, sweep


@pytest.fixture(scope="session")
def namespaces():
    """Skips tests where there can be no network namespaces."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    sweep()


@pytest.fixture
def internet(namespaces, tmp_path):
    with Internet(tmp_path) as internet:
        yield internet
