"""Represent the diagonal pair (u, v) under the rescaling group GL(1)^d."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length
from quotient_manifolds.manifolds.arguments import require_factors, require_vector, some
from quotient_manifolds.manifolds.horizontal import HorizontalSpace, Metric, power
from quotient_manifolds.manifolds.quotient import QuotientManifold


@final
class DiagonalQuotient(QuotientManifold):
    r"""Represent pairs (u, v) of vectors without zeros, up to (u / a, v a) for a in GL(1)^d: only beta = u v matters.

    Points have shape (..., 2, d), u on top of v. Metrics [paper, Eq. 5, 6]:

    - `inv`: sum_i eta_u zeta_u / u^2 + eta_v zeta_v / v^2,
    - `mix`: sum_i eta_u zeta_u v^2 + eta_v zeta_v u^2,
    - a number t: sum_i |u v|^2t (eta_u zeta_u / u^2 + eta_v zeta_v / v^2), of which they are t = 0 and t = 1.

    Horizontal for all: eta_u / u = eta_v / v. The geodesics and the logarithm are closed forms, and so is the distance,
    | |beta_y|^t - |beta_x|^t | / (|t| sqrt 2), or |log(beta_y / beta_x)| / sqrt 2 if t = 0, in l2 over the coordinates.
    The examples of the methods use `x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])`.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> DiagonalQuotient("inv").same_orbit(x, torch.tensor([[2.0, 1.0], [1.5, 8.0]]))
    tensor(True)
    """

    name = "DiagonalQuotient"
    vertical_equation = "xi_u / u = xi_v / v (horizontal space, [paper, Sec. 5.1])"

    def __init__(self, metric: Metric = "inv") -> None:
        super().__init__()
        self.metric, self.t = metric, power(metric)

    def at(self, x: Tensor) -> _DiagonalSpace:
        """Return the horizontal space at x. Raises ValueError for a wrong shape, a zero or a non-finite entry.

        >>> DiagonalQuotient("mix").at(x).norm(x)  # sqrt(2 (4^2 + 16^2))
        tensor(23.3238)
        """
        self._require_points(x=x)
        return _DiagonalSpace(x, self.t)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x to (u / a, v a). Shapes: A (..., d) without zeros, x (..., 2, d).

        >>> DiagonalQuotient().action(torch.tensor([2.0, -1.0]), x)
        tensor([[ 0.5000, -2.0000],
                [ 8.0000, -8.0000]])
        """
        self._require(x=x)
        require_factors(A, x[..., 0, :])
        return torch.stack([x[..., 0, :] / A, x[..., 1, :] * A], dim=-2)

    def balance(self, x: Tensor) -> Tensor:
        """Return (sqrt|beta|, sign(beta) sqrt|beta|), beta = u v: the representative with u > 0 and |u| = |v|.

        >>> DiagonalQuotient().balance(x)
        tensor([[2., 4.],
                [2., 4.]])
        """
        self._require(x=x)
        beta = x.double().prod(dim=-2)
        root = beta.abs().sqrt()
        return torch.stack([root, beta.sign() * root], dim=-2).to(x.dtype)

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare u v, coordinate by coordinate."""
        beta, other = x.double().prod(dim=-2), y.double().prod(dim=-2)
        return torch.where(beta == other, 0.0, (beta - other).abs() / beta.abs()).amax(dim=-1), 1.0

    def component_inner(self, x: Tensor, u: Tensor, v: Tensor | None = None) -> Tensor:
        """Compute the metric coordinate by coordinate: the quotient is a product of d lines. Shape (..., 1, d).

        >>> DiagonalQuotient().component_inner(x, x)
        tensor([[2., 2.]])
        """
        space = self._at(x)
        z = space.coordinates(u)
        return (z * (z if v is None else space.coordinates(v))).sum(dim=-2, keepdim=True)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose geodesic reaches the orbit of y at t = 1.

        b = ((beta_y / beta_x)^t - 1) / 2t, log(beta_y / beta_x) / 2 if t = 0. ValueError if signs differ.

        >>> DiagonalQuotient("mix").logmap(x, 2 * x)
        tensor([[ 1.5000,  3.0000],
                [ 6.0000, 12.0000]])
        """
        return (self._log(x, y) * x).to(x.dtype)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute the distance in its closed form. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> DiagonalQuotient("mix").dist(x, 2 * x)  # sqrt((16 - 4)^2 + (64 - 16)^2) / sqrt(2)
        tensor(34.9857)
        """
        gaps = 2**0.5 * self._log(x, y) * _weight(x, self.t)
        return length(gaps, (-2, -1), keepdim).to(x.dtype)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the velocity b relative to x, in float64: products leave the range of float32. Shape (..., 1, d)."""
        self._require_points(x=x, y=y)
        ratio = (y.double() / x.double()).prod(dim=-2, keepdim=True)
        if some(~(ratio > 0)):
            raise ValueError(
                "the products u v of both points should have the same signs, since no geodesic crosses 0; "
                f"found {int((~(ratio > 0)).sum())} coordinates of opposite sign"
            )
        return ratio.log() / 2 if self.t == 0 else torch.expm1(self.t * ratio.log()) / (2 * self.t)

    def projx(self, x: Tensor) -> Tensor:
        """Return x itself where it lies on the manifold; zeros are moved to the smallest magnitude beside them.

        >>> DiagonalQuotient().projx(torch.tensor([[0.0, 2.0], [4.0, 8.0]]))
        tensor([[2., 2.],
                [4., 8.]])
        """
        self._require(x=x)
        magnitude = torch.where(x == 0, torch.inf, x.abs()).amin(dim=(-2, -1), keepdim=True)
        return torch.where(x == 0, torch.where(magnitude.isfinite(), magnitude, 1.0), x)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        fits = len(shape) >= 2 and shape[-2] == 2 and shape[-1] > 0
        return None if fits else "DiagonalQuotient should have shape (..., 2, d)"

    def _fault(self, x: Tensor) -> str | None:
        zeros = int((x == 0).sum())
        return f"u_i != 0 and v_i != 0 fails: {zeros} entries are 0" if zeros else None

    def _key(self) -> tuple[Any, ...]:
        return (self.t,)

    def extra_repr(self) -> str:
        return f"metric={self.metric!r}"


