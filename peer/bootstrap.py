"""Why nobody answers whom a ticket or an address book names."""

from __future__ import annotations

from collections.abc import Sequence

from peer.console import MEET
from peer.contact import Contact
from peer.reach import is_inside
from protocol.errors import HandshakeError, PeerUnreachable, ShoalError, WrongPeer


def why_unreachable(contacts: Sequence[Contact], error: PeerUnreachable) -> ShoalError:
    """What to tell the user when `DHT.bootstrap` has found nobody.

    Args:
        contacts: Those that were tried.
        error: What that raised.

    Returns:
        A HandshakeError if somebody is there and does not take us in; else a PeerUnreachable with a hint.
    """
    # A private address is another machine on each network: that somebody else has ours says nothing.
    private = all(is_inside(address.host) for _, address in contacts)
    cause = error.__cause__
    if isinstance(cause, HandshakeError) and not (private and isinstance(cause, WrongPeer)):
        return cause
    count = len(contacts)
    known = f"none of the {count} known peers of this run can be reached"
    if count == 1:
        known = "the only known peer of this run cannot be reached"
    if private:
        hint = f"on one network: check that they run. Else: {MEET[0].lower()}{MEET[1:]}"
        return PeerUnreachable(f"{known}: all have private addresses only", hint=hint)
    return PeerUnreachable(known, hint=f"check the network, or ask for a fresh ticket. {MEET}")
