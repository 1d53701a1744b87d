"""Represent the pair (G, H) of full column rank under the general linear group GL(h), and find logarithms by shooting.

The miss of a velocity z is the vector from the end of its geodesic to the nearest representative of y (orthogonal
Procrustes, at the balanced points), accurate up to the square of its length. It is carried back to x by the rotations
between the singular frames of both points, and added to z. For near points this is a contraction. The accelerated step
[Anderson 1965; Walker and Ni 2011] is the zero of a linear model of the last steps, and needs a third of the steps.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.func import grad, vjp

from quotient_manifolds.derivatives import on_values
from quotient_manifolds.linalg import SingularFrame, product_gap, product_svd, rank_floor, singular_frame, solve
from quotient_manifolds.manifolds.fixed_rank_space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import GeodesicError, Metric, power, require_sizes
from quotient_manifolds.manifolds.quotient import QuotientManifold

MAX_STEPS = 60
WINDOW = 8
"""Number of the last steps that the accelerated step uses."""
LONGEST = 1.0
"""Relative speed of the longest step, because the difference of distant points is a poor search direction."""
SETTLED = 1e-10
"""Length of a step, relative to z, at which the search has converged."""
TOLERANCE = 1e-9
"""Largest distance of the end of a geodesic from y, relative to the product at y."""


@final
class FixedRankQuotient(QuotientManifold):
    r"""Represent pairs (G, H) of full column rank, up to (G A^{-1}, H A^T) for A in GL(h): only X = G H^T matters.

    Points have shape (..., n + m, h): G (n rows) stacked on H (m rows). Metrics [paper, Eq. 9, 10]:

    - `inv`: tr((G^T G)^{-1} eta_G^T zeta_G) + tr((H^T H)^{-1} eta_H^T zeta_H),
    - `mix`: tr(H^T H eta_G^T zeta_G) + tr(G^T G eta_H^T zeta_H),
    - a number t: tr(W_G eta_G^T zeta_G) + tr(W_H eta_H^T zeta_H) with the weighted geometric means of positive definite
      matrices W_G = (G^T G)^{-1} #_t H^T H and W_H = (H^T H)^{-1} #_t G^T G, which transform under A as both ends do.
      t = 0 is `inv`, t = 1 is `mix`, t = 1/2 the Euclidean metric at the balanced representative.

    `eps > 0` is the paper's relaxation (App. H.2): G^T G + eps I and H^T H + eps I in their place. It allows
    rank-deficient pairs but is invariant under orthogonal A only; the default 0 keeps all of GL(h).

    If rank(G H^T) < h, as at the start B = 0 of LoRA, x is not a point of the manifold, but training may begin at x or
    pass it (`at`). In directions missing in G the metric is the one of `mix`, which needs only H, |xi_G|^2 = tr(H^T H
    xi_G^T xi_G). The gradient there is g_G (H^T H)^-1, the limit of `mix`, and 0 in H. (The limit of `inv` is 0, so
    training would never leave.) Second-order geodesics are straight lines, and exact ones raise `GeodesicError`. The
    same holds for H. Directions missing in both never change. The rule is equivariant unless G lacks a direction that
    only H has and H one that only G has.

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
        return FixedRankSpace(x, self.n, self.t, self.eps, dtype)

    def framed(self, x: Tensor, frame: SingularFrame, dtype: torch.dtype) -> FixedRankSpace:
        """Return the horizontal space at a point of full rank whose singular frame is known, as `at` would.

        >>> from quotient_manifolds.linalg import singular_frame
        >>> manifold.framed(x, singular_frame(*manifold.split(x)), x.dtype).norm(x) == manifold.at(x).norm(x)
        tensor(True)
        """
        return FixedRankSpace(x, self.n, self.t, self.eps, dtype, frame)

    def _element(self, x: Tensor) -> tuple[int, ...]:
        return x.shape[-1], x.shape[-1]

    def _act(self, A: Tensor, x: Tensor) -> Tensor:
        G, H = self.split(x)
        return torch.cat([solve(A, G, left=False), H @ A.mT], dim=-2)

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

        It is found by shooting, in float64, for a whole batch at once; for near points it is the shortest geodesic.
        Searches with h > 1 begin to fail at distances of about 1.6 in `inv` (G may turn by 90 degrees), and of about
        the norm of G H^T in `mix`. Raises `GeodesicError` if no geodesic is found, and NotImplementedError if it is
        differentiated; `dist` has derivatives. Shape (..., n + m, h).

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
        pairs = (p.expand(batch).reshape(-1, *batch[-2:]) for p in (x, y))
        return logarithms(self.n, self.t, *pairs).reshape(batch)

    def _departure(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        return _known(x, y, log)

    def _arrival(self, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
        return _turned_back(self.n, self.t, x, y, log)

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        rows, most = self.n + self.m, min(self.n, self.m)
        if len(shape) >= 2 and shape[-2] == rows and 1 <= shape[-1] <= most:
            return None
        return f"FixedRankQuotient({self.n}, {self.m}) must have shape (..., {rows}, h) with 1 <= h <= {most}"

    def _fault(self, x: Tensor) -> str | None:
        """Judge the rank of G H^T by its singular values relative to the largest, which are invariants of the orbit."""
        if self.eps or x.numel() == 0:
            return None
        s = product_svd(*self.split(x.detach().double()))[1]
        ratio = float((s[..., -1] / s[..., 0].clamp_min(torch.finfo(s.dtype).tiny)).min())
        if ratio > rank_floor(self.n, self.m):
            return None
        zero = [name for name, part in zip("GH", self.split(x), strict=True) if not bool(part.any(-1).any(-1).all())]
        found = f"{zero[0]} is 0" if zero else f"its smallest singular value is {ratio:.3g} times its largest"
        cure = "nothing but training begins there: train first" if zero else "use a smaller h"
        return f"rank(G H^T) = h = {x.shape[-1]} fails: {found}; {cure}, or use the relaxation eps > 0"


NO_DERIVATIVE = (
    "logmap must not be differentiated on a FixedRankQuotient, where it is found by shooting. Found a derivative of "
    "it, or a second one of dist: detach the vector, or write the loss with dist2, which has a gradient"
)


@on_values(NO_DERIVATIVE)
def _known(x: Tensor, y: Tensor, log: Tensor) -> Tensor:
    """Return log_x(y), computed before."""
    return log.clone()


@on_values(NO_DERIVATIVE)
def _turned_back(n: int, t: float, x: Tensor, y: Tensor, log: Tensor) -> Tensor:
    """Compute log_y(x) from log_x(y): the velocity at the end, turned round, at y. Shapes (batch, n + m, h).

    Without a second search, which might find another geodesic.
    """
    space = FixedRankSpace(x.double(), n, t, 0.0, torch.float64)
    z = space.coordinates(log.double())

    def curve(time: Tensor) -> Tensor:
        return space.follow(time * z, "exact")[0]

    # The derivative is computed by transposing twice, because torch has no forward mode inside forward mode.
    end, time = curve(z.new_ones(())), z.new_ones(())
    velocity = grad(lambda w: vjp(curve, time)[1](w)[0])(torch.zeros_like(end))
    here, there = (singular_frame(p[:, :n], p[:, n:]) for p in (end, y))
    a, b = velocity[:, :n] @ here.to_left, velocity[:, n:] @ here.to_right
    # both frames are those of one product, up to rotations of equal singular values
    parts = a @ (here.left.mT @ there.left) @ there.from_left, b @ (here.right.mT @ there.right) @ there.from_right
    return -torch.cat(parts, dim=-2).to(y)


@on_values(NO_DERIVATIVE)
def logarithms(n: int, t: float, x: Tensor, y: Tensor) -> Tensor:
    """Find horizontal vectors at x whose exact geodesics end on the orbits of y. Shapes (batch, n + m, h).

    A geodesic stays in the span of the columns of both points (it is fixed by an isometry, the reflection through that
    span), so the search runs in at most 2h + 2h rows. Raises GeodesicError if it does not converge.
    """
    here, there = (singular_frame(p[:, :n].double(), p[:, n:].double()) for p in (x, y))
    bases = common_span(here.left, there.left), common_span(here.right, there.right)
    start, end = (_reduced(frame, bases) for frame in (here, there))
    rows = bases[0].shape[-1]
    space = FixedRankSpace(start, rows, t, 0.0, start.dtype)
    a, b = space.vector(_shoot(space, rows, t, start, end)).split([rows, bases[1].shape[-1]], dim=-2)
    unroot = here.s[:, :, None] ** -0.5  # from the balanced representative in the bases back to x
    parts = bases[0] @ a @ (unroot * here.from_left), bases[1] @ b @ (unroot * here.from_right)
    return torch.cat(parts, dim=-2).to(x)


def _shoot(space: FixedRankSpace, n: int, t: float, x: Tensor, y: Tensor) -> Tensor:
    here, there = (singular_frame(p[:, :n], p[:, n:]) for p in (x, y))
    z, end, norm = torch.zeros_like(x), x, torch.linalg.matrix_norm
    rounding = 1e-13 * torch.linalg.vector_norm(here.s**t, dim=-1)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_STEPS):
        miss, step = _aim(n, t, end, here, there)
        step = space.project(step)
        settled = (norm(step) <= SETTLED * norm(z) + rounding) & (miss <= TOLERANCE)
        if bool(settled.all()):
            return z
        past = [*past[1 - WINDOW :], (z, step)]
        z = torch.where(settled[:, None, None], z, z + step - _acceleration(past))
        end, reached = space.follow(z, "exact")
        while bool((left := reached < 1).any()):  # the geodesic leaves the manifold before it ends
            z, past = torch.where(left[:, None, None], 0.7 * z, z), []
            end, reached = space.follow(z, "exact")
    raise GeodesicError(
        f"the points must be near enough to find a geodesic from x to the orbit of y. Found none within {MAX_STEPS} "
        f"steps: the best one misses by {float(miss.max()):.2g} of the product at y"
    )


def _aim(n: int, t: float, end: Tensor, here: SingularFrame, there: SingularFrame) -> tuple[Tensor, Tensor]:
    """Return the miss at `end`, relative to y, and the step to add to z at x."""
    now = singular_frame(end[:, :n], end[:, n:])
    miss = product_gap(now.left * now.s[:, None, :], now.right, there.left * there.s[:, None, :], there.right)
    relative = (nearest(now, there) - balanced(now)) / now.s.sqrt()[:, None, :]
    velocities = relative.split([n, end.shape[-2] - n], dim=-2)
    speed = torch.stack([torch.linalg.matrix_norm(v, 2) for v in velocities]).amax(0)
    weight = (now.s**t / (speed / LONGEST).clamp_min(1.0)[:, None])[:, None, :]
    turns = [polar(now.left.mT @ here.left), polar(now.right.mT @ here.right)]
    # In `inv`, columns of G are rotated like left. In `mix` they are rotated like H, which carries xi_G H^T unchanged.
    turns = turns if t < 0.5 else turns[::-1]
    step = torch.cat([v * weight @ turn for v, turn in zip(velocities, turns, strict=True)], dim=-2)
    return miss / torch.linalg.vector_norm(there.s, dim=-1), step


def _acceleration(past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the difference of the last z plus its step and the next z, by least squares in differences."""
    if len(past) == 1:
        return torch.zeros_like(past[0][0])
    z, steps = (torch.stack(column, dim=-1).flatten(-3, -2) for column in zip(*past, strict=True))
    change_z, change = z.diff(dim=-1), steps.diff(dim=-1)
    size = torch.linalg.vector_norm(change, dim=-2, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    weights = torch.linalg.pinv(change / size, rtol=1e-10) @ steps[..., -1:]  # smaller directions are rounding
    return ((change_z + change) / size @ weights)[..., 0].unflatten(-1, past[0][0].shape[-2:])


def balanced(frame: SingularFrame) -> Tensor:
    """Return the representative (left s^(1/2), right s^(1/2))."""
    return torch.cat([frame.left, frame.right], dim=-2) * frame.s.sqrt()[..., None, :]


def nearest(here: SingularFrame, there: SingularFrame) -> Tensor:
    """Rotate the balanced representative of `there` to be nearest to the balanced representative of `here`."""
    P, R = balanced(here), balanced(there)
    return R @ polar(R.mT @ P)


def polar(M: Tensor) -> Tensor:
    """Find the orthogonal polar factor of square matrices: the nearest rotation."""
    U, _, Vh = torch.linalg.svd(M)
    return U @ Vh


def common_span(here: Tensor, there: Tensor) -> Tensor:
    """Build an orthonormal basis (..., n, k), k <= 2h, of the columns of two (..., n, h) of orthonormal columns."""
    rest = there - here @ (here.mT @ there)
    rest = rest - here @ (here.mT @ rest)
    k = min(rest.shape[-1], here.shape[-2] - here.shape[-1])
    Q = torch.linalg.svd(rest, full_matrices=False).U[..., :k]
    return torch.linalg.qr(torch.cat([here, Q], dim=-1)).Q


def _reduced(frame: SingularFrame, bases: tuple[Tensor, Tensor]) -> Tensor:
    """Return the balanced representative in the bases."""
    return torch.cat([bases[0].mT @ frame.left, bases[1].mT @ frame.right], dim=-2) * frame.s.sqrt()[..., None, :]
