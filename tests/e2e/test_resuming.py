"""A newcomer that is killed in the middle of fetching the state, and started again."""

import pytest

from protocol.merkle import LEAF

pytestmark = pytest.mark.processes

ENOUGH = 3  # ranges


async def test_a_newcomer_that_is_killed_in_mid_fetch_fetches_only_what_is_missing(swarm):
    """The founder waits for it with the first state, so that this is what both of its lives are after."""
    larger = {"model": {"layers": 2, "width": 192}, "round": {"grace": 20.0}}
    founder = await swarm.found("--wait-for", 2, **larger)
    length = 8 * founder.of("started")[0].integer("parameters")  # with the outer momentum
    newcomer = swarm.daemon("newcomer")
    partial = newcomer.home / "partial"
    swarm.join(newcomer, founder.ticket, "--max-download", "1M")

    def there() -> int:
        """How many bytes of the state are in the home; the rest of the file are holes."""
        return partial.stat().st_blocks * 512 if partial.exists() else 0

    await swarm.until(lambda: there() >= ENOUGH * LEAF, "the middle of the fetch")
    newcomer.kill()
    had = there() // LEAF
    assert ENOUGH <= had < length // LEAF
    assert not newcomer.of("synced")

    swarm.join(newcomer, founder.ticket)
    await swarm.until(lambda: newcomer.of("synced"), "the rest of the state")
    assert not partial.exists()
    (synced,) = newcomer.of("synced")
    assert synced.integer("round") == 0
    # A page or two of the file are no range, and the last range is shorter.
    assert 0 < synced.integer("bytes") <= length - (had - 1) * LEAF
    await swarm.together(founder, newcomer)
    await swarm.stop(founder, newcomer)
    swarm.check_agreement()
