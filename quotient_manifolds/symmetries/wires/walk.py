"""Walk a recorded forward pass once, and write down what each operation allows its channels.

Beside each activation runs a *label*: an integer tensor of its shape that names the channel an entry belongs to, a
*node*, alike over tokens. Node 0 is the number 0 (it fits anything), node 1 what may not change. The change of an
activation along a symmetry is dt = X t + s: X is bounded by the classes of nodes and their marks, the diagonal of X by
linear equations of log-scales, s by the flows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.codes import POINTWISE, VIEWS, Codes, folded
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.record import Operation, Recording, tensors
from quotient_manifolds.symmetries.wires.relations import SAME, Classes, Relation, Scales

ZERO, FIXED = 0, 1
Rule = Callable[["Walk", Operation], None]
RULES: dict[str, Rule] = {}
Terms = list[list[tuple[int, float]]]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table of rules for operations of these names."""

    def put(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return put


@dataclass(eq=False)
class Linear:
    """Hold a linear map by a weight: entries (taps, out, in), the nodes it reads and those it writes, a row a kind of token."""

    entries: Entries  # of shape (taps, out, in)
    ins: list[list[int]]
    outs: list[list[int]]
    taps: Any = None  # how a convolution moves tokens, None for a plain matrix
    table: bool = False  # an embedding: its input is one of the rows
    shared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entries.shape)


@dataclass(eq=False)
class Vector:
    """Hold a vector that is added or multiplied: entries (rows, n), a row for each place that has numbers of its own."""

    entries: Entries
    ins: list[list[int]]  # of a gain; of a bias nothing
    outs: list[list[int]]
    gain: bool
    unknowns: list[list[int]] = field(default_factory=list)  # log-scales of the numbers of a gain
    shared: bool = False


@dataclass(eq=False)
class Flow:
    """Hold what an operation does to constants: kind, nodes that it writes, and, node by node, what they are made of."""

    kind: str  # sum, number, pool, linear, gain, bias, norm, centre, seen, soft, dot, max
    outs: list[Any]
    terms: Any = None
    about: Any = None


