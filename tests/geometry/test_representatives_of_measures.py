"""Where no representative of an orbit is unique, a measure depends on the point of the orbit: it says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Quotient
from tests.symmetries.nets import net

MESSAGE = "no unique canonical point"


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("name", ["attn", "relu", "two", "gqa", "causal", "qknorm", "glu"])
def test_a_measure_is_constant_on_the_orbit_or_warns(name: str) -> None:
    model, x = net(name, True)
    found = qm.find_symmetries(model, x)
    there = found.transformed(model, log_scale=0.5, seed=4)
    values, said = [], []
    for each in (model, there):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values.append(qm.gradient_norm(each, squared, [x], geometry=Quotient("inv")).mean)
        said.append(any(MESSAGE in str(warning.message) for warning in caught))
    assert any(said) or abs(values[1] / values[0] - 1) < 1e-7


def test_a_model_with_norms_has_one() -> None:
    model, x = net("encoder", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qm.gradient_norm(model, squared, [x], geometry=Quotient("inv"))
