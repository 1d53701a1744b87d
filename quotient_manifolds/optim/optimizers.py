"""Step along gradients of pairs as SGD and Adam do, with sizes that every representative of a pair shares."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.optim.quotient import Job, Parameters, QuotientOptimizer
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
        weight_decay: float = 0.0,
        *,
        metric: str = "mix",
        max_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, symmetries, defaults, torch.optim.SGD, metric=metric, max_norm=max_norm)

    def _direction(self, job: Job) -> Tensor:
        gradient, momentum = job.gradient, float(job.group["momentum"])
        if momentum:
            kept = job.kept.get("gradient")
            if kept is not None:
                gradient = gradient.add_(kept, alpha=momentum)
            job.memory["gradient"] = gradient
        return job.point.coordinates(gradient)


@final
class QuotientAdam(QuotientOptimizer):
    """Step with an adaptive size for every row of a pair, and of all other parameters as `torch.optim.AdamW` does.

    Let M be the gradient of the product G H^T of a pair and right its right singular vectors. The rows of Z = M right
    belong to the rows of G, and no change of representative changes them but by one rotation of all. Adam's second
    moment of a row is the running mean of its mean square; its first moment that of M as the pair sees it, which is
    carried along as the spans of G and H move. G steps such that the product moves by -lr times the quotient times
    right^T; H alike with left. So lr has the size of changes of the product's entries and does not depend on those of
    G and H. For pairs with h = 1, as neurons, each entry of Z is a row.

    Two runs from two points of one orbit of the pairs' groups compute the same functions, to rounding. Other symmetries
    (gains of norms, biases that a softmax ignores) are not quotiented out.

    params: named parameters, `model.named_parameters()`, or groups of them with settings of their own. symmetries:
    those of the model, `find_symmetries(model.eval(), batch)`, or some of them; frozen pairs are ignored.
    metric: "mix", whose steps are changes of the product, or "inv", whose steps are relative to its singular values, so
    that lr is much smaller; from B = 0, where these are 0, take "mix". weight_decay is decoupled and shrinks G and H
    alike. max_norm: clips all gradients together to this norm, which is the same along orbits; that of
    `torch.nn.utils.clip_grad_norm_` is not.

    Factors of any rank are points. At B = 0, the start of low-rank adaptation, B moves by the gradient in the span of A
    and A stays. The step of H has to be divided by singular values; where one is smaller than the step of G, it is
    shortened, so that the product of both steps is no larger than the step of H. `inv`, for which a rank is lost
    infinitely far away, steps as `mix` does where a singular value is 0, which is: below 1e-7 of the largest, or no
    more than the rounding of the factors. Where both factors lack rank, the orbit does not say how to leave: what lacks
    in H stays. Pairs whose factors all but cancel are moved to a representative of good condition before a step: other
    weights, the same product up to their rounding.

    As with other optimizers there are state (that of pairs under their names), groups and hooks, and schedulers and
    gradient scalers work. ValueError, with nothing changed, for gradients that are NaN, infinite or sparse, and for
    pairs of which only a part is trained.

    >>> layer = torch.nn.Sequential(torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 5, bias=False)).eval()
    >>> symmetries = find_symmetries(layer, torch.randn(4, 6))
    >>> optimizer = QuotientAdam(layer.named_parameters(), symmetries, lr=0.01)
    >>> layer(torch.randn(8, 6)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        symmetries: Symmetries,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        metric: str = "mix",
        max_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, symmetries, defaults, torch.optim.AdamW, metric=metric, max_norm=max_norm)

    def _direction(self, job: Job) -> Tensor:
        beta, beta2 = map(float, job.group["betas"])
        share, share2 = (1 - b ** (job.steps + 1) for b in (beta, beta2))
        z = job.point.coordinates(job.gradient)
        square = self._mean(job, "square", _row_means(z.square_()), beta2)
        size = (square / share2).sqrt_().add_(job.group["eps"])
        return job.point.coordinates(self._mean(job, "gradient", job.gradient, beta), z).div_(size.mul_(share))

    @staticmethod
    def _mean(job: Job, name: str, value: Tensor, beta: float) -> Tensor:
        """Return the running mean of values, which begins at 0 and is remembered; in place of the last value."""
        kept = job.kept.get(name)
        job.memory[name] = mean = value.mul_(1 - beta) if kept is None else value.lerp_(kept, beta)
        return mean


def _row_means(x: Tensor) -> Tensor:
    """Return the means over the last dimension, which is kept, as a new tensor."""
    h = x.shape[-1]
    return (x.view(-1, h) @ x.new_full((h,), 1 / h)).view(*x.shape[:-1], 1)  # faster than mean where h is small
