"""What the founder signs when a swarm key is rotated, and what homes keep of it."""

import json
import stat

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import peer.cli
from peer.home import Home, HomeError
from peer.manifest import Manifest
from peer.rotation import (
    MAX_EXCLUDED,
    KeyRotation,
    Stored,
    open_keyring,
    order_rotation,
    read_order,
    read_stored,
    write_stored,
)
from peer.settings import MembershipSettings, Settings
from peer.ticket import Ticket
from protocol import wire
from protocol.errors import SettingsError
from protocol.identity import Identity, PeerId
from protocol.transport import Address

FOUNDER = Identity.from_seed(b"f" * 32)
RUN, OLD, NEW = b"r" * 32, b"o" * 32, b"n" * 32
ALICE, BOB, CAROL = (PeerId(letter * 32) for letter in (b"a", b"b", b"c"))
ROTATION = KeyRotation.sign(FOUNDER, RUN, 3, NEW, [BOB, ALICE])

key = st.binary(min_size=32, max_size=32)
peers = st.lists(key.map(PeerId), max_size=4)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@given(key, st.integers(1, 2**32 - 1), key, peers)
def test_a_rotation_is_who_signed_it(run, number, new, excluded):
    rotation = KeyRotation.sign(FOUNDER, run, number, new, excluded)
    assert rotation.is_by(FOUNDER.public_key)
    assert not rotation.is_by(Identity.from_seed(b"x" * 32).public_key)
    assert set(rotation.excluded) == set(excluded)
    assert wire.decode(wire.encode(rotation), [KeyRotation]) == rotation


@pytest.mark.parametrize(
    "changes",
    [
        {"run": OLD},
        {"number": 4},
        {"key": OLD},
        {"excluded": (ALICE,)},
        {"excluded": (ALICE, BOB, BOB)},
        {"excluded": (BOB, ALICE)},
        {"signature": bytes(64)},
    ],
)
def test_nothing_of_it_can_be_changed(changes):
    assert not attrs.evolve(ROTATION, **changes).is_by(FOUNDER.public_key)


def test_keys_are_not_shown():
    assert repr(NEW) not in repr(ROTATION)
    assert repr(OLD) not in repr(Stored(ROTATION, OLD))


@pytest.mark.parametrize("recipients", [None, frozenset(), frozenset([ALICE, BOB])])
@pytest.mark.parametrize("older", [None, OLD])
@pytest.mark.parametrize("until", [None, 1.5e9])
def test_what_is_stored_comes_back(home, older, recipients, until):
    stored = Stored(ROTATION, older, recipients, until)
    write_stored(home, stored)
    assert read_stored(home, RUN) == stored
    assert read_stored(home, OLD) is None  # it is of another run
    assert stat.S_IMODE(home.rotated.stat().st_mode) == 0o600


def test_the_newest_key_counts(home):
    assert open_keyring(home, RUN, OLD, 0).keys == (OLD,)
    write_stored(home, Stored(ROTATION, OLD))
    ring = open_keyring(home, RUN, OLD, 2)
    assert (ring.keys, ring.number) == ((NEW, OLD), 3)
    ring = open_keyring(home, RUN, b"t" * 32, 4)  # a fresh ticket
    assert (ring.keys, ring.number) == ((b"t" * 32,), 4)
    assert open_keyring(home, bytes(32), b"t" * 32, 0).keys == (b"t" * 32,)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"rotation":"","older":null,"recipients":null}', b"[" * 5000])
def test_damaged_files_are_named(home, data):
    for path, read in ((home.rotated, read_stored), (home.rotation, read_order)):
        path.write_bytes(data)
        with pytest.raises(HomeError, match=f"{path.name} is damaged"):
            read(home, RUN)
        path.unlink()
        path.mkdir()
        with pytest.raises(HomeError, match="cannot be read"):
            read(home, RUN)
        path.rmdir()


