"""The networks that the other tests here run on are what they are called."""

import os
import socket

import pytest
import trio

from tests.net.topology import OTHER_PORTS, PREFIX, Namespace, Nat, remove_namespace, sweep

pytestmark = pytest.mark.netns

PORT = 4711
PATIENCE = 0.5  # seconds; an answer takes less than a millisecond
TRANSLATING = [nat for nat in Nat if nat.translates]
named = {"ids": lambda nat: nat.value}


def bound(host, port):
    """A socket of a host that shares its port with others of its kind."""
    made = host.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host.address, port))
    return made


def listen(host, port=PORT):
    listener = bound(host, port)
    listener.listen()
    listener.settimeout(PATIENCE)
    return listener


def dial(host, address, *, port=0, patience=PATIENCE):
    """A connection of a host, from a port of its own to an address."""
    connection = bound(host, port)
    connection.settimeout(patience)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@pytest.fixture
def observed():
    """A function that connects a host, from PORT, to a server, and gives the address that the server sees.

    The connections stay open until the test ends.
    """
    open_sockets = []

    def connect(host, server):
        with listen(server) as listener:
            # It always works, but on a busy machine the first packet may be lost.
            open_sockets.append(dial(host, (server.address, PORT), port=PORT, patience=10 * PATIENCE))
            accepted, address = listener.accept()
            open_sockets.append(accepted)
            return address[:2]

    yield connect
    for each in open_sockets:
        each.close()


def reaches(host, address):
    """Whether a connection is made; if not, there must be no answer at all."""
    try:
        dial(host, address).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("version", [4, 6])
def test_public_hosts_reach_each_other(internet, observed, version):
    one, other = (internet.host(name, versions=[version]) for name in ("one", "other"))
    assert observed(one, other) == (one.address, PORT)
    with listen(one):
        assert reaches(other, (one.address, PORT))


@pytest.mark.parametrize("nat", TRANSLATING, **named)
def test_nat_maps_ports_as_named(internet, observed, nat):
    servers = [internet.host(f"server{index}") for index in range(3)]
    (host,) = internet.home("home", nat).hosts
    hosts, ports = zip(*(observed(host, server) for server in servers), strict=True)
    assert set(hosts) == {host.public}
    assert host.public != host.address
    match nat:
        case Nat.PORT_PRESERVING:
            assert set(ports) == {PORT}
        case Nat.OTHER_PORT:
            assert len(set(ports)) == 1
            assert ports[0] in OTHER_PORTS
        case Nat.SYMMETRIC:
            assert len(set(ports)) == len(servers)


@pytest.mark.parametrize("nat", [Nat.NONE, Nat.FIREWALL], **named)
@pytest.mark.parametrize("version", [4, 6])
def test_hosts_without_nat_have_public_addresses(internet, observed, nat, version):
    server = internet.host("server", versions=[version])
    (host,) = internet.home("home", nat, versions=[version]).hosts
    assert observed(host, server) == (host.address, PORT) == (host.public, PORT)


@pytest.mark.parametrize("nat", Nat, **named)
def test_only_routers_that_filter_drop_what_comes_unasked(internet, observed, nat):
    server, stranger = internet.host("server"), internet.host("stranger")
    (host,) = internet.home("home", nat).hosts
    with listen(host):
        for address in {observed(host, server), (host.public, PORT)}:
            assert reaches(stranger, address) == (nat is Nat.NONE)


@pytest.mark.parametrize("nat", [Nat.NONE, Nat.FIREWALL], **named)
def test_ipv6_is_filtered_alike(internet, nat):
    stranger = internet.host("stranger", versions=[6])
    (host,) = internet.home("home", nat, versions=[6]).hosts
    with listen(host):
        assert reaches(stranger, (host.address, PORT)) == (nat is Nat.NONE)


def test_hosts_of_a_home_reach_each_other_and_not_those_of_another(internet):
    first = internet.home("first", Nat.PORT_PRESERVING, hosts=2)
    second = internet.home("second", Nat.PORT_PRESERVING)
    one, other = first.hosts
    (far,) = second.hosts
    assert far.address == one.address  # as in real homes, private addresses tell nothing
    with listen(one):
        assert reaches(other, (one.address, PORT))
    with listen(far), pytest.raises(ConnectionRefusedError):
        dial(other, (far.address, PORT))


@pytest.mark.parametrize(
    ("ours", "theirs", "opens"),
    [
        (Nat.PORT_PRESERVING, Nat.PORT_PRESERVING, True),
        (Nat.PORT_PRESERVING, Nat.OTHER_PORT, True),
        (Nat.OTHER_PORT, Nat.OTHER_PORT, True),
        (Nat.FIREWALL, Nat.PORT_PRESERVING, True),
        (Nat.PORT_PRESERVING, Nat.SYMMETRIC, False),
        (Nat.SYMMETRIC, Nat.SYMMETRIC, False),
    ],
    ids=lambda value: value.value if isinstance(value, Nat) else None,
)
async def test_simultaneous_open_works_if_both_nats_map_alike_for_all(internet, observed, ours, theirs, opens):
    server = internet.host("server")
    hosts = [internet.home(name, nat).hosts[0] for name, nat in (("ours", ours), ("theirs", theirs))]
    mapped = [observed(host, server) for host in hosts]
    connected = []

    async def connect(host, address):
        with trio.socket.from_stdlib_socket(bound(host, PORT)) as connection:
            await connection.connect(address)
            connected.append(host)

    with trio.move_on_after(5 if opens else 2 * PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, hosts[0], mapped[1])
            nursery.start_soon(connect, hosts[1], mapped[0])
    assert len(connected) == (2 if opens else 0)


def test_cut_network_is_silent_until_it_heals(internet):
    one, other = internet.host("one"), internet.host("other")
    with listen(other):
        one.network.cut()
        assert not reaches(one, (other.address, PORT))
        one.network.heal()
        assert reaches(one, (other.address, PORT))


def test_sweep_removes_what_a_dead_process_left_behind(namespaces):
    leftover = Namespace.make(f"{PREFIX}{2**22 + 1}-1-core", versions=(4,))  # more than any process id
    ours = Namespace.make(f"{PREFIX}{os.getpid()}-0-core", versions=(4,))
    try:
        sweep()
        assert leftover.name not in os.listdir("/run/netns")
        assert ours.name in os.listdir("/run/netns")
    finally:
        remove_namespace(ours.name)


def test_what_runs_inside_ends_with_the_topology(internet, tmp_path):
    process = internet.host("host").namespace.start("sleep", "1000", log=tmp_path / "log")
    internet.close()
    assert process.returncode is not None
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"{PREFIX}{os.getpid()}-")]
