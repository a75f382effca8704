"""Whether a process notices that it was stopped."""

import pytest
import trio
import trio.testing

from protocol.awake import Awake


@pytest.mark.parametrize(("gap", "noticed"), [(0.6, False), (1.5, False), (3.0, True), (3600.0, True)])
async def test_a_gap_is_noticed_and_forgotten_soon(mock_clock, nursery, gap, noticed):
    awake = Awake()
    nursery.start_soon(awake.run)
    await trio.testing.wait_all_tasks_blocked()
    assert not awake.lately
    mock_clock.jump(gap)
    await trio.testing.wait_all_tasks_blocked()
    assert awake.lately == noticed
    for _ in range(20):
        mock_clock.jump(0.5)
        await trio.testing.wait_all_tasks_blocked()
    assert not awake.lately
