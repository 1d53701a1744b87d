"""The scalar network f(x) = G H x with squared error, and its orbit under GL(1) [paper, App. D]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn


class Point(NamedTuple):
    """Hold the two weights, each different from 0. The network sees only the product G H."""

    G: float
    H: float

    @property
    def product(self) -> float:
        return self.G * self.H

    def moved(self, a: float) -> Point:
        """Compute (G / a, H a): the same network elsewhere on its orbit."""
        return Point(self.G / a, self.H * a)

    @classmethod
    def balanced(cls, product: float) -> Point:
        """Return the point of the orbit G H = product with |G| = |H|."""
        root = abs(product) ** 0.5
        return cls(root, root if product > 0 else -root)


@final
@dataclass(frozen=True)
class Scalar:
    """Represent L(G, H) = sum_i (x_i G H - y_i)^2 = A p^2 - 2 B p + C with p = G H.

    A = sum x_i^2, B = sum x_i y_i, C = sum y_i^2. The minima are the orbit p = B / A.
    """

    x: tuple[float, ...] = (1.0,)
    y: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not any(self.x):
            raise ValueError(
                f"x and y must be of equal length, and one x other than 0. Found x = {self.x}, y = {self.y}"
            )

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Return a, B, C."""
        pairs = list(zip(self.x, self.y, strict=True))
        return sum(x * x for x, _ in pairs), sum(x * y for x, y in pairs), sum(y * y for _, y in pairs)

    @property
    def best(self) -> float:
        """Return the product B / A of the minima."""
        A, B, _ = self.coefficients
        return B / A

    def loss(self, point: Tensor) -> Tensor:
        """Compute L at a point (2, 1), G on top of H: the shape that DiagonalQuotient has."""
        x, y = torch.tensor([self.x, self.y], dtype=point.dtype)
        return ((x * point.prod() - y) ** 2).sum()

    def rise(self, product: float, reached: float) -> float:
        """Compute L where G H is `reached`, minus L where it is `product`."""
        A, B, _ = self.coefficients
        step = reached - product
        return A * step**2 + 2 * (A * product - B) * step


def network(point: Point) -> nn.Sequential:
    """Compute x -> H (G x): two Linears without bias, in float64."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double().eval()
    weights = torch.tensor(point, dtype=torch.float64)
    model.load_state_dict({f"{i}.weight": weight.reshape(1, 1) for i, weight in enumerate(weights)})
    return model


def batch(problem: Scalar) -> tuple[Tensor, Tensor]:
    """Return the data as the network takes them, (points, 1) each."""
    x, y = torch.tensor([problem.x, problem.y], dtype=torch.float64)[..., None]
    return x, y


def squared_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Compute sum_i (f(x_i) - y_i)^2."""
    return ((model(data[0]) - data[1]) ** 2).sum()
