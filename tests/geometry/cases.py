"""Geometries of every kind, a small model with pairs, and its tangent spaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from quotient_manifolds.geometry import (
    Adaptive,
    Euclidean,
    Geometry,
    Gradients,
    KnownSymmetries,
    Quotient,
    TangentSpace,
)
from quotient_manifolds.symmetries import Params, Scope, Symmetries
from studies.appendix_g import AdaptiveNorm
from tests.nets.net import shaken

QUOTIENTS: list[Geometry] = [
    Quotient(metric, order) for metric in ("inv", "mix") for order in ("first", "second", "exact")
]
NORM_OFF: list[Geometry] = [
    AdaptiveNorm(Quotient(metric, order)) for metric, order in (("inv", "first"), ("mix", "second"), ("inv", "exact"))
]
ELEMENTWISE: list[Geometry] = [
    geometry for norm in ("l2", "linf") for geometry in (Euclidean(norm), Adaptive(norm=norm), Adaptive(0.01, norm))
]
GEOMETRIES: list[Geometry] = [*ELEMENTWISE, *QUOTIENTS, *NORM_OFF]
KNOWN = KnownSymmetries()
by_name = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)


def encoder(dtype: torch.dtype = torch.float64, layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return shaken(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(dtype), 0.1)


def symmetries_of(model: nn.Module) -> Symmetries:
    """The symmetries of an encoder, found once for each architecture."""
    w = next(model.parameters())
    x = torch.randn(2, 4, 6, dtype=w.dtype, generator=generator())
    return KNOWN.elsewhere().found(model, nn.Module.__call__, x)


def space_at(geometry: Geometry, model: nn.Module) -> TangentSpace:
    """The tangent space at an encoder, of a quotient by its pairs: it stays where it is, but for needless biases."""
    if isinstance(geometry, AdaptiveNorm):
        return AdaptiveNorm(replace(geometry.quotient, symmetries=symmetries_of(model).within("paper"))).tangent_space(
            model
        )
    if isinstance(geometry, Quotient) and not isinstance(geometry.symmetries, Symmetries):
        scope: Scope = "paper" if geometry.symmetries == "paper" else "pairs"
        geometry = replace(geometry, symmetries=symmetries_of(model).within(scope))
    return geometry.tangent_space(model)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def pull_back(space: TangentSpace, z: Params, grads: Gradients) -> Params:
    """The gradient in z of loss(move(z)) from the loss's gradients at move(z), which are left alone."""
    return space.linearise(z)[1]({name: None if grad is None else grad.clone() for name, grad in grads.items()})
