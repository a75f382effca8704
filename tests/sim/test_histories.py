"""Random histories of faults: see `tests/sim/history.py`, and `scripts/simulate.py` for more of them."""

from __future__ import annotations

import gc

import pytest

from tests.sim.history import run_history

SEEDS = 500
FAULTS = {
    48: "a coordinator that stepped down for a peer it had lost before opened its window again and again",
    2303: "a coordinator that had excluded itself, and then lost all others, did nothing for ever",
}
"""Seeds that have shown a fault."""
LARGE = 556
"""One of 32 peers."""


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Each history looks for what is left in memory, among what is new."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *FAULTS, LARGE}))
async def test_whatever_happens(autojump_clock, seed):
    await run_history(seed)
