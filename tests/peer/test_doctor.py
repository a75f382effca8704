import errno
import json
import os
import random
import time
from functools import partial

import attrs
import pytest
import trio

from dht import DHT, members_key
from peer import doctor_machine, doctor_nat, doctor_network
from peer.contact import named
from peer.doctor import LIMIT, Examination, Finding, Patient, Report, examine
from peer.doctor_nat import Surroundings, explain_nat
from peer.doctor_network import explain
from peer.finding import ManifestReply, ManifestRequest
from peer.home import Home
from peer.manifest import Manifest
from peer.probe import Prober
from peer.settings import MembershipSettings, Settings
from peer.ticket import Ticket, TicketError
from protocol.endpoint import Endpoint, Limits
from protocol.errors import AddressError, HandshakeError, MappingFailed, PeerUnreachable, RequestRefused, RequestTimeout
from protocol.identity import Identity, PeerId
from protocol.natpmp import Grant
from protocol.reachability import DialBack, DialBackResult, Reachability
from protocol.tcp import TcpTransport
from protocol.transport import Address

LOOPBACK = Address("127.0.0.1", 0)
FOUNDER = Identity.from_seed(b"f" * 32)
KEY = b"k" * 32


@pytest.fixture
def healthy_machine(monkeypatch):
    """Leaves the steps about the machine out."""

    async def skip(*patient_and_examination):
        await trio.lowlevel.checkpoint()
        return []

    monkeypatch.setattr(doctor_machine, "examine", skip)
    monkeypatch.setattr(doctor_machine, "accelerator", skip)


@pytest.fixture
async def member(nursery):
    """`await member()` makes a peer on loopback that answers probes, knows a run, and is in its DHT."""

    async def make(manifest=None, psk=None, limits=None):
        identity = Identity.generate()
        endpoint = Endpoint(identity, TcpTransport(), psk=psk, limits=limits, rng=random.Random())
        dht = DHT(endpoint, identity, rng=random.Random())
        Prober(endpoint)
        Reachability(endpoint, rng=random.Random())
        if manifest is not None:

            async def tell(request, stream):
                if request.run != manifest.run_id:
                    raise RequestRefused("another run", code="unknown_run")
                return ManifestReply(manifest.dump())

            endpoint.handle(ManifestRequest, tell)
        await nursery.start(endpoint.run, LOOPBACK)
        await nursery.start(dht.run)
        if manifest is not None:
            await dht.put(members_key(manifest.run_id), b"member")
        return endpoint, dht

    return make


@pytest.fixture
def patient(tmp_path):
    """`patient(endpoint, …)` is one that is to reach these endpoints."""

    def make(*contacts, **changes):
        pairs = [each if isinstance(each, tuple) else (each.peer_id, each.address) for each in contacts]
        defaults = {"home": tmp_path / "home", "listen": LOOPBACK, "map_port": False}
        return Patient(contacts=tuple(pairs), **{**defaults, **changes})

    return make


async def findings_of(patient):
    findings = []
    with trio.fail_after(LIMIT + 2):
        await examine(patient, findings.append)
    return findings


def of(findings, step):
    return [(finding.verdict, finding.message) for finding in findings if finding.step == step]


def code_of(findings):
    report = Report(as_json=True)
    for finding in findings:
        report.add(finding)
    return report.finish()


# The network


async def test_a_peer_that_can_be_reached(healthy_machine, member, patient):
    endpoint, _ = await member()
    findings = await findings_of(patient(endpoint))
    steps = "port loopback dial handshake version rtt speed clock dial-back nat relay"
    assert [finding.step for finding in findings] == steps.split()
    assert of(findings, "dial-back") == [("ok", "others can dial this machine")]
    assert {finding.verdict for finding in findings} == {"ok"}
    assert "/s up, " in of(findings, "speed")[0][1]
    assert of(findings, "relay")[0][1].startswith(f"peer {endpoint.peer_id.short} relays: ")
    assert code_of(findings) == 0


def trio_verdict(verdict):
    """A method that says this."""

    async def check(self):
        await trio.lowlevel.checkpoint()
        return verdict

    return check


async def silent(nursery):
    """A server that takes connections and says nothing."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def keep(stream):
        async with stream:
            await trio.sleep_forever()

    nursery.start_soon(partial(trio.serve_listeners, keep, [listener], handler_nursery=nursery))
    return Address(*listener.socket.getsockname()[:2])


async def saying(nursery, words):
    """A server that says something else."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def speak(stream):
        async with stream:
            await stream.receive_some()
            await stream.send_all(words)

    nursery.start_soon(partial(trio.serve_listeners, speak, [listener], handler_nursery=nursery))
    return Address(*listener.socket.getsockname()[:2])


