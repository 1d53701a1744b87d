"""Make symmetric pairs of what a walk leaves free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.symmetries.pair import (
    ADAPTER,
    BOTTLENECK,
    GATED,
    QUERY_KEY,
    RELU,
    VALUE_OUTPUT,
    Factor,
    Group,
    SymmetricPair,
)
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.wires.channels import Bundle, Part, find_bundles, parts_of
from quotient_manifolds.symmetries.wires.constants import At, Constants, unreached_basis
from quotient_manifolds.symmetries.wires.labels import Labels
from quotient_manifolds.symmetries.wires.linear_algebra import Array
from quotient_manifolds.symmetries.wires.nodes import FIXED
from quotient_manifolds.symmetries.wires.uses import Linear
from quotient_manifolds.symmetries.wires.walk import Walk

_FIRST = (ADAPTER, QUERY_KEY, VALUE_OUTPUT, RELU, GATED, BOTTLENECK)  # of two pairs with common numbers


@dataclass(frozen=True, eq=False)
class Pairs:
    """Hold pairs, what is refused, and the channels that they use up."""

    pairs: tuple[SymmetricPair, ...] = ()
    refused: tuple[Refused, ...] = ()
    bundles: tuple[Bundle, ...] = ()


@dataclass(eq=False)
class Found:
    """Hold a pair, the bundles of which it is made, a head each, and the views of both sides with their parts."""

    pair: SymmetricPair
    bundles: list[Bundle]
    views: tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]]


def pairs_of(walk: Walk, constants: Constants) -> Pairs:
    """Return the pairs of a model, what is refused, and what they use up.

    Channels on which a group acts are a pair if they stand in rows and columns of parameters alone. Of two pairs with
    numbers in common the one that comes first by its kind is kept.
    """
    parts = parts_of(walk)
    bundles = find_bundles(walk, parts)
    labels = Labels(walk, parts, bundles)
    found, refused = list[Found](), list[Refused]()
    for group in _alike(bundles, labels):
        made = _pairs(walk, parts, group, labels)
        found += made
        if not made:
            kind = labels.kind(group[0])
            why = "its numbers stand in no order that a view has"
            refused.append(Refused(labels.name(group[0], kind), kind, why))
    _tell_apart(found)
    kept: list[Found] = []
    one_key, idle = _of_one_key(walk), list[Found]()
    owned: dict[str, list[Found]] = {}
    for each in sorted(found, key=lambda each: _FIRST.index(each.pair.kind)):
        if each.pair.kind == QUERY_KEY and any(one_key[bundle.nodes].any() for bundle in each.bundles):
            reason = "softmax over one key is always 1: give inputs of at least 2 tokens"
            idle.append(each)
        else:
            reason = _obstacle(walk, constants, each, owned)
        if reason:
            refused.append(Refused(each.pair.name, each.pair.kind, reason))
            continue
        kept.append(each)
        for name in dict.fromkeys(each.pair.names):
            owned.setdefault(name, []).append(each)
    kept = [each for each in found if each in kept]
    return Pairs(
        tuple(each.pair for each in kept),
        tuple(dict.fromkeys(refused)),
        tuple(bundle for each in (*kept, *idle) for bundle in each.bundles),
    )


def _alike(bundles: Sequence[Bundle], labels: Labels) -> list[list[Bundle]]:
    """Put bundles together that are heads of one pair: they stand in the same parts in the same way."""
    groups: dict[object, list[Bundle]] = {}
    for bundle in sorted(bundles, key=lambda each: each.start):
        groups.setdefault(labels.about(bundle), []).append(bundle)
    return [group for group in groups.values() if len({side for _, side in group[0].places}) == 2]


def _pairs(walk: Walk, parts: list[Part], group: list[Bundle], labels: Labels) -> list[Found]:
    """Return the pair of several heads, or one for each if no view has them all."""
    together = _pair(walk, parts, group, labels)
    if together is not None:
        return [together]
    alone = group if len(group) > 1 else []
    return [found for each in alone if (found := _pair(walk, parts, [each], labels)) is not None]


def _pair(walk: Walk, parts: list[Part], group: list[Bundle], labels: Labels) -> Found | None:
    """Return the pair of these heads, None if the numbers of one of its parts stand in no order that a view has."""
    kind, turned = labels.kind(group[0]), labels.turned(group[0])
    sides: tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]] = ([], [])
    keys = list(zip(*(labels.places(each) for each in group), strict=True))
    first = [_first(parts, group, each) for each in keys]  # (heads, g, h)
    columns = first[0][:, 0].argsort(1)
    heads = first[0][:, 0].min(1).argsort()
    for key, numbers in zip(keys, first, strict=True):
        own = [parts[number] for number, _ in key]
        views = _views(walk, own, np.take_along_axis(numbers, columns[:, None], 2)[heads])
        if views is None:
            return None
        sides[key[0][1] ^ turned].extend((own[0], view) for view in views)
    G, H = (Factor(tuple(view for _, view in side)) for side in (sides[::-1] if kind == ADAPTER else sides))
    acts: Group = "GL(1, C)" if group[0].acts == "complex" else "GL+(1)" if labels.positive(group[0]) else "GL(h)"
    name = labels.name(group[0], kind) + " rotary" * (acts == "GL(1, C)")
    return Found(SymmetricPair(name, kind, G, H, acts), [group[i] for i in heads.tolist()], sides)


def _first(parts: list[Part], group: list[Bundle], keys: Sequence[tuple[int, bool]]) -> Array:
    """Return the first entries (heads, g, h) of rows: g of them for each head."""
    rows = [parts[key[0]].first[bundle.places[key]] for bundle, key in zip(group, keys, strict=True)]
    return np.stack(rows).swapaxes(1, 2)


def _views(walk: Walk, parts: Sequence[Part], first: Array) -> list[StridedView] | None:
    """Return the view of all rows (heads, g, h), or one for each g."""
    part, rows = parts[0], parts[0].rows
    others = {id(each.rows): each.rows for each in parts if each.rows is not None}
    if rows is None or not all(np.array_equal(rows, each) for each in others.values()):
        return None
    stored, behind = tuple(walk.shapes[part.name]), torch.from_numpy(rows)

    def view(some: Array) -> StridedView | None:
        return StridedView.of(part.name, stored, torch.from_numpy(np.ascontiguousarray(some)), behind)

    whole = view(first)
    found = [whole] if whole is not None else [view(first[:, [g]]) for g in range(first.shape[1])]
    return None if None in found else [each for each in found if each is not None]


def _tell_apart(found: Sequence[Found]) -> None:
    """Give each pair a name of its own: by what the paths of its parameters have in common, or by a number."""
    names: set[str] = set()
    for each in found:
        kind = each.pair.kind + " rotary" * (each.pair.acts == "GL(1, C)")
        place = each.pair.name.removesuffix(kind).rstrip()
        within = [name.removeprefix(f"{place}.").split(".")[:-1] for name in each.pair.names]
        common = [part for part in within[0] if all(part in others for others in within)]
        free = (f"{place} {label} {kind}".strip() for label in (*common, *range(2, len(found) + 2)))
        name = each.pair.name if each.pair.name not in names else next(name for name in free if name not in names)
        names.add(name)
        each.pair = replace(each.pair, name=name)


def _of_one_key(walk: Walk) -> Array:
    """Say of channels whether they are of queries and keys of which softmax makes 1, as each query has one key."""
    root, found = walk.turns.find(np.arange(walk.count))[0], np.zeros(walk.count, bool)
    if walk.single:
        scores = root[np.concatenate(walk.single)]
        for flow in walk.flows:
            if flow.kind == "dot" and np.isin(root[flow.outs], scores).all():
                found[np.concatenate(flow.terms)] = True
        found[: FIXED + 1] = False
    return found


def _obstacle(walk: Walk, constants: Constants, found: Found, owned: dict[str, list[Found]]) -> str:
    """Say why a pair may not be moved; "" if it may."""
    pair = found.pair
    if pair.acts == "GL(h)" and pair.h > 1:
        at = constants.at(walk.parameters)
        for side in found.views:
            if sum(_reached(at, part, view) for part, view in side) < pair.h:
                return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    for name in dict.fromkeys(pair.names):
        own, count = _held(walk, found, name)
        if count > int(own.sum()):
            return f"parameter {name!r} is used twice in it (see the reparameterizations)"
        for other in owned.get(name, ()):
            if (own & _held(walk, other, name)[0]).any():
                return f"parameter {name!r} is shared with {other.pair.name!r} (see the reparameterizations)"
    return ""


def _reached(at: At, part: Part, view: StridedView) -> int:
    """Return the number of rows of a factor that count: of a weight those that its inputs can tell apart."""
    linear = part.source
    if not isinstance(linear, Linear) or part.reads or linear.table:
        return view.rows
    return view.rows - unreached_basis(at, [linear]).shape[1]


def _held(walk: Walk, found: Found, name: str) -> tuple[Tensor, int]:
    """Say of the numbers of a parameter whether they are in the views of a pair, and how many numbers these have."""
    held, views = torch.zeros(walk.shapes[name].numel(), dtype=torch.bool), (*found.views[0], *found.views[1])
    own = Factor(tuple(view for _, view in views if view.name == name))
    own.write({name: held}, torch.ones(found.pair.heads, own.rows, found.pair.h, dtype=torch.bool))
    return held, found.pair.heads * own.rows * found.pair.h
