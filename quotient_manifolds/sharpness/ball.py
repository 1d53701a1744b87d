"""Describe the balls that the ascent climbs in: for each norm the steepest step, the nearest point, a random one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch

from quotient_manifolds.sharpness.vector import absolute_sum, combine, dot, dots, largest, norm, scale, signed_step
from quotient_manifolds.symmetries import Params


class Iterate(NamedTuple):
    """Hold a point of the ball and the gradient there, with the numbers that a step from it needs."""

    z: Params
    length: float  # |z|
    gradient: Params
    square: float  # |gradient|_2^2
    product: float  # <gradient, z>


class Ball(ABC):
    """Describe {z : |z| <= radius} to the ascent."""

    def __init__(self, radius: float) -> None:
        self.radius = radius

    @abstractmethod
    def length(self, z: Params) -> float:
        """Return |z|."""

    @abstractmethod
    def iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        """Return the point with its gradient, and the products that steps in this ball need."""

    @abstractmethod
    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        """Write P(z + a (u - z) + (1 - a) (z - z_old)) with u = P(z + eta * steepest ascent); out may be z_old.

        Steepest ascent is the direction of length 1 of the largest slope. Returns |out|, or the radius if no step asks.
        """

    @abstractmethod
    def spread(self, sample: Params) -> None:
        """Make a random point of the ball, to start from, of a sample of the space, in place."""

    @abstractmethod
    def gap(self, at: Iterate) -> float:
        """Return max { <gradient, x - z> : |x| <= radius }, how much the linearised function can rise in the ball."""

    def shrink(self, z: Params) -> None:
        """Scale z into the ball, in place, where it is outside."""
        length = self.length(z)
        if length > self.radius:
            scale(z, self.radius / length)


@final
class L2Ball(Ball):
    """Describe the ball of |z| = sqrt(sum z_i^2): steepest ascent along the gradient, P(v) = v min(1, radius / |v|)."""

    def length(self, z: Params) -> float:
        return norm(z)

    def iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        square, product = dots(gradient, gradient, z)
        return Iterate(z, length, gradient, square, product)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        # With c = eta / |g|, u = s (z + c g), where s = min(1, radius / |z + c g|). That length is known from the
        # products |z|, <g, z> and |g|, so u is never formed: the step is one combination of z, z_old and g,
        #     (a s + 2 (1 - a)) z  -  (1 - a) z_old  +  a s c g,
        # one pass over memory that also sums |out|^2, and one more where that lies outside.
        c = eta / math.sqrt(at.square) if at.square > 0 else 0.0
        u = math.sqrt(max(0.0, at.length**2 + 2 * c * at.product + c * c * at.square))
        s = self.radius / u if u > self.radius else 1.0
        length = math.sqrt(combine(((a * s + 2 * (1 - a), at.z), (a - 1, z_old), (a * s * c, at.gradient)), out))
        if length > self.radius:
            scale(out, self.radius / length)
        return min(length, self.radius)

    def gap(self, at: Iterate) -> float:
        return self.radius * math.sqrt(at.square) - at.product

    def spread(self, sample: Params) -> None:
        """Scale a Gaussian sample to a uniform point of the sphere, as in the authors' code."""
        scale(sample, self.radius / max(norm(sample), torch.finfo(torch.float64).tiny))


@final
class LinfBall(Ball):
    """Describe the box of |z| = max |z_i|: steepest ascent along sign(gradient), P(v)_i = v_i cut to +-radius."""

    def length(self, z: Params) -> float:
        return largest(z)

    def iterate(self, z: Params, length: float, gradient: Params) -> Iterate:
        return Iterate(z, length, gradient, dots(gradient, gradient)[0], math.nan)

    def step(self, at: Iterate, z_old: Params, eta: float, a: float, out: Params) -> float:
        signed_step(at.z, z_old, at.gradient, eta, a, self.radius, out)
        return self.radius

    def gap(self, at: Iterate) -> float:
        return self.radius * absolute_sum(at.gradient) - dot(at.gradient, at.z)

    def spread(self, sample: Params) -> None:
        """Scale a sample, uniform in [-1, 1], to a uniform point of the box."""
        scale(sample, self.radius)


BALLS: dict[str, type[Ball]] = {"l2": L2Ball, "linf": LinfBall}
