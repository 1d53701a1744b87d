"""Apply the Hessian of z -> L(gamma_z(1)) at z = 0, a linear map on horizontal coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.vector import combine, norm
from quotient_manifolds.symmetries import Params

Products = Literal["exact", "difference"]
PRODUCTS = ("exact", "difference")


@final
class Hessian:
    """Apply H v = d/de grad_z L(gamma_z(1)) at z = e v, e = 0: symmetric, and 0 on coordinates that do not move.

    Second-order and exact geodesics agree to the order that counts, so both give the Riemannian Hessian; first-order
    ones leave the bend of the geodesics out.

    products: "exact" differentiates twice through network and geodesic, one forward for all products, whose graph is
    kept. "difference" takes (grad(e v) - grad(-e v)) / 2e with e |v| = (float precision)^(1/3): two forwards and
    backwards each, a relative error of about e^2, for networks whose operations have no second derivative. torch's own
    operations of that kind are refused by "exact"; a custom autograd.Function marked once_differentiable is not, for
    autograd takes its slope for constant without a word: use "difference" there, and for checkpointed activations.
    """

    def __init__(self, objective: BatchObjective, products: Products) -> None:
        self.objective = objective
        self.space = objective.space
        self.forward_passes, self.backward_passes = 1, 1
        if products == "exact":
            self.base, self.times = self._differentiated()
        else:
            self.base, self.times = objective.value(objective.zero()), self._difference
            self.backward_passes = 0

    def _differentiated(self) -> tuple[float, Callable[[Params], Params]]:
        leaves = {key: block.requires_grad_() for key, block in self.space.zero().items()}
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels of attention have no second derivative
            # Exact geodesics agree with second-order ones at z = 0 up to third derivatives, which take no part here.
            order = "second" if self.space.reach_limit is None else None
            value = self.objective.differentiable_loss(self.space.move(leaves, order=order))
            loss = self.objective.finite(value)
            slopes = torch.autograd.grad(value, tuple(leaves.values()), create_graph=True, materialize_grads=True)

        def times(v: Params) -> Params:
            pairs = [(slope, v[key]) for key, slope in zip(leaves, slopes, strict=True) if slope.requires_grad]
            if not pairs:  # the loss is linear along all geodesics
                return self.space.zero()
            along, directions = zip(*pairs, strict=True)
            self.backward_passes += 1
            with sdpa_kernel(SDPBackend.MATH):
                products = _second(along, tuple(leaves.values()), directions)
            return self.space.project(dict(zip(leaves, products, strict=True)))

        return loss, times

    def _difference(self, v: Params) -> Params:
        length = norm(v)
        if length == 0:
            return self.space.zero()
        precision = max(torch.finfo(block.dtype).eps for block in v.values())
        # The cube root balances the error of the difference, step^2, against that of rounding, precision / step.
        step = precision ** (1 / 3) / length
        after, before = (
            self.objective.value_and_gradient({key: sign * step * block for key, block in v.items()})[1]
            for sign in (1.0, -1.0)
        )
        self.forward_passes += 2
        self.backward_passes += 2
        combine([(0.5 / step, after), (-0.5 / step, before)], after)
        return self.space.project(after)


def check_hessian(measure: str, geometry: Geometry, products: str) -> None:
    """Raise ValueError for unknown products, and for a geometry whose ball is no ellipsoid: it has no inner product."""
    if isinstance(geometry, Euclidean | Adaptive) and geometry.norm != "l2":
        raise ValueError(f"The {measure} needs an inner product, which {geometry.name} has none of; use norm='l2'")
    if products not in PRODUCTS:
        raise ValueError(f"products must be one of {', '.join(PRODUCTS)}. Found {products!r}")


def _second(slopes: Any, leaves: tuple[Tensor, ...], directions: Any) -> tuple[Tensor, ...]:
    try:
        return torch.autograd.grad(slopes, leaves, directions, retain_graph=True, materialize_grads=True)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise ValueError(
            f"An operation of the network has no second derivative ({str(error).splitlines()[0]}); use "
            f"products='difference'"
        ) from None
