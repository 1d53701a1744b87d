"""Rules of operations that move entries and change none, and of sources of zeros and ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quotient_manifolds.symmetries.wires.codes import viewed
from quotient_manifolds.symmetries.wires.nodes import FIXED, ZERO, flat
from quotient_manifolds.symmetries.wires.record import Operation, tensors
from quotient_manifolds.symmetries.wires.rules.linear import lookup
from quotient_manifolds.symmetries.wires.rules.reductions import pool
from quotient_manifolds.symmetries.wires.rules.sums import total
from quotient_manifolds.symmetries.wires.walk import Walk, rule

PICKS = ("slice", "select", "split", "split_with_sizes", "unbind", "roll", "flip", "unfold")
SCORES = "group", "level", "pending", "normalised", "place"


@rule("view")
def view(walk: Walk, operation: Operation) -> None:
    """Move labels as values are moved. Where tokens are dropped or moved, the channels it happens to are marked."""
    name, args, parts = operation.name, operation.args, _parts_of_tokens(walk, operation)
    if name in ("cat", "slice_scatter", "select_scatter"):
        kept = {}
        for place, part in enumerate(operation.inputs):
            axes = [] if name == "cat" or part.ndim < args[0].ndim else [_assigned_axis(operation)]
            copy = walk.nth(walk.label(part), axes) if axes else None
            if (place in parts or copy is not None) and id(part) not in kept:
                kept[id(part)] = walk.labels[id(part)]
                walk.labels[id(part)] = walk.moved(kept[id(part)], place, copy=copy)
        made = viewed(operation, walk.label)
        walk.labels.update(kept)
    else:
        made = [
            walk.moved(label, place, copy=copy) if place in parts or copy is not None else label
            for place, (label, copy) in enumerate(
                zip(viewed(operation, walk.label), _picked(walk, operation), strict=False)
            )
        ]
    for out, label in zip(operation.outputs, made, strict=False):
        walk.put(out, label)
    source = args[0]
    if name in ("slice", "split", "split_with_sizes") and not parts:
        axis = _axes(operation)[0] % source.ndim
        for out in operation.outputs:
            if out.shape[axis] == 1 < source.shape[axis]:
                walk.notes["single", id(out)] = axis  # one of several channels, and no token
    if isinstance(source, Tensor):
        for kind in SCORES:
            if (kind, id(source)) in walk.notes:
                _carry(walk, kind, operation)


def _picked(walk: Walk, operation: Operation) -> Sequence[Tensor | None]:
    """Return for entries of what is picked which of its tokens each channel is of, where these stand along one axis."""
    source, axes = operation.args[0], _axes(operation)
    whole = operation.name == "slice" and operation.out.shape == source.shape
    copy = walk.nth(walk.label(source), axes) if axes and not whole else None
    if copy is None:
        return [None] * len(operation.outputs)
    return tensors(operation.func(copy, *operation.args[1:], **operation.kwargs))


def _axes(operation: Operation) -> list[int]:
    """Return the axes along which an operation picks or moves entries."""
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    if name == "diagonal":
        return [int(args[place] if len(args) > place else kwargs.get(f"dim{place - 1}", place - 2)) for place in (2, 3)]
    if name not in PICKS:
        return []
    where = {"split": 2, "split_with_sizes": 2, "roll": 2}.get(name, 1)
    axes = args[where] if len(args) > where else kwargs.get("dim", [] if name == "roll" else 0)
    return [axes] if isinstance(axes, int) else axes or [*range(args[0].ndim)]


def _carry(walk: Walk, kind: str, operation: Operation) -> None:
    found = walk.notes[kind, id(operation.args[0])]
    if kind in ("pending", "normalised"):
        for out in operation.outputs:
            walk.notes[kind, id(out)] = found
        return
    if len(operation.inputs) == 1:
        for out, part in zip(operation.outputs, viewed(operation, lambda _: found), strict=False):
            walk.notes[kind, id(out)] = part


def _parts_of_tokens(walk: Walk, operation: Operation) -> set[int]:
    """Return the places of inputs, of cat, or else of outputs, whose tokens are moved, dropped or put beside others."""
    name, args = operation.name, operation.args
    if axes := _axes(operation):
        label = walk.label(args[0])
        for axis in axes:
            if label.shape[axis] > 1 and walk.tokens(label, axis):
                whole = name == "slice" and operation.out.shape[axis] == label.shape[axis]
                return set() if whole else set(range(len(operation.outputs)))
    if name == "cat":
        axis = args[1] if len(args) > 1 else 0
        return {
            place
            for place, part in enumerate(args[0])
            if part.shape != operation.out.shape  # beside something that is not empty
            and part.numel()
            and walk.moving(part)
            and walk.notes.get(("single", id(part))) != axis % part.ndim
            and walk.tokens(walk.label(part), axis)
        }
    if name in ("slice_scatter", "select_scatter") and _assigns_tokens(walk, operation):
        return {place for place, part in enumerate(operation.inputs) if walk.moving(part)}
    return set()


def _assigned_axis(operation: Operation) -> int:
    return int(operation.args[2] if len(operation.args) > 2 else operation.kwargs.get("dim", 0))


def _assigns_tokens(walk: Walk, operation: Operation) -> bool:
    """Return whether what is assigned is at some of the tokens, not at some of the channels or at all of both."""
    base, part = operation.args[:2]
    axis = _assigned_axis(operation)
    if part.ndim == base.ndim and part.shape[axis] == base.shape[axis]:
        return False
    told = [t for t in (base, part) if t.ndim == base.ndim and t.shape[axis] > 1 and walk.moving(t)]
    return not told or any(walk.tokens(walk.label(t), axis) for t in told)


@rule("_to_copy")
def to_copy(walk: Walk, operation: Operation) -> None:
    source = operation.args[0]
    walk.put(operation.out, walk.label(source))
    for kind in SCORES:
        if (kind, id(source)) in walk.notes:
            walk.notes[kind, id(operation.out)] = walk.notes[kind, id(source)]


@rule("zeros_like", "new_zeros", "new_empty", "empty_like")
def zeros(walk: Walk, operation: Operation) -> None:
    walk.put(operation.out, torch.zeros((), dtype=torch.long).expand(operation.out.shape))


@rule("ones_like", "full_like", "new_ones", "new_full")
def ones(walk: Walk, operation: Operation) -> None:
    walk.settle(operation)


@rule("constant_pad_nd")
def pad(walk: Walk, operation: Operation) -> None:
    """Zeros beside tokens are no constant: the channels that get them have nodes of their own."""
    source, sizes = operation.args[:2]
    value = operation.args[2] if len(operation.args) > 2 else 0
    label = walk.label(source)
    if not any(sizes):
        walk.put(operation.out, label)
        return
    cut = [label.ndim - 1 - place // 2 for place, size in enumerate(sizes) if size < 0]
    made = walk.moved(label, kind="number", copy=walk.nth(label, cut) if cut else None)
    walk.put(operation.out, operation.func(made, sizes, FIXED if value else ZERO))


@rule("im2col")
def im2col(walk: Walk, operation: Operation) -> None:
    """Put the tokens of each window beside each other, as kinds of one token, and zeros where there are none."""
    source, *sizes = operation.args
    label = walk.label(source)
    if any(not walk.tokens(label, axis) for axis in (-2, -1)):
        walk.opaque(operation)
        return
    made = walk.moved(label, kind="number" if any(sizes[2]) else "token")
    walk.put(operation.out, operation.func(made.double(), *sizes).long())


@rule("index_add")
def index_add(walk: Walk, operation: Operation) -> None:
    """Add tokens to some of others: to which of them depends on the inputs."""
    tensor, axis, _, added = operation.args[:4]
    label = walk.label(added)
    if not walk.tokens(walk.label(tensor), axis) or not flat(label, axis):
        walk.opaque(operation)
        return
    some = torch.empty(tensor.shape, device="meta")
    walk.notes["kept", walk.at] = some
    walk.put(some, walk.moved(label.narrow(axis, 0, 1), kind="number").expand(tensor.shape))
    total(walk, operation.out, [(tensor, 1.0), (some, float(operation.kwargs.get("alpha", 1.0)))])


@rule("index")
def index(walk: Walk, operation: Operation) -> None:
    source, places = operation.args[:2]
    if id(source) in walk.entries and len(places) == 1 and places[0].dtype != torch.bool:
        lookup(walk, source, places[0], operation.out)
        return
    label = walk.label(source)
    given = [axis for axis, each in enumerate(places) if each is not None]
    known = all(walk.codes.constant(places[axis]) for axis in given) or all(walk.tokens(label, axis) for axis in given)
    if not known or any(places[axis].dtype == torch.bool for axis in given):
        walk.opaque(operation)
        return
    chosen = [axis for axis in given if not walk.codes.constant(places[axis]) and not flat(label, axis)]
    label = pool(walk, label, chosen, any_of=True).expand(label.shape) if chosen else label
    made, copy = operation.func(label, places), walk.nth(label, given)
    copy = None if copy is None else operation.func(copy, places)
    picked = copy is not None or any(walk.tokens(label, axis) for axis in given)
    walk.put(operation.out, walk.moved(made, copy=copy) if picked else made)
