"""Step with adaptive sizes that every representative of a pair shares."""

from __future__ import annotations

from typing import final

import torch

from quotient_manifolds.optim.chosen import Parameters
from quotient_manifolds.optim.frame import Both
from quotient_manifolds.optim.quotient import Job, QuotientOptimizer, combined
from quotient_manifolds.symmetries import Symmetries


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
    (gains of norms, biases that a softmax does not see) are not divided by.

    params: named parameters, `model.named_parameters()`, or groups of them with settings of their own. symmetries:
    those of the model, `find_symmetries(model.eval(), batch)`, or as many as shall count; frozen pairs are left alone.
    metric: "mix", whose steps are changes of the product, or "inv", whose steps are relative to its singular values, so
    that lr is much smaller. weight_decay is decoupled and shrinks G and H alike. max_norm: clips all gradients together
    to this norm, which is the same along orbits; that of `torch.nn.utils.clip_grad_norm_` is not.

    Factors of any rank are points. At B = 0, the start of low-rank adaptation, B moves by the gradient in the span of A
    and A stays. Where a singular value is smaller than the step, the step of H, which has to be divided by it, is
    shortened, so that the product cannot leap. `inv`, for which a rank is lost infinitely far away, steps as `mix` does
    where a singular value is 0. Where G and H are both 0 nothing moves. Pairs whose factors all but cancel are moved to
    a representative of good condition: other weights, the same product.

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
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, symmetries, defaults, torch.optim.AdamW, metric=metric, max_norm=max_norm)

    def _direction(self, job: Job) -> Both:
        beta, beta2 = map(float, job.group["betas"])
        steps = job.batch.count(self.state) + 1
        kept, spread = (job.batch.recall(self.state, name) for name in ("gradient", "square"))
        squares = tuple((z * z).mean(dim=-1, keepdim=True) for z in job.point.coordinates(job.gradient))
        nothing = (torch.zeros_like(job.gradient[0]), torch.zeros_like(job.gradient[1]))
        none = (torch.zeros_like(squares[0]), torch.zeros_like(squares[1]))
        mean = job.memory["gradient"] = combined(kept or nothing, beta, job.gradient, 1 - beta)
        square = job.memory["square"] = combined(spread or none, beta2, (squares[0], squares[1]), 1 - beta2)
        z, w = job.point.coordinates(mean)
        size, other = ((v / (1 - beta2**steps)).sqrt() + job.group["eps"] for v in square)
        return z / size / (1 - beta**steps), w / other / (1 - beta**steps)
