"""Descend along the Riemannian gradient of pairs."""

from __future__ import annotations

from typing import final

import torch

from quotient_manifolds.optim.frame import Both
from quotient_manifolds.optim.pairs import Parameters
from quotient_manifolds.optim.quotient import Job, QuotientOptimizer, combined
from quotient_manifolds.symmetries import Symmetries


@final
class QuotientSGD(QuotientOptimizer):
    """Step along the Riemannian gradient of pairs, with momentum, and of all other parameters as `torch.optim.SGD`.

    For the gradient M of the product G H^T of a pair these are steps -lr (M H W_G^-1, M^T G W_H^-1) [paper, Eq. 9, 10].
    In `mix` the product moves by -lr (M P_H + P_G M) to the first order, with the projections on the spans of H and of
    G. Momentum is the running sum of M as the pair sees it, carried along as these spans move. Settings, points of
    lower rank, what two runs have in common and errors are as for `QuotientAdam`. Weight decay is decoupled for pairs,
    and for all other parameters as in torch, added to the gradient.

    >>> layer = torch.nn.Sequential(torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 5, bias=False)).eval()
    >>> symmetries = find_symmetries(layer, torch.randn(4, 6))
    >>> optimizer = QuotientSGD(layer.named_parameters(), symmetries, lr=0.1, momentum=0.9)
    >>> layer(torch.randn(8, 6)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        symmetries: Symmetries,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        metric: str = "mix",
        max_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, symmetries, defaults, torch.optim.SGD, metric=metric, max_norm=max_norm)

    def _direction(self, job: Job) -> Both:
        group, gradient = job.group, job.gradient
        momentum = float(group["momentum"])
        if momentum:
            kept, counts = job.batch.recall(self.state, "gradient", job.width), job.batch.counts(self.state)
            # As in torch, the first gradient is not dampened.
            share = job.batch.each_head([1 - float(group["dampening"]) if count else 1.0 for count in counts])
            mean = combined(kept, momentum, gradient, share)
            job.memory["gradient"] = mean
            gradient = combined(mean, momentum, gradient, 1.0) if group["nesterov"] else mean
        return job.point.coordinates(gradient)
