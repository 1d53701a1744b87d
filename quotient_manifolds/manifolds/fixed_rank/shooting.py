"""Solve Exp_x(z) = y for the fixed-rank quotient, a batch at a time: fixed-point steps with Anderson acceleration.

Where the geodesic with velocity z ends, the guess of the logarithm from there to y (`first_log`) is what is missing; it
is carried back to x by rotations of both singular frames and added to z. For near points that is a contraction, whose
factor shrinks with the distance. The accelerated step [Anderson 1965; Walker and Ni 2011] goes where the linear model
of all steps so far has no miss, which does what GMRES would with the Jacobian, and without computing it.

Geodesics of `mix` have no closed form. They are searched along rough ones, of which one exact geodesic at the end tells
the error; that hardly depends on z, so the search goes on with the rough ends corrected by it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame, product_gap, singular_frame
from quotient_manifolds.manifolds.fixed_rank.alignment import carry, first_log, nearest_rotation
from quotient_manifolds.manifolds.fixed_rank.fixed_steps import follow_mix
from quotient_manifolds.manifolds.fixed_rank.space import FixedRankSpace
from quotient_manifolds.manifolds.horizontal import GeodesicError

MAX_STEPS = 60
PATIENCE = 8
"""Steps without progress, a miss smaller by a fifth, after which a search is given up."""
ROUNDS = 5
"""Of searches along rough geodesics, each of which corrects them by what the last one's ends were off."""
DONE = 1e-12
"""Relative miss, of the product, at which a search ends; the last step is then at most 1e-9 of the velocity, too."""


class Shots:
    """Hold pairs of points (batch, n + m, h), float64, of a metric t, between which geodesics are searched."""

    def __init__(self, n: int, t: float, x: Tensor, y: Tensor) -> None:
        self.n, self.t, self.x, self.y = n, t, x, y
        self.space = FixedRankSpace(x, n, t, 0.0, x.dtype)
        self.rough = t == 1 and x.shape[-1] > 1
        self.here, self.there = (singular_frame(p[..., :n, :], p[..., n:, :]) for p in (x, y))

    def of(self, rows: Tensor) -> Shots:
        """Return the same for some pairs."""
        return Shots(self.n, self.t, self.x[rows], self.y[rows])

    def guess(self) -> Tensor:
        """Guess the coordinates of the logarithm."""
        return self.space.project(torch.cat(first_log(self.here, self.there, self.t), dim=-2) * self._weight(self.here))

    def follow(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the end of the exact geodesic and the time reached."""
        return self.space.follow(z, "exact")

    def end(self, z: Tensor) -> Tensor:
        """Return the end of the geodesic, roughly where that takes less time; x where it leaves the manifold."""
        if self.rough:
            end = torch.cat(follow_mix(*self._split(self.x), *self._split(self.space.vector(z))), dim=-2)
        else:
            end, reached = self.follow(z)
            end = torch.where(reached[:, None, None] < 1, torch.nan, end)
        return end

    def aim(self, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return the miss at the end, relative to y, and what is to be added to z."""
        (G, H), (P, Q) = self._split(end), self._split(self.y)
        miss = product_gap(G, H, P, Q) / torch.linalg.vector_norm(self.there.s, dim=-1)
        there = singular_frame(G, H)
        a, b = (v * self._weight(there) for v in first_log(there, self.there, self.t))
        turns = [nearest_rotation(p.mT @ q) for p, q in ((there.left, self.here.left), (there.right, self.here.right))]
        # inv acts on the columns of G as left does, mix as H does: there a change of xi_G H^T is carried as it is.
        over = turns if self.t < 0.5 else turns[::-1]
        back = carry(a, there.left, self.here.left, over[0]), carry(b, there.right, self.here.right, over[1])
        return miss, self.space.project(torch.cat(back, dim=-2))

    def close(self, miss: Tensor, z: Tensor, step: Tensor) -> Tensor:
        """Tell where z is as good as rounding lets it be."""
        norm = torch.linalg.matrix_norm
        rounding = 1e-14 * torch.linalg.vector_norm(self._weight(self.here), dim=(-2, -1))
        return (miss <= DONE) & (norm(step) <= 1e-9 * norm(z) + rounding)

    def _weight(self, frame: SingularFrame) -> Tensor:
        return (frame.s**self.t)[..., None, :]

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : self.n, :], x[..., self.n :, :]


