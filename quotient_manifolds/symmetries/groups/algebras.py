r"""Define the Lie algebras of real matrices that act on the channels of a wire, and their groups.

Each class is an algebra of n x n matrices X. Its orthogonal projection, in <X, Y> = tr X^T Y, maps the charge of a wire
to the charges of its own generators; exp maps it to the group. Matrices come in batches (..., n, n), float64.

| algebra | matrices | preserves |
|---|---|---|
| `GL` | all | nothing |
| `Pattern` | those that vanish outside a transitive pattern (blocks, triangles) | flags of channels |
| `SO` | skew | lengths (RMSNorm) |
| `CenteredSO` | skew, X 1 = 0 | lengths and the mean (LayerNorm) |
| `IntoMean` | 1 w^T | t - mean(t) |
| `FromSum` | t 1^T | activations whose channels sum to 0, up to a constant for a constant sum |
| `Complex` | [[a, -b], [b, a]] | the rotations of a plane (rotary embeddings) |
| `Span` | the span of a basis | |
| `DirectSum` | algebras on sets of channels | `diagonal`, `planes` and `blocks` make the common ones |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from scipy.linalg import logm
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.groups.rows import Record, integers, numbers

_RANK = 1e-10
"""A matrix is in an algebra if its cosine with its projection differs from 1 by less than this."""

_SKEW = 1e-9
"""A matrix is skew if its cosine with its skew part differs from 1 by less than this."""

_POWERS = 12
"""Steps of the power method that scales random matrices to a spectral norm of about 1."""


@dataclass(frozen=True, eq=False)
class Algebra(Record, ABC):
    """Define a Lie algebra of real n x n matrices, and its group."""

    n: int

    @abstractmethod
    def project(self, C: Tensor) -> Tensor:
        """Return the orthogonal projection of matrices (..., n, n) onto the algebra, the same shape."""

    def bound(self, S: Tensor) -> Tensor:
        """Bound the sums of absolute summands of project(C), given those of C, S >= 0 (..., n, n).

        The bound is project(S) unless the projection subtracts.
        """
        return self.project(S)

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Return the dimension of the algebra."""

    def skew(self) -> Tensor:
        """Return an orthonormal basis (k, n, n) of its skew matrices.

        The span of `dimension` random projections is the algebra, with probability one.
        """
        draw = torch.Generator().manual_seed(0)
        X = self.project(torch.randn(self.dimension, self.n, self.n, generator=draw, dtype=torch.float64))
        B = torch.linalg.qr(X.flatten(1).mT)[0].mT.view(-1, self.n, self.n)
        inner = ((B - B.mT) / 2).flatten(1) @ B.flatten(1).mT
        cosines, R = torch.linalg.eigh((inner + inner.mT) / 2)
        return (R[:, cosines > 1 - _SKEW].mT @ B.flatten(1)).view(-1, self.n, self.n)

    def within(self, N: Tensor, M: Tensor) -> Tensor:
        """Return an orthonormal basis (k, n, n) of all N Y M^T in the algebra. N and M have orthonormal columns."""
        B = torch.einsum("ia,jb->abij", N, M).flatten(0, 1)
        cosines, vectors = torch.linalg.eigh(B.flatten(1) @ self.project(B).flatten(1).mT)
        return (vectors[:, cosines > 1 - _RANK].mT @ B.flatten(1)).view(-1, self.n, self.n)

    def count_within(self, N: Tensor, M: Tensor) -> int:
        """Return the number of matrices in `within`, without computing them if there is a formula."""
        return len(self.within(N, M))

    def random(self, generator: torch.Generator, *batch: int) -> Tensor:
        """Draw matrices (*batch, n, n): Gaussian, projected, of spectral norm about 1."""
        X = self.project(torch.randn(*batch, self.n, self.n, generator=generator, dtype=torch.float64))
        v = torch.randn(*batch, self.n, 1, generator=generator, dtype=torch.float64)
        for _ in range(_POWERS):
            v = X.mT @ (X @ v)
            v = v / v.norm(dim=-2, keepdim=True).clamp(min=1e-300)
        return X / (X @ v).norm(dim=-2, keepdim=True).clamp(min=1e-300)

    def exp(self, X: Tensor) -> Tensor:
        """Return the matrix exponential of elements of the algebra (..., n, n), an element of the group."""
        return torch.matrix_exp(X)

    def contains(self, A: Tensor, tolerance: float = 1e-9) -> bool:
        """Return whether all matrices (..., n, n) are in the group, in any of its connected components.

        tolerance: of entries, relative to the largest of A. The group of an algebra that is closed under products
        consists of all invertible 1 + X.
        """
        X = A - torch.eye(self.n, dtype=A.dtype, device=A.device)
        return _is_zero(X - self.project(X), A, tolerance) and bool((torch.linalg.cond(A) < 1e15).all())

    @property
    def components(self) -> int:
        """Return the number of elements outside the identity component for `reflect`; 0 for a connected group."""
        return 1

    def reflect(self, flips: Tensor) -> Tensor:
        """Return the product (..., n, n) of the elements outside the identity component that flips (..., k) selects.

        By default there is one, which changes the sign of channel 0.
        """
        return _signs(self.n, torch.zeros(1, dtype=torch.int64), flips[..., : self.components])

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        """Return the orthogonal elements R of the group with the largest <M, R>, M (..., n, n): Procrustes.

        flips: bool (components,), which elements outside the identity component belong to the group. The default is the
        identity, for groups with few other orthogonal elements.
        """
        return torch.eye(self.n, dtype=M.dtype, device=M.device).expand(M.shape)

    @property
    def summands(self) -> tuple[tuple[Tensor, Algebra], ...]:
        """Return the algebra as a direct sum: channels int64 (k, m), with the algebra of m x m matrices on each row."""
        return ((torch.arange(self.n)[None], self),)


