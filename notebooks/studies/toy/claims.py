"""What the paper says about the scalar network, each sentence against the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch

from quotient_manifolds.manifolds import DiagonalQuotient
from studies.toy.closed import (
    exact_direction,
    first_term,
    largest_step,
    paper_direction,
    sharpness,
)
from studies.toy.landscape import WINDOW, at, grid, landscape
from studies.toy.network import Point, Scalar
from studies.wording import minus

Verdict = Literal["holds", "holds in part", "does not hold"]

ORBIT = (0.01, 0.1, 1.0, 10.0, 100.0)
CONSTANT = 1e-9
FAR = 20.0  # a change of both weights by e^20 is far by any measure


@final
@dataclass(frozen=True)
class Claim:
    """Hold a statement of the paper in our words, where it stands, whether it holds, and the figures that say so."""

    place: str
    claim: str
    verdict: Verdict
    found: str


def judge(problem: Scalar) -> tuple[Claim, ...]:
    """Return every claim, for data with one point (1, y), y > 0.

    Raises ValueError for other data: the paper's sentences are about this case.
    """
    if len(problem.x) != 1 or problem.x[0] != 1 or problem.best <= 0:
        raise ValueError(f"The claims are about one point of data (1, y) with y > 0. Found {problem}")
    return (
        _level_sets(problem),
        _smaller(problem),
        _zero_at_minimum(problem),
        _highest_at_minimum(problem),
        _tells_maxima(problem),
        _incomplete(),
        _at_the_end(problem),
        _direction(problem),
        _first_order(problem),
        _of_the_network(problem),
        _careful(problem),
        _constant(problem),
    )


def _level_sets(problem: Scalar) -> Claim:
    y = problem.best
    moved = landscape(problem, [Point.balanced(1.5 * y).moved(a) for a in ORBIT])
    quantities = (moved.gradient_norm, moved.hessian_trace)
    still = max(float(np.ptp(q[metric]) / abs(q[metric][0])) for q in quantities for metric in ("inv", "mix"))
    factor = min(float(q["euclidean"].max() / q["euclidean"].min()) for q in quantities)
    two = [float(at(problem, Point.balanced(p)).gradient_norm["inv"]) for p in (0.5 * y, 1.5 * y)]
    return Claim(
        "Fig. 1, App. D.1 (a)",
        "Riemannian gradient norm and Hessian trace have the level sets of the loss; the Euclidean ones have others.",
        "holds" if still < CONSTANT and factor > 2 else "does not hold",
        f"Along an orbit the Riemannian values vary by {still:.0e} of themselves, the Euclidean ones by factors of "
        f"{factor:.3g} and more. The orbits are shared, the values need not be: two orbits of equal loss, G H = y / 2 "
        f"and 3 y / 2, have the gradient norms {two[0]:.3g} and {two[1]:.3g} in inv (in mix it is a function of the "
        "loss).",
    )


def _smaller(problem: Scalar) -> Claim:
    found = grid(problem).landscape
    shares = {
        (name, metric): float((values[metric] < values["euclidean"]).mean())
        for name, values in (("gradient norm", found.gradient_norm), ("Hessian trace", found.hessian_trace))
        for metric in ("inv", "mix")
    }
    words = ", ".join(f"{share:.0%} ({name}, {metric})" for (name, metric), share in shares.items())
    return Claim(
        "App. D.1 (b)",
        "Both Riemannian quantities are smaller than the Euclidean ones throughout.",
        "holds" if min(shares.values()) == 1 else "does not hold",
        f"They are smaller in {words} of the square |G|, |H| ≤ {WINDOW:g}. For the gradient norm the border is "
        "2 (G H)² = G² + H² in inv and G² + H² = 2 in mix: units differ, so the sizes cannot be compared.",
    )


def _zero_at_minimum(problem: Scalar) -> Claim:
    y = problem.best
    here = at(problem, Point.balanced(y)).hessian_trace
    half = at(problem, Point.balanced(y / 2)).hessian_trace["inv"]
    return Claim(
        "App. D.1 (c)",
        "The trace of the Riemannian Hessian is 0 at the minimum.",
        "holds" if abs(here["inv"]) < CONSTANT else "does not hold",
        f"It is {float(here['inv']):.3g} = 4 y² there in inv and {float(here['mix']):.3g} in mix. In inv it is "
        f"4 p (2 p − y) with p = G H, which is 0 at p = y / 2 (found: {abs(float(half)):.0e}). What is 0 at the "
        f"minimum is the part 4 p (p − y) by which it exceeds the adaptive trace, {float(here['adaptive']):.3g}.",
    )


def _highest_at_minimum(problem: Scalar) -> Claim:
    point = Point.balanced(problem.best)
    traces = [float(at(problem, point.moved(a)).hessian_trace["euclidean"]) for a in (1.0, 10.0)]
    origin = float(at(problem, Point(1e-6, 1e-6)).hessian_trace["euclidean"])
    return Claim(
        "App. D.1 (c)",
        "The trace of the Euclidean Hessian is highest at the minimum.",
        "holds" if traces[0] == max(*traces, origin) else "does not hold",
        f"It is 2 (G² + H²), circles around the origin: among the minima it runs from {traces[0]:.3g} (|G| = |H|) "
        f"to any size ({traces[1]:.4g} after a move by a = 10).",
    )


def _tells_maxima(problem: Scalar) -> Claim:
    traces = grid(problem).landscape.hessian_trace
    lowest, same = (float(traces[metric].min()) for metric in ("inv", "mix"))
    return Claim(
        "App. D.1 (d)",
        "The trace of the Euclidean Hessian cannot tell a minimum from a maximum; that of the Riemannian one can.",
        "holds in part",
        f"In inv the trace is negative for 0 < G H < y / 2 (down to {minus(f'{lowest:.3g}')} in the square), in mix it "
        f"is {same:.3g} everywhere, which tells nothing; the Euclidean one is positive everywhere. "
        "(This loss has no maximum.)",
    )


def _incomplete() -> Claim:
    x = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    space = DiagonalQuotient("inv").at(x)
    end = float(space.geodesic(-FAR * x, order="exact")[0])
    reached = float(DiagonalQuotient("mix").at(x).follow(-FAR * x, "exact")[1])
    return Claim(
        "App. D",
        "The geodesics are not complete: points of different sign cannot be joined.",
        "holds in part",
        f"Such points cannot be joined, for they lie in different components. In inv every geodesic goes on for ever, "
        f"though (both weights fall to {end:.0e} = e^−{FAR:g} and stay positive), so each component is complete. "
        f"In mix it is not: the same initial relative velocity leaves the manifold at t = {reached:.3g}.",
    )


def _at_the_end(problem: Scalar) -> Claim:
    excess = 0.0
    for product in (-1.5, -0.5, 0.25, 1.0, 1.5):
        for radius in (0.01, 0.1, 1.0):
            R = largest_step(Point.balanced(product), "inv (exact)", radius)
            inside = max(problem.rise(product, product * math.exp(2 * b)) for b in np.linspace(-R, R, 2001))
            excess = max(excess, inside / sharpness(problem, Point.balanced(product), "inv (exact)", radius) - 1)
    return Claim(
        "App. D, Eq. 20",
        "The radius determines b, so nothing is left to maximise.",
        "holds in part" if excess < CONSTANT else "does not hold",
        "The maximum is at an end of the ball, |b| = R = ρ / √2, for any data (no point inside is higher); its sign "
        "is left, and that is a maximum over two values.",
    )


def _direction(problem: Scalar) -> Claim:
    radius = 0.5
    between = [
        ratio
        for ratio in np.linspace(0.8, 1.5, 701)
        if (point := Point.balanced(problem.best / ratio))
        and exact_direction(problem, point, radius) != paper_direction(problem, point)
    ]
    return Claim(
        "App. D, Eq. 22",
        "The sign of the sum of residuals decides which direction maximises the first-order term.",
        "holds",
        "It does not decide on the exact ball (Eq. 21), where the sign is that of p (p cosh(√2 ρ) − y): at ρ = 0.5 the "
        f"rule points the wrong way for y / p from {min(between):.3f} to {max(between):.3f} "
        f"(cosh(√2 ρ) = {math.cosh(radius * math.sqrt(2)):.3f}).",
    )


def _first_order(problem: Scalar) -> Claim:
    point, radius = Point.balanced(1.01 * problem.best), 0.1
    term = first_term(problem, point, "inv", radius)
    exact = sharpness(problem, point, "inv (exact)", radius)
    far = Point.balanced(1.5 * problem.best)
    fine = first_term(problem, far, "inv", 0.01) / sharpness(problem, far, "inv (exact)", 0.01)
    return Claim(
        "App. D, Eq. 22",
        "For a small radius the first-order term is enough unless the residual is zero.",
        "holds in part",
        f"The radius must be small against |1 − y / p|: at p = 1.5 y and ρ = 0.01 the term is {fine:.3f} of the "
        f"sharpness, at p = 1.01 y and ρ = 0.1 it is {term / exact:.3f} of it. Trained networks are of the second "
        "kind.",
    )


def _of_the_network(problem: Scalar) -> Claim:
    radius = 1e-3
    ratios = {
        metric: [
            sharpness(Scalar((1.0,), (p,)), Point.balanced(p), f"{metric} (exact)", radius) / radius**2
            for p in (0.5, 1.0, 2.0)
        ]
        for metric in ("inv", "mix")
    }
    words = {metric: ", ".join(f"{value:.3g}" for value in values) for metric, values in ratios.items()}
    return Claim(
        "App. D",
        "Very close to the minimum sharpness, of second order in ρ, is a property of the network alone.",
        "holds in part",
        f"In inv sharpness / ρ² is {words['inv']} for minima at G H = 0.5, 1, 2: 2 (G H)² Σ x². In mix it is "
        f"{words['mix']}: 2 Σ x², the same for every network.",
    )


def _careful(problem: Scalar) -> Claim:
    points = [Point.balanced(p) for p in (-0.5, 0.25, 1.0, 1.5)]

    def differ(radius: float) -> float:
        pairs = ((sharpness(problem, p, m, radius) for m in ("adaptive", "inv (first order)")) for p in points)
        return max(abs(adaptive / first - 1) for adaptive, first in pairs)

    return Claim(
        "App. D, App. F",
        "Adaptive sharpness can give the same, if its scaling is picked very carefully.",
        "holds in part" if differ(0.7) < CONSTANT else "does not hold",
        f"No care is needed here: the usual scaling by |w| gives the sharpness of first-order geodesics of inv up to "
        f"ρ = 1 / √2 (they differ by {differ(0.7):.0e} at ρ = 0.7, by {differ(1.2):.2g} at 1.2), and is constant along "
        "orbits: GL(1) rescales single weights. From GL(2) on it no longer is.",
    )


def _constant(problem: Scalar) -> Claim:
    """Judge the claim on constants that stand before the radius."""
    point, radius = Point.balanced(problem.best), 0.1
    own = sharpness(problem, point, "inv (exact)", radius)
    other = sharpness(problem, point, "inv (exact)", math.sqrt(2) * radius)
    return Claim(
        "App. E.1",
        "The geodesic ball of radius ρ is |b| ≤ ρ.",
        "does not hold",
        f"The metric's own norm is |ξ|² = 2 b², so it is |b| ≤ ρ / √2, as Eq. 21 has it. |b| ≤ ρ would raise the "
        f"sharpness at the minimum by a factor {other / own:.3g} at ρ = 0.1.",
    )
