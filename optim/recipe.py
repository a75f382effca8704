"""Recipes: methods of low-communication training, each a choice of parts for the slots of `optim/slots.py`."""

from __future__ import annotations

import attrs

from optim.feedback import Forget
from optim.finalizers import Keep
from optim.fragments import Whole
from optim.merges import Replace
from optim.mixers import RingMean
from optim.payloads import Gradient, PseudoGradient
from optim.regularizers import Free
from optim.slots import (
    Feedback,
    Finalizer,
    Fragmenter,
    LocalRegularizer,
    Merge,
    Mixer,
    OuterOptimizer,
    Payload,
    SyncPolicy,
    Weighting,
)
from optim.weightings import ByTokens


@attrs.frozen(kw_only=True)
class Recipe:
    """One part for each slot. Peers average together only if their recipes are equal."""

    regularizer: LocalRegularizer = attrs.field(factory=Free)
    policy: SyncPolicy
    fragmenter: Fragmenter = attrs.field(factory=Whole)
    payload: Payload = attrs.field(factory=PseudoGradient)
    feedback: Feedback = attrs.field(factory=Forget)
    weighting: Weighting = attrs.field(factory=ByTokens)
    mixer: Mixer = attrs.field(factory=RingMean)
    outer: OuterOptimizer
    merge: Merge = attrs.field(factory=Replace)
    finalizer: Finalizer = attrs.field(factory=Keep)
    shared: bool = True
    """Whether all peers have the same outer state: else each has its own, and the finalizer makes one of them."""
    late: bool = False
    """Whether exchanges go on without those who are late. The end of a run gives them what they have missed."""
    waits: bool = True
    """Whether local steps wait for a result that is not there after the delay: else they go on, and pass over
    exchanges that fall due meanwhile."""


@attrs.frozen(kw_only=True)
class GradientRecipe:
    """A method that exchanges something in every step, before the inner optimizer takes it.

    The inner optimizer then steps with what came of the exchange, in place of the gradient.
    """

    payload: Payload = attrs.field(factory=Gradient)
    feedback: Feedback = attrs.field(factory=Forget)
    weighting: Weighting = attrs.field(factory=ByTokens)
    mixer: Mixer = attrs.field(factory=RingMean)
    sign: bool = False
    """Whether the inner optimizer is given only the signs of the result."""