def _signs(n: int, channels: Tensor, flips: Tensor) -> Tensor:
    """Return diagonal matrices (..., n, n) of signs, -1 on the channels (k,) that flips (..., k) selects."""
    signs = torch.ones(*flips.shape[:-1], n, dtype=torch.float64)
    signs[..., channels[: flips.shape[-1]]] -= 2.0 * flips.double()
    return torch.diag_embed(signs)


def _meet(N: Tensor, M: Tensor) -> Tensor:
    """Return an orthonormal basis (n, k) of the intersection of the spans of two sets of orthonormal columns."""
    U, cosines, _ = torch.linalg.svd(N.mT @ M, full_matrices=False)
    return N @ U[:, cosines > 1 - _RANK]


def _has_ones(N: Tensor) -> bool:
    """Return whether the vector 1 is in the span of orthonormal columns (n, k)."""
    return float(N.sum(0).square().sum()) > (1 - _RANK) * len(N)


def _is_zero(X: Tensor, A: Tensor, tolerance: float) -> bool:
    return not X.numel() or bool((X.abs().amax((-2, -1)) <= tolerance * A.abs().amax((-2, -1))).all())


def _rotation(M: Tensor, flips: Tensor | None) -> Tensor:
    """Return the orthogonal R with the largest <M, R>; with determinant 1 unless reflections are allowed."""
    U, _, Vh = torch.linalg.svd(M)
    if flips is None or not bool(flips.all()):
        sign = torch.linalg.det(U @ Vh).sign()
        proper = sign if flips is None else torch.where(flips[..., 0], torch.ones_like(sign), sign)
        U = torch.cat([U[..., :-1], U[..., -1:] * proper[..., None, None]], -1)
    return U @ Vh


