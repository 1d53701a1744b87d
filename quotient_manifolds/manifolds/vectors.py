"""Represent vectors up to positive scaling (spheres) and up to a common shift (flat spaces) [paper, Sec. 3.1]."""

from __future__ import annotations

import abc
import math
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length
from quotient_manifolds.manifolds.exact import circle
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, require_vector, some
from quotient_manifolds.manifolds.quotient import QuotientManifold


@final
class _VectorSpace(HorizontalSpace):
    """Hold coordinates z = eta / size; the part along a unit vector, the `line`, is vertical.

    Geodesics are straight lines, or great circles about 0 if the space is `curved`.
    """

    def __init__(self, x: Tensor, size: Tensor, line: Tensor, *, curved: bool) -> None:
        super().__init__(x, ndim=1)
        self._size, self._line, self._curved = size, line, curved

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, ndim=1)
        return eta / self._size

    def vector(self, z: Tensor) -> Tensor:
        return z * self._size

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad, ndim=1)
        return egrad * self._size

    def project(self, z: Tensor) -> Tensor:
        return z - (z * self._line).sum(dim=-1, keepdim=True) * self._line

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute |xi| / |w|, the angle that a great circle turns; 0 for straight lines."""
        speed = torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64)
        return speed if self._curved else torch.zeros_like(speed)

    def _step(self, z: Tensor, order: str) -> Tensor:
        xi, straight = self.vector(z), order == "first" or not self._curved
        return xi if straight else xi - (z * z).sum(dim=-1, keepdim=True) / 2 * self.point

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        squared = (z * z).sum(dim=-1, keepdim=True)
        cosine, sinc = circle(squared) if self._curved else (1.0, 1.0)
        return cosine * self.point + sinc * self.vector(z), torch.ones_like(squared[..., 0])


class _VectorQuotient(QuotientManifold, abc.ABC):
    """Represent vectors (..., d) with d >= 2 up to a group of one dimension."""

    ndim = 1

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) >= 1 and shape[-1] >= 2
        return None if fits else f"{self.name} must have shape (..., d) with d >= 2"


@final
class ScaleQuotient(_VectorQuotient):
    r"""Represent nonzero vectors w, up to a w for a > 0: only w / |w| matters, a point of the sphere S^{d-1}.

    Points have shape (..., d) with d >= 2: weights in front of a normalization without epsilon, e.g. all weights into
    one unit of batch normalization. The metric is <eta, zeta> / |w|^2 and horizontal vectors are orthogonal to w, so
    the geodesics are great circles at constant |w|, defined for all times. The dimension of the quotient is d - 1.

    >>> manifold, w = ScaleQuotient(), torch.tensor([3.0, 4.0])
    >>> manifold.same_orbit(w, manifold.action(torch.tensor(7.0), w))
    tensor(True)
    >>> manifold.dist(w, torch.tensor([-8.0, 6.0])) / torch.pi
    tensor(0.5000)
    """

    name = "ScaleQuotient"
    vertical_equation = "w^T xi = 0 (horizontal space of positive scaling)"

    def _space(self, x: Tensor, dtype: torch.dtype) -> HorizontalSpace:
        size = length(x, -1, keepdim=True)
        return _VectorSpace(*(each.to(dtype) for each in (x, size, x / size)), curved=True)

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        if some(A <= 0):
            raise ValueError("A must be positive, an element of the group. Found 0 or a negative number")
        return A[..., None] * x

    def _balanced(self, x: Tensor) -> Tensor:
        return x / length(x, -1, keepdim=True)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose great circle reaches the direction of y at t = 1.

        Its norm, the angle, is 2 atan2(|u - v|, |u + v|) for the directions u and v; unlike the cosine, this is
        accurate for small angles. Raises ValueError for opposite directions, as every half circle is a shortest path.

        >>> ScaleQuotient().logmap(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 5.0])) * 2 / torch.pi
        tensor([0., 2.])
        """
        self._require_points(x=x, y=y)
        u, v = self.balance(x), self.balance(y)
        apart, together = (torch.linalg.vector_norm(w, dim=-1, keepdim=True) for w in (u - v, u + v))
        if some(together <= math.sqrt(torch.finfo(x.dtype).eps)):
            raise ValueError(
                "x and y must not point in opposite directions, where the shortest path is not unique. "
                "Found a pair at angle pi: move one of them a little"
            )
        towards = v - u - ((v - u) * u).sum(dim=-1, keepdim=True) * u  # of length sin(angle)
        return length(x, -1, keepdim=True) * towards / torch.sinc(2 * torch.atan2(apart, together) / math.pi)

    def _fault(self, x: Tensor) -> str | None:
        zeros = int((x == 0).all(dim=-1).sum())
        return f"w != 0 fails: {zeros} vectors are 0" if zeros else None


@final
class TranslationQuotient(_VectorQuotient):
    r"""Represent vectors b, up to b + c (1, ..., 1) for c in R: only b - mean(b) matters.

    Points have shape (..., d) with d >= 2: the biases of a softmax, which is invariant under a common shift. The metric
    is Euclidean, horizontal vectors have mean 0 and the geodesics are straight lines. The dimension of the quotient is
    d - 1.

    >>> manifold, b = TranslationQuotient(), torch.tensor([1.0, 2.0, 6.0])
    >>> manifold.same_orbit(b, manifold.action(torch.tensor(7.0), b))
    tensor(True)
    """

    name = "TranslationQuotient"
    vertical_equation = "sum_i xi_i = 0 (horizontal space of translation)"

    def _space(self, x: Tensor, dtype: torch.dtype) -> HorizontalSpace:
        line = torch.full_like(x, x.shape[-1] ** -0.5, dtype=dtype)
        return _VectorSpace(x.to(dtype), torch.ones_like(line[..., :1]), line, curved=False)

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        return x + A[..., None]

    def _balanced(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare centered vectors, with the accuracy that the entries before centering allow."""
        return length(self.balance(y - x), -1), torch.maximum(length(x, -1), length(y, -1))

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y - x - mean(y - x): the horizontal vector at x whose line reaches the orbit of y at t = 1.

        >>> TranslationQuotient().logmap(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 7.0]))
        tensor([-3.,  3.])
        """
        self._require_points(x=x, y=y)
        return self.balance(y - x)
