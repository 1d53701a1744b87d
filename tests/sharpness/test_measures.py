"""Measures of sharpness against closed forms, dense Hessians and themselves elsewhere on the orbit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, KnownSymmetries, Quotient, TangentSpace
from quotient_manifolds.sharpness import AverageCase, GradientNorm, HessianTrace, TopEigenvalue, WorstCase
from quotient_manifolds.symmetries import Params
from quotient_manifolds.version import VERSION
from tests.geometry.cases import pull_back
from tests.nets.classifiers import Batch, Classifier, moved

Measure = Callable[..., qm.Result]

GEOMETRIES: list[Geometry] = [Euclidean(), Adaptive(), Quotient("inv"), Quotient("mix"), Quotient("inv", "first")]


class Point(nn.Module):
    """A vector of weights, one of which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -0.5, 0.0, 2.0], dtype=torch.float64))


def polynomial(model: Point, batch: Tensor) -> Tensor:
    """b'w + w'Aw / 2 + sum w^4: its average over a Gaussian has a closed form."""
    w = model.w
    return batch[0] @ w + w @ batch[1:] @ w / 2 + (w**4).sum()


def coefficients(seed: int) -> Tensor:
    random = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([random[:1], random[1:] + random[1:].mT])


@pytest.mark.parametrize("sigma", [0.1, 1.0])
@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive()], ids=lambda geometry: geometry.name)
def test_average_sharpness_of_a_polynomial_is_its_gaussian_moment(geometry: Geometry, sigma: float) -> None:
    """E = sum over i of s_i^2 A_ii / 2 + 6 w_i^2 s_i^2 + 3 s_i^4, s = sigma * (1 or |w|)."""
    model, batch = Point().eval(), coefficients(0)
    w = model.w.detach()
    s = sigma * (torch.ones(4, dtype=torch.float64) if isinstance(geometry, Euclidean) else w.abs())
    exact = float((s**2 * batch[1:].diagonal() / 2 + 6 * w**2 * s**2 + 3 * s**4).sum())
    result = qm.average_case_sharpness(model, polynomial, [batch], geometry=geometry, sigma=sigma, samples=400)
    assert result.standard_error is not None
    assert result.standard_error == result.batches[0].standard_error < 0.15 * abs(exact)
    assert abs(result.mean - exact) < 4 * result.standard_error


def test_euclidean_and_adaptive_gradient_norms_are_those_of_autograd(model: Classifier, batches: list[Batch]) -> None:
    names, weights = zip(*((n, w) for n, w in model.named_parameters() if "unused" not in n), strict=True)
    for geometry, power in ((Euclidean(), 0), (Adaptive(), 1)):
        result = qm.gradient_norm(model, qm.cross_entropy, batches, geometry=geometry)
        for batch, value in zip(batches, result.values, strict=True):
            grads = torch.autograd.grad(qm.cross_entropy(model, batch), weights)
            squares = [((w.detach() ** power * g) ** 2).sum() for w, g in zip(weights, grads, strict=True)]
            assert value == pytest.approx(math.sqrt(sum(map(float, squares))), rel=1e-12)
    assert len(names) == 6


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_gradient_norm_is_the_slope_of_worst_case_sharpness(
    model: Classifier, batches: list[Batch], geometry: Geometry
) -> None:
    known = KnownSymmetries()
    slope = GradientNorm(geometry).of(model, qm.cross_entropy, batches, known)
    worst = WorstCase(geometry, 1e-5, steps=2).of(model, qm.cross_entropy, batches, known)
    assert worst.mean / 1e-5 == pytest.approx(slope.mean, rel=1e-3)


