"""Follow constants through a walk: what nobody sees, what is never reached, what one parameter adds and another takes away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.blocks import zeros
from quotient_manifolds.symmetries.wires.relations import Scales
from quotient_manifolds.symmetries.wires.walk import FIXED, ZERO, Flow, Linear, Vector, Walk

Array = np.ndarray
RELATIVE = 1e-9


def kernel(matrix: Array) -> Array:
    """Return a basis of the null space, in columns."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = np.linalg.qr(matrix, mode="r")
    return scipy.linalg.null_space(matrix, rcond=RELATIVE) if matrix.size else np.eye(matrix.shape[1])


def full_rank(R: Array) -> bool:
    """Say whether a matrix of no fewer rows than columns, or the triangle of its QR, has full column rank."""
    if not np.isfinite(R).all():
        return False
    n = R.shape[1]
    if n > 8 and len(R) == n and not np.tril(R, -1).any():
        rcond, _ = scipy.linalg.lapack.dtrcon(R)
        if rcond > 1e-6:
            return True
    return bool(np.linalg.matrix_rank(R, tol=RELATIVE * np.abs(R).max()) == n)


class Unseen:
    """Hold, by cells of nodes, the functionals that something downstream sees; backward from the ends."""

    def __init__(self, walk: Walk, values: dict[int, Array], unreached: Unreached) -> None:
        self.walk, self.values, self.unreached = walk, values, unreached
        self.seen = np.zeros(walk.count, bool)
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
        elif flow.kind == "gain":
            vector: Vector = flow.terms
            weights = np.array(self.walk.notes["gain index", id(vector)][1])
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


