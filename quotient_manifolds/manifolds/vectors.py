"""Represent vectors up to positive scaling (spheres) and up to a common shift (flat spaces) [paper, Sec. 3.1]."""

from __future__ import annotations

import abc
import math
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length
from quotient_manifolds.manifolds.arguments import require_element, require_vector, some
from quotient_manifolds.manifolds.horizontal import HorizontalSpace
from quotient_manifolds.manifolds.quotient import QuotientManifold


class _VectorQuotient(QuotientManifold, abc.ABC):
    """Represent vectors (..., d) with d >= 2 up to a group of one dimension."""

    ndim = 1

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) >= 1 and shape[-1] >= 2
        return None if fits else f"{self.name} must have shape (..., d) with d >= 2"


@final
class ScaleQuotient(_VectorQuotient):
    r"""Represent nonzero vectors w, up to a w for a > 0: only w / |w| matters, a point of the sphere S^{d-1}.

    Points have shape (..., d) with d >= 2: weights in front of a normalisation without epsilon, e.g. all weights into
    one unit of batch normalisation. The metric is <eta, zeta> / |w|^2 and horizontal vectors are orthogonal to w, so
    the geodesics are great circles at constant |w|, traversed for ever. The dimension of the quotient is d - 1.

    >>> manifold, w = ScaleQuotient(), torch.tensor([3.0, 4.0])
    >>> manifold.same_orbit(w, manifold.action(torch.tensor(7.0), w))
    tensor(True)
    >>> manifold.expmap(w, torch.pi / 2 * torch.tensor([-4.0, 3.0]))
    tensor([-4.0000,  3.0000])
    >>> manifold.dist(w, torch.tensor([-8.0, 6.0])) / torch.pi
    tensor(0.5000)
    """

    name = "ScaleQuotient"
    vertical_equation = "w^T xi = 0 (horizontal space of positive scaling)"

    def at(self, x: Tensor) -> HorizontalSpace:
        """Return the horizontal space at x. Raises ValueError for a wrong shape, the zero vector or NaN.

        >>> ScaleQuotient().at(torch.tensor([3.0, 4.0])).norm(torch.tensor([-4.0, 3.0]))
        tensor(1.)
        """
        self._require_points(x=x)
        return _ScaleSpace(x)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x to a w. Shapes: A (...) positive, x (..., d), a point or a tangent vector.

        >>> ScaleQuotient().action(torch.tensor([2.0, 3.0]), torch.ones(2, 2))
        tensor([[2., 2.],
                [3., 3.]])
        """
        self._require(x=x)
        require_element(A, x[..., 0], ())
        if some(A <= 0):
            raise ValueError("A must be positive, an element of the group. Found 0 or a negative number")
        return A[..., None] * x

    def balance(self, x: Tensor) -> Tensor:
        """Return w / |w|: the representative of length 1.

        >>> ScaleQuotient().balance(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
        """
        self._require_points(x=x)
        return x / length(x, -1, keepdim=True)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare directions."""
        return torch.linalg.vector_norm(self.balance(x) - self.balance(y), dim=-1), 1.0

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute the angle between x and y, in [0, pi]. Shape (...,), or (..., 1) with `keepdim`.

        2 atan2(|u - v|, |u + v|) for the directions u and v: accurate at small angles, where the cosine is not.

        >>> ScaleQuotient().dist(torch.tensor([1.0, 0.0]), torch.tensor([5.0, 5.0])) / torch.pi
        tensor(0.2500)
        """
        self._require_points(x=x, y=y)
        u, v = self.balance(x), self.balance(y)
        apart, together = (torch.linalg.vector_norm(w, dim=-1, keepdim=keepdim) for w in (u - v, u + v))
        return 2 * torch.atan2(apart, together)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose great circle reaches the direction of y at t = 1; its norm is `dist`.

        Raises ValueError for opposite directions, between which every half circle is a shortest path.

        >>> ScaleQuotient().logmap(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 5.0])) * 2 / torch.pi
        tensor([0., 2.])
        """
        angle = self.dist(x, y, keepdim=True)
        u, v = self.balance(x), self.balance(y)
        if some(torch.linalg.vector_norm(u + v, dim=-1) <= math.sqrt(torch.finfo(x.dtype).eps)):
            raise ValueError(
                "x and y must not point in opposite directions, where the shortest path is not unique. "
                "Found a pair at angle pi: move one of them a little"
            )
        towards = v - u - ((v - u) * u).sum(dim=-1, keepdim=True) * u  # of length sin(angle)
        return length(x, -1, keepdim=True) * towards / torch.sinc(angle / math.pi)

    def _fault(self, x: Tensor) -> str | None:
        zeros = int((x == 0).all(dim=-1).sum())
        return f"w != 0 fails: {zeros} vectors are 0" if zeros else None


@final
class _ScaleSpace(HorizontalSpace):
    """Hold coordinates z = eta / |w|."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, ndim=1)
        self._length = length(x, -1, keepdim=True)
        self._direction = x / self._length

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, ndim=1)
        return eta / self._length

    def vector(self, z: Tensor) -> Tensor:
        return z * self._length

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad, ndim=1)
        return egrad * self._length

    def project(self, z: Tensor) -> Tensor:
        return z - (z * self._direction).sum(dim=-1, keepdim=True) * self._direction

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute |xi| / |w|, the angle that the great circle turns."""
        return torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64)

    def _step(self, z: Tensor, order: str) -> Tensor:
        xi = self.vector(z)
        return xi if order == "first" else xi - (z * z).sum(dim=-1, keepdim=True) / 2 * self.point

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        squared = (z * z).sum(dim=-1, keepdim=True)
        cosine, sinc = circle(squared)
        return cosine * self.point + sinc * self.vector(z), torch.ones_like(squared[..., 0])


