"""Act by log-scales, whose exponentials multiply slices of parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.groups.gains import Constants
from quotient_manifolds.symmetries.groups.rows import Draft, Record, Rows, flattened, integers, numbers
from quotient_manifolds.symmetries.groups.symmetry import Symmetry
from quotient_manifolds.symmetries.groups.wire import Charge

_RANK = 1e-11
"""Eigenvalues of a Gram matrix below this, relative to the largest, count as 0."""


@dataclass(frozen=True, eq=False)
class Slices(Record):
    """Multiply each row of entries of a parameter by exp(E z), with log-scales z (k,) and exponents E (rows, k).

    E is sparse: index, int64 (2, nonzero), holds its rows and columns, and powers (nonzero,) its values.
    """

    rows: Rows
    index: Tensor
    powers: Tensor

    def __post_init__(self) -> None:
        self._store(index=integers(self.index, "index"), powers=numbers(self.powers))
        if self.index.shape != (2, *self.powers.shape) or self.powers.ndim != 1:
            found = f"{tuple(self.index.shape)} and {tuple(self.powers.shape)}"
            raise ValueError(f"index and powers must have shapes (2, k) and (k,). Found {found}.")
        if self.index.numel() and not 0 <= int(self.index[0].min()) <= int(self.index[0].max()) < len(self.rows):
            raise ValueError(
                f"exponents must be of rows 0 to {len(self.rows) - 1} of {self.rows.name!r}. Found others."
            )

    @classmethod
    def of(cls, rows: Rows, exponents: Tensor) -> Slices:
        """Return slices with exponents E (rows, k), dense or sparse."""
        if exponents.ndim != 2 or len(exponents) != len(rows):
            raise ValueError(f"exponents must have shape ({len(rows)}, k). Found {tuple(exponents.shape)}.")
        sparse = exponents.detach().to_sparse_coo().coalesce()
        return cls(rows, sparse.indices(), sparse.values())

    def logs(self, z: Tensor) -> Tensor:
        """Return E z, the log-scale of each row."""
        row, unknown = self.index.to(z.device)
        return z.new_zeros(len(self.rows)).index_add(0, row, self.powers.to(z.device) * z[unknown])

    def transposed(self, c: Tensor, size: int, powers: Tensor) -> Tensor:
        """Return E^T c (size,), with `powers`, or their absolute values, as the exponents."""
        row, unknown = self.index.to(c.device)
        return c.new_zeros(size).index_add(0, unknown, powers.to(c.device) * c[row])


@dataclass(frozen=True, eq=False)
class Torus(Symmetry):
    """Multiply slices of parameters by exp(E z), with log-scales z (k,). Elements and generators are both z.

    Slices of one parameter may overlap, as rows and columns do; their log-scales add up. Biases are multiplied as
    effective biases, which include their `constants`; constants that no slice affects are dropped. Raises ValueError
    for log-scales outside the k, and for slices that read an entry as scale * w + offset with different offset / scale.
    """

    slices: tuple[Slices, ...]
    size: int
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        moved = {each.rows.name for each in self.slices}
        self._store(slices=tuple(self.slices), constants=self.constants.of(moved))
        if any(
            s.index.numel() and not 0 <= int(s.index[1].min()) <= int(s.index[1].max()) < self.size for s in self.slices
        ):
            raise ValueError(f"unknown log-scales must be numbers from 0 to {self.size - 1}. Found others.")
        for name, count in Counter(s.rows.name for s in self.slices).items():
            rows = [s.rows for s in self.slices if s.rows.name == name]
            offset = any(isinstance(each.offset, Tensor) or each.offset for each in rows)
            if count > 1 and offset and not _about_one_number(rows):
                raise ValueError(f"slices of {name!r} must scale each entry about one number. Found several.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(s.rows.name for s in self.slices), *self.constants.names)))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.names, *self.constants.reads)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def move(self, draft: Draft, element: Tensor) -> None:
        """Multiply each slice by exp(E z), z = element (k,). Raises like `Symmetry.move`."""
        z = self.generator(element)
        self.constants.include(draft)
        for each in self.slices:
            values = each.rows.read(draft)
            draft.write(each.rows, values * each.logs(z.to(values.device)).exp()[:, None])
        self.constants.include(draft, -1.0)

    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw Gaussian log-scales of standard deviation `scale`."""
        return scale * torch.randn(self.size, generator=generator, dtype=torch.float64)

    def gains(self, params: Mapping[str, Tensor]) -> tuple[Slices, ...]:
        """Return slices of gains, one entry per row, each of which a single log-scale can bring to 1."""
        single = torch.ones(2, self.size, dtype=torch.bool)
        for each in self.slices:
            if len(each.rows.shape) > 1:
                single[(each.powers > 0).long(), each.index[1]] = False
        found = []
        for each in self.slices:
            if len(each.rows.shape) == 1 and not each.rows.name.endswith("bias") and each.rows.columns == 1:
                keep = single[(each.powers > 0).long(), each.index[1]]
                keep &= torch.bincount(each.index[0], minlength=len(each.rows))[each.index[0]] == 1
                if bool(keep.any()):
                    found.append(Slices(each.rows, each.index[:, keep], each.powers[keep]))
        return tuple(found)

    def condition(self, element: Tensor) -> float:
        """Return the ratio of the largest to the smallest scale exp(z_j)."""
        return float((element.max() - element.min()).exp()) if element.numel() else 1.0

    def stretching(self, X: Tensor) -> Tensor:
        return X

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        most = math.log(condition) / 2
        return element.clamp(-most, most)

    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute c = sum over slices of E^T (row sums of w * y), (k,), and the size of its summands."""
        value = size = torch.zeros(self.size, dtype=torch.float64)
        params, cotangent = self.constants.included(params), self.constants.pulled(params, cotangent)
        for each in self.slices:
            terms = each.rows.read(params) * each.rows.dual(cotangent)
            value = value.to(terms.device) + each.transposed(terms.sum(1), self.size, each.powers)
            with torch.no_grad():
                absolute = each.transposed(terms.abs().sum(1), self.size, each.powers.abs())
                size = size.to(terms.device) + absolute
        return Charge(value, size)

    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of the exponents of all nonzero entries.

        Their Gram matrix is the sum of E_g^T N E_h over pairs g, h of slices of a parameter, where N counts the nonzero
        entries that their rows share. It is block diagonal, with a block for each set of linked log-scales.
        """
        gram, params = csr_matrix((self.size, self.size)), self.constants.included(params)
        for one, other in product(self.slices, self.slices):
            if one.rows.name == other.rows.name:
                gram += self._exponents(one).T @ _shared(one.rows, other.rows, params) @ self._exponents(other)
        norms = np.sqrt(gram.diagonal())
        alive = np.flatnonzero(norms > 0)
        gram = gram[alive][:, alive].multiply(1 / norms[alive]).multiply(1 / norms[alive][:, None]).tocsr()
        labels = connected_components(gram, directed=False)[1]
        order, starts = np.argsort(labels, kind="stable"), np.flatnonzero(np.diff(np.sort(labels))) + 1
        rank = 0
        for part in np.split(order, starts) if len(order) else ():
            if len(part) == 1:
                rank += 1
                continue
            eigenvalues = np.linalg.eigvalsh(gram[part][:, part].toarray())
            rank += int((eigenvalues > _RANK * eigenvalues[-1]).sum())
        return rank

    def exponents(self, rows: Rows) -> csr_matrix:
        """Return the exponents (entries, k) of single entries of a parameter, given as rows (entries, 1)."""
        at = rows.places[:, 0].numpy()
        E = csr_matrix((len(at), self.size))
        for each in self.slices:
            if each.rows.name == rows.name:
                row = np.full(prod(rows.shape), -1)
                row[each.rows.places.flatten().numpy()] = np.repeat(np.arange(len(each.rows)), each.rows.columns)
                inside = np.flatnonzero(row[at] >= 0)
                select = csr_matrix((np.ones(len(inside)), (inside, row[at[inside]])), shape=(len(at), len(each.rows)))
                E = E + select @ self._exponents(each)
        return E

    def moving(self) -> np.ndarray:
        """Return which log-scales multiply a constant and its bias by different factors, bool (k,)."""
        found = np.zeros(self.size, dtype=bool)
        for each in self.constants.every:
            E = self.exponents(each.bias)
            for gain in each.gains:
                own = np.flatnonzero(gain.at.numpy() >= 0)
                at = own, gain.at.numpy()[own]
                select = csr_matrix((np.full(len(own), gain.power), at), shape=(E.shape[0], len(gain.entries)))
                E = E - select @ self.exponents(gain.entries)
            found |= np.asarray(abs(E[each.values.numpy() != 0]).sum(0))[0] > _RANK
        return found

    def _exponents(self, each: Slices) -> csr_matrix:
        shape = (len(each.rows), self.size)
        return csr_matrix((each.powers.numpy(), tuple(each.index.numpy())), shape=shape)


