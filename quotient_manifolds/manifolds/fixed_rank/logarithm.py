"""Find the logarithm of the fixed-rank quotient: geodesics by shooting, in the span of both points."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from quotient_manifolds.linalg import SingularFrame, singular_frame
from quotient_manifolds.manifolds.fixed_rank.alignment import alignment_length
from quotient_manifolds.manifolds.fixed_rank.shooting import Shots, solve
from quotient_manifolds.manifolds.horizontal import GeodesicError

MAX_EVALUATIONS = 40
TOLERANCE = 1e-9
"""How near, relative to the target, the end of a geodesic has to come."""
SEARCHED_RANK = 4
"""Up to this h, what the fast steps do not find is searched with the Jacobian, where geodesics are closed forms."""


def logarithms(n: int, t: float, x: Tensor, y: Tensor) -> Tensor:
    """Find horizontal vectors at x whose exact geodesics end on the orbits of y. Shapes (batch, n + m, h).

    Raises GeodesicError where none is found, or a longer one than a curve that is known.
    """
    like, x, y = x, x.double(), y.double()
    here, there = (singular_frame(p[:, :n], p[:, n:]) for p in (x, y))
    bases = common_span(here.left, there.left), common_span(here.right, there.right)
    shots = Shots(bases[0].shape[-1], t, _reduced(here, bases), _reduced(there, bases))
    z, miss = solve(shots)
    if (t == 0 or x.shape[-1] == 1) and x.shape[-1] <= SEARCHED_RANK:
        for row in (miss > TOLERANCE).nonzero():
            z[row], miss[row] = search(shots.of(row))
    if not bool((miss <= TOLERANCE).all()):
        raise GeodesicError(
            f"a geodesic from x should end at the orbit of y; the best one found misses by {float(miss.max()):.2g} of "
            "its norm: take points nearer to each other"
        )
    _require_shortest(here, there, t, torch.linalg.matrix_norm(z))
    # From the balanced representative in the bases back to x.
    a, b = shots.space.vector(z).split([basis.shape[-1] for basis in bases], dim=-2)
    unroot = here.s[:, :, None] ** -0.5
    return torch.cat([bases[0] @ a @ (unroot * here.from_left), bases[1] @ b @ (unroot * here.from_right)], dim=-2).to(
        like
    )


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


def _require_shortest(here: SingularFrame, there: SingularFrame, t: float, length: Tensor) -> None:
    """Raise GeodesicError where a known curve is shorter than the geodesic."""
    if t not in (0.0, 1.0):
        return
    bound = alignment_length(here, there, t)
    longer = length > bound * (1 + 1e-6) + 1e-9 * torch.linalg.vector_norm(here.s**t, dim=-1)
    if bool(longer.any()):
        row = longer.nonzero()[0, 0]
        raise GeodesicError(
            f"the geodesic from x to y should be the shortest; the one found has length {float(length[row]):.4g}, and "
            f"a curve of length {float(bound[row]):.4g} is known: take points nearer to each other"
        )


def search(shots: Shots) -> tuple[Tensor, Tensor]:
    """Find coordinates z of one velocity by Levenberg-Marquardt steps, and the relative miss that is left.

    `scipy.optimize.least_squares` on the miss of the end and the vertical part of z, with the Jacobian by reverse
    differentiation through the exponential, all rows in one batch.
    """
    space, n, guess = shots.space, shots.n, shots.guess()
    target = shots.y[:, :n] @ shots.y[:, n:].mT
    size = torch.linalg.matrix_norm(target)

    def residual(z: Tensor) -> Tensor:
        z = z.reshape(guess.shape)
        z_h = space.project(z)
        y = space.follow(z_h, "exact")[0]
        miss = (y[:, :n] @ y[:, n:].mT - target) / size
        # Vertical parts move no end: without a residual of their own they were free, and the Jacobian singular.
        return torch.cat([miss.flatten(), (z - z_h).flatten()])

    def function(z: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return residual(torch.from_numpy(z).to(guess)).cpu().numpy()

    def jacobian(z: np.ndarray) -> np.ndarray:
        leaf = torch.from_numpy(z).to(guess).requires_grad_()
        with torch.enable_grad():
            r = residual(leaf)
            rows = torch.eye(len(r), dtype=r.dtype, device=r.device)
            (J,) = torch.autograd.grad(r, leaf, rows, is_grads_batched=True)
        return J.cpu().numpy()

    start = guess.flatten().cpu().numpy()
    found = least_squares(
        function, start, jacobian, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=MAX_EVALUATIONS, x_scale="jac"
    )
    miss = guess.new_tensor([float(np.linalg.norm(function(found.x)))])
    return space.project(torch.from_numpy(found.x).to(guess).reshape(guess.shape)), miss