class Walk:
    """Hold what the operations of a recording allow."""

    def __init__(self, recording: Recording) -> None:
        import quotient_manifolds.symmetries.wires.rules  # noqa: F401  fills the table

        self.recording, self.codes = recording, Codes(recording)
        self.parameters = dict(recording.parameters)
        self.entries = {id(w): Entries.of(name, w) for name, w in recording.parameters.items()}
        self.labels: dict[int, Tensor] = {}
        self.turns, self.means, self.scales = Classes(), Classes(), Scales()
        self.marks: list[list[Any]] = []
        self.history: list[int] = []
        """What was done to the tokens of a channel since it was written, by a hash: channels mix only where it is one."""
        self.linears: list[Linear] = []
        self.vectors: list[Vector] = []
        self.flows: list[Flow] = []
        self.dead: set[int] = set()
        self.unknown: Counter[str] = Counter()
        self.notes: dict[tuple[str, Any], Any] = {}  # what rules remember of a tensor or node
        self.new(2)
        self.at = 0
        for self.at, operation in enumerate(recording.operations):
            self._step(operation)
        for out in recording.outputs:
            if self.live(out):
                self.fix(self.label(out))
        RULES["end"](self, recording.operations[-1])

    # nodes
    def new(self, count: int, history: int = 0) -> list[int]:
        first = len(self.marks)
        self.history += [history] * count
        self.marks += [[] for _ in range(count)]
        self.turns.grow(count)
        self.means.grow(count)
        return list(range(first, first + count))

    def mark(self, nodes: Sequence[int], *token: Any) -> None:
        for node in nodes:
            if node > FIXED:
                self.marks[node].append((*token, self.history[node]))

    def fix(self, what: Tensor | Sequence[int], *, seen: bool = True) -> None:
        """Say that these channels may not change at all, and that a constant added to them is seen."""
        nodes = self.nodes(what) if isinstance(what, Tensor) else [n for n in what if n > FIXED]
        for node in nodes:
            if node not in self.dead:
                self.dead.add(node)
                self.marks[node].append(("fixed", node))
                self.scales.equal({node: 1.0})
        if seen and nodes:
            self.flows.append(Flow("seen", nodes))

    def alone(self, nodes: Sequence[int]) -> None:
        """Say that these channels mix with none."""
        for node in nodes:
            if node > FIXED:
                self.marks[node].append(("alone", node))

    def same(self, a: int, b: int, relation: Relation = SAME, *, scale: bool = True, norm: bool = False) -> None:
        """Say that X_b follows from X_a, and, with `scale`, that their scales are one."""
        if a == b and relation == SAME or ZERO in (a, b):
            return
        if FIXED in (a, b):
            self.fix([a, b], seen=False)
            return
        self.turns.join(a, b, relation)
        if not norm:
            self.means.join(a, b, relation)
        if scale:
            self.equal({b: 1.0, a: 1.0 if relation.dual else -1.0})

    def follow(self, node: int, *before: int, key: Any = None) -> None:
        """Say what was done to the tokens of a channel: what was done to those it is made of, which is one, and then this."""
        past = {self.history[n] for n in before if n > FIXED}
        one = past.pop() if len(past) == 1 else hash(tuple(self.history[n] for n in before if n > FIXED)) if past else 0
        self.history[node] = one if key is None else hash((one, key))
        moving = [n for n in before if n > FIXED]
        if moving and self.dead.issuperset(moving):
            self.fix([node], seen=False)

    def equal(self, terms: dict[int, float]) -> None:
        self.scales.equal({node: value for node, value in terms.items() if node > FIXED})

    # labels
    def nodes(self, label: Tensor) -> list[int]:
        (label,) = self.thin(label)
        return [n for n in label.unique().tolist() if n > FIXED]

    def live(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and (id(tensor) in self.labels or id(tensor) in self.entries)

    def moving(self, tensor: Any) -> bool:
        return self.live(tensor) and bool((self.thin(self.label(tensor))[0] > FIXED).any())

    def still(self, tensor: Any) -> bool:
        """Say whether nothing in a tensor changes, though its channels have names; who asks sees it."""
        if not isinstance(tensor, Tensor) or id(tensor) not in self.labels:
            return False
        nodes = self.nodes(self.labels[id(tensor)])
        return bool(nodes) and self.dead.issuperset(nodes)

    def label(self, tensor: Tensor) -> Tensor:
        found = self.labels.get(id(tensor))
        if found is not None:
            return found
        if id(tensor) in self.entries:
            return self._source(tensor)
        if not tensor.dtype.is_floating_point:
            return torch.full((), FIXED).expand(tensor.shape)
        if self.codes.constant(tensor):  # what is masked is 0 after a softmax, whatever is added to it
            return ((tensor != 0) & (tensor > -1e30)).long().cpu()
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
        (rows,) = entries.apply(lambda layout: layout.reshape(-1, layout.shape[-1]) if layout.ndim else layout.view(1, 1))
        nodes = torch.tensor(self.new(entries.layout.numel()))
        label = nodes.view(entries.shape).expand(tensor.shape)
        self.labels[id(tensor)] = label
        if len(rows.index().unique()) < len(nodes):
            self.fix(label)
            return label
        self.vector(rows, [], nodes.view(rows.shape).tolist(), gain=False)
        return label

    def thin(self, *labels: Tensor) -> tuple[Tensor, ...]:
        """Broadcast together, and drop what is the same along an axis."""
        found = torch.broadcast_tensors(*labels)
        for axis in range(found[0].ndim):
            if all(flat(each, axis) for each in found):
                found = tuple(each.narrow(axis, 0, min(1, each.shape[axis])) for each in found)
        return tuple(found)

    def combined(self, *labels: Tensor) -> tuple[Tensor, list[tuple[int, ...]], list[int]]:
        """Return a label with a new node for each combination of nodes, the combinations, and their nodes.

        A combination of zeros is zero, one of fixed entries fixed; `new` nodes are those of combinations that move.
        """
        shape = torch.broadcast_shapes(*(label.shape for label in labels))
        thin = self.thin(*labels)
        size = len(self.marks)
        key = torch.zeros_like(thin[0])
        for each in thin:
            key = key * size + each
        keys, inverse = key.unique(return_inverse=True)
        tuples, rest = [], keys
        for _ in labels:
            tuples.append((rest % size).tolist())
            rest = rest // size
        every = list(zip(*reversed(tuples), strict=True))
        nodes = [ZERO if max(each) == ZERO else FIXED if max(each) == FIXED else -1 for each in every]
        fresh = iter(self.new(nodes.count(-1)))
        nodes = [next(fresh) if node == -1 else node for node in nodes]
        label = torch.tensor(nodes)[inverse].view(key.shape).expand(shape)
        kept = [(each, node) for each, node in zip(every, nodes, strict=True) if node > FIXED]
        return label, [each for each, _ in kept], [node for _, node in kept]

    def moved(self, label: Tensor, *key: Any, kind: str = "token") -> Tensor:
        """Return a label of new nodes, for channels whose tokens were moved or dropped."""
        label, tuples, nodes = self.combined(label)
        for (a,), node in zip(tuples, nodes, strict=True):
            self.same(a, node)
            self.follow(node, a, key=(self.at, *key))
        self.flows.append(Flow(kind, nodes, [[(a, 1.0)] for (a,) in tuples], [self.history[n] for n in nodes]))
        return label

    def tokens(self, label: Tensor, axis: int, *, masked: bool = False) -> bool:
        """Say whether an axis is one of tokens: along it a channel is the same, or joined to the same, or `masked`."""
        if flat(label, axis):
            return True
        if masked:
            label = torch.where(label == ZERO, label.amax(axis, keepdim=True), label)
        thin = label
        for other in range(label.ndim):
            if other != axis % label.ndim and flat(thin, other):
                thin = thin.narrow(other, 0, 1)
        kinds = {}
        for node in thin.unique().tolist():
            root, relation = self.turns.find(node)
            kinds[node] = root if relation == SAME else -node
        names = torch.tensor(sorted(kinds))
        table = torch.tensor([kinds[node] for node in names.tolist()])
        return flat(table[torch.searchsorted(names, thin.contiguous())], axis)

    def first_kind(self, label: Tensor, axes: Sequence[int]) -> Tensor:
        """Take one token along axes of tokens, one that moves where there is one."""
        for axis in axes:
            label = label.narrow(axis, 0, 1) if flat(label, axis) else label.amax(axis, keepdim=True)
        return label

    def kinds_along(self, label: Tensor, axis: int) -> dict[int, list[int]]:
        """Return the nodes that stand along an axis of tokens, by the largest."""
        if flat(label, axis):
            return {}
        (thin,) = self.thin(label.movedim(axis, -1))
        found: dict[int, list[int]] = {}
        for row in torch.unique(thin.reshape(-1, thin.shape[-1]), dim=0).tolist():
            found[max(row)] = sorted({*found.get(max(row), []), *row})
        return found

    def rows(self, label: Tensor, width: int) -> list[list[int]]:
        """Return the distinct rows of nodes along the last axis, the same channels of different kinds of tokens."""
        (thin,) = self.thin(label)
        if thin.shape[-1] != width:
            thin = thin.expand(*thin.shape[:-1], width)
        return torch.unique(thin.reshape(-1, width), dim=0).tolist()

    def column_codes(self, label: Tensor, tensor: Tensor) -> dict[int, Any]:
        """Return for each node a code of the numbers that stand at its entries: ("value", v) for one known number."""
        code = self.codes(tensor) if not self.moving(tensor) else self.codes.fresh(tensor.shape)
        shape = torch.broadcast_shapes(label.shape, code.shape)
        label, code = self.thin(label.expand(shape), code.expand(shape))
        order = label.reshape(-1).argsort(stable=True)
        nodes, counts = label.reshape(-1)[order].unique_consecutive(return_counts=True)
        constant = self.codes.constant(tensor)
        values = tensor.expand(shape) if constant else None
        if values is not None:
            for axis in range(len(shape)):
                if label.shape[axis] != shape[axis]:
                    values = values.narrow(axis, 0, 1)
        found: dict[int, Any] = {}
        flat_code, flat_values = code.reshape(-1)[order], None if values is None else values.reshape(-1)[order.to(values.device)]
        start = 0
        for node, count in zip(nodes.tolist(), counts.tolist(), strict=True):
            part = flat_code[start : start + count]
            if bool((part == part[0]).all()) and flat_values is not None:
                found[node] = ("value", float(flat_values[start]))
            elif bool((part == part[0]).all()):
                found[node] = ("code", int(part[0]))
            else:
                found[node] = ("column", count, int(folded(part[None])[0]))
            start += count
        return found

    # parameters
    def linear(self, entries: Entries, label: Tensor | None, shape: Sequence[int], **about: Any) -> Tensor:
        """Apply a weight (taps, out, in) to channels along the last axis; return the label of the answer, of that shape."""
        out, width = entries.shape[1:]
        ins = [[FIXED] * width] if label is None else self.rows(label, width)
        for row in ins[1:]:
            for a, b in zip(ins[0], row, strict=True):
                self.same(a, b)
        outs = [self.new(out) for _ in ins]
        for row in outs[1:]:
            for a, b in zip(outs[0], row, strict=True):
                self.same(a, b)
        self.scales.unknowns.update(n for row in (*ins, *outs) for n in row if n > FIXED)
        made = Linear(entries, ins, outs, **about)
        place = len(self.linears)
        self.linears.append(made)
        for row_in, row_out in zip(ins, outs, strict=True):
            self.mark(row_in, "read", place)
            self.mark(row_out, "written", place)
        self.flows.append(Flow("linear", [n for row in outs for n in row], made))
        if len(ins) == 1:
            return torch.tensor(outs[0]).expand(*shape)
        (thin,) = self.thin(label)  # type: ignore[arg-type]
        if thin.shape[-1] != width:
            thin = thin.expand(*thin.shape[:-1], width)
        _, inverse = torch.unique(thin.reshape(-1, width), dim=0, return_inverse=True)
        found = torch.tensor(outs)[inverse].view(*thin.shape[:-1], out)
        return found.expand(*shape)

    def vector(self, entries: Entries, ins: list[list[int]], outs: list[list[int]], *, gain: bool) -> Vector:
        made = Vector(entries, ins, outs, gain)
        self.vectors.append(made)
        self.flows.append(Flow("gain" if gain else "bias", [n for row in outs for n in row], made))
        return made

    # steps
    def _step(self, operation: Operation) -> None:
        inputs = operation.inputs
        if not any(self.live(each) for each in inputs) or not operation.outputs:
            return
        name = operation.name
        if all(id(each) in self.entries for each in inputs if self.live(each)) and self._on_parameters(operation):
            return
        for each in inputs:
            if ("pending", id(each)) in self.notes and not self._waits(operation, each):
                RULES["resolve"](self, Operation(operation.func, (each,), {}, None))
        if name in VIEWS or name in RULES:
            plain = [each for each in inputs if id(each) in self.entries]
            if not plain and not any(self.moving(each) for each in inputs) and name not in VIEWS:
                self.settle(operation)
                return
            (RULES["view"] if name in VIEWS else RULES[name])(self, operation)
        elif POINTWISE in operation.func.tags:
            RULES["pointwise"](self, operation)
        else:
            self.opaque(operation)

    def _waits(self, operation: Operation, tensor: Tensor) -> bool:
        """Say whether a square or a mean over channels may go on waiting for what it is used for."""
        if operation.name in (*VIEWS, "_to_copy"):
            return len(operation.inputs) == 1
        if self.notes["pending", id(tensor)][0] == "square":
            return operation.name in ("sum", "mean")
        return operation.name == "sub" and operation.args[1] is tensor

    def settle(self, operation: Operation) -> None:
        """Say that what comes out does not change, as nothing that goes in does."""
        for out in operation.outputs:
            self.put(out, torch.full((), FIXED).expand(out.shape))

    def opaque(self, operation: Operation) -> None:
        """Say of an operation that no rule knows that what it takes may not change."""
        moving = [each for each in operation.inputs if self.moving(each)]
        if moving:
            self.unknown[operation.name] += 1
        for each in moving:
            self.fix(self.label(each))
        self.settle(operation)

    def _on_parameters(self, operation: Operation) -> bool:
        """Follow views and multiples of parameters; say whether that was all."""
        name, args = operation.name, operation.args
        if name in (*VIEWS, "_to_copy") and isinstance(args[0], Tensor) and len(operation.inputs) == 1:
            entries = self.entries[id(args[0])]
            if name in ("_to_copy", "clone", "alias", "detach", "lift_fresh"):
                made = [entries]
            elif name in ("repeat", "cat", "stack") or operation.outputs[0].dtype.is_complex:
                return False
            else:
                made = entries.viewed(operation.func, args, operation.kwargs)
            for out, each in zip(operation.outputs, made, strict=True):
                self.entries[id(out)] = each
            return True
        if name in ("add", "sub") and isinstance(args[0], Tensor) and isinstance(args[1], (int, float)) and not operation.kwargs:
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
            if id(tensor) not in self.entries or not other:
                return False
            self.entries[id(operation.out)] = self.entries[id(tensor)].times(1 / other if name == "div" else other)
            return operation.out.shape == tensor.shape
        return False


def flat(label: Tensor, axis: int) -> bool:
    """Say whether a label is the same along an axis."""
    if label.shape[axis] <= 1 or label.stride(axis) == 0:
        return True
    return bool((label == label.narrow(axis, 0, 1)).all())


def on_labels(walk: Walk, operation: Operation) -> list[Tensor]:
    """Apply a view operation to labels."""
    args, kwargs = tree_map_only(
        Tensor, lambda t: walk.label(t) if t.dtype.is_floating_point or walk.live(t) else t, (operation.args, operation.kwargs)
    )
    return tensors(operation.func(*args, **kwargs))