def _about_one_number(rows: Sequence[Rows]) -> bool:
    """Return whether all rows that contain an entry of a parameter are 0 at the same value of it."""
    zero = torch.full((prod(rows[0].shape),), torch.nan, dtype=torch.float64)
    for each in rows:
        own = (-numbers(each.offset) / numbers(each.scale)).expand(each.places.shape)
        known = zero[each.places]
        if not bool((known.isnan() | torch.isclose(known, own, rtol=1e-12, atol=0)).all()):
            return False
        zero[each.places] = own
    return True


def _shared(one: Rows, other: Rows, params: Mapping[str, Tensor]) -> csr_matrix:
    """Return the sparse matrix of the numbers of nonzero entries that row i of `one` and row j of `other` share."""
    flattened(params, one.name, one.shape)
    labels = []
    for rows in (one, other):
        label = torch.full((rows.touched.numel(),), -1)
        at = torch.arange(len(rows))[:, None].expand(-1, rows.columns)
        alive = rows.read(params).detach().cpu() != 0
        label[rows.places[alive]] = at[alive]
        labels.append(label)
    both = (labels[0] >= 0) & (labels[1] >= 0)
    i, j = (label[both].numpy() for label in labels)
    return coo_matrix((np.ones(len(i)), (i, j)), shape=(len(one), len(other))).tocsr()
