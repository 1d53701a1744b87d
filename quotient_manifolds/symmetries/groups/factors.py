"""Compute matrices of products of weights, the factors of translations of other weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.gains import Gain
from quotient_manifolds.symmetries.groups.rows import Record, Rows, integers, numbers

_RANK = 1e-10
"""Singular values that count as 0, relative to the largest."""


class Factor(Protocol):
    """Define a matrix whose entries are products of weights."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the matrix at these parameters, float64."""

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        """Return at(params) @ Z without forming at(params)."""

    def read(self) -> Iterator[Rows]:
        """Yield the entries of parameters that the matrix depends on."""


@dataclass(frozen=True, eq=False)
class Matrix(Record):
    """Scale the rows and columns of a matrix of entries, or of ones: above[i] * rows[i, j] * beside[j].

    turned: whether `rows` is transposed first. gains: further factors of the rows, and of the columns.
    """

    above: Tensor
    beside: Tensor
    rows: Rows | None = None
    turned: bool = False
    gains: tuple[tuple[Gain, ...], tuple[Gain, ...]] = ((), ())

    def __post_init__(self) -> None:
        self._store(above=numbers(self.above), beside=numbers(self.beside))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.above), len(self.beside)

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        above, beside = (
            _times(each, gains, params) for each, gains in zip((self.above, self.beside), self.gains, strict=True)
        )
        made = above[:, None] * beside.to(above.device)
        if self.rows is None:
            return made
        found = self.rows.read(params)
        return made.to(found.device) * (found.mT if self.turned else found)

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        above, beside = (
            _times(each, gains, params) for each, gains in zip((self.above, self.beside), self.gains, strict=True)
        )
        Z = beside[:, None] * Z.to(beside.device)
        if self.rows is None:
            return above[:, None] * Z.sum(0).to(above.device)
        made = self.rows.times(params, Z, self.turned)
        return above.to(made.device)[:, None] * made

    def read(self) -> Iterator[Rows]:
        yield from (self.rows,) if self.rows is not None else ()
        yield from (gain.entries for gains in self.gains for gain in gains)


@dataclass(frozen=True, eq=False)
class Terms(Record):
    """Hold summands of a matrix: values times gains, at the positions index (2, terms), int64."""

    index: Tensor
    values: Tensor
    gains: tuple[Gain, ...] = ()

    def __post_init__(self) -> None:
        self._store(index=integers(self.index, "index"), values=numbers(self.values), gains=tuple(self.gains))


@dataclass(frozen=True, eq=False)
class Sparse(Record):
    """Sum terms into a matrix of the given shape."""

    shape: tuple[int, int]
    terms: tuple[Terms, ...]

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        made = torch.zeros(self.shape, dtype=torch.float64)
        for each in self.terms:
            rates = _times(each.values, each.gains, params)
            index = each.index.to(rates.device)
            made = made.to(rates.device).index_put((index[0], index[1]), rates, accumulate=True)
        return made

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        made = Z.new_zeros(self.shape[0], Z.shape[1])
        for each in self.terms:
            rates = _times(each.values, each.gains, params)
            row, column = each.index.to(rates.device)
            made = made.to(rates.device).index_add(0, row, rates[:, None] * Z.to(rates.device)[column])
        return made

    def read(self) -> Iterator[Rows]:
        yield from (gain.entries for each in self.terms for gain in each.gains)


@dataclass(frozen=True, eq=False)
class _Several(Record):
    """Hold matrices, each constant or computed from weights."""

    factors: tuple[Tensor | Factor, ...]

    def __post_init__(self) -> None:
        self._store(factors=tuple(numbers(each) if isinstance(each, Tensor) else each for each in self.factors))

    def each_at(self, params: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Yield all matrices at these parameters."""
        yield from (each if isinstance(each, Tensor) else each.at(params) for each in self.factors)

    def read(self) -> Iterator[Rows]:
        for each in self.factors:
            yield from () if isinstance(each, Tensor) else each.read()


@dataclass(frozen=True, eq=False)
class Product(_Several):
    """Multiply matrices, each constant or computed from weights."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.factors[0].shape[0], self.factors[-1].shape[1]

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        return reduce(lambda A, B: A @ B.to(A.device), self.each_at(params))

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        return reduce(lambda made, each: _product(each, params, made), reversed(self.factors), Z)


@dataclass(frozen=True, eq=False)
class Sum(_Several):
    """Add matrices, each constant or computed from weights."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.factors[0].shape[0], self.factors[0].shape[1]

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        return reduce(lambda A, B: A + B.to(A.device), self.each_at(params))

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        return reduce(lambda A, B: A + B.to(A.device), (_product(each, params, Z) for each in self.factors))


@dataclass(frozen=True, eq=False)
class Beyond(_Several):
    """Project onto the orthogonal complement of the rows V of all factors: 1 - V^+ V (n, n)."""

    @property
    def shape(self) -> tuple[int, int]:
        return (n := self.factors[0].shape[1]), n

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        Q = self._basis(params)
        return torch.eye(Q.shape[1], dtype=Q.dtype, device=Q.device) - Q.mT @ Q

    def times(self, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
        Q = self._basis(params)
        return Z.to(Q.device) - Q.mT @ (Q @ Z.to(Q.device))

    def _basis(self, params: Mapping[str, Tensor]) -> Tensor:
        every = list(self.each_at(params))
        return basis(torch.cat([each.to(every[0].device) for each in every]))


def _product(factor: Tensor | Factor, params: Mapping[str, Tensor], Z: Tensor) -> Tensor:
    return factor.to(Z.device) @ Z if isinstance(factor, Tensor) else factor.times(params, Z)


def diagonal(constant: Tensor, gains: Sequence[Gain]) -> Sparse | None:
    """Return the diagonal matrix of units, constant times gains; None if it is the identity."""
    if bool((constant == 1).all()) and not gains:
        return None
    at = torch.arange(len(constant))
    return Sparse((len(at), len(at)), (Terms(torch.stack([at, at]), constant, tuple(gains)),))


def basis(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of rows, as rows."""
    _, s, Vh = torch.linalg.svd(rows, full_matrices=False)
    return Vh[s > _RANK * s[:1]]


def _times(values: Tensor, gains: Sequence[Gain], params: Mapping[str, Tensor]) -> Tensor:
    for gain in gains:
        found = gain.read(params)
        values = values.to(found.device) * found
    return values
