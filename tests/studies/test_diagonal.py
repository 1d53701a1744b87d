"""Diagonal networks: closed forms, objectives against the library's own path, training, the study and its record."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from scipy import optimize, stats
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.manifolds import DiagonalQuotient
from quotient_manifolds.sharpness import AutoPGD, worst_case_sharpness
from quotient_manifolds.symmetries import Symmetries, declare_pair
from studies.__main__ import recorded
from studies.__main__ import study as study_command
from studies.diagonal import closed_form, load
from studies.diagonal.ascent import Climbed, best_corner, climb, climb_thoroughly
from studies.diagonal.measuring import (
    MEASURES,
    LineBound,
    far_share,
    objective,
    references,
    truncation_error,
)
from studies.diagonal.networks import Regression, Setting, draw_networks, train
from studies.diagonal.objectives import GEODESICS, METRICS, Along, Objective
from studies.diagonal.records import MIDDLE, Cell, DiagonalStudy, Mean, Plan
from studies.diagonal.study import measure_cell, run_diagonal
from studies.diagonal.summary import Grid, claims, said

Floats = NDArray[np.float64]
Blocks = dict[str, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(seed: int, points: int = 12, dimension: int = 8) -> tuple[Regression, Tensor, Tensor]:
    """A regression with X'X = I, a beta away from its best, and that best X'y."""
    random = generator(seed)
    X = torch.linalg.qr(torch.randn(points, dimension, generator=random, dtype=torch.float64)).Q
    y = torch.randn(points, generator=random, dtype=torch.float64)
    best = X.mT @ y
    return Regression(X, y, best), best + 0.3 * torch.randn(dimension, generator=random, dtype=torch.float64), best


def thorough(measure: str, regression: Regression, beta: Tensor, radius: float, steps: int, restarts: int) -> float:
    return float(climb_thoroughly(objective(measure, regression, beta), radius, steps, restarts, generator(0)).rise)


class OneRow:
    """A network's row of an objective, as the library's ascent climbs it."""

    def __init__(self, goal: Objective) -> None:
        self.goal = goal

    def zero(self) -> Blocks:
        return {"z": self.goal.zero()}

    def sample(self, generator: torch.Generator) -> Blocks:
        return {"z": torch.randn(self.goal.zero().shape, generator=generator, dtype=torch.float64)}

    def value(self, z: Blocks) -> float:
        return float(self.goal.value(z["z"]))

    def value_and_gradient(self, z: Blocks) -> tuple[float, Blocks]:
        value, gradient = self.goal.value_and_gradient(z["z"])
        return float(value), {"z": gradient}


# ---- objectives


@pytest.mark.parametrize("measure", MEASURES)
def test_objectives_have_the_gradient_of_their_value(measure: str) -> None:
    regression, beta, _ = orthonormal(0)
    goal = objective(measure, regression, torch.stack([beta, beta.flip(0)]))
    leaf = (0.1 * torch.randn(goal.zero().shape, generator=generator(1), dtype=torch.float64)).requires_grad_()
    value, gradient = goal.value_and_gradient(leaf.detach())
    loss = regression.loss(goal.image(leaf))
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.allclose(value, loss.detach(), rtol=1e-12)
    assert torch.allclose(value, goal.value(leaf.detach()), rtol=1e-12)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("geodesic", GEODESICS)
@pytest.mark.parametrize("t", [-0.5, 0.0, 0.25, 0.5, 1.0, 1.5])
def test_geodesics_are_those_of_the_manifold(t: float, geodesic: str) -> None:
    """In coordinates of norm 1 and along the whole geodesic, its end included."""
    random = generator(2)
    u, v = torch.randn(2, 9, generator=random, dtype=torch.float64)
    space = DiagonalQuotient(t).at(torch.stack([u, v]))
    regression = Regression(torch.eye(9, dtype=torch.float64), u, u)
    along = Along.of(regression, u * v, t, geodesic)
    for size in (0.1, 1.0, 10.0) if t >= 0 else (0.1,):  # below 0 geodesics run to infinity in finite time
        z = size * torch.randn(9, generator=random, dtype=torch.float64)
        b = z / along.lengths
        eta = torch.stack([u * b, v * b])
        assert float(space.norm(eta)) == pytest.approx(float(z.norm()), rel=1e-12)
        assert torch.allclose(space.coordinates(eta).abs(), (z.abs() / math.sqrt(2)).expand(2, 9))
        reached = space.follow(space.coordinates(eta), geodesic)[0].prod(dim=0)
        assert torch.allclose(along.image(z), reached, rtol=1e-12, atol=1e-4)  # the library stops a little before 0


@pytest.mark.parametrize("geodesic", GEODESICS)
@pytest.mark.parametrize("t", [-0.5, 0.25, 1.5])
def test_objectives_of_the_family_have_the_gradient_of_their_value(t: float, geodesic: str) -> None:
    """Also where a geodesic has ended: beyond it nothing changes."""
    regression, beta, _ = orthonormal(0)
    goal = Along.of(regression, torch.stack([beta, beta.flip(0)]), t, geodesic)
    size = 0.1 if t < 0 else 4.0
    leaf = (size * torch.randn(goal.zero().shape, generator=generator(1), dtype=torch.float64)).requires_grad_()
    b = (leaf / goal.lengths).detach()
    assert t < 0 or bool((1 + 2 * t * b < 0).any())
    value, gradient = goal.value_and_gradient(leaf.detach())
    loss = regression.loss(goal.image(leaf))
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.allclose(value, loss.detach(), rtol=1e-12)
    assert torch.allclose(gradient, torch.nan_to_num(expected, nan=0.0), rtol=1e-12, atol=1e-14)


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
    model = DiagonalNetwork(u, v).eval()
    u_side, v_side = (lambda w: w["u"][:, None, None]), (lambda w: w["v"][:, None, None])
    symmetries = Symmetries((declare_pair(model, "diagonal", "u/v", G=u_side, H=v_side),))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).sum()

    geometry: Adaptive | Quotient = Adaptive()
    if measure != "adaptive":
        metric, geodesic = measure.split()
        geometry = Quotient(metric, geodesic, symmetries=symmetries, verify="none", complete=False)  # type: ignore[arg-type]
    rise = float(climb(objective(measure, regression, u * v), radius, 20).rise)
    found = worst_case_sharpness(model, loss, [(regression.X, regression.y)], geometry=geometry, radius=radius)
    assert found.mean == pytest.approx(rise, rel=1e-9)


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
    along = Along.of(regression, beta, 0.0, "exact")

    def rise(z: Tensor) -> Tensor:
        return regression.loss(along.image(z))

    slope = torch.autograd.functional.jacobian(rise, torch.zeros_like(beta))
    hessian = torch.autograd.functional.hessian(rise, torch.zeros_like(beta))
    assert torch.allclose(hessian, torch.diag(hessian.diagonal()), atol=1e-10)
    goal = Quadratic(hessian.diagonal().numpy() / 2, slope.numpy() / 2)
    climbed = AutoPGD(steps=200, restarts=20, tolerance=1e-12).maximise(goal, radius, generator(seed))
    assert closed_form.inv_second_order(beta.numpy(), best.numpy(), radius).value == pytest.approx(
        climbed.loss, rel=1e-6
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("geodesic", ["first", "second", "exact"])
def test_inv_closed_forms_are_the_limits_of_the_ascent(seed: int, geodesic: str) -> None:
    """Cases a and b to 1e-6, at a radius where higher terms are smaller: they need not be small anywhere else."""
    regression, beta, best = orthonormal(seed)
    radius = 1e-7
    a = thorough(f"inv {geodesic}", regression, beta, radius, 100, 0)
    assert closed_form.inv_first_order(beta.numpy(), best.numpy(), radius) == pytest.approx(a, rel=1e-6)
    consistent = Regression(regression.X, regression.X @ best, best)  # the loss at the minimum is 0: nothing cancels
    b = thorough(f"inv {geodesic}", consistent, best, radius, 200, 20)
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
    climbed = thorough("inv exact", regression, beta, radius, 200, 20)
    assert climbed == pytest.approx(searched, rel=1e-6)
    second = closed_form.inv_second_order(beta.numpy(), best.numpy(), radius).value
    assert closed_form.inv_first_order(beta.numpy(), best.numpy(), radius) < second < climbed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("radius", [0.01, 0.1, 0.5, 2.0])
def test_mix_is_what_the_ascent_finds(seed: int, radius: float) -> None:
    """To 1e-6 while all geodesics go on; where some have ended the ascent creeps along their ends, and finds less."""
    regression, beta, best = orthonormal(seed)
    climbed = thorough("mix exact", regression, beta, radius, 200, 20)
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


# ---- the ascent


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("steps", [1, 20, 100])
def test_many_climbs_at_once_are_the_steps_of_the_library(measure: str, steps: int) -> None:
    """From the network and from a start, at radii where step sizes are halved; the climbs are not equally long."""
    regression = Regression.draw(20, generator(5), dimension=30)
    betas = regression.truth + 0.1 * torch.randn(4, 30, generator=generator(6), dtype=torch.float64)
    goal = objective(measure, regression, betas)
    noise = torch.randn(goal.zero().shape, generator=generator(7), dtype=torch.float64)
    starts = 0.3 * noise / noise.norm(dim=-1, keepdim=True)
    plain, started = climb(goal, 0.3, steps), climb(goal, 0.3, steps, starts)
    assert bool((plain.z.norm(dim=-1) <= 0.3 * (1 + 1e-12)).all())
    for row, beta in enumerate(betas):
        single = OneRow(objective(measure, regression, beta))
        ascent = AutoPGD(steps=steps)
        for found, start in ((plain, None), (started, {"z": starts[row]})):
            expected = ascent.maximise(single, 0.3, generator(0), start=start)
            assert float(found.rise[row]) == pytest.approx(expected.loss - expected.base, rel=1e-9)
            assert torch.allclose(found.z[row], expected.z["z"], atol=1e-7)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_best_corner_is_the_best_of_all_corners(measure: str) -> None:
    regression, _, _ = orthonormal(4)
    regression = Regression(regression.X * torch.linspace(0.5, 2, 8), regression.y, regression.truth)
    betas = 0.2 * torch.randn(8, 8, generator=generator(5), dtype=torch.float64)
    found = best_corner(objective(measure, regression, betas), 0.03)
    assert set(found.z.sign().unique().tolist()) == {-1.0, 0.0, 1.0}
    for row, each in enumerate(betas):
        goal = objective(measure, regression, each)
        axes = torch.eye(len(goal.zero()), dtype=torch.float64) * 0.03
        rises = goal.value(torch.cat([axes, -axes])) - regression.loss(each)
        reached = goal.value(found.z[row]) - regression.loss(each)
        assert float(found.rise[row]) == pytest.approx(float(rises.max()), rel=1e-10)
        assert float(reached) == pytest.approx(float(rises.max()), rel=1e-10)
        assert float(found.z[row].norm()) == pytest.approx(0.03, rel=1e-12)


def test_a_thorough_climb_takes_the_best_of_all() -> None:
    """Two hills: the gradient at 0 leads up the lower one."""
    regression = Regression(
        torch.eye(2, dtype=torch.float64), torch.tensor([2.0, 0.02], dtype=torch.float64), torch.zeros(2)
    )
    goal = objective("mix second", regression, torch.tensor([1.0, 0.01], dtype=torch.float64))
    assert float(thorough("mix second", regression, goal.beta, 0.3, 20, 3)) > 10 * float(climb(goal, 0.3, 20).rise)


# ---- measuring


def test_the_line_bound_is_the_search_over_a_ball() -> None:
    regression = Regression.draw(3, generator(8), dimension=5)
    beta = torch.randn(5, generator=generator(9), dtype=torch.float64)

    def rise(delta: Floats) -> float:
        return float(regression.loss(beta + torch.from_numpy(delta)) - regression.loss(beta))

    searched = largest_by_search(rise, 5, math.sqrt(2) * 0.4, np.random.default_rng(0))
    assert LineBound(regression).at(beta, 0.4) == pytest.approx(searched, rel=1e-8)


def test_far_share_and_truncation_error_by_hand() -> None:
    one = torch.ones(2, dtype=torch.float64)
    regression = Regression(torch.eye(2, dtype=torch.float64), one, one)
    climbed = Climbed(torch.tensor(2.0), torch.tensor([0.3, 0.4], dtype=torch.float64))
    beta = torch.tensor([0.1, 1.0], dtype=torch.float64)  # mix: b = z / (sqrt 2 |beta|) = 2.12, 0.28
    assert float(far_share("mix exact", regression, beta, climbed)) == pytest.approx(0.09 / 0.25)
    assert float(far_share("inv exact", regression, beta, climbed)) == 0
    b = np.array([0.3 / (math.sqrt(2) * 0.1), 0.4 / math.sqrt(2)])
    x = np.array([0.1, 1.0])
    second, exact = x * (1 + b - b**2 / 2) ** 2, x * (1 + 2 * b)
    expected = abs(np.sum((second - 1) ** 2) - np.sum((exact - 1) ** 2)) / 2
    assert float(truncation_error("mix", regression, beta, climbed)) == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_gradient_references_are_the_limit_of_small_radii(metric: str) -> None:
    regression = Regression.draw(10, generator(10), dimension=15)
    betas = torch.randn(3, 15, generator=generator(11), dtype=torch.float64)
    rise = climb(objective(f"{metric} exact", regression, betas), 1e-7, 20).rise.numpy()
    assert references(regression, betas)[f"{metric} gradient"] == pytest.approx(rise / 1e-7, rel=1e-5)


# ---- networks


def test_networks_arrive_or_are_drawn_again() -> None:
    setting = Setting(30, (0.5, 1.0), (0.05, 1.0))
    regression = Regression.draw(30, generator(12), dimension=40)
    u, v, drawing = draw_networks(regression, setting, generator(13), networks=10)
    assert u.shape == v.shape == (10, 40)
    assert bool((regression.loss(u * v) <= 1e-5).all())
    assert drawing.diverged > 0
    assert drawing.drawn == 10 + drawing.diverged + drawing.unfinished
    with pytest.raises(ValueError, match="All networks must reach the loss"):
        draw_networks(regression, Setting(30, (0.5, 1.0), (90.0, 100.0)), generator(13), networks=2)


def test_training_is_gradient_descent_and_tells_how_it_ended() -> None:
    regression = Regression.draw(8, generator(14), dimension=10)
    rates = torch.tensor([0.05, 50.0, 1e-9], dtype=torch.float64)
    found = train(regression, torch.full((3,), 0.5, dtype=torch.float64), rates, generator(15), most=2000)
    assert found.diverged.tolist() == [False, True, False]
    assert found.unfinished.tolist() == [False, False, True]
    assert bool(found.u[1:].isnan().all())
    random = generator(15)
    w = [nn.Parameter(0.5 * torch.randn(3, 10, generator=random, dtype=torch.float64)[0]) for _ in range(2)]
    optimizer = torch.optim.SGD(w, lr=0.05)
    for _ in range(int(found.steps[0])):
        optimizer.zero_grad()
        loss = ((regression.X @ (w[0] * w[1]) - regression.y) ** 2).sum()
        assert float(loss.detach()) > 1e-5
        loss.backward()
        optimizer.step()
    assert torch.allclose(found.u[0], w[0].detach(), rtol=1e-8)
    assert float(regression.loss(w[0].detach() * w[1].detach())) <= 1e-5


def test_data_are_sparse_and_of_unit_scale() -> None:
    regression = Regression.draw(100, generator(16))
    assert regression.X.shape == (100, 200)
    assert int((regression.truth != 0).sum()) == 20
    assert float((regression.X**2).sum(0).mean()) == pytest.approx(1, abs=0.02)
    assert float(regression.loss(regression.truth)) == 0
    x = torch.randn(20_000, 200, generator=generator(17), dtype=torch.float64)
    beta = regression.truth + 0.1
    drawn = ((x @ (beta - regression.truth)) ** 2).mean()
    assert float(regression.test_loss(beta)) == pytest.approx(float(drawn), rel=0.05)


# ---- the study


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DiagonalStudy]:
    out = tmp_path_factory.mktemp("diagonal")
    return out, run_diagonal(out, Plan.fast(), command="study")


def test_the_record_lasts(fast: tuple[Path, DiagonalStudy], tmp_path: Path) -> None:
    _, study = fast
    study.save(tmp_path / "diagonal.json")
    assert DiagonalStudy.load(tmp_path / "diagonal.json") == study
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a study of diagonal networks"):
        DiagonalStudy.load(tmp_path / "other.json")


def test_every_setting_has_every_seed_and_measure(fast: tuple[Path, DiagonalStudy]) -> None:
    study = fast[1]
    assert [(cell.setting, cell.seed) for cell in study.cells] == list(itertools.product(study.plan.settings, range(3)))
    assert set(study.measures) == {*MEASURES, "mix endless"}
    for cell in study.cells:
        profiled = cell.setting == study.plan.settings[0]
        assert cell.radii == (study.plan.profile if profiled else study.plan.radii)
        assert bool(cell.checks) == (cell.seed == 0)
        assert set(cell.middle) == set(MIDDLE)
        assert all(0 < check.found[1] <= check.found[0] <= 1 for check in cell.middle.values())
        assert all(len(values) == len(cell.radii) for values in cell.taus.values())
        assert cell.train_loss[1] <= 1.00001e-5
        assert set(cell.family) == {f"{t} {geodesic}" for t in ("0", "0.5", "1") for geodesic in ("second", "exact")}
        for metric, t in (("inv", "0"), ("mix", "1")):
            for geodesic in ("second", "exact"):
                assert cell.family[f"{t} {geodesic}"][0] == cell.taus[f"{metric} {geodesic}"][cell.radii.index(0.1)]
    bounds = [check.bound for check in study.cells[0].checks["mix exact"]]
    assert all(bound is not None and 0 < bound[1] <= bound[0] <= 1 for bound in bounds)
    assert all(check.found[1] <= check.found[0] <= 1 for found in study.cells[0].checks.values() for check in found)


def test_tau_is_that_of_the_networks_of_the_cell(fast: tuple[Path, DiagonalStudy]) -> None:
    """Computed again from the seed on, with the library's ascent one network at a time."""
    study = fast[1]
    cell = study.cells[1]
    random = generator(cell.seed)
    regression = Regression.draw(cell.setting.points, random)
    u, v, _ = draw_networks(regression, cell.setting, random, networks=study.plan.networks)
    for measure in ("adaptive", "mix second", "mix exact"):
        ascent = AutoPGD(steps=study.plan.steps)
        goals = [OneRow(objective(measure, regression, beta)) for beta in u * v]
        found = [ascent.maximise(goal, 0.1, generator(0)) for goal in goals]
        tau = stats.kendalltau([each.loss - each.base for each in found], regression.test_loss(u * v)).statistic
        assert cell.taus[measure][cell.radii.index(0.1)] == pytest.approx(tau, abs=1e-4)


