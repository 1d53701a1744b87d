"""Represent the horizontal space of pairs (G, H), in orthonormal coordinates of the singular frame of G H^T."""

from __future__ import annotations

from functools import partial
from typing import final

import torch
from torch import Tensor

from quotient_manifolds.linalg import (
    SingularFrame,
    full_precision,
    in_no_graph,
    rank_floor,
    singular_frame,
    spectral_norm,
)
from quotient_manifolds.manifolds.arguments import require_no_vmap, require_vector, some
from quotient_manifolds.manifolds.fixed_rank import exact
from quotient_manifolds.manifolds.fixed_rank.geodesics import Both, inv_exponential
from quotient_manifolds.manifolds.fixed_rank.lower_rank import completed, noise
from quotient_manifolds.manifolds.fixed_rank.rank_one import rank_one
from quotient_manifolds.manifolds.fixed_rank.second_order import (
    Adjoint,
    Pairing,
    add,
    adjoint,
    apply,
    expand,
    plus,
    shorter,
)
from quotient_manifolds.manifolds.horizontal import (
    GeodesicError,
    HorizontalSpace,
    Linearised,
    PullBack,
    Rows,
    join_rows,
    require_finite_velocity,
    require_reached,
    unsqueeze,
)

_FAR = 32
"""Powers of 2 up to which coordinates may be large or small; their squares and inverses then are single precision."""


