"""Asking a gateway for a port by UPnP, through the library miniupnpc (an optional dependency).

UPnP is SOAP over HTTP after a multicast search, and nothing that one wants to write twice. The library blocks, so its
calls run in worker threads.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
from collections.abc import Iterator
from typing import Any, Final

import trio

from protocol.errors import MappingFailed
from protocol.natpmp import Grant
from protocol.transport import Address

_SEARCH_MILLISECONDS = 2000  # the library's own default
_MOST_TRIES = 8  # external ports to try when others in the same home hold them
_DESCRIPTION = "shoal"
# Part of what the library says for the errors 725 and 718.
_ONLY_PERMANENT = "OnlyPermanentLease"
_CONFLICT = "ConflictInMapping"


class Upnp:
    """Implements `portmap.Router`."""

    method: Final = "upnp"

    def __init__(self) -> None:
        self._device: Any = None  # the library has no types
        self._external_port: int | None = None

    async def map(self, port: int, wanted: Address, lifetime: int) -> Grant:
        """See `portmap.Router.map`."""
        return await trio.to_thread.run_sync(self._map, port, wanted.port, lifetime, abandon_on_cancel=True)

    async def unmap(self, port: int) -> None:
        """See `portmap.Router.unmap`."""
        await trio.to_thread.run_sync(self._unmap, abandon_on_cancel=True)

    def _map(self, port: int, wanted: int, lifetime: int) -> Grant:
        device = self._device or _find()
        self._device = None  # found again, unless all goes well: after a restart it may be elsewhere
        with _translated():
            host = str(ipaddress.ip_address(device.externalipaddress()))
            for external in range(wanted, min(wanted + _MOST_TRIES, 65536)):
                if _is_free(device, external, port) and _add(device, external, port, lifetime):
                    self._device, self._external_port = device, external
                    return Grant(Address(host, external), lifetime)
        raise MappingFailed(f"UPnP: the external ports from {wanted} on are taken")

    def _unmap(self) -> None:
        if self._device is not None and self._external_port is not None:
            with _translated():
                self._device.deleteportmapping(self._external_port, "TCP")


def _find() -> Any:  # noqa: ANN401 - the library has no types
    """The first gateway that answers.

    Raises:
        MappingFailed: none does, or the library is not installed.
    """
    try:
        library = importlib.import_module("miniupnpc")
    except ImportError as error:
        raise MappingFailed(
            "UPnP: miniupnpc is not installed", hint="Install shoal[upnp], or map the port in the router by hand."
        ) from error
    device = library.UPnP()
    device.discoverdelay = _SEARCH_MILLISECONDS
    try:
        device.discover()
        device.selectigd()
    except Exception as error:  # the library raises nothing more specific, and "Success" when it finds nothing
        raise MappingFailed("UPnP: no gateway was found") from error
    return device


def _is_free(device: Any, external: int, port: int) -> bool:  # noqa: ANN401 - the library has no types
    """Whether nobody else has the external port. Asked first: some gateways give it to the last who wants it."""
    entry = device.getspecificportmapping(external, "TCP")
    return entry is None or (entry[0], int(entry[1])) == (device.lanaddr, port)


def _add(device: Any, external: int, port: int, lifetime: int) -> bool:  # noqa: ANN401 - the library has no types
    """Map the port; False if somebody else has it."""
    mapping = (external, "TCP", device.lanaddr, port, _DESCRIPTION, "")
    try:
        try:
            device.addportmapping(*mapping, lifetime)
        except Exception as error:  # the library raises nothing more specific
            if _ONLY_PERMANENT not in str(error):
                raise
            device.addportmapping(*mapping, 0)
    except Exception as error:  # the library raises nothing more specific
        if _CONFLICT in str(error):
            return False
        raise
    return True


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises nothing more specific, and what a gateway says may be nonsense
        raise MappingFailed(f"UPnP: {error}") from error
