"""How much a peer counts."""

from __future__ import annotations

import attrs

from optim.slots import Work


@attrs.frozen
class ByTokens:
    """As much as the number of tokens that it has trained on."""

    def weight(self, work: Work) -> float:
        return float(work.tokens)


@attrs.frozen
class Equal:
    """All the same, if they have done anything."""

    def weight(self, work: Work) -> float:
        return 1.0 if work.steps else 0.0


@attrs.frozen
class ByTokensPerStep:
    """Tokens times tokens per step: who takes larger batches has the less noisy update (Decoupled DiLoCo)."""

    def weight(self, work: Work) -> float:
        return work.tokens * (work.tokens / work.steps) if work.steps else 0.0
