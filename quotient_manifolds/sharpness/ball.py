"""The balls that the ascent climbs in: for each norm the steepest step, the nearest point, a random one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch

from quotient_manifolds.sharpness.vector import Blocks, combine, dots, largest, norm, scale, signed_step


class Slope(NamedTuple):
    """A point of the ball and the gradient there, with what a step from it has to know of them."""

    z: Blocks
    length: float  # |z|
    gradient: Blocks
    square: float  # |gradient|_2^2
    product: float  # <gradient, z>


class Ball(ABC):
    """{z : |z| <= radius}."""

    def __init__(self, radius: float) -> None:
        self.radius = radius

    @abstractmethod
    def length(self, z: Blocks) -> float:
        """|z|."""

    @abstractmethod
    def slope(self, z: Blocks, length: float, gradient: Blocks) -> Slope:
        """In one pass; the product only where the ball's steps need it."""

    @abstractmethod
    def step(self, at: Slope, z_old: Blocks, eta: float, a: float, out: Blocks) -> float:
        """out = P(z + a (u - z) + (1 - a) (z - z_old)) with u = P(z + eta * steepest ascent); out may be z_old.

        Steepest ascent is the direction of length 1 along which the gradient is largest. Returns |out|, or the radius
        where steps do not need to know.
        """

    @abstractmethod
    def spread(self, sample: Blocks) -> None:
        """Makes a random point of the ball, to start from, of a sample of the space, in place."""

    def shrink(self, z: Blocks) -> None:
        """Scales z into the ball, in place, where it is outside."""
        length = self.length(z)
        if length > self.radius:
            scale(z, self.radius / length)


@final
class L2Ball(Ball):
    """|z| = sqrt(sum z_i^2): steepest ascent is along the gradient, P(v) = v min(1, radius / |v|)."""

    def length(self, z: Blocks) -> float:
        return norm(z)

    def slope(self, z: Blocks, length: float, gradient: Blocks) -> Slope:
        square, product = dots(gradient, gradient, z)
        return Slope(z, length, gradient, square, product)

    def step(self, at: Slope, z_old: Blocks, eta: float, a: float, out: Blocks) -> float:
        """out = p z + q z_old + r g: one pass, one norm, one scaling if outside."""
        c = eta / math.sqrt(at.square) if at.square > 0 else 0.0
        u = math.sqrt(max(0.0, at.length**2 + 2 * c * at.product + c * c * at.square))  # |z + c g|
        s = self.radius / u if u > self.radius else 1.0
        length = math.sqrt(combine(((a * s + 2 * (1 - a), at.z), (a - 1, z_old), (a * s * c, at.gradient)), out))
        if length > self.radius:
            scale(out, self.radius / length)
        return min(length, self.radius)

    def spread(self, sample: Blocks) -> None:
        """A uniform point of the sphere, as in the authors' code."""
        scale(sample, self.radius / max(norm(sample), torch.finfo(torch.float64).tiny))


@final
class LinfBall(Ball):
    """|z| = max |z_i|: steepest ascent is along sign(gradient), P(v)_i = min(max(v_i, -radius), radius)."""

    def length(self, z: Blocks) -> float:
        return largest(z)

    def slope(self, z: Blocks, length: float, gradient: Blocks) -> Slope:
        return Slope(z, length, gradient, dots(gradient, gradient)[0], math.nan)

    def step(self, at: Slope, z_old: Blocks, eta: float, a: float, out: Blocks) -> float:
        signed_step(at.z, z_old, at.gradient, eta, a, self.radius, out)
        return self.radius

    def spread(self, sample: Blocks) -> None:
        """A uniform point of the box: samples are uniform in [-1, 1]."""
        scale(sample, self.radius)


BALLS: dict[str, type[Ball]] = {"l2": L2Ball, "linf": LinfBall}
