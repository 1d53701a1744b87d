"""Make symmetric pairs of groups: heads on which the same group acts in the same way are one pair, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.instances import alike
from quotient_manifolds.symmetries.groups import GL, Complex, Gauge, Rows, Slot, Span, Wire
from quotient_manifolds.symmetries.names import Roles, common_path
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

_SAME = 1e-8
_FIRST = (ADAPTER, QUERY_KEY, VALUE_OUTPUT, RELU, GATED, BOTTLENECK)  # of two pairs with common numbers

Origin = tuple[int, int]
"""Number of a symmetry, and of a log-scale of a torus, -1 of a gauge."""


@dataclass(frozen=True, eq=False)
class Side:
    """Hold rows of one parameter that heads have: row c of copy g of head i is the entries first[i, g, c] + behind.

    inverse: whether A^-T acts where A acts on others. port, operation: see `Roles`.
    """

    name: str
    stored: tuple[int, ...]
    port: int
    operation: int
    inverse: bool
    first: Tensor
    behind: Tensor

    def repeats(self, other: Side) -> bool:
        """Return whether these are the entries of another, in the same role."""
        same = (self.name, self.inverse) == (other.name, other.inverse)
        return same and torch.equal(self.first, other.first) and torch.equal(self.behind, other.behind)

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the sides of heads of one pair have in common."""
        return self.name, self.operation, self.port % 2, self.inverse, tuple(self.first.shape[1:]), tuple(self.behind.tolist())


@dataclass(frozen=True, eq=False)
class Heads:
    """Hold heads on which the same group acts in the same way. nodes: of the rows. origins: whence each head is."""

    kind: str
    acts: Group
    turned: bool
    sides: tuple[Side, ...]
    nodes: Tensor
    origins: tuple[Origin, ...]

    @property
    def about(self) -> object:
        """Return what heads of one pair have in common."""
        return self.acts, self.kind, self.turned, tuple(side.key for side in self.sides)

    @property
    def start(self) -> int:
        """Return the first node."""
        return int(self.nodes.min())

    @property
    def alone(self) -> Iterator[Heads]:
        """Yield each head."""
        for k in range(len(self.origins)):
            sides = tuple(replace(side, first=side.first[k : k + 1]) for side in self.sides)
            yield replace(self, sides=sides, origins=self.origins[k : k + 1])


@dataclass(frozen=True, eq=False)
class Pairs:
    """Hold pairs, what is refused, and the origins of the heads of each pair."""

    pairs: tuple[SymmetricPair, ...]
    refused: tuple[Refused, ...]
    origins: frozenset[Origin]


def some_rows(rows: Rows, some: Tensor) -> Rows:
    """Return some of the rows."""
    if len(some) == len(rows):
        return rows
    scale, offset = (
        each[some] if isinstance(each, Tensor) and each.ndim == 2 and len(each) > 1 else each
        for each in (rows.scale, rows.offset)
    )
    return replace(rows, starts=rows.starts[some], scale=scale, offset=offset)


# ---- heads


def heads_of(gauge: Gauge, number: int, roles: Roles) -> Iterator[Heads]:
    """Yield the heads on which a gauge has all matrices, or all complex numbers; none if gains are between."""
    gauge = _unfolded(gauge)
    slots, summands = gauge.wire.slots, gauge.algebra.summands
    if not all(isinstance(algebra, (GL, Complex)) and algebra.n > 1 for _, algebra in summands):
        return
    place = torch.full((len(slots), gauge.wire.channels), -1)
    for row, slot in zip(place, slots, strict=True):
        row[slot.channels] = torch.arange(len(slot.channels))
    known = [roles.port(slot.rows, slot.use, slot.writes) for slot in slots]
    if any(each is None for each in known):
        return
    for channels, algebra in summands:
        at = place[:, channels].movedim(0, 1)  # (heads, slots, m)
        covered = (at >= 0).any(2)
        if bool(((at >= 0).all(2) != covered).any()):
            return
        for pattern in torch.unique(covered, dim=0):
            own = torch.nonzero((covered == pattern).all(1))[:, 0]
            sides, nodes = list[Side](), list[Tensor]()
            for k in torch.nonzero(pattern)[:, 0].tolist():
                slot, rows, (port, of) = slots[k], at[own, k], known[k]  # type: ignore[misc]
                units = torch.ones(rows.shape) if slot.constant is None else slot.constant[rows]
                every = [units, *(gain.at[rows].double() for gain in slot.gains)]  # the same for a head, they cancel
                side = _side(slot.rows, rows[:, None], port, not slot.covariant, roles)
                if side is None or not all(torch.allclose(u, u[:, :1], rtol=1e-9, atol=0) for u in every):
                    break
                sides.append(side)
                nodes.append(of[rows].flatten())
            else:
                acts: Group = "GL(h)" if isinstance(algebra, GL) else "GL(1, C)"
                origins = ((number, -1),) * len(own)
                yield from _heads(sides, nodes, acts, roles, origins, scale=False)


