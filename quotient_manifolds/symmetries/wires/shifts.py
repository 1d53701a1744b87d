"""Find constants that some parameters add and others take away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import ZERO
from quotient_manifolds.symmetries.wires.relations import Scales
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.uses import SUMS, Flow, Linear, Vector, by_entries
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk

SMALL = 1e-13
Offsets = Mapping[int, float]
"""Constants that are added to channels which scales change alike."""


@dataclass(frozen=True, eq=False)
class Sum:
    """Say of nodes that their constants are a sum of those of others: names and factors (nodes, k), less a mean.

    plus: what is added of unknowns, (nodes, names of unknowns).
    """

    outs: Array
    names: Array
    factors: Array
    centred: bool = False
    plus: scipy.sparse.csr_matrix | None = None
    gain: tuple[Vector, Array] | None = None
    """A vector that multiplies the factors, and which of its numbers do."""


@dataclass(frozen=True, eq=False)
class Image:
    """Say of nodes that their constants are rows of a weight times those of others, plus unknowns."""

    outs: Array
    linear: Linear
    rows: Array
    names: Array
    plus: scipy.sparse.csr_matrix | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """Hold a weight that answers to what its inputs have in common, u . x = 1, by unknown numbers."""

    linear: Linear
    u: Array
    unknowns: Array
    uses: list[Linear]


class Shifts:
    """Find constants that some parameters add and others take away: one unknown for each total that a source can set.

    A source is an entry of a vector that is added, or of what a weight makes of a functional that is constant. One that
    is the first to be added to a sum sets the total, which is then unknown; any other is unknown itself. Unknowns are
    numbered from 2, in the order in which they are met.
    """

    def __init__(
        self,
        walk: Walk,
        values: Values,
        unseen: Unseen,
        answers: Mapping[Any, Array],
        gauges: Iterable[Offsets] = (),
    ) -> None:
        """Take what weights answer to, u with u . x = 1, by the keys of their entries."""
        self.walk, self.values, self.unseen, self._answers = walk, values, unseen, answers
        self.system, self.count = Scales(), 1
        self.vectors: list[list[Vector]] = by_entries([each for each in walk.vectors if not each.gain])
        self.answered = frozenset(answers)
        self.unknown = np.zeros(walk.count, np.int64)
        """The unknown that the constant of a node is; 0 if it is none."""
        self.made, self.place = np.full(walk.count, -1), np.zeros(walk.count, np.int64)
        self.definitions: list[Sum | Image] = []
        self._vanish: dict[int, list[tuple[Array, Array]]] = defaultdict(list)
        """Sums of constants that do not change, names and factors (sums, k), by k."""
        self.claimed, self.factor = np.zeros(walk.count, np.int64), np.ones(walk.count)
        """The sum that a source claims, and its factor there."""
        self.virtual: list[Answer] = []
        self._rows: dict[int, scipy.sparse.csr_matrix] = {}
        self.kept: dict[Any, Any] = {}
        """What others work out of the equations, and keep with them."""
        self._used: dict[Any, tuple[Array, float]] = {}
        """Of vectors that are taken several times, the nodes of the first time and their factor."""
        self._zero = np.zeros(walk.count, bool)
        self._keys: dict[int, tuple[int, ...]] = {}  # score -> the channels of its keys
        self._keyed = np.zeros(walk.count, bool)
        self._soft = _before_softmax(walk)
        self._source = np.zeros(walk.count, bool)
        """Sources that nothing has taken yet."""
        for flow in walk.flows:
            if flow.kind == "bias" and flow.terms.shared != "other" and not len(flow.terms.like):
                self._source[flow.outs] = True
        self.gauges = list(gauges)
        """Channels whose scales need a shift beside them; theirs are the first unknowns."""
        self.turns = self._new(len(self.gauges))
        self._width = 2 * walk.count + len(self.gauges)  # more than there are unknowns
        for flow in walk.flows:
            self._forward(flow)
        for several in self._vanish.values():  # together: what each costs alone is many times its arithmetic
            names, factors = (np.concatenate(each) for each in zip(*several, strict=True))
            self.system.rows(self._combined(names, factors))
        del self._vanish, self._zero, self._keys, self._keyed, self._soft, self._source  # as long as there are nodes

    def at(self, values: Values, answers: Mapping[Any, Array]) -> Shifts:
        """Return the same equations, which no numbers stand in, for other numbers."""
        made = copy(self)
        made.values, made._answers, made._rows = values, answers, {}
        made.virtual = [replace(each, u=answers[each.linear.entries.key]) for each in self.virtual]
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the equations, without numbers."""
        return {name: each for name, each in self.__dict__.items() if name not in ("values", "_rows")}

    # unknowns and definitions
    def _new(self, count: int) -> Array:
        found = np.arange(self.count + 1, self.count + count + 1)
        self.count += count
        self.system.name(found)
        return found

    def total(self, nodes: Any) -> Array:
        """Return the unknowns of sources, or of the totals that they set; 0 where there is none."""
        names = np.asarray(nodes, np.int64)
        return np.where(self.claimed[names] > 0, self.unknown[self.claimed[names]], self.unknown[names])

    def apart(self, whole: Collection[Any] = ()) -> Scales:
        """Return the equations where what nobody sees of a bias, or of a weight's constant, is left to what is unseen.

        whole: keys of entries of biases of which nothing is left.
        """
        system = self.system.copy()
        several = [
            (self.total(row), [each.outs[place] for each in same])
            for same in self.vectors
            if same[0].entries.key not in whole
            for place, row in enumerate(same[0].outs)
        ]
        for each in self.virtual:
            several.append((each.unknowns, [use.outs[0] for use in each.uses]))
        for unknowns, rows in several:
            if (unknowns > 1).all() and not any(self.unseen.all(row) for row in rows):
                K = scipy.sparse.csr_matrix(self.unseen.common(rows).T)
                shape = (K.shape[0], self.count + 1)
                system.rows(scipy.sparse.csr_matrix((K.data, unknowns[K.indices], K.indptr), shape=shape))
        return system

    def read(self) -> Iterator[Vector]:
        """Yield the biases of which somebody sees a part, and to which a weight may answer."""
        rows = {tuple(row.tolist()) for each in self.virtual if not each.linear.table for row in each.linear.ins}
        for vector in self.walk.vectors:
            if not vector.gain and len(vector.outs) == 1:
                nodes = vector.outs[0]
                read = tuple(self.claimed[nodes].tolist()) in rows and bool(self.unseen.partly(nodes).any())
                if read and self.unseen.common([nodes]).shape[1]:
                    yield vector

    def _define(self, definition: Sum | Image) -> None:
        self.made[definition.outs] = len(self.definitions)
        self.place[definition.outs] = np.arange(len(definition.outs))
        self.definitions.append(definition)

    def _moves(self, nodes: Any) -> Array:
        """Say of nodes whether their constants may change."""
        return (self.unknown[nodes] > 0) | (self.made[nodes] >= 0)

    def _open(self, nodes: Any) -> None:
        """Let sources that are used by themselves have unknowns of their own."""
        names = np.asarray(nodes, np.int64).reshape(-1)
        names = np.unique(names[self._source[names]])
        self._source[names] = False
        self.unknown[names] = self._new(len(names))

    def _sum(self, outs: Array, names: Array, factors: Array, *, centred: bool = False) -> None:
        moves = (self._moves(names) & (factors != 0)).any(1) | centred
        if self._moves(names).any():
            self._define(Sum(outs[moves], names[moves], factors[moves], centred))

    def _offset(self, flow: Flow) -> None:
        """Of x + c, where a gauge changes x by X x, something must add -X c."""
        place, outs = {n: row for row, n in enumerate(flow.outs.tolist())}, len(flow.outs)
        turned = [
            (place[n], turn, -change)
            for turn, each in zip(self.turns.tolist(), self.gauges, strict=True)
            for n, change in each.items()
            if n in place
        ]
        row, column, change = np.array(turned).reshape(-1, 3).T
        plus = scipy.sparse.csr_matrix((change, (row.astype(int), column.astype(int))), shape=(outs, self._width))
        names, factors = flow.terms
        self._define(Sum(flow.outs, names, factors, plus=plus))

    # equations
    def _constrain(self, names: Array, factors: Array) -> None:
        some = self._moves(names).any(1)
        if some.any():
            self._vanish[names.shape[1]].append((names[some], np.broadcast_to(factors, names.shape)[some]))

    def zero(self, nodes: Any) -> None:
        """Say that constants do not change."""
        names = np.unique(np.asarray(nodes, np.int64))
        names = names[~self._zero[names]]
        self._zero[names] = True
        self._constrain(names[:, None], np.ones(1))

    def _equal(self, nodes: Any) -> None:
        """Say that constants change by one number."""
        names = np.asarray(nodes, np.int64)
        self._constrain(np.stack([names[1:], np.full(len(names) - 1, names[0])], 1), np.array([1.0, -1.0]))

    def _combined(self, names: Array, factors: Array) -> scipy.sparse.csr_matrix:
        """Return sums of constants as functionals of the unknowns, a row each."""
        nodes, place = np.unique(names, return_inverse=True)
        row = np.repeat(np.arange(len(names)), names.shape[1])
        shape = (len(names), len(nodes))
        pick = scipy.sparse.csr_matrix((factors.reshape(-1), (row, place.reshape(-1))), shape=shape)
        return _tidy(pick @ self.expressions(nodes))

    def expressions(self, nodes: Array) -> scipy.sparse.csr_matrix:
        """Return what constants of nodes are in terms of the unknowns, (nodes, names of unknowns)."""
        waiting, needed = [nodes], set[int]()
        while waiting:
            inner = waiting.pop()
            for each in np.unique(self.made[inner[self.unknown[inner] == 0]]).tolist():
                if each >= 0 and each not in self._rows and each not in needed:
                    needed.add(each)
                    waiting.append(self.definitions[each].names)
        for each in sorted(needed):
            self._rows[each] = self._expressed(self.definitions[each])
        return self._known(nodes)

    def _known(self, nodes: Array) -> scipy.sparse.csr_matrix:
        by = np.where(self.unknown[nodes] > 0, -1, np.where(self.made[nodes] >= 0, self.made[nodes], -2))
        order = np.argsort(by, kind="stable")
        parts = []
        for each in np.unique(by).tolist():
            some = nodes[order][by[order] == each]
            if each >= 0:
                parts.append(self._rows[each][self.place[some]])
                continue
            count = len(some) if each == -1 else 0
            start = np.minimum(np.arange(len(some) + 1), count)
            parts.append(
                scipy.sparse.csr_matrix(
                    (np.ones(count), self.unknown[some][:count], start), shape=(len(some), self._width)
                )
            )
        back = np.empty(len(nodes), np.int64)
        back[order] = np.arange(len(nodes))
        return scipy.sparse.vstack(parts, format="csr")[back]

    def _factors(self, definition: Sum) -> Array:
        if definition.gain is None:
            return definition.factors
        vector, places = definition.gain
        return definition.factors * self.values.vector(vector)[places, None]

    def _expressed(self, definition: Sum | Image) -> scipy.sparse.csr_matrix:
        if isinstance(definition, Sum):
            found = self._combined(definition.names, self._factors(definition))
            if definition.centred:
                mean = scipy.sparse.csr_matrix(np.full((1, found.shape[0]), 1 / found.shape[0])) @ found
                found = _tidy(found - scipy.sparse.vstack([mean] * found.shape[0]))
            return found if definition.plus is None else found + definition.plus
        inner = self._known(definition.names)
        columns, count = np.unique(inner.indices), len(definition.outs)
        found = scipy.sparse.csr_matrix((count, self._width))
        if len(columns):
            answer = self.values.answer(definition.linear, inner[:, columns].toarray())
            made = scipy.sparse.csr_matrix(answer[definition.rows])
            found = scipy.sparse.csr_matrix((made.data, columns[made.indices], made.indptr), shape=found.shape)
        return _tidy(found if definition.plus is None else found + definition.plus)

    # flows
    def _forward(self, flow: Flow) -> None:
        if flow.kind == "bias":
            self._bias(flow)
        elif flow.kind == "linear":
            self._linear(flow.terms)
        elif flow.kind in SUMS:
            self._sums(flow)
        elif flow.kind == "gain":
            names = flow.terms.ins[0]
            self._open(names)
            moves = np.flatnonzero(self._moves(names))
            if len(moves):
                ones = np.ones((len(moves), 1))
                self._define(Sum(flow.outs[moves], names[moves, None], ones, gain=(flow.terms, moves)))
            self._carry_keys(flow.outs, names[:, None])
        elif flow.kind == "norm":
            if not len(flow.outs) or self.unseen.partly(flow.outs).any():
                self._open(flow.terms)
                self._equal(flow.terms)
        elif flow.kind == "centre":
            self._open(flow.terms)
            names = np.array(flow.terms)[:, None]
            self._sum(flow.outs, names, np.ones(names.shape), centred=True)
        elif flow.kind == "through":
            names = flow.terms[self.unseen.partly(flow.outs)]
            self._open(names)
            self.zero(names)
        elif flow.kind == "seen":
            self._open(flow.outs)
            self.zero(flow.outs)
        elif flow.kind == "soft":
            self._open(flow.outs)
            for row in flow.terms:
                self._same_keys([*dict.fromkeys(self._keys.get(n) for n in row)])
                self._equal(row)
        elif flow.kind == "dot":
            self._dot(flow)
        elif flow.kind == "max":
            seen = flow.terms[self.unseen.partly(flow.outs)]
            self._open(seen)
            for column in seen.T[1:]:
                self._constrain(np.stack([column, seen[:, 0]], 1), np.array([1.0, -1.0]))
            self._sum(flow.outs, flow.terms[:, :1], np.ones((len(flow.outs), 1)))

    def _bias(self, flow: Flow) -> None:
        vector, nodes = flow.terms, flow.outs
        if vector.shared == "other" or len(vector.like):
            return
        if vector.shared and vector.entries.key in self._used:
            first, scale = self._used[vector.entries.key]
            self._source[nodes] = False
            self._open(first)
            self._sum(nodes, first[:, None], np.full((len(nodes), 1), vector.entries.scale / scale))
        elif vector.shared:
            self._used[vector.entries.key] = nodes, vector.entries.scale

    def _sums(self, flow: Flow) -> None:
        names, factors = flow.terms
        seen = self.unseen.partly(flow.outs)
        if flow.kind == "number":
            self._open(names[seen])
            self.zero(names[seen])
            return
        if flow.kind == "mix":
            for column in names[seen].T[1:]:
                there = column > ZERO
                self._constrain(np.stack([column, names[seen][:, 0]], 1)[there], np.array([1.0, -1.0]))
            self._sum(flow.outs, names[:, :1], np.ones((len(names), 1)))
            return
        claims = np.zeros(len(names), bool)
        if flow.kind == "sum":
            sources = names[np.arange(len(names)), self._source[names].argmax(1)]
            own = names == sources[:, None]
            good = self._source[sources] & ((factors * own).sum(1) != 0)
            _, once = np.unique(np.where(good, sources, -1), return_index=True)
            claims[once] = good[once]
            self._claim(sources[claims], flow.outs[claims], names[claims], factors[claims])
        self._open(names)
        if flow.kind == "offset" and self.gauges:
            self._offset(flow)
        else:
            self._sum(flow.outs[~claims], names[~claims], factors[~claims])
        self._carry_keys(flow.outs, names)

    def _carry_keys(self, outs: Array, names: Array) -> None:
        """Say that the keys of scores are those of the scores that they are made of."""
        keyed = self._keyed[names].any(1)
        self._keyed[outs[keyed]] = True
        for out, row in zip(outs[keyed].tolist(), names[keyed].tolist(), strict=True):
            self._keys[out] = tuple(n for name in row for n in self._keys.get(name, ()))

    def _claim(self, sources: Array, outs: Array, names: Array, factors: Array) -> None:
        """Let sources set the totals of sums, which are unknown then: they are what the other terms leave of these."""
        if not len(outs):
            return
        self._source[sources] = False
        own = names == sources[:, None]
        by = (factors * own).sum(1)
        self.claimed[sources], self.factor[sources], self.unknown[outs] = outs, by, self._new(len(outs))
        factors = np.column_stack([np.ones(len(outs)), np.where(own, 0.0, -factors)]) / by[:, None]
        self._define(Sum(sources, np.column_stack([outs, np.where(own, ZERO, names)]), factors))

    def _dot(self, flow: Flow) -> None:
        out = int(flow.outs[0])
        if not self.unseen.partly(out):
            return
        self._open([*flow.terms[0], *flow.terms[1]])
        self.zero(flow.terms[0])
        if self._soft[out]:  # it ignores what all keys have in common
            self._keys[out], self._keyed[out] = tuple(flow.terms[1]), True
        else:
            self.zero(flow.terms[1])

    def _same_keys(self, several: Sequence[tuple[int, ...] | None]) -> None:
        """Say that the keys beside one query change alike; not at all where something else is beside them."""
        keys = [each for each in several if each is not None]
        if len({len(each) for each in keys}) > 1 or len(keys) < len(several):
            self.zero([n for each in keys for n in each])
            return
        for each in keys[1:]:
            self._constrain(np.stack([keys[0], each], 1), np.array([1.0, -1.0]))

    def _linear(self, linear: Linear) -> None:
        for row in linear.ins:
            self._open(row)
        plain, answer = _plain(linear), self._answer(linear)
        if answer is not None:
            shape = (len(answer.unknowns), self._width)
            by = linear.entries.scale / answer.linear.entries.scale
            own = np.full(shape[0], by), answer.unknowns, np.arange(shape[0] + 1)
            plus = scipy.sparse.csr_matrix(own, shape=shape)
            for row_in, out in zip(linear.ins, linear.outs, strict=True):
                self._define(Image(out, linear, np.arange(len(out)), row_in, plus))
            return
        for row_in, out in zip(linear.ins, linear.outs, strict=True):
            if not plain:
                self.zero(row_in)
            elif self._moves(row_in).any():
                rows = np.flatnonzero(self.unseen.partly(out))
                self._define(Image(out[rows], linear, rows, row_in))

    def _answer(self, linear: Linear) -> Answer | None:
        """Return what a weight answers, at all of its uses, to a functional that is 1 on every input, or None."""
        key = linear.entries.key
        if key not in self._answers or not _may_answer(linear):
            return None
        same = [each for each in self.walk.linears if each.entries.key == key]
        for each in self.virtual:
            if each.linear is same[0]:
                return each
        self.virtual.append(Answer(same[0], self._answers[key], self._new(linear.shape[1]), same))
        return self.virtual[-1]

    # values
    def evaluate(self, coefficients: Array) -> Array:
        """Return what every source adds, (nodes, batch), for values of the unknowns, (count + 1, batch), by number.

        An entry of a vector adds it at its node, and a weight at those nodes that it writes first.
        """
        value = np.zeros((self.walk.count, coefficients.shape[1]))
        named = np.flatnonzero(self.unknown > 0)
        value[named] = coefficients[self.unknown[named]]
        for each in self.definitions:
            value[each.outs] = self._evaluated(each, value, coefficients)
        size = np.zeros(value.shape)
        for first, *_ in self.vectors:
            size[first.outs] = value[first.outs]
        for answer in self.virtual:
            size[answer.linear.outs[0]] = coefficients[answer.unknowns]
        for vector in self.walk.vectors:
            if len(vector.like):  # rows that nobody asked for go with those that were
                size[vector.outs[0]] = size[vector.like].mean(0)
        return size

    def _evaluated(self, definition: Sum | Image, value: Array, coefficients: Array) -> Array:
        found = np.zeros((len(definition.outs), value.shape[1]))
        if definition.plus is not None:
            found += definition.plus[:, : len(coefficients)] @ coefficients
        inner = value[definition.names]
        if isinstance(definition, Sum):
            found += np.einsum("mk,mkb->mb", self._factors(definition), inner)
            return found - found.mean(0) if definition.centred else found
        if inner.any():
            found += self.values.answer(definition.linear, inner)[definition.rows]
        return found

    def biases(
        self, size: Array, *, seen: bool = False, whole: Collection[Any] = ()
    ) -> Iterator[tuple[Entries, Tensor]]:
        """Yield what is added to the numbers of vectors (rows, n) where sources add this; or what is seen of it.

        whole: keys of entries of which all is given.
        """
        for same in self.vectors:
            entries, change = same[0].entries, size[same[0].outs]
            if change.any():
                if seen and entries.key not in whole:
                    rows = ([each.outs[place] for each in same] for place in range(len(change)))
                    change = np.stack([self._seen(row, each) for row, each in zip(rows, change, strict=True)])
                yield entries, torch.from_numpy(change)

    def answers(self, size: Array, *, seen: bool = False) -> Iterator[tuple[Answer, Array]]:
        """Yield what weights answer more to what their inputs have in common where every source adds this."""
        for each in self.virtual:
            answer = size[each.linear.outs[0]]
            if answer.any():
                rows = [use.outs[0] for use in each.uses]
                yield each, self._seen(rows, answer) if seen else answer

    def _seen(self, rows: Sequence[Any], change: Array) -> Array:
        """Return a change of nodes less what nobody sees of it at any of the uses of a parameter.

        What stays unseen only while the other side of a product has no part of it is given as well.
        """
        if any(self.unseen.all(row) or self.unseen.sides[row].any() for row in rows):
            return change
        K = self.unseen.common(rows)
        return change - K @ (K.T @ change)


