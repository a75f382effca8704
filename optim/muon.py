"""Muon as an inner optimizer: matrices go by their orthogonalised momentum, everything else by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from protocol.errors import SettingsError


class MuonAdamW(torch.optim.Optimizer):
    """PyTorch's Muon for the matrices inside a model, and AdamW for embeddings, the head, gains and biases.

    The inner optimizer of MuLoCo (Thérien et al., arXiv 2505.23725); compression harms it less than AdamW.

    Args:
        model: All trainable parameters with two dimensions are trained by Muon, but for those in `others`.
        lr: Of Muon.
        other_lr: Of AdamW.
        weight_decay: Of both, of AdamW for matrices only.
        others: Matrices for AdamW, usually embeddings and the head.

    Raises:
        SettingsError: The model has no matrix for Muon.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.02,
        other_lr: float = 3e-4,
        weight_decay: float = 0.1,
        others: Iterable[nn.Parameter] = (),
    ) -> None:
        apart = {id(parameter) for parameter in others}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        inside = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in apart]
        rest = [parameter for parameter in trained if parameter.ndim != 2 or id(parameter) in apart]
        if not inside:
            raise SettingsError("the model has no matrix that Muon could train")
        self._parts: list[torch.optim.Optimizer] = [torch.optim.Muon(inside, lr=lr, weight_decay=weight_decay)]
        if rest:
            groups = [
                {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
                {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
            ]
            self._parts.append(torch.optim.AdamW([group for group in groups if group["params"]], lr=other_lr))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        self._gather_state()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both state dictionaries, under "parts"."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            SettingsError: It is that of another optimizer.
        """
        if len(state_dict.get("parts", ())) != len(self._parts):
            raise SettingsError("the saved state is not one of Muon beside AdamW for this model")
        for part, saved in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self._share()

    def _share(self) -> None:
        """Groups are those of the parts, the very same objects: learning rate schedulers reach them."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self._gather_state()

    def _gather_state(self) -> None:
        for part in self._parts:
            self.state.update(part.state)
