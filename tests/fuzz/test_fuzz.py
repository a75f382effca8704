"""Every fuzz target for a few seconds; `scripts/fuzz.py` runs them for longer, guided by coverage."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

INPUTS = st.integers(0, 600).flatmap(lambda size: st.binary(min_size=size, max_size=size))
# Random inputs for each target, for a few seconds of most: what one run costs differs a thousandfold.
DEAR = {"endpoint": 300, "state": 100, "handshake": 800, "dht-store": 600, "dht-table": 1500, "records": 4000}
CHEAP = {"gateways": 100_000, "texts": 20_000, "streams": 50_000, "messages": 40_000, "dht-records": 30_000}
COUNTS = {**dict.fromkeys(TARGETS, 6000), **DEAR, **CHEAP}


@pytest.mark.parametrize("name", TARGETS)
def test_target(name):
    """Hypothesis makes up the inputs, and finds the shortest one that fails."""
    target = TARGETS[name]

    @settings(max_examples=30 if name in DEAR else 100, suppress_health_check=list(HealthCheck))
    @given(INPUTS)
    def check(data):
        target(data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_target_in_bulk(name):
    """Many inputs, the same ones each time."""
    rng = random.Random(name)
    for _ in range(COUNTS[name]):
        data = rng.randbytes(int(2 ** rng.uniform(0, 10)))
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"the input is bytes.fromhex({data.hex()!r})")
            raise