def answering(linears: Iterable[Linear]) -> list[list[Linear]]:
    """Return all uses of each weight that may answer to what its inputs have in common."""
    found: dict[Any, list[Linear]] = defaultdict(list)
    for each in linears:
        found[each.entries.key].append(each)
    return [same for same in found.values() if any(map(_may_answer, same))]


def _plain(linear: Linear) -> bool:
    return not linear.taps and linear.shape[0] == 1


def _may_answer(linear: Linear) -> bool:
    return _plain(linear) and linear.shared in ("", "alike")


def _tidy(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    matrix.data[np.abs(matrix.data) < SMALL] = 0.0
    matrix.eliminate_zeros()
    return matrix


def _before_softmax(walk: Walk) -> Array:
    """Say of scores whether nothing is done to them before a softmax over their keys but this.

    Known numbers are added, and parameters multiply, one for each query: otherwise nothing tells the keys of one query.
    """
    good, known, score = np.ones(walk.count, bool), np.zeros(walk.count, bool), np.zeros(walk.count, bool)
    aligned = np.zeros(walk.count, bool)
    for nodes in walk.aligned:
        aligned[nodes] = True
    for flow in walk.flows:
        if flow.kind == "dot":
            score[flow.outs] = True
        elif flow.kind in ("sum", "token", "offset"):
            score[flow.outs] |= score[flow.terms[0]].any(1)
        elif flow.kind == "gain":
            score[flow.outs] |= score[flow.terms.ins[0]]
    for flow in reversed(walk.flows):
        names = flow.taken
        known[names] = True
        if flow.kind in ("sum", "token", "offset"):
            alone = score[flow.terms[0]].sum(1) == 1  # whatever else is added is no score, or one of the same query
            good[flow.terms[0][~((alone | aligned[flow.outs]) & good[flow.outs])]] = False
        elif flow.kind == "gain":
            good[flow.terms.ins[0][~good[flow.outs]]] = False
        elif flow.kind != "soft" or not flow.about:
            good[names] = False
    return good & known
