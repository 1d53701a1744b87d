"""Represent the horizontal space of pairs (G, H), in orthonormal coordinates of the singular frame of G H^T."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from quotient_manifolds.derivatives import in_no_graph
from quotient_manifolds.linalg import SingularFrame, full_precision, pair_frame, spectral_norm
from quotient_manifolds.manifolds import exact
from quotient_manifolds.manifolds.horizontal import (
    GeodesicError,
    HorizontalSpace,
    Linearised,
    PullBack,
    Rows,
    join_rows,
    require_finite_velocity,
    require_vector,
    some,
)
from quotient_manifolds.manifolds.second_order import (
    Both,
    Pairing,
    adjoint,
    cores,
    expand,
    plus,
    split,
    times,
)

FASTEST = 1.0
"""The relative speed up to which an optimizer's step follows the second-order geodesic."""

_FAR = 32
"""Largest power of 2 (up or down) of coordinates whose squares and inverses are in the range of single precision."""


class _Coordinates(NamedTuple):
    """Hold the maps from vectors to coordinates and back, for both G and H (..., 2, h, h).

    z = (left a, right b) with the velocities xi_G to_left = left a and xi_H to_right = right b relative to the frame.
    A vertical y changes entry (i, j) of left^T z_G by alpha_i y_ij and entry (j, i) of right^T z_H by -beta_j y_ij. The
    projection removes the direction (cos, -sin) in the plane of the two entries.
    """

    basis: Both  # orthonormal columns with the spans of G and H
    to: Tensor  # coordinates z from vectors xi
    back: Tensor  # vectors xi from coordinates z
    relative: Tensor  # velocities a, b from coordinates z
    turns: Tensor | None  # from these coordinates to the singular frame; None where they are in it
    cos: Tensor  # alpha_i / sqrt(alpha_i^2 + beta_j^2), (..., h, h)
    sin: Tensor  # beta_j / sqrt(alpha_i^2 + beta_j^2)

    @staticmethod
    def of(frame: SingularFrame, rounded: SingularFrame, t: float, *, relaxed: bool) -> _Coordinates:
        """Compute them in float64 and round once. relaxed: left and right of the frame are not orthonormal."""
        dtype, basis, turns = rounded.left.dtype, (rounded.left, rounded.right), None
        alpha = beta = (frame.s / frame.s[..., :1]) ** (1 - t)  # of any size: only their ratios count
        weights = [(frame.s**power).diag_embed()[..., None, :, :] for power in (t, -t)]
        absolute, relative = (w.expand(*w.shape[:-3], 2, *w.shape[-2:]) for w in weights)
        if relaxed:
            left, alpha, turn_H = torch.linalg.svd(frame.left * alpha[..., None, :], full_matrices=False)
            right, beta, turn_G = torch.linalg.svd(frame.right * beta[..., None, :], full_matrices=False)
            turns = torch.stack([turn_G, turn_H], dim=-3)
            absolute, relative = absolute @ turns.mT, turns @ relative
            basis, turns = (left.to(dtype), right.to(dtype)), turns.to(dtype)
        to = torch.stack([frame.to_left, frame.to_right], dim=-3) @ absolute
        back = relative @ torch.stack([frame.from_left, frame.from_right], dim=-3)
        hypotenuse = torch.hypot(alpha[..., :, None], beta[..., None, :]).clamp_min(torch.finfo(dtype).tiny)
        cos, sin = alpha[..., :, None] / hypotenuse, beta[..., None, :] / hypotenuse
        to, back, relative, cos, sin = (each.to(dtype) for each in (to, back, relative, cos, sin))
        return _Coordinates(basis, to, back, relative, turns, cos, sin)


def _of_lower_rank(x: Tensor, lost: Tensor) -> Tensor | None:
    """Return a mask (..., 1, 1) of the pairs of a batch with a missing direction; None if there is none.

    Raises ValueError if there is one and the point is differentiated or mapped.
    """
    if not some(lost):
        return None
    if not in_no_graph(x):
        raise ValueError(
            "rank(G H^T) must be h where the point itself is differentiated or mapped. Found a lower rank: detach it, "
            "or visit points one by one"
        )
    return lost.any(dim=-1)[..., None, None]


def _in_range(s: Tensor, t: float) -> tuple[Tensor, Tensor | None]:
    """Return singular values s / size^(1/t) and the unit `size` of coordinates, a power of 2 (..., 1, 1), or None.

    Coordinates have the size s^t, and their squares may leave the range of floating point: they are then taken in units
    of a power of 2, and the singular values, of which geodesics need the ratios, go with them.
    """
    if not t or not some((exponent := t * s[..., :1, None].detach().log2()).abs() > _FAR):
        return s, None
    size = exponent.round().exp2()
    return s / size[..., 0] ** (1 / t), size