def test_orders_are_numbered_and_keep_out_who_was_just_excluded(home):
    run = RUN
    first = order_rotation(home, run, [ALICE])
    second = order_rotation(home, run, [BOB])  # nobody has followed the first
    assert (first.number, second.number) == (1, 2)
    assert set(second.excluded) == {ALICE, BOB}
    assert first.key != second.key
    assert read_order(home, run) == second
    assert second.is_by(home.identity.public_key)
    assert stat.S_IMODE(home.rotation.stat().st_mode) == 0o600
    write_stored(home, Stored(second, OLD))
    assert set(order_rotation(home, run, [CAROL]).excluded) == {ALICE, BOB, CAROL}  # it is under way
    write_stored(home, Stored(read_order(home, run), OLD))
    fourth = order_rotation(home, run)  # they are out, and are admitted again
    assert (fourth.number, fourth.excluded) == (4, ())
    with pytest.raises(SettingsError, match="at most 64"):
        order_rotation(home, run, [PeerId(bytes([n]) * 32) for n in range(MAX_EXCLUDED + 1)])
    assert read_order(home, run) == fourth


@pytest.fixture
def shoal(home, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(home.path))

    def run(*arguments):
        return CliRunner().invoke(peer.cli.app, [str(argument) for argument in arguments])

    return run


def founded(home, *, identity=None, policy="private"):
    manifest = Manifest.create(Settings(membership=MembershipSettings(policy=policy)), identity or home.identity)
    home.manifest.write_text(manifest.dump())
    return manifest


def test_the_command_prints_a_fresh_ticket(home, shoal):
    manifest = founded(home)
    old = Ticket(manifest.run_id, ((ALICE, Address("192.0.2.7", 7070)),), swarm_key=OLD, expires=5.0)
    home.ticket.write_text(old.encode())
    result = shoal("rotate-key", "--except", BOB, "--except", ALICE)
    assert result.exit_code == 0
    order = read_order(home, manifest.run_id)
    assert set(order.excluded) == {ALICE, BOB}
    fresh = Ticket.parse(result.stdout, 0.0)
    assert fresh == attrs.evolve(old, swarm_key=order.key, key_number=1, expires=None)
    assert home.ticket.read_text() == result.stdout
    assert "when this peer is started next" in result.stderr
    report = json.loads(shoal("rotate-key", "--json").stdout)
    assert (report["number"], Ticket.parse(report["ticket"], 0.0).key_number) == (2, 2)


def test_the_printed_ticket_leaves_out_who_is_excluded(home, shoal):
    manifest = founded(home)
    bootstrap = tuple((peer, Address("192.0.2.7", 7070)) for peer in (ALICE, BOB))
    home.ticket.write_text(Ticket(manifest.run_id, bootstrap, swarm_key=OLD).encode())
    assert Ticket.parse(shoal("rotate-key", "--except", BOB).stdout, 0.0).bootstrap == bootstrap[:1]


def test_the_command_says_who_is_out_and_who_may_come_again(home, shoal):
    manifest = founded(home)
    shoal("rotate-key", "--except", BOB)
    result = shoal("rotate-key")  # nobody has followed that
    assert f"excluded: {BOB}, by an earlier rotation" in result.stderr
    assert "admitted again" not in result.stderr
    write_stored(home, Stored(read_order(home, manifest.run_id), OLD))
    result = shoal("rotate-key", "--except", ALICE)
    assert f"excluded: {BOB}, by an earlier rotation" in result.stderr
    write_stored(home, Stored(read_order(home, manifest.run_id), OLD))
    result = shoal("rotate-key")
    for name in (ALICE, BOB):
        assert f"admitted again: {name}, with the new ticket" in result.stderr
    assert "by an earlier" not in result.stderr


def test_a_home_that_was_never_started_has_no_ticket_to_renew(home, shoal):
    founded(home)
    result = shoal("rotate-key")
    assert (result.exit_code, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("prepare", "arguments", "error", "code"),
    [
        (lambda home: None, [], "there is no run in", 1),
        (lambda home: founded(home, identity=FOUNDER), [], "founded by another peer", 1),
        (lambda home: founded(home, policy="open"), [], "not private", 1),
        (founded, ["--except", "somebody"], "not a peer id", 2),
    ],
)
def test_what_cannot_be_rotated(home, shoal, prepare, arguments, error, code):
    prepare(home)
    result = shoal("rotate-key", *arguments)
    assert result.exit_code == code
    assert error in result.stderr
    assert not home.rotation.exists()


def test_the_founder_cannot_exclude_itself(home, shoal):
    founded(home)
    result = shoal("rotate-key", "--except", home.identity.peer_id)
    assert (result.exit_code, home.rotation.exists()) == (2, False)
