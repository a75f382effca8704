"""The command about the key of a private run: `shoal rotate-key`. `peer.cli` registers it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from peer.options import HomeOptions
from protocol.errors import ShoalError
from protocol.identity import PeerId

if TYPE_CHECKING:
    from peer.home import Home
    from peer.manifest import Manifest
    from peer.rotation import KeyRotation


def peer_id(text: str | PeerId) -> PeerId:
    """A peer id; typer prints its error."""
    try:
        return text if isinstance(text, PeerId) else PeerId.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}. `shoal peers --json` has them.") from error


def rotate_key(
    options: HomeOptions,
    excluded: Annotated[
        list[PeerId] | None,
        typer.Option("--except", parser=peer_id, metavar="PEERID", help="Who is out from now on. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Give a private run another swarm key, and print a ticket with it. In the founder's home only.

    The members that are here get the key by themselves; everybody else needs a fresh ticket. Who was excluded before is
    admitted again, unless you exclude somebody. If no daemon runs, it is done when the founder is started next.
    """
    from peer.home import Home
    from peer.rotation import order_rotation, read_stored

    home = Home(options.path, create=False)
    manifest = _own_manifest(home)
    names = set(excluded or ())
    if home.identity.peer_id in names:
        raise typer.BadParameter("the founder cannot be excluded")
    before = read_stored(home, manifest.run_id)
    rotation = order_rotation(home, manifest.run_id, names)
    ticket = _fresh_ticket(home, rotation)
    if as_json:
        print(json.dumps({"number": rotation.number, "excluded": list(map(str, rotation.excluded)), "ticket": ticket}))
        return
    when = "from now on" if home.is_locked() else "when this peer is started next"
    print(f"the run goes by swarm key {rotation.number} {when}; earlier tickets are of no use then", file=sys.stderr)
    for peer in sorted(set(rotation.excluded) - names):
        print(f"excluded: {peer}, by an earlier rotation that is not over yet", file=sys.stderr)
    for peer in sorted(set(before.rotation.excluded if before else ()) - set(rotation.excluded)):
        print(f"admitted again: {peer}, with the new ticket; else exclude it once more", file=sys.stderr)
    if ticket is not None:
        print(ticket)


def _own_manifest(home: Home) -> Manifest:
    """The manifest of the private run that was founded in this home."""
    from peer.manifest import MAX_MANIFEST, Manifest

    try:
        with home.manifest.open("rb") as file:
            manifest = Manifest.parse(file.read(MAX_MANIFEST + 1).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ShoalError(f"there is no run in {home.path}", hint="pass the --home of the run's founder") from error
    if manifest.founder != home.identity.public_key:
        raise ShoalError(
            f"the run in {home.path} was founded by another peer, {manifest.founder_id}",
            hint="only its founder can rotate the key",
        )
    if manifest.settings.membership.policy != "private":
        raise ShoalError("this run has no swarm key: it is not private", hint="found one with `shoal start --private`")
    return manifest


def _fresh_ticket(home: Home, rotation: KeyRotation) -> str | None:
    """Puts the new key into the home's ticket at once, and returns it; None if there is none."""
    from peer.home import HomeError, write_atomically
    from peer.ticket import Ticket

    try:
        ticket = Ticket.parse(home.ticket.read_text("ascii"), now=0.0)
    except (OSError, UnicodeDecodeError):
        return None
    bootstrap = tuple(contact for contact in ticket.bootstrap if contact[0] not in rotation.excluded)
    ticket = attrs.evolve(ticket, bootstrap=bootstrap or ticket.bootstrap, expires=None)
    text = attrs.evolve(ticket, swarm_key=rotation.key, key_number=rotation.number).encode()
    try:
        write_atomically(home.ticket, f"{text}\n".encode())
    except OSError as error:
        raise HomeError(f"{home.ticket} cannot be written: {error.strerror}") from error
    return text
