"""Weights in half precision are measured as they are: the values of the same weights in single precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, KnownSymmetries, Quotient
from quotient_manifolds.sharpness import AverageCase, GradientNorm, HessianTrace, Measure, WorstCase
from quotient_manifolds.sharpness.losses import logits_of
from tests.nets.net import shaken

GEOMETRIES: list[Geometry] = [
    Euclidean(),
    Adaptive(),
    Adaptive(0.01),
    Euclidean("linf"),
    Quotient("inv"),
    Quotient("mix", symmetries="pairs"),
    Quotient("inv", symmetries="paper"),
]


def made(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """An encoder layer, whose attention has pairs, biases and norms, and a head behind a batch norm."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = shaken(nn.Sequential(encoder, nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 3)), 0.1)
    inputs = torch.randn(6, 4, 12).to(dtype)
    return model.to(dtype), [(inputs, torch.arange(6) % 3)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_are_those_of_single_precision(geometry: Geometry) -> None:
    model, batches = made(torch.float16 if isinstance(geometry, Adaptive) else torch.bfloat16)
    wide = copy.deepcopy(model).float(), [(inputs.float(), labels) for inputs, labels in batches]
    before = copy.deepcopy(model.state_dict())
    norm = getattr(geometry, "norm", "l2")
    radius = 1e-3 if norm == "linf" else 0.1
    measures: list[Measure] = [WorstCase(geometry, radius, steps=4), AverageCase(geometry, radius, samples=2)]
    measures += [GradientNorm(geometry), *([HessianTrace(geometry, samples=2)] if norm != "linf" else [])]
    measured = [
        [measure.of(m, qm.cross_entropy, b, known).mean for measure in measures]
        for m, b, known in ((model, batches, KnownSymmetries()), (*wide, KnownSymmetries()))
    ]
    assert measured[0] == measured[1]
    assert measured[0][0] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_weights_that_autocast_rounds_back_are_warned_of(half: torch.dtype) -> None:
    def autocast(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=half):
            return qm.cross_entropy(model, batch)

    model, batches = made(torch.float32)
    low = copy.deepcopy(model).to(half)
    wide = copy.deepcopy(low).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, loss in ((model, qm.cross_entropy), (wide, qm.cross_entropy), (model, autocast)):
            qm.gradient_norm(each, loss, batches, geometry="adaptive")
        only = copy.deepcopy(wide).requires_grad_(False)
        for w in (*only[2].parameters(), only[3].bias):
            w.requires_grad_(True)
        qm.gradient_norm(only, autocast, batches, geometry="adaptive")
    for each in (low, wide):
        with pytest.warns(UserWarning, match=r"Small changes of .*weight are lost in rounding.* without autocast"):
            qm.gradient_norm(each, autocast, [(batches[0][0].float(), batches[0][1])], geometry="adaptive")


class Narrow(nn.Module):
    """Compute in half precision, whatever the weights are in."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class Output(nn.Module):
    """Return logits in a form of its own."""

    def __init__(self, inner: nn.Module, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.inner(x))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x, "more"), lambda x: {"ids": torch.arange(2), "logits": x}])
def test_rounding_is_that_of_the_outputs_of_the_model(form: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)).eval()
    batches = [(torch.randn(64, 6), torch.randint(3, (64,)))]
    asked: dict[str, Any] = {"geometry": "euclidean", "radius": 1e-3, "steps": 3}
    loss = qm.cross_entropy

    def around(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, batch)

    narrow = Output(Narrow(plain), form).eval()
    with pytest.warns(qm.sharpness.RoundingWarning, match="less than 100"):
        qm.worst_case_sharpness(narrow, loss, batches, **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qm.sharpness.RoundingWarning)
        qm.worst_case_sharpness(Output(narrow, lambda output: logits_of(output).float()).eval(), loss, batches, **asked)
        for each, measured in ((plain, loss), (plain, around)):
            qm.worst_case_sharpness(each, measured, batches, **asked)


def test_matrices_that_are_mostly_zero_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 6), torch.arange(8) % 3)]
    diagonal, sparse = nn.Linear(6, 6), nn.Linear(6, 3)
    nn.init.eye_(diagonal.weight)
    with torch.no_grad():
        sparse.weight.bernoulli_(0.3)
    qm.gradient_norm(Narrow(nn.Sequential(diagonal, sparse)).eval(), qm.cross_entropy, batches, geometry="euclidean")
    assert not [each for each in recwarn if "Small moves" in str(each.message)]


@pytest.mark.parametrize("loss", [qm.cross_entropy, qm.next_token_cross_entropy])
def test_losses_of_logits_in_half_precision_have_the_digits_of_float32(loss: qm.sharpness.Loss) -> None:
    model, tokens = nn.Embedding(5, 3).bfloat16(), torch.tensor([[0, 1, 2, 1]])
    value = loss(model, (tokens, tokens.clamp(max=2)))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(model.float(), (tokens, tokens.clamp(max=2))).item(), rel=1e-6)
