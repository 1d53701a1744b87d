"""Represent the pair (G, H) of full column rank under the general linear group GL(h)."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from quotient_manifolds.linalg import product_gap, rank_floor, relative_singular_values, singular_frame
from quotient_manifolds.manifolds.arguments import (
    NOT_FINITE,
    all_finite,
    require_counts,
    require_matrix,
    require_no_vmap,
    require_size,
)
from quotient_manifolds.manifolds.fixed_rank.alignment import alignment_length
from quotient_manifolds.manifolds.fixed_rank.logarithm import logarithms
from quotient_manifolds.manifolds.fixed_rank.procrustes_mean import procrustes_mean, require_weights
from quotient_manifolds.manifolds.fixed_rank.space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import Metric, power, unsqueeze
from quotient_manifolds.manifolds.quotient import QuotientManifold


@final
class FixedRankQuotient(QuotientManifold):
    r"""Represent pairs (G, H) of full column rank, up to (G A^{-1}, H A^T) for A in GL(h): only X = G H^T matters.

    Points have shape (..., n + m, h): G (n rows) stacked on H (m rows). Metrics [paper, Eq. 9, 10]:

    - `inv`: tr((G^T G)^{-1} eta_G^T zeta_G) + tr((H^T H)^{-1} eta_H^T zeta_H),
    - `mix`: tr(H^T H eta_G^T zeta_G) + tr(G^T G eta_H^T zeta_H),
    - a number t: tr(W_G eta_G^T zeta_G) + tr(W_H eta_H^T zeta_H) with the weighted geometric means of positive definite
      matrices W_G = (G^T G)^{-1} #_t H^T H and W_H = (H^T H)^{-1} #_t G^T G, which transform under A as both ends do.
      t = 0 is `inv`, t = 1 is `mix`, t = 1/2 the Euclidean metric at the balanced representative.

    `eps > 0` is the paper's relaxation (App. H.2): G^T G + eps I and H^T H + eps I in their place. It stands
    rank-deficient pairs but is invariant under orthogonal A only; the default 0 keeps the whole of GL(h).

    The dimension of the quotient is (n + m - h) h. The examples of the methods use `manifold = FixedRankQuotient(2, 1)`
    and `x = torch.tensor([[3.0], [4.0], [5.0]])`.

    >>> manifold = FixedRankQuotient(3, 2, metric="mix")
    >>> x = torch.tensor([[1.0], [2.0], [0.0], [1.0], [3.0]])
    >>> manifold.same_orbit(x, manifold.action(torch.tensor([[4.0]]), x))
    tensor(True)
    """

    name = "FixedRankQuotient"
    vertical_equation = "G^T xi_G W_G = W_H xi_H^T H (horizontal space, [paper, Sec. 5.2])"

    def __init__(self, n: int, m: int, metric: Metric = "inv", eps: float = 0.0) -> None:
        super().__init__()
        require_counts(n=n, m=m)
        require_size(eps)
        self.n, self.m, self.metric, self.t, self.eps = n, m, metric, power(metric), float(eps)

    def at(self, x: Tensor, *, dtype: torch.dtype | None = None) -> FixedRankSpace:
        """Return the horizontal space at x, factored in float64 and rounded to `dtype`, by default that of x.

        Where rank(G H^T) < h, as at the start B = 0 of LoRA, x is no point, but training may begin there or pass. In
        directions that G lacks the metric is that of `mix`, which needs H alone, |xi_G|^2 = tr(H^T H xi_G^T xi_G): the
        gradient there is g_G (H^T H)^-1, the limit of `mix` (that of `inv` is 0, and would stay for ever), and 0 in H.
        Second-order geodesics are straight lines. Alike for H. What both lack never moves. All of this is equivariant
        unless G lacks a direction that only H has and H one that only G has.
        Raises ValueError for a wrong shape or non-finite entries, `GeodesicError` for exact geodesics at lower rank.

        >>> manifold.at(x).norm(x)  # relative lengths 1 and 1
        tensor(1.4142)
        """
        self._require_finite(x=x)
        try:
            return FixedRankSpace(x, self.n, self.t, self.eps, dtype or x.dtype)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            largest = float(x.detach().abs().max())
            raise ValueError(
                f"products of a point's entries should be finite; found entries up to {largest:.3g}"
            ) from None

    def action(self, A: Tensor, x: Tensor) -> Tensor:
        """Move x, a point or a vector, to (G A^{-1}, H A^T). Shapes: A (..., h, h) invertible, x (..., n + m, h).

        >>> manifold.action(torch.tensor([[2.0]]), x)
        tensor([[ 1.5000],
                [ 2.0000],
                [10.0000]])
        """
        G, H = self.split(x)
        require_matrix(A, x)
        return torch.cat([torch.linalg.solve(A, G, left=False), H @ A.mT], dim=-2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return G (..., n, h) and H (..., m, h) of a point or a tangent vector.

        >>> manifold.split(x)[1]
        tensor([[5.]])
        """
        self._require(x=x)
        return x[..., : self.n, :], x[..., self.n :, :]

    def balance(self, x: Tensor) -> Tensor:
        """Return (L S^{1/2}, R S^{1/2}) with G H^T = L S R^T the thin SVD: both Gram matrices are S.

        Signs are fixed by making the entry of largest magnitude in every column of L positive.

        >>> manifold.balance(manifold.action(torch.tensor([[2.0]]), x))
        tensor([[3.],
                [4.],
                [5.]])
        """
        self._require_finite(x=x)
        left, right, s, *_ = singular_frame(*self.split(x)).to(x.dtype)
        return torch.cat([left, right], dim=-2) * s.sqrt()[..., None, :]

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare G H^T, with the accuracy |G| |H| that the factors allow."""
        (G, H), (P, Q) = self.split(x.double()), self.split(y.double())
        norm = torch.linalg.matrix_norm
        return product_gap(G, H, P, Q), torch.maximum(norm(G) * norm(H), norm(P) * norm(Q))

    def align(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the representative of the orbit of y nearest to x at the balanced points: orthogonal Procrustes.

        (L_y S_y^{1/2} Q, R_y S_y^{1/2} Q) with the rotation Q nearest to the balanced x, brought to the frame of x.
        It is equivariant in x and does not depend on the representative y. Shapes (..., n + m, h).

        >>> torch.allclose(manifold.align(x, manifold.action(torch.tensor([[-7.0]]), x)), x)
        True
        """
        self._require_finite(x=x, y=y)
        here, there = (singular_frame(*self.split(point)).to(x.dtype) for point in (x, y))
        P, R = (torch.cat([f.left, f.right], dim=-2) * f.s.sqrt()[..., None, :] for f in (here, there))
        U, _, Vh = torch.linalg.svd(R.mT @ P)
        G, H = self.split(R @ (U @ Vh) / here.s.sqrt()[..., None, :])
        return torch.cat([G @ here.from_left, H @ here.from_right], dim=-2)

    def alignment_dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        r"""Compute the length of a curve between the orbits of x and y, in closed form: at least the true distance.

        The orbits are aligned (principal angles, Procrustes, then the gauge in which the curve starts horizontally) and
        joined, in `inv` by a rotation of both spans beside a rotation and a stretching inside them, in `mix` by the
        straight line of both factors, whose length comes rounded up by at most about 1e-4 of it. The shorter of the
        curves from x to y and from y to x counts, so the result is symmetric; it is 0 on the orbit alone, and constant
        along both. Its ratio to the distance tends to 1 as the points approach. In `mix` it is at least
        |X - Y|_F / sqrt(2) and at most (|X|_F + |Y|_F) / sqrt(2) for the products X and Y.

        Infinite for square pairs, n = m = h, whose products have determinants of opposite signs: nothing connects them.
        Computed in float64, in O((n + m) h^2) operations; differentiable at points of two orbits. Raises ValueError for
        other metrics and with eps > 0, for which no such curve is known. Shape (...,), or (..., 1, 1) with `keepdim`.

        >>> manifold.alignment_dist(x, 4 * x)  # the product grows 16-fold: log(16) / sqrt(2)
        tensor(1.9605)
        """
        if self.eps or self.t not in (0.0, 1.0):
            raise ValueError(f"alignment_dist needs the metric 'inv' or 'mix' with eps = 0; found {self}")
        self._require_points(x=x, y=y)
        here, there = (singular_frame(*self.split(point)) for point in torch.broadcast_tensors(x, y))
        return unsqueeze(alignment_length(here, there, self.t).to(x.dtype), self.ndim if keepdim else 0)

    def alignment_mean(self, x: Tensor, weights: Any = None) -> Tensor:
        """Average points x (k, ..., n + m, h) as aligned balanced representatives, whatever the metric; balanced.

        Generalised Procrustes analysis: rotations and a mean in turn lower the sum of squared Frobenius distances
        between the rotated balanced points and their mean, until it settles, at most 100 times. Depends neither on the
        representatives nor, but for rounding, on the order of the points; the mean of copies of one point is that
        point. It is not the Karcher mean of `mean`, for which it is a first guess, but needs no geodesic and takes
        points that are far apart.

        `weights` (k,) or (k, ...) are at least 0, by default equal; they are divided by their sum. Computed in float64.
        Raises ValueError for a mean of rank below h and for bad weights. Shape (..., n + m, h).

        >>> manifold.alignment_mean(torch.stack([x, -x, 4 * x]))  # signs are representatives
        tensor([[ 6.],
                [ 8.],
                [10.]])
        """
        self._require_stack(x)
        self._require_points(x=x)
        require_no_vmap("the mean", x)
        mean = procrustes_mean(self.balance(x.double()), require_weights(weights, x))
        if reason := self._fault(mean):
            raise ValueError(f"points should have a mean of their own rank: {reason.partition(';')[0]}")
        return self.balance(mean).to(x.dtype)

    def _guess_mean(self, x: Tensor) -> Tensor:
        return x[0] if self.eps else self.alignment_mean(x)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose exact geodesic ends on the orbit of y at t = 1.

        Found by shooting from the aligned representative of y, for a whole batch at once: the shortest geodesic if the
        points are near, and never a longer one than the curve of `alignment_dist`. Geodesics between two points stay in
        the span of the columns of both (it is fixed by an isometry, the reflection through it), so the size of the
        search depends on h alone. In `inv`, where a length of 1.6 may be a turn of G by 90 degrees, and in `mix`, about
        the norm of G H^T away, searches with h > 1 begin to fail or to find another geodesic.
        Computed in float64; not differentiable. Raises `GeodesicError` if no geodesic is found, ValueError with
        eps > 0. Shapes (..., n + m, h).

        >>> manifold.logmap(x, 4 * x) / x  # the product grows 16-fold: log(16) / 2
        tensor([[1.3863],
                [1.3863],
                [1.3863]])
        """
        if self.eps:
            raise ValueError(f"logmap and dist need eps = 0, an invariant metric; found eps = {self.eps:g}")
        self._require(x=x, y=y)
        require_no_vmap("logmap and dist of FixedRankQuotient", x, y)
        self._require_points(x=x, y=y)
        batch = torch.broadcast_shapes(x.shape, y.shape)
        if 0 in batch:
            return x.new_empty(batch)
        pairs = (p.detach().expand(batch).reshape(-1, *batch[-2:]) for p in (x, y))
        return logarithms(self.n, self.t, *pairs).reshape(batch)

    def projx(self, x: Tensor) -> Tensor:
        """Return x itself: pairs of lower rank are no points, but training may pass there (`at`), and they stay.

        >>> torch.equal(manifold.projx(x), x)
        True
        """
        self._require(x=x)
        if not all_finite(x):
            raise ValueError(self._recent.explain(NOT_FINITE, x))
        return x

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        rows, most = self.n + self.m, min(self.n, self.m)
        if len(shape) >= 2 and shape[-2] == rows and 1 <= shape[-1] <= most:
            return None
        return f"FixedRankQuotient({self.n}, {self.m}) should have shape (..., {rows}, h) with 1 <= h <= {most}"

    def _fault(self, x: Tensor) -> str | None:
        """Judge the rank of G H^T by its singular values relative to the largest, which are invariants of the orbit."""
        if self.eps or x.numel() == 0:
            return None
        ratio = float(relative_singular_values(*self.split(x))[..., -1].min())
        if ratio > rank_floor(self.n, self.m):
            return None
        zero = [name for name, part in zip("GH", self.split(x), strict=True) if not bool(part.any(-1).any(-1).all())]
        found = f"{zero[0]} is 0" if zero else f"its smallest singular value is {ratio:.3g} times its largest"
        cure = "nothing but training begins there: train first" if zero else "use a smaller h"
        return f"rank(G H^T) = h = {x.shape[-1]} fails: {found}; {cure}, or use the relaxation eps > 0"

    def _key(self) -> tuple[Any, ...]:
        return (self.n, self.m, self.t, self.eps)

    def extra_repr(self) -> str:
        return f"n={self.n}, m={self.m}, metric={self.metric!r}" + (f", eps={self.eps:g}" if self.eps else "")