def _unfolded(gauge: Gauge) -> Gauge:
    """Return the same group on one plane, if it is that of complex numbers on several planes at once."""
    (channels, algebra), *more = gauge.algebra.summands
    if more or not isinstance(algebra, Span) or algebra.dimension != 2 or len(channels) > 1:
        return gauge
    planes, flips = alike(algebra.basis)
    lead = algebra.basis[:, planes[0][:, None], planes[0]]
    if planes.shape[1] != 2 or bool((Complex().project(lead) - lead).abs().max() > _SAME * lead.abs().max()):
        return gauge
    slots = []
    for plane, flip in zip(channels[0][planes], flips.tolist(), strict=True):
        for slot in gauge.wire.slots:
            place = (slot.channels[:, None] == plane).long()
            some = torch.nonzero(place.any(1))[:, 0]
            if len(some):
                units = None if slot.constant is None else slot.constant[some]
                gains = tuple(replace(gain, at=gain.at[some]) for gain in slot.gains)
                own = some_rows(slot.rows, some), place[some].argmax(1), slot.writes, slot.dual != flip
                slots.append(Slot(*own, units, gains, slot.use))
    return Gauge(Wire(tuple(slots), 2), Complex())


def heads_of_scales(
    parts: Sequence[tuple[Rows, Tensor, int]], origins: tuple[Origin, ...], roles: Roles
) -> Iterator[Heads]:
    """Yield single channels with a scale. parts: rows of a parameter, (n, copies) of them, and the sign of exponents."""
    sides, nodes = list[Side](), list[Tensor]()
    for rows, at, sign in parts:
        known = roles.port(rows)
        side = None if known is None else _side(rows, at[..., None], known[0], sign < 0, roles)
        if known is None or side is None:
            return
        sides.append(side)
        nodes.append(known[1][at].flatten())
    last = len(roles.walk.uses)
    written = [side for side in sides if side.port % 2 == 0 and (side.port // 2 < last or len(side.behind) > 1)]
    if not written:
        return
    if min(written, key=lambda side: side.port).inverse:
        sides = [replace(side, inverse=not side.inverse) for side in sides]
    acts: Group = "GL+(1)" if roles.has("bent", torch.cat(nodes)) else "GL(h)"
    yield from _heads(sides, nodes, acts, roles, origins, scale=True)


def _side(rows: Rows, at: Tensor, port: int, inverse: bool, roles: Roles) -> Side | None:
    """Return rows at numbers (n, g, h) as a side; None if what is behind the first entry differs."""
    places = rows.places[at.flatten()].sort(1)[0]
    first, behind = places[:, 0], places - places[:, :1]
    if bool((behind != behind[:1]).any()) or isinstance(rows.offset, Tensor) or rows.offset:
        return None
    operation = roles.operation(port)
    return Side(rows.name, rows.shape, port, operation, inverse, first.view(at.shape), behind[0])


def _heads(
    sides: Sequence[Side],
    nodes: Sequence[Tensor],
    acts: Group,
    roles: Roles,
    origins: tuple[Origin, ...],
    *,
    scale: bool,
) -> Iterator[Heads]:
    """Yield heads that have both sides; copies of rows of one parameter are put together."""
    if len({side.inverse for side in sides}) < 2:
        return
    copies: dict[object, list[Side]] = {}
    for k, side in enumerate(sides):
        if any(side.repeats(other) for other in sides[:k]):  # another use of the same entries
            continue
        copies.setdefault((side.name, side.port, side.inverse, tuple(side.behind.tolist())), []).append(side)
    whole = [replace(each[0], first=torch.cat([side.first for side in each], 1)) for each in copies.values()]
    left = {side.inverse for side, of in zip(sides, nodes, strict=True) if side.port % 2 == 0 and roles.is_left(of)}
    turned = left == {True}
    every = torch.cat([*nodes])
    kind = roles.pair([side.port for side in whole], [side.name for side in whole], every, scale)
    whole = [replace(each, first=each.first.gather(1, _ascending(each.first))) for each in whole]
    whole.sort(key=lambda each: (each.inverse ^ turned, -len(each.behind), each.port))
    yield Heads(kind, acts, turned, tuple(whole), every, origins)


def _ascending(first: Tensor) -> Tensor:
    """Return the order (n, g, h) of copies by their first entries."""
    return first[:, :, :1].argsort(1).expand(first.shape)


# ---- pairs


def pairs_of(heads: Iterable[Heads], roles: Roles, unreached: Mapping[str, int]) -> Pairs:
    """Return the pairs of heads, and what is refused. unreached: by parameter how many directions of inputs never occur.

    Of two pairs with entries in common the one that comes first by its kind is kept.
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
    """Return heads of one pair as one."""
    sides = zip(*(each.sides for each in group), strict=True)
    whole = tuple(replace(each[0], first=torch.cat([side.first for side in each])) for each in sides)
    origins = tuple(origin for each in group for origin in each.origins)
    return replace(group[0], sides=whole, nodes=torch.cat([each.nodes for each in group]), origins=origins)


def _pair(heads: Heads, name: str) -> SymmetricPair | None:
    """Return the pair of these heads, None if the numbers of one of its sides stand in no order that a view has."""
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
    """Return the view of all rows (heads, g, h), or one for each g."""
    whole = StridedView.of(side.name, side.stored, first, side.behind)
    if whole is not None:
        return [whole]
    copies = [StridedView.of(side.name, side.stored, each, side.behind) for each in first.split(1, 1)]
    return None if None in copies else [each for each in copies if each is not None]


def _name(heads: Heads, attention: Sequence[str]) -> str:
    """Return the path of the module that has the parameters, and the kind.

    Queries and keys are named by the module that has values and their output, too.
    """
    path = common_path(side.name for side in heads.sides)
    if heads.kind == QUERY_KEY:
        alone = len(attention) == 1
        around = [each for each in attention if (f"{path}.".startswith(f"{each}.") if each else alone)]
        path = max(around, key=len) if around else path
    return f"{path} {heads.kind}".strip() + " rotary" * (heads.acts == "GL(1, C)")


def _attention(merged: Sequence[Heads], roles: Roles) -> list[str]:
    """Return the modules that have values and their output, of which no group may be left."""
    mixing = [each for each in merged if each.kind in (VALUE_OUTPUT, GATED) and roles.has("mixed", each.nodes)]
    found = [common_path(side.name for side in each.sides) for each in mixing]
    return [*found, *roles.mixers(torch.cat([each.nodes for each in merged]) if merged else None)]


def _told_apart(pairs: Sequence[SymmetricPair]) -> list[SymmetricPair]:
    """Give each pair a name of its own: by what the paths of its parameters have in common, or by a number."""
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


def _obstacle(pair: SymmetricPair, owned: Mapping[str, Sequence[SymmetricPair]], unreached: Mapping[str, int]) -> str:
    """Say why a pair may not be moved; "" if it may."""
    if pair.acts == "GL(h)" and pair.h > 1:
        for factor in (pair.G, pair.H):
            if sum(view.rows - unreached.get(view.name, 0) for view in factor.views) < pair.h:
                return "the middle is wider than an end, so the factors have no full column rank: no manifold"
    for name in pair.names:
        own, count = _held(pair, name)
        if count > int(own.sum()):
            return f"parameter {name!r} is used twice in it (see the reparameterizations)"
        for other in owned.get(name, ()):
            if bool((own & _held(other, name)[0]).any()):
                return f"parameter {name!r} is shared with {other.name!r} (see the reparameterizations)"
    return ""


def _held(pair: SymmetricPair, name: str) -> tuple[Tensor, int]:
    """Say of the numbers of a parameter whether they are in the views of a pair, and how many numbers these have."""
    views = [view for view in pair.views if view.name == name]
    held = torch.zeros(views[0].numel, dtype=torch.bool)
    for view in views:
        held[view.places.flatten()] = True
    return held, sum(view.places.numel() for view in views)
