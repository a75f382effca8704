"""The state that all peers of a run hold in common, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch


@attrs.frozen(eq=False)
class OuterState:
    """Outer parameters and the outer optimizer's memory after some number of rounds.

    Immutable: a step makes new tensors, so that a state may be read, sent and saved while the next one is computed.
    """

    parameters: torch.Tensor
    """The outer parameters: one-dimensional, fp32, on the CPU, in the order of `FlatParameters`."""

    buffers: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """The outer optimizer's tensors by name, such as "momentum": each one-dimensional, fp32, on the CPU."""