async def closed_port():
    with trio.socket.socket() as sock:
        await sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname())


async def test_a_verdict_for_each_address(healthy_machine, member, patient, nursery, monkeypatch):
    monkeypatch.setattr(doctor_network, "DIAL_LIMIT", 1.0)
    good, _ = await member()
    private, _ = await member(psk=KEY)
    somebody = PeerId(b"s" * 32)
    bad = [
        (somebody, await closed_port()),
        (somebody, good.address),
        (private.peer_id, private.address),
        (somebody, await silent(nursery)),
        (somebody, await saying(nursery, b"HTTP/1.1 400 Bad")),
        (somebody, await saying(nursery, b"shoal\x63\x00\x00")),
        (somebody, Address("nobody.invalid", 7070)),
    ]
    complaints = [
        ("dial", "refused: nobody listens there"),
        ("handshake", "another peer is there"),
        ("handshake", "asks for a swarm key, and we have none"),
        ("handshake", "took the connection, and then said nothing"),
        ("handshake", "speaks another protocol"),
        ("version", "speaks version 99"),
        ("dial", "nobody.invalid"),
    ]
    findings = await findings_of(patient(good, *bad))
    for (_, address), (step, complaint) in zip(bad, complaints, strict=True):
        ((verdict, message),) = [each for each in of(findings, step) if f"{address} " in each[1] and each[0] != "ok"]
        assert verdict == "warn"
        assert complaint in message
    assert len([verdict for verdict, _ in of(findings, "dial") if verdict == "ok"]) == 6
    assert of(findings, "version")[-1] == ("ok", "all who are reached speak version 1 of the protocol, as we do")
    assert of(findings, "dns")[0][0] == "warn"
    assert all(finding.advice for finding in findings if finding.verdict != "ok")
    assert code_of(findings) == 0

    findings = await findings_of(patient(*bad))
    assert [verdict for verdict, _ in of(findings, "handshake") + of(findings, "version")] == ["fail"] * 5
    assert code_of(findings) == 3


async def test_the_run_is_looked_for_as_a_newcomer_would(healthy_machine, member, patient):
    manifest = Manifest.create(Settings(), FOUNDER)
    holder, holders_dht = await member(manifest)
    helper, _ = await member()
    await holders_dht.bootstrap([(helper.peer_id, helper.address)])
    await holders_dht.put(members_key(manifest.run_id), b"member")
    findings = await findings_of(patient(helper, run=manifest.run_id))  # which knows nothing of the run itself
    ((verdict, message),) = of(findings, "run")
    assert verdict == "ok"
    assert message.endswith(f"is known to peer {holder.peer_id.short}")
    assert holder.peer_id.short in of(findings, "rtt")[0][1]

    findings = await findings_of(patient(helper, run=bytes(32)))
    ((verdict, message),) = of(findings, "run")
    assert verdict == "fail"
    assert "no peer of this run was found" in message
    assert code_of(findings) == 1


async def test_a_run_that_does_not_admit_this_peer(healthy_machine, member, patient, tmp_path):
    own = Home(tmp_path / "home").identity.peer_id
    listed = Settings(membership=MembershipSettings(policy="allow", allow=(str(own),)))
    unlisted = attrs.evolve(listed, membership=MembershipSettings(policy="allow", allow=(str(FOUNDER.peer_id),)))
    for settings, verdict in ((listed, "ok"), (unlisted, "fail")):
        manifest = Manifest.create(settings, FOUNDER)
        holder, _ = await member(manifest)
        findings = await findings_of(patient(holder, run=manifest.run_id))
        assert of(findings, "run")[0][0] == verdict


async def test_a_private_run_and_its_key(healthy_machine, member, patient):
    endpoint, _ = await member(psk=KEY)
    assert code_of(await findings_of(patient(endpoint, swarm_key=KEY))) == 0
    findings = await findings_of(patient(endpoint, swarm_key=b"w" * 32))
    assert "another swarm key" in of(findings, "handshake")[0][1]
    assert code_of(findings) == 3


async def test_a_port_that_is_taken(healthy_machine, member, patient):
    endpoint, _ = await member()
    findings = await findings_of(patient(endpoint, listen=endpoint.address))
    (port,) = (finding for finding in findings if finding.step == "port")
    assert port.verdict == "fail"
    assert "in use" in port.message
    assert "another --listen" in port.advice
    assert of(findings, "dial")[0][0] == "ok"
    assert code_of(findings) == 1


