"""Split a torus of log-scales into single channels, which may form pairs, and into groups by kind and parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.groups import Rows, Slices, Torus
from quotient_manifolds.symmetries.heads import Heads, heads_of_scales, some_rows
from quotient_manifolds.symmetries.names import Roles, row_keys

_MOST = 64
"""The most connected log-scales that are brought to echelon form."""
_SMALL = 1e6
"""The most exponents of a weight for which factors of rows and of columns are compared."""
_ZERO = 1e-9


@dataclass(frozen=True, eq=False)
class Alike:
    """Store log-scales that scale the same parameters in the same way.

    scales: their numbers (n,). Log-scale z_i multiplies row rows[i, k] of slices[k] by exp(powers[k] z_i). slices,
    powers: (m,). rows: (n, m).
    """

    scales: Tensor
    slices: tuple[int, ...]
    powers: tuple[float, ...]
    rows: Tensor


class Scales:
    """Store the log-scales of a torus in a basis in which as many as possible act on one channel and change no gain."""

    def __init__(self, torus: Torus, number: int, roles: Roles) -> None:
        self.number, self.roles, self.constants = number, roles, torus.constants
        self.rows = list[Rows]()
        of = [self._place(each.rows) for each in torus.slices]  # slices with the same entries share a number
        self.starts = np.cumsum([0, *map(len, self.rows)])
        rows = [each.index[0].numpy() + self.starts[k] for each, k in zip(torus.slices, of, strict=True)]
        columns, powers = ([getattr(s, n).numpy() for s in torus.slices] for n in ("index", "powers"))
        made = np.concatenate(powers), (np.concatenate(rows), np.concatenate([each[1] for each in columns]))
        self.exponents: csr_matrix = coo_matrix(made, (self.starts[-1], torus.size)).tocsr()
        self.gains = [roles.gains(each) for each in self.rows]
        self.ports = [None if gain else roles.port(each) for gain, each in zip(self.gains, self.rows, strict=True)]
        self.exponents = self._reduced()  # this does not depend on the basis in which they were found
        self._turn_sides()
        self.exponents = self._reduced()
        self.alike = list(self._alike())

    def _place(self, rows: Rows) -> int:
        for k, each in enumerate(self.rows):
            if _same(each, rows):
                return k
        self.rows.append(rows)
        return len(self.rows) - 1

    @property
    def size(self) -> int:
        return self.exponents.shape[1]

    def _turn_sides(self) -> None:
        """Express a factor of a whole weight by its rows or by its columns, whichever takes fewer exponents."""
        E = self.exponents.tolil()
        for k, m in combinations(range(len(self.rows)), 2):
            if len(self.rows[k]) * E.shape[1] > _SMALL or not _cross(self.rows[k], self.rows[m]):
                continue
            for here, there in ((k, m), (m, k)):
                own, other = (slice(self.starts[each], self.starts[each + 1]) for each in (here, there))
                A, B = E[own].toarray(), E[other].toarray()
                whole = np.where(np.abs(A - A[:1]).max(0) < _ZERO, A[0], 0.0)
                new = np.where(np.abs(B + whole) < _ZERO, 0.0, B + whole)
                shorter = (new != 0).sum(0) < (B != 0).sum(0) + len(A)
                E[own], E[other] = np.where(shorter, A - whole, A), np.where(shorter, new, B)
        self.exponents = E.tocsr()
        self.exponents.eliminate_zeros()

    def _is_weight(self, k: int) -> bool:
        port = self.ports[k]
        return port is not None and port[0] // 2 < len(self.roles.walk.uses)

    def _reduced(self) -> csr_matrix:
        """Return the exponents in echelon form, by component, with pivots in gains, then in rows of writing weights."""
        ranks = []
        for k, each in enumerate(self.rows):
            port = self.ports[k]
            writes = port is not None and self._is_weight(k) and port[0] % 2 == 0
            ranks.append(np.full(len(each), 0 if self.gains[k] else 1 if writes else 2))
        rank = np.concatenate(ranks)
        touching = abs(self.exponents).T @ abs(self.exponents)
        part = connected_components(touching, directed=False)[1]
        several = np.flatnonzero(np.bincount(part) > 1)
        if not len(several):
            return self.exponents
        made = self.exponents.tocsc().tolil()
        columns = self.exponents.tocsc()
        for one in several:
            own = np.flatnonzero(part == one)
            if len(own) > _MOST:
                continue
            block = columns[:, own]
            rows = np.unique(block.indices)
            rows = rows[np.argsort(rank[rows], kind="stable")]
            E = block[rows].toarray()
            E = _echelon(E)
            for k, column in enumerate(own):
                made[:, column] = coo_matrix((E[:, k], (rows, np.zeros(len(rows), int))), (made.shape[0], 1)).tolil()
        return made.tocsr()

    def _alike(self) -> Iterator[Alike]:
        """Yield log-scales grouped by the slices and powers with which they act."""
        E = self.exponents.tocsc()
        E.eliminate_zeros()
        E.sort_indices()
        column = np.repeat(np.arange(E.shape[1]), np.diff(E.indptr))
        slices = np.searchsorted(self.starts, E.indices, side="right") - 1
        powers = np.round(E.data, 9)
        _, token = np.unique(np.stack([slices, powers]), axis=1, return_inverse=True)
        token = token.reshape(-1)
        draw = np.random.default_rng(0).integers(1 << 62, size=token.max(initial=0) + 1)
        name = np.zeros(E.shape[1], np.int64)
        with np.errstate(over="ignore"):
            np.add.at(name, column, draw[token])
        order = np.lexsort((E.indices, token, column))
        start = np.searchsorted(column[order], np.arange(E.shape[1]))
        count = np.bincount(column, minlength=E.shape[1])
        for one in dict.fromkeys(name.tolist()):
            own = np.flatnonzero((name == one) & (count > 0))
            if not len(own):
                continue
            at = order[start[own][:, None] + np.arange(count[own[0]])]
            rows = torch.from_numpy(E.indices[at] - self.starts[slices[at[0]]]).long()
            yield Alike(torch.from_numpy(own), tuple(slices[at[0]].tolist()), tuple(powers[at[0]].tolist()), rows)

    def heads(self) -> Iterator[Heads]:
        """Yield single channels whose scale acts on rows and columns of weights alone, to powers of 1 and -1."""
        moving = self.part(torch.arange(self.size)).moving()
        for each in self.alike:
            if any(self.gains[k] for k in each.slices) or {abs(power) for power in each.powers} != {1.0}:
                continue
            if moving[each.scales.numpy()].any():  # no factor contains the sum of a bias and a statistic
                continue
            parts = []
            for k, power in dict.fromkeys(zip(each.slices, each.powers, strict=True)):
                some = [m for m, of in enumerate(zip(each.slices, each.powers, strict=True)) if of == (k, power)]
                parts.append((self.rows[k], each.rows[:, some], int(power)))
            origins = tuple((self.number, scale) for scale in each.scales.tolist())
            yield from heads_of_scales(parts, origins, self.roles)

    def groups(self, taken: Collection[int]) -> Iterator[tuple[Torus, str, str]]:
        """Yield the torus without `taken` log-scales, split by kind and leading parameter, with kind and parameter."""
        found: dict[tuple[str, str], list[Tensor]] = {}
        for each in self.alike:
            left = each.scales[~torch.isin(each.scales, torch.tensor([*taken], dtype=torch.long))]
            if not len(left):
                continue
            used = [*dict.fromkeys(each.slices)]
            gains = [gain for k in used if (gain := self.gains[k])]
            vectors = [k for k in used if not self.gains[k] and not self._is_weight(k)]
            weights = [k for k in used if self._is_weight(k)]
            nodes = [port[1] for k in used if (port := self.ports[k])]
            every = torch.cat(nodes) if nodes else torch.zeros(0, dtype=torch.long)
            kind = self.roles.scaling(every, gains, bool(weights), bool(vectors))
            first = next(k for k in (*(k for k in used if self.gains[k]), *vectors, *weights))
            found.setdefault((self.rows[first].name, kind), []).append(left)
        for (name, kind), scales in found.items():
            yield self.part(torch.cat(scales)), kind, name

    def part(self, scales: Tensor) -> Torus:
        """Return the subgroup of some of the log-scales."""
        E, slices = self.exponents[:, scales.numpy()], []
        for k, each in enumerate(self.rows):
            own = E[self.starts[k] : self.starts[k + 1]].tocoo()
            own.eliminate_zeros()
            if own.nnz:
                used, row = np.unique(own.row, return_inverse=True)
                index = torch.from_numpy(np.stack([row, own.col]).astype(np.int64))
                slices.append(Slices(some_rows(each, torch.from_numpy(used).long()), index, _tensor(own.data)))
        return Torus(tuple(slices), len(scales), self.constants)


def _same(one: Rows, other: Rows) -> bool:
    """Return whether two sets of rows have the same entries, with the same scale and offset."""
    if (one.name, len(one), one.columns) != (other.name, len(other), other.columns):
        return False
    if not torch.equal(row_keys(one.starts, one.steps), row_keys(other.starts, other.steps)):
        return False
    function = [(torch.as_tensor(each.scale), torch.as_tensor(each.offset)) for each in (one, other)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*function, strict=True))


def _cross(one: Rows, other: Rows) -> bool:
    """Return whether two sets of several rows each, such as rows and columns of a weight, cover the same entries."""
    return one.name == other.name and len(one) > 1 and len(other) > 1 and torch.equal(one.touched, other.touched)


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, dtype=np.float64))


def _echelon(E: np.ndarray) -> np.ndarray:
    """Return columns (rows, k) with the same span, each 1 at a pivot where the others are 0, pivots in early rows."""
    E, done = E.copy(), 0
    for row in range(len(E)):
        if done == E.shape[1]:
            break
        best = done + int(np.abs(E[row, done:]).argmax())
        if abs(E[row, best]) < _ZERO:
            continue
        E[:, [done, best]] = E[:, [best, done]]
        E[:, done] /= E[row, done]
        others = np.arange(E.shape[1]) != done
        E[:, others] -= np.outer(E[:, done], E[row, others])
        done += 1
    E[np.abs(E) < _ZERO] = 0
    return np.where(np.abs(E - E.round()) < _ZERO, E.round(), E)
