"""Represent quotients that reduce to the fixed-rank quotient with h = 1: pairs of numbers, pairs of complex vectors.

Reshaped, a point is one or several real pairs (G, H) of one column; metric and geodesics are the same.
"""

from __future__ import annotations

import abc
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.derivatives import values
from quotient_manifolds.linalg import length, product_gap
from quotient_manifolds.manifolds.fixed_rank import FixedRankQuotient
from quotient_manifolds.manifolds.fixed_rank_space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, Metric, require_sizes, require_vector, some
from quotient_manifolds.manifolds.quotient import QuotientManifold


class _ColumnSpace(HorizontalSpace, abc.ABC):
    """Hold the horizontal space of real pairs of one column; points and coordinates are reshaped to and from them.

    `_there` may raise the precision; results have the precision of the arguments.
    """

    def __init__(self, real: FixedRankSpace, dtype: torch.dtype) -> None:
        super().__init__(self._back(real.point).to(dtype))
        self._real = real

    @staticmethod
    @abc.abstractmethod
    def _there(x: Tensor) -> Tensor:
        """Return a point or vector in the form of the real pairs, (..., rows, 1)."""

    @staticmethod
    @abc.abstractmethod
    def _back(x: Tensor) -> Tensor:
        """Return a real pair in the form of this quotient; the inverse of `_there`."""

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        return self._back(self._real.coordinates(self._there(eta))).to(eta.dtype)

    def vector(self, z: Tensor) -> Tensor:
        return self._back(self._real.vector(self._there(z))).to(z.dtype)

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        return self._back(self._real.covector(self._there(egrad))).to(egrad.dtype)

    def project(self, z: Tensor) -> Tensor:
        return self._back(self._real.project(self._there(z))).to(z.dtype)

    def relative_speed(self, z: Tensor) -> Tensor:
        return self._real.relative_speed(self._there(z))

    def _step(self, z: Tensor, order: str) -> Tensor:
        return self._back(self._real._step(self._there(z), order)).to(z.dtype)


@final
class DiagonalQuotient(QuotientManifold):
    r"""Represent pairs (u, v) of vectors without zeros, up to (u / a, v a) for a in GL(1)^d: only beta = u v matters.

    Points have shape (..., 2, d), u on top of v. Metrics [paper, Eq. 5, 6]:

    - `inv`: sum_i eta_u zeta_u / u^2 + eta_v zeta_v / v^2,
    - `mix`: sum_i eta_u zeta_u v^2 + eta_v zeta_v u^2,
    - a number t: sum_i |u v|^2t (eta_u zeta_u / u^2 + eta_v zeta_v / v^2), with `inv` at t = 0 and `mix` at t = 1.

    In each coordinate these are the metrics of `FixedRankQuotient` for n = m = h = 1. For all of them, horizontal means
    eta_u / u = eta_v / v. Geodesics and logarithm have closed forms, and so does the distance,
    | |beta_y|^t - |beta_x|^t | / (|t| sqrt 2), or |log(beta_y / beta_x)| / sqrt 2 if t = 0, in l2 over the coordinates.
    `balance` gives (sqrt|beta|, sign(beta) sqrt|beta|). Examples use `x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])`.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> DiagonalQuotient("inv").same_orbit(x, torch.tensor([[2.0, 1.0], [1.5, 8.0]]))
    tensor(True)
    """

    name = "DiagonalQuotient"
    settings = ("metric",)
    vertical_equation = "xi_u / u = xi_v / v (horizontal space, [paper, Sec. 5.1])"

    def __init__(self, metric: Metric = "inv") -> None:
        super().__init__()
        self._real = FixedRankQuotient(1, 1, metric)
        self.metric, self.t = metric, self._real.t

    def _space(self, x: Tensor, dtype: torch.dtype) -> DiagonalSpace:
        return DiagonalSpace(self._real._space(DiagonalSpace._there(x), torch.float64), dtype)

    def _element(self, x: Tensor) -> tuple[int, ...]:
        return x.shape[-1:]

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        return torch.stack([x[..., 0, :] / A, x[..., 1, :] * A], dim=-2)

    def _balanced(self, x: Tensor) -> Tensor:
        beta = x.double().prod(dim=-2)
        root = beta.abs().sqrt()
        return torch.stack([root, beta.sign() * root], dim=-2).to(x.dtype)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare u v, coordinate by coordinate."""
        beta, other = x.double().prod(dim=-2), y.double().prod(dim=-2)
        return torch.where(beta == other, 0.0, (beta - other).abs() / beta.abs()).amax(dim=-1), 1.0

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose geodesic reaches the orbit of y at t = 1.

        It is b x with b = ((beta_y / beta_x)^t - 1) / 2t, or b = log(beta_y / beta_x) / 2 if t = 0. Raises ValueError
        if signs differ.

        >>> DiagonalQuotient("mix").logmap(x, 2 * x)
        tensor([[ 1.5000,  3.0000],
                [ 6.0000, 12.0000]])
        """
        self._require_points(x=x, y=y)
        ratios = y.double() / x.double()  # products leave the range of float32
        apart = ratios.sign().prod(dim=-2, keepdim=True) != 1
        if some(apart):
            raise ValueError(
                "the products u v of both points must have the same signs, since no geodesic crosses 0. "
                f"Found {int(values(apart).sum())} coordinates of opposite sign"
            )
        log = ratios.abs().log().sum(dim=-2, keepdim=True)
        b = log / 2 if self.t == 0 else torch.expm1(self.t * log) / (2 * self.t)
        return (b * x).to(x.dtype)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) >= 2 and shape[-2] == 2 and shape[-1] > 0
        return None if fits else "DiagonalQuotient must have shape (..., 2, d)"

    def _fault(self, x: Tensor) -> str | None:
        zeros = int((x == 0).sum())
        return f"u_i != 0 and v_i != 0 fails: {zeros} entries are 0" if zeros else None