@final
class _DiagonalSpace(HorizontalSpace):
    """Hold relative velocities b = eta / x; coordinates z = |u v|^t b. Factors may leave the range of float32."""

    def __init__(self, x: Tensor, t: float) -> None:
        super().__init__(x)
        self._t = t
        self._weight = _weight(x, t)
        self._to = self._weight / x.double()

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        return (eta * self._to).to(eta.dtype)

    def vector(self, z: Tensor) -> Tensor:
        return (z / self._to).to(z.dtype)

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        return (egrad / self._to).to(egrad.dtype)

    def project(self, z: Tensor) -> Tensor:
        return z.mean(dim=-2, keepdim=True).expand_as(z)

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max |b_i|, where x moves to (1 + b) x."""
        return (z / self._weight).abs().amax(dim=(-2, -1))

    def _step(self, z: Tensor, order: str) -> Tensor:
        b = z / self._weight
        return (self.point * (b if order == "first" else b + (1 - 2 * self._t) * b**2 / 2)).to(z.dtype)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        b = z / self._weight
        if self._t == 0:
            return (self.point * b.exp()).to(z.dtype), torch.ones(b.shape[:-2], dtype=z.dtype, device=z.device)
        # |beta|^t moves on a line: x (1 + 2 t b)^(1 / 2t). Each coordinate is a geodesic of its own, and ends at 0.
        floor = torch.finfo(z.dtype).eps ** 0.5
        change = 2 * self._t * b
        reached = ((floor - 1) / change).where(change < floor - 1, 1.0).amin(dim=(-2, -1))
        stretch = (torch.log1p(change.clamp_min(floor - 1)) / (2 * self._t)).exp()
        return (self.point * stretch).to(z.dtype), reached.to(z.dtype)


def _weight(x: Tensor, t: float) -> Tensor:
    """Compute |u v|^t in float64. Shape (..., 1, d)."""
    return x.double().prod(dim=-2, keepdim=True).abs() ** t
