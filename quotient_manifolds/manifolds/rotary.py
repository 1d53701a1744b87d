"""Represent pairs (g, k) of complex vectors under GL(1, C): the frequency planes of rotary attention."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length, product_gap
from quotient_manifolds.manifolds.arguments import require_element, require_nonzero, require_sizes
from quotient_manifolds.manifolds.fixed_rank import FixedRankQuotient
from quotient_manifolds.manifolds.fixed_rank.space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import Metric
from quotient_manifolds.manifolds.quotient import QuotientManifold
from quotient_manifolds.manifolds.reshaped import ReshapedSpace


@final
class RotaryQuotient(QuotientManifold):
    r"""Represent pairs of complex vectors g, k (n and m entries) up to (g / z, k conj(z)), z != 0: only g k^H matters.

    Points have shape (..., n + m, 2), g stacked on k, real and imaginary parts in the two columns. The rotations that a
    rotary embedding puts between a query and a key commute with these z alone; a frequency plane of a head is one point
    of the batch. Metrics, with |.| the Euclidean norm of all real and imaginary parts:

    - `inv`: Re eta_g^H zeta_g / |g|^2 + Re eta_k^H zeta_k / |k|^2,
    - `mix`: |k|^2 Re eta_g^H zeta_g + |g|^2 Re eta_k^H zeta_k,
    - a number t: weights |k|^(2t) |g|^(2t - 2) and |g|^(2t) |k|^(2t - 2).

    They are those of `FixedRankQuotient` for h = 1 on R^2n x R^2m, of which phases are isometries: geodesics are the
    same, and one more direction is vertical, (i g, i k). `eps > 0` is the paper's relaxation: |g|^2 + eps and
    |k|^2 + eps in place of the squares, invariant under phases only.

    The dimension of the quotient is 2 (n + m) - 2. The examples of the methods use `manifold = RotaryQuotient(1, 1)`
    and `x = torch.tensor([[3.0, 4.0], [5.0, 0.0]])`, that is g = 3 + 4i, k = 5.

    >>> manifold = RotaryQuotient(2, 1)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> manifold.action(torch.tensor(2j), x)  # g / 2i, -2i k
    tensor([[ 0.0000, -0.5000],
            [ 1.0000,  0.0000],
            [ 2.0000, -2.0000]])
    >>> manifold.same_orbit(x, manifold.action(torch.tensor(2j), x))
    tensor(True)
    """

    name = "RotaryQuotient"
    vertical_equation = "g^H xi_g w_g = w_k xi_k^H k (horizontal space; real and imaginary part)"

    def __init__(self, n: int, m: int, metric: Metric = "inv", eps: float = 0.0) -> None:
        super().__init__()
        require_sizes(n, m, eps)
        self._real = FixedRankQuotient(2 * n, 2 * m, metric, eps=eps)
        self.n, self.m, self.metric, self.t, self.eps = n, m, metric, self._real.t, self._real.eps

    def at(self, x: Tensor, *, dtype: torch.dtype | None = None) -> RotarySpace:
        """Return the horizontal space at x, factored in float64 and rounded to `dtype`, by default that of x.

        Raises ValueError for a wrong shape, non-finite entries, and g = 0 or k = 0.

        >>> manifold.at(x).norm(x)
        tensor(1.4142)
        """
        self._require_points(x=x)
        return RotarySpace(self._real.at(RotarySpace._there(x), dtype=dtype), self.n)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x, a point or a vector, to (g / A, k conj(A)). Shapes: A (...,) complex or real, not 0; x as it is.

        >>> manifold.action(torch.tensor(1j), x)  # g / i, k conj(i)
        tensor([[ 4., -3.],
                [ 0., -5.]])
        """
        g, k = self.split(x)
        require_element(A, x[..., 0, 0], (), complex_too=True)
        require_nonzero(A)
        A = A[..., None]
        return torch.view_as_real(torch.cat([g / A, k * A.conj()], dim=-1)).to(x.dtype)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return g (..., n) and k (..., m), complex, of a point or a tangent vector.

        >>> manifold.split(x)[0]
        tensor([3.+4.j])
        """
        self._require(x=x)
        c = torch.complex(x[..., 0], x[..., 1])
        return c[..., : self.n], c[..., self.n :]

    def balance(self, x: Tensor) -> Tensor:
        """Return the representative with |g| = |k|, whose entry of g of largest magnitude is real and positive.

        >>> manifold.same_orbit(manifold.balance(x), x)
        tensor(True)
        """
        self._require_points(x=x)
        g, k = self.split(x)
        peak = g.gather(-1, g.abs().argmax(dim=-1, keepdim=True))[..., 0]
        stretch = length(g, -1).sqrt() / length(k, -1).sqrt()
        return self.action(stretch * torch.sgn(peak), x)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare g k^H, with the accuracy |g| |k| that the factors allow."""
        (g, k), (p, q) = self.split(x.double()), self.split(y.double())
        size_g, size_k, size_p, size_q = (torch.linalg.vector_norm(c, dim=-1) for c in (g, k, p, q))
        size = torch.maximum(size_g * size_k, size_p * size_q)
        return product_gap(g[..., None], k[..., None].conj(), p[..., None], q[..., None].conj()), size

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) >= 2 and shape[-2:] == (self.n + self.m, 2):
            return None
        rows = self.n + self.m
        return f"RotaryQuotient({self.n}, {self.m}) must have shape (..., {rows}, 2), real and imaginary parts"

    def _fault(self, x: Tensor) -> str | None:
        zero = [(part == 0).all(dim=-1) for part in self.split(x)]
        if self.eps or not bool((zero[0] | zero[1]).any()):
            return None
        where = "g" if bool(zero[0].any()) else "k"
        return f"g != 0 and k != 0 fails: {where} is 0 in every entry; leave that plane out, or use eps > 0"

    def _key(self) -> tuple[Any, ...]:
        return (self.n, self.m, self.t, self.eps)

    def extra_repr(self) -> str:
        return f"n={self.n}, m={self.m}, metric={self.metric!r}" + (f", eps={self.eps:g}" if self.eps else "")