MEASURES: dict[str, tuple[Measure, dict[str, Any]]] = {
    "worst case": (qm.worst_case_sharpness, {"radius": 0.1, "steps": 20, "restarts": 1, "geometry": Adaptive()}),
    "average": (qm.average_case_sharpness, {"sigma": 0.1, "samples": 2, "geometry": Quotient("inv")}),
    "average in a box": (qm.average_case_sharpness, {"sigma": 0.1, "samples": 2, "geometry": Adaptive(norm="linf")}),
    "legacy": (qm.legacy_sharpness, {"radius": 0.1, "steps": 3, "geometry": Adaptive(0.01)}),
    "gradient": (qm.gradient_norm, {"geometry": Adaptive()}),
    "trace": (qm.hessian_trace, {"geometry": Adaptive(), "samples": 2}),
    "eigenvalue": (qm.top_eigenvalue, {"geometry": Adaptive()}),
}


@pytest.mark.parametrize("name", MEASURES)
def test_records_last_and_the_model_is_untouched(name: str, model: Classifier, batches: list[Batch]) -> None:
    measure, settings = MEASURES[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen: list[tuple[int, int]] = []
    result = measure(model, qm.cross_entropy, batches, progress=lambda _, *counts: seen.append(counts), **settings)
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    assert seen
    for gradients_off in (torch.no_grad, torch.inference_mode):  # they are turned on where they are needed
        with gradients_off():
            assert measure(model, qm.cross_entropy, batches, **settings) == result
    torch.set_default_dtype(torch.float64)
    try:
        assert measure(model, qm.cross_entropy, batches, **settings) == result
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(w.grad is None for w in model.parameters())
    for some in (result, measure(model, qm.cross_entropy, batches[:1], **settings)):
        assert some.version == VERSION
    assert len(result.values) == 3
    assert [each.base_loss for each in result.batches] == pytest.approx(
        [float(qm.cross_entropy(model, b).detach()) for b in batches]
    )
    assert result.measure in str(result)
    assert result.standard_error == pytest.approx(float(torch.tensor(result.values).double().std()) / math.sqrt(3))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_eigenvalue_is_meant_and_directions_that_do_not_move_have_none(sign: float) -> None:
    """Adaptive, w = (1.5, -0.5, 0, 2): eigenvalues sign * w^2 without that of the weight 0."""

    def bowl(model: Point, batch: Tensor) -> Tensor:
        return sign * (model.w**2).sum() / 2 + batch

    result = qm.top_eigenvalue(Point().eval(), bowl, [torch.zeros(1)], geometry=Adaptive(), tolerance=1e-10)
    assert result.mean == pytest.approx(4.0 if sign > 0 else -0.25)


def differenced(space: TangentSpace, model: nn.Module, batch: Batch) -> Tensor:
    """The dense Hessian on all coordinates of a tangent space, by differences of the loss's gradients."""

    def gradient(z: Tensor) -> Tensor:
        params = space.move(unflat(z))
        leaves = {name: w.requires_grad_() for name, w in params.items()}
        x = torch.func.functional_call(model, leaves, (batch[0],))
        grads = torch.autograd.grad(nn.functional.cross_entropy(x, batch[1]), list(leaves.values()), allow_unused=True)
        return flat(pull_back(space, unflat(z), dict(zip(leaves, grads, strict=True))))

    like = space.zero()

    def flat(z: Params) -> Tensor:
        return torch.cat([z[key].flatten() for key in like])

    def unflat(z: Tensor) -> Params:
        parts = z.split([block.numel() for block in like.values()])
        return space.project({key: part.reshape(like[key].shape) for key, part in zip(like, parts, strict=True)})

    eye, h = torch.eye(flat(like).numel(), dtype=torch.float64), 1e-5
    return torch.stack([(gradient(h * e) - gradient(-h * e)) / (2 * h) for e in eye])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_curvatures_of_a_network_are_those_of_its_differenced_hessian(
    model: Classifier, batches: list[Batch], geometry: Geometry
) -> None:
    known, given = KnownSymmetries(), (model, qm.cross_entropy, batches[:1])
    dense = differenced(geometry.verified(*given, known).tangent_space(model), model, batches[0])
    dense = (dense + dense.mT) / 2
    trace = HessianTrace(geometry, samples=150).of(*given, known)
    assert trace.standard_error is not None
    assert abs(trace.mean - float(dense.trace())) < 4 * trace.standard_error
    gaussian = math.sqrt(2 / 150) * float(dense.norm())  # of Gaussian directions
    assert trace.standard_error == pytest.approx(gaussian, rel=0.5)
    top = TopEigenvalue(geometry, tolerance=1e-6).of(*given, known)
    assert (top.batches[0].residual or 0.0) < 1e-5 * top.mean
    assert top.mean == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)