class Unreached:
    """Find functionals u with u . x = c on every input, of rows of nodes, on demand."""

    def __init__(self, walk: Walk, values: dict[int, Array]) -> None:
        self.walk, self.values = walk, values
        self.producer: dict[int, Flow] = {}
        for flow in walk.flows:
            if flow.kind in ("sum", "token", "number", "pool", "mix", "linear", "gain", "bias", "norm", "centre"):
                for out in flow.outs:
                    self.producer.setdefault(out, flow)
        self.known: dict[tuple[int, ...], tuple[Array, Array]] = {}

    def of(self, row: list[int]) -> tuple[Array, Array]:
        """Return U (r, n) and c (r,)."""
        key = tuple(row)
        if key not in self.known:
            self.known[key] = np.zeros((0, len(row))), np.zeros(0)  # what asks for itself gets nothing
            self.known[key] = self._of(row)
        return self.known[key]

    def common(self, rows: list[list[int]]) -> tuple[Array, Array]:
        """Return what all kinds of tokens have in common: u . x = c in every row."""
        U, c = self.of(rows[0])
        for row in rows[1:]:
            V, d = self.of(row)
            N = kernel(np.concatenate([np.concatenate([U, c[:, None]], 1), -np.concatenate([V, d[:, None]], 1)]).T)
            a = N[: len(U)]
            U, c = a.T @ U, a.T @ c
        return U, c

    def _of(self, row: list[int]) -> tuple[Array, Array]:
        n = len(row)
        us, cs = [], []
        groups: dict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(row):
            if node > FIXED and row.count(node) > 1:
                continue  # it has a number of its own at each place
            if node == ZERO:
                us.append(np.eye(n)[[i]])
                cs.append(np.zeros(1))
            elif node in self.producer:
                groups[id(self.producer[node])].append(i)
        for members in groups.values():
            nodes = [row[i] for i in members]
            U, c = self._made(self.producer[nodes[0]], nodes)
            wide = np.zeros((len(U), n))
            wide[:, members] = U
            us.append(wide)
            cs.append(c)
        if not us:
            return np.zeros((0, n)), np.zeros(0)
        return np.concatenate(us), np.concatenate(cs)

    def _made(self, flow: Flow, nodes: list[int]) -> tuple[Array, Array]:
        none = np.zeros((0, len(nodes))), np.zeros(0)
        if flow.kind == "bias":
            vector: Vector = flow.terms
            where = {n: (r, i) for r, row in enumerate(vector.outs) for i, n in enumerate(row)}
            b = np.array([self.values[id(vector)][where[n]] for n in nodes])
            return np.eye(len(nodes)), b
        if flow.kind == "linear":
            linear: Linear = flow.terms
            if len(self.values[id(linear)]) > 1 or linear.taps:
                return none
            for row_in, row_out in zip(linear.ins, linear.outs, strict=True):
                place = {n: i for i, n in enumerate(row_out)}
                if all(n in place for n in nodes):
                    W = self.values[id(linear)][0][[place[n] for n in nodes]]
                    V, d = (np.ones((1, W.shape[1])), np.ones(1)) if linear.table else self.of(row_in)
                    return self._images(W, V, d)
            return none
        if flow.kind in ("sum", "token", "number", "pool", "mix"):
            keys = dict(zip(flow.outs, flow.about or [0] * len(flow.outs), strict=True))
            if len({keys[n] for n in nodes}) > 1:
                us, cs = [], []
                for key in dict.fromkeys(keys[n] for n in nodes):
                    members = [i for i, n in enumerate(nodes) if keys[n] == key]
                    U, c = self._made(flow, [nodes[i] for i in members])
                    wide = np.zeros((len(U), len(nodes)))
                    wide[:, members] = U
                    us.append(wide)
                    cs.append(c)
                return np.concatenate(us), np.concatenate(cs)
            terms = {out: each for out, each in zip(flow.outs, flow.terms, strict=True)}
            width = max(len(terms[n]) for n in nodes)
            parts = []
            for k in range(width):
                inner = [terms[n][k][0] if len(terms[n]) > k else ZERO for n in nodes]
                size = np.array([terms[n][k][1] if len(terms[n]) > k else 1.0 for n in nodes])
                V, d = self.of(inner)
                if flow.kind == "number":
                    N = kernel(d[None]) if len(d) else np.zeros((0, 0))
                    V, d = N.T @ V, np.zeros(N.shape[1])
                if not len(V):
                    return none
                parts.append((V / size, d))
            return self._common(parts)
        if flow.kind == "gain":
            vector = flow.terms
            weights = dict(zip(vector.outs[0], self.walk.notes["gain index", id(vector)][1], strict=True))
            before = dict(zip(vector.outs[0], vector.ins[0], strict=True))
            V, d = self.of([before[n] for n in nodes])
            return V / np.array([weights[n] for n in nodes]), d
        if flow.kind in ("norm", "centre") and sorted(nodes) == sorted(flow.outs) and len(nodes) > 1:
            return np.ones((1, len(nodes))), np.zeros(1)
        return none

    @staticmethod
    def _images(W: Array, V: Array, d: Array) -> tuple[Array, Array]:
        """u with u W in the span of V."""
        if W.shape[0] > W.shape[1] or len(V):
            N = kernel(np.concatenate([W.T, -V.T], 1))
            u, a = N[: len(W)], N[len(W) :]
            good = np.linalg.norm(u, axis=0) > 1e-9
            U, c = u[:, good].T, (d @ a[:, good] if len(V) else np.zeros(int(good.sum())))
            return U, np.asarray(c).reshape(-1)
        return np.zeros((0, len(W))), np.zeros(0)

    @staticmethod
    def _common(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        U, c = parts[0]
        for V, d in parts[1:]:
            N = kernel(np.concatenate([U, -V]).T)
            a, b = N[: len(U)], N[len(U) :]
            U, c = a.T @ U, c @ a + d @ b
            if not len(U):
                break
        return U, np.asarray(c).reshape(-1)


def _expr(*terms: tuple[dict[int, float], float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for expression, factor in terms:
        if factor:
            for key, value in expression.items():
                found[key] = found.get(key, 0.0) + factor * value
    return {key: value for key, value in found.items() if abs(value) > 1e-13}


class Shifts:
    """Find constants that some parameters add and others take away: one unknown for each total that a source can set."""

    def __init__(self, walk: Walk, values: dict[int, Array], unseen: Unseen, unreached: Unreached) -> None:
        self.walk, self.values, self.unseen, self.unreached = walk, values, unseen, unreached
        self.system, self.count = Scales(), 1
        self.at: dict[int, dict[int, float]] = {}
        self.claimed: dict[int, tuple[int, int, float]] = {}  # bias node -> (out node, total, factor)
        self.free: dict[int, int] = {}  # bias node -> its own unknown
        self.virtual: dict[int, tuple[Linear, Array, list[int]]] = {}
        self.alike: dict[Any, int] = {}
        self.keys: dict[int, list[int]] = {}  # score -> the channels of the key
        self.soft = self._soft()
        uses: dict[int, int] = defaultdict(int)
        for flow in walk.flows:
            if flow.kind in ("sum", "token", "number", "pool", "mix"):
                for each in flow.terms:
                    for n, _ in each:
                        uses[n] += 1
            elif flow.kind in ("linear", "gain"):
                for row in flow.terms.ins:
                    for n in set(row):
                        uses[n] += 2
            elif flow.kind in ("norm", "centre"):
                for n in flow.terms:
                    uses[n] += 2
            elif flow.kind in ("through", "max"):
                for n in (flow.terms if flow.kind == "max" else [x for t in flow.terms for x in t]):
                    uses[n] += 2
            elif flow.kind == "dot":
                for n in (*flow.terms[0], *flow.terms[1]):
                    uses[n] += 2
            elif flow.kind in ("seen", "soft"):
                for n in flow.outs:
                    uses[n] += 2
        self.uses = uses
        self.sources = {n: flow.terms for flow in walk.flows if flow.kind == "bias" and flow.terms.shared != "other" for row in flow.terms.outs for n in row}
        for flow in walk.flows:
            self._forward(flow)
        for out in [n for n in self.at if self.at[n]]:
            del out

    def _soft(self) -> set[int]:
        """Scores to which nothing is done before a softmax over their keys but what adds or multiplies known numbers."""
        good: dict[int, bool] = {}
        for flow in reversed(self.walk.flows):
            if flow.kind == "soft":
                for n in flow.outs:
                    good[n] = good.get(n, True) and bool(flow.about)
            elif flow.kind in ("sum", "token", "number"):
                for out, each in zip(flow.outs, flow.terms, strict=True):
                    for n, _ in each:
                        good[n] = good.get(n, True) and good.get(out, True) and flow.kind in ("sum", "token") and len(each) == 1
            elif flow.kind == "through":
                for each in flow.terms:
                    for n in each:
                        good[n] = False
            elif flow.kind in ("seen",):
                for n in flow.outs:
                    good[n] = False
            elif flow.kind in ("pool", "mix"):
                for each in flow.terms:
                    for n, _ in each:
                        good[n] = False
            elif flow.kind in ("linear", "gain"):
                for row in flow.terms.ins:
                    for n in row:
                        good[n] = False
            elif flow.kind in ("norm", "centre", "max"):
                for n in flow.terms:
                    good[n] = False
            elif flow.kind == "dot":
                for n in (*flow.terms[0], *flow.terms[1]):
                    good[n] = False
        return {n for n, value in good.items() if value}

    def new(self) -> int:
        self.count += 1
        self.system.name([self.count])
        return self.count

    def _own(self, vector: Vector, node: int) -> int:
        """Return the unknown of a number of a vector: one for all the places where it is used."""
        if not vector.shared:
            return self.new()
        place = next((r, row.index(node)) for r, row in enumerate(vector.outs) if node in row)
        key = vector.entries.key, place
        if key not in self.alike:
            self.alike[key] = self.new()
        return self.alike[key]

    def expr(self, node: int) -> dict[int, float]:
        return self.at.get(node, {})

    def zero(self, nodes: Any) -> None:
        for node in nodes:
            if self.expr(node):
                self._constrain(self.expr(node))

    def _forward(self, flow: Flow) -> None:
        seen = self.unseen.any
        if flow.kind == "bias":
            for row in flow.terms.outs:
                for n in row:
                    if n in self.sources and (self.uses[n] != 1 or flow.terms.shared):
                        self.free[n] = self._own(flow.terms, n)
                        self.at[n] = {self.free[n]: 1.0}
        elif flow.kind == "linear":
            self._linear(flow.terms)
        elif flow.kind in ("sum", "token", "pool"):
            for out, each in zip(flow.outs, flow.terms, strict=True):
                self._sum(out, each, flow.kind == "sum")
                if len(each) == 1 and each[0][0] in self.keys:
                    self.keys[out] = self.keys[each[0][0]]
        elif flow.kind == "mix":
            for out, each in zip(flow.outs, flow.terms, strict=True):
                for n, _ in each[1:]:
                    if seen(out):
                        self._constrain(_expr((self.expr(n), 1.0), (self.expr(each[0][0]), -1.0)))
                if each:
                    self.at[out] = self.expr(each[0][0])
        elif flow.kind == "number":
            for out, each in zip(flow.outs, flow.terms, strict=True):
                if seen(out):
                    self._open(n for n, _ in each)
                    self.zero(n for n, _ in each)
        elif flow.kind == "gain":
            vector = flow.terms
            self._open(vector.ins[0])
            for a, out, g in zip(vector.ins[0], vector.outs[0], self.walk.notes["gain index", id(vector)][1], strict=True):
                self.at[out] = _expr((self.expr(a), g))
        elif flow.kind == "norm":
            if not flow.outs or any(seen(n) for n in flow.outs):
                self._open(flow.terms)
                for a in flow.terms[1:]:
                    self._constrain(_expr((self.expr(a), 1.0), (self.expr(flow.terms[0]), -1.0)))
        elif flow.kind == "centre":
            self._open(flow.terms)
            n = len(flow.terms)
            mean = _expr(*((self.expr(a), 1 / n) for a in flow.terms))
            for a, out in zip(flow.terms, flow.outs, strict=True):
                self.at[out] = _expr((self.expr(a), 1.0), (mean, -1.0))
        elif flow.kind == "through":
            for out, ins in zip(flow.outs, flow.terms, strict=True):
                if seen(out):
                    self._open(ins)
                    self.zero(ins)
        elif flow.kind == "seen":
            self._open(flow.outs)
            self.zero(flow.outs)
        elif flow.kind == "soft":
            self._open(flow.outs)
            for row in flow.terms:
                several = [self.keys.get(n) for n in row]
                for keys in several[1:]:
                    for a, b in zip(several[0] or keys or [], keys or several[0] or [], strict=True):
                        if several[0] is None or keys is None:
                            self.zero([a])
                        elif a != b:
                            self._constrain(_expr((self.expr(a), 1.0), (self.expr(b), -1.0)))
                for n in row[1:]:
                    self._constrain(_expr((self.expr(n), 1.0), (self.expr(row[0]), -1.0)))
        elif flow.kind == "dot":
            if seen(flow.outs[0]):
                self._open([*flow.terms[0], *flow.terms[1]])
                self.zero(flow.terms[0])
                if flow.outs[0] in self.soft:  # it ignores what all keys have in common
                    self.keys[flow.outs[0]] = flow.terms[1]
                else:
                    self.zero(flow.terms[1])
        elif flow.kind == "max":
            a, b = flow.terms
            if seen(flow.outs[0]):
                self._open([a, b])
                self._constrain(_expr((self.expr(a), 1.0), (self.expr(b), -1.0)))
            self.at[flow.outs[0]] = self.expr(a)

    def _constrain(self, expression: dict[int, float]) -> None:
        if expression:
            self.system.equal(np.array(list(expression)), np.array(list(expression.values())))

    def _open(self, nodes: Any) -> None:
        """A source that is used by itself has an unknown of its own."""
        for n in nodes:
            if n in self.sources and n not in self.free and n not in self.claimed:
                self.free[n] = self.new()
                self.at[n] = {self.free[n]: 1.0}

    def _sum(self, out: int, terms: list[tuple[int, float]], plain: bool) -> None:
        sources = [n for n, _ in terms if n in self.sources and n not in self.free and n not in self.claimed]
        if sources and plain:
            total = self.new()
            factor = dict(terms)[sources[0]]
            self.claimed[sources[0]] = out, total, factor
            self._open(sources[1:])
            self.at[out] = {total: 1.0}
            return
        self._open(n for n, _ in terms)
        self.at[out] = _expr(*((self.expr(n), factor) for n, factor in terms))

    def _linear(self, linear: Linear) -> None:
        for row in linear.ins:
            self._open(row)
        moved = any(self.expr(n) for row in linear.ins for n in row)
        U, c = np.zeros((0, 0)), np.zeros(0)
        if linear.table:
            U, c = np.ones((1, linear.shape[2])), np.ones(1)
        elif not linear.shared:
            U, c = self.unreached.common(linear.ins)
        W = self.values[id(linear)][0]
        if len(c) and np.abs(c).max() > 1e-9 and not linear.taps and not linear.shared and linear.shape[0] == 1:
            u = c @ U / (c @ c)
            totals = [self.new() for _ in linear.outs[0]]
            self.virtual[id(linear)] = linear, u, totals
            first = [self.expr(n) for n in linear.ins[0]]
            for row_in, row_out in zip(linear.ins, linear.outs, strict=True):
                other = [_expr((self.expr(n), 1.0), (e, -1.0)) for n, e in zip(row_in, first, strict=True)]
                there = [i for i, e in enumerate(other) if e]
                for o, (n, total) in enumerate(zip(row_out, totals, strict=True)):
                    self.at[n] = _expr(({total: 1.0}, 1.0), *((other[i], float(W[o, i])) for i in there))
            return
        if not moved:
            return
        for row_in, row_out in zip(linear.ins, linear.outs, strict=True):
            if linear.taps or linear.shape[0] > 1:
                self.zero(row_in)
                continue
            there = [i for i, n in enumerate(row_in) if self.expr(n)]
            for o, n in enumerate(row_out):
                if self.unseen.any(n):
                    self.at[n] = _expr(*((self.expr(row_in[i]), float(W[o, i])) for i in there))

    def tangents(self) -> Iterator[dict[str, Tensor]]:
        """Evaluate each solution forward, and read off what every source adds."""
        for solution in self.system.solutions():
            yield self._tangent(solution)

    def _tangent(self, solution: dict[int, float]) -> dict[str, Tensor]:
        def value(expression: dict[int, float]) -> float:
            return sum(solution.get(key, 0.0) * factor for key, factor in expression.items())

        tangent, done = zeros(self.walk), set[Any]()
        size: dict[int, float] = {n: solution.get(key, 0.0) for n, key in self.free.items()}
        for flow in self.walk.flows:
            if flow.kind != "sum":
                continue
            for out, each in zip(flow.outs, flow.terms, strict=True):
                for n, factor in each:
                    if n in self.claimed and self.claimed[n][0] == out:
                        rest = sum(f * (size[m] if m in size else value(self.expr(m))) for m, f in each if m != n)
                        size[n] = (solution.get(self.claimed[n][1], 0.0) - rest) / factor
        for vector in self.walk.vectors:
            if not vector.gain and vector.shared != "other" and vector.entries.key not in done:
                done.add(vector.entries.key)
                change = torch.tensor([[size.get(n, 0.0) for n in row] for row in vector.outs], dtype=torch.float64)
                vector.entries.add_to(tangent, change)
        for linear, u, totals in self.virtual.values():
            W = self.values[id(linear)][0]
            before = np.zeros(W.shape[1]) if linear.table else np.array([value(self.expr(n)) for n in linear.ins[0]])
            total = np.array([solution.get(key, 0.0) for key in totals]) - W @ before
            linear.entries.add_to(tangent, torch.from_numpy(np.outer(total, u))[None])
        return tangent


def flow_tangents(walk: Walk) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield tangents of what is unseen, unreached and shifted."""
    values = {id(each): each.entries.read(walk.parameters).cpu().numpy() for each in (*walk.linears, *walk.vectors)}
    unreached = Unreached(walk, values)
    unseen = Unseen(walk, values, unreached)
    for same in _uses(walk.linears):
        linear = same[0]
        taps, out, width = linear.shape
        K = kernel(np.concatenate([unseen.of(row) for each in same for row in each.outs]))
        for k in K.T:
            for t in range(taps):
                for i in range(width):
                    change = torch.zeros(taps, out, width, dtype=torch.float64)
                    change[t, :, i] = torch.from_numpy(k)
                    tangent = zeros(walk)
                    linear.entries.add_to(tangent, change)
                    yield "unseen", tangent
        if linear.table:
            continue
        U, c = unreached.common([row for each in same for row in each.ins])
        N = kernel(c[None]) if len(c) else np.zeros((0, 0))
        for u in N.T @ U if len(c) else []:
            for t in range(taps):
                for o in range(out):
                    change = torch.zeros(taps, out, width, dtype=torch.float64)
                    change[t, o] = torch.from_numpy(u)
                    tangent = zeros(walk)
                    linear.entries.add_to(tangent, change)
                    yield "unreached", tangent
    for same in _uses([each for each in walk.vectors if each.gain]):
        index, _ = walk.notes["gain index", id(same[0])]
        seen = {
            place
            for each in same
            for place, out in zip(walk.notes["gain index", id(each)][0], each.outs[0], strict=True)
            if unseen.any(out)
        }
        for place in sorted(set(index) - seen):
            tangent = zeros(walk)
            tangent[same[0].entries.name].view(-1)[place] = 1.0
            yield "unseen gain", tangent
    for same in _uses([each for each in walk.vectors if not each.gain]):
        vector = same[0]
        for r, row in enumerate(vector.outs):
            for k in kernel(np.concatenate([unseen.of(each.outs[r]) for each in same])).T:
                change = torch.zeros(len(vector.outs), len(row), dtype=torch.float64)
                change[r] = torch.from_numpy(k)
                tangent = zeros(walk)
                vector.entries.add_to(tangent, change)
                yield "unseen bias", tangent
    for tangent in Shifts(walk, values, unseen, unreached).tangents():
        yield "shift", tangent


def _uses(several: list[Any]) -> list[list[Any]]:
    """Group what takes the same entries in the same way, and leave out what is used in another way, too."""
    found: dict[Any, list[Any]] = {}
    for each in several:
        if each.shared != "other":
            found.setdefault(each.entries.key, []).append(each)
    return list(found.values())
