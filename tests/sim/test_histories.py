"""Random histories of faults: see `tests/sim/history.py`, and `scripts/simulate.py` for more of them."""

from __future__ import annotations

import gc

import pytest

from tests.sim.history import run_history

SEEDS = 500
LARGE = 556
"""One of 32 peers."""


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Each history looks for what is left in memory, among what is new."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("seed", [*range(SEEDS), LARGE])
async def test_whatever_happens(autojump_clock, seed):
    await run_history(seed)
