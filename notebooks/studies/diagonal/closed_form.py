"""Sharpness of diagonal networks in closed form [paper, Sec. 5.1, App. E].

L(beta) = |X beta - y|^2 with X'X = I, beta = u v, best = X'y: L = |beta - best|^2 + a constant. A geodesic is given by
its relative velocity b, whose length is sqrt(2) |b| (inv) or sqrt(2) |beta b| (mix). Here `radius` is that of the
metric's own ball, so |b| <= radius / sqrt(2) for inv; the paper's App. E has |b| <= rho instead, and its values are
those at radius sqrt(2) rho. The tests hold the ascents to its forms for X'X = I.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from studies.common import Floats
from studies.diagonal.networks import Regression


def largest_in_ball(curvatures: Floats, slopes: Floats, radius: float) -> tuple[float, Floats]:
    """Return the maximum of sum_i c_i z_i^2 + 2 g_i z_i over |z| <= radius, and where: a trust-region problem.

    On the sphere z = g / (nu - c) with nu >= max c, nu >= 0, and |z| = radius: the secular equation, solved for
    mu = nu - max c, which lies between |g_top| / radius and |g| / radius. Hard case: g vanishes where c is largest and
    |z| < radius at mu = 0; then z gets the rest of its length there, in either direction. Inside the ball the maximum
    is g / -c, if c < 0 everywhere and that is short enough: the constraint is idle in this case only.
    """
    c, g = np.asarray(curvatures, dtype=np.float64), np.asarray(slopes, dtype=np.float64)
    top = c.max()
    gaps = top - c
    highest = gaps == 0
    rest = np.divide(g, gaps, out=np.zeros_like(g), where=~highest)
    if top < 0 and float(np.linalg.norm(g / -c)) <= radius:
        z = g / -c
    elif not g[highest].any() and float(np.linalg.norm(rest)) <= radius:
        z = rest
        z[int(np.argmax(highest))] = math.sqrt(max(0.0, radius**2 - float(rest @ rest)))
    else:

        def excess(mu: float) -> float:
            return 1 / float(np.linalg.norm(g / (gaps + mu))) - 1 / radius

        low = float(np.linalg.norm(g[highest])) / radius * (1 - 1e-12) or sys.float_info.min
        high = float(np.linalg.norm(g)) / radius * (1 + 1e-12)
        z = g / (gaps + brentq(excess, low, high, xtol=sys.float_info.min, rtol=1e-14, maxiter=2000))
    return float(c @ (z * z) + 2 * g @ z), z


def line_bound(regression: Regression, betas: Tensor, radius: float) -> Floats:
    """Bound mix exact for any X: the largest rise over |delta| <= sqrt(2) radius, as if no geodesic ended, (networks,).

    A convex quadratic over a ball, solved in the eigenbasis of X'X; never below mix exact.
    """
    left, sizes, _ = torch.linalg.svd(regression.X, full_matrices=False)
    slopes = sizes * ((betas @ regression.X.mT - regression.y) @ left)
    return np.array([largest_in_ball((sizes**2).numpy(), g.numpy(), math.sqrt(2) * radius)[0] for g in slopes])
