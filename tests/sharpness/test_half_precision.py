"""Weights in half precision are measured as they are: the values of the same weights in single precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from quotient_manifolds import find_symmetries
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, Quotient
from quotient_manifolds.sharpness import (
    Loss,
    average_case_sharpness,
    cross_entropy,
    gradient_norm,
    hessian_trace,
    next_token_cross_entropy,
    worst_case_sharpness,
)

GEOMETRIES: list[Geometry] = [
    Euclidean(),
    Adaptive(),
    Adaptive(0.01),
    Euclidean("linf"),
    Quotient("inv"),
    Quotient("mix", "exact"),
    Quotient("mix", symmetries="pairs"),
    Quotient("inv", symmetries="paper"),
]


class Classifier(nn.Module):
    """An encoder layer, whose attention has pairs, biases and norms, and a head behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(x).mean(1)))


def made(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = Classifier().eval()
    with torch.no_grad():
        for w in model.parameters():
            w.add_(0.1 * torch.randn_like(w))
    inputs = torch.randn(6, 4, 12).to(dtype)
    return model.to(dtype), [(inputs, torch.arange(6) % 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_are_those_of_single_precision(geometry: Geometry, dtype: torch.dtype) -> None:
    model, batches = made(dtype)
    wide = copy.deepcopy(model).float(), [(inputs.float(), labels) for inputs, labels in batches]
    before = copy.deepcopy(model.state_dict())
    norm = getattr(geometry, "norm", "l2")
    radius = 1e-3 if norm == "linf" else 0.1
    measured = [
        (
            worst_case_sharpness(m, cross_entropy, b, geometry=geometry, radius=radius, steps=4).mean,
            average_case_sharpness(m, cross_entropy, b, geometry=geometry, radius=radius, samples=2).mean,
            gradient_norm(m, cross_entropy, b, geometry=geometry).mean,
            hessian_trace(m, cross_entropy, b, geometry=geometry, samples=2).mean if norm != "linf" else 0.0,
        )
        for m, b in ((model, batches), wide)
    ]
    assert measured[0] == measured[1]
    assert measured[0][0] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_weights_may_be_in_half_precision_beside_those_that_are_not() -> None:
    model, batches = made(torch.float32)
    model.encoder.requires_grad_(False)
    inputs = batches[0][0].bfloat16()
    low = copy.deepcopy(model)
    low.encoder.bfloat16()  # type: ignore[operator]

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = model.encoder(batch[0].to(model.encoder.linear1.weight.dtype)).mean(1).float()
        return nn.functional.cross_entropy(model.head(model.norm(hidden)), batch[1])

    rises = [
        worst_case_sharpness(m, loss, [(inputs, batches[0][1])], geometry="adaptive", radius=0.1, steps=4).mean
        for m in (model, low)
    ]
    assert rises[1] == pytest.approx(rises[0], rel=0.05)


def test_symmetries_are_those_of_single_precision() -> None:
    model, batches = made(torch.bfloat16)
    found = find_symmetries(model, batches[0], evaluate=cross_entropy)
    other = find_symmetries(
        copy.deepcopy(model).float(), (batches[0][0].float(), batches[0][1]), evaluate=cross_entropy
    )
    assert found.names == other.names
    assert found.pairs


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_weights_that_autocast_rounds_back_are_warned_of(half: torch.dtype) -> None:
    def autocast(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=half):
            return cross_entropy(model, batch)

    model, batches = made(torch.float32)
    low = copy.deepcopy(model).to(half)
    wide = copy.deepcopy(low).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, loss in ((model, cross_entropy), (wide, cross_entropy), (model, autocast)):
            gradient_norm(each, loss, batches, geometry="adaptive")
        only = copy.deepcopy(wide).requires_grad_(False)
        for w in (*only.norm.parameters(), only.head.bias):  # type: ignore[operator, union-attr]
            w.requires_grad_(True)
        gradient_norm(only, autocast, batches, geometry="adaptive")
    for each in (low, wide):
        with pytest.warns(UserWarning, match=r"Small moves of .*weight are lost in rounding.* without autocast"):
            gradient_norm(each, autocast, [(batches[0][0].float(), batches[0][1])], geometry="adaptive")


@pytest.mark.parametrize("loss", [cross_entropy, next_token_cross_entropy])
def test_losses_of_logits_in_half_precision_have_the_digits_of_float32(loss: Loss) -> None:
    model, tokens = nn.Embedding(5, 3).bfloat16(), torch.tensor([[0, 1, 2, 1]])
    value = loss(model, (tokens, tokens.clamp(max=2)))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(model.float(), (tokens, tokens.clamp(max=2))).item(), rel=1e-6)
