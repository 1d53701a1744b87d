"""Describe the balls of an ascent: for each norm its dual, the steepest step, the nearest point, a random one."""

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
    dual: float  # |gradient| in the norm dual to that of the ball


@final
@dataclass(frozen=True)
class L2Ball:
    """Describe {z : |z| <= radius}, |z|^2 = sum z_i^2: steepest ascent along g, P(v) = v min(1, radius / |v|).

    step: write P(z + a (u - z) + (1 - a) (z - z_old)) with u = P(z + eta * steepest ascent) to `out`, which may be
    z_old, and return |out|; steepest ascent is the direction of length 1 of the largest slope. For eta = inf, u is the
    maximizer of <g, .> over the ball. dual: |g|_* = max <g, z> / |z|, given also |g|_2^2. spread: make a random point
    to start from of a sample of the space, in place.
    """

    radius: float

    def length(self, z: Params) -> float:
        return norm(z)

    def dual(self, gradient: Params, square: float) -> float:
        return math.sqrt(square)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # With c = eta / |g|, u = s (z + c g), where s = min(1, radius / |z + c g|). That length is known from the
        # products |z|, <g, z> and |g|, so u is never formed: the step is one combination of z, z_old and g,
        #     (a s + 2 (1 - a)) z  -  (1 - a) z_old  +  a s c g,
        # one pass over memory that also sums |out|^2, and one more where that lies outside.
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
    """Describe the box of |z| = max |z_i| likewise: steepest ascent along sign(g), P(v)_i = v_i cut to +-radius."""

    radius: float

    def length(self, z: Params) -> float:
        return largest(z)

    def dual(self, gradient: Params, square: float) -> float:
        return absolute_sum(gradient)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # A step of 2 radius leads to the maximizer of <g, .> from anywhere in the box; inf * sign(0) would be NaN.
        signed_step(at.z, z_old, at.gradient, min(eta, 2 * self.radius), a, self.radius, out)
        return self.radius  # which no step asks for

    def spread(self, sample: Params) -> None:
        """Scale a sample, uniform in [-1, 1], to a uniform point of the box."""
        scale(sample, self.radius)


Ball = L2Ball | LinfBall
BALLS: dict[str, type[L2Ball] | type[LinfBall]] = {"l2": L2Ball, "linf": LinfBall}


def check_radius(radius: Any, name: str = "radius") -> None:
    """Raise ValueError unless the radius, or what else is called so, is a positive finite number."""
    if isinstance(radius, (list, tuple)):
        raise ValueError(f"{name} must be one number. Found {radius!r}; use worst_case_profile for several radii")
    check_number(name, radius, positive=True)
