"""Define the balls of an ascent: for each norm its dual, the steepest step, the projection and random points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from quotient_manifolds.check import check_number
from quotient_manifolds.sharpness.vector import absolute_sum, combine, largest, norm, scale, signed_step
from quotient_manifolds.symmetries import Params

TINY = torch.finfo(torch.float64).tiny


class Iterate(NamedTuple):
    """Hold a point of the ball and the gradient there, with the numbers that a step from it needs."""

    z: Params
    length: float  # |z|
    gradient: Params
    square: float  # |gradient|_2^2
    product: float  # <gradient, z>
    dual: float  # |gradient| in the dual of the ball's norm


@final
@dataclass(frozen=True)
class L2Ball:
    """Represent {z : |z| <= radius}, |z|^2 = sum z_i^2: steepest ascent along g, P(v) = v min(1, radius / |v|).

    `step` writes P(z + a (u - z) + (1 - a) (z - z_old)) to `out`, which may be z_old, and returns |out|. Here
    u = P(z + eta d), with d the unit vector of steepest ascent; for eta = inf, u is the maximizer of <g, .> over the
    ball. `dual` returns |g|_* = max <g, z> / |z|, given g and |g|_2^2. `spread` turns a sample of the space into a
    random starting point, in place.
    """

    radius: float

    def length(self, z: Params) -> float:
        return norm(z)

    def dual(self, gradient: Params, square: float) -> float:
        return math.sqrt(square)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # With c = eta / |g|, u = s (z + c g), where s = min(1, radius / |z + c g|). The length |z + c g| follows from
        # |z|, <g, z> and |g|, so u is never formed: the step is one combination of z, z_old and g,
        #     (a s + 2 (1 - a)) z  -  (1 - a) z_old  +  a s c g.
        # It takes one pass over memory, which also sums |out|^2, and another one if out lies outside the ball.
        size = math.sqrt(at.square)
        if eta == math.inf and size > 0:
            s, along = 0.0, self.radius / size
        else:
            c = eta / size if size > 0 else 0.0
            u = math.sqrt(max(0.0, at.length**2 + 2 * c * at.product + c * c * at.square))
            s = self.radius / u if u > self.radius else 1.0
            along = s * c
        length = math.sqrt(combine(((a * s + 2 * (1 - a), at.z), (a - 1, z_old), (a * along, at.gradient)), out))
        if length > self.radius:
            scale(out, self.radius / length)
        return min(length, self.radius)

    def spread(self, sample: Params) -> None:
        """Scale a Gaussian sample to a uniform point of the sphere, as in the authors' code."""
        scale(sample, self.radius / max(norm(sample), TINY))


@final
@dataclass(frozen=True)
class LinfBall:
    """Represent the box max |z_i| <= radius likewise: steepest ascent along sign(g), P clamps each v_i to +-radius."""

    radius: float

    def length(self, z: Params) -> float:
        return largest(z)

    def dual(self, gradient: Params, square: float) -> float:
        return absolute_sum(gradient)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # A step of 2 radius reaches the maximizer of <g, .> from any point of the box; inf * sign(0) would be NaN.
        signed_step(at.z, z_old, at.gradient, min(eta, 2 * self.radius), a, self.radius, out)
        return self.radius  # no step in the box uses the length

    def spread(self, sample: Params) -> None:
        """Scale a sample, uniform in [-1, 1], to a uniform point of the box."""
        scale(sample, self.radius)


Ball = L2Ball | LinfBall
BALLS: dict[str, type[L2Ball] | type[LinfBall]] = {"l2": L2Ball, "linf": LinfBall}


def check_radius(radius: Any, name: str = "radius") -> None:
    """Raise ValueError unless the radius, or another setting called `name`, is a positive finite number."""
    if isinstance(radius, (list, tuple)):
        raise ValueError(f"{name} must be one number. Found {radius!r}; use worst_case_profile for several radii")
    check_number(name, radius, positive=True)
