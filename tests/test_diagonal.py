"""Diagonal networks: closed forms, objectives against the library's own path, training, the study and its record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor, nn

from quotient_manifolds.experiments.diagonal import closed_form
from quotient_manifolds.experiments.diagonal.measuring import (
    MEASURES,
    LineBound,
    best_corner,
    climb,
    climb_thoroughly,
    corners,
    objective,
)
from quotient_manifolds.experiments.diagonal.networks import Regression
from quotient_manifolds.experiments.diagonal.objectives import FACTORS, Along
from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.manifolds import DiagonalQuotient
from quotient_manifolds.sharpness import AutoPGD, worst_case_sharpness
from quotient_manifolds.symmetries import Factor, Part, SymmetricPair, Symmetries

Floats = NDArray[np.float64]
THOROUGH = AutoPGD(steps=200, restarts=20, tolerance=1e-12)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(seed: int, points: int = 12, dimension: int = 8) -> tuple[Regression, Tensor, Tensor]:
    """A regression with X'X = I, a beta away from its best, and that best X'y."""
    random = generator(seed)
    X = torch.linalg.qr(torch.randn(points, dimension, generator=random, dtype=torch.float64)).Q
    y = torch.randn(points, generator=random, dtype=torch.float64)
    best = X.mT @ y
    return Regression(X, y, best), best + 0.3 * torch.randn(dimension, generator=random, dtype=torch.float64), best


# ---- objectives


@pytest.mark.parametrize("measure", MEASURES)
def test_objectives_have_the_gradient_of_their_value(measure: str) -> None:
    regression, beta, _ = orthonormal(0)
    goal = objective(measure, regression, beta)
    z = {"z": 0.1 * goal.sample(generator(1))["z"]}
    value, gradient = goal.value_and_gradient(z)
    leaf = z["z"].clone().requires_grad_()
    loss = regression.loss(goal.image(leaf))
    (expected,) = torch.autograd.grad(loss, leaf)
    assert value == pytest.approx(float(loss.detach()), rel=1e-14) == goal.value(z)
    assert torch.allclose(gradient["z"], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("metric", "geodesic"), FACTORS)
def test_geodesics_are_those_of_the_manifold(metric: str, geodesic: str) -> None:
    """In coordinates of norm 1 and along the whole geodesic, its end included."""
    random = generator(2)
    u, v = torch.randn(2, 9, generator=random, dtype=torch.float64)
    space = DiagonalQuotient(metric).at(torch.stack([u, v]))  # type: ignore[arg-type]
    regression = Regression(torch.eye(9, dtype=torch.float64), u, u)
    along = Along.of(regression, u * v, metric, geodesic)
    for size in (0.1, 1.0, 10.0):
        z = size * torch.randn(9, generator=random, dtype=torch.float64)
        both = (z / math.sqrt(2)).expand(2, 9) * (torch.sign(u * v) if metric == "mix" else 1.0)
        b = z / along.lengths
        eta = torch.stack([u * b, v * b])
        assert float(space.norm(eta)) == pytest.approx(float(z.norm()), rel=1e-12)
        assert torch.allclose(space.coordinates(eta).abs(), both.abs())
        reached = space.move(space.coordinates(eta), geodesic).prod(dim=0)
        assert torch.allclose(along.image(z), reached, rtol=1e-12, atol=1e-7)


class DiagonalNetwork(nn.Module):
    """x -> x'(u * v)."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u), nn.Parameter(v)

    def forward(self, X: Tensor) -> Tensor:
        return X @ (self.u * self.v)


