"""Identities: ids, signatures, and the file that holds the key."""

import errno
import hashlib
import os
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import IdentityError
from protocol.identity import Identity, PeerId, verify

ALICE = Identity.from_seed(bytes(32))
BOB = Identity.from_seed(bytes(31) + b"\1")


def test_peer_id_is_the_hash_of_the_key():
    assert ALICE.peer_id == hashlib.sha256(b"shoal-peer-v1" + ALICE.public_key).digest()
    assert PeerId.of(ALICE.public_key) == ALICE.peer_id


def test_golden_values():
    assert ALICE.public_key.hex() == "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    assert str(ALICE.peer_id) == "5fbr5hc6qqcivckzjijv7pyiur6xg5sbaeyexd3fcnoljrvqnq4q"
    assert ALICE.sign("test", b"one", b"").hex() == (
        "0de11b3283f1c6879173f7b75469877f1d9351b2d8dfae7b49850e1a96f64cc3"
        "ea2f783eaa32a13e0ba8fb8a3727898bd254ed6b36baf62201a158e5aa803203"
    )


@given(st.binary(min_size=32, max_size=32))
def test_text_form_round_trips(raw):
    peer_id = PeerId(raw)
    text = str(peer_id)
    assert len(text) == 52 and text == text.lower() and "=" not in text
    assert PeerId.parse(text) == peer_id
    assert peer_id.short == text[:8]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 51,
        "a" * 53,
        "a" * 51 + "b",
        "A" * 52,
        "a" * 51 + "=",
        "1" * 52,
        " " + "a" * 52,
        "é" * 52,
        "a" * 52 + "\n",
    ],
)
def test_text_that_is_no_peer_id(text):
    with pytest.raises(ValueError, match="not a peer id"):
        PeerId.parse(text)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_peer_ids_and_keys_have_32_bytes(size):
    with pytest.raises(ValueError, match="32 bytes"):
        PeerId(bytes(size))
    with pytest.raises(ValueError, match="32 bytes"):
        PeerId.of(bytes(size))


def test_peer_ids_are_ordered_hashable_values():
    low, high = PeerId(bytes(32)), PeerId(b"\xff" * 32)
    assert low < high
    assert {low: 1}[PeerId(bytes(32))] == 1
    assert repr(low) == f"PeerId('{low}')"


def test_identities_are_made_new_or_from_a_seed():
    assert Identity.generate().peer_id != Identity.generate().peer_id
    assert Identity.from_seed(bytes(32)).peer_id == ALICE.peer_id
    assert ALICE.peer_id.short in repr(ALICE)


def test_signature_holds_for_just_what_was_signed():
    signature = ALICE.sign("one", b"ab", b"c")
    assert verify(ALICE.public_key, signature, "one", b"ab", b"c")
    assert not verify(BOB.public_key, signature, "one", b"ab", b"c")
    assert not verify(ALICE.public_key, signature, "two", b"ab", b"c")
    assert not verify(ALICE.public_key, signature, "one", b"a", b"bc")
    assert not verify(ALICE.public_key, signature, "one", b"abc")
    assert not verify(ALICE.public_key, signature, "one", b"ab", b"c", b"")


@given(key=st.binary(max_size=40), signature=st.binary(max_size=80))
def test_nonsense_is_not_a_valid_signature(key, signature):
    assert not verify(key, signature, "one", b"ab")
    assert not verify(ALICE.public_key, signature, "one", b"ab")


def test_file_is_made_once_and_private(tmp_path):
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert Identity.load(path).peer_id == made.peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]


def test_file_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_missing_file(tmp_path):
    with pytest.raises(IdentityError, match="does not exist"):
        Identity.load(tmp_path / "key")


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_file_open_to_others_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="open to other users") as caught:
        Identity.load_or_create(path)
    assert caught.value.hint == f"chmod 600 {path}"


def pem(key):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"hello\n",
        bytes(32),
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        pem(X25519PrivateKey.from_private_bytes(bytes(32))),
        pem(generate_private_key(65537, 1024)),
        b"x" * 100_000,
    ],
    ids=["empty", "text", "raw", "damaged", "x25519", "rsa", "long"],
)
def test_other_contents_are_refused_and_kept(tmp_path, contents):
    path = tmp_path / "key"
    path.write_bytes(contents)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not an identity file") as caught:
        Identity.load_or_create(path)
    assert caught.value.hint
    assert path.read_bytes() == contents


def test_truncated_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.write_bytes(path.read_bytes()[:60])
    kept = path.read_bytes()
    with pytest.raises(IdentityError, match="not an identity file"):
        Identity.load_or_create(path)
    assert path.read_bytes() == kept


def test_link_to_nothing_is_refused_and_kept(tmp_path):
    path = tmp_path / "key"
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(IdentityError, match="symbolic link to nothing"):
        Identity.load_or_create(path)
    assert path.is_symlink() and not (tmp_path / "gone").exists()


def test_link_to_a_good_file_works(tmp_path):
    made = Identity.load_or_create(tmp_path / "real")
    (tmp_path / "key").symlink_to(tmp_path / "real")
    assert Identity.load_or_create(tmp_path / "key").peer_id == made.peer_id


def test_folder_is_refused(tmp_path):
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load_or_create(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_named_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load_or_create(tmp_path / "key")


def test_folder_must_exist(tmp_path):
    with pytest.raises(IdentityError, match="cannot write identity file") as caught:
        Identity.load_or_create(tmp_path / "nowhere" / "key")
    assert caught.value.hint


def test_a_full_disk_is_called_so(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(IdentityError, match="No space left") as caught:
        Identity.load_or_create(tmp_path / "key")
    assert "space" in caught.value.hint


def test_lost_race_takes_the_winner(tmp_path, monkeypatch):
    path = tmp_path / "key"
    winner = Identity.load_or_create(path)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    assert Identity.load_or_create(path).peer_id == winner.peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