def solve(shots: Shots) -> tuple[Tensor, Tensor]:
    """Return the best coordinates z (batch, n + m, h) that were found, and their relative misses (batch,)."""
    try:
        return _solve(shots)
    except GeodesicError:  # one of them cannot be followed
        if len(shots.x) == 1:
            return shots.guess(), shots.x.new_full((1,), torch.inf)
        rows = torch.arange(len(shots.x), device=shots.x.device)
        found = [solve(shots.of(row)) for row in rows.split(1)]
        z, miss = zip(*found, strict=True)
        return torch.cat(z), torch.cat(miss)


def _solve(shots: Shots) -> tuple[Tensor, Tensor]:
    z = shots.guess()
    best, least = _descend(shots, z, torch.zeros_like(z))
    if not shots.rough:
        return best, least
    z, least = best, torch.full_like(least, torch.inf)
    for _ in range(ROUNDS):
        end, reached = shots.follow(z)
        miss = torch.where(reached < 1, torch.inf, shots.aim(end)[0])
        better = miss < 0.5 * least
        best, least = torch.where(better[:, None, None], z, best), torch.minimum(miss, least)
        if not bool((better & (miss > DONE)).any()):
            break
        correction = torch.where(reached[:, None, None] < 1, 0.0, end - shots.end(z))
        z = _descend(shots, z, correction.nan_to_num())[0]
    return best, least


def _descend(shots: Shots, z: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    """Bring end(z) + correction to the orbit of y; the best z and their misses."""
    best, least = z.clone(), z.new_full((len(z),), torch.inf)
    live, idle = torch.arange(len(z), device=z.device), torch.zeros(len(z), dtype=torch.int64, device=z.device)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(MAX_STEPS):
        end = shots.end(z) + correction
        lost = ~end.isfinite().all(-1).all(-1)
        miss, step = shots.aim(torch.where(lost[:, None, None], shots.x, end))
        miss = torch.where(lost, torch.inf, miss)
        better = miss < least[live]
        idle = torch.where(miss < 0.8 * least[live], 0, idle + 1)
        least[live] = torch.minimum(miss, least[live])
        best[live[better]] = z[better]
        keep = ~shots.close(miss, z, step) & (idle < PATIENCE)
        if not bool(keep.any()):
            break
        if not bool(keep.all()):
            live, idle, z, step, lost, correction = (v[keep] for v in (live, idle, z, step, lost, correction))
            past, shots = [(u[keep], v[keep]) for u, v in past], shots.of(keep)
        if bool(lost.any()):  # begin again, with shorter vectors
            z, past = torch.where(lost[:, None, None], 0.7 * z, z + step), []
            continue
        past.append((z, step))
        z = z + step - _acceleration(past)
    return best, least


def _acceleration(past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute by how much the next z differs from the last one plus its step: least squares in differences."""
    if len(past) == 1:
        return torch.zeros_like(past[0][0])
    z, steps = (torch.stack(column, dim=-1).flatten(-3, -2) for column in zip(*past, strict=True))
    change_z, change = z.diff(dim=-1), steps.diff(dim=-1)
    size = torch.linalg.vector_norm(change, dim=-2, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    Q, R = torch.linalg.qr(change / size)
    weights = torch.linalg.pinv(R, rtol=1e-10) @ (Q.mT @ steps[..., -1:])  # directions below are rounding's
    return ((change_z + change) / size @ weights)[..., 0].unflatten(-1, past[0][0].shape[-2:])
