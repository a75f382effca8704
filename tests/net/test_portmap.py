"""A port that a real gateway (Debian's miniupnpd) maps leads in from outside, until whoever asked for it ends."""

import importlib.util
import json
import subprocess
import sys

import pytest
import trio

from tests.net import topology
from tests.net.mapper import GREETING
from tests.net.topology import Nat

pytestmark = pytest.mark.netns

PORT = 7070
PATIENCE = 0.5  # seconds; an answer takes less than a millisecond
LIMIT = 30.0  # seconds after which something hangs
EXIT_LIMIT = 5.0  # seconds; one is promised for the mapping, and Python takes its time


class MappingHome:
    """A home whose router maps ports, and a host outside."""

    def __init__(self, internet, directory):
        self.home = internet.home("home", Nat.PORT_PRESERVING)
        self.stranger = internet.host("stranger")
        self.directory = directory
        self.home.offer_port_mapping(directory)

    def start_mapper(self, *methods):
        """Starts the program that wants its port mapped."""
        namespace = self.home.hosts[0].namespace
        command = namespace.command(sys.executable, "-m", "tests.net.mapper", str(PORT), *methods)
        log = self.directory / "mapper.log"
        return namespace.adopt(topology.start(*command, log=log, stdout=subprocess.PIPE))

    def greeting_from(self, address):
        """What the stranger reads when it connects to an address; None if nobody answers."""
        with self.stranger.socket() as sock:
            sock.settimeout(PATIENCE)
            try:
                sock.connect(address)
                return sock.recv(100)
            except TimeoutError:
                return None


@pytest.fixture
def mapping_home(port_mapping, internet, tmp_path):
    return MappingHome(internet, tmp_path)


@pytest.mark.parametrize(
    "method",
    [
        "pcp",
        "nat-pmp",
        pytest.param(
            "upnp",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("miniupnpc") is None, reason="miniupnpc is not installed (shoal[upnp])"
            ),
        ),
    ],
)
async def test_mapped_port_leads_in_until_exit(mapping_home, method):
    outside = (mapping_home.home.hosts[0].public, PORT)
    assert mapping_home.greeting_from(outside) is None
    program = mapping_home.start_mapper(method)
    with trio.fail_after(LIMIT):
        report = json.loads(await trio.to_thread.run_sync(program.stdout.readline, abandon_on_cancel=True))
    assert report == {"external": list(outside), "method": method}
    assert mapping_home.greeting_from(outside) == GREETING
    assert str(PORT) in mapping_home.home.router.run("nft", "list", "table", "inet", "miniupnpd")
    program.terminate()
    assert program.wait(EXIT_LIMIT) == 0, (mapping_home.directory / "mapper.log").read_text()
    assert mapping_home.greeting_from(outside) is None
    assert str(PORT) not in mapping_home.home.router.run("nft", "list", "table", "inet", "miniupnpd")