async def test_a_peer_that_measures_nothing(healthy_machine, patient, nursery):
    mute = Endpoint(Identity.generate(), TcpTransport(), rng=random.Random())
    await nursery.start(mute.run, LOOPBACK)
    findings = await findings_of(patient(mute))
    assert of(findings, "speed")[0][0] == "warn"
    assert of(findings, "nat") == [("ok", "not known: the peer is on this machine")]
    assert code_of(findings) == 0


@pytest.mark.parametrize("answers", [True, False])
async def test_a_machine_that_cannot_be_dialled(healthy_machine, patient, nursery, answers):
    endpoint = Endpoint(Identity.generate(), TcpTransport(), rng=random.Random())

    async def in_vain(request, stream):
        await trio.lowlevel.checkpoint()
        return DialBackResult(False)

    if answers:
        endpoint.handle(DialBack, in_vain)
    await nursery.start(endpoint.run, LOOPBACK)
    findings = await findings_of(patient(endpoint))
    ((verdict, message),) = of(findings, "dial-back")
    assert (verdict, "cannot dial" in message) == (("warn", True) if answers else ("ok", False))
    assert code_of(findings) == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(relay=False), "the peer in reach does not relay: two machines that nobody can dial will not meet"),
        (Limits(max_circuits=1, max_circuits_of_peer=1), "offered to relay, and did not"),
    ],
    ids=["unwilling", "busy"],
)
@pytest.mark.parametrize("public", [True, False])
async def test_a_peer_that_does_not_relay(healthy_machine, member, patient, monkeypatch, limits, message, public):
    verdicts = trio_verdict("public" if public else "private")
    monkeypatch.setattr(Reachability, "check", verdicts)
    endpoint, _ = await member(limits=limits)
    findings = await findings_of(patient(endpoint))
    (finding,) = [finding for finding in findings if finding.step == "relay"]
    assert finding.verdict == ("ok" if public else "warn")
    assert message in finding.message
    assert "start `shoal serve`" in finding.advice
    assert code_of(findings) == 0


async def test_what_peers_see_is_known_although_they_measure_nothing(healthy_machine, member, patient, monkeypatch):
    async def in_vain(*endpoint_and_peer, **limits):
        await trio.lowlevel.checkpoint()
        raise RequestTimeout("too slow")

    monkeypatch.setattr(doctor_network, "measure", in_vain)
    monkeypatch.setattr(doctor_nat, "is_loopback", lambda host: False)
    endpoint, _ = await member()
    findings = await findings_of(patient(endpoint))
    assert of(findings, "speed") == [("warn", f"not measured: {endpoint.peer_id.short}: too slow")]
    assert of(findings, "nat") == [("ok", "peers see this machine at its own address, 127.0.0.1")]


async def test_a_wrong_clock(healthy_machine, patient, nursery):
    endpoint = Endpoint(Identity.generate(), TcpTransport(), rng=random.Random())
    Prober(endpoint, clock=lambda: time.time() + 7200)
    await nursery.start(endpoint.run, LOOPBACK)
    ((verdict, message),) = of(await findings_of(patient(endpoint)), "clock")
    assert verdict == "warn"
    assert "ahead of ours" in message


class Router:
    def __init__(self, method, grant):
        self.method = method
        self._grant = grant
        self.calls = []

    async def map(self, port, wanted, lifetime):
        self.calls.append(("map", port))
        await trio.lowlevel.checkpoint()
        if self._grant is None:
            raise MappingFailed("it is switched off")
        return self._grant

    async def unmap(self, port):
        self.calls.append(("unmap", port))
        await trio.lowlevel.checkpoint()


async def mapping_finding(patient, monkeypatch, *routers):
    async def gateway():
        await trio.lowlevel.checkpoint()
        return "192.0.2.1"

    monkeypatch.setattr(doctor_network, "routers", lambda gateway: list(routers))
    monkeypatch.setattr(doctor_network, "default_gateway", gateway)
    findings = await findings_of(patient(listen=Address("0.0.0.0", 0), map_port=True))
    return next(finding for finding in findings if finding.step == "mapping")


