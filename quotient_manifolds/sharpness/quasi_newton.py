"""Maximise a function in an l2 ball by a quasi-Newton method that keeps a few points and their gradients.

A model of the objective f about the best point z so far, with its gradient g,

    f(z) + <g, x - z> + <x - z, B (x - z)> / 2 - sigma |x - z|^2 / 2,

is maximised over all of the ball |x| <= radius, and that is the next point: one evaluation a step, no line search.

B has to explain how the gradient changed from z to the other kept points z_i: B s_i = y_i for s_i = z_i - z and y_i =
g_i - g. It is half the median of the curvatures <s_i, y_i> / <s_i, s_i> times the identity (0 before there is any),
changed by Powell's symmetric Broyden update (1970) for one pair after the other, the oldest first, which leaves B
indefinite as the Hessian of a loss is. The model's maximum lies in the span of the kept points and gradients, a handful
of dimensions, and is found there by the secular equation of the trust-region problem (Moré and Sorensen 1983).

sigma = damping <g, z> / radius^2, which is the multiplier of the ball at a maximum on the sphere (a thousandth of |g| /
radius takes its place where that is more). The damping is 1/2 at first; it is doubled (to 1/2 at least) where the loss
rose by less than a tenth of what the model said without sigma, and halved where by more than 0.7 of that. A step that
fails is not lost: what it found is in the next model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from quotient_manifolds.sharpness.ascent import Climb, Method, Objective, check_whole
from quotient_manifolds.sharpness.ball import Ball, Iterate
from quotient_manifolds.sharpness.vector import combine, dots, scale
from quotient_manifolds.symmetries import Params

Floats = NDArray[np.float64]

POOR, GOOD = 0.1, 0.7  # shares of the predicted rise below which the damping is doubled, and above which it is halved
LEAST_DAMPING = 0.5  # at first, and after a step that the model got wrong
LEAST_MULTIPLIER = 1e-3
_RESOLVED = 1e-12  # squared, of directions in the span: those below are rounding, in float64


@final
@dataclass(frozen=True)
class QuasiNewton(Method):
    """Hold the settings of a quasi-Newton ascent in an l2 ball, which often needs fewer passes than Auto-PGD.

    One forward and one backward pass per step; the last point needs only a forward pass. A climb ends before its last
    step where the model rises nowhere in the ball. memory: how many points are kept besides the best one, each with its
    gradient: 2 (memory + 1) copies of the parameters in all. restarts, tolerance: see `Method`.
    """

    steps: int = 20
    restarts: int = 0
    tolerance: float = 0.0
    memory: int = 2

    norms: ClassVar[tuple[str, ...]] = ("l2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("memory", self.memory, 1)

    def climb(self, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None) -> Climb:
        return _Climb(self, objective, ball, generator, base)


@final
class _Climb(Climb):
    """Climb once. vectors: z and gradient of every kept point in turn, the oldest first; gram: their inner products."""

    def __init__(
        self, settings: QuasiNewton, objective: Objective, ball: Ball, generator: torch.Generator, base: float | None
    ) -> None:
        super().__init__(settings, objective, ball, generator, base)
        self.memory, self.damping = settings.memory, LEAST_DAMPING
        self.points: list[Iterate] = []
        self.vectors: list[Params] = []
        self.gram = np.zeros((0, 0))

    def _next(self, step: int) -> tuple[Params, float] | None:
        there = self._maximum()
        if there is None:
            return None
        weights, self.predicted = there
        out = self._forget(weights)
        length = math.sqrt(combine(weights, out))
        if length > self.ball.radius:
            scale(out, self.ball.radius / length)
        return out, min(length, self.ball.radius)

    def _arrived(self, step: int) -> None:
        if step == 1 and self.critical:
            # The random direction was no gradient: that is exactly 0.
            for block in self.vectors[1].values():
                block.zero_()
            self.gram[1] = self.gram[:, 1] = 0.0
        if step < self.steps:
            self._keep(self.now)
        if step > 1:  # the first model knows of no curvature
            rise = self.losses[-1] - self.bests[-2]
            if rise < POOR * self.predicted:
                self.damping = max(2 * self.damping, LEAST_DAMPING)
            elif rise > GOOD * self.predicted:
                self.damping /= 2

    def _keep(self, point: Iterate) -> None:
        """Append a point, and its inner products and its gradient's: two passes over what is kept."""
        self.points.append(point)
        for vector in (point.z, point.gradient):
            self.vectors.append(vector)
            size = len(self.vectors)
            # A start at 0 is left out: its inner products are known.
            known = [place for place in range(size - 1) if self.gram[place, place] > 0]
            found = dots(vector, *(self.vectors[place] for place in known), vector)
            self.gram = np.pad(self.gram, (0, 1))
            places = [*known, size - 1]
            self.gram[-1, places] = self.gram[places, -1] = found

    def _forget(self, weights: list[tuple[float, Params]]) -> Params:
        """Return the tensors to write the next point to, `weights` being read before: the oldest's, where it is full.

        The best point stays.
        """
        if len(self.points) <= self.memory:
            return {key: torch.empty_like(block) for key, block in self.best.z.items()}
        oldest = next(place for place, point in enumerate(self.points) if point is not self.best)
        gone = self.points.pop(oldest)
        del self.vectors[2 * oldest : 2 * oldest + 2]
        self.gram = np.delete(np.delete(self.gram, (2 * oldest, 2 * oldest + 1), 0), (2 * oldest, 2 * oldest + 1), 1)
        return gone.z

    def _maximum(self) -> tuple[list[tuple[float, Params]], float] | None:
        """Return the model's maximum as weights of the vectors, and the rise it predicts; None if there is none."""
        radius, best = self.ball.radius, next(i for i, point in enumerate(self.points) if point is self.best)
        basis = self._basis()
        coordinates = basis.T @ self.gram  # a column for each vector
        Z, slopes = coordinates[:, 0::2], coordinates[:, 1::2]
        z, g = Z[:, best], slopes[:, best]
        pairs = [
            (Z[:, place] - z, slopes[:, place] - g)
            for place in range(len(self.points))
            if place != best and np.linalg.norm(Z[:, place] - z) > 1e-6 * radius
        ]
        B = secant_matrix(pairs, len(z))
        multiplier = max(float(g @ z) / radius, LEAST_MULTIPLIER * float(np.linalg.norm(g))) / radius
        sigma = self.damping * multiplier
        x = maximum_in_ball(B - sigma * np.eye(len(z)), g - B @ z + sigma * z, radius)
        predicted = float(g @ (x - z) + (x - z) @ B @ (x - z) / 2)
        if not predicted > 0 or np.linalg.norm(x - z) <= 1e-9 * radius:
            return None
        return list(zip((basis @ x).tolist(), self.vectors, strict=True)), predicted

    def _basis(self) -> Floats:
        """Return coefficients (vectors, p) of an orthonormal basis of the span; what rounding made is left out."""
        lengths = np.sqrt(self.gram.diagonal())
        lengths[lengths == 0] = 1.0
        w, U = np.linalg.eigh(self.gram / np.outer(lengths, lengths))
        coarsest = max(torch.finfo(block.dtype).eps for block in self.best.z.values())
        kept = w > max(_RESOLVED, 10 * coarsest) * w[-1]
        basis: Floats = U[:, kept] / np.sqrt(w[kept]) / lengths[:, None]
        return basis


