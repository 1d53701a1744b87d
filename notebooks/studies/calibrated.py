"""Round and prune weights with the inputs of their layers in view: GPTQ and Wanda.

Both take H, the sum of x x^T over the inputs x of a linear layer on calibration data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.orbit.objectives import CLIPPED, RoundingError
from quotient_manifolds.symmetries import Params

DAMPING = 0.01  # of the mean of H's diagonal, added to it
Moments = dict[str, Tensor]
"""H by the name of the weight."""


@torch.no_grad()
def moments(
    model: nn.Module,
    params: Mapping[str, Tensor],
    names: Collection[str],
    inputs: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
    mask: Tensor | None = None,
) -> Moments:
    """Return H of linear layers, in float64, by one forward pass with these parameters.

    names: of the layers' weights. mask: of the tokens that count, by default all.
    """
    found: Moments = {}

    def adding(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def add(layer: nn.Module, given: Any, output: Any) -> None:
            x = (given[0].flatten(0, -2) if mask is None else given[0][mask]).double()
            found[name] = x.mT @ x + found.get(name, 0.0)

        return add

    layers = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    hooks = [layer.register_forward_hook(adding(name)) for name, layer in layers.items()]
    try:
        functional_call(model, dict(params), inputs, dict(keywords or {}))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def gptq(W: Tensor, H: Tensor, rounding: RoundingError) -> Tensor:
    """Round a weight, whose rows are channels, so that tr((W - Q) H (W - Q)^T) is small.

    Columns are rounded to the nearest value in their order. The error e of column j is made up for by the columns k
    that are left: they change by -e U[j, k] / U[j, j], where H^-1 = U^T U, U upper triangular. Steps are those of
    `RoundingError.round`; a group's are chosen when its first column is reached. [Frantar et al., 2210.17323, Sec. 3]
    """
    n, top = W.shape[1], 2 ** (rounding.bits - 1) - 1
    damped = H + DAMPING * H.diagonal().mean() * torch.eye(n, dtype=H.dtype)
    U = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    U = (U / U.diagonal()[:, None]).to(W.dtype)
    size = rounding.group_size if rounding.group_size and n % rounding.group_size == 0 else n
    W, step = W.clone(), torch.empty(0)
    for j in range(n):
        if j % size == 0:
            step = _steps(W[:, j : j + size], top, rounding.clip)
        rounded = (W[:, j] / step).round().clamp(-top, top) * step
        W[:, j + 1 :] -= torch.outer(W[:, j] - rounded, U[j, j + 1 :])
        W[:, j] = rounded
    return W


def _steps(rows: Tensor, top: int, clip: bool) -> Tensor:
    """Return the step of each row: its largest number is a multiple of it, or the squared error is least."""
    most = rows.abs().amax(1).clamp_min(torch.finfo(rows.dtype).tiny) / top
    steps = torch.stack([share * most for share in (CLIPPED if clip else (1.0,))])
    errors = [((rows / s[:, None]).round().clamp(-top, top) * s[:, None] - rows).square().sum(1) for s in steps]
    return steps.gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]


def wanda(W: Tensor, H: Tensor, fraction: float) -> Tensor:
    """Set this fraction of each row to 0, where |w| times the norm of its input is least. [Sun et al., 2306.11695]"""
    score = W.abs() * H.diagonal().sqrt().to(W.dtype)
    count = int(fraction * W.shape[1])
    return W.masked_fill(score <= score.kthvalue(count, dim=1, keepdim=True).values, 0.0) if count else W


def calibrated(params: Params, seen: Moments, change: Callable[[Tensor, Tensor], Tensor]) -> Params:
    """Return the parameters with every weight of which H is known changed by `change(W, H)`."""
    return params | {name: change(params[name], H) for name, H in seen.items()}
