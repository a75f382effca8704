"""Rounds of low rank: two operations, of which each makes a revision.

The second operation is about what came of the first, and the first about what came of the round before: factors that
all peers have in common. They are a buffer of the outer state, so whoever has the state of a revision, be it between
the two, can take part in the next operation with the same bits as everybody else.
"""

from __future__ import annotations

import attrs
import torch

from optim.lowrank import AdaptiveLowRankMean, LowRankMean, packed, settled, unpacked
from optim.sender import Message
from optim.slots import AllReduce, Layout, Memory, Mixed, Mixer
from optim.state import OuterState
from protocol.collective import Reduced
from protocol.errors import SettingsError

FACTORS = "factors"
"""The buffer's name."""


@attrs.frozen(eq=False)
class Halves:
    """The mixer of such a method, one operation after the other.

    Raises:
        SettingsError: The model has no matrix that a low rank makes smaller.
    """

    _mixer: LowRankMean | AdaptiveLowRankMean
    _layout: Layout

    def __attrs_post_init__(self) -> None:
        if not LowRankMean(self._mixer.rank).has_matrices(self._layout):
            raise SettingsError(
                f"no matrix of this model gets smaller with algorithm.rank = {self._mixer.rank}",
                hint="choose a smaller rank, or another method",
            )

    @classmethod
    def of(cls, mixer: Mixer, layout: Layout) -> Halves | None:
        """None if the mixer needs one operation."""
        return cls(mixer, layout) if isinstance(mixer, (LowRankMean, AdaptiveLowRankMean)) else None

    def founded(self, state: OuterState) -> OuterState:
        """The state before the first round."""
        return OuterState(state.parameters, {**state.buffers, FACTORS: torch.zeros_like(state.parameters)})

    def plain(self, state: OuterState) -> OuterState:
        """The state without factors, as the outer optimizer knows it."""
        return OuterState(state.parameters, {key: value for key, value in state.buffers.items() if key != FACTORS})

    def load(self, state: OuterState) -> float:
        """How much the round after this state sends, as a share of the first one."""
        return self._mixer.load(self._memory(state))

    def ask(self, state: OuterState, message: Message, *, second: bool) -> AllReduce:
        """One of the two operations."""
        memory = self._memory(state)
        mixer = self._mixer.at(memory)
        if second:
            return AllReduce(mixer.second(message.values, self._layout, memory), message.weight)
        return AllReduce(mixer.first(message.values, self._layout, message.round, memory), message.weight)

    def between(self, state: OuterState, reduced: Reduced) -> OuterState:
        """The state after the first one."""
        memory = self._memory(state)
        return self._with(state, self._mixer.at(memory).between(reduced.mean, self._layout, memory))

    def mixed(self, state: OuterState, message: Message, reduced: Reduced, *, heard: tuple[bool, bool]) -> Mixed:
        """What came of both. `heard`: whether ours is in the first one, and in the second."""
        memory = self._memory(state)
        mixer = self._mixer.at(memory)
        memory = mixer.after(reduced.mean, self._layout, memory)
        own, whole = mixer.own(message.values, self._layout, memory), mixer.is_whole(self._layout)
        own[whole] *= float(heard[0])
        own[~whole] *= float(heard[1])
        total = reduced.weight if heard[1] else reduced.weight + message.weight
        share = message.weight / total if any(heard) and total else 0.0
        return Mixed(mean=mixer.mean(self._layout, memory), own=own, members=reduced.contributors, share=share)

    def after(self, state: OuterState, stepped: OuterState, reduced: Reduced) -> OuterState:
        """The state after the second operation: what the outer optimizer has made of it, with the new factors."""
        memory = self._memory(state)
        memory = settled(self._mixer.at(memory).after(reduced.mean, self._layout, memory))
        if isinstance(self._mixer, AdaptiveLowRankMean):
            memory = self._mixer.adapted(memory)
        return self._with(stepped, memory)

    def _memory(self, state: OuterState) -> Memory:
        return unpacked(self._mixer, self._layout, state.buffers[FACTORS])

    def _with(self, state: OuterState, memory: Memory) -> OuterState:
        return OuterState(state.parameters, {**state.buffers, FACTORS: packed(self._mixer, self._layout, memory)})
