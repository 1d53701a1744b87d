"""Auto-PGD with full steps: maxima with a closed form, the gap, the gradient's ray, nested balls, what is recorded."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.sharpness import AutoPGD, FullStepAPGD, WorstCase
from quotient_manifolds.sharpness.result import BatchResult, Result, nested
from quotient_manifolds.symmetries import Params
from tests.sharpness.test_ascent import Plain, generator

METHODS = [FullStepAPGD, AutoPGD]


def dual(gradient: Tensor, norm: str) -> float:
    return float(gradient.norm() if norm == "l2" else gradient.abs().sum())


def slope_at(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    leaf = z.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def top(gradient: Tensor, radius: float, norm: str) -> Tensor:
    """The point of the ball that is furthest along a gradient."""
    return radius * (gradient / gradient.norm() if norm == "l2" else gradient.sign())


def quadratic_terms(seed: int, dimension: int) -> tuple[Tensor, Tensor]:
    A = torch.randn(dimension, dimension, generator=generator(seed), dtype=torch.float64)
    return (A + A.mT) / 2, torch.randn(dimension, generator=generator(seed + 1), dtype=torch.float64)


def bumpy(seed: int, dimension: int = 4) -> Callable[[Tensor], Tensor]:
    """A quadratic and waves of several lengths: first steps overshoot, and there are many local maxima."""
    A, g = quadratic_terms(seed, dimension)
    k = 3 * torch.randn(6, dimension, generator=generator(seed + 2), dtype=torch.float64)
    phase = 6 * torch.rand(6, generator=generator(seed + 3), dtype=torch.float64)
    return lambda z: g @ z + z @ A @ z / 2 + torch.sin(k @ z + phase).sum()


# ---- maxima that are known


def largest_on_ball(A: Tensor, g: Tensor, radius: float) -> float:
    """max g'z + z'Az / 2 over |z| <= radius: (mu I - A) z = g with mu >= 0 above all eigenvalues, by a dense solve."""
    s, U = np.linalg.eigh(A.numpy())
    c = U.T @ g.numpy()

    def length(mu: float) -> float:
        return float(np.linalg.norm(c / (mu - s)))

    def value(mu: float) -> float:
        z = c / (mu - s)
        return float(c @ z + (s * z * z).sum() / 2)

    if s[-1] < 0 and length(0.0) <= radius:
        return value(0.0)
    least = max(s[-1], 0.0)
    return value(brentq(lambda mu: length(mu) - radius, least + 1e-12, least + np.linalg.norm(c) / radius + 1e-9))


@pytest.mark.parametrize("radius", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("shift", [0.0, -4.0, -12.0])  # indefinite, nearly concave, concave with a maximum inside
@pytest.mark.parametrize("seed", range(4))
def test_the_maximum_of_a_quadratic_over_a_ball_is_that_of_a_dense_solve(
    seed: int, shift: float, radius: float
) -> None:
    A, g = quadratic_terms(seed, 12)
    A = A + shift * torch.eye(12, dtype=torch.float64)
    best = largest_on_ball(A, g, radius)
    found = FullStepAPGD(steps=200).maximise(Plain(lambda z: g @ z + z @ A @ z / 2, (12,)), radius, generator())
    assert 0.995 * best <= found.loss <= best * (1 + 1e-9)
    if shift == -12.0:  # concave: the gap bounds what is missing
        assert best <= found.loss + found.gap


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_linear_function_takes_three_passes_at_most(norm: str) -> None:
    g = torch.tensor([3.0, -4.0, 12.0], dtype=torch.float64)
    f = Plain(lambda z: g @ z, (3,), norm=norm)
    found = FullStepAPGD(steps=20).maximise(f, 0.7, generator(), norm=norm)
    assert found.loss == pytest.approx(0.7 * dual(g, norm), rel=1e-12)
    assert found.backward_passes <= found.forward_passes <= 3
    assert found.gap == pytest.approx(0.0, abs=1e-12)
    assert found.promise == pytest.approx(found.loss, rel=1e-12)
    assert found.inner_radius is None


def test_the_maximum_of_a_concave_function_over_a_box_is_that_of_each_coordinate() -> None:
    centre = torch.tensor([0.2, -3.0, 5.0, 0.0], dtype=torch.float64)
    f = Plain(lambda z: -((z - centre) ** 2).sum(), (4,), norm="linf")
    found = FullStepAPGD(steps=100).maximise(f, 1.0, generator(), norm="linf")
    best = -float(((centre.clamp(-1, 1) - centre) ** 2).sum())
    assert found.loss == pytest.approx(best, rel=1e-3)
    assert best <= found.loss + found.gap


# ---- gap, promise and the ray


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", ["l2", "linf"])
@given(seed=st.integers(0, 500), radius=st.sampled_from([0.01, 0.1, 0.5, 2.0]), steps=st.integers(1, 12))
def test_gap_and_promise_are_those_of_the_gradients(
    method: Any, norm: str, seed: int, radius: float, steps: int
) -> None:
    function = bumpy(seed)
    f = Plain(function, (4,), norm=norm)
    found = method(steps=steps).maximise(f, radius, generator(), norm=norm)
    assert found.promise == pytest.approx(radius * dual(slope_at(function, torch.zeros(4).double()), norm), rel=1e-9)
    here = slope_at(function, found.z["z"])
    expected = radius * dual(here, norm) - float(here @ found.z["z"])
    last = torch.equal(found.z["z"], f.points[-1])  # its gradient is not computed: the gap is one of a point before it
    ray = found.inner_radius is not None or len(f.points) > steps + 1
    assert found.gap >= 0
    assert last or ray or found.gap == pytest.approx(expected, rel=1e-6, abs=1e-9 * found.promise)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_gap_vanishes_at_critical_points_alone(norm: str) -> None:
    """On the sphere where the gradient is along z, inside where it is 0; along a way that is no maximum it does not."""
    g = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    inside = torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64)
    flat = FullStepAPGD(steps=80).maximise(
        Plain(lambda z: -((z - inside) ** 2).sum(), (3,), norm=norm), 1.0, generator(), norm=norm
    )
    assert 0 <= flat.gap <= 0.01 * (flat.promise or 0.0)
    edge = FullStepAPGD().maximise(Plain(lambda z: (g @ z).exp(), (3,), norm=norm), 1.0, generator(), norm=norm)
    assert edge.gap <= 1e-12 * edge.loss
    curved = FullStepAPGD(steps=2).maximise(
        Plain(lambda z: g @ z - 3 * z[0] ** 2, (3,), norm=norm), 1.0, generator(), norm=norm
    )
    assert curved.gap > 0.1 * (curved.loss - curved.base)


@pytest.mark.parametrize("miss", [1e-2, 1e-3])
def test_the_small_gap_near_a_saddle_does_not_end_an_ascent(miss: float) -> None:
    """z_1 misses a saddle of the sphere by this angle; the gap there is of the order of its square."""
    f = Plain(lambda z: z[0] + miss * z[1] + 0.8 * z[1] ** 2, (2,))
    found = FullStepAPGD(steps=40).maximise(f, 1.0, generator())
    z0 = 1 / 1.6
    assert found.loss == pytest.approx(z0 + 0.8 * (1 - z0**2), rel=miss)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@given(seed=st.integers(0, 5000), radius=st.sampled_from([0.1, 1.0, 5.0, 40.0]), steps=st.sampled_from([1, 2, 5, 20]))
def test_it_finds_no_less_than_the_gradients_ray_shows(norm: str, seed: int, radius: float, steps: int) -> None:
    function = bumpy(seed)
    found = FullStepAPGD(steps=steps).maximise(Plain(function, (4,), norm=norm), radius, generator(), norm=norm)
    origin = torch.zeros(4, dtype=torch.float64)
    base, gradient = float(function(origin)), slope_at(function, origin)
    for k in range(14):
        t = 0.25**k
        there = float(function(top(gradient, t * radius, norm)))
        assert found.loss >= there - 1e-9 * abs(there)
        if there - base >= 0.5 * t * radius * dual(gradient, norm):
            break
    assert found.loss > base
    length = float(found.z["z"].norm() if norm == "l2" else found.z["z"].abs().max())
    assert length == pytest.approx(found.norm)
    assert found.norm <= radius * (1 + 1e-12)


def overshot(z: Tensor) -> Tensor:
    """396 along the gradient, and far below the start from a thousandth of the radius on."""
    return 396 * z[0] - 1e6 * (z**2).sum()


def test_a_loss_that_bends_down_inside_is_searched_in_a_smaller_ball() -> None:
    radius, best = 0.5, 396**2 / 4e6
    f = Plain(overshot, (3,))
    lost = AutoPGD(steps=5).maximise(Plain(overshot, (3,)), radius, generator())
    assert lost.loss == lost.base == 0
    found = FullStepAPGD(steps=20).maximise(f, radius, generator())
    assert 0.9 * best < found.loss <= best
    assert found.inner_radius is not None
    assert 396 / 2e6 <= found.inner_radius <= radius / 4
    assert found.forward_passes == len(f.points) <= 21 + 14 + 11
    assert found.backward_passes == f.backwards <= 20 + 1 + 10


# ---- starts, restarts, critical points, memory


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_start_is_scaled_to_the_sphere_and_left_as_it_is(norm: str) -> None:
    start = torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64)
    scaled = start / (0.5 if norm == "l2" else 0.4)

    def peak(z: Tensor) -> Tensor:
        return 10 * torch.exp(-1e3 * ((z - scaled) ** 2).sum()) + z[0]

    f = Plain(peak, (3,), norm=norm)
    found = FullStepAPGD(steps=6).maximise(f, 1.0, generator(), norm=norm, start={"z": start})
    assert start.tolist() == [0.0, 0.3, -0.4]
    assert found.loss == pytest.approx(10, rel=1e-6)
    assert found.losses[0] == found.base == pytest.approx(0.0, abs=1e-12)
    assert (found.forward_passes, found.backward_passes) == (len(f.points), f.backwards)
    again = FullStepAPGD(steps=1).maximise(Plain(peak, (3,)), 1.0, generator(), norm=norm, start={"z": 0 * start})
    assert again.loss == pytest.approx(1.0, abs=0.6)  # a start at 0 shows no direction: the gradient's


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_critical_start_is_left_in_a_random_direction(norm: str) -> None:
    curvature = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    f = Plain(lambda z: (curvature * z**2).sum(), (3,), norm=norm)
    found, again = (FullStepAPGD(steps=50).maximise(f, 0.5, generator(), norm=norm) for _ in range(2))
    assert found.critical_start
    assert found.promise == 0
    assert found.loss == pytest.approx((2 if norm == "l2" else 3) * 0.25, rel=1e-2)
    assert torch.equal(found.z["z"], again.z["z"])
    constant = FullStepAPGD(steps=5).maximise(Plain(lambda z: (0 * z).sum() + 3.0, (2,)), 1.0, generator())
    assert (constant.loss, constant.base, constant.norm, constant.gap) == (3.0, 3.0, 0.0, 0.0)
    peak = FullStepAPGD(steps=5).maximise(Plain(lambda z: -(z**2).sum(), (2,)), 1.0, generator())
    assert (peak.loss, peak.gap) == (0.0, 0.0)


def test_restarts_find_what_the_first_run_misses() -> None:
    def hills(z: Tensor) -> Tensor:
        left, right = torch.tensor([0.0, 0.8], dtype=torch.float64), torch.tensor([0.7, 0.0], dtype=torch.float64)
        return 2 * torch.exp(-40 * ((z - left) ** 2).sum()) + torch.exp(-4 * ((z - right) ** 2).sum())

    f = Plain(hills, (2,))
    alone = FullStepAPGD(steps=40).maximise(Plain(hills, (2,)), 0.9, generator())
    several = FullStepAPGD(steps=40, restarts=30).maximise(f, 0.9, generator())
    assert alone.loss < 1.1
    assert several.loss > 1.9
    assert (several.base, several.promise) == (alone.base, alone.promise)
    assert (several.forward_passes, several.backward_passes) == (len(f.points), f.backwards)


@pytest.mark.parametrize(("radius", "restarts", "points"), [(1.0, 0, 3), (1.0, 2, 4), (40.0, 0, 4), (40.0, 2, 4)])
def test_it_keeps_as_many_points_as_auto_pgd(radius: float, restarts: int, points: int) -> None:
    function, seen = bumpy(4, 6), list[weakref.ref[Tensor]]()
    slopes: list[weakref.ref[Tensor]] = []
    most = [0, 0]

    class Counting(Plain):
        def value_and_gradient(self, z: Params) -> tuple[float, Params]:
            if all(z["z"] is not ref() for ref in seen):
                seen.append(weakref.ref(z["z"]))
            most[:] = map(max, most, (sum(ref() is not None for ref in refs) for refs in (seen, slopes)))
            value, gradient = super().value_and_gradient(z)
            slopes.append(weakref.ref(gradient["z"]))
            return value, gradient

    f = Counting(lambda z: function(z) - (radius > 1) * (z**4).sum(), (6,))
    found = FullStepAPGD(steps=40, restarts=restarts).maximise(f, radius, generator())
    assert (found.inner_radius is not None) == (radius > 1)
    # An inner run or a restart goes on beside the best point of the run before, without its gradient.
    assert most == [points, 1]


# ---- the measure


class Free(nn.Module):
    """A point of R^4, at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return self.z


