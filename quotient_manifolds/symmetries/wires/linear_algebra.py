"""Null spaces and ranks, relative to the largest number."""

from __future__ import annotations

import numpy as np
import scipy.linalg

Array = np.ndarray
RELATIVE = 1e-9


def kernel(matrix: Array) -> Array:
    """Return a basis of the null space, in columns."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = np.linalg.qr(matrix, mode="r")
    return scipy.linalg.null_space(matrix, rcond=RELATIVE) if matrix.size else np.eye(matrix.shape[1])


def full_rank(R: Array) -> bool:
    """Say whether a matrix of no fewer rows than columns, or the triangle of its QR, has full column rank."""
    if not np.isfinite(R).all():
        return False
    n = R.shape[1]
    if n > 8 and len(R) == n and not np.tril(R, -1).any():
        rcond, _ = scipy.linalg.lapack.dtrcon(R)
        if rcond > 1e-6:
            return True
    return bool(np.linalg.matrix_rank(R, tol=RELATIVE * np.abs(R).max()) == n)
