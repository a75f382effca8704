"""The collective operations by themselves: a peer of one's own in a few lines, for programs with and without trio."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import attrs
import trio

from protocol.background import in_background
from protocol.blocking import BlockingCollective
from protocol.channels import ChannelSettings
from protocol.endpoint import Endpoint, Limits
from protocol.errors import RequestTimeout, RoundAborted
from protocol.identity import Identity, PeerId
from protocol.mesh import Mesh
from protocol.operation import checked_timeout
from protocol.operations import AsyncCollective
from protocol.tcp import TcpTransport
from protocol.transport import Address


@attrs.frozen(kw_only=True)
class Place:
    """A peer that runs: what it can do, who else is there, and where others find it."""

    collective: AsyncCollective
    mesh: Mesh
    endpoint: Endpoint

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self.endpoint.address is not None
        return self.endpoint.address


@asynccontextmanager
async def open_collective(
    name: str,
    *,
    listen: str = "127.0.0.1:0",
    peers: Sequence[str] = (),
    key: bytes | None = None,
    limits: Limits | None = None,
    settings: ChannelSettings | None = None,
) -> AsyncIterator[Place]:
    """A peer of the group with this name, for as long as the block runs. Its identity is a new one each time.

    Args:
        name: All peers that use the same one find each other.
        listen: HOST:PORT; port 0 picks one.
        peers: Where others listen, HOST:PORT; one is enough. They are tried until they are there.
        key: 32 bytes that all peers have. Without one, anybody who reaches us and knows the name takes part.
        limits: What the network is allowed, see `Limits`.
        settings: What all peers have to agree on, see `ChannelSettings`.

    Raises:
        AddressError: An address is none, or we cannot listen there.
    """
    run_id = hashlib.sha256(b"shoal-collective-v1" + name.encode()).digest()
    endpoint = Endpoint(Identity.generate(), TcpTransport(), psk=key, limits=limits, rng=random.Random())
    mesh = Mesh(endpoint, run_id, [Address.parse(peer) for peer in peers])
    collective = AsyncCollective(endpoint, run_id, roster=mesh, settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run, Address.parse(listen))
        await nursery.start(collective.run)
        await nursery.start(mesh.run)
        yield Place(collective=collective, mesh=mesh, endpoint=endpoint)
        nursery.cancel_scope.cancel()


class Joined(BlockingCollective):
    """A peer that runs in a thread of its own."""

    def __init__(self, place: Place, token: trio.lowlevel.TrioToken) -> None:
        super().__init__(place.collective, token)
        self._place = place

    @property
    def peer_id(self) -> PeerId:
        """Who we are."""
        return self._place.endpoint.peer_id

    @property
    def address(self) -> str:
        """Where we listen, for the `peers` of others."""
        return str(self._place.address)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who is there, ourselves included."""
        return self._place.mesh.members

    def wait_for(self, count: int, timeout: float | None = None) -> None:
        """Waits until there are so many members, ourselves included.

        Raises:
            RequestTimeout: There are not, in so many seconds.
        """

        wait_for_members(self._place.mesh, count, timeout, self._token)


def wait_for_members(mesh: Mesh, count: int, timeout: float | None, token: trio.lowlevel.TrioToken) -> None:
    """Waits, in another thread than the mesh's, until it has so many members.

    Raises:
        RequestTimeout: It has not, in so many seconds.
        RoundAborted: Its thread has ended.
        ValueError: The timeout is none.
    """
    limit = checked_timeout(timeout)

    async def wait() -> None:
        with trio.fail_after(limit):
            await mesh.wait_for(count)

    try:
        trio.from_thread.run(wait, trio_token=token)
    except trio.TooSlowError:
        raise RequestTimeout(f"fewer than {count} members have come within {timeout:g} s") from None
    except (trio.Cancelled, trio.RunFinishedError):
        raise RoundAborted("the collective has ended") from None


@contextmanager
def join_collective(
    name: str,
    *,
    listen: str = "127.0.0.1:0",
    peers: Sequence[str] = (),
    key: bytes | None = None,
    limits: Limits | None = None,
    settings: ChannelSettings | None = None,
) -> Iterator[Joined]:
    """As `open_collective`, for programs without trio: the peer runs in a thread of its own."""
    opening = partial(open_collective, name, listen=listen, peers=peers, key=key, limits=limits, settings=settings)
    with in_background(opening) as (place, token):
        yield Joined(place, token)
