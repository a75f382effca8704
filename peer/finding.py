"""Finding a run's manifest: its members are looked for among those we are connected to, and in the DHT."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dht import DHT, members_key
from peer.manifest import Manifest
from protocol.endpoint import Endpoint
from protocol.errors import PeerUnreachable, RequestRefused, ShoalError
from protocol.identity import PeerId
from protocol.stream import Stream
from protocol.wire import message

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


@message("run.manifest")
class ManifestRequest:
    """Asks for the manifest of a run."""

    run: Bytes32


@message("run.manifest.reply")
class ManifestReply:
    """The manifest's TOML text."""

    text: Annotated[str, msgspec.Meta(max_length=65536)]


async def fetch_manifest(endpoint: Endpoint, peer: PeerId, run: bytes) -> str:
    """The manifest's text as `peer` has it. Whether it is the run's is for the caller to check.

    Raises:
        ShoalError: The peer cannot be reached, or refuses.
    """
    return (await endpoint.request(peer, ManifestRequest(run), ManifestReply)).text


def tell_manifest(endpoint: Endpoint, run: bytes, text: str) -> None:
    """Answers those who ask for the manifest of a run."""

    async def answer(request: ManifestRequest, stream: Stream) -> ManifestReply:
        if request.run != run:
            raise RequestRefused("this peer takes part in another run", code="unknown_run")
        return ManifestReply(text)

    endpoint.handle(ManifestRequest, answer)


async def find_manifest(endpoint: Endpoint, dht: DHT, run: bytes) -> tuple[Manifest, PeerId]:
    """The manifest of a run, from the first peer that has the right one, and that peer.

    Args:
        endpoint: Ours.
        dht: Ours; it has been joined.
        run: The run's id.

    Raises:
        PeerUnreachable: No member of the run is known, or none can be reached.
        RequestRefused, ManifestError: Those that were asked had no manifest that we can use.
    """
    problem: ShoalError | None = None
    members = await dht.get(members_key(run))
    for peer in dict.fromkeys([*endpoint.connected, *members]):
        if peer == endpoint.peer_id:
            continue
        try:
            if not endpoint.is_connected(peer) and peer not in {contact.peer for contact in await dht.find(peer)}:
                continue  # its record outlives it for a while; whoever is there has answered just now
            manifest = Manifest.parse(await fetch_manifest(endpoint, peer, run))
        except RequestRefused as error:
            if error.code not in ("unknown_run", "unknown_type"):  # as peers of other runs, and helpers, have to
                problem = error
            continue
        except ShoalError as error:
            problem = error
            continue
        if manifest.run_id == run:
            return manifest, peer
        problem = RequestRefused(f"peer {peer} sent the manifest of another run", code="wrong_manifest")
    raise problem or PeerUnreachable("no peer of this run was found", hint="ask for a fresh ticket")
