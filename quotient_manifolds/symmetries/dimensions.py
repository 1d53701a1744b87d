"""Count the dimensions of symmetries; directions that several symmetries share count once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import FromSum, Gauge, IntoMean, Params, Symmetry, Torus, Translation

_RANK = 1e-8


def independent(symmetries: Sequence[Symmetry], params: Params) -> tuple[Symmetry, ...]:
    """Return the symmetries without log-scales whose tangents depend on other symmetries; later tori have priority.

    Translations of adapters beside their base do not count as others: if the base is frozen, scales of adapters remain.
    """
    others = [each for each in symmetries if not isinstance(each, Torus) and not _is_beside(each)]
    known = _spanned([t for each in others for t in _tangents(each, params)], params)
    kept: dict[int, Symmetry] = {}
    for k, each in reversed([*enumerate(symmetries)]):
        if not isinstance(each, Torus):
            kept[k] = each
            continue
        (T,) = _tangents(each, params)
        some = _pivots(T, known)
        if len(some):
            kept[k] = each if len(some) == each.size else _columns(each, some)
            known = torch.cat([known, _beyond(T[some], known)])
    return tuple(kept[k] for k in sorted(kept))


def _is_beside(symmetry: Symmetry) -> bool:
    return isinstance(symmetry, Translation) and symmetry.kind == "beside"


def _columns(torus: Torus, some: Tensor) -> Torus:
    """Return the torus restricted to some of its log-scales."""
    place = torch.full((torus.size,), -1)
    place[some] = torch.arange(len(some))
    slices = []
    for each in torus.slices:
        keep = place[each.index[1]] >= 0
        if bool(keep.any()):
            index = torch.stack([each.index[0][keep], place[each.index[1][keep]]])
            slices.append(replace(each, index=index, powers=each.powers[keep]))
    return Torus(tuple(slices), len(some), torus.constants)


def _pivots(T: Tensor, known: Tensor) -> Tensor:
    """Return the numbers of the rows of T (k, P) that are linearly independent of `known` and of earlier rows."""
    T = T / T.norm(dim=1, keepdim=True).clamp(min=1e-300)
    for _ in range(2):
        T = T - (T @ known.mT) @ known
    kept: list[int] = []
    for k in range(len(T)):
        norm = float(T[k].norm())
        if norm > _RANK:
            q = T[k] / norm
            T = T - torch.outer(T @ q, q)
            kept.append(k)
    return torch.tensor(kept, dtype=torch.long)


def dimensions(pairs: Sequence[Gauge], others: Sequence[Symmetry], params: Params) -> list[int]:
    """Return the dimension that each of `others` adds to the span of the pairs and of earlier symmetries."""
    known = _spanned([t for pair in pairs for t in _tangents(pair, params)], params)
    found = []
    for each in others:
        before = len(known)
        for T in _tangents(each, params):
            known = torch.cat([known, _beyond(T, known)])
        found.append(len(known) - before)
    return found


def covered(symmetry: Symmetry, others: Sequence[Symmetry]) -> bool:
    """Return whether an `IntoMean` gauge acts only on parameters that have a translation of their own."""
    if (
        not isinstance(symmetry, Gauge)
        or not isinstance(symmetry.algebra, IntoMean)
        or isinstance(symmetry.algebra, FromSum)
    ):
        return False
    free = {each.names[0] for each in others if isinstance(each, Translation) and len(each.parts) == 1}
    return free.issuperset(symmetry.names)


def _tangents(symmetry: Symmetry, params: Params) -> Iterator[Tensor]:
    """Yield the tangents of generators that span the algebra, as rows (k, P)."""
    if not isinstance(symmetry, Gauge):
        size = int(torch.Size(symmetry.shape).numel())
        yield _flat(symmetry, torch.eye(size, dtype=torch.float64).view(-1, *symmetry.shape), params)
        return
    n = symmetry.algebra.n
    for channels, algebra in symmetry.algebra.summands:
        E = algebra.project(torch.eye(algebra.n**2, dtype=torch.float64).view(-1, algebra.n, algebra.n))
        for own in channels:
            X = torch.zeros(len(E), n, n, dtype=torch.float64)
            X[:, own[:, None], own] = E
            yield _flat(symmetry, X, params)


def _flat(symmetry: Symmetry, X: Tensor, params: Params) -> Tensor:
    along = symmetry.tangent(params, X)
    return torch.cat(
        [along[n].flatten(1) if n in along else w.new_zeros(len(X), w.numel()) for n, w in params.items()], 1
    )


def _spanned(several: Sequence[Tensor], params: Params) -> Tensor:
    """Return an orthonormal basis (k, P) of the span of tangents."""
    size = sum(w.numel() for w in params.values())
    known = torch.zeros(0, size, dtype=torch.float64)
    return _beyond(torch.cat([*several]), known) if several else known


def _beyond(T: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of tangents (k, P), orthogonal to `known`; tangents are normalized."""
    norms = T.norm(dim=1)
    T = T[norms > _RANK * norms.max()] if len(T) else T
    T = T / T.norm(dim=1, keepdim=True)
    for _ in range(2):
        T = T - (T @ known.mT) @ known
    if not len(T):
        return T
    # Pivoted QR, as an SVD need not converge for repeated singular values, which orthonormal rows have.
    Q, R, _ = scipy.linalg.qr(T.mT.numpy(), mode="economic", pivoting=True)
    return torch.from_numpy(Q[:, abs(R.diagonal()) > _RANK].T.copy())
