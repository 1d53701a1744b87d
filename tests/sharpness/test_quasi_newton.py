"""The quasi-Newton ascent: maxima against exact ones, passes, what is refused, and the measures that climb by it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import (
    QuasiNewton,
    WorstCase,
    cross_entropy,
    worst_case_profile,
    worst_case_sharpness,
)
from quotient_manifolds.sharpness.ball import L2Ball
from quotient_manifolds.sharpness.quasi_newton import _Climb, maximum_in_ball, secant_matrix
from quotient_manifolds.symmetries import Params
from tests.classifiers import Batch, Classifier
from tests.sharpness.test_ascent import Plain, generator, quadratic, trust_region_maximum
from tests.sharpness.test_maxima import CASES, Case, exhaustive_maximum, loss_in_coordinates, loss_of, problem


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [0.01, 0.5, 10.0])
def test_the_maximum_of_a_quadratic_is_the_exact_one_in_few_steps(seed: int, radius: float) -> None:
    function, A, g = quadratic(seed, 2 + seed)
    # On a large sphere a quadratic may have a second, lower maximum: the restarts are for that.
    found = QuasiNewton(steps=30, restarts=4).maximise(Plain(function, (2 + seed,)), radius, generator())
    exact = trust_region_maximum(A, g, radius)
    assert 0.999 * exact <= found.loss <= exact * (1 + 1e-12)
    assert found.norm <= radius * (1 + 1e-12)


def test_an_inner_maximum_is_found_and_its_norm_reported() -> None:
    centre, bend = torch.tensor([[0.3, -0.2, 0.5], [1.0, 2.0, 9.0]], dtype=torch.float64)
    found = QuasiNewton(steps=30).maximise(Plain(lambda z: -(bend * (z - centre) ** 2).sum(), (3,)), 2.0, generator())
    assert found.loss > -1e-6
    assert found.norm == pytest.approx(float(centre.norm()), rel=1e-3)


def test_a_linear_function_is_done_after_one_step() -> None:
    slope = torch.tensor([3.0, -4.0], dtype=torch.float64)
    f = Plain(lambda z: slope @ z + 5, (2,))
    found = QuasiNewton(steps=9).maximise(f, 0.1, generator())
    assert found.loss == pytest.approx(5.5, rel=1e-12)
    assert found.z["z"].tolist() == pytest.approx([0.06, -0.08])
    assert len(f.points) == found.forward_passes <= 3
    constant = QuasiNewton(steps=5).maximise(Plain(lambda z: 0 * z.sum() + 3, (2,)), 1.0, generator())
    assert (constant.loss, constant.base, constant.norm) == (3.0, 3.0, 0.0)


def test_passes_are_one_forward_and_backward_a_step_and_a_last_forward() -> None:
    function, _, _ = quadratic(3, 9)
    f = Plain(lambda z: function(z) + torch.cos(5 * z).sum(), (9,))
    found = QuasiNewton(steps=7, restarts=2).maximise(f, 1.0, generator())
    assert len(f.points) == found.forward_passes == 3 * 8
    assert f.backwards == found.backward_passes == 3 * 7
    assert len(found.losses) == 8
    assert found.loss >= QuasiNewton(steps=7).maximise(f, 1.0, generator()).loss
    assert all(float(z.norm()) <= 1 + 1e-12 for z in f.points)


def test_an_exact_critical_point_is_left_in_a_random_direction() -> None:
    bend = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    found, again = (
        QuasiNewton(steps=30).maximise(Plain(lambda z: (bend * z**2).sum(), (3,)), 0.5, generator()) for _ in range(2)
    )
    assert found.critical_start
    assert found.loss == pytest.approx(2 * 0.5**2, rel=1e-6)
    assert torch.equal(found.z["z"], again.z["z"])
    top = QuasiNewton(steps=9).maximise(Plain(lambda z: -(z**2).sum(), (3,)), 0.5, generator())
    assert (top.loss, top.critical_start) == (0.0, True)


@pytest.mark.parametrize("slope", [0.0, 0.3], ids=["critical start", "sloping start"])
def test_the_gram_matrix_stays_that_of_the_kept_vectors(slope: float) -> None:
    bend = torch.tensor([1.0, 2.0, -1.0, 0.5, -3.0], dtype=torch.float64)
    f = Plain(lambda z: (bend * z**2).sum() + torch.cos(3 * z).sum() + slope * z.sum(), (5,))
    climb = QuasiNewton(steps=9).climb(f, L2Ball(0.5), generator(), None)
    assert isinstance(climb, _Climb)
    seen = []

    def looked_at() -> tuple[list[tuple[float, Params]], float] | None:
        stacked = torch.stack([vector["z"] for vector in climb.vectors])
        np.testing.assert_allclose(climb.gram, (stacked @ stacked.T).numpy(), rtol=1e-12, atol=1e-15)
        seen.append(len(stacked))
        return _Climb._maximum(climb)

    climb._maximum = looked_at  # type: ignore[method-assign]
    assert climb.run(f.zero()).critical_start == (slope == 0)
    assert seen[:2] == [2, 4]


def test_a_start_is_scaled_into_the_ball_left_as_it_is_and_never_lost() -> None:
    start = torch.tensor([0.0, 3.0, -4.0], dtype=torch.float64)
    peak = Plain(lambda z: 10 * torch.exp(-1e3 * ((z - start / 5) ** 2).sum()) + z[0], (3,))
    found = QuasiNewton(steps=6).maximise(peak, 1.0, generator(), start={"z": start})
    assert start.tolist() == [0.0, 3.0, -4.0]
    assert not peak.points[0].any()  # the base
    torch.testing.assert_close(peak.points[1], start / 5)
    assert found.loss >= found.losses[0] == pytest.approx(10)
    known = QuasiNewton(steps=6).maximise(peak, 1.0, generator(), start={"z": start}, base=-1.5)
    assert (known.base, known.forward_passes) == (-1.5, 7)


@pytest.mark.parametrize("seed", range(8))
def test_the_models_maximum_is_that_of_a_search(seed: int) -> None:
    """Random problems, degenerate ones among them: eigenvalues below 0, equal ones, no slope along the largest."""
    random = np.random.default_rng(seed)
    Q = np.linalg.qr(random.standard_normal((4, 4)))[0]
    w = np.sort(random.standard_normal(4)) - (3 if seed % 4 == 0 else 0)
    w[2:] = w[3] if seed % 4 == 1 else w[2:]
    b = random.standard_normal(4) * (np.array([1, 1, 0, 0]) if seed % 2 else 1)
    B, h = Q @ np.diag(w) @ Q.T, Q @ b
    x = maximum_in_ball(B, h, 0.7)
    assert np.linalg.norm(x) <= 0.7 * (1 + 1e-9)

    def negative(p: np.ndarray) -> float:  # all of the open ball, smoothly
        q = 0.7 * p / np.sqrt(1 + p @ p)
        return -float(h @ q + q @ B @ q / 2)

    best = max(-minimize(negative, 3 * random.standard_normal(4)).fun for _ in range(5))
    assert h @ x + x @ B @ x / 2 >= best - 1e-5
    assert not maximum_in_ball(0 * B, 0 * h, 0.7).any()


def test_the_secant_matrix_explains_the_last_pair_and_a_lone_one() -> None:
    random = np.random.default_rng(0)
    pairs = [(random.standard_normal(5), random.standard_normal(5)) for _ in range(3)]
    B = secant_matrix(pairs, 5)
    np.testing.assert_allclose(B, B.T, atol=1e-12)
    np.testing.assert_allclose(B @ pairs[-1][0], pairs[-1][1], atol=1e-12)
    assert not secant_matrix([], 3).any()


class Single(Plain):
    """In float32, of two blocks."""

    def zero(self) -> Params:
        return {"z": torch.zeros(self.shape), "more": torch.zeros(3)}

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        value, slope = super().value_and_gradient({"z": z["z"].double()})
        return value, {"z": slope["z"].float(), "more": torch.zeros(3)}

    def value(self, z: Params) -> float:
        return super().value({"z": z["z"].double()})


def test_in_float32_rounding_costs_little() -> None:
    function, A, g = quadratic(5, 40)
    exact = trust_region_maximum(A, g, 2.0)
    found = QuasiNewton(steps=60).maximise(Single(function, (40,)), 2.0, generator())
    assert 0.999 * exact <= found.loss <= exact * (1 + 1e-5)


def test_what_cannot_be_climbed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"norm must be one of l2\. Found 'linf'"):
        QuasiNewton().maximise(Plain(lambda z: z.sum(), (3,)), 1.0, generator(), norm="linf")
    with pytest.raises(ValueError, match=r"'quasi_newton' climbs balls of the norm l2\. Found 'linf'"):
        WorstCase(Euclidean("linf"), 0.1, method="quasi_newton")
    with pytest.raises(ValueError, match=r"method must be one of auto_pgd, quasi_newton\. Found 'newton'"):
        WorstCase(Euclidean(), 0.1, method="newton")
    for wrong in ({"steps": 0}, {"restarts": -1}, {"memory": 0}, {"tolerance": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            QuasiNewton(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The gradient of the loss must be finite"):
        QuasiNewton().maximise(Plain(lambda z: (z.sum() + 2) ** 3 / (z.sum() - 0.0), (3,)), 1.0, generator())


@pytest.mark.parametrize(
    "geometry", [Euclidean(), Adaptive(), Quotient("inv"), Quotient("mix")], ids=lambda geometry: geometry.name
)
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_worst_case_sharpness_is_the_maximum(case: Case, geometry: Geometry) -> None:
    model, batch, symmetries = problem(case)
    before = copy.deepcopy(model.state_dict())
    if isinstance(geometry, Quotient):
        geometry = Quotient(geometry.metric, symmetries=symmetries)
    settings = {"geometry": geometry, "radius": case.radius, "restarts": case.restarts, "method": "quasi_newton"}
    found = worst_case_sharpness(model, loss_of(case), [batch], steps=25, **settings)  # type: ignore[arg-type]
    best = exhaustive_maximum(*loss_in_coordinates(case, geometry), case.radius) - found.base_losses[0]
    assert 0.99 * best <= found.mean <= best * (1 + 1e-6)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_sharpness_is_the_same_along_the_orbit(metric: str) -> None:
    case = CASES[5]
    model, batch, symmetries = problem(case)
    other = copy.deepcopy(model)
    A = torch.tensor([[1.0, 0.3], [2.0, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        other.G.copy_(model.G @ A.inverse())
        other.H.copy_(model.H @ A.mT)
    geometry = Quotient(metric, symmetries=symmetries)
    here, there = (
        worst_case_sharpness(each, loss_of(case), [batch], geometry=geometry, radius=0.1, method="quasi_newton")
        for each in (model, other)
    )
    assert here.loss_steps[0] == pytest.approx(there.loss_steps[0], rel=1e-6)


def test_the_method_travels_with_the_measure(model: Classifier, batches: list[Batch]) -> None:
    chosen = {"geometry": Quotient("mix"), "method": "quasi_newton"}
    found = worst_case_sharpness(model, cross_entropy, batches, radius=0.1, **chosen)  # type: ignore[arg-type]
    assert found.settings["method"] == "quasi_newton"
    profile = worst_case_profile(model, cross_entropy, batches, radii=(0.05, 0.1), **chosen)  # type: ignore[arg-type]
    assert profile[1].mean >= profile[0].mean
    assert profile[1].settings["method"] == "quasi_newton"