@final
class RotarySpace(ReshapedSpace):
    """Represent the horizontal space of the real pair (2n + 2m, 1), less the phase direction i (g, k).

    The phase is orthogonal to rescaling, so it is horizontal in the real pair, and one more projection takes it away.
    """

    def __init__(self, real: FixedRankSpace, n: int) -> None:
        super().__init__(real, real.point.dtype)
        self._n = n
        turned = self.coordinates(torch.stack([-self.point[..., 1], self.point[..., 0]], dim=-1))
        self._phase = turned / length(turned, self.dims, keepdim=True)

    @staticmethod
    def _there(x: Tensor) -> Tensor:
        return x.flatten(-2)[..., None]

    @staticmethod
    def _back(x: Tensor) -> Tensor:
        return x[..., 0].unflatten(-1, (-1, 2))

    @property
    def singular_values(self) -> Tensor:
        """Return |g| |k|, the singular value of g k^H. Shape (..., 1)."""
        return self._real.singular_values

    def project(self, z: Tensor) -> Tensor:
        real = self._back(self._real.project(self._there(z)))
        return real - self._phase * (self._phase * real).sum(dim=self.dims, keepdim=True)

    def from_balanced(self, z: Tensor) -> Tensor:
        g = torch.complex(self.point[..., : self._n, 0], self.point[..., : self._n, 1])
        peak = g.gather(-1, g.abs().argmax(dim=-1, keepdim=True))
        # The real pair's frame has a sign of its own, that of the largest of all real and imaginary parts.
        turn = torch.sgn(peak) * self._real.frame_sign[..., 0]
        return torch.view_as_real(torch.complex(z[..., 0], z[..., 1]) * turn).to(z.dtype)

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max(|xi_g| / |g|, |xi_k| / |k|)."""
        return self._real.relative_speed(self._there(z))

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, reached = self._real._exact(self._there(z))
        return self._back(y), reached
