"""Relate channels, in arrays: whose changes are one up to weights, and whose log-scales obey linear equations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from quotient_manifolds.symmetries.wires.codes import distinct, hashed
from quotient_manifolds.symmetries.wires.linear_algebra import EVEN, Array, echelon

SMALL = 1e-9
SCALED = 5  # times that equations and unknowns are brought to one size, one after the other
NOTHING = 1e-12  # relative to the largest term, of what is left of a sum of terms
NONE = np.zeros(0, np.int64)


class Classes:
    """Keep classes of channels, each with its relation to the channel that represents its class.

    X_b = S X S^-1 with S = diag(weight), X = X_a or, for a dual relation, -X_a^T. Relations wait until somebody asks:
    then roots are hooked to smaller ones, and paths halved, until nothing is left to join.
    """

    def __init__(self) -> None:
        self._above, self._weight, self._dual = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)
        self._waiting: list[tuple[Array, Array, Array, Array]] = []
        self._cycles: set[tuple[int, bool, float]] = set()
        self.size = 0

    def grow(self, count: int) -> None:
        self.size += count

    def join(self, a: Array, b: Array, weight: Array, dual: Array) -> None:
        """Say that X_b follows from X_a."""
        if len(a):
            self._waiting.append((a, b, weight, dual))

    def find(self, nodes: Array) -> tuple[Array, Array, Array]:
        """Return the representatives, and the weights and duality by which the nodes follow from them."""
        self._settle()
        return self._above[nodes], self._weight[nodes], self._dual[nodes]

    def rescale(self, size: Array) -> None:
        """Give the weights that they have where every channel is multiplied by the exponential of its size."""
        self._settle()
        moved = size - np.where(self._dual, -1, 1) * size[self._above]
        self._weight = self._weight * np.exp(moved)
        self._cycles = {
            (node, dual, weight * float(np.exp(2 * size[node]) if dual else 1.0)) for node, dual, weight in self._cycles
        }

    @property
    def cycles(self) -> list[tuple[int, bool, float]]:
        """Return what relates channels to themselves by anything but equality: representative, duality, weight."""
        self._settle()
        found = set()
        for node, dual, weight in self._cycles:
            root, size, turned = (each[0] for each in self.find(np.array([node])))
            # the relation at the root: back from the node, around the cycle, and forth
            inverse = size if turned else 1 / size
            around = weight * (1 / size if dual else size)
            whole = inverse * (1 / around if turned else around)
            found.add((int(root), dual, round(float(whole), 9)))
        return sorted(found)

    def _settle(self) -> None:
        fresh = np.arange(len(self._above), self.size)
        if len(fresh):
            self._above = np.concatenate([self._above, fresh])
            self._weight = np.concatenate([self._weight, np.ones(len(fresh))])
            self._dual = np.concatenate([self._dual, np.zeros(len(fresh), bool)])
        if not self._waiting:
            return
        a, b, weight, dual = (np.concatenate(each) for each in zip(*self._waiting, strict=True))
        self._waiting = []
        while True:
            root_a, root_b, found, turned = self._between(a, b, weight, dual)
            apart = np.flatnonzero(root_a != root_b)
            if not len(apart):
                break
            low, high = root_a[apart], root_b[apart]
            size, dual_here = found[apart], turned[apart]
            back = low > high
            low, high = np.where(back, high, low), np.where(back, low, high)
            size = np.where(back & ~dual_here, 1 / size, size)
            children, first = np.unique(high, return_index=True)
            self._above[children], self._weight[children], self._dual[children] = (
                low[first],
                size[first],
                dual_here[first],
            )
            self._flatten()
        odd = np.flatnonzero(turned | (np.abs(found - 1) > SMALL))
        self._cycles.update((int(root_a[i]), bool(turned[i]), float(found[i])) for i in odd)

    def _between(self, a: Array, b: Array, weight: Array, dual: Array) -> tuple[Array, Array, Array, Array]:
        """Return roots of both sides, and how the second follows from the first."""
        root_a, size_a, dual_a = self._above[a], self._weight[a], self._dual[a]
        root_b, size_b, dual_b = self._above[b], self._weight[b], self._dual[b]
        here = weight * np.where(dual, 1 / size_a, size_a)
        turned = dual ^ dual_a
        back = np.where(dual_b, size_b, 1 / size_b)
        return root_a, root_b, back * np.where(dual_b, 1 / here, here), turned ^ dual_b

    def _flatten(self) -> None:
        """Let every node hang from a root."""
        while True:
            up = self._above[self._above]
            moved = np.flatnonzero(up != self._above)
            if not len(moved):
                return
            over = self._above[moved]
            inner = np.where(self._dual[moved], 1 / self._weight[over], self._weight[over])
            self._weight[moved] = self._weight[moved] * inner
            self._dual[moved] ^= self._dual[over]
            self._above[moved] = up[moved]


@dataclass(frozen=True, eq=False)
class Component:
    """Hold unknowns (k,), ascending, and directions (k, d), an array or sparse, that span what they may be together."""

    unknowns: Array
    directions: Any

    @property
    def dimension(self) -> int:
        return int(self.directions.shape[1])

    @property
    def basis(self) -> Array:
        """Return the directions as an array; each has an unknown that no other one has."""
        return self.directions if isinstance(self.directions, np.ndarray) else self.directions.toarray()


class Scales:
    """Linear equations of the logarithms of scale of channels and of gains, which are named by numbers above 1."""

    def __init__(self) -> None:
        self._terms: list[tuple[Array, Array, Array]] = [(NONE, NONE, np.zeros(0))]  # equations, unknowns, factors
        self._named: list[Array] = [NONE]
        self._count = 0

    def copy(self) -> Scales:
        """Return the same equations, to which others can be added."""
        made = Scales()
        made._terms, made._named, made._count = [*self._terms], [*self._named], self._count
        return made

    def name(self, unknowns: Array) -> None:
        """Say that there are these unknowns, whatever equations they stand in."""
        self._named.append(np.asarray(unknowns, np.int64))

    def equal(self, names: Array, factors: Array) -> None:
        """Say that the sum of factor times unknown is 0, row by row (rows, k); names below 2 count for nothing."""
        names = np.atleast_2d(names)
        rows = np.repeat(np.arange(len(names)), names.shape[1])
        self._enter(rows, names.reshape(-1), np.broadcast_to(factors, names.shape).reshape(-1), len(names))

    def rows(self, matrix: scipy.sparse.csr_matrix) -> None:
        """Say that every row of a matrix, times the unknowns that its columns name, is 0."""
        found = matrix.tocoo()
        self._enter(found.row, found.col, found.data, matrix.shape[0])

    def _enter(self, rows: Array, names: Array, factors: Array, count: int) -> None:
        if not np.isfinite(factors).all():  # then nothing in these equations may change
            odd = np.isin(rows, rows[~np.isfinite(factors)])
            rows, factors = np.where(odd, count + np.arange(len(rows)), rows), np.where(odd, 1.0, factors)
            count += len(rows)
        kept = (names > 1) & (factors != 0)
        self._terms.append((self._count + rows[kept], names[kept], factors[kept]))
        self._count += count

    def _matrix(self) -> scipy.sparse.csr_matrix:
        """Return the equations, in rows of factors of unknowns by name."""
        rows, names, factors = (np.concatenate(each) for each in zip(*self._terms, strict=True))
        width = 1 + max(int(each.max(initial=1)) for each in (names, *self._named))
        return scipy.sparse.csr_matrix((factors, (rows, names)), shape=(self._count, width))

    def obeyed(self, owner: Array, size: Array, count: int) -> Array:
        """Say for each of several solutions whether it is one: the owner of an unknown (-1: none) has this size."""
        matrix = self._matrix()
        some = np.flatnonzero(owner[: matrix.shape[1]] >= 0)
        solutions = (size[some], (np.arange(len(some)), owner[some]))
        left = (matrix[:, some] @ scipy.sparse.csr_matrix(solutions, shape=(len(some), count))).tocoo()
        good = np.ones(count, bool)
        good[left.col[np.abs(left.data) > SMALL]] = False
        return good

    def solutions(self) -> tuple[Array, scipy.sparse.csr_matrix]:
        """Return the unknowns, ascending, and a basis of all solutions, in columns."""
        matrix = self._matrix()
        unknowns = np.flatnonzero(np.bincount(np.concatenate([matrix.indices, *self._named])))
        left, root, size = _eliminated(matrix[:, unknowns])
        live = np.flatnonzero(size)
        roots, place = np.unique(root[live], return_inverse=True)
        spread = scipy.sparse.csr_matrix((size[live], (live, place)), shape=(len(unknowns), len(roots)))
        return unknowns, (spread @ _solved(left[:, roots])).tocsr()


def alike(exponents: scipy.sparse.csr_matrix) -> tuple[Array, Array]:
    """Return the first of all rows that are the same, and for each row which of these it is; -1 for rows of zeros."""
    full = np.flatnonzero(np.diff(exponents.indptr))
    code = hashed(exponents.indices, exponents.data.view(np.int64))
    first, place = distinct(np.add.reduceat(code, exponents.indptr[full]) if len(full) else code)
    group = np.full(exponents.shape[0], -1)
    group[full] = place
    return full[first], group


def alone(solutions: scipy.sparse.csr_matrix) -> Array:
    """Say of columns whether they share no row with others."""
    found = np.ones(solutions.shape[1], bool)
    shared = np.diff(solutions.indptr) > 1
    found[solutions.indices[np.repeat(shared, np.diff(solutions.indptr))]] = False
    return found


def linked(solutions: scipy.sparse.csr_matrix) -> tuple[Array, Array]:
    """Say of rows and columns which belong together, by numbers."""
    entries, (count, width) = solutions.tocoo(), solutions.shape
    ones = np.ones(entries.nnz)
    graph = scipy.sparse.coo_matrix((ones, (entries.row, count + entries.col)), shape=(count + width, count + width))
    part = connected_components(graph, directed=False)[1]
    return part[:count], part[count:]


def parts_of(unknowns: Array, solutions: scipy.sparse.csr_matrix) -> Iterator[Component]:
    """Yield the columns of a matrix that share rows together, with the unknowns of these rows."""
    of_row, of_column = linked(solutions)
    entries = solutions.tocoo()
    rows, columns = (np.flatnonzero(entries.getnnz(axis)) for axis in (1, 0))
    rows = rows[np.argsort(of_row[rows], kind="stable")]
    columns = columns[np.argsort(of_column[columns], kind="stable")]
    _, wide = np.unique(of_column[columns], return_counts=True)
    _, high = np.unique(of_row[rows], return_counts=True)
    ordered = solutions[rows][:, columns].tocsr()
    ordered.sort_indices()
    row = column = 0
    for k, d in zip(high.tolist(), wide.tolist(), strict=True):
        inside = slice(ordered.indptr[row], ordered.indptr[row + k])
        if d == 1:
            directions = ordered.data[inside][:, None]
        else:
            start = ordered.indptr[row : row + k + 1] - ordered.indptr[row]
            directions = scipy.sparse.csr_matrix(
                (ordered.data[inside], ordered.indices[inside] - column, start), shape=(k, d)
            )
        yield Component(unknowns[rows[row : row + k]], directions)
        row, column = row + k, column + d


def _solved(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """Return a sparse basis of the null space, in columns.

    An unknown that stands in one equation alone takes up whatever this one asks for, and both are done with; what is
    left is solved a connected part at a time.
    """
    count = matrix.shape[1]
    left, taken = matrix, []
    waiting = np.ones(count, bool)
    while left.shape[0]:
        row, pivot, value = _lonely(left)
        if not len(row):  # tokens ask for the same, each by itself
            first, _ = alike(left)
            if len(first) == left.shape[0]:
                break
            left = left[first]
            continue
        taken.append((left[row], pivot, value))
        waiting[pivot] = False
        left = left[np.setdiff1d(np.arange(left.shape[0]), row)]
    bound = np.zeros(count, bool)
    bound[left.indices] = True
    free = np.flatnonzero(waiting & ~bound)
    parts = [(free, np.arange(len(free)), np.ones(len(free)))]
    width = len(free)
    for names, basis in _connected(left, np.flatnonzero(bound)):
        i, j = np.nonzero(basis)
        parts.append((names[i], width + j, basis[i, j]))
        width += basis.shape[1]
    i, j, value = (np.concatenate(each) for each in zip(*parts, strict=True))
    found = scipy.sparse.csr_matrix((value, (i, j)), shape=(count, width))
    for rows, pivot, value in reversed(taken):
        made = (scipy.sparse.diags_array(-1 / value) @ (rows @ found)).tocoo()
        keep = np.abs(made.data) > SMALL
        more = (made.data[keep], (pivot[made.row[keep]], made.col[keep]))
        found = (found + scipy.sparse.csr_matrix(more, shape=found.shape)).tocsr()
    return found


def _lonely(matrix: scipy.sparse.csr_matrix) -> tuple[Array, Array, Array]:
    """Return rows, for each a column that no other row has, and its factor, which is not small beside the others."""
    entries = matrix.tocoo()
    size = np.abs(entries.data)
    most = np.zeros(matrix.shape[0])
    np.maximum.at(most, entries.row, size)
    count = np.bincount(entries.col, minlength=matrix.shape[1])
    good = (count[entries.col] == 1) & (size > 1e-3 * most[entries.row]) & (most[entries.row] > 1e-6 * most.max())
    row, first = np.unique(entries.row[good], return_index=True)
    return row, entries.col[good][first], entries.data[good][first]


def _eliminated(matrix: scipy.sparse.csr_matrix) -> tuple[scipy.sparse.csr_matrix, Array, Array]:
    """Write each unknown as a multiple (0 where it is 0) of a root, by equations of one and of two; return the others.

    Equations of two stay until they are 0: a second one between two roots may contradict the first.
    """
    every, classes = np.arange(matrix.shape[1]), Classes()
    classes.grow(len(every))
    root, size, zero = every, np.ones(len(every)), np.zeros(len(every), bool)
    while True:
        matrix = matrix[np.flatnonzero(np.diff(matrix.indptr))]
        length, start = np.diff(matrix.indptr), matrix.indptr[:-1]
        one, two = start[length == 1], start[length == 2]
        if not len(one) and not len(two):
            return matrix, root, size
        zero[matrix.indices[one]] = True
        ratio = -matrix.data[two] / matrix.data[two + 1]
        classes.join(matrix.indices[two], matrix.indices[two + 1], ratio, np.zeros(len(two), bool))
        root, size, _ = classes.find(every)
        zero[root[zero]] = True
        size = np.where(zero[root] | ~np.isfinite(size), 0.0, size)
        terms = matrix.data * size[matrix.indices]
        most = np.maximum.reduceat(np.abs(terms), start)
        matrix = scipy.sparse.csr_matrix((terms, root[matrix.indices], matrix.indptr), shape=matrix.shape)
        matrix.sum_duplicates()
        matrix.data[np.abs(matrix.data) <= NOTHING * np.repeat(most, np.diff(matrix.indptr))] = 0.0
        matrix.eliminate_zeros()


def _connected(matrix: scipy.sparse.csr_matrix, bound: Array) -> Iterator[tuple[Array, Array]]:
    """Yield columns that share equations, and a basis of their solutions."""
    if not len(bound):
        return
    columns = matrix[:, bound].tocsc()
    _, component = linked(columns)
    order = np.argsort(component, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(component[order])) + 1):
        some = columns[:, part]
        rows, place = np.unique(some.indices, return_inverse=True)
        dense = np.zeros((len(rows), len(part)))
        dense[place, np.repeat(np.arange(len(part)), np.diff(some.indptr))] = some.data
        yield bound[part], _null_space(dense)


def _null_space(matrix: Array) -> Array:
    """Return a basis of the null space, in columns, of equations and unknowns that are brought to one size.

    Rows of weights may be of sizes far apart: what rounding leaves of large ones would be as much as small ones.
    """
    size = np.ones(matrix.shape[1])
    for _ in range(SCALED):
        rows, columns = (np.abs(matrix).max(axis) for axis in (1, 0))
        if min(each.min() / each.max() for each in (rows, columns)) > EVEN:
            break
        rows[rows <= NOTHING * rows.max()] = 1.0  # rounding, which stays as small as it is
        matrix = matrix / _power_of_two(rows)[:, None]
        columns = _power_of_two(np.abs(matrix).max(0))
        matrix, size = matrix / columns, size / columns
    found = echelon(matrix)
    first = np.abs(found).argmax(0)
    return np.where(np.abs(found) > SMALL, found, 0.0) * size[:, None] / size[first]


def _power_of_two(sizes: Array) -> Array:
    """Return about the same sizes, by which numbers are divided without rounding."""
    return np.exp2(np.log2(sizes).round())