def test_columns_of_a_cell_are_medians_and_taus_over_its_networks(fast: tuple[Path, DiagonalStudy]) -> None:
    study = fast[1]
    cell = study.cells[0]
    random = generator(cell.seed)
    regression = Regression.draw(cell.setting.points, random)
    u, v, _ = draw_networks(regression, cell.setting, random, networks=study.plan.networks)
    betas, test = u * v, regression.test_loss(u * v).numpy()
    last = cell.radii.index(0.1)
    climbs = {measure: climb(objective(measure, regression, betas), 0.1, study.plan.steps) for measure in MEASURES}
    rises = {measure: found.rise.numpy() for measure, found in climbs.items()}
    errors = truncation_error("mix", regression, betas, climbs["mix second"]).numpy()
    corner = best_corner(objective("mix second", regression, betas), 0.1).rise.numpy()
    known = references(regression, betas)

    def tau(x: Floats, y: Floats) -> float:
        return float(stats.kendalltau(x, y).statistic)

    expected = {
        ("rises", "mix second"): np.median(rises["mix second"]),
        ("far", "mix exact"): np.median(far_share("mix exact", regression, betas, climbs["mix exact"]).numpy()),
        ("truncation", "mix"): np.median(errors),
        ("truncated", "mix"): np.mean(errors > 0.1),
        ("agreement", "mix"): tau(rises["mix second"], rises["mix exact"]),
        ("matches", "mix exact, |beta|_1"): tau(rises["mix exact"], known["|beta|_1"]),
        ("cornered", "mix second"): tau(np.maximum(rises["mix second"], corner), test),
        ("taus", "mix endless"): tau(np.array([LineBound(regression).at(beta, 0.1) for beta in betas]), test),
    }
    for (column, key), value in expected.items():
        assert getattr(cell, column)[key][last] == pytest.approx(value, rel=1e-4), (column, key)
    assert cell.references["|beta|_1"] == pytest.approx(tau(known["|beta|_1"], test), rel=1e-4)
    assert cell.smallest == pytest.approx(np.median(betas.abs().amin(-1).numpy()), rel=1e-4)
    assert cell.test_loss == pytest.approx((test.min(), np.median(test), test.max()), rel=1e-4)


