"""Find constants that some parameters add and others take away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.blocks import solutions, zeros
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import kernel
from quotient_manifolds.symmetries.wires.relations import Scales
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.walk import Flow, Linear, Vector, Walk

Array = np.ndarray


def _expr(*terms: tuple[dict[int, float], float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for expression, factor in terms:
        if factor:
            for key, value in expression.items():
                found[key] = found.get(key, 0.0) + factor * value
    return {key: value for key, value in found.items() if abs(value) > 1e-13}


class Shifts:
    """Find constants that some parameters add and others take away: one unknown for each total that a source can set."""

    def __init__(
        self, walk: Walk, values: dict[int, Array], unseen: Unseen, unreached: Unreached, *, apart: bool = True
    ) -> None:
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
                for n in flow.terms if flow.kind == "max" else [x for t in flow.terms for x in t]:
                    uses[n] += 2
            elif flow.kind == "dot":
                for n in (*flow.terms[0], *flow.terms[1]):
                    uses[n] += 2
            elif flow.kind in ("seen", "soft"):
                for n in flow.outs:
                    uses[n] += 2
        self.uses = uses
        self.sources = {
            n: flow.terms
            for flow in walk.flows
            if flow.kind == "bias" and flow.terms.shared != "other" and not flow.terms.like
            for row in flow.terms.outs
            for n in row
        }
        for flow in walk.flows:
            self._forward(flow)
        if apart:
            self._leave_unseen()

    def _leave_unseen(self) -> None:
        """Leave to what is unseen what nobody sees of a bias, or of the constant of a weight."""
        biases = [each for each in self.walk.vectors if not each.gain]
        several = [
            ([self._unknown(n) for n in row], [each.outs[place] for each in self._uses(vector, biases)])
            for vector in biases
            for place, row in enumerate(vector.outs)
        ]
        for linear, _, totals in self.virtual.values():
            several.append((totals, [each.outs[0] for each in self._uses(linear, self.walk.linears)]))
        for unknowns, rows in several:
            if all(unknown > 1 for unknown in unknowns) and not any(self.unseen.all(row) for row in rows):
                for k in kernel(np.concatenate([self.unseen.of(row) for row in rows])).T:
                    self.system.equal(np.array(unknowns), k)

    def _uses(self, one: Any, several: list[Any]) -> list[Any]:
        """Return what takes the same entries in the same way, the first use first."""
        return [each for each in several if each.entries.key == one.entries.key] if one.shared == "alike" else [one]

    def _unknown(self, node: int) -> int:
        """Return the unknown of a number of a bias, or of the total that it sets, and 0 if there is none."""
        return self.claimed[node][1] if node in self.claimed else self.free.get(node, 0)

    def _soft(self) -> set[int]:
        """Scores to which nothing is done before a softmax over their keys but what adds or multiplies known numbers."""
        good: dict[int, bool] = {}
        scores: set[int] = set()
        for flow in self.walk.flows:
            if flow.kind == "dot":
                scores.update(flow.outs)
            elif flow.kind in ("sum", "token"):
                scores.update(
                    out for out, each in zip(flow.outs, flow.terms, strict=True) if any(n in scores for n, _ in each)
                )
        for flow in reversed(self.walk.flows):
            if flow.kind == "soft":
                for n in flow.outs:
                    good[n] = good.get(n, True) and bool(flow.about)
            elif flow.kind in ("sum", "token", "number"):
                for out, each in zip(flow.outs, flow.terms, strict=True):
                    for n, _ in each:
                        good[n] = (
                            good.get(n, True)
                            and good.get(out, True)
                            and flow.kind in ("sum", "token")
                            and sum(m in scores for m, _ in each) == 1
                        )
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
                if scores := [n for n, _ in each if n in self.keys]:  # one, for a sum of two is not `soft`
                    self.keys[out] = self.keys[scores[0]]
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
            for a, out, g in zip(vector.ins[0], vector.outs[0], self.values[id(vector)], strict=True):
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
        same = self._uses(linear, self.walk.linears)
        if linear.table:
            U, c = np.ones((1, linear.shape[2])), np.ones(1)
        elif linear.shared != "other":
            U, c = self.unreached.common([row for each in same for row in each.ins])
        W = self.values[id(linear)][0]
        whole = not linear.taps and linear.shared != "other" and linear.shape[0] == 1
        if whole and len(c) and np.abs(c).max() > 1e-9:
            first = same[0]
            if id(first) not in self.virtual:
                self.virtual[id(first)] = first, c @ U / (c @ c), [self.new() for _ in first.outs[0]]
            totals = self.virtual[id(first)][2]
            for row_in, row_out in zip(linear.ins, linear.outs, strict=True):
                there = [i for i, n in enumerate(row_in) if self.expr(n)]
                for o, (n, total) in enumerate(zip(row_out, totals, strict=True)):
                    self.at[n] = _expr(({total: 1.0}, 1.0), *((self.expr(row_in[i]), float(W[o, i])) for i in there))
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
        for solution in solutions(self.system):
            yield self.tangent(solution)

    def tangent(self, solution: dict[int, float]) -> dict[str, Tensor]:
        """Evaluate a solution forward, and read off what every source adds."""
        tangent = zeros(self.walk)
        for entries, change in self.biases(solution):
            entries.add_to(tangent, change)
        for linear, answer in self.answers(solution):
            u = self.virtual[id(linear)][1]
            linear.entries.add_to(tangent, torch.from_numpy(np.outer(answer, u))[None])
        return tangent

    def biases(self, solution: dict[int, float]) -> Iterator[tuple[Entries, Tensor]]:
        """Yield what a solution adds to the numbers of vectors (rows, n)."""

        def value(expression: dict[int, float]) -> float:
            return sum(solution.get(key, 0.0) * factor for key, factor in expression.items())

        done = set[Any]()
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
            if vector.like:  # rows that nobody asked for go with those that were
                places = zip(vector.outs[0], *vector.like, strict=True)
                size.update((n, sum(size.get(m, 0.0) for m in some) / len(some)) for n, *some in places)
            if not vector.gain and vector.shared != "other" and vector.entries.key not in done:
                done.add(vector.entries.key)
                change = torch.tensor([[size.get(n, 0.0) for n in row] for row in vector.outs], dtype=torch.float64)
                if bool(change.any()):
                    yield vector.entries, change

    def answers(self, solution: dict[int, float]) -> Iterator[tuple[Linear, Array]]:
        """Yield what a solution adds to the answers of weights to what their inputs have in common."""
        for linear, _, totals in self.virtual.values():
            answer = np.array([solution.get(key, 0.0) for key in totals])
            if answer.any():
                yield linear, answer