def test_average_sharpness_is_half_the_trace_at_small_radii(model: Classifier, batches: list[Batch]) -> None:
    """The same seed draws the same directions."""
    for geometry in GEOMETRIES:
        known = KnownSymmetries()
        trace = HessianTrace(geometry, samples=3).of(model, qm.cross_entropy, batches[:1], known)
        average = AverageCase(geometry, 1e-3, samples=3).of(model, qm.cross_entropy, batches[:1], known)
        assert average.values == pytest.approx([1e-6 / 2 * value for value in trace.values], rel=1e-3)


def test_a_network_without_second_derivatives_is_measured_by_differences() -> None:
    """Flash attention, called by its own name, has none."""

    def attention(model: Point, fast: bool) -> Tensor:
        q = model.w.reshape(1, 1, 2, 2)
        if fast:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].pow(2).sum()
        return nn.functional.scaled_dot_product_attention(q, q, q).pow(2).sum()

    model = Point().eval()
    exact = qm.top_eigenvalue(model, attention, [False], geometry=Euclidean())
    with pytest.warns(UserWarning, match=r"on batch 0 fails \(derivative for .*; differences of gradients are taken"):
        differences = qm.top_eigenvalue(model, attention, [True], geometry=Euclidean())
    assert differences.mean == pytest.approx(exact.mean, rel=1e-6)


@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive(), Quotient("mix"), Adaptive(norm="linf")], ids=repr)
def test_a_profile_never_falls_and_stays_in_its_balls(
    geometry: Geometry, model: Classifier, batches: list[Batch]
) -> None:
    radii = (0.001, 0.01, 0.02) if geometry == Adaptive(norm="linf") else (0.05, 0.1, 0.3)
    settings: dict[str, Any] = {"geometry": geometry, "steps": 5}
    seen: list[tuple[int, int]] = []
    profile = qm.worst_case_profile(
        model, qm.cross_entropy, batches, radii=radii, progress=lambda _, *counts: seen.append(counts), **settings
    )
    assert [each.settings["radius"] for each in profile] == list(radii)
    assert seen == [(done, 3 * 3 * 6) for done in range(1, 55)]
    for smaller, larger in pairwise(profile):
        assert all(b >= a for a, b in zip(smaller.values, larger.values, strict=True))
        assert [each.base_loss for each in larger.batches] == [each.base_loss for each in smaller.batches]
    for each, radius in zip(profile, radii, strict=True):
        assert all(norm is not None and norm <= radius * (1 + 1e-12) for norm in (one.norm for one in each.batches))
    cold = qm.worst_case_sharpness(model, qm.cross_entropy, batches, radius=radii[0], **settings)
    assert profile[0].values == cold.values
    assert profile[2].settings["after"] == f"{radii[0]}, {radii[1]}"
    for others in (np.array(radii), torch.tensor(radii, dtype=torch.float64), iter(radii)):
        again = qm.worst_case_profile(model, qm.cross_entropy, batches, radii=others, **settings)
        assert [each.to_frame().equals(own.to_frame()) for each, own in zip(again, profile, strict=True)] == [True] * 3


# ---- the worst case