@final
class DiagonalSpace(_ColumnSpace):
    """Represent the horizontal space of d pairs of one row each, (d, 2, 1): in float64, which holds |u v|^t."""

    @staticmethod
    def _there(x: Tensor) -> Tensor:
        return x.double().mT[..., None]

    @staticmethod
    def _back(x: Tensor) -> Tensor:
        return x[..., 0].mT

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max |b_i|, where x moves to (1 + b) x."""
        return super().relative_speed(z).amax(dim=-1)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        t, b = self._real._t, self._back(self._real.vector(self._there(z))) / self.point
        if t == 0:
            return (self.point * b.exp()).to(z.dtype), torch.ones(b.shape[:-2], dtype=z.dtype, device=z.device)
        # |beta|^t moves on a line: x (1 + 2 t b)^(1 / 2t). Each coordinate is a separate geodesic, and ends at 0.
        floor = torch.finfo(z.dtype).eps ** 0.5
        change = 2 * t * b
        reached = ((floor - 1) / change).where(change < floor - 1, 1.0).amin(dim=(-2, -1))
        stretch = (torch.log1p(change.clamp_min(floor - 1)) / (2 * t)).exp()
        return (self.point * stretch).to(z.dtype), reached.to(z.dtype)


@final
class RotaryQuotient(QuotientManifold):
    r"""Represent pairs of complex vectors g, k (n and m entries) up to (g / z, k conj(z)), z != 0: only g k^H matters.

    Points have shape (..., n + m, 2), g stacked on k, real and imaginary parts in the two columns. The rotations that a
    rotary embedding puts between a query and a key commute only with these z; a frequency plane of a head is one point
    of the batch. Metrics: |k|^(2t) |g|^(2t - 2) Re eta_g^H zeta_g + |g|^(2t) |k|^(2t - 2) Re eta_k^H zeta_k with |.|
    the Euclidean norm of all real and imaginary parts, t = 0 for `inv` and t = 1 for `mix`. These are the metrics of
    `FixedRankQuotient` for h = 1 on R^2n x R^2m. Phases are isometries, so geodesics are the same, and (i g, i k) is
    one more vertical direction. `eps > 0` is the paper's relaxation: |g|^2 + eps and |k|^2 + eps replace the squares,
    and the metric is invariant under phases only.

    `balance` gives the representative with |g| = |k|, whose entry of g of largest magnitude is real and positive. The
    dimension of the quotient is 2 (n + m) - 2. The examples of the methods use `manifold = RotaryQuotient(1, 1)`
    and `x = torch.tensor([[3.0, 4.0], [5.0, 0.0]])`, that is g = 3 + 4i, k = 5.

    >>> manifold.action(torch.tensor(1j), x)  # g / i, k conj(i)
    tensor([[ 4., -3.],
            [ 0., -5.]])
    """

    name = "RotaryQuotient"
    settings = ("n", "m", "metric", "eps")
    complex_group = True
    vertical_equation = "g^H xi_g w_g = w_k xi_k^H k (horizontal space; real and imaginary part)"

    def __init__(self, n: int, m: int, metric: Metric = "inv", eps: float = 0.0) -> None:
        super().__init__()
        require_sizes(n, m, eps)
        self._real = FixedRankQuotient(2 * n, 2 * m, metric, eps=eps)
        self.n, self.m, self.metric, self.t, self.eps = n, m, metric, self._real.t, self._real.eps

    def _space(self, x: Tensor, dtype: torch.dtype) -> RotarySpace:
        return RotarySpace(self._real._space(RotarySpace._there(x), dtype), self.n)

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        (g, k), A = self.split(x), A[..., None]
        return torch.view_as_real(torch.cat([g / A, k * A.conj()], dim=-1)).to(x.dtype)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return g (..., n) and k (..., m), complex, of a point or a tangent vector.

        >>> manifold.split(x)[0]
        tensor([3.+4.j])
        """
        self._require(x=x)
        c = torch.complex(x[..., 0], x[..., 1])
        return c[..., : self.n], c[..., self.n :]

    def _balanced(self, x: Tensor) -> Tensor:
        g, k = self.split(x)
        peak = g.gather(-1, g.abs().argmax(dim=-1, keepdim=True))[..., 0]
        stretch = length(g, -1).sqrt() / length(k, -1).sqrt()
        return self._act(stretch * torch.sgn(peak), x)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare g k^H, with the accuracy |g| |k| that the factors allow."""
        (g, k), (p, q) = self.split(x.double()), self.split(y.double())
        size_g, size_k, size_p, size_q = (torch.linalg.vector_norm(c, dim=-1) for c in (g, k, p, q))
        size = torch.maximum(size_g * size_k, size_p * size_q)
        return product_gap(g[..., None], k[..., None].conj(), p[..., None], q[..., None].conj()), size

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) >= 2 and shape[-2:] == (self.n + self.m, 2):
            return None
        return f"RotaryQuotient({self.n}, {self.m}) must have shape (..., {self.n + self.m}, 2), real and imaginary"

    def _fault(self, x: Tensor) -> str | None:
        zero = [bool((part == 0).all(dim=-1).any()) for part in self.split(x)]
        if self.eps or not any(zero):
            return None
        where = "g" if zero[0] else "k"
        return f"g != 0 and k != 0 fails: {where} is 0 in every entry; leave that plane out, or use eps > 0"


@final
class RotarySpace(_ColumnSpace):
    """Represent the horizontal space of the real pair (2n + 2m, 1) without the phase direction i (g, k).

    The phase is orthogonal to rescaling, so it is horizontal in the real pair, and one more projection removes it.
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

    def project(self, z: Tensor) -> Tensor:
        real = super().project(z)
        return real - self._phase * (self._phase * real).sum(dim=self.dims, keepdim=True)

    def from_balanced(self, z: Tensor) -> Tensor:
        g = torch.complex(self.point[..., : self._n, 0], self.point[..., : self._n, 1])
        peak = g.gather(-1, g.abs().argmax(dim=-1, keepdim=True))
        # The frame of the real pair has another sign rule: the largest of all real and imaginary parts is positive.
        turn = torch.sgn(peak) * self._real._frame.to_left.sign()[..., 0]
        return torch.view_as_real(torch.complex(z[..., 0], z[..., 1]) * turn).to(z.dtype)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, reached = self._real._exact(self._there(z))
        return self._back(y), reached
