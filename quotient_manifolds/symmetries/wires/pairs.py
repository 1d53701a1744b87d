"""Make symmetric pairs, and translations of their biases, of what a walk leaves free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

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
from quotient_manifolds.symmetries.translations import Translation
from quotient_manifolds.symmetries.wires.biases import translations_of
from quotient_manifolds.symmetries.wires.blocks import Block
from quotient_manifolds.symmetries.wires.channels import Bundle, Part, find_bundles, parts_of
from quotient_manifolds.symmetries.wires.labels import Labels
from quotient_manifolds.symmetries.wires.relations import Component
from quotient_manifolds.symmetries.wires.walk import Array, Walk

_FIRST = (ADAPTER, QUERY_KEY, VALUE_OUTPUT, RELU, GATED, BOTTLENECK)  # of two pairs with common numbers


@dataclass(frozen=True, eq=False)
class Pairs:
    """Hold pairs, translations of their biases and what is refused, and the blocks and scales that pairs use up."""

    pairs: tuple[SymmetricPair, ...] = ()
    translations: tuple[Translation, ...] = ()
    refused: tuple[Refused, ...] = ()
    blocks: tuple[Block, ...] = ()
    scales: tuple[tuple[Component, Array], ...] = ()
    """Components of log-scales, each with the solution, on its unknowns, that a pair of neurons has."""


@dataclass(eq=False)
class Found:
    """Hold a pair, the bundles of which it is made, a head each, and the views of both sides with their parts."""

    pair: SymmetricPair
    bundles: list[Bundle]
    views: tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]]


def pairs_of(walk: Walk) -> Pairs:
    """Return the pairs of a model, the translations of their biases, what is refused, and what they use up.

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
    owned: dict[str, list[tuple[str, Array]]] = {}
    for each in sorted(found, key=lambda each: _FIRST.index(each.pair.kind)):
        reason = _obstacle(each, owned)
        if reason:
            refused.append(Refused(each.pair.name, each.pair.kind, reason))
            continue
        kept.append(each)
        for name, entries in _entries(each):
            owned.setdefault(name, []).append((each.pair.name, entries))
    kept = [each for each in found if each in kept]
    used = [bundle for each in kept for bundle in each.bundles]
    return Pairs(
        tuple(each.pair for each in kept),
        tuple(translations_of(walk, [(each.pair, each.views) for each in kept])),
        tuple(dict.fromkeys(refused)),
        tuple(each.of for each in used if isinstance(each.of, Block)),
        tuple((each.of, _solution(each)) for each in used if isinstance(each.of, Component)),
    )


def _solution(bundle: Bundle) -> Array:
    vector = np.zeros(len(bundle.of.unknowns))
    vector[np.searchsorted(bundle.of.unknowns, bundle.nodes)] = bundle.sign
    return vector


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
    kind, turned = labels.kind(group[0]), labels.turned(group[0])
    sides: tuple[list[tuple[Part, StridedView]], list[tuple[Part, StridedView]]] = ([], [])
    order: Array | None = None  # of channels in each head
    heads: Array | None = None
    for keys in zip(*(labels.places(each) for each in group), strict=True):
        own, side = [parts[number] for number, _ in keys], keys[0][1] ^ turned
        part = own[0]
        if any(not np.array_equal(part.rows, each.rows) for each in own[1:]):
            return None
        first = np.stack(
            [each.first[np.array(one.places[key])] for each, one, key in zip(own, group, keys, strict=True)]
        ).swapaxes(1, 2)  # (heads, g, h)
        order = first[:, 0].argsort(1) if order is None else order
        first = np.take_along_axis(first, order[:, None], 2)
        heads = first[:, 0, 0].argsort() if heads is None else heads
        views = _views(walk, part, first[heads])
        if views is None:
            return None
        sides[side].extend((part, view) for view in views)
    views_of = sides[::-1] if kind == ADAPTER else sides
    G, H = (Factor(tuple(view for _, view in side)) for side in views_of)
    acts: Group = "GL(1, C)" if group[0].acts == "complex" else "GL+(1)" if labels.positive(group[0]) else "GL(h)"
    name = labels.name(group[0], kind) + " rotary" * (acts == "GL(1, C)")
    return Found(SymmetricPair(name, kind, G, H, acts), [group[i] for i in heads.tolist()], sides)


def _views(walk: Walk, part: Part, first: Array) -> list[StridedView] | None:
    """Return the view of all rows (heads, g, h), or one for each g."""
    numel, rows = walk.parameters[part.name].numel(), torch.from_numpy(part.rows)

    def view(some: Array) -> StridedView | None:
        return StridedView.of(part.name, numel, torch.from_numpy(np.ascontiguousarray(some)), rows)

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


def _obstacle(found: Found, owned: dict[str, list[tuple[str, Array]]]) -> str:
    """Say why a pair may not be moved; "" if it may."""
    pair = found.pair
    if pair.h > min(pair.n, pair.m) and pair.acts == "GL(h)":
        return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    own: dict[str, list[Array]] = {}
    for name, entries in _entries(found):
        own.setdefault(name, []).append(entries)
    for name, several in own.items():
        if sum(map(len, several)) > len(np.unique(np.concatenate(several))):
            return f"parameter {name!r} plays two parts"
        for other, theirs in owned.get(name, []):
            if any(_overlap(entries, theirs) for entries in several):
                return f"parameter {name!r} plays two parts: it is in {other!r} too"
    return ""


def _overlap(one: Array, other: Array) -> bool:
    if one.max() < other.min() or other.max() < one.min():
        return False
    return bool(np.isin(one, other).any())


def _entries(found: Found) -> Iterator[tuple[str, Array]]:
    """Yield which entries of which parameters the views of a pair are."""
    for _, view in (*found.views[0], *found.views[1]):
        numbers = np.array([view.offset])
        for size, stride in (part for axis in view.axes for part in axis):
            numbers = (numbers[:, None] + np.arange(size) * stride).reshape(-1)
        yield view.name, numbers
