"""Write a recording as a graph of channels: what each is computed from, by which operation, with which constants.

An entry of an activation has a *name*, a vertex of the graph, and a *place*, a code of all else that tells it: its
token, and the inputs and constants that entered. So a vertex stands for the same function of places wherever its name
is found, and a permutation of vertices that keeps the edges and the colors is one of parameters that keeps the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quotient_manifolds.symmetries.wires.codes import (
    LARGEST,
    POINTWISE,
    RESIZED,
    STILL,
    VIEWS,
    axes_of,
    distinct,
    folded,
    hashed,
    mixed,
    named,
    viewed,
)
from quotient_manifolds.symmetries.wires.entries import Entries
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import flat, thinned
from quotient_manifolds.symmetries.wires.record import Operation
from quotient_manifolds.symmetries.wires.walk import Walk

MOST = 1 << 20  # vertices of one parameter that is no matrix, or of one product


@dataclass(frozen=True, eq=False)
class Field:
    """Hold the names of entries, 0 where no parameter reaches them, and their places."""

    names: Tensor
    places: Tensor

    def map(self, view: Callable[[Tensor], Tensor]) -> Field:
        """Move entries as a view does."""
        return Field(_thin(view(self.names)), _thin(view(self.places)))

    def expand(self, shape: Sequence[int]) -> Field:
        """Repeat entries."""
        return Field(self.names.expand(shape), self.places.expand(shape))


@dataclass(frozen=True, eq=False)
class Use:
    """Hold a use of a parameter: entries (taps, out, in), and the vertices of its rows and columns."""

    entries: Entries
    rows: Array
    columns: Array


class Equations:
    """Hold the graph of a recording: the first color of every vertex, edges with codes, and uses of parameters."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.count = 1
        self.tints: list[tuple[Array, Array]] = []
        self.edges: list[tuple[Array, Array, Array]] = []
        self.uses: list[Use] = []
        self.whole = True
        """Whether all was written down: no second answer of an operation is used that has no names."""
        self._named: dict[str, list[Use]] = {}
        self._lost: set[int] = set()
        self._marks = 0
        self.made: list[tuple[int, str]] = []
        """The first of the vertices that an operation made, and its name."""
        self._fields: dict[int, Field] = {}
        self._depth: dict[int, int] = {}
        self._sign, self._name = 0, ""
        for operation in walk.recording.operations:
            self._step(operation)
        for out in walk.recording.outputs:
            self.whole &= id(out) not in self._lost
            if self._live(out):
                self._pin(self.field(out))
        self._fields = {}

    # the graph
    def new(self, count: int, code: Any = 0, name: str = "") -> Array:
        """Return new vertices of the operation at hand, with a color."""
        made = np.arange(self.count, self.count + count)
        self.count += count
        self.made.append((self.count - count, name or self._name))
        self.tint(made, hashed(np.int64(self._sign), np.broadcast_to(np.asarray(code, np.int64), made.shape)))
        return made

    def tint(self, vertices: Array, codes: Any) -> None:
        """Add to the colors of vertices."""
        codes = np.broadcast_to(np.asarray(codes, np.int64), np.shape(vertices))
        self.tints.append((np.asarray(vertices, np.int64).reshape(-1), codes.reshape(-1)))

    def single(self, vertices: Array) -> None:
        """Say that each of these vertices is like none."""
        self._marks += len(vertices)
        self.tint(vertices, hashed(self._marks - np.arange(len(vertices)), np.int64(77)))

    def join(self, source: Any, target: Any, code: Any) -> None:
        """Add edges between vertices: what is computed from what."""
        parts = np.broadcast_arrays(*(np.asarray(each, np.int64) for each in (source, target, code)))
        source, target, code = (each.reshape(-1) for each in parts)
        kept = source > 0
        self.edges.append((source[kept], target[kept], code[kept]))

    def use(self, entries: Entries, *, asked: bool = False) -> Use:
        """Return the use of a parameter (taps, out, in); asked: by its columns, of which each is like none."""
        known = self._named.setdefault(entries.name, [])
        others = [each for each in known if each.entries.meets(entries)]
        multiple = entries.scale, entries.offset  # h and -h are two vectors, of one parameter
        for other in others:
            if (
                other.entries.key == entries.key
                and (other.entries.scale, other.entries.offset) == multiple
                and not asked
            ):
                return other
        sides = zip(entries.shape[1:], (1, 2), strict=True)
        rows, columns = (self.new(n, hashed(np.int64(code), named(multiple)), "parameter") for n, code in sides)
        made = Use(entries, rows, columns)
        known.append(made)
        if asked:
            self.single(columns)
        if entries.overlap:
            self.single(np.concatenate([rows, columns]))
        for other in others:
            if other.entries.turned.key == entries.key:
                self.join(other.rows, made.columns, 1)
                self.join(other.columns, made.rows, 1)
                continue
            if other.entries.key == entries.key:
                self.join(other.columns, made.columns, 2)
                self.join(other.rows, made.rows, 2)
                continue
            for vertices in (other.rows, other.columns, made.rows, made.columns):
                self.single(vertices)
        if not others:
            self.uses.append(made)
        return made

    # activations
    def _live(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and (id(tensor) in self._fields or id(tensor) in self.walk.entries)

    def _is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and id(tensor) in self.walk.entries and id(tensor) not in self._fields

    def field(self, tensor: Tensor) -> Field:
        """Return names and places of a tensor's entries."""
        if self._is_parameter(tensor):
            return self.source(tensor)
        if id(tensor) in self._fields:
            return self._fields[id(tensor)]
        return Field(torch.zeros((), dtype=torch.long).expand(tensor.shape), _thin(self.walk.codes(tensor)))

    def source(self, tensor: Tensor, beside: Sequence[Tensor] = ()) -> Field:
        """Take a parameter among activations: a name for each entry, one along axes of tokens of what is beside it."""
        entries = self.walk.entries[id(tensor)].narrowed()
        shape = entries.shape
        places = [n > 1 and _along(beside, axis - len(shape)) for axis, n in enumerate(shape)]
        if math.prod(n for n, place in zip(shape, places, strict=True) if not place) > MOST:
            places = [True] * len(shape)
        order = sorted(range(len(shape)), key=places.__getitem__)
        names = [1 if place else n for n, place in zip(shape, places, strict=True)]
        rest = [n if place else 1 for n, place in zip(shape, places, strict=True)]
        (layout,) = entries.apply(lambda view: view.permute(order).reshape(1, math.prod(names), math.prod(rest)))
        use = self.use(layout)
        self.single(use.columns)
        made = Field(
            torch.from_numpy(use.rows).view(names).expand(tensor.shape),
            mixed(torch.arange(math.prod(rest)), 3).view(rest).expand(tensor.shape),
        )
        self._fields[id(tensor)] = made
        return made

    def _step(self, operation: Operation) -> None:
        inputs = [each for each in operation.inputs if self._live(each)]
        if not inputs or (operation.outputs and all(id(out) in self.walk.entries for out in operation.outputs)):
            return
        depth = 1 + max(self._depth.get(id(each), 0) for each in operation.inputs)
        shapes = [tuple(each.shape) for each in operation.inputs]
        plain = tree_map_only(Tensor, lambda t: "tensor", (operation.args, operation.kwargs))
        self._sign, self._name = named((operation.name, plain, shapes, depth)), operation.name
        step = STEPS.get(operation.name)
        if step is None and operation.name in VIEWS and operation.name != "unfold":  # which repeats entries in windows
            step = _view
        if step is None and POINTWISE in operation.func.tags:
            step = _pointwise
        self.whole &= self._lost.isdisjoint(map(id, operation.inputs))
        told = step is not None and not operation.func._schema.is_mutable and not self.walk.idle(operation)
        made = step(self, operation) if step and told else None
        for out in operation.outputs:
            self._depth[id(out)] = depth
        if made is None:
            for each in inputs:
                self._pin(self.field(self.walk.whole(each)))
            return
        self._lost.update(id(out) for out in operation.outputs[len(made) :] if made and out.numel())
        for out, field in zip(operation.outputs, made, strict=False):
            self._fields[id(out)] = field.expand(out.shape)

    def _pin(self, field: Field) -> None:
        """Say that each of these entries is like none."""
        names = thinned(field.names)[0].reshape(-1).unique().numpy()
        self.single(names[names > 0])

    def combine(self, parts: Sequence[Field]) -> Field:
        """Compute entries from others, one of each part."""
        shape = torch.broadcast_shapes(*(part.names.shape for part in parts))
        names = thinned(*(part.names.expand(shape) for part in parts))
        key, place = torch.zeros((), dtype=torch.long), torch.tensor(self._sign)
        for each in names:
            key = mixed(key * 1000003 + each, 5)
        for each in thinned(*(part.places.expand(shape) for part in parts)):
            place = mixed(place * 1000003 + each, 5)
        flat_names = np.stack([each.reshape(-1).numpy() for each in names], 1)
        first, inverse = distinct(key.reshape(-1).numpy())
        rows = flat_names[first]
        vertices = np.zeros(len(rows), np.int64)
        some = (rows > 0).any(1)
        vertices[some] = self.new(int(some.sum()), 3)
        for number, column in enumerate(rows[some].T):
            self.join(column, vertices[some], number + 1)
        made = torch.from_numpy(vertices[inverse]).view(key.shape)
        return Field(made.expand(shape), place.expand(shape))

    def reduce(self, field: Field, axes: Sequence[int], name: str = "") -> Field | None:
        """Compute entries from all along some axes, in no order; the axes stay, of length 1."""
        axes = [axis % field.names.ndim for axis in axes]
        own = [axis for axis in axes if not flat(field.names, axis) and not flat(field.places, axis)]
        if len(own) > 1:
            return None
        field = self.settle(field, own[0]) if own else field
        shape = [1 if axis in axes else n for axis, n in enumerate(field.names.shape)]
        names, places = thinned(field.names)[0], thinned(field.places)[0]
        for axis in axes:
            places = mixed(places, 7).sum(axis, keepdim=True) if places.shape[axis] > 1 else places
        channels = [axis for axis in axes if names.shape[axis] > 1]
        rest = [axis for axis in range(names.ndim) if axis not in channels]
        thin = [1 if axis in channels else names.shape[axis] for axis in range(names.ndim)]
        rows = names.permute(*rest, *channels).reshape(math.prod(thin), -1)
        first, inverse = distinct(mixed(rows, 9).sum(1).numpy())
        members = rows.numpy()[first]
        vertices = np.zeros(len(members), np.int64)
        some = (members > 0).any(1)
        vertices[some] = self.new(int(some.sum()), 5 + (members[some] == 0).sum(1), name)
        self.join(members, vertices[:, None], 1)
        made = torch.from_numpy(vertices[inverse]).view(thin)
        return Field(made.expand(shape), mixed(places * 1000003 + self._sign, 5).expand(shape))

    def windows(self, *names: Tensor, code: int = 0) -> Field:
        """Name what is made of all tokens of channels, and place it by the tokens that come out."""
        none = torch.zeros((), dtype=torch.long)
        made = self.combine([Field(each, none.expand(each.shape)) for each in names]).names
        known = np.unique(thinned(made)[0].numpy())
        self.tint(known[known > 0], code)
        return Field(made, _tokens(made, [axis for axis in range(made.ndim) if flat(made, axis)]))

    def settle(self, field: Field, axis: int) -> Field:
        """Place entries by their tokens alone, and name anew what has places of its own along an axis of channels.

        Tokens at which the channels have one row of names are counted; which places they had is told by the colors.
        """
        names, places = field.names.movedim(axis, -1), field.places.movedim(axis, -1)
        rows, thin = self.walk.rows(names, names.shape[-1])
        kind = thin.expand(names.shape[:-1]).reshape(-1)
        order = kind.argsort(stable=True)
        count = torch.bincount(kind)
        token = torch.empty_like(kind)
        token[order] = torch.arange(len(kind)) - (count.cumsum(0) - count).repeat_interleave(count)
        token = mixed(token, 3)
        code = mixed(token[:, None] * 1000003 + places.reshape(len(kind), -1), 5)
        told = torch.zeros(rows.shape, dtype=torch.long).index_add_(0, kind, code)
        vertices = self.new(rows.size, told.reshape(-1).numpy())
        self.join(rows, vertices.reshape(rows.shape), 1)
        made = torch.from_numpy(vertices).view(rows.shape)[thin].expand(names.shape)
        made, token = (
            made.movedim(-1, axis),
            token.view(names.shape[:-1])[..., None].expand(names.shape).movedim(-1, axis),
        )
        return Field(made, _thin(token))

    def linear(self, field: Field, entries: Entries, shape: Sequence[int]) -> Field:
        """Apply a weight (taps, out, in) to entries along the last axis."""
        field = field if flat(field.places, -1) else self.settle(field, -1)
        rows, kind = self.walk.rows(field.names, entries.shape[2])
        names = torch.from_numpy(self.apply(self.use(entries), rows))[kind]
        return Field(names.expand(*shape), field.places[..., :1].expand(*shape))

    def apply(self, use: Use, rows: Array) -> Array:
        """Return names of what a weight makes of rows of names (kinds, in)."""
        hubs = self.new(len(rows), 1, "weight")
        taken = self.new(rows.size, 2).reshape(rows.shape)
        made = self.new(len(rows) * len(use.rows), 3).reshape(len(rows), len(use.rows))
        self.join(rows, taken, 1)
        self.join(use.columns, taken, 2)
        self.join(taken, hubs[:, None], 3)
        self.join(hubs[:, None], made, 4)
        self.join(use.rows, made, 5)
        return made

    def contract(self, a: Field, b: Field) -> Field | None:
        """Multiply entries (..., m, k) and (..., k, n), and sum over k."""
        sides = (a, b.map(lambda t: t.mT))
        a, b = (each if flat(each.names, -1) or flat(each.places, -1) else self.settle(each, -1) for each in sides)
        one, other = a.map(lambda t: t[..., :, None, :]), b.map(lambda t: t[..., None, :, :])
        if thinned(one.names, other.names)[0].numel() > MOST:
            return None
        scores = not flat(one.names, -1) and not flat(other.names, -1)
        found = self.reduce(self.combine([one, other]), [-1], "score" if scores else "")
        return found and found.map(lambda t: t[..., 0])


def _pointwise(graph: Equations, operation: Operation) -> list[Field] | None:
    beside = [graph.field(each).names for each in operation.inputs if not graph._is_parameter(each)]
    parts = [
        graph.source(each, beside) if graph._is_parameter(each) else graph.field(each) for each in operation.inputs
    ]
    return [graph.combine(parts)]


def _view(graph: Equations, operation: Operation) -> list[Field] | None:
    """Move entries; what is put beside tokens is one with them."""
    if operation.name == "native_dropout" and operation.args[2] and operation.args[1]:
        return None
    names = viewed(operation, lambda t: graph.field(t).names)
    places = viewed(operation, lambda t: graph.field(t).places)
    return [Field(_thin(name), _thin(place)) for name, place in zip(names, places, strict=True)]


def _copy(graph: Equations, operation: Operation) -> list[Field] | None:
    if not operation.out.dtype.is_floating_point:
        return _pointwise(graph, operation)
    return [graph.field(operation.inputs[-1])]


def _multiply(graph: Equations, operation: Operation) -> list[Field] | None:
    a, b = operation.args[:2]
    if graph._is_parameter(b):
        made = _by_weight(graph, graph.field(a), graph.walk.entries[id(b)], operation.out.shape)
    else:
        made = graph.contract(graph.field(a), graph.field(b))
    return None if made is None else [made]


def _by_weight(graph: Equations, field: Field, entries: Entries, shape: Sequence[int]) -> Field | None:
    """x W; a batch of weights is one weight a member."""
    (entries,) = entries.apply(lambda layout: layout.mT)
    layout = entries.layout
    if layout.ndim == 3 and layout.stride(0) == 0:
        layout = layout[0]
    if layout.ndim == 2:
        return graph.linear(field, replace(entries, layout=layout[None]), shape)
    if layout.ndim != 3:
        return None
    made = [
        graph.linear(field.map(itemgetter(k)), replace(entries, layout=layout[k][None]), shape[1:])
        for k in range(len(layout))
    ]
    return Field(*(_thin(torch.stack([getattr(each, side) for each in made])) for side in ("names", "places")))


def _reduced(graph: Equations, operation: Operation) -> list[Field] | None:
    field = graph.field(operation.args[0])
    axes = axes_of(operation, field.names.ndim)
    made = graph.reduce(field, axes)
    return None if made is None else [made.map(lambda t: t.reshape(operation.outputs[0].shape))]


def _normalised(graph: Equations, operation: Operation) -> list[Field] | None:
    """A softmax, or a norm over the last axes: an entry, by what all of them are."""
    args, field = operation.args, graph.field(operation.args[0])
    axes = [args[1]] if isinstance(args[1], int) else [*range(-len(args[1]), 0)]
    over = graph.reduce(field, axes)
    if over is None:
        return None
    made = graph.combine([field, over])
    return [made, over, over]  # a norm gives its statistics as well


def _group_norm(graph: Equations, operation: Operation) -> list[Field] | None:
    tensor = operation.args[0]
    shape = tensor.shape[0], operation.args[6], -1, *tensor.shape[2:]
    field = graph.field(tensor).map(lambda t: t.reshape(shape))
    over = graph.reduce(field, range(2, field.names.ndim))
    if over is None:
        return None
    return [graph.combine([field, over]).map(lambda t: t.reshape(tensor.shape))]


def _embedding(graph: Equations, operation: Operation) -> list[Field] | None:
    table, ids = operation.args[:2]
    ids = ids[0] if isinstance(ids, (list, tuple)) and len(ids) == 1 else ids
    if not isinstance(ids, Tensor) or graph._live(ids) or not graph._is_parameter(table):
        return None if operation.name == "embedding" else _index(graph, operation)
    entries = graph.walk.entries[id(table)]
    if entries.layout.ndim != 2:
        return None
    (entries,) = entries.apply(lambda layout: layout.T[None])
    rows = torch.from_numpy(graph.use(entries, asked=True).rows)
    return [
        Field(rows.expand(operation.out.shape), mixed(graph.walk.codes(ids), 11)[..., None].expand(operation.out.shape))
    ]


def _index(graph: Equations, operation: Operation) -> list[Field] | None:
    """Take entries: those that constants tell, or tokens that inputs tell."""
    source, places = operation.args[:2]
    field, given = graph.field(source), [axis for axis, each in enumerate(places) if each is not None]
    if any(graph._live(places[axis]) or places[axis].dtype == torch.bool for axis in given):
        return None
    if all(graph.walk.codes.constant(places[axis]) for axis in given):
        return [field.map(lambda t: operation.func(t, places))]
    if any(not flat(field.names, axis) for axis in given) or _repeats(field.names):
        return None
    names = graph.settle(field.map(lambda t: t[..., None]), -1).names[..., 0]
    codes = [folded(graph.walk.codes(places[axis]).reshape(1, -1)) for axis in given]
    return [graph.windows(operation.func(names, places), code=int(folded(torch.stack(codes, 1))))]


def _pooled(graph: Equations, operation: Operation) -> list[Field] | None:
    """Windows of tokens, channel by channel."""
    field, out = graph.settle(graph.field(operation.args[0]).map(lambda t: t[..., None]), -1), operation.outputs[0]
    axes = axes_of(operation, out.ndim)
    if any(not flat(field.names, axis) for axis in axes) or _repeats(field.names):
        return None
    first: tuple[Any, ...] = (..., *[slice(1)] * len(axes), 0)
    names = field.names[first].expand(out.shape)
    return [graph.windows(names)] * len(operation.outputs)


def _padded(graph: Equations, operation: Operation) -> list[Field] | None:
    source, sizes = operation.args[:2]
    if not source.numel():
        return None
    field = graph.field(source)
    axes = [field.names.ndim - 1 - place // 2 for place, size in enumerate(sizes) if size]
    value = float(operation.args[2]) if len(operation.args) > 2 else 0.0
    places = operation.func(field.places, sizes, named(("beside", value)))
    if any(not flat(field.names, axis) for axis in axes):
        return [Field(operation.func(field.names, sizes, 0), places)]
    if _repeats(field.names):
        return None
    names = field.names
    for axis in axes:
        names = names.narrow(axis, 0, 1)
    return [Field(graph.windows(names.expand(operation.out.shape)).names, places)]


def _convolution(graph: Equations, operation: Operation) -> list[Field] | None:
    tensor, weight, *_, transposed, _, groups = operation.args[:9]
    if not graph._is_parameter(weight) or (transposed and groups > 1):
        return None
    order = (2, 1, 0) if transposed else (2, 0, 1)
    (entries,) = graph.walk.entries[id(weight)].apply(lambda layout: layout.flatten(2).permute(order))
    field = graph.settle(graph.field(tensor).map(lambda t: t.movedim(1, -1)), -1)
    if any(not flat(field.names, axis) for axis in range(field.names.ndim - 1)):
        return None
    rows = field.names[(0,) * (field.names.ndim - 1)].contiguous().numpy()
    size, width = entries.shape[1] // groups, entries.shape[2]
    made = []
    for group in range(groups):
        part = replace(entries, layout=entries.layout[:, group * size : (group + 1) * size])
        made.append(graph.apply(graph.use(part), rows[None, group * width : (group + 1) * width])[0])
    out = operation.out
    names = torch.from_numpy(np.concatenate(made)).view(-1, *[1] * (out.ndim - 2)).expand(out.shape)
    places = _tokens(names, [axis for axis in range(out.ndim) if axis != 1])
    return [Field(names, places)]


def _nothing(graph: Equations, operation: Operation) -> list[Field] | None:
    return []


STEPS: dict[str, Callable[[Equations, Operation], list[Field] | None]] = {
    **dict.fromkeys(STILL, _nothing),
    **dict.fromkeys(["_to_copy", "copy"], _copy),
    **dict.fromkeys(["mm", "bmm"], _multiply),
    **dict.fromkeys(["sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp"], _reduced),
    **dict.fromkeys(["_softmax", "_safe_softmax", "_log_softmax", "native_layer_norm"], _normalised),
    **dict.fromkeys([*RESIZED, *LARGEST, "avg_pool2d", "avg_pool3d"], _pooled),
    "native_group_norm": _group_norm,
    **dict.fromkeys(["embedding", "index"], _embedding),
    "constant_pad_nd": _padded,
    "convolution": _convolution,
}
"""What an operation makes of names and places; None where it tells all its entries apart."""


def _thin(tensor: Tensor) -> Tensor:
    """Return a tensor that is stored once along axes in which it is the same."""
    return thinned(tensor)[0].expand(tensor.shape)


def _tokens(names: Tensor, axes: Sequence[int]) -> Tensor:
    """Return places that differ along some axes."""
    shape = [n if axis in axes else 1 for axis, n in enumerate(names.shape)]
    return mixed(torch.arange(math.prod(shape)).view(shape), 3).expand(names.shape)


def _repeats(names: Tensor) -> bool:
    """Return whether one name stands at several channels, as of heads of one weight, which places alone tell apart."""
    (thin,) = thinned(names)
    known = thin[thin > 0]
    return len(known.unique()) < len(known)


def _along(beside: Sequence[Tensor], axis: int) -> bool:
    """Return whether an axis, counted from the last, is one of tokens of what stands beside."""
    found = [flat(each, axis) for each in beside if each.ndim >= -axis and each.shape[axis] > 1 and bool(each.any())]
    return bool(found) and all(found)
