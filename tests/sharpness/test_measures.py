"""Measures of sharpness against closed forms, dense Hessians and themselves elsewhere on the orbit."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient, TangentSpace
from quotient_manifolds.sharpness import (
    Result,
    WorstCase,
    average_case_sharpness,
    cross_entropy,
    gradient_norm,
    hessian_trace,
    legacy_sharpness,
    top_eigenvalue,
    worst_case_profile,
    worst_case_sharpness,
)
from quotient_manifolds.symmetries import (
    Params,
)
from quotient_manifolds.version import VERSION
from tests.classifiers import Batch, Classifier

Measure = Callable[..., Result]

GEOMETRIES: list[Geometry] = [Euclidean(), Adaptive(), Quotient("inv"), Quotient("mix"), Quotient("inv", "first")]


class Point(nn.Module):
    """A vector of weights, one of which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -0.5, 0.0, 2.0], dtype=torch.float64))


def polynomial(model: nn.Module, batch: Tensor) -> Tensor:
    """b'w + w'Aw / 2 + sum w^4: its average over a Gaussian has a closed form."""
    w = model.w
    assert isinstance(w, Tensor)
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
    result = average_case_sharpness(model, polynomial, [batch], geometry=geometry, sigma=sigma, samples=400)
    assert result.standard_error is not None
    assert result.standard_error == result.batches[0].standard_error < 0.15 * abs(exact)
    assert abs(result.mean - exact) < 4 * result.standard_error


def test_euclidean_and_adaptive_gradient_norms_are_those_of_autograd(model: Classifier, batches: list[Batch]) -> None:
    names, weights = zip(*((n, w) for n, w in model.named_parameters() if "unused" not in n), strict=True)
    for geometry, power in ((Euclidean(), 0), (Adaptive(), 1)):
        result = gradient_norm(model, cross_entropy, batches, geometry=geometry)
        for batch, value in zip(batches, result.values, strict=True):
            grads = torch.autograd.grad(cross_entropy(model, batch), weights)
            squares = [((w.detach() ** power * g) ** 2).sum() for w, g in zip(weights, grads, strict=True)]
            assert value == pytest.approx(math.sqrt(sum(map(float, squares))), rel=1e-12)
    assert len(names) == 6


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_gradient_norm_is_the_slope_of_worst_case_sharpness(
    model: Classifier, batches: list[Batch], geometry: Geometry
) -> None:
    slope = gradient_norm(model, cross_entropy, batches, geometry=geometry)
    worst = worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=1e-5, steps=2)
    assert worst.mean / 1e-5 == pytest.approx(slope.mean, rel=1e-3)


MEASURES: dict[str, tuple[Measure, dict[str, Any]]] = {
    "worst case": (worst_case_sharpness, {"radius": 0.1, "steps": 20, "restarts": 1, "geometry": Adaptive()}),
    "average": (average_case_sharpness, {"sigma": 0.1, "samples": 2, "geometry": Adaptive()}),
    "legacy": (legacy_sharpness, {"radius": 0.1, "steps": 3, "geometry": Adaptive(0.01)}),
    "gradient": (gradient_norm, {"geometry": Adaptive()}),
    "trace": (hessian_trace, {"geometry": Adaptive(), "samples": 2}),
    "eigenvalue": (top_eigenvalue, {"geometry": Adaptive()}),
}


@pytest.mark.parametrize("name", MEASURES)
def test_records_last_and_the_model_is_untouched(name: str, model: Classifier, batches: list[Batch]) -> None:
    measure, settings = MEASURES[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = measure(model, cross_entropy, batches, **settings)
    for gradients_off in (torch.no_grad, torch.inference_mode):  # they are turned on where they are needed
        with gradients_off():
            assert measure(model, cross_entropy, batches, **settings) == result
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(w.grad is None for w in model.parameters())
    for some in (result, measure(model, cross_entropy, batches[:1], **settings)):
        assert some.version == VERSION
    assert len(result.values) == 3
    assert [each.base_loss for each in result.batches] == pytest.approx(
        [float(cross_entropy(model, b).detach()) for b in batches]
    )
    assert result.measure in str(result)
    assert result.standard_error == pytest.approx(float(torch.tensor(result.values).double().std()) / math.sqrt(3))


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        *((name, None) for name in MEASURES),
        *((name, Quotient("inv")) for name in ("worst case", "average", "trace", "eigenvalue")),
        *((name, Adaptive(norm="linf")) for name in ("worst case", "average")),
    ],
)
def test_values_do_not_depend_on_the_default_dtype(
    name: str, geometry: Geometry | None, model: Classifier, batches: list[Batch]
) -> None:
    measure, settings = MEASURES[name]
    settings = settings if geometry is None else {**settings, "geometry": geometry}
    single = measure(model, cross_entropy, batches, **settings)
    torch.set_default_dtype(torch.float64)
    try:
        assert measure(model, cross_entropy, batches, **settings) == single
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MEASURES)
def test_progress_counts_to_its_total(name: str, model: Classifier, batches: list[Batch]) -> None:
    measure, settings = MEASURES[name]
    seen: list[tuple[int, int]] = []
    measure(model, cross_entropy, batches, progress=lambda _, *counts: seen.append(counts), **settings)
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
    assert seen


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_eigenvalue_is_meant_and_directions_that_do_not_move_have_none(sign: float) -> None:
    """Adaptive, w = (1.5, -0.5, 0, 2): eigenvalues sign * w^2 without that of the weight 0."""

    def bowl(model: nn.Module, batch: Tensor) -> Tensor:
        w = model.w
        assert isinstance(w, Tensor)
        return sign * (w**2).sum() / 2 + batch

    result = top_eigenvalue(Point().eval(), bowl, [torch.zeros(1)], geometry=Adaptive(), tolerance=1e-10)
    assert result.mean == pytest.approx(4.0 if sign > 0 else -0.25)