def test_adaptive_and_euclidean_sharpness_are_not_invariant(model: Classifier, batches: list[Batch]) -> None:
    for geometry in (Adaptive(), Euclidean()):
        here, there = (
            qm.worst_case_sharpness(m, qm.cross_entropy, batches, geometry=geometry, radius=0.1, steps=5)
            for m in (model, moved(model, batches[0][0], 0.01))
        )
        assert abs(there.mean / here.mean - 1) > 0.5, geometry.name


def test_a_worst_case_holds_what_was_measured_on_each_batch_alone(model: Classifier, batches: list[Batch]) -> None:
    settings: dict[str, Any] = {"radius": 0.2, "steps": 4, "restarts": 1, "seed": 5}
    result = qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry=Quotient("mix"), **settings)
    rises = [max(each.losses) - each.base_loss for each in result.batches]
    assert result.values == pytest.approx(rises)
    assert all(len(each.losses) == 5 for each in result.batches)
    assert (result.forward_passes, result.backward_passes) == (3 * 2 * 5, 3 * 2 * 4)
    assert (result.measure, result.geometry) == ("worst-case sharpness", "mix (second order)")
    assert result.settings == {**settings, "ascent": "FullStepAPGD"}
    assert all(norm is not None and norm <= 0.2 * (1 + 1e-12) for norm in (each.norm for each in result.batches))
    assert not any(each.critical_start for each in result.batches)
    together = qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry=Adaptive(), radius=0.1, steps=5)
    for index, batch in enumerate(batches):
        alone = qm.worst_case_sharpness(model, qm.cross_entropy, [batch], geometry=Adaptive(), radius=0.1, steps=5)
        assert alone.values[0] == together.values[index]
        assert alone.standard_error is None


def test_a_critical_model_is_left_in_a_direction_that_the_seed_decides() -> None:
    """Least squares exactly at the minimum, where the gradient is 0; every batch has a direction of its own."""
    model = nn.Linear(2, 1, bias=False).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    x = torch.eye(2, dtype=torch.float64)
    batch = (x, model(x).detach())

    def climbed(seed: int, steps: int) -> qm.Result:
        square = lambda m, b: ((m(b[0]) - b[1]) ** 2).mean()  # noqa: E731
        return qm.worst_case_sharpness(
            model, square, [batch] * 2, geometry=Adaptive(), radius=0.1, steps=steps, seed=seed
        )

    first, again, other = (climbed(seed, 2) for seed in (1, 1, 7))
    assert first == again
    assert first.batches[0].losses != first.batches[1].losses
    assert first.batches[0].losses not in [each.losses for each in other.batches]
    result = climbed(0, 40)
    assert all(each.critical_start for each in result.batches)
    assert result.mean == pytest.approx(0.1**2 * 4 / 2, rel=1e-2)


def test_a_loss_may_call_any_part_of_the_model(model: Classifier, batches: list[Batch]) -> None:
    def through_a_part(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, Classifier)
        x = batch[0]
        return nn.functional.cross_entropy(
            model.head(model.attention(x, x, x, need_weights=False)[0].mean(1)), batch[1]
        )

    plain, parts = (
        qm.worst_case_sharpness(model, loss, batches, geometry=Adaptive(), radius=0.1, steps=3)
        for loss in (qm.cross_entropy, through_a_part)
    )
    assert parts == plain


def test_a_loss_that_differs_without_gradients_is_measured_with_them(model: Classifier, batches: list[Batch]) -> None:
    """As some layers' fast paths do: what is compared with the start has to be computed as the start was."""

    def two_faced(model: torch.nn.Module, batch: Batch) -> Tensor:
        return qm.cross_entropy(model, batch) + (0.0 if torch.is_grad_enabled() else 1.0)

    honest, other = (
        qm.worst_case_sharpness(model, loss, batches, geometry=Adaptive(), radius=1e-3, steps=3)
        for loss in (qm.cross_entropy, two_faced)
    )
    assert other.mean == pytest.approx(honest.mean, rel=1e-9)