def circle(squared: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos(a) and sin(a) / a from a^2, smooth at a = 0."""
    small = squared < 1e-4
    angle = torch.where(small, 1.0, squared).sqrt()
    cosine = torch.where(small, 1 - squared / 2 * (1 - squared / 12 * (1 - squared / 30)), angle.cos())
    return cosine, torch.where(small, 1 - squared / 6 * (1 - squared / 20 * (1 - squared / 42)), angle.sin() / angle)


@final
class TranslationQuotient(_VectorQuotient):
    r"""Represent vectors b, up to b + c (1, ..., 1) for c in R: only b - mean(b) matters.

    Points have shape (..., d) with d >= 2: the biases of a softmax, which does not see a common shift. The metric is
    the Euclidean one, horizontal vectors have mean 0 and the geodesics are straight lines. The dimension of the
    quotient is d - 1.

    >>> manifold, b = TranslationQuotient(), torch.tensor([1.0, 2.0, 6.0])
    >>> manifold.same_orbit(b, manifold.action(torch.tensor(7.0), b))
    tensor(True)
    >>> manifold.proju(b, torch.tensor([3.0, 0.0, 0.0]))
    tensor([ 2., -1., -1.])
    """

    name = "TranslationQuotient"
    vertical_equation = "sum_i xi_i = 0 (horizontal space of translation)"

    def at(self, x: Tensor) -> HorizontalSpace:
        """Return the horizontal space at x, the same everywhere. Raises ValueError for a wrong shape or NaN.

        >>> TranslationQuotient().at(torch.tensor([3.0, 4.0])).norm(torch.tensor([-4.0, 3.0]))
        tensor(5.)
        """
        self._require_points(x=x)
        return _TranslationSpace(x, ndim=1)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x to b + c (1, ..., 1). Shapes: A (...), x (..., d), a point; tangent vectors do not change.

        >>> TranslationQuotient().action(torch.tensor([2.0, 3.0]), torch.ones(2, 2))
        tensor([[3., 3.],
                [4., 4.]])
        """
        self._require(x=x)
        require_element(A, x[..., 0], ())
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

    def _fault(self, x: Tensor) -> str | None:
        return None


@final
class _TranslationSpace(HorizontalSpace):
    """Hold coordinates z = eta."""

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta, ndim=1)
        return eta

    def vector(self, z: Tensor) -> Tensor:
        return z

    def covector(self, egrad: Tensor) -> Tensor:
        return self.coordinates(egrad)

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
