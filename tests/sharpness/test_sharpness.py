"""Worst-case sharpness of real modules: invariance, determinism, records, bad input, and a model left as it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Quotient
from quotient_manifolds.sharpness import cross_entropy, worst_case_sharpness
from quotient_manifolds.version import VERSION
from tests.classifiers import Batch, Classifier, moved


def test_adaptive_and_euclidean_sharpness_are_not_invariant(model: Classifier, batches: list[Batch]) -> None:
    for geometry in (Adaptive(), Euclidean()):
        here, there = (
            worst_case_sharpness(m, cross_entropy, batches, geometry=geometry, radius=0.1, steps=5)
            for m in (model, moved(model, batches[0][0], 0.01))
        )
        assert abs(there.mean / here.mean - 1) > 0.5, geometry.name


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def test_result_holds_what_was_measured(model: Classifier, batches: list[Batch]) -> None:
    seen: list[tuple[int, int]] = []
    result = worst_case_sharpness(
        model,
        cross_entropy,
        batches,
        geometry=Quotient("mix"),
        radius=0.2,
        steps=4,
        restarts=1,
        seed=5,
        progress=lambda _, *counts: seen.append(counts),
    )
    direct = [float(cross_entropy(model, batch).detach()) for batch in batches]
    assert [each.base_loss for each in result.batches] == pytest.approx(direct, rel=1e-12)
    assert result.values == pytest.approx([max(each.losses) - each.base_loss for each in result.batches])
    assert all(len(each.losses) == 5 for each in result.batches)
    assert result.mean == pytest.approx(np.mean(result.values))
    assert result.standard_error == pytest.approx(np.std(result.values, ddof=1) / math.sqrt(3))
    assert (result.forward_passes, result.backward_passes) == (3 * 2 * 5, 3 * 2 * 4)
    assert seen == [(done, 30) for done in range(1, 31)]
    assert (result.measure, result.geometry, result.version) == ("worst-case sharpness", "mix (second order)", VERSION)
    settings = {"radius": 0.2, "steps": 4, "restarts": 1, "seed": 5, "after": ""}
    assert result.settings == settings
    assert all(norm is not None and norm <= 0.2 * (1 + 1e-12) for norm in (each.norm for each in result.batches))
    assert not any(each.critical_start for each in result.batches)
    assert "mix (second order) worst-case sharpness" in str(result)


def test_each_batch_is_maximised_on_its_own(model: Classifier, batches: list[Batch]) -> None:
    together = worst_case_sharpness(model, cross_entropy, batches, geometry=Adaptive(), radius=0.1, steps=5)
    for index, batch in enumerate(batches):
        alone = worst_case_sharpness(model, cross_entropy, [batch], geometry=Adaptive(), radius=0.1, steps=5)
        assert alone.values[0] == together.values[index]
        assert alone.standard_error is None


def critical() -> tuple[nn.Module, Batch]:
    """A least-squares model exactly at its minimum, where the gradient is 0."""
    model = nn.Linear(2, 1, bias=False).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    x = torch.eye(2, dtype=torch.float64)
    return model, (x, model(x).detach())


def test_the_seed_decides_what_is_random_and_every_batch_has_its_own() -> None:
    model, batch = critical()
    first, again, other = (
        worst_case_sharpness(model, squared_error, [batch] * 2, geometry=Adaptive(), radius=0.1, steps=2, seed=seed)
        for seed in (1, 1, 7)
    )
    assert first == again
    assert first.batches[0].losses != first.batches[1].losses
    assert first.batches[0].losses not in [each.losses for each in other.batches]


def test_an_exactly_critical_model_is_measured_from_a_random_direction() -> None:
    model, batch = critical()
    result = worst_case_sharpness(model, squared_error, [batch], geometry=Adaptive(), radius=0.1, steps=40)
    assert [each.critical_start for each in result.batches] == [True]
    assert result.mean == pytest.approx(0.1**2 * 4 / 2, rel=1e-2)


def test_dict_batches_and_any_method_of_the_model(model: Classifier, batches: list[Batch]) -> None:
    plain = worst_case_sharpness(model, cross_entropy, batches, geometry=Adaptive(), radius=0.1, steps=3)
    dicts = [{"x": x, "labels": y} for x, y in batches]
    assert worst_case_sharpness(model, cross_entropy, dicts, geometry=Adaptive(), radius=0.1, steps=3) == plain

    def through_a_part(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, Classifier)
        x = batch[0]
        return nn.functional.cross_entropy(
            model.head(model.attention(x, x, x, need_weights=False)[0].mean(1)), batch[1]
        )

    assert worst_case_sharpness(model, through_a_part, batches, geometry=Adaptive(), radius=0.1, steps=3) == plain


def test_a_loss_that_differs_without_gradients_is_measured_with_them(model: Classifier, batches: list[Batch]) -> None:
    """As some layers' fast paths do: what is compared with the start has to be computed as the start was."""

    def two_faced(model: torch.nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch) + (0.0 if torch.is_grad_enabled() else 1.0)

    honest, other = (
        worst_case_sharpness(model, loss, batches, geometry=Adaptive(), radius=1e-3, steps=3)
        for loss in (cross_entropy, two_faced)
    )
    assert other.mean == pytest.approx(honest.mean, rel=1e-9)
