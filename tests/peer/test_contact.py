import pytest

from peer.contact import named, parse_contact
from protocol.errors import AddressError
from protocol.identity import PeerId
from protocol.transport import Address

PEER = PeerId(b"p" * 32)


@pytest.mark.parametrize("address", ["192.0.2.7:7070", "[2001:db8::7]:1", "helper.example.org:4711"])
def test_contacts_survive_as_text(address):
    text = f"{PEER}@{address}"
    assert parse_contact(f" {text}\n") == (PEER, Address.parse(address))
    assert named(*parse_contact(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not PEERID@HOST:PORT"),
        ("192.0.2.7:7070", "not PEERID@HOST:PORT"),
        ("abc@192.0.2.7:7070", "not a peer id"),
        (f"{PEER}@192.0.2.7", "not HOST:PORT"),
        (f"{PEER}@192.0.2.7:0", "nobody can be reached"),
        (f"@{PEER}", "not a peer id"),
    ],
)
def test_what_is_no_contact(text, complaint):
    with pytest.raises(AddressError, match=complaint) as error:
        parse_contact(text)
    assert error.value.hint is not None