@dataclass(frozen=True, eq=False)
class GL(Algebra):
    """Represent all n x n matrices; the group is GL(n), the invertible matrices."""

    def project(self, C: Tensor) -> Tensor:
        return C

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        return _rotation(M, flips)

    @property
    def dimension(self) -> int:
        return self.n**2

    def count_within(self, N: Tensor, M: Tensor) -> int:
        return N.shape[1] * M.shape[1]


@dataclass(frozen=True, eq=False)
class Pattern(Algebra):
    """Represent matrices that vanish where `mask` (n, n) is False: blocks, or triangles of blocks.

    Raises ValueError unless the mask is transitive: if (i, j) and (j, k) are in it, (i, k) must be, too.
    """

    mask: Tensor

    def __post_init__(self) -> None:
        self._store(mask=self.mask.detach().to("cpu", torch.bool).clone())
        if self.mask.shape != (self.n, self.n):
            raise ValueError(f"mask must have shape {(self.n, self.n)}. Found {tuple(self.mask.shape)}.")
        paths = self.mask.double()
        if bool((((paths @ paths) > 0) & ~self.mask).any()):
            raise ValueError(
                "mask must be transitive, so that products stay inside. Found a path of two that is outside."
            )

    def project(self, C: Tensor) -> Tensor:
        return C.where(self.mask.to(C.device), 0.0)

    @property
    def dimension(self) -> int:
        return int(self.mask.sum())

    def exp(self, X: Tensor) -> Tensor:
        inside = self.mask.to(X.device) | torch.eye(self.n, dtype=torch.bool, device=X.device)
        return torch.matrix_exp(X).where(inside, 0.0)  # exact zeros outside

    @property
    def components(self) -> int:
        return len(self._firsts)

    def reflect(self, flips: Tensor) -> Tensor:
        return _signs(self.n, self._firsts, flips)

    @property
    def _firsts(self) -> Tensor:
        """Return the first channel of each diagonal block GL(m), whose determinant has a sign."""
        mixed = (self.mask & self.mask.mT).int()
        return torch.nonzero(self.mask.diagonal() & (mixed.argmax(1) == torch.arange(self.n)))[:, 0]

    @property
    def summands(self) -> tuple[tuple[Tensor, Algebra], ...]:
        labels = torch.from_numpy(connected_components(self.mask.numpy(), directed=False)[1])
        sets = [torch.nonzero(labels == each)[:, 0] for each in labels[self.mask.any(1) | self.mask.any(0)].unique()]
        return tuple((c[None], Pattern(len(c), self.mask[c[:, None], c])) for c in sets)


@dataclass(frozen=True, eq=False)
class SO(Algebra):
    """Represent skew matrices; the group is O(n), which preserves lengths, as a stream under RMSNorm requires."""

    def project(self, C: Tensor) -> Tensor:
        return (C - C.mT) / 2

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        return _rotation(M, flips)

    def bound(self, S: Tensor) -> Tensor:
        return ((S + S.mT) / 2) * (1 - torch.eye(self.n, dtype=S.dtype, device=S.device))

    @property
    def dimension(self) -> int:
        return self.n * (self.n - 1) // 2

    def count_within(self, N: Tensor, M: Tensor) -> int:
        k = _meet(N, M).shape[1]  # N Y M^T is skew only on the intersection
        return k * (k - 1) // 2

    def contains(self, A: Tensor, tolerance: float = 1e-9) -> bool:
        return _is_zero(A.mT @ A - torch.eye(self.n, dtype=A.dtype, device=A.device), A, tolerance)