def secant_matrix(pairs: list[tuple[Floats, Floats]], size: int) -> Floats:
    """Return the symmetric B of the pairs (s, y), B s = y for the last and nearly for the others, see above."""
    curvature = 0.5 * float(np.median([s @ y / (s @ s) for s, y in pairs])) if pairs else 0.0
    B: Floats = curvature * np.eye(size)
    for s, y in pairs:
        residual, square = y - B @ s, s @ s
        B += (np.outer(residual, s) + np.outer(s, residual)) / square - (residual @ s) / square**2 * np.outer(s, s)
    return B


def maximum_in_ball(B: Floats, h: Floats, radius: float) -> Floats:
    """Return x with |x| <= radius at which <h, x> + <x, B x> / 2 is largest, by B's eigenvectors.

    It is (lam - B)^-1 h for the lam >= max(0, B's largest eigenvalue) that makes |x| = radius, or lam = 0 where x lies
    inside. Where h has no part along the largest eigenvector and x falls short of the sphere, that part is added.
    """
    w, Q = np.linalg.eigh(B)
    b, unit = Q.T @ h, abs(w[-1]) + float(np.linalg.norm(h)) / radius
    if unit == 0:
        return np.zeros_like(h)
    if w[-1] < 0 and np.linalg.norm(b / w) <= radius:
        return np.asarray(Q @ (-b / w))
    least = max(w[-1], 0.0)
    low, high = least + 1e-12 * unit, least + 2 * unit

    def excess(lam: float) -> float:
        return float(np.linalg.norm(b / (lam - w))) - radius

    if excess(low) > 0:
        x = b / (brentq(excess, low, high, xtol=1e-14 * unit) - w)
    else:
        x = b / (low - w)
        x[-1] = math.copysign(math.sqrt(max(0.0, radius**2 - float(x[:-1] @ x[:-1]))), b[-1])
    return np.asarray(Q @ (x * (radius / np.linalg.norm(x))))
