"""Build symmetric pairs from heads: heads on which the same group acts in the same way form one batched pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups import Rows
from quotient_manifolds.symmetries.heads import Heads, Origin, Side
from quotient_manifolds.symmetries.names import Roles, common_path
from quotient_manifolds.symmetries.pair import (
    ADAPTER,
    BOTTLENECK,
    GATED,
    QUERY_KEY,
    RELU,
    VALUE_OUTPUT,
    Factor,
    SymmetricPair,
)
from quotient_manifolds.symmetries.strided_view import StridedView
from quotient_manifolds.symmetries.symmetries import Refused

_FIRST = (ADAPTER, QUERY_KEY, VALUE_OUTPUT, RELU, GATED, BOTTLENECK)  # the earlier kind wins if two pairs share entries


@dataclass(frozen=True, eq=False)
class Pairs:
    """Store pairs, refused candidates, and the origins of all heads that are in a pair."""

    pairs: tuple[SymmetricPair, ...]
    refused: tuple[Refused, ...]
    origins: frozenset[Origin]


def pairs_of(heads: Iterable[Heads], roles: Roles, unreached: Sequence[tuple[Rows, int]]) -> Pairs:
    """Return the pairs that heads form, and the refused candidates.

    unreached: rows of parameters, with the number of input directions that never occur. If two pairs share entries,
    the pair whose kind comes first is kept.
    """
    groups: dict[object, list[Heads]] = {}
    for each in sorted(heads, key=lambda each: each.start):
        groups.setdefault(each.about, []).append(each)
    merged = [_merged(group) for group in groups.values()]
    attention = _attention(merged, roles)
    found, refused = list[tuple[SymmetricPair, Heads]](), list[Refused]()
    for several in merged:
        name = _name(several, attention)
        made = _pair(several, name)
        one = [(made, several)] if made is not None else []
        alone = several.alone if len(several.origins) > 1 and made is None else ()
        one += [(pair, each) for each in alone if (pair := _pair(each, name)) is not None]
        found += one
        if not one:
            refused.append(Refused(name, several.kind, "its numbers stand in no order that a view has"))
    found = [(pair, each[1]) for pair, each in zip(_told_apart([pair for pair, _ in found]), found, strict=True)]
    kept, owned = set[int](), dict[str, list[SymmetricPair]]()
    for k, (pair, _) in sorted(enumerate(found), key=lambda each: _FIRST.index(each[1][0].kind)):
        if reason := _obstacle(pair, owned, unreached):
            refused.append(Refused(pair.name, pair.kind, reason))
            continue
        kept.add(k)
        for name in pair.names:
            owned.setdefault(name, []).append(pair)
    origins = frozenset(origin for k in kept for origin in found[k][1].origins)
    return Pairs(tuple(found[k][0] for k in sorted(kept)), tuple(dict.fromkeys(refused)), origins)


def _merged(group: Sequence[Heads]) -> Heads:
    """Concatenate the heads of one pair."""
    sides = zip(*(each.sides for each in group), strict=True)
    whole = tuple(replace(each[0], first=torch.cat([side.first for side in each])) for each in sides)
    origins = tuple(origin for each in group for origin in each.origins)
    return replace(group[0], sides=whole, nodes=torch.cat([each.nodes for each in group]), origins=origins)


def _pair(heads: Heads, name: str) -> SymmetricPair | None:
    """Return the pair of these heads; None unless the entries of every side have an offset and strides."""
    first = heads.sides[0].first
    columns, order = first[:, 0].argsort(1), first[:, 0].amin(1).argsort()
    factors: tuple[list[StridedView], list[StridedView]] = ([], [])
    for side in heads.sides:
        views = _views(side, side.first.gather(2, columns[:, None].expand(side.first.shape))[order])
        if views is None:
            return None
        factors[side.inverse ^ heads.turned].extend(views)
    G, H = (Factor(tuple(each)) for each in (factors[::-1] if heads.kind == ADAPTER else factors))
    return SymmetricPair(name, heads.kind, G, H, heads.acts)


def _views(side: Side, first: Tensor) -> list[StridedView] | None:
    """Return one view of all rows (heads, g, h), or else one for each g; None if neither exists."""
    whole = StridedView.of(side.name, side.stored, first, side.behind)
    if whole is not None:
        return [whole]
    copies = [StridedView.of(side.name, side.stored, each, side.behind) for each in first.split(1, 1)]
    return None if None in copies else [each for each in copies if each is not None]


def _name(heads: Heads, attention: Sequence[str]) -> str:
    """Return the path of the innermost module that contains the parameters, and the kind.

    Queries and keys are named after the module that also contains the values and the output projection.
    """
    path = common_path(side.name for side in heads.sides)
    if heads.kind == QUERY_KEY:
        alone = len(attention) == 1
        around = [each for each in attention if (f"{path}.".startswith(f"{each}.") if each else alone)]
        path = max(around, key=len) if around else path
    return f"{path} {heads.kind}".strip() + " rotary" * (heads.acts == "GL(1, C)")


def _attention(merged: Sequence[Heads], roles: Roles) -> list[str]:
    """Return the modules with values and an output projection, even if no group of them was found."""
    mixing = [each for each in merged if each.kind in (VALUE_OUTPUT, GATED) and roles.has("mixed", each.nodes)]
    found = [common_path(side.name for side in each.sides) for each in mixing]
    return [*found, *roles.mixers(torch.cat([each.nodes for each in merged]) if merged else None)]


def _told_apart(pairs: Sequence[SymmetricPair]) -> list[SymmetricPair]:
    """Make the names of pairs unique by adding a path component that its parameters share, or a number."""
    names, told = set[str](), list[SymmetricPair]()
    for pair in pairs:
        kind = pair.kind + " rotary" * (pair.acts == "GL(1, C)")
        place = pair.name.removesuffix(kind).rstrip()
        within = [name.removeprefix(f"{place}.").split(".")[:-1] for name in pair.names]
        common = [part for part in within[0] if all(part in others for others in within)]
        free = (f"{place} {label} {kind}".strip() for label in (*common, *range(2, len(pairs) + 2)))
        name = pair.name if pair.name not in names else next(name for name in free if name not in names)
        names.add(name)
        told.append(replace(pair, name=name))
    return told


def _obstacle(
    pair: SymmetricPair, owned: Mapping[str, Sequence[SymmetricPair]], unreached: Sequence[tuple[Rows, int]]
) -> str:
    """Return the reason why a pair is refused (low rank, or shared entries); "" if it is not."""
    if pair.acts == "GL(h)" and pair.h > 1:
        for factor in (pair.G, pair.H):
            if sum(view.rows - _unreached(view, unreached) for view in factor.views) < pair.h:
                return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    for name in pair.names:
        own, count = _held(pair, name)
        if count > int(own.sum()):
            return f"parameter {name!r} is used twice in it (see the reparameterizations)"
        for other in owned.get(name, ()):
            if bool((own & _held(other, name)[0]).any()):
                return f"parameter {name!r} is shared with {other.name!r} (see the reparameterizations)"
    return ""


def _unreached(view: StridedView, unreached: Sequence[tuple[Rows, int]]) -> int:
    """Return the number of input directions of a view's entries that never occur."""
    mine = [(rows, count) for rows, count in unreached if rows.name == view.name]
    return max((count for rows, count in mine if bool(rows.touched[view.places.flatten()].any())), default=0)


def _held(pair: SymmetricPair, name: str) -> tuple[Tensor, int]:
    """Return a mask of the entries of a parameter that a pair views, and their number counted with multiplicity."""
    views = [view for view in pair.views if view.name == name]
    held = torch.zeros(views[0].numel, dtype=torch.bool)
    for view in views:
        held[view.places.flatten()] = True
    return held, sum(view.places.numel() for view in views)