async def test_a_router_that_maps(healthy_machine, patient, monkeypatch):
    router = Router("pcp", Grant(Address("203.0.113.9", 40_000), 60))
    finding = await mapping_finding(patient, monkeypatch, router, Router("nat-pmp", None))
    assert (finding.verdict, finding.message) == ("ok", "the router maps 203.0.113.9:40000 (pcp); removed again")
    assert [call for call, _ in router.calls] == ["map", "unmap"]


async def test_a_router_that_does_not_map(healthy_machine, patient, monkeypatch):
    finding = await mapping_finding(patient, monkeypatch, Router("pcp", None))
    assert (finding.verdict, finding.message) == ("warn", "no port was mapped: pcp: it is switched off")
    assert "--announce" in finding.advice


def unreachable(number):
    error = PeerUnreachable("cannot connect")
    error.__cause__ = OSError("all attempts failed")
    error.__cause__.__cause__ = ExceptionGroup("", [OSError(number, os.strerror(number))])
    return error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (unreachable(errno.ECONNREFUSED), "refused"),
        (unreachable(errno.ENETUNREACH), "unreachable"),
        (unreachable(errno.EHOSTUNREACH), "unreachable"),
        (unreachable(errno.ETIMEDOUT), "timeout"),
        (PeerUnreachable("192.0.2.7:1 did not answer within 10 s"), "timeout"),
        (HandshakeError("too slow"), "refused"),
        (PeerUnreachable("something else"), "something else"),
    ],
)
def test_failures_are_explained(error, verdict):
    reason, advice = explain(error)
    assert reason.startswith(verdict)
    assert advice


HOME, PUBLIC, OTHER, CARRIERS = "192.168.1.2", "203.0.113.5", "203.0.113.6", "100.64.0.9"
BEHIND = f"behind a router: this machine is {HOME}, and peers see {PUBLIC}"


def seen_at(*ports, host=PUBLIC):
    return [Address(host, port) for port in ports]


@pytest.mark.parametrize(
    ("found", "verdict", "message", "advice"),
    [
        ({"seen": []}, "warn", "not known: nobody could tell", "try again"),
        ({"seen": seen_at(5, host="127.0.0.1")}, "ok", "not known: the peer is on this machine", None),
        ({"own": PUBLIC, "seen": seen_at(7, 7)}, "ok", f"its own address, {PUBLIC}", None),
        ({"own": PUBLIC, "seen": seen_at(7), "dialled": False}, "warn", "drops what comes in: others can", "firewall"),
        ({"seen": seen_at(7, host=HOME)}, "ok", "which only its own network knows", None),
        ({"seen": seen_at(7, 7)}, "warn", f"{BEHIND}, at the same port: others can reach it by punching", "--announce"),
        ({"seen": seen_at(9, 9)}, "warn", f"{BEHIND}, all at one port: others can reach it by punching", "--announce"),
        ({"seen": seen_at(9)}, "warn", "only one peer was asked, so whether punching works is not known", "--announce"),
        ({"seen": seen_at(8, 9)}, "warn", "only through a relay can others reach it", "shoal serve"),
        ({"seen": [*seen_at(7), *seen_at(7, host=OTHER)]}, "warn", f"{PUBLIC} and {OTHER}, each at", "shoal serve"),
        ({"seen": [*seen_at(7, 7), Address("2001:db8::5", 7)]}, "warn", "reach it by punching", "--announce"),
        ({"seen": seen_at(9, 9), "mapped": [PUBLIC]}, "ok", f"{BEHIND}; it maps a port", None),
        ({"seen": seen_at(8, 9), "dialled": True}, "ok", f"{BEHIND}; a port of it leads here", None),
        ({"seen": seen_at(7, 7), "mapped": ["10.0.0.2"]}, "warn", "two routers, the nearer one being 10", "outer"),
        ({"seen": seen_at(7, 7), "mapped": [OTHER]}, "warn", f"two routers, the nearer one being {OTHER},", "outer"),
        ({"seen": seen_at(8, 9), "mapped": [CARRIERS]}, "warn", "the provider's router, which many share,", "serve"),
        ({"own": CARRIERS, "seen": seen_at(7, 7)}, "warn", "the provider's router, which many share,", "outer"),
    ],
)  # fmt: skip
def test_routers_are_explained(found, verdict, message, advice):
    finding = explain_nat(Surroundings(**{"own": HOME, "port": 7, **found}))
    assert finding.verdict == verdict
    assert message in finding.message
    assert (finding.advice is None) == (advice is None)
    assert advice is None or advice in finding.advice


# Limits and reports


