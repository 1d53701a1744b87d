"""Where no representative of an orbit is unique, a measure depends on the point of the orbit: it says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Quotient
from tests.nets.small import net

MESSAGE = "no unique canonical point"


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The distance from targets that no rotation of the outputs leaves alone."""
    y = model(x)
    return (y - torch.arange(y.shape[-1]).to(y).square()).square().mean()


def measured(
    models: Iterable[nn.Module], loss: Callable[..., torch.Tensor], batch: Any
) -> tuple[list[float], list[bool]]:
    """Measure models; return whether each measure warned, too."""
    values, said = [], []
    for each in models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values.append(qm.gradient_norm(each, loss, [batch], geometry=Quotient("inv")).mean)
        said.append(any(MESSAGE in str(warning.message) for warning in caught))
    return values, said


@pytest.mark.parametrize("name", ["attn", "relu", "two", "gqa", "causal", "qknorm", "glu"])
def test_a_measure_is_constant_on_the_orbit_or_warns(name: str) -> None:
    model, x = net(name, True)
    found = qm.find_symmetries(model, x)
    there = found.transformed(model, log_scale=0.5, seed=4)
    values, said = measured((model, there), squared, x)
    assert any(said) or abs(values[1] / values[0] - 1) < 1e-7


class Gated(nn.Module):
    """Channels, each times a gate that looks at the means over tokens of all: they fill 7 of 8 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squeeze, self.excite = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.wide, self.head = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        gate = self.excite(self.squeeze(h.mean(1, keepdim=True)).relu()).sigmoid()
        return self.head(self.wide(h * gate).relu().mean(1))


def batch_norm(width: int, axes: int = 2) -> nn.Module:
    norm = nn.BatchNorm2d(width) if axes == 2 else nn.BatchNorm1d(width)
    norm.load_state_dict(norm.state_dict() | {"running_mean": torch.randn(width), "running_var": torch.rand(width) + 1})
    return norm


def pictures(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gates": (Gated, (5, 6)),
    "more channels than inputs": (
        lambda: nn.Sequential(nn.Linear(6, 8), batch_norm(8, 1), nn.Linear(8, 3)),
        (6,),
    ),
    "norms at the end": (
        lambda: pictures(nn.Conv2d(2, 6, 3), batch_norm(6), nn.ReLU(), nn.Conv2d(6, 8, 3), batch_norm(8)),
        (2, 6, 6),
    ),
    "functions at the end": (
        lambda: pictures(nn.Conv2d(2, 6, 3), batch_norm(6), nn.Conv2d(6, 8, 1), batch_norm(8), nn.ReLU()),
        (2, 6, 6),
    ),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_so_it_is_for_classifiers(name: str) -> None:
    torch.manual_seed(0)
    make, shape = CLASSIFIERS[name]
    model = make().double().eval()
    batch = torch.randn(4, *shape, dtype=torch.float64), torch.randint(3, (4,))
    found = qm.find_symmetries(model, batch, evaluate=qm.cross_entropy)
    values, said = measured((model, found.transformed(model, seed=1)), qm.cross_entropy, batch)
    constant = abs(values[1] / values[0] - 1) < 1e-9
    assert constant or any(said)
    assert constant or name != "functions at the end"
    assert not any(said) or name != "functions at the end"


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


@pytest.mark.xfail(strict=True, reason="where both maps of the only branch are 0, the finder takes them for none")
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
        qm.gradient_norm(model, squared, [x], geometry=Quotient("inv", verify="full"))
