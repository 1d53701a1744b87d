"""Truncated geodesics against exact ones: the relative speed that says how near they are, the error of a measure."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from scipy import linalg
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.geometry.pair_block import REACH
from quotient_manifolds.manifolds import (
    DiagonalQuotient,
    FixedRankQuotient,
    RotaryQuotient,
    ScaleQuotient,
    TranslationQuotient,
)
from quotient_manifolds.symmetries import Symmetries, declare_pair
from tests.cases import INVARIANT, RELAXED, VECTORS, Case, diagonal, fixed_rank
from tests.nets.classifiers import Batch, Classifier

TRUNCATED = [(metric, order) for metric in ("inv", "mix") for order in ("first", "second")]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- the relative speed


def largest_ratio(case: Case, x: Tensor, xi: Tensor) -> float:
    """max of |xi_G c| / |G c| and |xi_H c| / |H c| as generalised eigenvalues; entry or vector for the other pairs."""
    manifold = case.manifold
    if isinstance(manifold, TranslationQuotient):
        return 0.0
    if isinstance(manifold, DiagonalQuotient):
        return float((xi / x).abs().max())
    if isinstance(manifold, ScaleQuotient):
        return float(xi.norm() / x.norm())
    assert isinstance(manifold, FixedRankQuotient | RotaryQuotient)
    if isinstance(manifold, RotaryQuotient):
        x, xi = x.reshape(-1, 1), xi.reshape(-1, 1)
    n = manifold.n * (2 if isinstance(manifold, RotaryQuotient) else 1)

    def ratio(G: Tensor, xi: Tensor) -> float:
        below = (G.T @ G + manifold.eps * torch.eye(G.shape[1], dtype=G.dtype)).numpy()
        return math.sqrt(linalg.eigh((xi.T @ xi).numpy(), below, eigvals_only=True)[-1])

    return max(ratio(x[:n], xi[:n]), ratio(x[n:], xi[n:]))


@pytest.mark.parametrize("case", [*INVARIANT, *RELAXED, *VECTORS], ids=str)
def test_the_relative_speed_is_the_largest_ratio_of_velocity_to_point(case: Case) -> None:
    for seed in range(5):
        x = case.point(seed)
        xi = case.manifold.proju(x, case.vector(seed + 10))
        space = case.manifold.at(x)
        speed = space.relative_speed(space.coordinates(xi))
        assert speed.dtype == torch.float64
        assert float(speed) == pytest.approx(largest_ratio(case, x, xi), rel=1e-9)
        assert float(space.relative_speed(space.coordinates(-3 * xi))) == pytest.approx(3 * float(speed), rel=1e-9)


def at_speed(case: Case, seed: int, speed: float) -> tuple[Any, Tensor]:
    """A space whose point's product has singular values that spread, and a horizontal z of this relative speed."""
    x = case.point(seed)
    if isinstance(case.manifold, FixedRankQuotient):
        x = x * torch.logspace(0, -float(seed % 3), x.shape[-1], dtype=x.dtype)  # both factors: products spread twice
    space = case.manifold.at(x)
    z = space.project(torch.randn(x.shape, generator=generator(seed + 50), dtype=x.dtype))
    return space, z * (speed / space.relative_speed(z))


def missed(case: Case, space: Any, z: Tensor, order: str) -> float:
    """|p(truncated) - p(exact)| / |p(exact) - p(x)|, p what the orbit determines."""
    start, truncated, exact = (
        case.product(y) for y in (space.point, space.follow(z, order)[0], space.follow(z, "exact")[0])
    )
    return float((truncated - exact).norm() / (exact - start).norm())


BETWEEN = [case for case in [*INVARIANT, *VECTORS[:2]] if getattr(case.manifold, "t", 1.0) in (0.0, 1.0)]
"""The metrics of the paper."""


@pytest.mark.parametrize("case", BETWEEN, ids=str)
def test_where_the_speed_is_small_so_is_what_the_truncation_misses(case: Case) -> None:
    """Of the way gone, less than the speed for first order and 1.5 times its square for second, whatever the point."""
    for seed in range(3):
        for speed in (0.02, 0.49):
            space, z = at_speed(case, seed, speed)
            assert bool((space.follow(z, "exact")[1] == 1).all())  # none ends, not even those of mix
            assert missed(case, space, z, "first") < speed
            assert missed(case, space, z, "second") < 1.5 * speed**2


