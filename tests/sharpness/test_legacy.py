"""The released ascent, stepped by hand; its quirks are facts to be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry
from quotient_manifolds.sharpness import legacy_sharpness
from quotient_manifolds.sharpness.legacy import legacy_checkpoints

W = [1.5, -0.5, 2.0]
SLOPE = np.array([1.0, 3.0, -0.2])


class Point(nn.Module):
    def __init__(self, w: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.eval()


def linear(model: Point, slope: Tensor) -> Tensor:
    return slope @ model.w


def hill(model: Point, top: float) -> Tensor:
    return 1 - ((model.w - top) ** 2).sum()


def test_checkpoints_are_the_released_ones() -> None:
    assert legacy_checkpoints(20) == (5, 9, 12, 15, 16, 18, 19)
    assert legacy_checkpoints(5) == (2, 3)
    assert legacy_checkpoints(10) == (3, 5, 6, 8)
    assert legacy_checkpoints(1) == ()


def test_a_climb_stepped_by_hand() -> None:
    """1 - (x - 0.3)^2 from x = 0 in [-1, 1]: 0.75, -0.75, 0.9375, a halving that lasts one gradient, 0.5625, -0.09375.

    After the third iteration the step is 1 and the gradient that of x = 0, but the step starts at 0.9375.
    """
    result = legacy_sharpness(Point([0.0]), hill, [0.3], geometry=Euclidean(), radius=1.0, steps=5)
    points = [0.0, 0.75, -0.75, 0.9375, 0.5625, -0.09375]
    assert result.batches[0].losses == pytest.approx([1 - (x - 0.3) ** 2 for x in points], rel=1e-12)
    assert result.mean == pytest.approx(0.09 - 0.2625**2)
    assert result.batches[0].norm == pytest.approx(0.5625)


@pytest.mark.parametrize(
    ("geometry", "c"),
    [
        (Euclidean(norm="linf"), np.ones(3)),
        (Adaptive(norm="linf"), np.abs(W)),
        (Adaptive(norm="linf", eta=0.1), np.abs(W) + 0.1),
    ],
    ids=repr,
)
def test_linf_steps_to_the_corner_of_the_box(geometry: Geometry, c: np.ndarray[Any, Any]) -> None:
    result = legacy_sharpness(Point(W), linear, [torch.from_numpy(SLOPE)], geometry=geometry, radius=0.2, steps=1)
    assert result.mean == pytest.approx(0.75 * 0.2 * float(np.abs(SLOPE) @ c))
    assert result.batches[0].norm == pytest.approx(0.75 * 0.2)


@pytest.mark.parametrize("eta", [0.0, 0.3])
def test_adaptive_l2_goes_along_w_g_to_the_nearest_point_of_the_ellipsoid(eta: float) -> None:
    radius, c = 0.4, np.abs(W) + eta
    target = 2 * radius * c * SLOPE / np.linalg.norm(SLOPE)
    nearest = minimize(
        lambda x: ((x - target) ** 2).sum(),
        np.zeros(3),
        method="SLSQP",
        constraints={"type": "ineq", "fun": lambda x: radius**2 - ((x / c) ** 2).sum()},
        options={"ftol": 1e-15, "maxiter": 500},
    ).x
    assert np.linalg.norm(target / c) > radius
    result = legacy_sharpness(
        Point(W), linear, [torch.from_numpy(SLOPE)], geometry=Adaptive(eta), radius=radius, steps=1
    )
    assert result.mean == pytest.approx(0.75 * float(SLOPE @ nearest), rel=1e-6)
    assert result.batches[0].norm == pytest.approx(0.75 * radius, rel=1e-6)


def test_one_zero_weight_switches_the_l2_projection_off_unless_eta_is_added() -> None:
    model, slope = Point([*W, 0.0]), torch.from_numpy(np.append(SLOPE, 1.0))
    result = legacy_sharpness(model, linear, [slope], geometry=Adaptive(), radius=0.5, steps=10)
    assert result.batches[0].norm > 2 * 0.5
    first = 0.75 * 2 * 0.5 * (np.abs(W) @ SLOPE**2) / float(slope.norm())
    assert result.batches[0].losses[1] - result.batches[0].base_loss == pytest.approx(first)
    for kept in (
        legacy_sharpness(model, linear, [slope], geometry=Adaptive(0.01), radius=0.5, steps=10),
        legacy_sharpness(model, linear, [slope], geometry=Adaptive(norm="linf"), radius=0.5, steps=10),
    ):
        assert kept.batches[0].norm <= 0.5 * (1 + 1e-9)
