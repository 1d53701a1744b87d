"""Sharpness of diagonal networks in closed form [paper, Sec. 5.1, App. E].

L(beta) = |X beta - y|^2 with X'X = I, beta = u v, best = X'y: L = |beta - best|^2 + a constant. A geodesic is given by
its relative velocity b, whose length is sqrt(2) |b| (inv) or sqrt(2) |beta b| (mix). Here `radius` is that of the
metric's own ball, so |b| <= radius / sqrt(2) for inv; the paper's App. E has |b| <= rho instead, and its values are
those at radius sqrt(2) rho.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Maximum:
    """Hold the largest value, where it is taken, and whether several points share it (the hard case)."""

    value: float
    at: Floats
    hard: bool = False


def largest_in_ball(curvatures: Floats, slopes: Floats, radius: float) -> Maximum:
    """Compute max of sum_i c_i z_i^2 + 2 g_i z_i over |z| <= radius: a trust-region problem in its eigenbasis.

    On the sphere z = g / (nu - c) with nu >= max c, nu >= 0, and |z| = radius: the secular equation, solved for
    mu = nu - max c, which lies between |g_top| / radius and |g| / radius. Hard case: g vanishes where c is largest and
    |z| < radius at mu = 0; then z gets the rest of its length there, in either direction. Inside the ball the maximum
    is g / -c, if c < 0 everywhere and that is short enough: the constraint is idle in this case only.
    """
    c, g = np.asarray(curvatures, dtype=np.float64), np.asarray(slopes, dtype=np.float64)
    top = c.max()
    gaps = top - c
    if top < 0 and float(np.linalg.norm(g / -c)) <= radius:
        return _maximum(c, g, g / -c)
    highest = gaps == 0
    rest = np.divide(g, gaps, out=np.zeros_like(g), where=~highest)
    if not g[highest].any() and float(np.linalg.norm(rest)) <= radius:
        rest[int(np.argmax(highest))] = math.sqrt(max(0.0, radius**2 - float(rest @ rest)))
        return _maximum(c, g, rest, hard=True)

    def excess(mu: float) -> float:
        return 1 / float(np.linalg.norm(g / (gaps + mu))) - 1 / radius

    low = float(np.linalg.norm(g[highest])) / radius * (1 - 1e-12) or sys.float_info.min
    high = float(np.linalg.norm(g)) / radius * (1 + 1e-12)
    mu = brentq(excess, low, high, xtol=sys.float_info.min, rtol=1e-14, maxiter=2000)
    return _maximum(c, g, g / (gaps + mu))


def inv_first_order(beta: Floats, best: Floats, radius: float) -> float:
    """Compute 2 sqrt(2) radius |beta (beta - best)|: the rise to first order in b [paper, Eq. 7, E.1 case a]."""
    return 2 * math.sqrt(2) * radius * float(np.linalg.norm(beta * (beta - best)))


def inv_at_minimum(best: Floats, radius: float) -> float:
    """Compute 2 radius^2 max best^2, the second-order rise where beta (beta - best) = 0 [paper, Eq. 8, E.1 case b]."""
    return 2 * radius**2 * float(np.max(best**2))


def inv_second_order(beta: Floats, best: Floats, radius: float) -> Maximum:
    """Maximise 4 b'r + 4 b'D b, r = beta (beta - best), D = diag(beta (2 beta - best)) [paper, Eq. 26, E.1 case c].

    Case a is D = 0, case b is r = 0. The second-order geodesic's own loss has the same terms, and higher ones.
    """
    return largest_in_ball(4 * beta * (2 * beta - best), 2 * beta * (beta - best), radius / math.sqrt(2))


def mix_endless(beta: Floats, best: Floats, radius: float) -> float:
    """Compute 2 sqrt(2) radius |beta - best| + 2 radius^2, as if no geodesic of mix ended [paper, Eq. 35].

    The paper gives |beta - best|, up to constants: the term in radius^2, the same for all networks, is left out there.
    """
    return 2 * math.sqrt(2) * radius * float(np.linalg.norm(beta - best)) + 2 * radius**2


def mix(beta: Floats, best: Floats, radius: float) -> Maximum:
    """Compute max of |delta|^2 + 2 delta'(beta - best) over |delta| <= sqrt(2) radius with delta_i / beta_i >= -1.

    No geodesic of mix takes a coordinate of beta through 0. `mix_endless` wherever its maximiser obeys that. Else, on
    the sphere, delta = mu (beta - best), cut off at -beta; where all of it is cut off one coordinate takes the rest of
    the length outwards, if that is better than to stop at 0.
    """
    if not np.all(beta):
        raise ValueError(f"No coordinate of beta may be 0 in the mix metric. Found {int(np.sum(beta == 0))} of them")
    outwards = np.sign(beta)
    ends, a, reach = np.abs(beta), outwards * (beta - best), math.sqrt(2) * radius
    if np.any(a > 0) or float(np.linalg.norm(ends[a < 0])) >= reach:
        candidates = [_on_sphere(a, ends, reach)]
    else:
        stopped = np.where(a < 0, -ends, 0.0)
        candidates = [stopped]
        for i in range(len(a)):
            rest = reach**2 - float(stopped @ stopped) + stopped[i] ** 2
            candidates.append(np.where(np.arange(len(a)) == i, math.sqrt(rest), stopped))
    moves = max(candidates, key=lambda t: float(t @ t + 2 * a @ t))
    return _maximum(np.ones_like(beta), beta - best, outwards * moves)


def _on_sphere(a: Floats, ends: Floats, reach: float) -> Floats:
    """Compute max(mu a, -ends) with the mu that makes it `reach` long."""

    def excess(mu: float) -> float:
        return float(np.linalg.norm(np.maximum(mu * a, -ends))) - reach

    high = 1.0
    while excess(high) < 0:
        high *= 2
        if math.isinf(high):  # the steepest way stops exactly at `reach`
            return np.where(a < 0, -ends, 0.0)
    return np.maximum(brentq(excess, 0.0, high, xtol=sys.float_info.min, rtol=1e-14, maxiter=2000) * a, -ends)


def _maximum(c: Floats, g: Floats, z: Floats, hard: bool = False) -> Maximum:
    return Maximum(float(c @ (z * z) + 2 * g @ z), z, hard)
