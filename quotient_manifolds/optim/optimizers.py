"""Step along gradients of pairs as SGD and Adam do, with step sizes that all representatives of a pair share."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.optim.quotient import Job, Parameters, QuotientOptimizer
from quotient_manifolds.symmetries import Symmetries


@final
class QuotientSGD(QuotientOptimizer):
    """Step along the Riemannian gradient of pairs, with momentum; step other parameters as `torch.optim.SGD` does.

    With M the gradient of the product G H^T of a pair, steps are -lr (M H W_G^-1, M^T G W_H^-1) [paper, Eq. 9, 10]. In
    `mix` the product changes by -lr (M P_H + P_G M) to first order, with the projections P onto the spans of H and G.
    Momentum is the running sum of M on these spans, transported as they change. Settings, points of lower rank, the
    invariance of runs and errors are as for `QuotientAdam`. Weight decay is decoupled for pairs; for all other
    parameters it is added to the gradient, as in torch.

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
    """Step with an adaptive size for every row of a pair; step other parameters as `torch.optim.AdamW` does.

    Let M be the gradient of the product G H^T of a pair, and `right` the right singular vectors of the product. The
    rows of Z = M right belong to the rows of G; another representative at most rotates all of them at once. Adam's
    second moment of a row is the running mean of its mean square. The first moment is the running mean of M on the
    spans of G and H, transported as these change. The step of G changes the product by -lr times Adam's quotient times
    right^T; the step of H alike, with left. So lr has the size of changes of the product's entries, and does not depend
    on the entries of G and H. For pairs with h = 1, such as neurons, each entry of Z is a row.

    Two runs from two points of one orbit of the pairs' groups compute the same functions, up to rounding. Other
    symmetries (gains of norms, biases that a softmax ignores) are not quotiented out.

    params: named parameters, `model.named_parameters()`, or groups of them with their own settings. symmetries: the
    model's symmetries, `find_symmetries(model.eval(), batch)`, or some of them; frozen pairs are ignored.
    metric: "mix", whose steps are changes of the product, or "inv", whose steps are relative to its singular values, so
    that lr is much smaller. From B = 0, where these are 0, use "mix". weight_decay: decoupled; shrinks G and H alike.
    max_norm: clips all gradients together to this norm, which is constant along orbits; the norm of
    `torch.nn.utils.clip_grad_norm_` is not.

    Factors may have any rank. At B = 0, the start of low-rank adaptation, B steps along the gradient in the span of A,
    and A does not change. The step of H is divided by singular values. If one is smaller than the step of G, the step
    of H is shortened, so that the product of both steps is no larger than the step of H. A singular value counts as 0
    below 1e-7 of the largest, or within the rounding of the factors. There `inv` steps as `mix` does, because in its
    own metric a loss of rank is infinitely far away. If both factors lack rank, the orbit does not determine a way to
    leave: the missing part of H does not change. Pairs whose factors almost cancel are brought to a well-conditioned
    representative before a step: other weights, the same product up to their rounding.

    State (of pairs, under their names), groups, hooks, schedulers and gradient scalers work as for other optimizers.
    Raises ValueError, with nothing changed, if gradients are NaN, infinite or sparse, or if a pair is trained in part.

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
        """Return the running mean of values, which begins at 0, written over `value`, and store it in `job.memory`."""
        kept = job.kept.get(name)
        job.memory[name] = mean = value.mul_(1 - beta) if kept is None else value.lerp_(kept, beta)
        return mean


def _row_means(x: Tensor) -> Tensor:
    """Return the means over the last dimension, which is kept, as a new tensor."""
    h = x.shape[-1]
    return (x.view(-1, h) @ x.new_full((h,), 1 / h)).view(*x.shape[:-1], 1)  # faster than mean if h is small
