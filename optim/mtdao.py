"""Local Adam with several momenta, which are averaged as the parameters are, each with a period of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from optim.buffers import Buffers
from optim.machine import Machine, link_of
from optim.shards import local
from optim.wrapper import Wrapper
from protocol.collective import Collective
from protocol.errors import SettingsError


@attrs.frozen
class Momentum:
    """One of several: u ← β·u + (1 − β)·g, with a share ω in the step, averaged over the peers every so many steps."""

    beta: float
    share: float
    period: int


def half_life(beta: float) -> int:
    """Steps after which half of what a momentum holds is forgotten: what is averaged more seldom is lost."""
    return math.ceil(math.log(0.5) / math.log(beta)) if beta > 0 else 1


class QuasiHyperbolicAdam(torch.optim.Optimizer):
    """Adam whose step is made of the gradient and of several momenta of it.

    uⱼ ← βⱼ·uⱼ + (1 − βⱼ)·g,  v ← β·v + (1 − β)·g²,  θ ← (1 − η·λ)·θ − η·((1 − Σωⱼ)·g + Σωⱼ·ûⱼ) / (√v̂ + ε)

    with û and v̂ corrected for their beginning at zero. One momentum with ω = 1 is AdamW. (Ma & Yarats, arXiv
    1810.06801.) If a gradient, or the square of one, is not finite, the step is not taken: a momentum would keep it.

    Args:
        params: As for any optimizer.
        lr: η.
        momenta: Pairs of β and ω.
        beta: Of the squares.
        eps: ε.
        weight_decay: λ.

    Raises:
        SettingsError: A β is not between 0 and 1, or the ω are below 0, or above 1 together.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momenta: Sequence[tuple[float, float]] = ((0.95, 0.3), (0.999, 0.6)),
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= one < 1 for one in (beta, *(decay for decay, _ in momenta))):
            raise SettingsError("each beta must be at least 0 and below 1")
        if min(shares := [share for _, share in momenta], default=0) < 0 or sum(shares) > 1 + 1e-9:
            raise SettingsError(f"the shares of the momenta must not be negative, nor above 1 together: {shares}")
        self.momenta = tuple(momenta)
        self.beta = beta
        self.taken = 0
        """Steps that were taken."""
        self.agreed: Callable[[bool], bool] = bool
        """Whether something holds in all processes that share the parameters."""
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        due = [(parameter, group) for parameter, group in due if parameter.grad is not None]
        if self.agreed(all(bool(torch.isfinite(local(parameter.grad).square()).all()) for parameter, _ in due)):
            self.taken += 1
            for parameter, group in due:
                self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["second"] = torch.zeros_like(parameter)
            for index in range(len(self.momenta)):
                state[f"momentum {index}"] = torch.zeros_like(parameter)
        state["step"] += 1
        count = float(state["step"])
        state["second"].mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)
        direction = gradient * (1 - sum(share for _, share in self.momenta))
        for index, (beta, share) in enumerate(self.momenta):
            momentum = state[f"momentum {index}"].lerp_(gradient, 1 - beta)
            direction.add_(momentum, alpha=share / (1 - beta**count))
        scale = state["second"].div(1 - self.beta**count).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(direction, scale, value=-group["lr"])