@dataclass(frozen=True, eq=False)
class CenteredSO(Algebra):
    """Represent skew matrices with X 1 = 0; the group is orthogonal and fixes the vector 1, as LayerNorm requires."""

    def project(self, C: Tensor) -> Tensor:
        P = torch.eye(self.n, dtype=C.dtype, device=C.device) - 1 / self.n
        C = P @ C @ P
        return (C - C.mT) / 2

    def bound(self, S: Tensor) -> Tensor:
        P = (torch.eye(self.n, dtype=S.dtype, device=S.device) - 1 / self.n).abs()
        S = P @ S @ P
        return ((S + S.mT) / 2) * (1 - torch.eye(self.n, dtype=S.dtype, device=S.device)) * (self.n > 2)

    def count_within(self, N: Tensor, M: Tensor) -> int:
        both = _meet(N, M)
        k = both.shape[1] - bool(both.sum(0).square().sum() > _RANK * self.n)  # dimension orthogonal to 1
        return k * (k - 1) // 2

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        if self.n < 2:
            return torch.ones_like(M)
        one = torch.ones(self.n, 1, dtype=M.dtype, device=M.device)
        B = torch.linalg.svd(one)[0][:, 1:]  # a basis of the vectors orthogonal to 1
        return B @ _rotation(B.mT @ M @ B, flips) @ B.mT + 1 / self.n

    @property
    def dimension(self) -> int:
        return (self.n - 1) * (self.n - 2) // 2

    def contains(self, A: Tensor, tolerance: float = 1e-9) -> bool:
        return SO(self.n).contains(A, tolerance) and _is_zero(A.sum(-1, keepdim=True) - 1, A, self.n * tolerance)

    @property
    def components(self) -> int:
        return int(self.n > 1)

    def reflect(self, flips: Tensor) -> Tensor:
        swap = torch.eye(self.n, dtype=torch.float64)
        swap[:2, :2] = 1 - swap[:2, :2]
        return swap.where(flips[..., None].bool(), torch.eye(self.n, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class IntoMean(Algebra):
    """Represent matrices 1 w^T: A = 1 + 1 w^T adds w . t to all channels, which changes only the mean.

    Readers of t - mean(t) are not slots of the wire, because their input is unchanged.
    """

    def project(self, C: Tensor) -> Tensor:
        return C.mean(-2, keepdim=True).expand(C.shape)

    @property
    def dimension(self) -> int:
        return self.n

    def within(self, N: Tensor, M: Tensor) -> Tensor:
        w = M.mT[:, None] / self.n**0.5
        return w.expand(-1, self.n, -1)[: len(w) if _has_ones(N) else 0]

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        odd = (M.sum((-2, -1)) < 0)[..., None]  # the reflection R = 1 - 2/n 1 1^T has the larger <M, R>
        return self.reflect(odd & flips if flips is not None else torch.zeros_like(odd)).to(M)

    def reflect(self, flips: Tensor) -> Tensor:
        return torch.eye(self.n, dtype=torch.float64) - 2.0 / self.n * flips[..., None].double()


@dataclass(frozen=True, eq=False)
class FromSum(IntoMean):
    """Represent matrices t 1^T: A = 1 + t 1^T adds t times the sum of channels, a constant vector if it is constant."""

    def project(self, C: Tensor) -> Tensor:
        return C.mean(-1, keepdim=True).expand(C.shape)

    def within(self, N: Tensor, M: Tensor) -> Tensor:
        return super().within(M, N).mT


@dataclass(frozen=True, eq=False)
class Complex(Algebra):
    """Represent the matrices [[a, -b], [b, a]] on a plane, which commute with J = [[0, -1], [1, 0]]: gl(1, C)."""

    n: int = 2

    def __post_init__(self) -> None:
        if self.n != 2:
            raise ValueError(f"a plane must have two channels. Found {self.n}. Take planes(n, pairs) for several.")

    def project(self, C: Tensor) -> Tensor:
        J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=C.dtype, device=C.device)
        return (C + J.mT @ C @ J) / 2

    def bound(self, S: Tensor) -> Tensor:
        return (S + S.flip(-2, -1)) / 2

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        R = self.project(M)
        size = torch.linalg.det(R).clamp(min=0.0).sqrt()[..., None, None]
        return torch.where(size > 0, R / size.clamp(min=1e-300), torch.eye(2, dtype=M.dtype, device=M.device))

    @property
    def components(self) -> int:
        return 0

    @property
    def dimension(self) -> int:
        return 2


@dataclass(frozen=True, eq=False)
class Span(Algebra):
    """Represent the real span of matrices `basis` (k, n, n), stored as an orthonormal basis.

    Raises ValueError if the matrices are dependent, or if a commutator leaves the span by more than 1e-7.
    `contains` accepts only elements exp(X), X in the span, whose principal logarithm is X.
    """

    basis: Tensor

    def __post_init__(self) -> None:
        basis = numbers(self.basis)
        if basis.ndim != 3 or basis.shape[1:] != (self.n, self.n):
            raise ValueError(f"basis must have shape (k, {self.n}, {self.n}). Found {tuple(basis.shape)}.")
        Q, R = torch.linalg.qr(basis.flatten(1).mT)
        if len(basis) > self.n**2 or bool((R.diagonal().abs() <= 1e-10 * R.norm(dim=0)).any()):
            raise ValueError("the matrices of a basis must be linearly independent. Found dependent ones.")
        self._store(basis=Q.mT.reshape(-1, self.n, self.n).contiguous())
        for X in self.basis:
            bracket = X @ self.basis - self.basis @ X
            if not _is_zero(bracket - self.project(bracket), torch.ones_like(bracket), 1e-7):
                raise ValueError("commutators of a basis must be in its span. Found one that is not.")

    def project(self, C: Tensor) -> Tensor:
        B = self.basis.to(C.device, C.dtype)
        return torch.einsum("kij,...k->...ij", B, torch.einsum("kij,...ij->...k", B, C))

    def bound(self, S: Tensor) -> Tensor:
        B = self.basis.to(S.device, S.dtype).abs()
        return torch.einsum("kij,...k->...ij", B, torch.einsum("kij,...ij->...k", B, S))

    @property
    def components(self) -> int:
        return 0

    @property
    def dimension(self) -> int:
        return len(self.basis)

    def contains(self, A: Tensor, tolerance: float = 1e-9) -> bool:
        if not bool((torch.linalg.cond(A) < 1e15).all()):
            return False
        for each in A.reshape(-1, self.n, self.n):
            log = np.asarray(logm(each.detach().cpu().numpy()))
            X = torch.from_numpy(log.real.astype(np.float64))
            if np.abs(log.imag).max() > tolerance or not _is_zero(X - self.project(X), torch.ones_like(X), tolerance):
                return False
        return True


@dataclass(frozen=True, eq=False)
class DirectSum(Algebra):
    """Represent a direct sum of algebras on disjoint sets of channels; other channels are unchanged.

    parts: pairs of channels int64 (k, m), k sets of m channels, and the algebra of m x m matrices that acts on each set
    independently. Raises ValueError for channels that occur twice or do not exist.
    """

    parts: tuple[tuple[Tensor, Algebra], ...]

    def __post_init__(self) -> None:
        self._store(parts=tuple((integers(channels, "channels"), algebra) for channels, algebra in self.parts))
        for channels, algebra in self.parts:
            if channels.ndim != 2 or channels.shape[1] != algebra.n:
                raise ValueError(f"channels must have shape (k, {algebra.n}). Found {tuple(channels.shape)}.")
        used = torch.cat([torch.empty(0, dtype=torch.int64), *(channels.flatten() for channels, _ in self.parts)])
        if len(used.unique()) < len(used) or bool(((used < 0) | (used >= self.n)).any()):
            raise ValueError(f"channels must be distinct numbers from 0 to {self.n - 1}. Found others.")

    def project(self, C: Tensor) -> Tensor:
        return self._each(0 * C, [algebra.project(C[at]) for at, algebra in self._at])

    def bound(self, S: Tensor) -> Tensor:
        return self._each(torch.zeros_like(S), [algebra.bound(S[at]) for at, algebra in self._at])

    @property
    def dimension(self) -> int:
        return sum(len(channels) * algebra.dimension for channels, algebra in self.parts)

    def random(self, generator: torch.Generator, *batch: int) -> Tensor:
        drawn = [algebra.random(generator, *batch, len(channels)) for channels, algebra in self.parts]
        return self._each(torch.zeros(*batch, self.n, self.n, dtype=torch.float64), drawn)

    def exp(self, X: Tensor) -> Tensor:
        eye = torch.eye(self.n, dtype=X.dtype, device=X.device).expand(X.shape)
        return self._each(eye, [algebra.exp(X[at]) for at, algebra in self._at])

    def nearest(self, M: Tensor, flips: Tensor | None = None) -> Tensor:
        eye = torch.eye(self.n, dtype=M.dtype, device=M.device).expand(M.shape)
        each = zip(self.parts, self._flips(flips), self._at, strict=True)
        return self._each(eye, [algebra.nearest(M[at], bits) for (_, algebra), bits, (at, _) in each])

    def contains(self, A: Tensor, tolerance: float = 1e-9) -> bool:
        eye = torch.eye(self.n, dtype=A.dtype, device=A.device).expand(A.shape)
        outside = A - self._each(eye, [A[at] for at, _ in self._at])
        inside = (algebra.contains(A[at], tolerance) for at, algebra in self._at)
        return _is_zero(outside, A, tolerance) and all(inside)

    @property
    def components(self) -> int:
        return sum(len(channels) * algebra.components for channels, algebra in self.parts)

    def reflect(self, flips: Tensor) -> Tensor:
        each = [algebra.reflect(f) for f, (_, algebra) in zip(self._flips(flips), self.parts, strict=True)]
        return self._each(torch.eye(self.n, dtype=torch.float64).expand(*flips.shape[:-1], -1, -1), each)

    @property
    def summands(self) -> tuple[tuple[Tensor, Algebra], ...]:
        return tuple(
            (channels[:, inner].flatten(0, 1), part)
            for channels, algebra in self.parts
            for inner, part in algebra.summands
        )

    @property
    def _at(self) -> list[tuple[tuple[EllipsisType, Tensor, Tensor], Algebra]]:
        """Return the index of the blocks (..., k, m, m) of each part, and its algebra."""
        return [((..., c[:, :, None], c[:, None, :]), algebra) for c, algebra in self.parts]

    def _flips(self, flips: Tensor | None) -> list[Any]:
        """Split flips (..., components) into the flips (..., k, its components) of each part."""
        if flips is None:
            return [None] * len(self.parts)
        sizes = [(len(channels), algebra.components) for channels, algebra in self.parts]
        split = flips.split([prod(size) for size in sizes], -1)
        return [f.reshape(*flips.shape[:-1], *size) for f, size in zip(split, sizes, strict=True)]

    def _each(self, X: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """Return X with its blocks replaced by these blocks (..., k, m, m) of each part."""
        X = X.clone()
        for (at, _), block in zip(self._at, blocks, strict=True):
            X[at] = block
        return X


def diagonal(n: int) -> DirectSum:
    """Return the diagonal matrices; the identity component of the group is the positive scales."""
    return DirectSum(n, ((torch.arange(n)[:, None], GL(1)),))


def planes(n: int, pairs: Tensor) -> DirectSum:
    """Return gl(1, C) on each of k pairs of channels, int64 (k, 2)."""
    return DirectSum(n, ((pairs, Complex()),))


def blocks(n: int, sets: Tensor | Sequence[Sequence[int]]) -> DirectSum:
    """Return gl(m) on each of several disjoint sets of channels, which may differ in their size m."""
    parts = [sets] if isinstance(sets, Tensor) else [torch.as_tensor(each)[None] for each in sets]
    return DirectSum(n, tuple((each, GL(each.shape[1])) for each in parts))