async def test_everything_ends_in_time(autojump_clock):
    findings = []
    examination = Examination(findings.append)
    for _ in range(5):
        await examination.step("slow", 9.0, trio.sleep_forever, "wait")
    assert trio.current_time() - examination._deadline == pytest.approx(0.0)
    assert [finding.verdict for finding in findings] == ["warn"] * 5
    assert findings[0].message == "not known within 9 s"
    assert findings[4].message == "not known: the steps before took all the time"
    assert LIMIT < 30


def test_a_report_in_lines(capsys):
    report = Report(as_json=False)
    report.add(Finding("port", "ok", "is free", "nothing"))
    report.add(Finding("run", "fail", "gone\x1b[2J", "ask"))
    assert report.finish() == 1
    ok, fail, advice, end = capsys.readouterr().out.splitlines()
    assert ok.split() == ["ok", "port", "is", "free"]
    assert fail.startswith("fail  run")
    assert "\x1b" not in fail
    assert advice.strip() == "-> ask"
    assert end == "this machine cannot take part: run"


@pytest.mark.parametrize("target", ["nonsense", "abc@192.0.2.7:1", ""])
def test_targets_that_are_none(tmp_path, target):
    with pytest.raises((TicketError, AddressError)):
        Patient.of(tmp_path, LOOPBACK, target, map_port=False, now=0.0)


def test_targets(tmp_path):
    of = partial(Patient.of, tmp_path, LOOPBACK, map_port=False, now=0.0)
    contact = (PeerId(b"p" * 32), Address("192.0.2.7", 7070))
    ticket = Ticket(bytes(32), (contact,), KEY)
    assert of(target=named(*contact)).contacts == (contact,)
    found = of(target=ticket.encode())
    assert (found.contacts, found.run, found.swarm_key) == ((contact,), bytes(32), KEY)
    assert of(target=None).contacts == ()


# The machine


def test_python():
    (finding,) = doctor_machine.python()
    assert finding.verdict == "ok"
    assert "PyTorch" in finding.message


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(doctor_machine, "NEEDED", ("trio", "no_such_package"))
    (finding,) = doctor_machine.python()
    assert (finding.verdict, finding.message) == ("fail", "not installed: no_such_package")


def test_homes(tmp_path):
    (finding,) = doctor_machine.home(tmp_path / "new" / "home")
    assert (finding.verdict, (tmp_path / "new").exists()) == ("ok", False)
    home = Home(tmp_path / "home")
    (finding,) = doctor_machine.home(home.path)
    assert "without an identity" in finding.message
    peer = home.identity.peer_id
    (finding,) = doctor_machine.home(home.path)
    assert str(peer) in finding.message
    home.path.chmod(0o777)
    (finding,) = doctor_machine.home(home.path)
    assert (finding.verdict, finding.advice) == ("fail", f"chmod go-w {home.path}")
    (tmp_path / "file").touch()
    assert doctor_machine.home(tmp_path / "file")[0].verdict == "fail"


@pytest.mark.parametrize(("free", "verdict"), [(10**8, "fail"), (10**9, "warn"), (10**11, "ok")])
def test_disks(tmp_path, monkeypatch, free, verdict):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
    (finding,) = doctor_machine.disk(tmp_path / "not" / "there")
    assert finding.verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(10**9, "warn"), (10**10, "ok"), (None, "ok")])
def test_memory(monkeypatch, free, verdict):
    monkeypatch.setattr(doctor_machine, "available_memory", lambda: free)
    assert doctor_machine.memory()[0].verdict == verdict


async def test_the_accelerator():
    (finding,) = await doctor_machine.accelerator()
    assert finding.verdict == "ok"


GPU = {"name": "GPU", "built": True, "error": None, "memory": 8_000_000_000}


@pytest.mark.parametrize(
    ("program", "verdict", "message"),
    [
        (f"print({json.dumps(GPU)!r})", "ok", "GPU with 8.0 GB"),
        (f"print({json.dumps({**GPU, 'error': 'old driver'})!r})", "fail", "old driver"),
        (f"print({json.dumps({**GPU, 'name': None})!r})", "ok", "though PyTorch is built for CUDA"),
        ("import no_such_torch", "fail", "No module named 'no_such_torch'"),
    ],
)
async def test_accelerators(monkeypatch, program, verdict, message):
    monkeypatch.setattr(doctor_machine, "_LOOK_AT_DEVICE", program)
    (finding,) = await doctor_machine.accelerator()
    assert finding.verdict == verdict
    assert message in finding.message
