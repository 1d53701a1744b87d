"""Represent the diagonal pair (u, v) under the rescaling group GL(1)^d."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import length
from quotient_manifolds.manifolds.arguments import require_element, require_nonzero, some
from quotient_manifolds.manifolds.fixed_rank import FixedRankQuotient
from quotient_manifolds.manifolds.fixed_rank.space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import Metric
from quotient_manifolds.manifolds.quotient import QuotientManifold
from quotient_manifolds.manifolds.reshaped import ReshapedSpace


@final
class DiagonalQuotient(QuotientManifold):
    r"""Represent pairs (u, v) of vectors without zeros, up to (u / a, v a) for a in GL(1)^d: only beta = u v matters.

    Points have shape (..., 2, d), u on top of v. Metrics [paper, Eq. 5, 6]:

    - `inv`: sum_i eta_u zeta_u / u^2 + eta_v zeta_v / v^2,
    - `mix`: sum_i eta_u zeta_u v^2 + eta_v zeta_v u^2,
    - a number t: sum_i |u v|^2t (eta_u zeta_u / u^2 + eta_v zeta_v / v^2), of which they are t = 0 and t = 1.

    Coordinate by coordinate they are those of `FixedRankQuotient` for n = m = h = 1. Horizontal for all: eta_u / u =
    eta_v / v. The geodesics and the logarithm are closed forms, and so is the distance,
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
        self._real = FixedRankQuotient(1, 1, metric)
        self.metric, self.t = metric, self._real.t

    def at(self, x: Tensor) -> DiagonalSpace:
        """Return the horizontal space at x. Raises ValueError for a wrong shape, a zero or a non-finite entry.

        >>> DiagonalQuotient("mix").at(x).norm(x)  # sqrt(2 (4^2 + 16^2))
        tensor(23.3238)
        """
        self._require_points(x=x)
        return DiagonalSpace(self._real.at(DiagonalSpace._there(x)), self.t, x.dtype)

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x to (u / a, v a). Shapes: A (..., d) without zeros, x (..., 2, d).

        >>> DiagonalQuotient().action(torch.tensor([2.0, -1.0]), x)
        tensor([[ 0.5000, -2.0000],
                [ 8.0000, -8.0000]])
        """
        self._require(x=x)
        require_element(A, x[..., 0, 0], (x.shape[-1],))
        require_nonzero(A)
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
        gaps = 2**0.5 * self._log(x, y) * x.double().prod(dim=-2, keepdim=True).abs() ** self.t
        return length(gaps, (-2, -1), keepdim).to(x.dtype)

    def _log(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the velocity b relative to x, in float64: products leave the range of float32. Shape (..., 1, d)."""
        self._require_points(x=x, y=y)
        ratio = (y.double() / x.double()).prod(dim=-2, keepdim=True)
        if some(~(ratio > 0)):
            raise ValueError(
                "the products u v of both points must have the same signs, since no geodesic crosses 0. "
                f"Found {int((~(ratio > 0)).sum())} coordinates of opposite sign"
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
        return None if fits else "DiagonalQuotient must have shape (..., 2, d)"

    def _fault(self, x: Tensor) -> str | None:
        zeros = int((x == 0).sum())
        return f"u_i != 0 and v_i != 0 fails: {zeros} entries are 0" if zeros else None

    def _key(self) -> tuple[Any, ...]:
        return (self.t,)

    def extra_repr(self) -> str:
        return f"metric={self.metric!r}"


@final
class DiagonalSpace(ReshapedSpace):
    """Represent the horizontal space of d pairs of one row each, (d, 2, 1): in float64, which holds |u v|^t."""

    def __init__(self, real: FixedRankSpace, t: float, dtype: torch.dtype) -> None:
        super().__init__(real, dtype)
        self._t = t

    @staticmethod
    def _there(x: Tensor) -> Tensor:
        return x.double().mT[..., None]

    @staticmethod
    def _back(x: Tensor) -> Tensor:
        return x[..., 0].mT

    def project(self, z: Tensor) -> Tensor:
        return self._back(self._real.project(self._there(z))).to(z.dtype)

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max |b_i|, where x moves to (1 + b) x."""
        return self._real.relative_speed(self._there(z)).amax(dim=-1)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        t, b = self._t, self._back(self._real.vector(self._there(z))) / self.point
        if t == 0:
            return (self.point * b.exp()).to(z.dtype), torch.ones(b.shape[:-2], dtype=z.dtype, device=z.device)
        # |beta|^t moves on a line: x (1 + 2 t b)^(1 / 2t). Each coordinate is a geodesic of its own, and ends at 0.
        floor = torch.finfo(z.dtype).eps ** 0.5
        change = 2 * t * b
        reached = ((floor - 1) / change).where(change < floor - 1, 1.0).amin(dim=(-2, -1))
        stretch = (torch.log1p(change.clamp_min(floor - 1)) / (2 * t)).exp()
        return (self.point * stretch).to(z.dtype), reached.to(z.dtype)
