"""Daemons on networks as people have them complete rounds together."""

import pytest

from tests.net.topology import Link, Nat

pytestmark = pytest.mark.netns

ROUNDS = 3

# The homes that join a founder with a public address.
HOMES = [
    (Nat.NONE, Nat.NONE),
    (Nat.FIREWALL,),
    (Nat.PORT_PRESERVING,),
    (Nat.OTHER_PORT,),
    (Nat.SYMMETRIC,),
]


def named(nats):
    return "+".join(nat.value for nat in nats)


@pytest.mark.parametrize("nats", HOMES, ids=named)
async def test_homes_train_with_a_public_founder(internet, net_swarm, nats):
    public = internet.host("public")
    hosts = [internet.home(f"home{index}", nat).hosts[0] for index, nat in enumerate(nats, start=1)]
    await net_swarm.found(public)
    for host in hosts:
        net_swarm.join(host)
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)


# The routers of two homes, and the paths between them that are to be found.
PAIRS = [
    ((Nat.PORT_PRESERVING, Nat.PORT_PRESERVING), "punched"),
    ((Nat.OTHER_PORT, Nat.PORT_PRESERVING), "punched"),
    ((Nat.FIREWALL, Nat.FIREWALL), "punched"),
    ((Nat.SYMMETRIC, Nat.PORT_PRESERVING), "relayed"),
    ((Nat.SYMMETRIC, Nat.SYMMETRIC), "relayed"),
]


@pytest.mark.parametrize(("nats", "path"), PAIRS, ids=lambda value: named(value) if isinstance(value, tuple) else value)
async def test_two_homes_train_together(internet, net_swarm, nats, path):
    founder = await net_swarm.found(internet.host("public"))
    one, two = [net_swarm.join(internet.home(f"home{index}", nat).hosts[0]) for index, nat in enumerate(nats, start=1)]
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)
    await net_swarm.until(lambda: one.path_to(two) == two.path_to(one) == path)
    assert one.path_to(founder) == two.path_to(founder) == "direct"
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)
    assert one.path_to(two) == two.path_to(one) == path
    await net_swarm.until(lambda: founder.reachability == "public")
    await net_swarm.until(lambda: one.reachability == two.reachability == "private")


async def test_hosts_of_one_home_connect_on_their_own_network(internet, net_swarm):
    await net_swarm.found(internet.host("public"))
    one, two = map(net_swarm.join, internet.home("home", Nat.SYMMETRIC, hosts=2).hosts)
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)
    await net_swarm.until(lambda: one.path_to(two) == two.path_to(one) == "direct")


async def test_firewalls_of_ipv6_are_punched(internet, net_swarm):
    await net_swarm.found(internet.host("public", versions=[6]))
    homes = [internet.home(name, Nat.FIREWALL, versions=[6]) for name in ("home1", "home2")]
    one, two = [net_swarm.join(home.hosts[0]) for home in homes]
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)
    await net_swarm.until(lambda: one.path_to(two) == two.path_to(one) == "punched")


async def test_hosts_with_ipv6_only_train(internet, net_swarm):
    hosts = [internet.host(name, versions=[6]) for name in ("one", "two", "three")]
    await net_swarm.found(hosts[0])
    for host in hosts[1:]:
        net_swarm.join(host)
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)


async def test_peer_that_is_cut_off_is_left_behind_and_catches_up(internet, net_swarm):
    hosts = [internet.host(name) for name in ("one", "two", "three")]
    one = await net_swarm.found(hosts[0])
    two, lost = (net_swarm.join(host) for host in hosts[1:])
    await net_swarm.rounds_together([one, two, lost], ROUNDS)
    lost.host.network.cut()
    await net_swarm.rounds_together([one, two], ROUNDS, patience=20)
    lost.host.network.heal()
    await net_swarm.rounds_together([one, two, lost], ROUNDS)


async def test_peers_train_over_a_home_line(internet, net_swarm):
    near = internet.host("near")
    far = internet.host("far", link=Link(rate=(100.0, 100.0), delay=25.0))
    # Rounds that are longer than it takes to fetch a state over this line.
    await net_swarm.found(near, inner_steps=300)
    net_swarm.join(far)
    await net_swarm.rounds_together(net_swarm.peers, ROUNDS)
