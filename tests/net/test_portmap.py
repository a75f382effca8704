"""A port that a real gateway (Debian's miniupnpd) maps leads in from outside, until whoever asked for it ends."""

import importlib.util
import json
import shutil
import socket
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
CHAINS = """
add table inet miniupnpd
add chain inet miniupnpd forward { type filter hook forward priority -25; }
add chain inet miniupnpd prerouting_miniupnpd { type nat hook prerouting priority dstnat; }
add chain inet miniupnpd postrouting_miniupnpd { type nat hook postrouting priority srcnat; }
"""
CONFIGURATION = """
ext_ifname=wan
listening_ip=lan
http_port=5000
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
upnp_table_name=miniupnpd
upnp_nat_table_name=miniupnpd
upnp_forward_chain=forward
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
uuid=7f1c1c1e-6a3c-4d3b-9a55-0c0a5d3f1d11
allow 1024-65535 192.168.1.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


class MappingHome:
    """A home whose router maps ports, and a host outside."""

    def __init__(self, internet, directory):
        self.home = internet.home("home", Nat.PORT_PRESERVING)
        self.stranger = internet.host("stranger")
        self.directory = directory
        router = self.home.router
        (directory / "chains").write_text(CHAINS)
        router.run("nft", "-f", directory / "chains")
        (directory / "miniupnpd.conf").write_text(CONFIGURATION)
        command = ["miniupnpd", "-d", "-f", directory / "miniupnpd.conf", "-P", directory / "miniupnpd.pid"]
        gateway = router.start(*command, log=directory / "log")
        self.wait_until_it_answers(gateway)

    def wait_until_it_answers(self, gateway):
        """Asks for the external address, as NAT-PMP does, until there is an answer."""
        with self.home.hosts[0].socket(socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.1)
            sock.connect((self.home.gateway, 5351))
            for _ in range(100):
                try:
                    sock.send(b"\0\0")
                    assert sock.recv(100)[:4] == b"\x00\x80\x00\x00"
                except (ConnectionRefusedError, TimeoutError):
                    assert gateway.poll() is None, (self.directory / "log").read_text()
                else:
                    return
        pytest.fail(f"miniupnpd does not answer: {(self.directory / 'log').read_text()}")

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
def mapping_home(internet, tmp_path):
    absent = [tool for tool in ("miniupnpd", "nft") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (Debian: apt-get install miniupnpd-nftables nftables)")
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
