"""Find the logarithm of the fixed-rank quotient: geodesics by shooting."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

MAX_EVALUATIONS = 40
TOLERANCE = 1e-9
"""How near, relative to the target, the end of a geodesic has to come."""


class Shooter(Protocol):
    """State what is needed of a horizontal space: coordinates, their horizontal part, and the exact geodesic."""

    point: Tensor

    def coordinates(self, eta: Tensor) -> Tensor: ...
    def project(self, z: Tensor) -> Tensor: ...
    def follow(self, z: Tensor, order: str) -> tuple[Tensor, Tensor]: ...


def common_span(here: Tensor, there: Tensor) -> Tensor:
    """Build an orthonormal basis (n, k), k <= 2h, of the columns of two matrices (n, h) of orthonormal columns."""
    rest = there - here @ (here.mT @ there)
    rest = rest - here @ (here.mT @ rest)
    k = min(rest.shape[-1], here.shape[0] - here.shape[1])
    Q = torch.linalg.svd(rest, full_matrices=False).U[:, :k]
    return torch.linalg.qr(torch.cat([here, Q], dim=-1)).Q


def shoot(space: Shooter, n: int, target: Tensor, guess: Tensor) -> tuple[Tensor, float]:
    """Find coordinates z of the velocity whose exact geodesic ends at G H^T = target, and the relative miss left.

    Levenberg-Marquardt / trust region steps of `scipy.optimize.least_squares` on the miss of the end and the vertical
    part of z, with the Jacobian by reverse differentiation through the exponential, all rows in one batch.
    Shapes: space at an unbatched point (n + m, h), target (n, m), guess (n + m, h), coordinates.
    """
    size = torch.linalg.matrix_norm(target)

    def residual(z: Tensor) -> Tensor:
        z = z.reshape(guess.shape)
        z_h = space.project(z)
        y = space.follow(z_h, "exact")[0]
        miss = (y[:n] @ y[n:].mT - target) / size
        # Vertical parts move no end: without a residual of their own they were free, and the Jacobian singular.
        return torch.cat([miss.flatten(), (z - z_h).flatten()])

    def function(z: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return residual(torch.from_numpy(z)).numpy()

    def jacobian(z: np.ndarray) -> np.ndarray:
        leaf = torch.from_numpy(z).requires_grad_()
        with torch.enable_grad():
            r = residual(leaf)
            rows = torch.eye(len(r), dtype=r.dtype)
            (J,) = torch.autograd.grad(r, leaf, rows, is_grads_batched=True)
        return J.numpy()

    start = guess.flatten().numpy()
    found = least_squares(
        function, start, jacobian, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=MAX_EVALUATIONS, x_scale="jac"
    )
    miss = float(np.linalg.norm(function(found.x)))
    return space.project(torch.from_numpy(found.x).reshape(guess.shape)), miss