@pytest.mark.parametrize("measure", ["adaptive", "inv second", "inv exact", "mix second", "mix exact"])
@pytest.mark.parametrize("radius", [0.01, 0.1])
def test_the_whole_library_finds_the_same_sharpness(measure: str, radius: float) -> None:
    """The network as a module, with d heads of 1 x 1 factors, through geometry, ascent and loss."""
    random = generator(3)
    regression = Regression.draw(6, random, dimension=10)
    u, v = (0.5 + torch.rand(2, 10, generator=random, dtype=torch.float64)).unbind()
    v = v * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(5)
    sides = [Factor((Part.of(name, u, "heads -> heads 1 1", {}),)) for name in ("u", "v")]
    symmetries = Symmetries((SymmetricPair("diagonal", "value/output", *sides),))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).sum()

    geometry: Adaptive | Quotient = Adaptive()
    if measure != "adaptive":
        metric, geodesic = measure.split()
        geometry = Quotient(metric, geodesic, symmetries=symmetries, trust=True)  # type: ignore[arg-type]
    model = DiagonalNetwork(u, v).eval()
    found = worst_case_sharpness(model, loss, [(regression.X, regression.y)], geometry=geometry, radius=radius)
    assert found.mean == pytest.approx(climb(measure, regression, u * v, radius, AutoPGD()).rise, rel=1e-9)


# ---- closed forms


def quadratic(c: Floats, g: Floats) -> Callable[[Floats], float]:
    return lambda z: float(c @ (z * z) + 2 * g @ z)


def largest_by_search(value: Callable[[Floats], float], size: int, radius: float, random: np.random.Generator) -> float:
    """The largest value in a ball that scipy finds from many starts."""
    ball = {"type": "ineq", "fun": lambda z: radius**2 - z @ z, "jac": lambda z: -2 * z}
    best = -math.inf
    for _ in range(30):
        start = random.normal(size=size)
        start *= radius / np.linalg.norm(start)
        found = optimize.minimize(
            lambda z: -value(z), start, constraints=[ball], bounds=[(-radius, radius)] * size, method="SLSQP", tol=1e-14
        )
        z = found.x * min(1.0, radius / max(float(np.linalg.norm(found.x)), 1e-300))
        best = max(best, value(z))
    return best


def top_of_pencil(c: Floats, g: Floats, radius: float) -> float:
    """The largest value on a sphere from a dense eigenvalue problem of twice the size (Gander, Golub, von Matt, 1989).

    nu is the largest real eigenvalue of [[C, I], [g g' / radius^2, C]]; by duality the value is
    nu radius^2 + g'(nu - C)^+ g.
    """
    size = len(c)
    C, identity = np.diag(c), np.eye(size)
    eigenvalues = np.linalg.eigvals(np.block([[C, identity], [np.outer(g, g) / radius**2, C]]))
    nu = float(max(eigenvalues[np.abs(eigenvalues.imag) < 1e-7].real))
    return nu * radius**2 + float(g @ np.linalg.pinv(nu * identity - C, rcond=1e-7) @ g)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [0.05, 1.0])
def test_trust_region_against_search_and_dense_eigenvalues(seed: int, radius: float) -> None:
    random = np.random.default_rng(seed)
    c, g = random.normal(size=6), random.normal(size=6)
    found = closed_form.largest_in_ball(c, g, radius)
    assert found.value == pytest.approx(largest_by_search(quadratic(c, g), 6, radius, random), rel=1e-8)
    assert found.value == pytest.approx(top_of_pencil(c, g, radius), rel=1e-6)
    assert np.linalg.norm(found.at) == pytest.approx(radius, rel=1e-12)
    assert not found.hard


@pytest.mark.parametrize(("rest", "hard"), [(0.1, True), (5.0, False)])
def test_trust_region_in_the_hard_case(rest: float, hard: bool) -> None:
    """No slope where the curvature is largest: easy again only if the other slopes are long enough."""
    c, g = np.array([2.0, 2.0, 1.0, -1.0]), np.array([0.0, 0.0, rest, -rest])
    found = closed_form.largest_in_ball(c, g, 1.0)
    assert found.hard is hard
    assert np.linalg.norm(found.at) == pytest.approx(1.0, rel=1e-12)
    assert found.value == pytest.approx(quadratic(c, g)(found.at), rel=1e-12)
    assert found.value == pytest.approx(largest_by_search(quadratic(c, g), 4, 1.0, np.random.default_rng(0)), rel=1e-7)


