"""Act on the channels of a wire by the group of a matrix algebra."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.algebras import Algebra
from quotient_manifolds.symmetries.groups.rows import Draft, Rows
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge, Wire

_RANK = 1e-10
"""Singular values below this, relative to the largest, count as 0."""

_ROUNDING = 1e-13
"""Channels with a norm below this, relative to the largest, are rounding errors."""


@dataclass(frozen=True, eq=False)
class Gauge(Symmetry):
    """Act on the channels of a wire by the group of an algebra: elements A (n, n), generators X in the algebra.

    Gains between the wire and its slots are fixed (see `Wire`).

    wire, algebra: both with n channels. reflections: bool (algebra.components,), which elements outside the identity
    component (a sign, a reflection) are symmetries as well (default: none). It distinguishes GL from GL+ and O from SO.
    Raises ValueError if the algebra mixes channels that a slot covers with channels that it does not cover.
    """

    wire: Wire
    algebra: Algebra
    reflections: Tensor | None = None

    def __post_init__(self) -> None:
        if self.algebra.n != self.wire.channels:
            found = f"{self.algebra.n} and {self.wire.channels}"
            raise ValueError(f"an algebra and its wire must have the same number of channels. Found {found}.")
        for channels, algebra in self.algebra.summands:
            m = channels.shape[1]
            mixed = (algebra.bound(torch.ones(m, m, dtype=torch.float64)) > 1e-9).fill_diagonal_(False)
            if bool((mixed & ~self.wire.possible_on(channels)).any()):
                raise ValueError(
                    "an algebra must not mix channels that a slot covers with others. Take one in wire.possible."
                )
        if self.reflections is not None:
            flips = self.reflections.detach().to("cpu", torch.bool).clone()
            if flips.shape != (self.algebra.components,):
                wanted = (self.algebra.components,)
                raise ValueError(f"reflections must have shape {wanted}. Found {tuple(flips.shape)}.")
            self._store(reflections=flips)

    @property
    def names(self) -> tuple[str, ...]:
        return self.wire.names

    @property
    def reads(self) -> tuple[str, ...]:
        units = (rows.name for rows in self.units)
        return tuple(dict.fromkeys((*self.names, *units, *self.wire.constants.reads)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.wire.channels, self.wire.channels)

    @property
    def units(self) -> tuple[Rows, ...]:
        return tuple(gain.entries for slot in self.wire.slots for gain in slot.gains)

    @property
    def mixes(self) -> bool:
        return True

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.wire.channels, dtype=torch.float64)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        made = [b @ a for a, b in zip(self._blocks(first), self._blocks(then), strict=True)]
        return made[0] if 3 in (first.ndim, then.ndim) else self._each(made)

    def inverse(self, element: Tensor) -> Tensor:
        inverses = [torch.linalg.inv(each) for each in self._blocks(element)]
        return inverses[0] if element.ndim == 3 else self._each(inverses)

    def composed(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the element with blocks (k, m, m), a batch per summand; the batch itself if elements are stored so."""
        return blocks[0] if self._sets is not None else self._each(blocks)

    def condition(self, element: Tensor) -> float:
        """Return the largest condition number of the diagonal blocks of an element."""
        sizes = [torch.linalg.svdvals(block) for block in self._blocks(element)]
        return max((float((s[:, 0] / s[:, -1]).max()) for s in sizes), default=1.0)

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        norms = (b.norm(dim=(1, 2)) * torch.linalg.inv(b).norm(dim=(1, 2)) for b in self._blocks(element))
        if max((float(each.max()) for each in norms), default=1.0) <= condition or self.condition(element) <= condition:
            return element
        parts = [torch.linalg.svd(block) for block in self._blocks(element)]
        moved = self._each([U * _within(s, condition)[:, None] @ Vh for U, s, Vh in parts])
        return moved if self.algebra.contains(moved) else self.identity

    def stretching(self, X: Tensor) -> Tensor:
        return (X + X.mT) / 2

    def overlap(self, params: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        return self.wire.overlap(params, target)

    def nearest(self, overlap: Tensor) -> Tensor:
        return self.algebra.nearest(overlap, self.reflections)

    @property
    def blocks(self) -> Iterator[tuple[Algebra, Tensor | None, tuple[tuple[Rows, Tensor, bool], ...]]]:
        rows = []
        for slot in self.wire.slots:
            row = torch.full((self.wire.channels,), -1).index_copy(0, slot.channels, torch.arange(len(slot.channels)))
            rows.append((slot.rows, row, slot.writes))
        summands, flips = self.algebra.summands, self.reflections
        counted = flips is not None and sum(len(c) * a.components for c, a in summands) == len(flips)
        start = 0
        for channels, algebra in summands:
            for each in channels:
                own = flips[start : start + algebra.components] if counted and flips is not None else None
                start += algebra.components
                yield (
                    algebra,
                    own,
                    tuple((of, row[each], writes) for of, row, writes in rows if bool((row[each] >= 0).all())),
                )

    def basis(self) -> Tensor:
        found = [torch.zeros(0, *self.shape, dtype=torch.float64)]
        for channels, algebra in self.algebra.summands:
            B = algebra.project(torch.eye(algebra.n**2, dtype=torch.float64).view(-1, algebra.n, algebra.n))
            B = B[B.flatten(1).any(1)]
            whole = torch.zeros(len(channels), len(B), *self.shape, dtype=torch.float64)
            for k, each in enumerate(channels):
                whole[k][:, each[:, None], each] = B
            found.append(whole.flatten(0, 1))
        return torch.cat(found)

    def project(self, X: Tensor) -> Tensor:
        return self.algebra.project(X)

    def _blocks(self, element: Tensor) -> list[Tensor]:
        """Return the blocks (k, m, m) of an element, a batch for each summand of the algebra."""
        element = element.detach().cpu()
        if element.ndim == 3:
            return [element]
        return [element[channels[:, :, None], channels[:, None]] for channels, _ in self.algebra.summands]

    def _each(self, blocks: Iterable[Tensor]) -> Tensor:
        """Return the matrix (n, n) with these blocks, and the identity elsewhere."""
        A = self.identity
        for (channels, _), block in zip(self.algebra.summands, blocks, strict=True):
            A[channels[:, :, None], channels[:, None]] = block
        return A

    @property
    def parts(self) -> tuple[Gauge, ...]:
        """Return one gauge for each summand of the algebra, with its identity component."""
        every = ((each, algebra) for channels, algebra in self.algebra.summands for each in channels)
        return tuple(Gauge(self.wire.on(each), algebra) for each, algebra in every)

    def move(self, draft: Draft, element: Tensor) -> None:
        """Act like wire.move(draft, element). Membership is not checked; algebra.contains(element) does that.

        element: (n, n), or its blocks (k, m, m) if all of them have one size.
        """
        self.wire.move(draft, element, self._sets)

    @cached_property
    def _sets(self) -> Tensor | None:
        """Return the channels (k, m) of the blocks if the algebra has one summand with several of them, else None."""
        summands = self.algebra.summands
        return summands[0][0] if len(summands) == 1 and len(summands[0][0]) > 1 else None

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw exp(scale X), X of spectral norm about 1, times each allowed reflection with probability 1/2."""
        A = self.algebra.exp(scale * self.algebra.random(generator))
        if self.reflections is None:
            return A
        flips = torch.rand(len(self.reflections), generator=generator, dtype=torch.float64) < 0.5
        return self.algebra.reflect(flips & self.reflections) @ A

    def exp(self, X: Tensor) -> Tensor:
        return self.algebra.exp(self.generator(X))

    def generator(self, X: Tensor) -> Tensor:
        """Return generators (..., n, n) in float64. Raises ValueError for another shape, or outside the algebra."""
        X = super().generator(X)
        outside = (X - self.algebra.project(X)).detach().abs().amax()
        if float(outside) > 1e-9 * float(X.detach().abs().amax()):
            raise ValueError(f"a generator must be in the algebra. Found a part of {outside:.1e} outside; project it.")
        return X

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute the projection of the wire's charge onto the algebra (n, n), and the size of its summands (n, n)."""
        value, size = self.wire.charge(params, cotangent, self._sets)
        return Charge(self.algebra.project(value), self.algebra.bound(size))

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the dimension of the algebra minus the dimension of the stabilizer, all X that change no parameter.

        These satisfy X W = 0 for all writers and X^T R = 0 for all readers (as rows), in the wire's units. So
        X = N_R Z N_W^T, with bases N_R of the directions that are not read and N_W of those that are not written. A
        matrix with both sides on the wire requires only X W - W X = 0; this is imposed last, on the remaining X.
        """
        counted = self.wire.constants.included(params)
        written, read = (self._factor(counted, covariant) for covariant in (True, False))
        idle, left = 0, list[Tensor]()
        for channels, algebra in self.algebra.summands:
            for each in channels:
                N, M = _null(read[:, each]), _null(written[:, each])
                if not N.shape[1] or not M.shape[1]:
                    continue
                if not self.wire.sides:
                    idle += algebra.count_within(N, M)
                    continue
                X = algebra.within(N, M)
                idle += len(X)
                if len(X):
                    whole = X.new_zeros(len(X), *self.shape)
                    whole[:, each[:, None], each] = X
                    left.append(whole)
        return self.algebra.dimension - idle + (self._moving(params, torch.cat(left)) if left else 0)

    def _factor(self, params: Mapping[str, Tensor], covariant: bool) -> Tensor:
        """Return F (at most n, n) with F^T F = sum of V V^T over one-sided slots in which A acts (else: A^-T)."""
        n, both = self.wire.channels, {number for pair in self.wire.sides for number in pair}
        F = torch.zeros(1, n, dtype=torch.float64)
        for number, slot in enumerate(self.wire.slots):
            if slot.covariant == covariant and number not in both:
                V = slot.in_wire(params, params)[0].detach().cpu()
                rows = torch.zeros(V.shape[1], n, dtype=torch.float64)
                rows[:, slot.channels] = V.mT
                F = torch.linalg.qr(torch.cat([F, rows]), mode="r")[1]
        return F

    def _moving(self, params: Mapping[str, Tensor], X: Tensor) -> int:
        """Return the rank of the tangents of generators (k, n, n)."""
        tangents = torch.cat([each.flatten(1) for each in self.tangent(params, X).values()], 1)
        size = max(float(params[name].detach().abs().max()) for name in self.names)
        return int((torch.linalg.svdvals(tangents) > _RANK * size).sum())


def _null(F: Tensor) -> Tensor:
    """Return an orthonormal basis (m, k) of the null space of F (rows, m), up to rounding.

    Channels differ in size, as their gains do, so each is normalized unless it is a rounding error of others.
    """
    norms = F.norm(dim=0)
    norms = norms.where(norms > _ROUNDING * norms.max(), norms.max().clamp(min=1e-300))
    _, s, Vh = torch.linalg.svd(F / norms)
    rank = int((s > _RANK * s[0]).sum())
    return torch.linalg.qr(Vh[rank:].mT / norms[:, None])[0]


def _within(s: Tensor, condition: float) -> Tensor:
    """Clamp singular values (k, m), descending, at both ends to a ratio of at most `condition`."""
    middle = (s[:, :1] * s[:, -1:]).sqrt()
    return torch.minimum(torch.maximum(s, middle / condition**0.5), middle * condition**0.5)
