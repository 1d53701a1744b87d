"""Find heads: sets of channels on which all matrices of a size act, through rows and columns of weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.instances import alike
from quotient_manifolds.symmetries.groups import GL, Complex, Gauge, Rows, Slot, Span, Wire
from quotient_manifolds.symmetries.names import Roles, row_keys
from quotient_manifolds.symmetries.pair import (
    Group,
)

_SAME = 1e-8
Origin = tuple[int, int]
"""The number of a symmetry, and the number of a log-scale if it is a torus, -1 if it is a gauge."""


@dataclass(frozen=True, eq=False)
class Side:
    """Store rows of one parameter by heads: row c of copy g of head i has the entries first[i, g, c] + behind.

    inverse: whether A^-T acts on these rows instead of A. port, operation: their numbers, see `Roles`.
    """

    name: str
    stored: tuple[int, ...]
    port: int
    operation: int
    inverse: bool
    first: Tensor
    behind: Tensor

    def repeats(self, other: Side) -> bool:
        """Return whether both sides have the same entries, acted on in the same way."""
        same = (self.name, self.inverse) == (other.name, other.inverse)
        return same and torch.equal(self.first, other.first) and torch.equal(self.behind, other.behind)

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for the sides of all heads of one pair."""
        return (
            self.name,
            self.operation,
            self.port % 2,
            self.inverse,
            tuple(self.first.shape[1:]),
            tuple(self.behind.tolist()),
        )


@dataclass(frozen=True, eq=False)
class Heads:
    """Store heads on which the same group acts in the same way.

    nodes: the nodes (channels of one tensor) of all rows. origins: the symmetry in which each head was found.
    """

    kind: str
    acts: Group
    turned: bool
    sides: tuple[Side, ...]
    nodes: Tensor
    origins: tuple[Origin, ...]

    @property
    def about(self) -> object:
        """Return a key that is equal for all heads of one pair."""
        return self.acts, self.kind, self.turned, tuple(side.key for side in self.sides)

    @property
    def start(self) -> int:
        """Return the smallest node."""
        return int(self.nodes.min())

    @property
    def alone(self) -> Iterator[Heads]:
        """Yield each head."""
        for k in range(len(self.origins)):
            sides = tuple(replace(side, first=side.first[k : k + 1]) for side in self.sides)
            yield replace(self, sides=sides, origins=self.origins[k : k + 1])


def some_rows(rows: Rows, some: Tensor) -> Rows:
    """Return some of the rows."""
    if len(some) == len(rows):
        return rows
    scale, offset = (
        each[some] if isinstance(each, Tensor) and each.ndim == 2 and len(each) > 1 else each
        for each in (rows.scale, rows.offset)
    )
    return replace(rows, starts=rows.starts[some], scale=scale, offset=offset)


def heads_of(gauge: Gauge, number: int, roles: Roles) -> Iterator[Heads]:
    """Yield the heads on which the group of a gauge is all invertible matrices, or all complex numbers.

    Yields nothing if gains differ within a head, or if biases transform together with constants, because no factor
    contains the sum.
    """
    if any(bool(each.values.any()) for each in gauge.wire.constants.every):
        return
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
                slot, rows, (port, of) = slots[k], at[own, k], known[k]
                units = torch.ones(rows.shape) if slot.constant is None else slot.constant[rows]
                every = [units, *(gain.at[rows].double() for gain in slot.gains)]  # if equal within a head, they cancel
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
    """Fold a group that acts on several heads at once, equally or by contragredients, to an action on one head.

    Examples are rotary planes of queries that share keys, and the channels of a weight that is used twice.
    """
    (channels, algebra), *more = gauge.algebra.summands
    if more or not isinstance(algebra, Span) or len(channels) > 1:
        return gauge
    X = algebra.basis
    heads, flips = alike(X) if algebra.dimension == 2 else (_tied(gauge, channels[0]), torch.zeros(algebra.n).bool())
    h = heads.shape[1]
    lead = X[:, heads[0][:, None], heads[0]]
    if h < 2 or len(heads) < 2:
        return gauge
    acting = [-lead.mT if flip else lead for flip in flips.tolist()]
    whole = torch.zeros_like(X)
    for own, Y in zip(heads, acting, strict=False):
        whole[:, own[:, None], own] = Y
    plane = h == len(X) == 2 and _close(Complex().project(lead), lead)
    if not _close(whole, X) or not (plane or len(X) == h**2):
        return gauge
    slots = []
    for own, flip in zip(channels[0][heads], flips.tolist(), strict=False):
        for slot in gauge.wire.slots:
            place = (slot.channels[:, None] == own).long()
            some = torch.nonzero(place.any(1))[:, 0]
            if len(some):
                units = None if slot.constant is None else slot.constant[some]
                gains = tuple(replace(gain, at=gain.at[some]) for gain in slot.gains)
                at = some_rows(slot.rows, some), place[some].argmax(1), slot.writes, slot.dual != flip
                slots.append(Slot(*at, units, gains, slot.use))
    return Gauge(Wire(tuple(slots), h), Complex() if plane else GL(h))


def _tied(gauge: Gauge, channels: Tensor) -> Tensor:
    """Return numbers of channels (heads, h); channels in one column have rows of the same entries."""
    first: dict[tuple[str, bool, int], int] = {}
    lead = torch.arange(gauge.wire.channels)
    for slot in gauge.wire.slots:
        for channel, key in zip(
            slot.channels.tolist(), row_keys(slot.rows.starts, slot.rows.steps).tolist(), strict=True
        ):
            lead[channel] = torch.minimum(
                lead[channel], lead[first.setdefault((slot.name, slot.covariant, key), channel)]
            )
    columns = [torch.nonzero(lead[channels] == one)[:, 0] for one in lead[channels].unique()]
    if len({len(each) for each in columns}) > 1:
        return torch.arange(len(channels))[None]
    return torch.stack(columns, 1)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _SAME * b.abs().max())


def heads_of_scales(
    parts: Sequence[tuple[Rows, Tensor, int]], origins: tuple[Origin, ...], roles: Roles
) -> Iterator[Heads]:
    """Yield single channels that a scale multiplies, as heads with h = 1.

    parts: rows of a parameter, the numbers (n, copies) of those used, and the sign of their exponents.
    """
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
    signed = not any(roles.has(what, torch.cat(nodes)) for what in ("bent", "bending"))
    acts: Group = "GL(h)" if signed else "GL+(1)"
    yield from _heads(sides, nodes, acts, roles, origins, scale=True)


def _side(rows: Rows, at: Tensor, port: int, inverse: bool, roles: Roles) -> Side | None:
    """Return the rows with numbers `at` (n, g, h) as a side; None unless all have the same offsets between entries."""
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
    """Yield the heads if A acts on some sides and A^-T on others, with copies of rows of one parameter merged."""
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
    """Return the order (n, g, h) that sorts copies by their first entries."""
    return first[:, :, :1].argsort(1).expand(first.shape)
