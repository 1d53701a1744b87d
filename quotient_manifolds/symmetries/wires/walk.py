"""Walk a recorded forward pass once, and write down what each operation allows its channels.

Beside each activation runs a *label*: an integer tensor of its shape that names the channel an entry belongs to, a
*node*, alike over tokens. Node 0 is the number 0 (it fits anything), node 1 what may not change. The change of an
activation along a symmetry is dt = X t + s: X is bounded by the classes of nodes and their marks, the diagonal of X by
linear equations of log-scales, s by the flows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import POINTWISE, STILL, VIEWS, Codes, hashed, named, segments
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO, again, earlier, flat, moving, thinned
from quotient_manifolds.symmetries.wires.record import Operation, Recording
from quotient_manifolds.symmetries.wires.relations import Classes, Scales
from quotient_manifolds.symmetries.wires.uses import NONE, Flow, Linear, Vector

HIDDEN = -9e3  # e to the power of this is 0 in every precision
LARGE = 1e3  # smaller constants hide no scores, and show none that are hidden
BOUNDED = ("_softmax", "_safe_softmax", "sigmoid", "tanh", "sin", "cos", "native_layer_norm", "native_group_norm")
UP, DOWN = 1, 2
ORDERED = ("_to_copy", "where", "add", "maximum", "minimum", "full_like", "new_full")
"""Operations that give large numbers of a sign that they take."""
COMPARISONS = ("gt", "lt", "ge", "le")
NAMED = ("native_layer_norm", "native_group_norm")  # what they give has channels, even of inputs
Rule = Callable[["Walk", Operation], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table of rules for operations of these names."""

    def put(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return put


_ABOUT = (
    ("dead", bool, False),
    ("alone", bool, False),
    ("normed", bool, False),
    ("positive", bool, False),
    ("mixed", bool, False),
    ("gated", bool, False),
    ("history", np.int64, 0),
    ("writer", np.int64, 0),
    ("origin", np.int64, -1),
    ("size", float, 1.0),
    ("turned", np.int64, -1),
    ("turn", float, 1.0),
    ("angle", np.int64, 0),
)
"""What is known of every node; the last five of multiples of one channel, and of its products with numbers."""


class Walk:
    """Hold what the operations of a recording allow."""

    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor]) -> None:
        """Walk through a recording; parameters: with the numbers to go by, which may be others than those that ran."""
        self.recording: Any = recording
        self.codes: Any = Codes(recording)
        self.parameters = parameters
        self.shapes = {name: w.shape for name, w in recording.parameters.items()}
        self.ran: dict[str, list[Entries]] = {}
        self.at_zeros: set[str] = set()
        """Parameters that multiply zeros alone somewhere, as those of a first token's state."""
        """What operations took of each parameter."""
        self.entries = {id(w): Entries.of(name, w) for name, w in recording.parameters.items()}
        self.labels: dict[int, Tensor] = {}
        self.turns, self.means, self.scales = Classes(), Classes(), Scales()
        self.count = 0
        self._room: dict[str, Array] = {}
        self.marks: list[tuple[Array, Array, Array, Array]] = []
        """Nodes, codes of what was done to them, their places in what is read together, and that: all has to be one."""
        self.above: list[tuple[Array, Array]] = []
        """Nodes, and what they are made of."""
        self.norms: list[tuple[str, Array, Array, int]] = []
        """Kind, nodes, codes, and number of channels of what leaves only rotations."""
        self.linears: list[Linear] = []
        self.vectors: list[Vector] = []
        self.flows: list[Flow] = []
        self.unknown: dict[tuple[str, str], None] = {}
        """Modules, and operations in them, of which no rule knows what the channels may do that they take."""
        self.notes: dict[tuple[Any, ...], Any] = {}  # what rules remember of a tensor
        self.planes: list[tuple[Array, Array]] = []
        self.loud: dict[int, int] = {}
        """Whether large constants may be part of a tensor, as one that hides a score: UP or DOWN, of all computed."""
        self.single: list[Array] = []
        """Scores of one key each: what softmax makes of them is 1."""
        self.aligned: list[Array] = []
        """Sums of scores each of which is one of the same query."""
        self.new(2)
        self.at, self._steps_loud = 0, 0
        for self.at, operation in enumerate(recording.operations):
            self._step(operation)
        for out in recording.outputs:
            self.resolve(out)
            for each in self.notes.get(("complex", id(out)), [out]):
                if self.live(each):
                    self.fix(self.label(each))
        for last in recording.operations[-1:]:  # none where a model returns what it is given
            RULES["end"](self, last)
        self.loose = self.scales.copy()  # scales where shifts make up for constants that are added to channels
        self.equal((self.offsets(), 1.0))

    @property
    def uses(self) -> list[Linear | Vector]:
        """Return all uses of parameters, first those as weights."""
        return [*self.linears, *self.vectors]

    def forget_run(self) -> None:
        """Let go of activations: what is left tells where parameters stand and how they are related."""
        self.recording = self.codes = None
        self.notes = {key: value for key, value in self.notes.items() if key[0] == "source"}
        self.labels, self.entries, self.ran, self.loud = {}, {}, {}, {}

    def forget(self) -> None:
        """Let go of all but what tells of constants: of numbers, too, and of what channels have in common."""
        self.forget_run()
        self.parameters, self._room = {}, {}
        self.turns, self.means, self.scales, self.loose = Classes(), Classes(), Scales(), Scales()
        self.marks, self.above, self.norms, self.planes = [], [], [], []

    # nodes
    def new(self, count: int) -> Array:
        first = self.count
        self.count += count
        if self.count > len(self._room.get("dead", ())):
            size = 2 * self.count + 1024
            for name, kind, start in _ABOUT:
                grown = np.full(size, start, kind)
                grown[:first] = self._room.get(name, grown)[:first]
                self._room[name] = grown
        self.turns.grow(count)
        self.means.grow(count)
        return np.arange(first, self.count)

    @property
    def dead(self) -> Array:
        """Say of every node whether it may not change."""
        return self._room["dead"]

    @property
    def history(self) -> Array:
        """Return what was done to the tokens of every channel since it was written, by a hash."""
        return self._room["history"]

    def about(self, name: str) -> Array:
        return self._room[name]

    def mark(self, nodes: Any, *token: Any, code: Array | int = 0, row: Array | None = None) -> None:
        """Note down what was done to channels; `code` tells them apart. row: those that are read together."""
        nodes = np.asarray(nodes, np.int64).reshape(-1)
        code = np.broadcast_to(np.asarray(code, np.int64), nodes.shape)
        row = nodes[:1] if row is None else row
        keep = nodes > FIXED
        place, nodes = np.arange(len(nodes))[keep] % max(1, len(row)), nodes[keep]
        code = hashed(code[keep], self.history[nodes], self.about("writer")[nodes], named(token))
        self.marks.append((nodes, code, place, row))

    def read_together(self, rows: Array, *token: Any) -> None:
        """Note down that channels are read together, rows (k, n) of nodes, one for each kind of tokens.

        Where a channel has one node in two kinds of tokens, those that it mixes with have so, too.
        """
        if len(rows) > 1:
            code = hashed(hashed(*again(rows), *self.made_of(rows)), np.arange(len(rows))[:, None])
            self.mark(rows, *token, code=code.reshape(-1), row=moving(rows))
        else:
            self.mark(rows[0], *token, row=rows[0])

    def made_of(self, nodes: Array) -> Array:
        """Return a code of the parameters that wrote to nodes."""
        return np.where(nodes > FIXED, self.about("writer")[nodes], nodes)

    def norm(self, kind: str, nodes: Any, code: int, width: int = 0) -> None:
        """Note down that only rotations leave something about these channels together alone."""
        nodes = np.asarray(nodes, np.int64)
        nodes = nodes[nodes > FIXED]
        made = hashed(np.full(len(nodes), code), self.history[nodes], self.about("writer")[nodes], self.at)
        self.norms.append((kind, nodes, made, width))

    def fix(self, what: Any, *, seen: bool = True) -> None:
        """Say that these channels may not change at all, and that a constant added to them is seen."""
        nodes = self.nodes(what) if isinstance(what, Tensor) else np.unique(np.asarray(what, np.int64))
        nodes = nodes[nodes > FIXED]
        fresh = nodes[~self.dead[nodes]]
        self.dead[fresh] = True
        self.equal((fresh, 1.0))
        if seen and len(nodes):
            self.flows.append(Flow("seen", nodes.tolist()))

    def alone(self, nodes: Any) -> None:
        """Say that these channels mix with none."""
        nodes = np.asarray(nodes, np.int64)
        self._room["alone"][nodes[nodes > FIXED]] = True

    def positive(self, nodes: Any) -> None:
        """Say that nothing passes these channels but positive scales."""
        self._room["positive"][np.asarray(nodes, np.int64)] = True

    def same(
        self, a: Any, b: Any, weight: Any = 1.0, *, dual: bool = False, scale: bool = True, norm: bool = False
    ) -> None:
        """Say that X_b follows from X_a, and, with `scale`, that their scales are one."""
        a, b, weight = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64), np.asarray(weight, float))
        keep = (a != ZERO) & (b != ZERO) & ((a != b) | (weight != 1) | dual)
        a, b, weight = a[keep].reshape(-1), b[keep].reshape(-1), weight[keep].reshape(-1)
        stuck = (a == FIXED) | (b == FIXED)
        if stuck.any():
            self.fix(np.concatenate([a[stuck], b[stuck]]), seen=False)
            a, b, weight = a[~stuck], b[~stuck], weight[~stuck]
        turned = np.full(len(a), dual)
        self.turns.join(a, b, weight, turned)
        if not norm:
            self.means.join(a, b, weight, turned)
        if scale:
            self.equal((b, 1.0), (a, 1.0 if dual else -1.0))

    def follow(self, nodes: Array, *before: Any, key: Any = None, factors: Sequence[float] = (1.0,)) -> None:
        """Say what was done to the tokens of channels: what was done to those they are made of, and then this."""
        if not len(nodes):
            return
        above = np.stack([np.broadcast_to(np.asarray(each, np.int64), nodes.shape) for each in before], 1)
        moving = above > FIXED
        self.above.append((nodes, above))
        terms, single = self.made_of(above), (above != ZERO).sum(1) == 1
        size = np.array([0 if each == 1 else named(float(each)) for each in factors])
        terms = np.where((size == 0) | (above == ZERO), terms, hashed(terms, size))
        self.about("writer")[nodes] = np.where(single, terms.sum(1), hashed(terms).sum(1, where=above != ZERO))
        past = self.history[above]
        first = past[np.arange(len(nodes)), moving.argmax(1)]
        one = (~moving | (past == first[:, None])).all(1)
        several = np.zeros(len(nodes), np.int64)
        for column, there in zip(past.T, moving.T, strict=True):
            several = np.where(there, hashed(several, column), several)
        found = np.where(moving.any(1), np.where(one, first, several), 0)
        self.history[nodes] = (
            found if key is None else hashed(found, key if isinstance(key, np.ndarray) else named(key))
        )
        stuck = moving.any(1) & (~moving | self.dead[above]).all(1)
        if stuck.any():
            self.fix(nodes[stuck], seen=False)

    def copies(self, root: Array) -> Array:
        """Return for nodes, of classes, a number for which of those of its class that one parameter writes each is."""
        found = np.zeros(self.count, np.int64)
        rows = [row for each in self.linears for row in each.outs]
        rows += [each.outs.reshape(-1) for each in self.vectors if not each.gain]
        if rows:
            names = np.concatenate(rows)
            found[names] = earlier(root[names], np.repeat(np.arange(len(rows)), [*map(len, rows)]))
        for nodes, above in self.above:
            terms = np.where(above > FIXED, found[above], 0)
            one = (above > FIXED).sum(1) < 2
            found[nodes] = np.where(one, terms.sum(1), np.where(terms.any(1), hashed(*terms.T), 0))
        return found

    def equal(self, *terms: tuple[Any, Any]) -> None:
        """Say that the sum of factor times log-scale is 0, for each of several nodes."""
        names = np.stack(np.broadcast_arrays(*(np.asarray(each, np.int64) for each, _ in terms)), -1)
        factors = np.broadcast_arrays(names[..., 0].astype(float), *(np.asarray(factor, float) for _, factor in terms))[
            1:
        ]
        self.scales.equal(names.reshape(-1, len(terms)), np.stack(factors, -1).reshape(-1, len(terms)))

    def alike(self, rows: Array) -> Array:
        """Return for rows of nodes (k, n) the first row that has the same channels with the same history."""
        if len(rows) == 1:
            return np.zeros(1, np.int64)
        still = self.dead[rows] | (rows <= FIXED)
        codes = hashed(
            self._relation(rows),
            self.history[rows],
            still,
            self._room["alone"][rows],
            np.where(rows <= FIXED, rows, 2),
        )
        _, first, inverse = np.unique(codes, axis=0, return_index=True, return_inverse=True)
        return first[inverse.reshape(-1)]

    def offsets(self) -> Array:
        """Return the channels to which constants other than 0 are added."""
        parts = [flow.outs[flow.plus != 0] for flow in self.flows if flow.kind == "offset"]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    # labels
    def nodes(self, label: Tensor) -> Array:
        (label,) = thinned(label)
        found = label.unique().numpy()
        return found[found > FIXED]

    def live(self, tensor: Tensor) -> bool:
        return id(tensor) in self.labels or id(tensor) in self.entries or ("complex", id(tensor)) in self.notes

    def moving(self, tensor: Tensor) -> bool:
        return self.live(tensor) and bool((thinned(self.label(tensor))[0] > FIXED).any())

    def still(self, tensor: Tensor) -> bool:
        """Return whether nothing in a tensor changes, though its channels have names; who asks sees it."""
        if id(tensor) not in self.labels:
            return False
        nodes = self.nodes(self.labels[id(tensor)])
        return bool(len(nodes)) and bool(self.dead[nodes].all())

    def label(self, tensor: Tensor) -> Tensor:
        found = self.labels.get(id(tensor))
        if found is not None:
            return found
        if id(tensor) in self.entries:
            return self._source(tensor)
        if not tensor.dtype.is_floating_point:
            return torch.full((), FIXED).expand(tensor.shape)
        if self.codes.constant(tensor):
            return (tensor != 0).long().cpu()
        return torch.full((), FIXED).expand(tensor.shape)

    def put(self, tensor: Tensor, label: Tensor) -> None:
        assert label.shape == tensor.shape, (label.shape, tensor.shape)
        self.labels[id(tensor)] = label

    def _source(self, tensor: Tensor) -> Tensor:
        """Take a parameter among activations: a channel for each of its entries."""
        entries = self.entries[id(tensor)].narrowed()
        if not entries.layout.numel():
            self.labels[id(tensor)] = torch.zeros(tensor.shape, dtype=torch.long)
            return self.labels[id(tensor)]
        wide = [n for n in entries.shape if n > 1] or [1]
        if entries.overlap:
            self.hold(entries)
            self.labels[id(tensor)] = torch.full((), FIXED).expand(tensor.shape)
            return self.labels[id(tensor)]
        (rows,) = entries.apply(lambda layout: layout.reshape(-1, wide[-1]))
        nodes = torch.from_numpy(self.new(entries.layout.numel()))
        label = nodes.view(entries.shape).expand(tensor.shape)
        self.labels[id(tensor)] = label
        self.vector(rows, NONE, nodes.view(rows.shape).numpy(), gain=False)
        return label

    def combined(self, *labels: Tensor) -> tuple[Tensor, Array, Array]:
        """Return a label with a new node for each combination of nodes, the combinations (m, k), and their nodes (m).

        A combination of zeros is zero, one of fixed entries fixed; these are not among the combinations.
        """
        shape = torch.broadcast_shapes(*(label.shape for label in labels))
        thin = thinned(*labels)
        size = 1 + max([self.count, *(int(each.max()) for each in thin if each.numel())])
        key = torch.zeros_like(thin[0])
        for each in thin:
            key = key * size + each
        keys, inverse = key.unique(return_inverse=True)
        rest, columns = keys.numpy(), []
        for _ in labels:
            columns.append(rest % size)
            rest = rest // size
        every = np.stack(columns[::-1], 1)
        most = every.max(1) if len(every) else np.zeros(0, np.int64)
        moving = most > FIXED
        names = most.copy()
        names[moving] = self.new(int(moving.sum()))
        label = torch.from_numpy(names)[inverse].view(key.shape).expand(shape)
        return label, every[moving], names[moving]

    def passed(
        self, kind: str, nodes: Array, names: Array, factors: Any = 1.0, keys: Any = None, plus: Any = 0.0
    ) -> None:
        """Enter a flow from nodes (m, k) with factors (m, k) into nodes (m); zeros and fixed ones are no terms.

        plus: what is added beside; NaN where it is not known, as what is fixed is not.
        """
        if not len(nodes):
            return
        names = names[:, None] if names.ndim == 1 else names
        plus = np.where((names == FIXED).any(1), np.nan, plus)
        factors = np.broadcast_to(
            np.asarray(factors, float).reshape(-1, 1) if np.ndim(factors) == 1 else factors, names.shape
        )
        moving = names > FIXED
        terms = np.where(moving, names, ZERO), np.where(moving, factors, 0.0)
        self.flows.append(Flow(kind, nodes, terms, keys, plus if plus.any() else None))

    def through(self, nodes: Array, names: Array) -> None:
        """Say that nodes are functions of others, entry by entry."""
        if len(nodes):
            self.flows.append(Flow("through", nodes, np.where(names > FIXED, names, ZERO)))

    def normed(self, row: Array) -> None:
        """Say that only turning leaves the norm of these channels, less their mean, alone."""
        moving = row[row > FIXED]
        lowest = int(moving.min()) if len(moving) else 0
        self.norm("orthogonal", moving, lowest)  # a channel that is there twice is so twice: heads that share values
        self.norm("centred", moving, lowest, len(row))

    def as_numbers(self, tensor: Tensor, run: Callable[[], None]) -> None:
        """Take channels that do not change as numbers, which are seen, while `run` runs."""
        label = self.labels[id(tensor)]
        self.flows.append(Flow("seen", self.nodes(label).tolist()))
        self.labels[id(tensor)] = torch.full((), FIXED).expand(label.shape)
        run()
        self.labels[id(tensor)] = label

    def keep_group(self, tensor: Tensor, out: Tensor) -> None:
        """Carry over which entries of a tensor one softmax normalises together."""
        group = self.notes.get(("group", id(tensor)))
        if group is None or group.shape != out.shape:
            return
        other = self.notes.setdefault(("group", id(out)), group)
        if other is not group and not torch.equal(other, group):  # of rows and of columns: of nothing together
            self.notes["group", id(out)] = torch.arange(group.numel()).view(group.shape)

    def level(self, *parts: tuple[Tensor, float]) -> Tensor:
        """Return which constant was added to each entry of a sum, if it is large: as one that hides a score.

        parts: tensors and factors. NaN where it is unknown. Beside constants that hide scores, what inputs may hide,
        as padding, is taken as shown: some token is.
        """
        found, masked = torch.zeros((), dtype=torch.float64), False
        for tensor, factor in parts:
            loud = self._steps_loud if tensor.is_meta else self.loud.get(id(tensor), 0)
            if not self.live(tensor) and tensor.dtype.is_floating_point and self.codes.constant(tensor):
                found = found + factor * tensor.double().cpu()
            elif ("level", id(tensor)) in self.notes:
                found = found + factor * self.notes["level", id(tensor)]
            elif loud & UP or (loud and factor < 0):
                return torch.tensor(math.nan, dtype=torch.float64)
            else:
                masked |= loud == DOWN
        return torch.where(found > LARGE, math.nan, found) if masked else found

    def keep_level(self, out: Tensor, level: Tensor) -> None:
        """Note down which known constant has been added to each entry, where it may hide scores or show them again."""
        self.loud[id(out)] = 0 if bool((level.abs() <= LARGE).all()) else UP | DOWN
        if self.loud[id(out)]:
            self.notes["level", id(out)] = level.expand(out.shape)

    def _loudness(self, operation: Operation) -> int:
        """Return whether large constants, of which signs, may be part of what an operation gives: UP, DOWN or both."""
        if operation.name in BOUNDED:
            return 0
        for each in operation.inputs:
            if id(each) not in self.loud:  # nothing that was computed before, or a constant
                known = not quantised(each) and not each.is_meta and self.codes.constant(each)
                up, down = (known and not bool((size <= LARGE).all()) for size in (each, -each)) if known else (0, 0)
                self.loud[id(each)] = UP * up | DOWN * down
        found = 0
        for each in operation.inputs:
            found |= self.loud[id(each)]
        if operation.name in ("full_like", "new_full") or POINTWISE in operation.func.tags:
            numbers = [n for n in (*operation.args, *operation.kwargs.values()) if isinstance(n, (int, float))]
            small = operation.name == "div" and any(abs(n) < 1 / LARGE for n in numbers)
            found |= UP * (small or any(not n <= LARGE for n in numbers)) | DOWN * any(not -n <= LARGE for n in numbers)
        kept = operation.name in (*VIEWS, *ORDERED) and "alpha" not in operation.kwargs
        return found if kept or not found else UP | DOWN

    def moved(self, label: Tensor, *key: Any, kind: str = "token", copy: Tensor | None = None) -> Tensor:
        """Return a label of new nodes, for channels whose tokens were moved or dropped; copy: which token is where."""
        label, tuples, nodes = self.combined(label, torch.zeros((), dtype=torch.long) if copy is None else copy)
        self.same(tuples[:, 0], nodes)
        self.follow(nodes, tuples[:, 0], key=hashed(tuples[:, 1], named((self.at, *key))))
        self.passed(kind, nodes, tuples[:, :1], keys=self.history[nodes])
        return label

    def tokens(self, label: Tensor, axis: int, *, masked: bool = False) -> bool:
        """Return whether an axis has tokens: along it a channel is the same, or joined to the same, or `masked`."""
        if flat(label, axis):
            return True
        if masked:
            label = torch.where(label == ZERO, label.amax(axis, keepdim=True), label)
        (thin,) = thinned(label)
        return flat(torch.from_numpy(self._relation(thin.numpy())), axis)

    def _relation(self, nodes: Array) -> Array:
        """Return a code for how channels follow from the one that represents their class; weights are rounded."""
        root, weight, dual = self.turns.find(nodes)
        return hashed(root, weight.round(9).view(np.int64), dual)

    def nth(self, label: Tensor, axes: Sequence[int]) -> Tensor | None:
        """Return for entries how many of their channel stand before them along axes that have others, if any do."""
        axes = sorted({axis % label.ndim for axis in axes})
        if all(self.tokens(label, axis) for axis in axes):
            return None
        rest = [axis for axis in range(label.ndim) if axis not in axes]
        moved = label.permute(*rest, *axes)
        thin = moved
        for axis in range(len(rest)):
            thin = thin.narrow(axis, 0, 1) if flat(thin, axis) else thin
        names = thin.reshape(math.prod(thin.shape[: len(rest)]), -1).numpy()
        root = self.turns.find(names)[0].reshape(-1)
        copy = earlier(root, np.repeat(np.arange(len(names)), names.shape[1])).reshape(names.shape)
        found = np.where(names > FIXED, copy, 0)
        if not found.any():
            return None
        made = torch.from_numpy(found).view(thin.shape).expand(moved.shape)
        return made.permute(*np.argsort([*rest, *axes]).tolist())

    def first_kind(self, label: Tensor, axes: Sequence[int]) -> Tensor:
        """Take one token along axes of tokens, one that moves where there is one."""
        for axis in axes:
            label = label.narrow(axis, 0, 1) if flat(label, axis) else label.amax(axis, keepdim=True)
        return label

    def kinds_along(self, label: Tensor, axis: int) -> dict[int, list[int]]:
        """Return the nodes that stand along an axis of tokens, by the largest."""
        if flat(label, axis):
            return {}
        (thin,) = thinned(label.movedim(axis, -1))
        found: dict[int, list[int]] = {}
        for row in torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist():
            found[max(row)] = sorted({*found.get(max(row), []), *row})
        return found

    def rows(self, label: Tensor, width: int) -> tuple[Array, Tensor]:
        """Return the distinct rows of nodes along the last axis, and which of them stands where.

        They are the same channels of different kinds of tokens.
        """
        (thin,) = thinned(label)
        if thin.shape[-1] != width:
            thin = thin.expand(*thin.shape[:-1], width)
        rows, inverse = torch.unique(thin.reshape(-1, width), dim=0, return_inverse=True)
        return rows.numpy(), inverse.view(thin.shape[:-1])

    def column_codes(self, label: Tensor, tensor: Tensor) -> tuple[Array, Array, Array]:
        """Return nodes, a code of the numbers at their entries, and their value: NaN if it is no known number."""
        code = self.codes(tensor)
        shape = torch.broadcast_shapes(label.shape, code.shape)
        label, code = thinned(label.expand(shape), code.expand(shape))
        value: Array | None = None
        if self.codes.constant(tensor):
            numbers = tensor.expand(shape)
            for axis in range(len(shape)):
                if label.shape[axis] != shape[axis]:
                    numbers = numbers.narrow(axis, 0, 1)
            value = numbers.reshape(-1).double().cpu().numpy()
        flat_label, flat_code = label.reshape(-1).numpy(), code.reshape(-1).numpy()
        order = np.argsort(flat_label, kind="stable")
        nodes, start, count = np.unique(flat_label[order], return_index=True, return_counts=True)
        sorted_code = flat_code[order]
        one = np.maximum.reduceat(sorted_code, start) == np.minimum.reduceat(sorted_code, start)
        column = segments(sorted_code, start, count)
        values = np.where(one, value[order[start]], np.nan) if value is not None else np.full(len(nodes), np.nan)
        return nodes, np.where(one, hashed(sorted_code[start]), hashed(column, count)), values

    # parameters
    def linear(self, entries: Entries, label: Tensor | None, shape: Sequence[int], **about: Any) -> Tensor:
        """Apply a weight (taps, out, in) to channels along the last axis; return the label of the answer."""
        if entries.overlap:
            if label is not None:
                self.fix(label)
            self.hold(entries)
            return torch.full((), FIXED).expand(*shape)
        out, width = entries.shape[1:]
        if label is None:
            ins, inverse = np.full((1, width), FIXED), torch.zeros((), dtype=torch.long)
        else:
            ins, inverse = self.rows(label, width)
        self.same(moving(ins), ins)
        outs = self.new(out * len(ins)).reshape(-1, out)
        self.same(outs[:1], outs[1:])
        both = np.concatenate([ins.reshape(-1), outs.reshape(-1)])
        self.scales.name(both[both > FIXED])
        place = len(self.linears)
        self.about("writer")[outs] = hashed(place + 1, np.arange(len(outs)))[:, None]
        made = Linear(entries, ins, outs, at=self.at, **about)
        self.linears.append(made)
        self.read_together(ins, "read", place)
        self.mark(outs.reshape(-1), "written", place)
        self.flows.append(Flow("linear", outs, made))
        found = torch.from_numpy(outs)[inverse]
        return found.expand(*shape)

    def hold(self, entries: Entries) -> None:
        """Say of entries some of which are there several times that they stay as they are, wherever they are used."""
        (line,) = entries.apply(lambda layout: layout.reshape(1, -1))
        nodes = self.new(line.shape[1])
        self.vector(line, NONE, nodes[None], gain=False)
        self.fix(nodes)

    def vector(self, entries: Entries, ins: Array, outs: Array, *, gain: bool) -> Vector:
        made = Vector(entries, ins, outs, gain)
        self.vectors.append(made)
        if not gain:  # a constant of some channels of a block is none of the others
            self.about("writer")[outs] = -len(self.vectors)
            self.mark(outs, "bias", len(self.vectors))
        self.flows.append(Flow("gain" if gain else "bias", outs, made))
        return made

    # steps
    def _step(self, operation: Operation) -> None:
        inputs = operation.inputs
        name = operation.name
        self._steps_loud = self._loudness(operation)
        self.loud.update((id(out), self._steps_loud) for out in operation.outputs if not self.codes.constant(out))
        if not any(self.live(each) for each in inputs) and name not in NAMED:
            return
        if all(id(each) in self.entries for each in inputs if self.live(each)) and self._on_parameters(operation):
            return
        if self._at_zeros(operation):
            self.put(operation.out, torch.full((), ZERO).expand(operation.out.shape))
            self.at_zeros.update(self.entries[id(each)].name for each in inputs if id(each) in self.entries)
            return
        for each in inputs:
            if id(each) in self.entries:
                self.ran.setdefault(self.entries[id(each)].name, []).append(self.entries[id(each)])
            if not self._waits(operation, each):
                self.resolve(each)
        if operation.func._schema.is_mutable or not operation.outputs:  # numbers that python reads are seen
            self.opaque(operation)
        elif any(("complex", id(each)) in self.notes for each in inputs):
            RULES["complex"](self, operation)
        elif name != "view_as_complex" and any(out.is_complex() for out in operation.outputs):
            self.opaque(operation)
        elif self.idle(operation):
            self.opaque(operation, known=True)
        elif quantised(operation.outputs[0]) and name not in (*COMPARISONS, *STILL, "view_as_complex"):
            self.opaque(operation)
        elif name in VIEWS or name in RULES:
            plain = [each for each in inputs if id(each) in self.entries]
            still = not plain and not any(self.moving(each) for each in inputs)
            if still and name not in (*VIEWS, "_to_copy", *NAMED):
                self.settle(operation)
                return
            (RULES["view"] if name in VIEWS else RULES[name])(self, operation)
        elif POINTWISE in operation.func.tags:
            RULES["pointwise"](self, operation)
        else:
            self.opaque(operation)

    def resolve(self, tensor: Tensor) -> None:
        """Take a square or a mean over channels as what it is by itself."""
        about = self.notes.get(("pending", id(tensor)), ("", ()))[1]
        for nodes in about.values() if isinstance(about, dict) else about:
            self.alone(nodes)

    def _waits(self, operation: Operation, tensor: Tensor) -> bool:
        """Return whether a square or a mean over channels may go on waiting for what it is used for."""
        if ("pending", id(tensor)) not in self.notes:
            return True
        if operation.name in (*VIEWS, "_to_copy"):
            return len(operation.inputs) == 1
        if self.notes["pending", id(tensor)][0] == "square":
            return operation.name in ("sum", "mean")
        return operation.name == "sub" and operation.args[1] is tensor

    def settle(self, operation: Operation) -> None:
        """Say that what comes out does not change, as nothing that goes in does."""
        for out in operation.outputs:
            self.put(out, torch.full((), FIXED).expand(out.shape))

    def opaque(self, operation: Operation, *, known: bool = False) -> None:
        """Say of an operation that no rule knows that what it takes may not change."""
        labels = [self.label(self.whole(each)) for each in operation.inputs if self.live(each)]
        moving = [each for each in labels if bool((thinned(each)[0] > FIXED).any())]
        if not known and any(bool((~self.dead[self.nodes(each)]).any()) for each in moving):
            self.unknown[operation.module, operation.name] = None
        for each in operation.inputs:  # a square or a mean may still wait for what this was to be
            self.resolve(self.whole(each))
        for each in moving:
            self.fix(each)
        self.settle(operation)

    def _at_zeros(self, operation: Operation) -> bool:
        """Return whether parameters multiply zeros alone: what they do is seen elsewhere, or on other inputs."""
        if operation.name not in ("mm", "bmm", "mul"):
            return False
        others = [each for each in operation.inputs if id(each) not in self.entries or id(each) in self.labels]
        if len(others) != 1 or len(operation.inputs) == 1 or not others[0].numel():
            return False
        return not thinned(self.label(others[0]))[0].any()

    def idle(self, operation: Operation) -> bool:
        """Return whether an operation has other things to do on other inputs, as an expert that these do not choose."""
        view, source = operation.name in VIEWS, operation.inputs[0]
        idle = any(("whole", id(each)) in self.notes for each in operation.inputs)
        some = any(out.numel() for out in operation.outputs)
        for out in operation.outputs:
            if not out.numel() and (idle or (source.numel() and not (view and self._cuts_channels(source, out)))):
                self.notes["whole", id(out)] = self.whole(source)
        return idle and some if view else idle or not some

    def _cuts_channels(self, source: Tensor, out: Tensor) -> bool:
        label, axes = self.label(source), range(source.ndim if source.ndim == out.ndim else 0)
        return any(source.shape[axis] and not out.shape[axis] and not self.tokens(label, axis) for axis in axes)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or of one that has entries on other inputs alone what it is a part of."""
        return self.notes.get(("whole", id(tensor)), tensor)

    def _on_parameters(self, operation: Operation) -> bool:
        """Follow views and multiples of parameters; say whether that was all."""
        name, args = operation.name, operation.args
        if any(quantised(out) for out in operation.outputs):
            return False
        if name in (*VIEWS, "_to_copy") and isinstance(args[0], Tensor) and len(operation.inputs) == 1:
            entries = self.entries[id(args[0])]
            if name in ("_to_copy", "clone", "alias", "detach", "lift_fresh"):
                made = [entries]
            elif name in ("repeat", "cat", "stack"):
                return False
            else:
                made = entries.viewed(operation.func, args, operation.kwargs)
            for out, each in zip(operation.outputs, made, strict=True):
                self.entries[id(out)] = each
            return True
        if (
            name in ("add", "sub")
            and isinstance(args[0], Tensor)
            and isinstance(args[1], (int, float))
            and not operation.kwargs
        ):
            entries = self.entries[id(args[0])]
            self.entries[id(operation.out)] = entries.plus(args[1] if name == "add" else -args[1])
            return True
        if name in ("mul", "div", "neg") and isinstance(args[0], Tensor):
            tensor, other = args[0], args[1] if len(args) > 1 else -1.0
            if not self.live(tensor) and isinstance(other, Tensor) and name == "mul":
                tensor, other = other, tensor
            if isinstance(other, Tensor):
                if self.live(other) or other.numel() != 1 or not self.codes.constant(other):
                    return False
                other = float(other)
            if id(tensor) not in self.entries or not other or operation.out.shape != tensor.shape:
                return False
            self.entries[id(operation.out)] = self.entries[id(tensor)].times(1 / other if name == "div" else other)
            return True
        return False


def quantised(tensor: Tensor) -> bool:
    """Return whether numbers are integers, of 8 bits or complex: what a cast makes of these is no multiple."""
    return not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1