def differenced(space: TangentSpace, model: nn.Module, batch: Batch) -> Tensor:
    """The dense Hessian on all coordinates of a tangent space, by differences of the loss's gradients."""

    def gradient(z: Tensor) -> Tensor:
        params = space.move(unflat(z))
        leaves = {name: w.requires_grad_() for name, w in params.items()}
        x = torch.func.functional_call(model, leaves, (batch[0],))
        grads = torch.autograd.grad(nn.functional.cross_entropy(x, batch[1]), list(leaves.values()), allow_unused=True)
        return flat(space.pull_back(unflat(z), dict(zip(leaves, grads, strict=True))))

    like = space.zero()

    def flat(z: Params) -> Tensor:
        return torch.cat([z[key].flatten() for key in like])

    def unflat(z: Tensor) -> Params:
        parts = z.split([block.numel() for block in like.values()])
        return space.project({key: part.reshape(like[key].shape) for key, part in zip(like, parts, strict=True)})

    eye, h = torch.eye(flat(like).numel(), dtype=torch.float64), 1e-5
    return torch.stack([(gradient(h * e) - gradient(-h * e)) / (2 * h) for e in eye])


@pytest.mark.parametrize(
    ("geometry", "products"), [*((each, "exact") for each in GEOMETRIES), (Adaptive(), "difference")], ids=str
)
def test_curvatures_of_a_network_are_those_of_its_differenced_hessian(
    model: Classifier, batches: list[Batch], geometry: Geometry, products: Any
) -> None:
    dense = differenced(geometry.verified(model, cross_entropy, batches[:1]).at(model), model, batches[0])
    dense = (dense + dense.mT) / 2
    trace = hessian_trace(model, cross_entropy, batches[:1], geometry=geometry, samples=150, products=products)
    assert trace.standard_error is not None
    assert abs(trace.mean - float(dense.trace())) < 4 * trace.standard_error
    gaussian = math.sqrt(2 / 150) * float(dense.norm())  # of Gaussian directions
    assert trace.standard_error == pytest.approx(gaussian, rel=0.5)
    top = top_eigenvalue(model, cross_entropy, batches[:1], geometry=geometry, tolerance=1e-6, products=products)
    assert (top.batches[0].residual or 0.0) < 1e-5 * top.mean
    assert top.mean == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-6)


def test_average_sharpness_is_half_the_trace_at_small_radii(model: Classifier, batches: list[Batch]) -> None:
    """The same seed draws the same directions."""
    for geometry in GEOMETRIES:
        trace = hessian_trace(model, cross_entropy, batches, geometry=geometry, samples=5)
        average = average_case_sharpness(model, cross_entropy, batches, geometry=geometry, sigma=1e-3, samples=5)
        assert average.values == pytest.approx([1e-6 / 2 * value for value in trace.values], rel=1e-3)


def test_a_network_without_second_derivatives_is_measured_by_differences() -> None:
    """Flash attention, called by its own name, has none."""

    def attention(model: nn.Module, fast: bool) -> Tensor:
        w = model.w
        assert isinstance(w, Tensor)
        q = w.reshape(1, 1, 2, 2)
        if fast:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].pow(2).sum()
        return nn.functional.scaled_dot_product_attention(q, q, q).pow(2).sum()

    model = Point().eval()
    exact = top_eigenvalue(model, attention, [False], geometry=Euclidean())
    differences = top_eigenvalue(model, attention, [True], geometry=Euclidean(), products="difference")
    assert differences.mean == pytest.approx(exact.mean, rel=1e-6)
    with pytest.raises(ValueError, match=r"must have a second derivative.* use products='difference'"):
        top_eigenvalue(model, attention, [True], geometry=Euclidean())


@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive(), Quotient("mix"), Adaptive(norm="linf")], ids=repr)
def test_a_profile_never_falls_and_stays_in_its_balls(
    geometry: Geometry, model: Classifier, batches: list[Batch]
) -> None:
    radii = (0.001, 0.01, 0.02) if geometry == Adaptive(norm="linf") else (0.05, 0.1, 0.3)
    settings: dict[str, Any] = {"geometry": geometry, "steps": 5}
    seen: list[tuple[int, int]] = []
    profile = worst_case_profile(
        model, cross_entropy, batches, radii=radii, progress=lambda _, *counts: seen.append(counts), **settings
    )
    assert [each.settings["radius"] for each in profile] == list(radii)
    assert seen == [(done, 3 * 3 * 6) for done in range(1, 55)]
    for smaller, larger in pairwise(profile):
        assert all(b >= a for a, b in zip(smaller.values, larger.values, strict=True))
        assert [each.base_loss for each in larger.batches] == [each.base_loss for each in smaller.batches]
    for each, radius in zip(profile, radii, strict=True):
        assert all(norm is not None and norm <= radius * (1 + 1e-12) for norm in (one.norm for one in each.batches))
    cold = worst_case_sharpness(model, cross_entropy, batches, radius=radii[0], **settings)
    assert profile[0].values == cold.values
    last = WorstCase(geometry, radii[2], steps=5, after=radii[:2])
    assert last.of(model, cross_entropy, batches) == profile[2]  # the smaller radii climbed again for it alone
