"""Find what nobody sees: constants that may be added to channels, backward from the ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from quotient_manifolds.symmetries.wires.linear_algebra import full_rank, kernel
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.walk import FIXED, ZERO, Flow, Vector, Walk

Array = np.ndarray


class Unseen:
    """Hold, by cells of nodes, the functionals that something downstream sees; backward from the ends."""

    def __init__(self, walk: Walk, values: dict[int, Array], unreached: Unreached, seen: Array | None = None) -> None:
        self.walk, self.values, self.unreached = walk, values, unreached
        self.seen = np.zeros(walk.count, bool) if seen is None else seen.copy()  # what is known to be seen
        self.cell = np.full(walk.count, -1)
        self.cells: dict[int, tuple[Array, Array]] = {}
        for flow in reversed(walk.flows):
            self._back(flow)

    def add(self, nodes: Any, functionals: Array) -> None:
        """Say that these functionals of these nodes (fixed ones count for nothing) are seen.

        A node that stands at several places has a number of its own at each: tokens of several kinds, heads that share
        their values. So each is seen by itself.
        """
        names = np.asarray(nodes, np.int64)
        live = np.flatnonzero((names > FIXED) & ~self.seen[names])
        names, functionals = names[live], functionals[:, live]
        distinct, first = np.unique(names, return_index=True)
        if len(distinct) < len(names):
            rest = np.ones(len(names), bool)
            rest[first] = False
            self.add(names[first], functionals[:, first])
            self.add(names[rest], functionals[:, rest])
            return
        if not functionals.size:
            return
        size = np.abs(functionals)
        kept = size.max(0) > 1e-14
        names, rows = names[kept], functionals[:, kept][size.max(1) > 1e-14]
        if not len(names):
            return
        touched = np.unique(self.cell[names])
        inner = [self.cells.pop(c) for c in touched.tolist() if c >= 0]
        every = np.unique(np.concatenate([names, *(each for each, _ in inner)]))
        parts = []
        for some, matrix in [*inner, (names, rows)]:
            wide = np.zeros((len(matrix), len(every)))
            wide[:, np.searchsorted(every, some)] = matrix
            parts.append(wide)
        matrix = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if len(matrix) > len(every):
            matrix = np.linalg.qr(matrix, mode="r")
        self._store(every, matrix)

    def _store(self, nodes: Array, matrix: Array) -> None:
        if len(matrix) >= len(nodes) and full_rank(matrix):
            self.cell[nodes] = -1
            self.seen[nodes] = True
            return
        identity = int(nodes.min())
        self.cells[identity] = nodes, matrix
        self.cell[nodes] = identity

    def see(self, nodes: Any) -> None:
        names = np.unique(np.asarray(nodes, np.int64))
        names = names[(names > FIXED) & ~self.seen[names]]
        cells = np.unique(self.cell[names])
        self.seen[names] = True
        self.cell[names] = -1
        for c in cells[cells >= 0].tolist():
            inner, matrix = self.cells.pop(c)
            self.cell[inner] = -1
            keep = ~self.seen[inner]
            if keep.any() and np.abs(matrix[:, keep]).max() > 1e-14:
                self._store(inner[keep], matrix[:, keep])

    def of(self, nodes: Any) -> Array:
        """Return the functionals of a list of nodes, (r, n)."""
        names = np.asarray(nodes, np.int64)
        alone = np.flatnonzero(self.seen[names])
        first = np.zeros((len(alone), len(names)))
        first[np.arange(len(alone)), alone] = 1.0
        rows = [first]
        cell = self.cell[names]
        for c in np.unique(cell[cell >= 0]).tolist():
            inner, matrix = self.cells[c]
            here = np.flatnonzero(cell == c)
            part = np.zeros((len(matrix), len(names)))
            part[:, here] = matrix[:, np.searchsorted(inner, names[here])]
            rows.append(part)
        return np.concatenate(rows)

    def any(self, node: int) -> bool:
        return bool(self.seen[node] or self.cell[node] >= 0)

    def some(self, nodes: Any) -> bool:
        """Say whether anything of these nodes is seen."""
        names = np.asarray(nodes, np.int64)
        return bool((self.seen[names] | (self.cell[names] >= 0)).any())

    def all(self, nodes: Any) -> bool:
        return bool(self.seen[np.asarray(nodes, np.int64)].all())

    def _back(self, flow: Flow) -> None:
        if flow.kind == "seen":
            self.see(flow.outs)
        elif flow.kind in ("sum", "token", "number", "pool", "mix"):
            keys = flow.about or [0] * len(flow.outs)
            for key in dict.fromkeys(keys):
                members = [i for i, other in enumerate(keys) if other == key]
                self._through_terms(Flow(flow.kind, [flow.outs[i] for i in members], [flow.terms[i] for i in members]))
        elif flow.kind == "linear":
            for row_in, row_out in zip(flow.terms.ins, flow.terms.outs, strict=True):
                if flow.terms.table or (np.array(row_in) <= FIXED).all() or self.all([n for n in row_in if n > FIXED]):
                    continue
                F = None if self.all(row_out) else self.of(row_out)
                if F is None or len(F):
                    for W in self.values[id(flow.terms)]:
                        self.add(row_in, W if F is None else F @ W)
        elif flow.kind == "bias":
            if flow.terms.like:  # what is seen of any row would be seen of these
                F = np.concatenate([self.of(row) for row in flow.terms.like])
                self.add(flow.terms.outs[0], np.linalg.qr(F, mode="r"))
        elif flow.kind == "gain":
            vector: Vector = flow.terms
            weights = np.array(self.values[id(vector)])
            outs, ins = np.array(vector.outs[0]), np.array(vector.ins[0])
            whole = self.seen[outs] & (weights != 0)
            self.see(ins[whole])
            rest = np.flatnonzero(~whole)
            self.add(ins[rest], self.of(outs[rest]) * weights[rest])
        elif flow.kind == "norm":
            row = flow.terms
            if (not flow.outs or self.some(flow.outs)) and not self.all([n for n in row if n > FIXED]):
                n = len(row)
                self.add(row, np.eye(n) - (flow.about != "even") * np.full((n, n), 1 / n))
        elif flow.kind == "centre":
            if not self.all(flow.terms) and self.some(flow.outs):
                F = self.of(flow.outs)
                self.add(flow.terms, F - F.mean(1, keepdims=True))
        elif flow.kind == "through":
            for out, ins in zip(flow.outs, flow.terms, strict=True):
                if self.any(out):
                    self.see(ins)
        elif flow.kind == "soft":
            for row in flow.terms:
                n = len(row)
                if n > 1 and len(set(row)) == n:
                    self.add(row, np.eye(n) - np.full((n, n), 1 / n))
                else:
                    self.see(row)
        elif flow.kind == "dot":
            if self.any(flow.outs[0]):
                for one, other in (flow.terms, flow.terms[::-1]):
                    self._against(one, other)
        elif flow.kind == "max":
            if self.any(flow.outs[0]):
                a, b = flow.terms
                self.add([a, b], np.array([[1.0, -1.0]]))
                F = self.of(flow.outs)
                self.add([a], F)

    def _against(self, row: list[int], other: list[int]) -> None:
        """See of a row what its products with another take, which may not reach all directions."""
        if self.all([n for n in row if n > FIXED]):
            return
        U, c = self.unreached.of(other)
        V = kernel(c[None]).T @ U if len(c) else U
        if len(V):
            self.add(row, kernel(V).T)
        else:
            self.see(row)

    def _through_terms(self, flow: Flow) -> None:
        outs = np.array(flow.outs)
        going = self.seen[outs] | (self.cell[outs] >= 0)
        if not going.any():
            return
        terms = [flow.terms[i] for i in np.flatnonzero(going)]
        outs = outs[going]
        twice = np.array([len({n for n, _ in each}) < len(each) for each in terms])  # x + x, x - x
        simple = self.seen[outs] & ~twice
        self.see([n for each, there in zip(terms, simple, strict=True) if there for n, _ in each])
        rest = np.flatnonzero(~simple)
        cell = np.where(self.seen[outs[rest]], -1 - np.arange(len(rest)), self.cell[outs[rest]])
        parts = [(outs[rest[cell == c]], [terms[i] for i in rest[cell == c]]) for c in np.unique(cell)]
        for names, left, F in [(names, left, self.of(names)) for names, left in parts]:
            for k in range(max(map(len, left))):
                nodes = [each[k][0] if len(each) > k else ZERO for each in left]
                size = np.array([each[k][1] if len(each) > k else 0.0 for each in left])
                if not self.all([n for n in nodes if n > FIXED]):
                    self.add(nodes, F * size)