@final
class FixedRankSpace(HorizontalSpace):
    """Represent vectors by relative velocities a = xi_G to_left, b = xi_H to_right: z = (a, b) s^t, columnwise.

    t = 0 for `inv`, 1 for `mix`. A vertical vector is (left k, -right s k^T s^-1), so in coordinates, with
    y = s^(t-1) k s^t, it is (left s^(1-t) y, -right s^(1-t) y^T): the entries (i, j) of left^T z_G and (j, i) of
    right^T z_H form planes of their own, and the projection takes away one direction in each.
    Where the rank of G H^T is below h the frame is that of `pair_frame`, and geodesics are straight lines.
    With eps > 0, left and right are not orthonormal; their SVDs rotate the coordinates so that the same holds.
    """

    def __init__(
        self, x: Tensor, n: int, t: float, eps: float, dtype: torch.dtype, frame: SingularFrame | None = None
    ) -> None:
        super().__init__(x.to(dtype))
        self._t, self._relaxed = t, eps > 0
        # Everything is derived in float64 and rounded once, at the end. The frame of a badly balanced representative is
        # ill-conditioned, but the products of z with it are not. In single precision Gram matrices may be used; a point
        # in double precision is factored as exactly as that allows.
        accuracy = dtype if x.dtype == torch.float32 else torch.float64
        self._lower: Tensor | None = None  # which of the batch have a rank below h, if any (..., 1, 1)
        if frame is None:
            frame, lost = pair_frame(x[..., :n, :], x[..., n:, :], eps, accuracy)
            self._lower = _of_lower_rank(x, lost)
        self._frame = frame.to(dtype)
        self._s, self._size = _in_range(frame.s, t)  # float64: slopes of the metric divide by differences of them
        self._coordinates = _Coordinates.of(frame, self._frame, t, relaxed=self._relaxed)

    def coordinates(self, eta: Tensor) -> Tensor:
        require_vector(self.point, eta)
        return times(self._split(eta), self._coordinates.to)

    def vector(self, z: Tensor) -> Tensor:
        return times(self._split(z), self._coordinates.back)

    def covector(self, egrad: Tensor) -> Tensor:
        require_vector(self.point, egrad)
        return times(self._split(egrad), self._coordinates.back.mT)

    def project(self, z: Tensor) -> Tensor:
        return plus(z, self._coordinates.basis, -self._vertical(self._inside(z)))

    def _retract(self, xi: Tensor) -> Tensor:
        """Follow the second-order geodesic, at relative speed 1 at most; at a lower rank, follow the straight line.

        Near lower rank, relative speeds and the parabola are unbounded; a shorter step is still invariant.
        """
        # Where that is slow enough, the formula of the base class by fewer copies of tall matrices.
        require_vector(self.point, xi)
        z = times(self._split(xi), self._coordinates.to)
        z = plus(z, self._coordinates.basis, -self._vertical(self._inside(z)), mine=True)
        require_finite_velocity(z)
        pairing, parts = self._pairing(), self._turned(z)
        step = expand(pairing, parts)
        squares = (pairing.unit.mT * step.square * pairing.unit).diagonal(dim1=-2, dim2=-1).sum(-1)
        if not self._relaxed and some(squares > FASTEST**2):  # bounds of the speed
            speed = (self._speed(z) / FASTEST).clamp_min(1.0).to(z.dtype)[..., None, None]
            parts = parts[0] / speed, parts[1] / speed
            step = expand(pairing, parts)
        y = plus(plus(self.point, parts, step.turn), pairing.basis, step.bend, mine=True)
        return y if self._lower is None else torch.where(self._lower, self.point + self.vector(z), y)

    def proju(self, eta: Tensor) -> Tensor:
        # The formula of the base class by fewer products with tall matrices.
        require_vector(self.point, eta)
        for mine in (False, True):
            inside = self._inside(eta) @ self._coordinates.to
            eta = plus(eta, self._coordinates.basis, -(self._vertical(inside) @ self._coordinates.back), mine=mine)
        return eta

    def inner(self, eta: Tensor, zeta: Tensor) -> Tensor:
        z = self.coordinates(eta)
        w = z if zeta is eta else self.coordinates(zeta)
        return (z.mT @ w).diagonal(dim1=-2, dim2=-1).sum(-1)

    def _inside(self, z: Tensor) -> Tensor:
        """Compute left^T z_G and right^T z_H."""
        return cores(self._coordinates.basis, self._split(z))

    def _vertical(self, inside: Tensor) -> Tensor:
        """Compute c (..., 2, h, h) of the vertical part (left c_G, right c_H) of z, from left^T z_G and right^T z_H."""
        # Entries (i, j) of left^T z_G and (j, i) of right^T z_H: y is their part along the vertical (cos, -sin).
        in_G, in_H = inside.unbind(-3)
        y = self._coordinates.cos * in_G - self._coordinates.sin * in_H.mT
        return torch.stack([self._coordinates.cos * y, -(self._coordinates.sin * y).mT], dim=-3)

    def relative_speed(self, z: Tensor) -> Tensor:
        """Compute max over c in R^h of |xi_G c| / |G c| and |xi_H c| / |H c|: the spectral norms of a and b.

        It is invariant on the orbit, by c -> A c. For square pairs in `mix`, no geodesic ends before t = 1 if it is
        below 1/2: with N^T = s^-2 M s^2 (horizontality) for M = left^T a, N = right^T b, the product moves on a line
        with relative velocity M + s N^T s^-1 = M + s^-1 M s, and |s^-1 M s| <= sqrt(|M| |N|). Infinite at a lower rank.
        """
        speed = self._speed(z)
        return speed if self._lower is None else torch.where(self._lower[..., 0, 0], torch.inf, speed)

    def _speed(self, z: Tensor) -> Tensor:
        return torch.maximum(*map(spectral_norm, self._split(times(self._split(z), self._coordinates.relative))))

    def _step(self, z: Tensor, order: str) -> Tensor:
        if order == "first":
            return self.vector(z)
        pairing, parts = self._pairing(), self._turned(z)
        way = expand(pairing, parts).way(pairing, parts)
        return way if self._lower is None else torch.where(self._lower, self.vector(z), way)

    def _exact(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self._lower is not None:
            raise GeodesicError(
                "an exact geodesic must start where rank(G H^T) = h. Found a lower rank, where only training may be: "
                "take order='second', a straight line there"
            )
        frame, reached = self._frame, torch.ones(z.shape[:-2], dtype=z.dtype, device=z.device)
        if self._relaxed or (self._t != 0 and self.point.shape[-1] > 1):  # no closed form
            way, reached = exact.expand(self._pairing(), self._s, self._t, self._turned(z), self._relaxed)
            return self.point + way, reached
        # In the frame the point is orthonormal, so series and exponentials act on well-scaled matrices. The last line
        # returns to the representative, which may be badly balanced.
        a, b = self._split(times(self._split(z), self._coordinates.relative))
        if self._t == 0:
            left, right = exact.inv_exponential(frame.left, a), exact.inv_exponential(frame.right, b)
        else:
            left, right, reached = (x.to(z.dtype) for x in exact.rank_one(self._t, frame.left, frame.right, a, b))
        return torch.cat([left @ frame.from_left, right @ frame.from_right], dim=-2), reached

    def linearised(self, order: str) -> Linearised:
        if order == "second" and self._lower is None:
            # Autograd takes longer, and its graph holds more tall matrices.
            return partial(self._linearise, self._pairing())
        return super().linearised(order)

    def _pairing(self) -> Pairing:
        return Pairing.of(self._frame, self._s, self._t)

    @full_precision
    def _linearise(self, pairing: Pairing, z: Tensor, out: Rows) -> PullBack:
        with torch.no_grad():
            parts = self._turned(z)
            step = expand(pairing, parts)
            way, sizes = step.way(pairing, parts), [part.shape[-2] for part in out]
            for part, start, end in zip(out, self.point.split(sizes, -2), way.split(sizes, -2), strict=True):
                torch.add(start, end, out=part)

        @full_precision
        def pull_back(egrad: Rows, into: Tensor) -> None:
            with torch.no_grad():
                of_factors = [part.shape[-2] for part in egrad] == [part.shape[-2] for part in parts]
                grad = [part.to(z.dtype) for part in egrad] if of_factors else self._split(join_rows(egrad, z))
                v = adjoint(pairing, parts, step, (grad[0], grad[1]))
                if self._coordinates.turns is None:  # `project`, by the known products with the basis
                    into.copy_(
                        plus(v.tall, self._coordinates.basis, v.core - self._vertical(v.inside + v.core), mine=True)
                    )
                else:  # left and right are not orthonormal
                    tall = self._split(plus(v.tall, pairing.basis, v.core, mine=True))
                    into.copy_(self.project(times(tall, self._coordinates.turns.mT)))
                if self._size is not None:
                    into.div_(self._size.to(into))

        return pull_back

    def _turned(self, z: Tensor) -> Both:
        """Return z in the singular frame and its units, as coordinates of the relaxed metric are in another basis."""
        z = z if self._size is None else z / self._size.to(z)
        return self._split(z if self._coordinates.turns is None else times(self._split(z), self._coordinates.turns))

    def _split(self, x: Tensor) -> Both:
        return split(x, self._coordinates.basis)
