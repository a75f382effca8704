"""What a forked child does not keep open: connections that would not end with the parent, ports, and locks.

A `DataLoader` forks its workers from a process in which a peer may run. They inherit all that is open there, use none
of it, and may outlive the peer, which then could not begin again in its home or at its port.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, Protocol
from weakref import WeakSet


class Descriptor(Protocol):
    """A socket or a file."""

    def fileno(self) -> int:
        """Its number; below 0 or a ValueError once it is closed."""
        ...


_ours: Final[WeakSet[Descriptor]] = WeakSet()  # of the whole process, as forking is


def not_for_children(descriptor: Descriptor) -> None:
    """Children that are forked from now on have the null device in its place."""
    _ours.add(descriptor)


def _let_go() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in list(_ours):
        with contextlib.suppress(ValueError):
            if (number := descriptor.fileno()) >= 0:
                os.dup2(null, number, inheritable=False)  # the object still closes the number that it has
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
