"""Apply the Hessian of z -> L(gamma_z(1)) at z = 0, a linear map on horizontal coordinates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry
from quotient_manifolds.geometry.parameters import trained_parameters
from quotient_manifolds.sharpness.losses import Loss
from quotient_manifolds.sharpness.objective import BatchObjective
from quotient_manifolds.sharpness.vector import combine, norm
from quotient_manifolds.symmetries import Params
from quotient_manifolds.symmetries.freedom import gaussian, typical
from quotient_manifolds.symmetries.propose import RUN_ERRORS
from quotient_manifolds.symmetries.verify import BatchLosses

Products = Literal["exact", "difference"]
PRODUCTS = ("exact", "difference")

DISAGREE = 0.01  # relative, of one parameter's part of H v: rounding explains less
RESOLVED = 0.01  # of the largest part: what is smaller is compared with that


@final
class Hessian:
    """Apply H v = d/de grad_z L(gamma_z(1)) at z = e v, e = 0: symmetric, and 0 on coordinates that do not move.

    Second-order and exact geodesics agree to the order that counts, so both give the Riemannian Hessian; first-order
    ones leave the bend of the geodesics out.

    products: "exact" differentiates twice through network and geodesic, one forward for all products, whose graph is
    kept. "difference" takes (grad(e v) - grad(-e v)) / 2e with e |v| = (float precision)^(1/3): two forwards and
    backwards each, a relative error of about e^2, for networks whose operations have no second derivative. torch's own
    operations of that kind are refused by "exact". Some have a wrong one, such as torch's weight_norm, or a constant
    slope, as an autograd.Function marked once_differentiable: one product is compared with a difference of gradients
    first, in float64, and where they disagree "difference" is taken with a warning. Take it yourself for checkpointed
    activations.
    """

    def __init__(self, objective: BatchObjective, products: Products) -> None:
        self.objective = objective
        self.space = objective.space
        self.forward_passes, self.backward_passes = 1, 1
        wrong = wrong_second_derivative(objective.model, objective.loss, objective.batch) if products == "exact" else ""
        if wrong:
            warnings.warn(f"{wrong}; differences of gradients are taken instead", stacklevel=2)
            products = "difference"
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


def wrong_second_derivative(model: nn.Module, loss: Loss, batch: Any) -> str:
    """Say which parameter has a second derivative by autograd that differences of gradients deny; "" if none has.

    H v is compared for one random v of the size of the parameters, in float64, at a point 1e-2 away: a unit of zeros
    lies on the kink of its ReLU, where there is no second derivative. Kinks near by make differences that depend on the
    step; what is wrong does not. What does not run twice differentiated is not compared.
    """
    losses, generator = BatchLosses(model, loss, [batch]), torch.Generator().manual_seed(0)
    params = losses.params()
    v, away = (
        {name: typical(w) * gaussian(w, generator) for name, w in trained_parameters(model).items()} for _ in range(2)
    )
    params = params | {name: params[name] + 1e-2 * step for name, step in away.items()}

    def difference(step: float) -> Params:
        steps = ({name: params[name] + sign * step * v[name] for name in v} for sign in (1.0, -1.0))
        after, before = (losses.gradient(params | there, list(v), 0) for there in steps)
        return {name: (after[name] - before[name]) / (2 * step) for name in v}

    try:
        with sdpa_kernel(SDPBackend.MATH):
            exact, near = losses.hessian_product(params, v, 0), difference(losses.precision**0.5)
            largest = max((float(each.norm()) for each in near.values()), default=0.0)
            errors = {name: near[name] - exact[name] for name in v}
            size = {name: max(float(near[name].norm()), RESOLVED * largest) for name in v}
            if not (doubted := [name for name in v if not float(errors[name].norm()) <= DISAGREE * size[name]]):
                return ""
            nearer = difference(losses.precision**0.5 / 8)
    except RUN_ERRORS:
        return ""
    for name in doubted:
        error = float(errors[name].norm())
        if float((nearer[name] - near[name]).norm()) <= error / 4:
            return f"the second derivative by autograd of the loss in {name} is off by {error / size[name]:.0%}"
    return ""


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