@final
class FixedRankSpace(HorizontalSpace):
    """Hold relative velocities a = xi_G to_left, b = xi_H to_right in the singular frame; z = (a, b) s^t, columnwise.

    t = 0 for `inv`, 1 for `mix`. A vertical vector is (left k, -right s k^T s^-1), so in coordinates, with
    y = s^(t-1) k s^t, it is (left s^(1-t) y, -right s^(1-t) y^T): the entries (i, j) of left^T z_G and (j, i) of
    right^T z_H form planes of their own, and the projection takes away one direction in each.
    Where the rank of G H^T is below h the frame is that of `lower_rank`, and geodesics are straight lines.
    With eps > 0, left and right are not orthonormal; their SVDs rotate the coordinates so that the same holds.
    """

    def __init__(self, x: Tensor, n: int, t: float, eps: float, dtype: torch.dtype) -> None:
        super().__init__(x.to(dtype))
        self._n, self._t, self._relaxed = n, t, eps > 0
        # Everything below is derived in float64 and rounded once, at the end. A representative may be as badly balanced
        # as it likes, and the frame then is ill-conditioned; what it is used for, products of z with it, is not.
        # In single precision Gram matrices may serve; x in double is there to be factored as exactly as that allows.
        accuracy = dtype if x.dtype == torch.float32 else torch.float64
        frame = singular_frame(x[..., :n, :], x[..., n:, :], eps, accuracy)
        self._values = frame.s  # stays in float64: slopes of the metric divide by differences of singular values
        self._lower: Tensor | None = None  # which of the batch have a rank below h, if any
        lower = ~(frame.s[..., -1] > rank_floor(n, x.shape[-2] - n) * frame.s[..., 0])
        lower = lower | ~(frame.s[..., -1] > noise(frame.from_left, frame.from_right, x.dtype))
        if not self._relaxed and some(lower):
            if not in_no_graph(x):
                raise ValueError(
                    "rank(G H^T) must be h where the point itself is differentiated. Found a lower rank: detach it"
                )
            self._lower = lower
            frame, self._values = completed(frame, x[..., :n, :], x[..., n:, :], lower)
        left, right = frame.left, frame.right
        alpha = beta = (frame.s / frame.s[..., :1]) ** (1 - t)  # of any size: only their ratios count
        weight, unweight = (frame.s**t).diag_embed(), (frame.s**-t).diag_embed()
        relative, absolute = (unweight, unweight), (weight, weight)
        self._turns: Both | None = None
        if self._relaxed:
            left, alpha, turn_H = torch.linalg.svd(left * alpha[..., None, :], full_matrices=False)
            right, beta, turn_G = torch.linalg.svd(right * beta[..., None, :], full_matrices=False)
            relative, absolute = (turn_G @ unweight, turn_H @ unweight), (weight @ turn_G.mT, weight @ turn_H.mT)
            self._turns = turn_G.to(dtype), turn_H.to(dtype)
        # Coordinates have the size s^t, and their squares may leave the range of floating point: they are then taken in
        # units of a power of 2, and the singular values, of which geodesics need the ratios, to go with them.
        self._s: Tensor = frame.s
        self._size: Tensor | None = None
        if t and some((exponent := t * frame.s[..., :1, None].detach().log2()).abs() > _FAR):
            self._size = exponent.round().exp2()
            self._s = frame.s / self._size[..., 0] ** (1 / t)
        self._frame: SingularFrame = frame.to(dtype)
        self._basis = (left.to(dtype), right.to(dtype)) if self._relaxed else (self._frame.left, self._frame.right)
        self._relative = relative[0].to(dtype), relative[1].to(dtype)  # velocities a, b from coordinates
        self._to = (frame.to_left @ absolute[0]).to(dtype), (frame.to_right @ absolute[1]).to(dtype)
        self._from = (relative[0] @ frame.from_left).to(dtype), (relative[1] @ frame.from_right).to(dtype)
        # A vertical y moves entry (i, j) of left^T z_G by alpha_i y_ij and (j, i) of right^T z_H by -beta_j y_ij: all
        # that a projection needs are the cosine and the sine of that direction in the plane of the two entries.
        hypotenuse = torch.hypot(alpha[..., :, None], beta[..., None, :]).clamp_min(torch.finfo(dtype).tiny)
        self._cos, self._sin = (alpha[..., :, None] / hypotenuse).to(dtype), (beta[..., None, :] / hypotenuse).to(dtype)

    @property
    def singular_values(self) -> Tensor:
        """Return the singular values of G H^T, descending. Shape (..., h)."""
        return self._values.to(self._frame.s.dtype)

    @property
    def full_rank(self) -> bool:
        return self._lower is None

    @property
    def frame_sign(self) -> Tensor:
        """Return for h = 1 whether `left` is G / |G| (1) or its negative (-1). Shape (..., 1, 1)."""
        return self._frame.to_left.sign()

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        return self._both(eta, *self._to)

    def vector(self, z: Tensor) -> Tensor:
        return self._both(z, *self._from)

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        return self._both(egrad, self._from[0].mT, self._from[1].mT)

    def project(self, z: Tensor) -> Tensor:
        parts = self._split(z)
        vertical = self._vertical(self._inside(parts))
        if self._own(z):
            out = z.clone(memory_format=torch.contiguous_format)
            self._less(self._split(out), vertical)
            return out
        return torch.cat(self._minus(parts, vertical), dim=-2)

    # What follows are the formulas of the base class by fewer products with tall matrices, and fewer copies of them.

    def geodesic(self, xi: Tensor, t: float | Tensor = 1.0, order: str = "second") -> Tensor:
        if order != "second":
            return super().geodesic(xi, t, order)
        z = self._velocity(xi)
        if isinstance(t, Tensor) or t != 1:
            time = unsqueeze(self._time(t, xi), 2)
            z = time * z[0], time * z[1]
        return self._end(z)

    def retract(self, xi: Tensor) -> Tensor:
        """Follow the second-order geodesic; where its relative speed is above 1, a straight and `shorter` way."""
        return self._end(self._velocity(xi), shorten=not self._relaxed)

    def proju(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        parts = self._split(eta)
        for less in (self._minus, self._less):
            inside = _times(self._inside(parts), self._to)
            parts = less(parts, _times(self._vertical(inside), self._from))
        return torch.cat(parts, dim=-2)

    def gradient(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        z = _times(self._split(egrad), (self._from[0].mT, self._from[1].mT))
        vertical = _times(self._vertical(self._inside(z)), self._from)
        return torch.cat(self._less(_times(z, self._from), vertical), dim=-2)

    def inner(self, eta: Tensor, zeta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        require_vector(self.point, zeta)
        z = _times(self._split(eta), self._to)
        w = z if zeta is eta else _times(self._split(zeta), self._to)
        return torch.stack([(x.mT @ y).diagonal(dim1=-2, dim2=-1).sum(-1) for x, y in zip(z, w, strict=True)]).sum(0)

    def _polynomial(self, z: Tensor, order: str) -> Tensor:
        return self._end(self._split(z)) if order == "second" else super()._polynomial(z, order)

    def _end(self, z: Both, shorten: bool = False) -> Tensor:
        """Compute where the second-order geodesic ends; the straight line where the rank is below h."""
        pairing, parts, x = self._pairing(), self._turned(z), self._split(self.point)
        step = expand(pairing, parts)
        if self._own(*z):
            y = self.point.clone()
            apply(pairing, parts, step, self._split(y), writable=True)
        else:
            y = torch.cat(apply(pairing, parts, step, x), dim=-2)
        if shorten and (less := shorter(pairing, step)):
            on_G, on_H = less.on.unbind(-3)
            way = torch.cat([add(x[0], parts[0], on_G), add(x[1], parts[1], on_H)], dim=-2)
            y = torch.where(less.where[..., None, None], way, y)
        if self._lower is None:
            return y
        return torch.where(self._lower[..., None, None], self.point + torch.cat(_times(z, self._from), dim=-2), y)

    def _velocity(self, xi: Tensor) -> Both:
        """Compute coordinates of the horizontal part of a velocity."""
        require_vector(self.point, xi)
        z = _times(self._split(xi), self._to)
        z = self._less(z, self._vertical(self._inside(z)))
        require_finite_velocity(*z)
        return z

    def _inside(self, z: Both) -> Both:
        """Compute left^T z_G and right^T z_H."""
        return self._basis[0].mT @ z[0], self._basis[1].mT @ z[1]

    def _vertical(self, inside: Both) -> Both:
        """Compute c_G, c_H (h, h) of the vertical part (left c_G, right c_H) of z, from left^T z_G and right^T z_H."""
        # Entries (i, j) of left^T z_G and (j, i) of right^T z_H: y is their part along the vertical (cos, -sin).
        y = self._cos * inside[0] - self._sin * inside[1].mT
        return self._cos * y, -(self._sin * y).mT

    def _minus(self, z: Both, c: Both) -> Both:
        """Compute (z_G - left c_G, z_H - right c_H)."""
        return add(z[0], self._basis[0], -c[0]), add(z[1], self._basis[1], -c[1])

    def _less(self, z: Both, c: Both) -> Both:
        """Compute `_minus` in z, which must be the caller's own, where nothing is to be differentiated."""
        return plus(z[0], self._basis[0], -c[0]), plus(z[1], self._basis[1], -c[1])

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max over c in R^h of |xi_G c| / |G c| and |xi_H c| / |H c|: the spectral norms of a and b.

        c -> A c takes the orbit to itself. For square pairs in `mix` no geodesic ends before t = 1 while this is below
        1/2: with N^T = s^-2 M s^2 (horizontality) for M = left^T a, N = right^T b, the product moves on a line with
        relative velocity M + s N^T s^-1 = M + s^-1 M s, and |s^-1 M s| <= sqrt(|M| |N|). Infinite at a lower rank.
        """
        z_G, z_H = self._split(z)
        speed = torch.maximum(spectral_norm(z_G @ self._relative[0]), spectral_norm(z_H @ self._relative[1]))
        return speed if self._lower is None else torch.where(self._lower, torch.inf, speed)

    def _step(self, z: Tensor, order: str) -> Tensor:
        if order == "first":
            return self.vector(z)
        pairing, parts = self._pairing(), self._turned(self._split(z))
        return torch.cat(apply(pairing, parts, expand(pairing, parts)), dim=-2)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if not self.full_rank:
            raise GeodesicError(
                "an exact geodesic must start where rank(G H^T) = h. Found a lower rank, where only training may be: "
                "take order='second', a straight line there"
            )
        frame, reached = self._frame, torch.ones(z.shape[:-2], dtype=z.dtype, device=z.device)
        if self._integrates:
            require_no_vmap("the exact geodesic of this metric", self.point, z)
            pairing, parts = self._pairing(), self._turned(self._split(z))
            rest, step, reached = exact.expand(pairing, self._s, self._t, parts, self._relaxed)
            return torch.cat(apply(pairing, rest, step, self._split(self.point)), dim=-2), reached
        # In the frame the point is orthonormal, so series and exponentials act on well-scaled matrices; the last line
        # goes back to the representative, however badly balanced that is.
        a, b = _times(self._split(z), self._relative)
        if self._t == 0:
            left, right = inv_exponential(frame.left, a), inv_exponential(frame.right, b)
        else:
            left, right, reached = (x.to(z.dtype) for x in rank_one(self._t, frame.left, frame.right, a, b))
        return torch.cat([left @ frame.from_left, right @ frame.from_right], dim=-2), reached

    @property
    def _integrates(self) -> bool:
        """Tell whether exact geodesics have no closed form here."""
        return self._relaxed or (self._t != 0 and self.point.shape[-1] > 1)

    def linearised(self, order: str) -> Linearised:
        if order != "first" and self.full_rank and (order == "second" or self._integrates):
            # by hand: autograd takes longer, and its graph holds more tall matrices
            return partial(self._linearise, self._pairing(), order)
        return super().linearised(order)

    def _pairing(self) -> Pairing:
        return Pairing.of(self._frame, self._s, self._t)

    @full_precision
    def _linearise(self, pairing: Pairing, order: str, z: Tensor, out: Rows) -> PullBack:
        with torch.no_grad():
            parts = self._turned(self._split(z))
            if order == "second":
                step, reached, back = expand(pairing, parts), None, adjoint
            else:
                parts, step, reached = exact.linearise(pairing, self._s, self._t, parts, self._relaxed)
                back = partial(exact.adjoint, relaxed=self._relaxed)
            moved = apply(pairing, parts, step)
            if reached is not None:
                require_reached(reached, *moved)
            for x, way, rows in zip(self._split(self.point), moved, self._halves(out), strict=True):
                sizes = [part.shape[-2] for part in rows]
                for part, start, end in zip(rows, x.split(sizes, -2), way.split(sizes, -2), strict=True):
                    torch.add(start, end, out=part)

        @full_precision
        def pull_back(egrad: Rows, into: Tensor) -> None:
            with torch.no_grad():
                grad_G, grad_H = (join_rows(rows, z) for rows in self._halves(egrad))
                self._write_projected(pairing, back(pairing, parts, step, (grad_G, grad_H)), into)
                if self._size is not None:
                    into.div_(self._size.to(into))

        return pull_back

    def _halves(self, parts: Rows) -> tuple[Rows, Rows]:
        """Return the rows of G and those of H."""
        halves: tuple[list[Tensor], list[Tensor]] = [], []
        missing = self._n  # rows of G
        for part in parts:
            k = min(missing, part.shape[-2])
            missing -= k
            for half, rows in zip(halves, part.split([k, part.shape[-2] - k], dim=-2), strict=True):
                half.extend([rows] * (rows.shape[-2] > 0))
        return halves

    def _turned(self, z: Both) -> Both:
        """Return z in the singular frame and its units; the relaxed metric's coordinates are in another basis."""
        z = z if self._size is None else (z[0] / self._size.to(z[0]), z[1] / self._size.to(z[1]))
        return z if self._turns is None else (z[0] @ self._turns[0], z[1] @ self._turns[1])

    def _write_projected(self, pairing: Pairing, v: Adjoint, into: Tensor) -> None:
        """Write `project` of tall + (left, right) core, whose tall products are known already."""
        (tall_G, tall_H), (c_G, c_H) = v.tall, v.core.unbind(-3)
        left, right = pairing.left, pairing.right
        if self._turns is not None:  # left and right are not orthonormal
            z = plus(tall_G, left, c_G) @ self._turns[0].mT, plus(tall_H, right, c_H) @ self._turns[1].mT
            into.copy_(self.project(torch.cat(z, dim=-2)))
            return
        in_G, in_H = (v.inside + v.core).unbind(-3)
        v_G, v_H = self._vertical((in_G, in_H))
        into_G, into_H = self._split(into)
        into_G.copy_(plus(tall_G, left, c_G - v_G))
        into_H.copy_(plus(tall_H, right, c_H - v_H))

    def _both(self, x: Tensor, on_G: Tensor, on_H: Tensor) -> Tensor:
        if self._own(x) and x.ndim == 3:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            for half, on, into in zip(self._split(x), (on_G, on_H), self._split(out), strict=True):
                torch.bmm(half, on, out=into)
            return out
        return torch.cat(_times(self._split(x), (on_G, on_H)), dim=-2)

    def _own(self, *x: Tensor) -> bool:
        """Tell whether halves may be written into one tensor: joining them would be another pass over tall matrices."""
        shape = self.point.shape[:-2]
        return in_no_graph(self.point, *x) and all(y.shape[:-2] == shape and y.dtype == self.point.dtype for y in x)

    def _split(self, x: Tensor) -> Both:
        G, H = x.split([self._n, x.shape[-2] - self._n], dim=-2)
        return G, H


def _times(x: Both, on: Both) -> Both:
    return x[0] @ on[0], x[1] @ on[1]
