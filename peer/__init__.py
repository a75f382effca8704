"""The daemon: membership, training, state, and the command line; and swarms for programs (`peer.swarm`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peer.swarm import AsyncSwarm, Swarm, SwarmOptions, open_swarm

__all__ = ["AsyncSwarm", "Swarm", "SwarmOptions", "open_swarm"]


def __getattr__(name: str) -> object:
    """Loads PyTorch only when a program asks for a swarm: the command line answers without it."""
    if name in __all__:
        from peer import swarm

        return getattr(swarm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
