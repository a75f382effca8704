"""What happens after the last exchange."""

from __future__ import annotations

import math

import attrs
import torch

from optim.exact import mean_and_variance
from optim.slots import AllReduce, Layout, Mixing
from protocol.collective import Reduced


@attrs.frozen
class Keep:
    """Nothing: all peers have the same parameters already, or are meant not to."""

    def finish(self, parameters: torch.Tensor, layout: Layout) -> Mixing[torch.Tensor]:
        return parameters
        yield  # a generator that asks for nothing


@attrs.frozen
class GlobalMean:
    """One mean over all peers: what is left of the differences between their parameters goes."""

    def finish(self, parameters: torch.Tensor, layout: Layout) -> Mixing[torch.Tensor]:
        reduced = yield AllReduce(parameters, 1.0)
        assert isinstance(reduced, Reduced)
        return reduced.mean


@attrs.frozen
class VarianceCorrectedMean:
    """The mean over all peers, stretched so that each matrix has the variance that the peers' own have on average.

    w ← m + (w̄ − m)·√(mean variance / (variance of w̄ + ε)), m being the mean of w̄'s elements. The mean of models that
    have little in common loses variance (arXiv 2404.04616). Vectors, whose variance is next to nothing, stay as they
    are.
    """

    epsilon: float = 1e-6

    def finish(self, parameters: torch.Tensor, layout: Layout) -> Mixing[torch.Tensor]:
        matrices = [place for place in layout if len(place.shape) > 1]
        ours = torch.tensor([mean_and_variance(parameters[m.start : m.stop])[1] for m in matrices])
        reduced = yield AllReduce(torch.cat([parameters, ours]), 1.0)
        assert isinstance(reduced, Reduced)
        mean, variances = reduced.mean[: len(parameters)].clone(), reduced.mean[len(parameters) :]
        for place, variance in zip(matrices, variances.tolist(), strict=True):
            values = mean[place.start : place.stop]
            centre, spread = mean_and_variance(values)
            stretch = math.sqrt(variance / (spread + self.epsilon))
            values.sub_(centre).mul_(stretch).add_(centre)
        return mean
