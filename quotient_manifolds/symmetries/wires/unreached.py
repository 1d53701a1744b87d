"""Find what channels never reach: functionals that are constant on every input."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from quotient_manifolds.symmetries.wires.linear_algebra import kernel
from quotient_manifolds.symmetries.wires.walk import FIXED, ZERO, Flow, Linear, Vector, Walk

Array = np.ndarray


class Unreached:
    """Find functionals u with u . x = c on every input, of rows of nodes, on demand."""

    def __init__(self, walk: Walk, values: dict[int, Array]) -> None:
        self.walk, self.values = walk, values
        self.producer: dict[int, Flow] = {}
        for flow in walk.flows:
            if flow.kind not in ("seen", "soft", "dot", "max", "through"):
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
        if flow.kind == "offset":
            known = {n: (*term, c) for n, (term,), c in zip(flow.outs, flow.terms, flow.about, strict=True)}
            V, d = self.of([known[n][0] for n in nodes])
            V = V / np.array([known[n][1] for n in nodes])
            return V, d + V @ np.array([known[n][2] for n in nodes])
        if flow.kind == "gain":
            vector = flow.terms
            weights = dict(zip(vector.outs[0], self.values[id(vector)], strict=True))
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
