import pytest
import trio

from peer import probe
from peer.probe import FIRST, MAX_PROBE, Prober, measure
from protocol.errors import ProtocolError, RequestRefused, RequestTimeout
from protocol.transport import Address

OURS, THEIRS = 1_000_000.0, 1_000_060.0
BANDWIDTH = 1_000_000


@pytest.fixture
async def pair(mesh):
    """Two endpoints on a link of 1 MB/s and 10 ms each way; the second answers probes."""
    made = await mesh(2)
    made.network.set_link("h0", "h1", latency=0.01, bandwidth=BANDWIDTH)
    Prober(made.endpoints[1], clock=lambda: THEIRS)
    return made


async def test_a_way_is_measured(pair, autojump_clock):
    one, two = pair.endpoints
    found = await measure(one, two.peer_id, clock=lambda: OURS)
    assert found.seen.host == "h0"
    assert found.clock == pytest.approx(60.0, abs=0.1)
    assert found.rtt == pytest.approx(0.02, rel=0.5)
    assert found.upload == pytest.approx(BANDWIDTH, rel=0.2)
    assert found.download == pytest.approx(BANDWIDTH, rel=0.2)
    assert max(one.bytes_sent, one.bytes_received) < MAX_PROBE + 2 * FIRST


async def test_of_a_way_that_is_too_slow_the_rate_so_far_is_told(pair, autojump_clock):
    one, two = pair.endpoints
    pair.network.set_link("h0", "h1", latency=0.01, bandwidth=100_000)
    begun = trio.current_time()
    found = await measure(one, two.peer_id, limit=2.0)
    assert trio.current_time() - begun <= 2.0
    assert 50_000 < found.upload < 150_000
    assert found.download is None


async def test_a_connection_that_is_lost_while_it_is_measured(mesh, autojump_clock):
    one, two = (await mesh(2)).endpoints

    async def until_it_is_to_send(request, stream):
        if request.want:
            two.disconnect(one.peer_id, "enough")
        for _ in range(request.send >> 16):
            await stream.receive_into(bytearray(1 << 16))
        return probe.ProbeAnswer(Address("h0", 1), 0.0)

    two.handle(probe.Probe, until_it_is_to_send)
    found = await measure(one, two.peer_id)
    assert found.upload > 0
    assert found.download is None


async def test_a_way_on_which_nothing_comes_back(pair, autojump_clock):
    one, two = pair.endpoints
    await one.connect(two.peer_id)
    pair.network.set_link("h0", "h1", latency=5.0)
    with pytest.raises(RequestTimeout, match="did not answer a probe within 2 s"):
        await measure(one, two.peer_id, limit=2.0)


async def test_who_measures_may_measure_again_at_once(pair, autojump_clock):
    one, two = pair.endpoints
    await measure(one, two.peer_id)
    await measure(one, two.peer_id)


async def test_who_asks_too_often_is_refused(pair, autojump_clock):
    one, two = pair.endpoints
    with pytest.raises(RequestRefused, match="enough probes"):
        for _ in range(30):
            await measure(one, two.peer_id)
    with trio.fail_after(300.0):
        await trio.sleep(120.0)
        await measure(one, two.peer_id)


async def test_one_probe_at_a_time(mesh, autojump_clock):
    made = await mesh(3)
    one, two, target = made.endpoints
    for host in ("h0", "h1"):
        made.network.set_link(host, "h2", latency=0.01, bandwidth=BANDWIDTH)
    Prober(target)
    refusals = []

    async def try_it(endpoint):
        try:
            await measure(endpoint, target.peer_id)
        except RequestRefused as error:
            refusals.append(error.code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(try_it, one)
        nursery.start_soon(try_it, two)
    assert refusals == ["busy"]


async def test_a_probe_that_never_comes_does_not_keep_others_out(pair, autojump_clock):
    one, two = pair.endpoints
    async with one.open(two.peer_id, probe.Probe(1000, 0)) as stream:
        with pytest.raises(RequestRefused, match="longer than 15 s"):
            await stream.receive(probe.ProbeAnswer)
    await measure(one, two.peer_id)


def test_sizes_are_bounded():
    from protocol import wire

    with pytest.raises((ValueError, ProtocolError)):
        wire.encode(probe.Probe(MAX_PROBE + 1, 0))


async def test_a_peer_that_does_not_answer_probes(pair, autojump_clock):
    one, two = pair.endpoints
    with pytest.raises(RequestRefused) as error:
        await measure(two, one.peer_id)
    assert error.value.code == "unknown_type"
    assert one.addresses(two.peer_id) == (Address("h1", 4000),)
