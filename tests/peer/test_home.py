import contextlib
import os
import stat
import subprocess
import sys

import pytest

from peer.home import Home, HomeError, HomeInUse, write_atomically
from protocol.errors import IdentityError

HOLD = """
import sys
from peer.home import Home
with Home(sys.argv[1]).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""

needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of the home `tmp_path / "home"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "home")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_is_private(tmp_path):
    home = Home(tmp_path / "a" / "home")
    assert mode(home.path) == 0o700
    assert mode(home.checkpoints) == 0o700
    assert mode(home.path / "checkpoints") == 0o700


def test_the_identity_stays(tmp_path):
    home = Home(tmp_path / "home")
    assert home.identity is home.identity
    assert Home(tmp_path / "home").identity.peer_id == home.identity.peer_id
    assert mode(home.path / "identity.key") == 0o600


def test_a_damaged_identity_is_not_replaced(tmp_path):
    home = Home(tmp_path / "home")
    write_atomically(home.path / "identity.key", b"nonsense")
    with pytest.raises(IdentityError):
        _ = home.identity
    assert (home.path / "identity.key").read_bytes() == b"nonsense"


def test_the_swarm_key_stays(tmp_path):
    key = Home(tmp_path / "home").swarm_key()
    assert len(key) == 32
    assert Home(tmp_path / "home").swarm_key() == key
    assert mode(tmp_path / "home" / "swarm.key") == 0o600


def test_a_damaged_swarm_key_is_named(tmp_path):
    home = Home(tmp_path / "home")
    write_atomically(home.path / "swarm.key", b"short")
    with pytest.raises(HomeError, match=r"swarm\.key is damaged"):
        home.swarm_key()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HomeError, match="a file is in the way"):
            Home(path)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "home").mkdir(0o700)
    (tmp_path / "home" / "checkpoints").write_text("mine")
    with pytest.raises(HomeError, match="checkpoints cannot be used: a file is in the way"):
        Home(tmp_path / "home")


def test_a_home_that_others_may_write_to_is_refused(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o770)
    with pytest.raises(HomeError, match="others may write") as caught:
        Home(home)
    assert caught.value.hint == f"chmod go-w {home}"
    home.chmod(0o755)
    assert Home(home).path == home


@needs_permissions
def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "home").mkdir(0o500)
    with pytest.raises(HomeError, match="permission denied"):
        Home(tmp_path / "home")


def test_a_home_is_only_created_when_wanted(tmp_path):
    home = Home(tmp_path / "home", create=False)
    assert not home.path.exists()
    assert not home.is_locked()


def test_only_one_daemon_at_a_time(tmp_path, holder):
    home = Home(tmp_path / "home")
    assert home.is_locked()
    with pytest.raises(HomeInUse, match=f"process id {holder.pid}$"), home.lock():
        pass
    holder.kill()
    holder.wait()
    # Nobody had a chance to clean up.
    assert not home.is_locked()
    with home.lock():
        assert home.is_locked()
    assert not home.is_locked()


def test_the_lock_can_be_taken_again_inside(tmp_path):
    home = Home(tmp_path / "home")
    with home.lock():
        with home.lock():
            assert home.is_locked()
        assert home.is_locked()
        with pytest.raises(HomeInUse, match=f"process id {os.getpid()}$"), Home(tmp_path / "home").lock():
            pass
    assert not home.is_locked()


def test_the_lock_file_is_no_way_to_damage_other_files(tmp_path):
    home = Home(tmp_path / "home")
    (tmp_path / "precious").write_text("mine")
    (home.path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(HomeError), home.lock():
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_atomic_writes_replace_or_leave_alone(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert mode(path) == 0o600
    (tmp_path / "directory" / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "directory", b"three")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["directory", "file"]


def test_children_that_were_forked_do_not_hold_the_lock(tmp_path, forked):
    home = Home(tmp_path / "home")
    with home.lock():
        forked()
        assert home.is_locked()
        with pytest.raises(HomeInUse), Home(tmp_path / "home").lock():
            pass
    assert not home.is_locked()
    with Home(tmp_path / "home").lock():
        pass


def test_a_child_that_leaves_the_block_leaves_the_lock_to_its_parent(tmp_path, forked):
    with contextlib.ExitStack() as stack:
        stack.enter_context(Home(tmp_path / "home").lock())
        forked(stack.close)
        assert Home(tmp_path / "home").is_locked()