def test_finished_cells_are_not_measured_again(
    fast: tuple[Path, DiagonalStudy], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, study = fast
    measured = []

    def counted(plan: Plan, setting: Setting, seed: int) -> Cell:
        measured.append((setting, seed))
        return measure_cell(plan, setting, seed)

    monkeypatch.setattr("studies.diagonal.study.measure_cell", counted)
    assert run_diagonal(out, Plan.fast(), command="study") == study
    assert not measured
    next((out / "cells").glob("*seed2.json")).unlink()
    again = run_diagonal(out, Plan.fast(), command="study")
    assert len(measured) == 1
    assert [dataclasses.replace(cell, seconds=0.0) for cell in again.cells] == [
        dataclasses.replace(cell, seconds=0.0) for cell in study.cells
    ]
    run_diagonal(out, dataclasses.replace(Plan.fast(), seeds=4), command="study")
    assert len(measured) == 3  # one more seed of each setting
    run_diagonal(out, dataclasses.replace(Plan.fast(), steps=4), command="study")
    assert len(measured) == 9  # another plan: all of them


def test_means_over_seeds() -> None:
    values = [0.5, -0.5, None, 1.0, 0.25, 0.75]
    mean = Mean.of(values)
    assert mean is not None
    assert (mean.value, mean.seeds, mean.negative, mean.positive) == (0.4, 5, 1, 4)
    known = np.array([value for value in values if value is not None])
    drawn = np.random.default_rng(1).choice(known, (20_000, 5)).mean(axis=1)
    assert (mean.low, mean.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)
    assert Mean.of([None]) is None
    assert Mean.of([0.5, 0.5]) == Mean(0.5, 0.5, 0.5, 2, 0, 2)


def test_columns_are_read_at_their_radius(fast: tuple[Path, DiagonalStudy]) -> None:
    study = fast[1]
    first, second = study.plan.settings
    assert study.column("rises", "mix exact", 1e-3) == [cell.rises["mix exact"][0] for cell in study.of(first)]
    assert study.column("rises", "mix exact", 0.1, [second]) == [
        cell.rises["mix exact"][0] for cell in study.of(second)
    ]
    assert [cell.seed for cell, _ in study.checked(second, "mix exact", 0.1)] == [0]
    with pytest.raises(ValueError, match="The profile must hold the radii"):
        Plan(radii=(0.2,))


def test_what_is_truncation_error_is_no_tau() -> None:
    record = load(Path("notebooks/records"))
    grid, rows = Grid(record), {row[0]: row[1:] for row in recorded("diagonal")["orders"].to_numpy().tolist()}
    for (metric, order), place in itertools.product(itertools.product(METRICS, ("first", "second", "exact")), range(3)):
        radius = record.plan.radii[place]
        errors = [np.median(record.column("truncation", metric, radius, [each])) for each in grid.settings]
        cut = sum(error > 0.1 for error in errors) if order != "exact" else 0
        cell = rows[said(f"{metric} {order}")][place]
        assert ("truncation error in all" in cell) == (cut == len(errors))
        assert (f"truncation error in {cut} settings" in cell) == (0 < cut < len(errors))


def test_claims_are_held_to_the_interval_of_each_setting() -> None:
    grid = Grid(load(Path("notebooks/records")))
    by_number = {(claim.words, claim.about): claim for claim in claims(grid)}
    taus = grid.taus("mix exact")
    assert by_number["sharper is better", "tau, mix, exact geodesics"].verdicts == tuple(
        (tau.high < 0) - (tau.low > 0) for tau in taus if tau.low is not None and tau.high is not None
    )
    opposite = by_number["same sign", "tau, mix, exact geodesics"]
    assert opposite.verdicts.count(-1) == sum(
        a.value * b.value < 0 and a.sign * b.sign != 0 for a, b in zip(taus, grid.taus("adaptive"), strict=True)
    )
    gaps = [abs(a.value) - abs(b.value) for a, b in zip(taus, grid.taus("adaptive"), strict=True)]
    assert by_number["stronger than adaptive", "|tau|, mix, exact geodesics minus adaptive"].found == pytest.approx(
        gaps
    )
    for claim in by_number.values():
        assert len(claim.verdicts) == len(claim.found) == 12


def test_the_command_writes_a_record(tmp_path: Path) -> None:
    shown = CliRunner().invoke(study_command, ["diagonal", "--fast", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "mix, exact" in shown.output
    assert load(tmp_path).command == "make study NAME=diagonal ARGS=--fast"
