"""Pipeline stages over unreliable peers, the part without a network: see docs/swarm.md."""

from optim.swarm.stages import Chain, Link, Stage, assemble, cut, sample_losses, sequential

__all__ = ["Chain", "Link", "Stage", "assemble", "cut", "sample_losses", "sequential"]
