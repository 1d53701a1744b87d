"""Find what channels never reach: functionals that are constant on every input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quotient_manifolds.symmetries.wires.linear_algebra import Array, kernel
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO
from quotient_manifolds.symmetries.wires.uses import SUMS, Flow, Linear
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk

SMALL = 1e-12  # what folding leaves of a constant


class Unreached:
    """Find functionals u with u . x = c on every input, of rows of nodes, on demand."""

    def __init__(self, walk: Walk, values: Values) -> None:
        self.walk, self.values = walk, values
        self.producer = np.full(walk.count, -1)
        for place, flow in reversed(list(enumerate(walk.flows))):
            if flow.kind in (*SUMS, "linear", "gain", "bias", "norm", "centre"):
                self.producer[flow.outs] = place
        self.known: dict[bytes, tuple[Array, Array]] = {}
        self.tables = {vector.entries.name for vector in walk.vectors if len(vector.like)}
        """Parameters of whose rows other inputs ask for more."""

    def of(self, row: Any) -> tuple[Array, Array]:
        """Return U (r, n) and c (r,)."""
        nodes = np.asarray(row, np.int64)
        key = nodes.tobytes()
        if key not in self.known:
            self.known[key] = _none(len(nodes))  # what asks for itself gets nothing
            U, c = self._of(nodes)
            self.known[key] = U, np.where(np.abs(c) > SMALL, c, 0.0)
        return self.known[key]

    def common(self, rows: Sequence[Any] | Array) -> tuple[Array, Array]:
        """Return what all kinds of tokens have in common: u . x = c in every row."""
        return _shared([self.of(row) for row in rows])

    def _of(self, row: Array) -> tuple[Array, Array]:
        n = len(row)
        _, inverse, count = np.unique(row, return_inverse=True, return_counts=True)
        once = (count[inverse] == 1) & (row > FIXED)  # what stands there twice has a number of its own at each place
        zero = np.flatnonzero(row == ZERO)
        found = [(zero, (np.eye(len(zero)), np.zeros(len(zero))))]
        maker = np.where(once, self.producer[row], -1)
        for place in dict.fromkeys(maker[maker >= 0].tolist()):
            members = np.flatnonzero(maker == place)
            found.append((members, self._made(self.walk.flows[place], row[members])))
        return _beside(n, found)

    def _made(self, flow: Flow, nodes: Array) -> tuple[Array, Array]:
        none = _none(len(nodes))
        if flow.kind == "bias":
            if flow.terms.entries.name in self.tables:
                return self._of_rows(flow, nodes)
            outs, values = flow.outs, self.values.vector(flow.terms).reshape(-1)
            return np.eye(len(nodes)), values[_places(outs, nodes)]
        if flow.kind == "linear":
            return self._linear(flow.terms, nodes)
        if flow.kind in SUMS:
            places = _places(flow.outs, nodes)
            _, key, count = np.unique(flow.about[places], return_inverse=True, return_counts=True)
            groups = np.split(np.argsort(key, kind="stable"), np.cumsum(count)[:-1])
            parts = [(group, self._sum(flow, places[group])) for group in groups if len(group) > 1]
            alone = np.concatenate([np.zeros(0, np.int64), *(group for group in groups if len(group) == 1)])
            still, value = self._still(nodes[alone])
            parts.append((alone[still], (np.eye(int(still.sum())), value[still])))
            return _beside(len(nodes), parts)
        if flow.kind == "gain":
            places = _places(flow.outs, nodes)
            V, d = self.of(flow.terms.ins[0][places])
            gain = self.values.vector(flow.terms)[places]
            dead = np.flatnonzero(gain == 0)  # whatever goes into a gain of 0, it gives 0
            kept = ~V[:, dead].any(1)
            own = _of_size_1(V[kept] / np.where(gain == 0, 1.0, gain), d[kept])
            return _beside(len(nodes), [(np.arange(len(nodes)), own), (dead, (np.eye(len(dead)), np.zeros(len(dead))))])
        centred = flow.kind in ("norm", "centre") and flow.about != "even"  # or else over all tokens together
        if centred and len(nodes) > 1 and np.array_equal(np.sort(nodes), np.sort(flow.outs)):
            return np.ones((1, len(nodes))), np.zeros(1)
        return none

    def _of_rows(self, flow: Flow, nodes: Array) -> tuple[Array, Array]:
        """Return functionals that are one constant on every row of a table, also on those that nobody asked for."""
        name, (row, column) = flow.terms.entries.name, np.divmod(_places(flow.outs, nodes), flow.terms.outs.shape[1])
        if (row != row[0]).any():
            return _none(len(nodes))
        key = name.encode() + column.tobytes()
        if key not in self.known:
            same = (each for each in self.walk.vectors if each.entries.name == name)
            rows = np.concatenate([self.values.vector(each) for each in same])[:, column]
            N = kernel(np.column_stack([rows, -np.ones(len(rows))]))
            self.known[key] = N[:-1].T, N[-1]
        return self.known[key]

    def _still(self, nodes: Array, before: float = np.inf) -> tuple[Array, Array]:
        """Say of nodes by themselves whether they are constant, and the constants."""
        still, value = nodes == ZERO, np.zeros(len(nodes))
        maker = np.where(nodes > FIXED, self.producer[nodes], -1)
        for place in np.unique(maker[(maker >= 0) & (maker < before)]).tolist():
            flow, here = self.walk.flows[place], np.flatnonzero(maker == place)
            at = _places(flow.outs, nodes[here])
            if flow.kind == "bias":
                still[here] = flow.terms.entries.name not in self.tables
                value[here] = self.values.vector(flow.terms).reshape(-1)[at]
            elif flow.kind == "gain":
                still[here], value[here] = self._still(flow.terms.ins[0][at], place)
                value[here] *= self.values.vector(flow.terms)[at]
            elif flow.kind in SUMS:
                names, factors = flow.terms[0][at], flow.terms[1][at]
                inner, numbers = self._still(names.reshape(-1), place)
                inner = inner & ((numbers == 0) | (flow.kind != "number"))
                plus = np.zeros(len(at)) if flow.plus is None else flow.plus[at]
                numbers, inner = numbers.reshape(names.shape), inner.reshape(names.shape)
                value[here] = (numbers * factors).sum(1) + plus
                still[here] = inner.all(1) & ~np.isnan(plus)
                if flow.kind == "mix":  # weights that sum to 1 leave one number as it is
                    value[here] = numbers[np.arange(len(at)), np.abs(factors).argmax(1)]
                    still[here] &= ((numbers == value[here][:, None]) | (factors == 0)).all(1)
            elif flow.kind == "linear":
                for k in here.tolist() if any(len(self.of(row)[1]) for row in flow.terms.ins) else []:
                    U, c = self._linear(flow.terms, nodes[[k]])
                    still[k], value[k] = len(c) == 1, (c / U[:, 0])[0] if len(c) else 0.0
        return still, value

    def _linear(self, linear: Linear, nodes: Array) -> tuple[Array, Array]:
        """Return functionals u for which u W is one that is constant on what goes in."""
        none = _none(len(nodes))
        if linear.shape[0] > 1 or linear.taps:
            return none
        for row_in, row_out in zip(linear.ins, linear.outs, strict=True):
            if not np.isin(nodes, row_out).all():
                continue
            V, d = (np.ones((1, linear.shape[2])), np.ones(1)) if linear.table else self.of(row_in)
            if len(nodes) <= linear.shape[2] and not len(V):
                return none
            if len(V) == linear.shape[2]:  # each input is constant by itself, and so is each answer
                return np.eye(len(nodes)), self.values.answer(linear, _numbers(V, d))[_places(row_out, nodes)]
            N = self._images(linear, _places(row_out, nodes), V)
            u, a = N[: len(nodes)], N[len(nodes) :]
            good = np.linalg.norm(u, axis=0) > 1e-9
            return u[:, good].T, d @ a[:, good]
        return none

    def _images(self, linear: Linear, rows: Array, V: Array) -> Array:
        """Return u and a, above each other, with u W = a V for rows W of a weight."""
        N: Array | None = None
        start = 0
        for W in self.values.columns(linear, rows):
            part = np.concatenate([W.T, -V[:, start : start + W.shape[1]].T], 1)
            start += W.shape[1]
            N = kernel(part) if N is None else N @ kernel(part @ N, float(np.abs(part).max()))
            if not N.shape[1]:
                break
        return np.eye(len(rows) + len(V)) if N is None else N

    def _sum(self, flow: Flow, places: Array) -> tuple[Array, Array]:
        parts: list[tuple[Array, Array]] = []
        for inner, size in zip(flow.terms[0][places].T, flow.terms[1][places].T, strict=True):
            if not (inner > FIXED).any() and len(parts):
                continue
            V, d = self.of(inner)
            if flow.kind == "number":
                N = kernel(d[None]) if len(d) else np.zeros((0, 0))
                V, d = N.T @ V, np.zeros(N.shape[1])
            if not len(V):
                return _none(len(places))
            parts.append((V, d) if flow.kind == "mix" else (V / np.where(inner > FIXED, size, 1.0), d))
        if flow.kind == "mix":  # weights that sum to 1 leave what is one constant in all of them
            return _none(len(places)) if flow.plus is not None and flow.plus[places].any() else _shared(parts)
        if flow.plus is not None:
            known = ~np.isnan(flow.plus[places])
            parts.append((np.eye(len(places))[known], flow.plus[places][known]))
        return self._common(parts)

    @staticmethod
    def _common(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        U, c = parts[0]
        if all(len(V) == U.shape[1] for V, _ in parts):
            return np.eye(len(U)), np.sum([_numbers(V, d) for V, d in parts], 0)
        for V, d in parts[1:]:
            if len(U) == U.shape[1] != len(V):  # those of numbers that are constant are as many as there are
                U, c, V, d = V, d, U, c
            if len(V) == V.shape[1]:  # ...so of U each is one: an orthonormal basis of a, b with a U = b V
                B = U.T if np.array_equal(V, np.eye(len(V))) else np.linalg.solve(V.T, U.T)
                a = np.linalg.inv(np.linalg.cholesky(np.eye(len(U)) + B.T @ B)).T
                b = B @ a
            else:
                N = kernel(np.concatenate([U, -V]).T)
                a, b = N[: len(U)], N[len(U) :]
            U, c = a.T @ U, c @ a + d @ b
            if not len(U):
                break
        return U, np.asarray(c).reshape(-1)


def _shared(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the functionals that have one constant in all parts."""
    W, _ = Unreached._common([(np.column_stack(part), np.zeros(len(part[1]))) for part in parts])
    return W[:, :-1], W[:, -1]


def _numbers(U: Array, c: Array) -> Array:
    """Return the numbers x with U x = c, of as many functionals as numbers."""
    return c if np.array_equal(U, np.eye(len(c))) else np.asarray(np.linalg.solve(U, c))


def _none(width: int) -> tuple[Array, Array]:
    return np.zeros((0, width)), np.zeros(0)


def _of_size_1(U: Array, c: Array) -> tuple[Array, Array]:
    """Return the same functionals with a largest entry of 1: a gain may be 1e-33 where a channel died."""
    size = np.abs(U).max(1)
    return U / size[:, None], c / size


def _places(names: Array, nodes: Array) -> Array:
    """Return where nodes stand among names."""
    order = np.argsort(names, kind="stable")
    return order[np.searchsorted(names[order], nodes)]


def _beside(width: int, parts: list[tuple[Array, tuple[Array, Array]]]) -> tuple[Array, Array]:
    """Put functionals of some of the places beside those of others."""
    U = np.zeros((sum(len(c) for _, (_, c) in parts), width))
    start = 0
    for members, (V, _) in parts:
        U[start : start + len(V), members] = V
        start += len(V)
    return U, np.concatenate([c for _, (_, c) in parts]) if parts else np.zeros(0)