def measured(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, batch: function(model(batch))


BATCH = torch.zeros(1, dtype=torch.float64)
RADII = [0.003, 0.01, 0.1, 0.4, 2.0, 9.0]


@pytest.mark.filterwarnings("ignore::quotient_manifolds.sharpness.SharpnessWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", ["l2", "linf"])
@given(seed=st.integers(0, 5000), steps=st.integers(1, 5))
def test_a_larger_ball_never_returns_less_in_one_call(method: Any, norm: str, seed: int, steps: int) -> None:
    profile = qm.worst_case_profile(
        Free().eval(), measured(bumpy(seed)), [BATCH], qm.Euclidean(norm), radii=RADII, steps=steps, ascent=method
    )
    for smaller, larger in pairwise(profile):
        assert larger.value >= smaller.value
    for each, radius in zip(profile, RADII, strict=True):
        (batch,) = each.batches
        assert batch.value == pytest.approx(max(batch.losses) - batch.base_loss, abs=1e-12)
        assert (batch.norm or 0.0) <= radius * (1 + 1e-12)
        assert batch.promise == pytest.approx(radius / RADII[0] * (profile[0].batches[0].promise or 0.0))
        assert (batch.gap or 0.0) >= 0


def test_what_a_smaller_ball_found_is_kept_with_the_gap_of_the_larger_one() -> None:
    small = BatchResult(3.0, 1.0, 5, 4, losses=(1.0, 4.0), norm=0.1, gap=0.2, multiplier=7.0, promise=2.0)
    large = BatchResult(2.5, 1.0, 9, 8, losses=(1.0, 3.5), norm=0.3, gap=0.0, multiplier=1.0, promise=6.0)
    kept, taken = nested([0.1, 0.3], [small, large])
    assert kept is small
    assert (taken.value, taken.losses, taken.norm) == (3.0, (1.0, 4.0), 0.1)
    assert (taken.forward_passes, taken.backward_passes) == (9, 8)
    assert (taken.gap, taken.promise) == (pytest.approx(0.2 + 0.2 * 7.0), pytest.approx(6.0))
    assert nested([0.1, 0.3], [replaced(small, 1.0), large]) == [replaced(small, 1.0), large]


def replaced(batch: BatchResult, value: float) -> BatchResult:
    return BatchResult(**{**vars(batch), "value": value})


def of_free(function: Callable[[Tensor], Tensor], radius: float, **settings: Any) -> Result:
    return WorstCase(qm.Euclidean(), radius, **settings).of(Free().eval(), measured(function), [BATCH])


def test_a_result_holds_gap_promise_and_which_ascent() -> None:
    far = of_free(overshot, 0.5)
    (batch,) = far.batches
    assert far.settings == {"radius": 0.5, "steps": 20, "restarts": 0, "seed": 0, "ascent": "FullStepAPGD"}
    assert of_free(overshot, 0.5, ascent=AutoPGD).settings["ascent"] == "AutoPGD"
    assert batch.value > 0
    assert batch.promise == pytest.approx(0.5 * 396)
    assert batch.inner_radius is not None
    assert far.promise_kept == pytest.approx(batch.value / (batch.promise or 1.0))
    assert BatchResult.from_dict({**vars(batch), "losses": list(batch.losses)}) == batch


def test_what_is_warned_of_is_the_gap_and_a_broken_promise_and_never_rounding() -> None:
    for method in METHODS:
        with pytest.warns(qm.sharpness.ConvergenceWarning, match=r"bends down well inside") as caught:
            found = qm.worst_case_sharpness(
                Free().eval(), measured(overshot), [BATCH], "euclidean", radius=0.5, steps=5, ascent=method
            )
        assert found.warning == str(caught[0].message)
        assert len(caught) == 1
    curved = measured(lambda z: z.sum() - 0.2 * (z[0] - z[1]) ** 2 - 0.4 * z[2] ** 2)
    with pytest.warns(
        qm.sharpness.ConvergenceWarning, match=r"one more step promises [\d.]+% of the increase, above 1%"
    ):
        short = qm.worst_case_sharpness(Free().eval(), curved, [BATCH], "euclidean", radius=1.0, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long = qm.worst_case_sharpness(Free().eval(), curved, [BATCH], "euclidean", radius=1.0, steps=60)
    assert (short.relative_gap or 0.0) > 0.01 >= (long.relative_gap or math.inf) >= 0
    assert long.forward_passes < 61


@pytest.mark.parametrize(("function", "radius"), [(lambda z: z.sum(), 0.1), (overshot, 0.5)])
def test_progress_ends_at_its_total_however_many_passes_there_were(
    function: Callable[[Tensor], Tensor], radius: float
) -> None:
    seen: list[tuple[int, int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qm.worst_case_profile(
            Free().eval(),
            measured(function),
            [BATCH, BATCH],
            "euclidean",
            steps=7,
            radii=[radius, 2 * radius],
            progress=lambda _, *counts: seen.append(counts),
        )
    assert seen == [(done, 4 * 8) for done in range(1, 4 * 8 + 1)]


def test_an_ascent_must_be_a_class_of_ascents() -> None:
    for wrong in ("AutoPGD", AutoPGD(), nn.Linear):
        with pytest.raises(TypeError, match=r"ascent must be one of the classes FullStepAPGD, AutoPGD\. Found"):
            WorstCase(qm.Euclidean(), 0.1, ascent=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
def test_restarts_of_a_measure_draw_by_the_seed(seed: int) -> None:
    first, again = (of_free(bumpy(3), 2.0, restarts=3, seed=seed) for _ in range(2))
    assert first == again
    assert first.value >= of_free(bumpy(3), 2.0, seed=seed).value
