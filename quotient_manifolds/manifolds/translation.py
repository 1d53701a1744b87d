"""Represent vectors up to a common shift: flat spaces."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length
from quotient_manifolds.manifolds.arguments import require_numbers, require_vector
from quotient_manifolds.manifolds.horizontal import HorizontalSpace
from quotient_manifolds.manifolds.quotient import QuotientManifold


@final
class TranslationQuotient(QuotientManifold):
    r"""Represent vectors b, up to b + c (1, ..., 1) for c in R: only b - mean(b) matters.

    Points have shape (..., d) with d >= 2: the biases of a softmax, which does not see a common shift. The metric is
    the Euclidean one, horizontal vectors have mean 0 and the geodesics are straight lines. The dimension of the
    quotient is d - 1. Source: translation invariance in [paper, Sec. 3.1].

    >>> manifold = TranslationQuotient()
    >>> b = torch.tensor([1.0, 2.0, 6.0])
    >>> manifold.same_orbit(b, manifold.action(torch.tensor(7.0), b))
    tensor(True)
    >>> manifold.proju(b, torch.tensor([3.0, 0.0, 0.0]))
    tensor([ 2., -1., -1.])
    """

    name = "TranslationQuotient"
    ndim = 1
    vertical_equation = "sum_i xi_i = 0 (horizontal space of translation)"

    def at(self, x: Tensor) -> HorizontalSpace:
        """Return the horizontal space at x, the same everywhere; ValueError for a wrong shape or NaN.

        >>> TranslationQuotient().at(torch.tensor([3.0, 4.0])).norm(torch.tensor([-4.0, 3.0]))
        tensor(5.)
        """
        self._require_points(x=x)
        return _TranslationSpace(x)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x to b + c (1, ..., 1). Shapes: A (...), x (..., d), a point; tangent vectors do not change.

        >>> TranslationQuotient().action(torch.tensor([2.0, 3.0]), torch.ones(2, 2))
        tensor([[3., 3.],
                [4., 4.]])
        """
        self._require(x=x)
        require_numbers(A, x[..., 0])
        return x + A[..., None]

    def balance(self, x: Tensor) -> Tensor:
        """Return b - mean(b): the representative of mean 0.

        >>> TranslationQuotient().balance(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-2., -1.,  3.])
        """
        self._require(x=x)
        return _centred(x)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare centred vectors, with the accuracy that the entries before centring allow."""
        return length(_centred(y - x), -1), torch.maximum(length(x, -1), length(y, -1))

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y - x - mean(y - x): the horizontal vector at x whose line reaches the orbit of y at t = 1.

        >>> TranslationQuotient().logmap(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
        tensor([-3.,  3.])
        """
        self._require_points(x=x, y=y)
        return _centred(y - x)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) >= 1 and shape[-1] >= 2
        return None if fits else "TranslationQuotient should have shape (..., d) with d >= 2"

    def _fault(self, x: Tensor) -> str | None:
        return None


@final
class _TranslationSpace(HorizontalSpace):
    """Hold coordinates z = eta."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, ndim=1)

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, ndim=1)
        return eta

    def vector(self, z: Tensor) -> Tensor:
        return z

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad, ndim=1)
        return egrad

    def project(self, z: Tensor) -> Tensor:
        return _centred(z)

    def relative_speed(self, z: Tensor) -> Tensor:
        """Return 0: geodesics are straight lines, and no polynomial is far from them."""
        return z.new_zeros(z.shape[:-1], dtype=torch.float64)

    def _step(self, z: Tensor, order: str) -> Tensor:
        return z

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.point + z, torch.ones(z.shape[:-1], dtype=z.dtype, device=z.device)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=-1, keepdim=True)
