"""Loss, gradient norm and Hessian trace of the scalar network over the plane of G and H, in four geometries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quotient_manifolds.manifolds import DiagonalQuotient
from studies.toy.network import Point, Scalar

GEOMETRIES = ("euclidean", "adaptive", "inv", "mix")
WINDOW = 3.0
RESOLUTION = 48  # even, so that no point of the grid has a weight of 0

Values = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Landscape:
    """Hold loss, and by geometry gradient norm and Hessian trace, at the same points."""

    loss: Values
    gradient_norm: dict[str, Values]
    hessian_trace: dict[str, Values]


@final
@dataclass(frozen=True)
class Grid:
    """Hold a landscape over a square: rows are H, columns G."""

    G: Values
    H: Values
    landscape: Landscape


def landscape(problem: Scalar, points: Any) -> Landscape:
    """Return the landscape at points (..., 2), by autograd and the package's manifolds.

    euclidean: |g| and tr(Hess) of the weights. adaptive: those of L(w + w z) in z at 0. inv, mix: the norm of the
    Riemannian gradient, and the Riemannian Hessian along the one horizontal direction there is.
    """
    place = torch.as_tensor(np.asarray(points, dtype=np.float64))
    w = place.reshape(-1, 2, 1)
    gradient = torch.func.vmap(torch.func.grad(problem.loss))(w)
    hessian = torch.func.vmap(torch.func.hessian(problem.loss))(w).reshape(-1, 2, 2)
    curvatures = hessian.diagonal(dim1=-2, dim2=-1)
    norms = {"euclidean": _length(gradient), "adaptive": _length(w * gradient)}
    traces = {"euclidean": curvatures.sum(-1), "adaptive": (w[..., 0] ** 2 * curvatures).sum(-1)}
    for metric in ("inv", "mix"):
        norms[metric], traces[metric] = _riemannian(problem, metric, w, gradient)

    def shaped(values: Tensor) -> Values:
        found: Values = values.reshape(place.shape[:-1]).numpy()
        return found

    loss = shaped(torch.func.vmap(problem.loss)(w))
    return Landscape(
        loss, {name: shaped(v) for name, v in norms.items()}, {name: shaped(v) for name, v in traces.items()}
    )


def at(problem: Scalar, point: Point) -> Landscape:
    """Return the landscape at one point, values of shape ()."""
    return landscape(problem, point)


def grid(problem: Scalar, *, window: float = WINDOW, resolution: int = RESOLUTION) -> Grid:
    """Return the landscape on |G|, |H| <= window. Raises ValueError for odd resolutions, which would meet the axes."""
    if resolution < 2 or resolution % 2:
        raise ValueError(f"resolution must be an even number, or a weight would be 0. Found {resolution}")
    axis = np.linspace(-window, window, resolution)
    return Grid(axis, axis, landscape(problem, np.stack(np.meshgrid(axis, axis), axis=-1)))


def _riemannian(problem: Scalar, metric: str, w: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    space = DiagonalQuotient(metric).at(w)
    unit = w / space.norm(w)[..., None, None]  # a point, taken as a vector, is horizontal
    product = space.hessian_product(lambda p: torch.func.vmap(problem.loss)(p).sum(), unit)
    return space.norm(space.gradient(gradient)), space.inner(unit, product)


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=(-2, -1))
