"""Null spaces and ranks, relative to the largest number."""

from __future__ import annotations

import numpy as np
import scipy.linalg

Array = np.ndarray
RELATIVE = 1e-11
SURE = 1e-6  # a condition that leaves no doubt
SMALL = 1e-9
ROWS_AT_ONCE = 64
EVEN = 1e-3  # sizes of columns that differ by no more


def kernel(matrix: Array, scale: float = 0.0) -> Array:
    """Return an orthonormal basis of the null space, in columns; `scale` is how large numbers are that count."""
    rows, columns = matrix.shape
    if not matrix.size:
        return np.eye(columns)
    if 2 * rows < columns:
        Q, R, _ = scipy.linalg.qr(matrix.T, pivoting=True)
        return Q[:, _rank(R, scale) :]
    if invertible(matrix[:columns], scale):
        return np.zeros((columns, 0))
    if rows > columns:
        matrix = np.asarray(np.linalg.qr(matrix, mode="r"))
        if invertible(matrix, scale):
            return np.zeros((columns, 0))
    return np.linalg.qr(echelon(matrix, scale))[0]


def echelon(matrix: Array, scale: float = 0.0) -> Array:
    """Return a basis of the null space, in columns, each with an unknown that is 1 and that no other one has."""
    count = matrix.shape[1]
    if matrix.shape[0] > 2 * count:
        matrix = np.asarray(np.linalg.qr(matrix, mode="r"))
    R, order = scipy.linalg.qr(matrix, mode="r", pivoting=True)
    rank = _rank(R, scale)
    found = np.zeros((count, count - rank))
    if rank:
        found[order[:rank]] = -scipy.linalg.solve_triangular(R[:rank, :rank], R[:rank, rank:])
    found[order[rank:], np.arange(count - rank)] = 1.0
    return found


def _rank(R: Array, scale: float = 0.0) -> int:
    """Return the rank by the triangle of a QR with pivots."""
    size = np.abs(np.diag(R))
    return int((size > RELATIVE * max(size[0], scale)).sum()) if len(size) else 0


def invertible(matrix: Array, scale: float = 0.0) -> bool:
    """Return whether a matrix is square and surely of full rank, with columns brought to one size."""
    if matrix.shape[0] != matrix.shape[1] or not matrix.size:
        return False
    size = np.abs(matrix).sum(0)
    if not np.isfinite(size).all() or size.min() <= EVEN * size.max() or SURE * size.min() <= RELATIVE * scale:
        return False
    parts, _, failed = scipy.linalg.lapack.dgetrf((matrix / size).T, overwrite_a=True)
    return not failed and bool(scipy.linalg.lapack.dgecon(parts, 1.0, norm="I")[0] > SURE)


def span(matrix: Array, scale: float = 0.0) -> Array:
    """Return an orthonormal basis of what the columns span; `scale` is how large numbers are that count."""
    if not matrix.size:
        return matrix
    Q, R, _ = scipy.linalg.qr(matrix, mode="economic", pivoting=True)
    return Q[:, : _rank(R, scale)]


def outside(K: Array) -> Array:
    """Return functionals of which orthonormal columns are the null space: all that is not along them."""
    return np.eye(len(K)) - K @ K.T


def reduced(basis: Array) -> Array:
    """Return a basis (k, d) of the same space whose columns have the first places that they can to themselves."""
    count, width = basis.shape
    most = SMALL * max(1.0, float(np.abs(basis).max()))
    large = np.abs(basis).max(1) > most
    first = np.flatnonzero(large)[:width]
    if invertible(basis[first]):
        found, rest = np.zeros_like(basis), np.delete(np.arange(count), first)
        found[first], found[rest] = np.eye(width), np.linalg.solve(basis[first].T, basis[rest].T).T
        return _begun(found, first, large)
    places, Q = list[int](), np.zeros((width, 0))
    for start in range(0, count, ROWS_AT_ONCE):
        rest = basis[start : start + ROWS_AT_ONCE]
        rest = rest - (rest @ Q) @ Q.T  # what the rows before do not span
        if Q.shape[1] + len(rest) <= width:
            more, R = np.linalg.qr(rest.T)
            if np.abs(np.diag(R)).min() > SURE * most / SMALL:  # all of them are new
                places += range(start, start + len(rest))
                Q = np.concatenate([Q, more - Q @ (Q.T @ more)], 1)
                continue
        while len(places) < width and (new := np.flatnonzero(np.abs(rest).max(1) > most)).size:
            row = rest[new[0]] - Q @ (Q.T @ rest[new[0]])
            places.append(start + int(new[0]))
            Q = np.concatenate([Q, (row / np.linalg.norm(row))[:, None]], 1)
            rest = rest - np.outer(rest @ Q[:, -1], Q[:, -1])
    chosen = basis[places]
    if len(chosen) < width:
        return basis @ np.linalg.pinv(chosen)
    return _begun(np.linalg.solve(chosen.T, basis.T).T, np.array(places), large)


def _begun(basis: Array, places: Array, large: Array) -> Array:
    """Return a basis without what rounding leaves in large rows before the place at which each direction begins."""
    before = np.arange(len(basis))[:, None] < places
    return np.where(before & large[:, None], 0.0, basis)