def test_trust_region_near_the_hard_case_and_inside_the_ball() -> None:
    near = closed_form.largest_in_ball(np.array([2.0, 1.0]), np.array([1e-18, 0.1]), 1.0)
    hard = closed_form.largest_in_ball(np.array([2.0, 1.0]), np.array([0.0, 0.1]), 1.0)
    assert near.value == pytest.approx(hard.value, rel=1e-12)
    assert not near.hard
    inside = closed_form.largest_in_ball(np.array([-2.0, -1.0]), np.array([0.4, -0.3]), 1.0)
    assert inside.at == pytest.approx([0.2, -0.3])
    assert inside.value == pytest.approx(0.4**2 / 2 + 0.3**2)
    outside = closed_form.largest_in_ball(np.array([-2.0, -1.0]), np.array([4.0, -3.0]), 1.0)
    assert np.linalg.norm(outside.at) == pytest.approx(1.0)


class Quadratic:
    """An objective of the library's ascent: constant + sum c z^2 + 2 g z."""

    def __init__(self, c: Floats, g: Floats) -> None:
        self.c, self.g = torch.from_numpy(c), torch.from_numpy(g)

    def zero(self) -> dict[str, Tensor]:
        return {"z": torch.zeros_like(self.c)}

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"z": torch.randn(self.c.shape, generator=generator, dtype=self.c.dtype)}

    def value(self, z: dict[str, Tensor]) -> float:
        return float((self.c * z["z"] ** 2 + 2 * self.g * z["z"]).sum())

    def value_and_gradient(self, z: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return self.value(z), {"z": 2 * self.c * z["z"] + 2 * self.g}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("radius", [0.01, 0.3, 2.0])
def test_inv_to_second_order_is_what_the_ascent_finds(seed: int, radius: float) -> None:
    """[paper, Eq. 26], its coefficients from automatic differentiation of the loss along exact geodesics."""
    regression, beta, best = orthonormal(seed)
    along = Along.of(regression, beta, "inv", "exact")

    def rise(z: Tensor) -> Tensor:
        return regression.loss(along.image(z))

    slope = torch.autograd.functional.jacobian(rise, torch.zeros_like(beta))
    hessian = torch.autograd.functional.hessian(rise, torch.zeros_like(beta))
    assert torch.allclose(hessian, torch.diag(hessian.diagonal()), atol=1e-10)
    goal = Quadratic(hessian.diagonal().numpy() / 2, slope.numpy() / 2)
    climbed = THOROUGH.maximise(goal, radius, generator(seed))
    assert closed_form.inv_second_order(beta.numpy(), best.numpy(), radius).value == pytest.approx(
        climbed.loss, rel=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("geodesic", ["first", "second", "exact"])
def test_inv_closed_forms_are_the_limits_of_the_ascent(seed: int, geodesic: str) -> None:
    """Cases a and b to 1e-6, at a radius where higher terms are smaller: they need not be small anywhere else."""
    regression, beta, best = orthonormal(seed)
    radius = 1e-7
    a = climb_thoroughly(f"inv {geodesic}", regression, beta, radius, AutoPGD(steps=100))
    assert closed_form.inv_first_order(beta.numpy(), best.numpy(), radius) == pytest.approx(a, rel=1e-6)
    consistent = Regression(regression.X, regression.X @ best, best)  # the loss at the minimum is 0: nothing cancels
    b = climb_thoroughly(f"inv {geodesic}", consistent, best, radius, AutoPGD(steps=200, restarts=20))
    assert closed_form.inv_at_minimum(best.numpy(), radius) == pytest.approx(b, rel=1e-6)
    assert closed_form.inv_second_order(best.numpy(), best.numpy(), radius).value == pytest.approx(b, rel=1e-6)
    assert closed_form.inv_second_order(best.numpy(), best.numpy(), radius).hard


@pytest.mark.parametrize("seed", range(4))
def test_inv_at_a_larger_radius_lies_between_the_orders(seed: int) -> None:
    """The ascent along exact geodesics against the maximum of the paper's Eq. 25, found by scipy."""
    regression, beta, best = orthonormal(seed, dimension=4)
    radius = 0.5

    def rise(b: Floats) -> float:
        x, t = beta.numpy(), best.numpy()
        return float(np.sum(x**2 * (np.exp(4 * b) - 1) - 2 * x * t * (np.exp(2 * b) - 1)))

    searched = largest_by_search(rise, 4, radius / math.sqrt(2), np.random.default_rng(seed))
    climbed = climb_thoroughly("inv exact", regression, beta, radius, THOROUGH)
    assert climbed == pytest.approx(searched, rel=1e-6)
    second = closed_form.inv_second_order(beta.numpy(), best.numpy(), radius).value
    assert closed_form.inv_first_order(beta.numpy(), best.numpy(), radius) < second < climbed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("radius", [0.01, 0.1, 0.5, 2.0])
def test_mix_is_what_the_ascent_finds(seed: int, radius: float) -> None:
    """To 1e-6 while all geodesics go on; where some have ended the ascent creeps along their ends, and finds less."""
    regression, beta, best = orthonormal(seed)
    climbed = climb_thoroughly("mix exact", regression, beta, radius, THOROUGH)
    found = closed_form.mix(beta.numpy(), best.numpy(), radius)
    endless = closed_form.mix_endless(beta.numpy(), best.numpy(), radius)
    assert found.value <= endless * (1 + 1e-12)
    assert LineBound(regression).at(beta, radius) == pytest.approx(endless, rel=1e-9)
    straight = math.sqrt(2) * radius * (beta - best) / (beta - best).norm()
    if bool((straight / beta >= -1).all()):
        assert found.value == pytest.approx(endless, rel=1e-12)
        assert found.value == pytest.approx(climbed, rel=1e-6)
    else:
        assert found.value < endless * (1 - 1e-6)
        assert (1 - 1e-3) * found.value < climbed <= found.value * (1 + 1e-12)


@pytest.mark.parametrize("inwards", [0, 1, 2, 3])
@pytest.mark.parametrize("radius", [0.2, 0.9, 3.0])
def test_mix_cut_off_against_search_over_both_constraints(inwards: int, radius: float) -> None:
    """Three coordinates of which some are pulled towards 0, where their geodesics end."""
    beta = np.array([0.5, -0.3, 0.8])
    best = beta + np.sign(beta) * np.where(np.arange(3) < inwards, 0.4, -0.2) * np.array([1.0, 0.5, 2.0])
    reach = math.sqrt(2) * radius
    constraints = [
        {"type": "ineq", "fun": lambda d: reach**2 - d @ d},
        {"type": "ineq", "fun": lambda d: np.sign(beta) * (beta + d)},
    ]
    highest = -math.inf
    random = np.random.default_rng(0)
    for signs, _ in itertools.product(itertools.product((-1, 1), repeat=3), range(4)):
        start = np.array(signs) * np.abs(random.normal(size=3))
        start *= reach / np.linalg.norm(start)
        found = optimize.minimize(
            lambda d: -(d @ d + 2 * d @ (beta - best)), start, constraints=constraints, method="SLSQP", tol=1e-13
        )
        if np.all(np.sign(beta) * (beta + found.x) >= -1e-9) and found.x @ found.x <= reach**2 * (1 + 1e-9):
            highest = max(highest, -float(found.fun))
    assert closed_form.mix(beta, best, radius).value == pytest.approx(highest, rel=1e-6)


def test_mix_refuses_a_zero() -> None:
    with pytest.raises(ValueError, match="No coordinate of beta may be 0"):
        closed_form.mix(np.array([1.0, 0.0]), np.zeros(2), 0.1)


# ---- measuring


@pytest.mark.parametrize("measure", MEASURES)
def test_corners_are_the_rises_at_single_coordinates(measure: str) -> None:
    regression, beta, _ = orthonormal(4)
    regression = Regression(regression.X * torch.linspace(0.5, 2, 8), regression.y, regression.truth)
    goal = objective(measure, regression, beta)
    rises = corners(measure, regression, beta, 0.3)
    assert rises.shape == (2, 8)
    for sign, place in itertools.product((0, 1), range(8)):
        z = goal.zero()
        z["z"].view(-1)[place] = (0.3, -0.3)[sign]
        assert float(rises[sign, place]) == pytest.approx(goal.value(z) - float(regression.loss(beta)), rel=1e-10)
    best = goal.value({"z": best_corner(measure, regression, beta, 0.3)}) - float(regression.loss(beta))
    assert best == pytest.approx(float(rises.max()), rel=1e-12)
