"""Diagonal networks: closed forms, objectives against the library's own path, training, the study and its record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn

from quotient_manifolds.manifolds import DiagonalQuotient
from quotient_manifolds.sharpness import AutoPGD
from studies.common import Estimate, Floats, load
from studies.diagonal import maxima, run
from studies.diagonal import study as diagonal
from studies.diagonal.maxima import Climbed, best_corner, climb, climb_thoroughly
from studies.diagonal.networks import (
    GEODESICS,
    MEASURES,
    Objective,
    Regression,
    Setting,
    along,
    draw_networks,
    objective,
    train,
)
from studies.diagonal.study import FAST, far_share, measure_cell, references, truncation_error
from studies.diagonal.tables import Study, claims, mean_of, tables


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def orthonormal(seed: int, dimension: int = 8) -> tuple[Regression, Tensor, Tensor]:
    """A regression with X'X = I, a beta away from its best, and that best X'y."""
    X = torch.linalg.qr(draw(12, dimension, seed=seed)).Q
    y = draw(12, seed=seed + 100)
    best = X.mT @ y
    return Regression(X, y, best), best + 0.3 * draw(dimension, seed=seed + 200), best


def thorough(measure: str, regression: Regression, beta: Tensor, radius: float, steps: int, restarts: int) -> float:
    return float(climb_thoroughly(objective(measure, regression, beta), radius, steps, restarts, generator(0)).rise)


class OneRow:
    """A network's row of an objective, as the library's ascent takes it."""

    def __init__(self, goal: Objective) -> None:
        self.goal = goal

    def zero(self) -> dict[str, Tensor]:
        return {"z": self.goal.zero()}

    def value(self, z: dict[str, Tensor]) -> float:
        return float(self.goal.value(z["z"]))

    def value_and_gradient(self, z: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        value, gradient = self.goal.value_and_gradient(z["z"])
        return float(value), {"z": gradient}


# ---- objectives and ascents


@pytest.mark.parametrize("geodesic", GEODESICS)
@pytest.mark.parametrize("t", [-0.5, 0.0, 0.25, 0.5, 1.0, 1.5])
def test_geodesics_are_those_of_the_manifold(t: float, geodesic: str) -> None:
    """In coordinates of norm 1 and along the whole geodesic, its end included."""
    u, v = draw(2, 9, seed=2)
    space = DiagonalQuotient(t).at(torch.stack([u, v]))
    goal = along(Regression(torch.eye(9, dtype=torch.float64), u, u), u * v, t, geodesic)
    for size in (0.1, 1.0, 10.0) if t >= 0 else (0.1,):  # below 0 geodesics run to infinity in finite time
        z = size * draw(9, seed=3)
        eta = torch.stack([u, v]) * z / goal.lengths
        assert float(space.norm(eta)) == pytest.approx(float(z.norm()), rel=1e-12)
        reached = space.follow(space.coordinates(eta), geodesic)[0].prod(dim=0)
        assert bool(goal.value_and_gradient(z)[1].isfinite().all())
        assert torch.allclose(goal.image(z), reached, rtol=1e-12, atol=1e-4)  # the library stops a little before 0


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("steps", [1, 20, 100])
def test_many_ascents_at_once_are_the_steps_of_the_library(measure: str, steps: int) -> None:
    """From the network and from a start, at radii where step sizes are halved; the ascents are not equally long."""
    regression = Regression.draw(20, generator(5), dimension=30)
    betas = regression.truth + 0.1 * draw(4, 30, seed=6)
    goal = objective(measure, regression, betas)
    noise = draw(*goal.zero().shape, seed=7)
    starts = 0.3 * noise / noise.norm(dim=-1, keepdim=True)
    plain, started = climb(goal, 0.3, steps), climb(goal, 0.3, steps, starts)
    assert bool((plain.z.norm(dim=-1) <= 0.3 * (1 + 1e-12)).all())
    for row, beta in enumerate(betas):
        single, ascent = OneRow(objective(measure, regression, beta)), AutoPGD(steps=steps)
        for found, start in ((plain, None), (started, {"z": starts[row]})):
            expected = ascent.maximise(single, 0.3, generator(0), start=start)  # type: ignore[arg-type]
            assert float(found.rise[row]) == pytest.approx(expected.loss - expected.base, rel=1e-9)
            assert torch.allclose(found.z[row], expected.z["z"], atol=1e-7)


@pytest.mark.parametrize("measure", MEASURES)
def test_the_best_corner_is_the_best_of_all_corners_and_a_thorough_ascent_not_below_it(measure: str) -> None:
    regression, _, _ = orthonormal(4)
    regression = Regression(regression.X * torch.linspace(0.5, 2, 8), regression.y, regression.truth)
    betas = 0.2 * draw(8, 8, seed=5)
    found = best_corner(objective(measure, regression, betas), 0.03)
    for row, each in enumerate(betas):
        goal = objective(measure, regression, each)
        axes = torch.eye(len(goal.zero()), dtype=torch.float64) * 0.03
        rises = goal.value(torch.cat([axes, -axes])) - regression.loss(each)
        reached = goal.value(found.z[row]) - regression.loss(each)
        assert float(found.rise[row]) == pytest.approx(float(rises.max()), rel=1e-10)
        assert float(reached) == pytest.approx(float(rises.max()), rel=1e-10)
        assert thorough(measure, regression, each, 0.03, 5, 1) >= float(rises.max()) * (1 - 1e-10)
    # Two hills: the gradient at 0 leads up the lower one.
    two = Regression(torch.eye(2, dtype=torch.float64), torch.tensor([2.0, 0.02], dtype=torch.float64), torch.zeros(2))
    goal = objective("mix second", two, torch.tensor([1.0, 0.01], dtype=torch.float64))
    assert thorough("mix second", two, goal.beta, 0.3, 20, 3) > 10 * float(climb(goal, 0.3, 20).rise)


# ---- closed forms


def largest_by_search(value: Callable[[Floats], float], size: int, radius: float) -> float:
    """The largest value in a ball that scipy finds from many starts."""
    random, best = np.random.default_rng(0), -math.inf
    ball = {"type": "ineq", "fun": lambda z: radius**2 - z @ z, "jac": lambda z: -2 * z}
    for _ in range(30):
        start = random.normal(size=size)
        start *= radius / np.linalg.norm(start)
        found = optimize.minimize(lambda z: -value(z), start, constraints=[ball], method="SLSQP", tol=1e-14)
        best = max(best, value(found.x * min(1.0, radius / max(float(np.linalg.norm(found.x)), 1e-300))))
    return best


@pytest.mark.parametrize("radius", [0.05, 1.0])
@pytest.mark.parametrize(
    ("c", "g"),
    [
        *(np.random.default_rng(seed).normal(size=(2, 6)) for seed in (0, 1)),
        (np.array([2.0, 2.0, 1.0, -1.0]), np.array([0.0, 0.0, 0.1, -0.1])),  # hard: no slope where c is largest
        (np.array([2.0, 2.0, 1.0, -1.0]), np.array([0.0, 0.0, 5.0, -5.0])),  # easy again: the others are long enough
        (np.array([2.0, 1.0]), np.array([1e-18, 0.1])),
        (np.array([-2.0, -1.0]), np.array([0.4, -0.3])),  # inside the larger ball
    ],
)
def test_trust_region_against_search(c: Floats, g: Floats, radius: float) -> None:
    def value(z: Floats) -> float:
        return float(c @ (z * z) + 2 * g @ z)

    found, z = maxima.largest_in_ball(c, g, radius)
    assert found == pytest.approx(value(z), rel=1e-12)
    assert found == pytest.approx(largest_by_search(value, len(c), radius), rel=1e-7)
    inside = bool((c < 0).all()) and float(np.linalg.norm(g / c)) < radius
    assert np.linalg.norm(z) == pytest.approx(float(np.linalg.norm(g / c)) if inside else radius, rel=1e-12)


def inv_second_order(beta: Floats, best: Floats, radius: float) -> float:
    """max 4 b'r + 4 b'D b with r = beta (beta - best), D = diag(beta (2 beta - best)) [paper, Eq. 26, E.1 case c]."""
    D, r = beta * (2 * beta - best), beta * (beta - best)
    return maxima.largest_in_ball(4 * D, 2 * r, radius / math.sqrt(2))[0]


@pytest.mark.parametrize("seed", range(3))
def test_closed_forms_of_inv_are_limits_of_the_ascent_and_its_second_order(seed: int) -> None:
    """[paper, Eq. 7, 8, 26], the coefficients of the last from automatic differentiation along exact geodesics."""
    regression, beta, best = orthonormal(seed)
    goal = objective("inv exact", regression, beta)
    slope = torch.autograd.functional.jacobian(goal.value, goal.zero())
    hessian = torch.autograd.functional.hessian(goal.value, goal.zero())
    assert torch.allclose(hessian, torch.diag(hessian.diagonal()), atol=1e-10)
    expected = maxima.largest_in_ball(hessian.diagonal().numpy() / 2, slope.numpy() / 2, 0.3)[0]
    b, t = beta.numpy(), best.numpy()
    assert inv_second_order(b, t, 0.3) == pytest.approx(expected, rel=1e-9)
    consistent = Regression(regression.X, regression.X @ best, best)  # the loss at the minimum is 0: nothing cancels
    for geodesic in GEODESICS:
        first = thorough(f"inv {geodesic}", regression, beta, 1e-7, 100, 0)
        assert 2 * math.sqrt(2) * 1e-7 * np.linalg.norm(b * (b - t)) == pytest.approx(first, rel=1e-6)
        second = thorough(f"inv {geodesic}", consistent, best, 1e-7, 200, 20)
        assert 2 * 1e-14 * np.max(t**2) == pytest.approx(second, rel=1e-6)
        assert inv_second_order(t, t, 1e-7) == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize("radius", [0.01, 0.1, 0.5, 2.0])
def test_mix_is_its_closed_form_until_a_geodesic_ends_and_below_it_beyond(radius: float) -> None:
    for seed in range(3):
        regression, beta, best = orthonormal(seed)
        found = thorough("mix exact", regression, beta, radius, 200, 20)
        endless = 2 * math.sqrt(2) * radius * float((beta - best).norm()) + 2 * radius**2  # [paper, Eq. 35]
        assert maxima.line_bound(regression, beta[None], radius) == pytest.approx([endless], rel=1e-9)
        straight = math.sqrt(2) * radius * (beta - best) / (beta - best).norm()
        if bool((straight / beta >= -1).all()):
            assert found == pytest.approx(endless, rel=1e-6)
        else:
            assert found < endless * (1 - 1e-6)


def test_the_line_bound_is_the_search_over_a_ball_and_gradients_are_limits() -> None:
    regression = Regression.draw(3, generator(8), dimension=5)
    betas = draw(2, 5, seed=9)

    def rise(delta: Floats) -> float:
        return float(regression.loss(betas[1] + torch.from_numpy(delta)) - regression.loss(betas[1]))

    searched = largest_by_search(rise, 5, math.sqrt(2) * 0.4)
    assert maxima.line_bound(regression, betas, 0.4)[1] == pytest.approx(searched, rel=1e-8)
    for metric in ("inv", "mix"):
        found = climb(objective(f"{metric} exact", regression, betas), 1e-7, 20).rise.numpy()
        assert references(regression, betas)[f"{metric} gradient"] == pytest.approx(found / 1e-7, rel=1e-5)


# ---- networks


def test_training_is_gradient_descent_until_the_loss_is_low() -> None:
    """Of three networks one arrives, one diverges and one is too slow."""
    regression = Regression.draw(8, generator(14), dimension=10)
    rates = torch.tensor([0.05, 50.0, 1e-9], dtype=torch.float64)
    u, v = train(regression, torch.full((3,), 0.5, dtype=torch.float64), rates, generator(15), most=2000)
    assert bool(u[1:].isnan().all())
    random = generator(15)
    w = [nn.Parameter(0.5 * torch.randn(3, 10, generator=random, dtype=torch.float64)[0]) for _ in range(2)]
    optimizer = torch.optim.SGD(w, lr=0.05)
    while (loss := ((regression.X @ (w[0] * w[1]) - regression.y) ** 2).sum()) > 1e-5:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.allclose(u[0], w[0].detach(), rtol=1e-8)
    assert torch.allclose(v[0], w[1].detach(), rtol=1e-8)


def test_data_are_sparse_and_networks_that_do_not_arrive_are_drawn_again() -> None:
    regression = Regression.draw(100, generator(16))
    assert (regression.X.shape, int((regression.truth != 0).sum())) == ((100, 200), 20)
    assert float((regression.X**2).sum(0).mean()) == pytest.approx(1, abs=0.02)
    beta = regression.truth + 0.1
    drawn = ((draw(20_000, 200, seed=17) @ (beta - regression.truth)) ** 2).mean()
    assert float(regression.test_loss(beta)) == pytest.approx(float(drawn), rel=0.05)
    small = Regression.draw(30, generator(12), dimension=40)
    u, v = draw_networks(small, Setting(30, (0.5, 1.0), (0.05, 1.0)), generator(13), networks=10)
    assert u.shape == v.shape == (10, 40)
    assert bool((small.loss(u * v) <= 1e-5).all())
    with pytest.raises(ValueError, match="All networks must reach the loss"):
        draw_networks(small, Setting(30, (0.5, 1.0), (90.0, 100.0)), generator(13), networks=2)


# ---- the study


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


def test_more_seeds_keep_the_cells_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = run(tmp_path, fast=True, progress=silent, plan=replace(FAST, seeds=2))
    monkeypatch.setattr(diagonal, "measure_cell", lambda *cell: measure_cell(*cell) if cell[-1] == 2 else 1 / 0)
    more = json.loads(json.dumps(run(tmp_path, fast=True, progress=silent)))
    assert more["plan"] == json.loads(json.dumps(asdict(FAST)))
    assert [cell for cell in more["cells"] if cell["seed"] < 2] == fewer["cells"]
    assert all(len(each) for each in tables(more).values())


def test_a_cell_is_computed_again_column_by_column() -> None:
    cell = measure_cell(FAST, FAST.settings[0], 1)
    random = generator(1)
    regression = Regression.draw(50, random)
    u, v = draw_networks(regression, FAST.settings[0], random, networks=FAST.networks)
    betas, test = u * v, regression.test_loss(u * v).numpy()
    measures = ("adaptive", "mix second", "mix exact")
    ends = {measure: climb(objective(measure, regression, betas), 0.1, FAST.steps) for measure in measures}
    rises = {measure: end.rise.numpy() for measure, end in ends.items()}
    errors = truncation_error("mix", regression, betas, ends["mix second"]).numpy()

    def tau(x: Floats, y: Floats = test) -> float:
        return float(stats.kendalltau(x, y).statistic)

    expected = {
        **{("taus", measure): tau(rises[measure]) for measure in rises},
        ("taus", "mix endless"): tau(maxima.line_bound(regression, betas, 0.1)),
        ("rises", "mix second"): np.median(rises["mix second"]),
        ("far", "mix exact"): np.median(far_share("mix exact", regression, betas, ends["mix exact"]).numpy()),
        ("truncation", "mix"): np.median(errors),
        ("truncated", "mix"): np.mean(errors > 0.1),
        ("agreement", "mix"): tau(rises["mix second"], rises["mix exact"]),
    }
    for (column, key), value in expected.items():
        assert cell[column][key][cell["radii"].index(0.1)] == pytest.approx(value, rel=2e-3, abs=1e-4), (column, key)
    for t, metric in (("0", "inv"), ("1", "mix")):
        assert cell["family"][f"{t} exact"][0] == cell["taus"][f"{metric} exact"][1]
    assert cell["references"]["|beta|_1"] == pytest.approx(tau(betas.abs().sum(-1).numpy()), rel=1e-4)
    assert all(0 < check["found"][1] <= check["found"][0] <= 1 for check in cell["middle"].values())


def test_far_share_and_truncation_error_by_hand() -> None:
    one = torch.ones(2, dtype=torch.float64)
    regression = Regression(torch.eye(2, dtype=torch.float64), one, one)
    climbed = Climbed(torch.tensor(2.0), torch.tensor([0.3, 0.4], dtype=torch.float64))
    beta = torch.tensor([0.1, 1.0], dtype=torch.float64)  # mix: b = z / (sqrt 2 |beta|) = 2.12, 0.28
    assert float(far_share("mix exact", regression, beta, climbed)) == pytest.approx(0.09 / 0.25)
    b, x = np.array([0.3 / (math.sqrt(2) * 0.1), 0.4 / math.sqrt(2)]), np.array([0.1, 1.0])
    second, exact = x * (1 + b - b**2 / 2) ** 2, x * (1 + 2 * b)
    expected = abs(np.sum((second - 1) ** 2) - np.sum((exact - 1) ** 2)) / 2
    assert float(truncation_error("mix", regression, beta, climbed)) == pytest.approx(expected)


def test_means_over_seeds_and_claims_are_held_to_their_intervals() -> None:
    known = np.array([0.5, -0.5, 1.0, 0.25, 0.75])
    mean = mean_of(np.append(known, np.nan))
    assert mean is not None
    drawn = np.random.default_rng(1).choice(known, (20_000, 5)).mean(axis=1)
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.4, *np.quantile(drawn, [0.025, 0.975])), abs=0.03)
    assert mean_of(np.array([np.nan])) is None
    assert mean_of(np.array([0.5, 0.5])) == Estimate(0.5, 0.5, 0.5)
    ends = ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (None, None))
    assert [Estimate(0.0, *each).sign for each in ends] == [1, -1, 0, 0]
    study = Study(load("diagonal"))
    by_number = {(claim.words, claim.about): claim for claim in claims(study)}
    taus = study.taus("mix exact")
    sharper = by_number["sharper is better", "tau, mix, exact geodesics"]
    assert sharper.verdicts == [(tau.high < 0) - (tau.low > 0) for tau in taus]  # type: ignore[operator]
    gaps = by_number["stronger than adaptive", "|tau|, mix, exact geodesics minus adaptive"].found
    expected = [abs(a.value) - abs(b.value) for a, b in zip(taus, study.taus("adaptive"), strict=True)]
    assert [each.value for each in gaps] == pytest.approx(expected)
    cut = int((np.median(study.values("truncation", "mix", 0.1), axis=1) > 0.1).sum())
    assert ("all settings" if cut == 12 else f"in {cut} settings") in study.spread("mix second", 0.1)
