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
    """The distance from targets that no rotation of the outputs leaves alone."""
    y = model(x)
    return (y - torch.arange(y.shape[-1]).to(y).square()).square().mean()


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


class Narrow(nn.Module):
    """A stream of 8 channels that what it reads fills in 3 of them: two axes of its tables have one variance, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 8, bias=False), nn.RMSNorm(8)
        self.up, self.down, self.head = (nn.Linear(n, m, bias=False) for n, m in ((8, 16), (16, 8), (8, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(self.norm(x))


def test_a_rotation_without_canonical_point_is_found_and_a_measure_warns() -> None:
    torch.manual_seed(0)
    model, x = qm.symmetries.make_generic(Narrow()).double(), torch.randn(9, 3).double()
    with torch.no_grad():
        model.up.weight.zero_()
        model.down.weight.zero_()
    found = qm.find_symmetries(model, x)
    assert any(each.kind == "residual rotation" for each in found.reparameterizations)
    torch.testing.assert_close(found.transformed(model, seed=1)(x), model(x))
    with pytest.warns(UserWarning, match=MESSAGE):
        qm.gradient_norm(model, squared, [x], geometry=Quotient("inv", verify="all"))
