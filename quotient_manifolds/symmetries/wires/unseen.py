"""Find what nobody sees: constants that may be added to channels, backward from the ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel, outside, span
from quotient_manifolds.symmetries.wires.nodes import FIXED
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.uses import SUMS, Flow, Linear
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk

SMALL = 1e-14
SAME = 1e-12
FEW = 8


@dataclass(frozen=True, eq=False)
class Cell:
    """Hold nodes, ascending, and of them what somebody sees or what nobody sees, whichever is at hand.

    What is seen are functionals (r, n), fewer than nodes; what is unseen are directions (n, u), orthonormal.
    """

    nodes: Array
    matrix: Array
    seen: bool  # whether the matrix is of what is seen

    @property
    def functionals(self) -> Array:
        return self.matrix if self.seen else outside(self.matrix)

    def at(self, places: Array) -> Array:
        """Return the directions of some of the nodes, where all others are 0."""
        if self.seen:
            return kernel(self.matrix[:, places])
        rest = np.ones(len(self.nodes), bool)
        rest[places] = False
        K = self.matrix[places]
        return K @ kernel(self.matrix[rest], 1.0) if rest.any() else K


class Unseen:
    """Hold, by cells of nodes, what somebody downstream sees; backward from the ends."""

    def __init__(self, walk: Walk, values: Values, unreached: Unreached, seen: Array | None = None) -> None:
        self.walk, self.values, self.unreached = walk, values, unreached
        self.seen = np.zeros(walk.count, bool) if seen is None else seen.copy()  # what is known to be seen
        self.cell = np.full(walk.count, -1)
        self.cells: dict[int, Cell] = {}
        self._known: dict[tuple[bytes, ...], Array] = {}
        self.facing = False
        """Whether one side of a product has directions that the other, as it is now, does not reach."""
        self._some = np.zeros(walk.count, bool)
        """Nodes of which something is seen, and nobody asks any more what."""
        self._past = np.zeros(walk.count, bool)
        self.sides = np.zeros(walk.count, np.int64)
        """Of what nodes take part in, where both sides of a product have such directions: 1, 2, or 3 for both."""
        for place, flow in reversed([*enumerate(walk.flows)]):
            self._back(flow)
            self._face(flow)
            if flow.kind in SUMS:
                self._forget(flow.outs[unreached.producer[flow.outs] == place])

        uses = [each for each in walk.uses if isinstance(each, Linear) or not each.gain]
        sides: dict[str, int] = defaultdict(int)
        for each in uses:
            sides[each.entries.name] |= int(np.bitwise_or.reduce(self.sides[each.outs], None))
        for each in uses:
            if sides[each.entries.name] == 3:
                self.see(each.outs[self.sides[each.outs] > 0])
        del self.values, self.unreached, self._past  # numbers have told

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: without what is sooner found again than stored."""
        return self.__dict__ | {"_known": {}}

    def _face(self, flow: Flow) -> None:
        """See all of what both sides of a product are made of: the product of two changes is seen."""
        side = np.bitwise_or.reduce(self.sides[flow.outs]) if len(flow.outs) else 0
        if not side or flow.kind in ("bias", "dot", "soft"):
            return
        if flow.kind == "norm" and self.partly(flow.outs).any():  # of what goes in, all but the mean is seen anyway
            return
        names = flow.taken
        self.sides[names[names > FIXED]] |= side
        self.see(names[self.sides[names] == 3])

    def _forget(self, nodes: Array) -> None:
        """Let go of what is seen of nodes that no parameter writes to and whose terms know it."""
        self._past[nodes] = True
        cells = np.unique(self.cell[nodes])
        for c in cells[cells >= 0].tolist():
            names = self.cells[c].nodes
            if self._past[names].all():
                del self.cells[c]
                self.cell[names], self._some[names] = -1, True

    def add(self, nodes: Any, functionals: Array) -> None:
        """Say that these functionals of these nodes (fixed ones count for nothing) are seen.

        A node that stands at several places has a number of its own at each: tokens of several kinds, heads that share
        their values. So each is seen by itself.
        """
        names = np.asarray(nodes, np.int64)
        live = np.flatnonzero((names > FIXED) & ~self.seen[names])
        distinct, first = np.unique(names[live], return_index=True)
        some = live[first]
        if len(distinct) < len(live):
            rest = np.setdiff1d(live, some)
            self.add(distinct, functionals[:, some])
            self.add(names[rest], functionals[:, rest])
            return
        kept = _present(functionals)[some]
        if kept.any():
            functionals = (
                functionals if np.array_equal(some[kept], np.arange(len(names))) else functionals[:, some[kept]]
            )
            rows = _present(functionals.T)
            self._put(Cell(distinct[kept], functionals if rows.all() else functionals[rows], True))

    def leave(self, nodes: Any, directions: Array) -> None:
        """Say that of these nodes together nothing is unseen but these directions (n, u)."""
        names = np.asarray(nodes, np.int64)
        K = span(directions)
        live = (names > FIXED) & ~self.seen[names]
        distinct, first = np.unique(names[live], return_index=True)
        if len(distinct) < live.sum():
            self.add(names, outside(K))
            return
        if not live.all():
            K = K[live] @ kernel(K[~live], 1.0)
        K = K[first]
        free = (K**2).sum(1) > 1 - 1e-12  # by itself
        if free.any():
            distinct, K = distinct[~free], span(K[~free], 1.0)  # of the others rounding leaves something
        if len(distinct):
            self._put(Cell(distinct, K, False))

    def _put(self, made: Cell) -> None:
        """Let the nodes of a cell, none of them seen, have what it says of them beside what has been known."""
        names = made.nodes
        touched = np.unique(self.cell[names])
        inner = [self.cells.pop(c) for c in touched.tolist() if c >= 0]
        if not inner:
            self._store(made)
        elif len(inner) == 1 and np.array_equal(inner[0].nodes, names):
            self._store(_meet(inner[0], made))
        else:
            every = np.unique(np.concatenate([names, *(each.nodes for each in inner)]))
            parts = []
            for each in (*inner, made):
                matrix = each.functionals
                wide = np.zeros((len(matrix), len(every)))
                wide[:, np.searchsorted(every, each.nodes)] = matrix
                parts.append(wide)
            self._store(Cell(every, np.concatenate(parts), True))

    def _store(self, cell: Cell) -> None:
        if cell.seen and len(cell.matrix) >= len(cell.nodes):
            cell = Cell(cell.nodes, kernel(cell.matrix), False)
        if not cell.seen and not cell.matrix.shape[1]:
            self.cell[cell.nodes] = -1
            self.seen[cell.nodes] = True
            return
        identity = int(cell.nodes[0])
        self.cells[identity] = cell
        self.cell[cell.nodes] = identity

    def see(self, nodes: Any) -> None:
        names = np.unique(np.asarray(nodes, np.int64))
        names = names[(names > FIXED) & ~self.seen[names]]
        cells = np.unique(self.cell[names])
        self.seen[names] = True
        self.cell[names] = -1
        for c in cells[cells >= 0].tolist():
            cell = self.cells.pop(c)
            self.cell[cell.nodes] = -1
            keep = np.flatnonzero(~self.seen[cell.nodes])
            if cell.seen:
                keep = keep[_present(cell.matrix)[keep]]
            if len(keep):
                matrix = cell.matrix[:, keep] if cell.seen else cell.at(keep)
                self._store(Cell(cell.nodes[keep], matrix, cell.seen))

    def of(self, nodes: Any) -> Array:
        """Return the functionals of a list of nodes, (r, n)."""
        names = np.asarray(nodes, np.int64)
        alone = np.flatnonzero(self.seen[names])
        first = np.zeros((len(alone), len(names)))
        first[np.arange(len(alone)), alone] = 1.0
        rows = [first]
        for here, cell in self._cells_of(names):
            matrix = cell.functionals
            part = np.zeros((len(matrix), len(names)))
            part[:, here] = matrix[:, np.searchsorted(cell.nodes, names[here])]
            rows.append(part)
        return np.concatenate(rows)

    def directions(self, nodes: Any) -> Array:
        """Return what nobody sees of a list of nodes, (n, u), orthonormal."""
        names = np.asarray(nodes, np.int64)
        if len(np.unique(names)) < len(names):
            return kernel(self.of(names))
        free = np.flatnonzero(~self.seen[names] & (self.cell[names] < 0))
        parts = [(free, np.eye(len(free)))]
        parts += [(here, cell.at(np.searchsorted(cell.nodes, names[here]))) for here, cell in self._cells_of(names)]
        found = np.zeros((len(names), sum(K.shape[1] for _, K in parts)))
        start = 0
        for here, K in parts:
            found[here, start : start + K.shape[1]] = K
            start += K.shape[1]
        return found

    def common(self, rows: Sequence[Any]) -> Array:
        """Return what nobody sees of any of several lists of nodes, (n, u), orthonormal."""
        key = tuple(np.asarray(row, np.int64).tobytes() for row in rows)
        if key not in self._known:
            self._known[key] = self._common(rows)
        return self._known[key]

    def _common(self, rows: Sequence[Any]) -> Array:
        K = self.directions(rows[0])
        for row in rows[1:]:
            other = self.directions(row)
            K = K @ kernel(K - other @ (other.T @ K), 1.0)
        return K

    def alike(self, other: Unseen) -> bool:
        """Return whether the same is seen of what parameters write to, and something of the same nodes."""
        every, written = np.arange(self.walk.count), [row for each in self.walk.uses for row in each.outs]
        same = np.array_equal(self.sides, other.sides) and np.array_equal(self.partly(every), other.partly(every))
        pairs = ((self.directions(row), other.directions(row)) for row in written)
        return same and all(K.shape == L.shape and np.allclose(K, L, rtol=0, atol=SAME) for K, L in pairs)

    def partly(self, nodes: Any) -> Array:
        """Say of each of these nodes whether anything of it is seen."""
        names = np.asarray(nodes, np.int64)
        return self.seen[names] | (self.cell[names] >= 0) | self._some[names]

    def partly_alone(self, names: Array) -> Array:
        """Say of nodes in cells whether anything of each is seen when no other one of its cell changes."""
        found = np.zeros(len(names), bool)
        for here, cell in self._cells_of(names):
            some = np.searchsorted(cell.nodes, names[here])
            if cell.seen:
                found[here] = _present(cell.matrix)[some]
            else:
                found[here] = (cell.matrix[some] ** 2).sum(1) < 1 - 1e-12
        return found

    def all(self, nodes: Any) -> bool:
        """Return whether these nodes (fixed ones count for nothing) are seen, each by itself."""
        names = np.asarray(nodes, np.int64)
        return bool((self.seen[names] | (names <= FIXED)).all())

    def _cells_of(self, names: Array) -> list[tuple[Array, Cell]]:
        cell = self.cell[names]
        return [(np.flatnonzero(cell == c), self.cells[c]) for c in np.unique(cell[cell >= 0]).tolist()]

    def _back(self, flow: Flow) -> None:
        if flow.kind == "seen":
            self.see(flow.outs)
        elif flow.kind in SUMS:
            self._sums(flow)
        elif flow.kind == "linear" and not flow.terms.table:
            for row_in, row_out in zip(flow.terms.ins, flow.terms.outs, strict=True):
                self._linear(flow.terms, row_in, row_out)
        elif flow.kind == "bias":
            if len(flow.terms.like):  # what is seen of any row would be seen of these
                self.leave(flow.terms.outs[0], self._common(flow.terms.like))
        elif flow.kind == "gain":
            self._gain(flow)
        elif flow.kind == "norm":
            if not len(flow.outs) or self.partly(flow.outs).any():
                n = len(flow.terms)
                self.see(flow.terms) if flow.about == "even" else self.leave(flow.terms, np.full((n, 1), n**-0.5))
        elif flow.kind == "centre":
            if not self.all(flow.terms) and self.partly(flow.outs).any():
                F = self.of(flow.outs)
                self.add(flow.terms, F - F.mean(1, keepdims=True))
        elif flow.kind == "through" or flow.about == "tokens":
            self.see(flow.terms[self.partly(flow.outs)])
        elif flow.kind == "soft":
            for row in flow.terms:
                n = len(row)
                self.leave(row, np.full((n, 1), n**-0.5)) if n > 1 and len(set(row)) == n else self.see(row)
        elif flow.kind == "dot":
            seen = self.partly(flow.outs[0])
            if seen and all([self._against(*flow.terms), self._against(*flow.terms[::-1])]):
                for side, row in enumerate(flow.terms, 1):
                    self.sides[[n for n in row if n > FIXED]] |= side
        elif flow.kind == "max":
            self.see(flow.terms[self.seen[flow.outs]])
            for out, pair in zip(flow.outs.tolist(), flow.terms, strict=True):
                if self.cell[out] >= 0:
                    self.add(pair, np.array([[1.0, -1.0]]))
                    self.add(pair[:1], self.of([out]))

    def _against(self, row: list[int], other: list[int]) -> bool:
        """See of a row what its products with another take, which may not reach all directions; return whether so."""
        if self.all(row):
            return False
        U, c = self.unreached.of(other)
        V = kernel(c[None]).T @ U if len(c) else U
        if len(V):
            self.facing = True
            self.leave(row, V.T)
        else:
            self.see(row)
        return len(V) > 0

    def _linear(self, linear: Linear, row_in: list[int], row_out: list[int]) -> None:
        """See of what goes into a weight what is seen of its answer, some rows of the weight after others."""
        if self.all(row_in) or not self.partly(row_out).any():
            return
        K = None if self.all(row_out) else self.directions(row_out)
        for tap in range(linear.shape[0]):
            chunks = self.values.chunks
            along = 0.0 if K is None else sum(K[i : i + len(W)].T @ W for i, W in chunks(linear, tap))
            for start, W in chunks(linear, tap):
                self.add(row_in, W if K is None else W - K[start : start + len(W)] @ along)
                if self.all(row_in):
                    return

    def _gain(self, flow: Flow) -> None:
        outs, ins = flow.outs, flow.terms.ins[0]
        if self.all(ins) or not self.partly(outs).any():
            return
        weights = self.values.vector(flow.terms)
        whole = self.seen[outs] & (weights != 0)
        self.see(ins[whole])
        rest = np.flatnonzero(~whole)
        self._scaled(ins[rest], outs[rest], weights[rest])

    def _scaled(self, nodes: Array, outs: Array, factors: Array) -> None:
        """See of nodes what is seen of their multiples."""
        if self.all(nodes) or not self.partly(outs).any():
            return
        if (factors != 0).all() and all(not cell.seen for _, cell in self._cells_of(outs)):
            self.leave(nodes, self.directions(outs) / factors[:, None])
        else:
            self.add(nodes, self.of(outs) * factors)

    def _sums(self, flow: Flow) -> None:
        names, factors = flow.terms
        cell = self.cell[flow.outs]
        self.see(names[self.seen[flow.outs]])
        rest = np.flatnonzero(cell >= 0)
        if not len(rest):
            return
        key = np.stack([flow.about[rest], cell[rest]], 1)
        _, group, count = np.unique(key, axis=0, return_inverse=True, return_counts=True)
        group = group.reshape(-1)
        alone = rest[count[group] == 1]  # whatever is seen of it is seen of its terms
        self.see(names[alone][self.partly_alone(flow.outs[alone])[:, None] & (factors[alone] != 0)])
        for part in np.split(np.argsort(group, kind="stable"), np.cumsum(count)[:-1]):
            if len(part) == 1:
                continue
            part = rest[part]
            for nodes, size in zip(names[part].T, factors[part].T, strict=True):
                self._scaled(nodes, flow.outs[part], size)


def _present(matrix: Array) -> Array:
    """Say of columns whether there is any number in them."""
    found = (np.abs(matrix[:FEW]) > SMALL).any(0)  # most have one among the first
    rest = np.flatnonzero(~found)
    if len(rest):
        found[rest] = np.abs(matrix[:, rest]).max(0, initial=0) > SMALL
    return np.asarray(found)


def _meet(one: Cell, other: Cell) -> Cell:
    """Return what is seen or unseen of the nodes of two cells that have the same ones."""
    if one.seen:
        one, other = other, one
    if one.seen:
        return Cell(one.nodes, np.concatenate([one.matrix, other.matrix]), True)
    K, matrix = one.matrix, other.matrix
    if other.seen:
        return Cell(one.nodes, K @ kernel(matrix @ K, float(np.abs(matrix).max())), False)
    return Cell(one.nodes, K @ kernel(K - matrix @ (matrix.T @ K), 1.0), False)