class MultiTimescaleOptimizer(Wrapper):
    """MT-DAO (arXiv 2510.05361): local steps with slow and fast momenta, all of them averaged; no outer optimizer.

    Parameters are averaged every H steps. A momentum with β forgets half of what it holds within ln ½ / ln β steps, so
    slow ones carry what the others found through many local steps, and are averaged as seldom: by default each
    momentum, and the squares, in the first multiple of H from their half-life on.

    All peers must start from the same values, and call `step` equally often. If an exchange fails, its exception leaves
    `step`; the local step is done, and the next one tries again. A step whose gradient is not finite is not taken, and
    does not count; parameters that are not finite are replaced by the others'.

    Args:
        model: The model that the inner optimizer trains.
        inner: What steps.
        swarm: Forms the means. Processes of one machine that share the model give a `Machine`.
        sync_every: H.
        periods: Steps between averages: of each momentum, and of the squares last; multiples of H.
        tokens_per_step: What one step counts for in the means.

    Raises:
        SettingsError: The periods do not fit, or the inner optimizer trains what is not a parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: QuasiHyperbolicAdam,
        swarm: Collective | Machine,
        *,
        sync_every: int = 32,
        periods: Sequence[int] | None = None,
        tokens_per_step: int = 1,
    ) -> None:
        super().__init__(model, inner, tokens_per_step=tokens_per_step)
        if sync_every < 1:
            raise SettingsError(f"sync_every must be at least 1, not {sync_every}")
        betas = [*(beta for beta, _ in inner.momenta), inner.beta]
        if periods is None:
            periods = [sync_every * math.ceil(half_life(beta) / sync_every) for beta in betas]
        if len(periods) != len(betas) or any(period < 1 or period % sync_every for period in periods):
            raise SettingsError(f"{len(betas)} periods are needed, multiples of {sync_every}, not {list(periods)}")
        self.periods = tuple(periods)
        self.steps = 0
        """Inner steps."""
        self._names = [*(f"momentum {index}" for index in range(len(inner.momenta))), "second"]
        self._every = sync_every
        self._adam, self._link, self._buffers = inner, link_of(swarm, self._flat), Buffers(model)
        if not self._link.all(self._flat.slices == self._flat.whole):
            inner.agreed = self._link.all  # each looks at a part of the gradient
        self._due: list[str] = []
        self._fresh = 0  # steps taken since the last average

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and the averages that are due.

        Raises:
            ShoalError: An exchange failed; see the class.
            SettingsError: A parameter is trained that was frozen when this was made, so it is not exchanged.
        """
        self._check_trained()
        before = self._adam.taken
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.steps += 1
        self._fresh += self._adam.taken - before
        for name, period in (("parameters", self._every), *zip(self._names, self.periods, strict=True)):
            if self.steps % period == 0 and name not in self._due:
                self._due.append(name)
        if self._due:
            self._average(float(self._fresh * self._tokens_per_step))
        return loss

    def finish(self) -> None:
        """Ends the run: one mean of all peers' parameters."""
        self._due = ["parameters"]
        self._average(1.0)

    def _average(self, weight: float) -> None:
        problem = self._buffers.average(self._link.gather, weight)
        values = torch.cat([self._read(name) for name in self._due])
        if not self._link.all(bool(torch.isfinite(values).all())):
            values, weight = torch.zeros_like(values), 0.0
        mean = self._link.mean(values, weight)
        if mean is not None:
            for name, part in zip(self._due, torch.split(mean, self._flat.length), strict=True):
                self._write(name, part)
        self._due, self._fresh = [], 0
        if problem is not None:
            raise problem

    def _read(self, name: str) -> torch.Tensor:
        if name == "parameters":
            return self._flat.read()
        return self._flat.gather(dict(self._tensors(name)))

    @torch.no_grad()
    def _write(self, name: str, values: torch.Tensor) -> None:
        if name == "parameters":
            self._flat.write(values)
            return
        named = self._flat.scatter(values)
        for place, tensor in self._tensors(name):
            tensor.copy_(named[place])

    def _tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's tensor of that name; a parameter that has had no gradient yet has zeros."""
        for place, parameter in self._flat.originals():
            yield place.name, local(self.inner.state[parameter].get(name, torch.zeros_like(parameter)))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary; under "averages", where the run stands."""
        return {
            **self.inner.state_dict(),
            "averages": {"steps": self.steps, "due": list(self._due), "fresh": self._fresh},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            SettingsError: It is not one of these.
        """
        if "averages" not in state_dict:
            raise SettingsError("the state dictionary is not one of an optimizer that averages its momenta")
        saved = state_dict["averages"]
        if unknown := {*saved["due"]} - {"parameters", *self._names}:
            raise SettingsError(f"averages are due of {min(unknown)!r}, which this optimizer does not have")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "averages"})
        self.steps, self._due, self._fresh = saved["steps"], list(saved["due"]), saved["fresh"]
