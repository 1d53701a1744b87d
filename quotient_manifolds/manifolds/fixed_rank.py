"""Represent the pair (G, H) of full column rank under the general linear group GL(h)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import product_gap, rank_floor, relative_singular_values, singular_frame
from quotient_manifolds.manifolds.arguments import TOO_LONG, require_sizes
from quotient_manifolds.manifolds.fixed_rank_space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import Metric, power
from quotient_manifolds.manifolds.logarithm import balanced, logarithms
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

    Where rank(G H^T) < h, as at the start B = 0 of LoRA, x is no point, but training may begin there or pass (`at`). In
    directions that G lacks the metric is that of `mix`, which needs H alone, |xi_G|^2 = tr(H^T H xi_G^T xi_G): the
    gradient there is g_G (H^T H)^-1, the limit of `mix` (that of `inv` is 0, and would stay for ever), and 0 in H.
    Second-order geodesics are straight lines, and exact ones a `GeodesicError`. Alike for H. What both lack never
    moves. All of this is equivariant unless G lacks a direction that only H has and H one that only G has.

    `balance` gives (L S^{1/2}, R S^{1/2}) with G H^T = L S R^T the thin SVD: both Gram matrices are S, and the largest
    entry in every column of L is positive.

    The dimension of the quotient is (n + m - h) h. The examples of the methods use `manifold = FixedRankQuotient(2, 1)`
    and `x = torch.tensor([[3.0], [4.0], [5.0]])`.

    >>> manifold = FixedRankQuotient(3, 2, metric="mix")
    >>> x = torch.tensor([[1.0], [2.0], [0.0], [1.0], [3.0]])
    >>> manifold.same_orbit(x, manifold.action(torch.tensor([[4.0]]), x))
    tensor(True)
    """

    name = "FixedRankQuotient"
    settings = ("n", "m", "metric", "eps")
    passes_lower_rank = True
    vertical_equation = "G^T xi_G W_G = W_H xi_H^T H (horizontal space, [paper, Sec. 5.2])"

    def __init__(self, n: int, m: int, metric: Metric = "inv", eps: float = 0.0) -> None:
        super().__init__()
        require_sizes(n, m, eps)
        self.n, self.m, self.metric, self.t, self.eps = n, m, metric, power(metric), float(eps)

    def _space(self, x: Tensor, dtype: torch.dtype) -> FixedRankSpace:
        try:
            return FixedRankSpace(x, self.n, self.t, self.eps, dtype)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            largest = float(x.detach().abs().max())
            raise ValueError(
                f"products of a point's entries must be finite. Found entries up to {largest:.3g}: {TOO_LONG}"
            ) from None

    def _element(self, x: Tensor) -> tuple[int, ...]:
        return x.shape[-1], x.shape[-1]

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        G, H = self.split(x)
        return torch.cat([torch.linalg.solve(A, G, left=False), H @ A.mT], dim=-2)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return G (..., n, h) and H (..., m, h) of a point or a tangent vector.

        >>> manifold.split(x)[1]
        tensor([[5.]])
        """
        self._require(x=x)
        return x[..., : self.n, :], x[..., self.n :, :]

    def _balanced(self, x: Tensor) -> Tensor:
        return balanced(singular_frame(*self.split(x)).to(x.dtype))

    def _orbit_gap(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | float]:
        """Compare G H^T, with the accuracy |G| |H| that the factors allow."""
        (G, H), (P, Q) = self.split(x.double()), self.split(y.double())
        norm = torch.linalg.matrix_norm
        return product_gap(G, H, P, Q), torch.maximum(norm(G) * norm(H), norm(P) * norm(Q))

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Find the horizontal vector at x whose exact geodesic ends on the orbit of y at t = 1.

        Found by shooting, for a whole batch at once: the shortest geodesic if the points are near. In `inv`, where a
        length of 1.6 may be a turn of G by 90 degrees, and in `mix`, about the norm of G H^T away, searches with h > 1
        begin to fail. In float64; not differentiable. Raises `GeodesicError` if no geodesic is found. (..., n + m, h)

        >>> manifold.logmap(x, 4 * x) / x  # the product grows 16-fold: log(16) / 2
        tensor([[1.3863],
                [1.3863],
                [1.3863]])
        """
        if self.eps:
            raise ValueError(f"eps must be 0 for logmap and dist, an invariant metric. Found eps = {self.eps:g}")
        self._require_points(x=x, y=y)
        batch = torch.broadcast_shapes(x.shape, y.shape)
        if 0 in batch:
            return x.new_empty(batch)
        pairs = (p.detach().expand(batch).reshape(-1, *batch[-2:]) for p in (x, y))
        return logarithms(self.n, self.t, *pairs).reshape(batch)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        rows, most = self.n + self.m, min(self.n, self.m)
        if len(shape) >= 2 and shape[-2] == rows and 1 <= shape[-1] <= most:
            return None
        return f"FixedRankQuotient({self.n}, {self.m}) must have shape (..., {rows}, h) with 1 <= h <= {most}"

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