@pytest.mark.parametrize("case", [*BETWEEN, fixed_rank(3, 4, 2, 0.3), diagonal(3, 0.3)], ids=str)
def test_what_second_order_misses_falls_as_the_cube_of_the_speed(case: Case) -> None:
    """So as the square of it over the way gone."""
    space, z = at_speed(case, 1, 0.05)
    coarse, fine = (missed(case, space, k * z, "second") for k in (1.0, 0.5))
    assert math.log2(coarse / fine) == pytest.approx(2, abs=0.15)


# ---- reach in every result


@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive(), Quotient("inv", "exact")], ids=lambda g: g.name)
def test_where_nothing_is_truncated_there_is_no_reach(
    model: Classifier, batches: list[Batch], geometry: Geometry
) -> None:
    for result in (
        qm.worst_case_sharpness(model, qm.cross_entropy, batches[:1], geometry=geometry, radius=1.0, steps=2),
        qm.average_case_sharpness(model, qm.cross_entropy, batches[:1], geometry=geometry, sigma=0.2, samples=2),
    ):
        assert (result.reach, result.truncation_warning) == (None, None)
        assert "reach" not in str(result)


@pytest.mark.parametrize("kind", ["worst", "profile", "average"])
def test_beyond_reach_a_sentence_says_so(model: Classifier, batches: list[Batch], kind: str) -> None:
    """Once for each measurement, to the caller, and in words of the measurement."""

    def measured(radius: float) -> qm.Result:
        shared: dict[str, Any] = {"geometry": Quotient("mix")}
        if kind == "average":
            return qm.average_case_sharpness(model, qm.cross_entropy, batches, sigma=radius, samples=2, **shared)
        if kind == "worst":
            return qm.worst_case_sharpness(model, qm.cross_entropy, batches, radius=radius, steps=2, **shared)
        return qm.worst_case_profile(model, qm.cross_entropy, batches, radii=[1e-3, radius], steps=2, **shared)[1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", qm.sharpness.TruncationWarning)
        within = measured(0.003)
    assert within.reach is not None
    assert 0 < within.reach < 0.5
    assert within.truncation_warning is None
    assert "reach" not in str(within)
    with pytest.warns(qm.sharpness.TruncationWarning) as caught:
        beyond = measured(1.0)
    truncated = [each for each in caught if issubclass(each.category, qm.sharpness.TruncationWarning)]
    assert [str(each.message) for each in truncated] == [beyond.truncation_warning]
    assert truncated[0].filename == __file__
    assert beyond.warning is not None
    assert "\n" not in beyond.warning
    assert f" 1: geodesics were followed to relative speed {beyond.reach:.3g}, beyond 0.5" in (beyond.warning)
    assert f"beyond reach, at relative speed {beyond.reach:.3g}" in str(beyond)


class Product(nn.Module):
    """u v, a pair of 1 x 1 factors."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))


@pytest.mark.parametrize(("order", "limit"), REACH.items())
def test_only_batches_beyond_the_limit_of_their_order_count(order: str, limit: float) -> None:
    """L = u v: the relative speed is radius / sqrt(2), and the worst factor (1 + b)^2 or (1 + b + b^2 / 2)^2."""
    model = Product().eval()
    G, H = (lambda w, name=name: w[name][:, None, None] for name in ("u", "v"))
    symmetries = Symmetries((declare_pair(model, "product", "value/output", G=G, H=H),))
    geometry = Quotient("inv", order, symmetries=symmetries, verify="none")
    for b, beyond in ((limit * 0.999, False), (limit * 1.001, True)):
        found = qm.sharpness.WorstCase(geometry, b * math.sqrt(2), steps=10).of(
            model, lambda m, batch: batch * m.u * m.v, [1.0]
        )
        assert found.reach == pytest.approx(b, rel=1e-9)
        assert (found.truncation_warning is not None) == beyond
        assert found.mean == pytest.approx((1 + b + (b * b / 2 if order == "second" else 0)) ** 2 - 1, rel=1e-9)
