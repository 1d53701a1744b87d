r"""Find directions, at given weights, along which single entries of parameters may be moved on a straight line.

Maps that write the same channels are one matrix, side by side (a bias is a map that reads 1); maps that read the same
channels are one matrix, one below another. With G the gradient of such a stack by rows of channels, the directions are
z n^T with G n = 0 for all inputs and losses, and any z:

| stack | directions |
|---|---|
| one map W, by its outputs | `unreached`: inputs of W that never occur |
| one map W, by its inputs | `unread`: outputs of W on which nothing depends |
| [W b] | `constant`: a combination of inputs that is constant acts as a bias |
| maps that write, or read, the same channels | `beside`: what one map takes up another gives back, as LoRA |
| biases and tables that are moved by constants | `shift`: constants that readers' biases take back |

Two sources give G: gradients of all parameters of a small net, and token vectors (`tokens.py`) of a wide one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.blocks import Block, Layout, Shifts
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.samples import Undecided
from quotient_manifolds.symmetries.groups.linear import Linear
from quotient_manifolds.symmetries.groups.rows import Rows
from quotient_manifolds.symmetries.groups.translation import Part, Translation

Draw = Callable[[Mapping[str, Tensor]], Tensor]
"""Return gradients (losses, P) at these weights, of random losses at fresh inputs."""
_FLOOR = 1e-6
"""Of a gradient's length: columns that are smaller may be rounding."""
_ROUNDS, _WAKE = 60, 4
TINY = 1e-7
"""Coordinates of unit vectors that count as 0."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Hold directions at the weights where they were found.

    family: "unread", "unreached", "constant", "beside" or "shift". outputs: whether activations change, in directions
    on which nothing depends, or by what is taken back downstream. All with the same `outputs` may be moved in one
    element: those without leave all activations as they are but the terms of a sum; those with leave what the others
    rely on. Elements of both together are wrong in general: each direction is linear in weights that the others move.
    apart: the number of a set that is moved with no others: of shifts that rely on known sums of inputs, which others
    may change, and of what nothing more is known of than that it may be moved alone; 0 for all others.
    """

    translation: Translation | Linear
    family: str
    outputs: bool
    apart: int = 0


@dataclass(frozen=True, eq=False)
class Stacks:
    """Hold all stacks of a model.

    refused: what was not moved, and why. largest: the largest fresh gradient along a direction, relative to its
    summands; smallest: the smallest relative pivot of what was refused. Dimensions add up to those of all together,
    but for maps whose both sides are beside each other (W x + V x), and GL(r) of an adapter, which is a group, too.
    """

    found: tuple[Stack, ...]
    refused: tuple[str, ...]
    largest: float
    smallest: float


def sets_of(stacks: Sequence[Stack]) -> list[tuple[Stack, ...]]:
    """Return those that may be moved in one element, set by set."""
    keys = dict.fromkeys((s.outputs, s.apart) for s in stacks)
    return [tuple(s for s in stacks if (s.outputs, s.apart) == key) for key in keys]


class Side(Protocol):
    """Hold entries of theta that are moved by z n^T; null vectors n are over its columns."""

    @property
    def outputs(self) -> bool:
        """Return with which others it may be moved (see `Stack`)."""

    def vectors(self, gradients: Tensor) -> Tensor:
        """Return rows (n, columns) that null vectors are orthogonal to."""

    def moved(self, theta: Tensor, N: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta, moved along random z n^T."""


class Null:
    """Accumulate rows of one block and hold what they vanish on.

    Columns are scaled by their size in the first rows; of rows no more are kept than there are columns.
    """

    def __init__(self, block: Side, first: Tensor, idle: Tensor) -> None:
        self.block, self.idle = block, idle
        size = first.square().mean(0).sqrt()
        size = size.clamp(min=_FLOOR * float(first.norm(dim=1).max()))
        self.size = torch.where(size > 0, size, 1.0)  # where all are 0
        self.rows = torch.zeros(0, int((~idle).sum()), dtype=torch.float64)
        self.smallest = float("inf")
        self.add(first)

    def _scaled(self, rows: Tensor) -> Tensor:
        return (rows / self.size)[:, ~self.idle]

    def add(self, rows: Tensor) -> None:
        """Take more rows into account."""
        rows = torch.cat([self.rows, self._scaled(rows)])
        self.rows = torch.linalg.qr(rows, mode="r")[1] if len(rows) > rows.shape[1] else rows
        self.alive, self.smallest = null_space(self.rows)

    def broken(self, rows: Tensor) -> float:
        """Return the largest of fresh rows along what is held, relative to the length of a row of all columns."""
        return float((self._scaled(rows) @ self.alive).abs().amax() / len(self.size) ** 0.5) if self else 0.0

    def __bool__(self) -> bool:
        return self.alive.shape[1] > 0

    @property
    def basis(self) -> Tensor:
        """Return orthonormal null vectors (columns, k)."""
        N = torch.zeros(len(self.size), self.alive.shape[1], dtype=torch.float64)
        N[~self.idle] = self.alive / self.size[~self.idle, None]
        return torch.linalg.qr(N)[0]


def read_stacks(
    frame: Frame,
    draw: Draw,
    elsewhere: Draw,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    constants: Mapping[int, Tensor] | None = None,
    kept: Callable[[Mapping[int, Tensor]], Tensor] | None = None,
) -> Stacks:
    """Return all directions at these weights by gradients of all parameters, for small nets.

    draw: gradients at weights near those given. elsewhere: gradients at generic weights; entries that have one there
    and none here are idle, as a unit that is never on, and not free. What is found is confirmed at weights that are
    moved along all of it. constants: as of a Layout. kept: gradients (n, P) of some sums of c . x, which shifts have to
    leave as they are: what another has to move by would change with it.
    """
    layout = Layout(frame, weights, tied=True, constants=constants)
    theta = torch.cat([weights[name].double().reshape(-1) for name in frame.entries.shapes])
    blocks = layout.every
    if not blocks:
        return Stacks((), tuple(layout.refused), 0.0, float("inf"))

    def at(moved: Tensor) -> Tensor:
        parts = moved.split([shape.numel() for shape in frame.entries.shapes.values()])
        G = draw({n: w.view(s) for (n, s), w in zip(frame.entries.shapes.items(), parts, strict=True)})
        return G / G.norm(dim=1, keepdim=True).clamp(min=1e-300)

    need = max(1.1 * block.entries.shape[1] / len(block.entries) for block in blocks)
    drawn = [at(theta)]
    while sum(map(len, drawn)) < need + 20 and len(drawn) < 400:
        drawn.append(at(theta))
    G = torch.cat(drawn)
    other = torch.cat([elsewhere(weights) for _ in range(6)])
    still = (G == 0).all(0)
    idle = still & ~(other == 0).all(0)
    nulls = []
    for block in blocks:
        entries, shifts = block.entries, block is layout.shifts
        rows = torch.cat([G, *map(at, _woken(theta, idle & layout.leaves, generator))]) if shifts else G
        none = (rows == 0).all(0)
        nulls.append(Null(block, block.vectors(rows), none[entries].all(0) & idle[entries].any(0)))
        read = layout.constants if isinstance(block, Shifts) else {}
        read = {n: c for n, c in read.items() if not block.idle(n, G)}  # type: ignore[union-attr]
        if read and kept is not None:
            nulls[-1].add(block.vectors(kept(read)))
    largest = confirm(nulls, theta, at, generator)
    refused = dict(layout.refused)
    for name, start in frame.entries.start.items():
        count = int(idle[start : start + frame.entries.shapes[name].numel()].sum())
        if count:
            refused[f"{name}: {count} entries have no gradient here, but have one at other weights"] = None
    erased = torch.zeros_like(still).index_fill_(0, frame.entries.erased, True)
    unused = _unused(frame, erased & still & (other == 0).all(0))
    found = (*Bases.of(layout, (null.basis for null in nulls)).stacks(), *unused)
    smallest = min(null.smallest for null in nulls)
    return Stacks(found, tuple(refused), largest, smallest)


def _unused(frame: Frame, free: Tensor) -> Iterator[Stack]:
    """Yield entries of parameters that are multiplied by 0, as of a weight that is pruned."""
    for name, start in frame.entries.start.items():
        shape = frame.entries.shapes[name]
        at = torch.nonzero(free[start : start + shape.numel()])
        if len(at):
            yield Stack(Translation((Part(Rows.at(name, tuple(shape), at)),)), "unread", False)


def _woken(theta: Tensor, idle: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield weights at which idle biases are larger: they switch their units on, and how others shift these is seen."""
    for size in (1.0, 3.0, 10.0, 30.0) * _WAKE if bool(idle.any()) else ():
        yield theta + size * idle * torch.randn(len(theta), generator=generator, dtype=torch.float64)


def confirm(nulls: Sequence[Null], theta: Tensor, at: Callable[[Tensor], Tensor], generator: torch.Generator) -> float:
    """Add rows at these weights and at weights moved along all that is held, until two rounds break nothing.

    What a joint move breaks is moved alone first: what cannot even be moved alone says nothing about the others.
    """
    calm, largest = 0, 0.0

    def broken(some: Sequence[Null], movers: Sequence[Null]) -> bool:
        """Add rows at weights moved along some to those that they break. Return whether there are any."""
        nonlocal largest
        moved = sum((null.block.moved(theta, null.basis, generator) - theta for null in movers), theta)
        G, bad = at(moved) if some else theta[None], []
        for null in some:
            rows = null.block.vectors(G)
            change = null.broken(rows)
            bad += [(null, rows)] if change > NOISE else []
            largest = max(largest, change if change <= NOISE else 0.0)
        alone = [broken([null], [null]) for null in movers] if bad and len(movers) > 1 else []
        for null, rows in bad if not any(alone) else ():
            null.add(rows)
        return bool(bad)

    for _ in range(_ROUNDS):
        worst = broken([null for null in nulls if null], [])
        for outputs in (False, True):
            some = [null for null in nulls if null and null.block.outputs == outputs]
            worst |= broken(some, some)
        calm = 0 if worst else calm + 1
        if calm == 2:
            return largest
    raise Undecided("Directions at fresh inputs must settle. Found that they go on to break what was found")


# Translations


@dataclass(frozen=True, eq=False)
class Bases:
    """Hold null vectors of all blocks of a layout, in its order; of single maps over all columns of the use."""

    layout: Layout
    unread: Mapping[int, Tensor]
    unreached: Mapping[int, Tensor]
    shared: tuple[tuple[Block, Tensor], ...]
    shifts: Tensor

    @classmethod
    def of(cls, layout: Layout, bases: Iterator[Tensor]) -> Bases:
        """Sort what `layout.every` has."""

        def spread(block: Block, count: int, N: Tensor) -> Tensor:
            made = torch.zeros(count, N.shape[1], dtype=torch.float64)
            return made.index_copy_(0, block.columns, N)

        uses = layout.walk.uses
        unread = {n: spread(b, uses[n].shape[0], next(bases)) for n, b in layout.outputs.items()}
        unreached = {n: spread(b, uses[n].shape[1] * uses[n].shape[2], next(bases)) for n, b in layout.inputs.items()}
        shared = tuple((block, next(bases)) for block in layout.shared)
        return cls(layout, unread, unreached, shared, next(bases, torch.zeros(0, 0, dtype=torch.float64)))

    def stacks(self) -> Iterator[Stack]:
        """Yield the directions, each once: what is unread is no direction of another family."""
        layout = self.layout
        for n, block in layout.inputs.items():
            yield from self._translated(block, self.unreached[n][block.columns], "unreached")
        for n, block in layout.outputs.items():
            N = self.unread[n][block.columns]
            if N.shape[1]:
                yield Stack(Translation(_parts(block, N, None)), "unread", True)
        for block, N in self.shared:
            if N.shape[1]:
                yield from self._of_several(block, N)
        yield from self._shifted()

    def _of_several(self, block: Block, N: Tensor) -> Iterator[Stack]:
        """Yield what a block has that no single map of it has: of biases alone nothing, which are shifts."""
        use = torch.cat([torch.full((len(m.columns),), m.use) for m in block.maps])
        bias = use >= len(self.layout.walk.uses)
        alone = []
        for n in use[~bias].unique().tolist():
            known = torch.zeros_like(N[:, :0])
            if block.outputs or n in self.unreached:
                full = self._by_taps(n) if block.outputs else self.unreached[n]
                known = torch.zeros(len(N), full.shape[1], dtype=torch.float64)
                known[use == n] = full[torch.cat([m.columns for m in block.maps if m.use == n])]
            own = within(N, use == n)
            alone += [own]
            yield from self._translated(block, _minus(own, known), "unread" if block.outputs else "unreached")
        besides = within(N, ~bias)
        yield from self._translated(block, _minus(besides, torch.cat(alone, 1)), "beside")
        yield from self._translated(block, _minus(N, torch.cat([besides, within(N, bias)], 1)), "constant")

    def _by_taps(self, n: int) -> Tensor:
        """Return unread outputs of a use as vectors over outputs and taps."""
        K, taps = self.unread[n], self.layout.walk.uses[n].shape[2]
        eye = torch.eye(taps, dtype=torch.float64)
        return (K[:, None, :, None] * eye[None, :, None, :]).reshape(len(K) * taps, -1)

    def _translated(self, block: Block, N: Tensor, family: str) -> Iterator[Stack]:
        """Yield z n^T with z apart from what is free whatever n is."""
        if not N.shape[1]:
            return
        z = self._free(block, N)
        if z is None or z.shape[1]:
            yield Stack(Translation(_parts(block, N, z)), family, block.outputs)

    def _free(self, block: Block, N: Tensor) -> Tensor | None:
        """Return z that are orthogonal to what all maps that n has have free by the other side; None for all z."""
        rows, start = [], 0
        for m in block.maps:
            part = N[start : start + len(m.columns)]
            start += len(m.columns)
            if m.use >= len(self.layout.walk.uses) or float(part.abs().amax()) <= TINY:
                continue
            known = (self.unreached if block.outputs else self.unread).get(m.use)
            if known is None or not known.shape[1]:
                return None
            count = len(self.layout.walk.uses[m.use].into) if block.outputs else len(known)
            apart = null_space(known.T)[0]
            apart = apart.view(count, len(apart) // count, apart.shape[1])[m.port.rows]
            units = 1 / m.units if block.outputs else m.units
            rows.append((apart * units[:, None, None]).flatten(1).T)
        if not rows:
            return None
        both = (
            null_space(torch.cat(rows), TINY)[0]
            if sum(map(len, rows))
            else torch.eye(len(block.maps[0].port.rows)).double()
        )
        return null_space(both.T)[0] if both.shape[1] else None

    def _shifted(self) -> Iterator[Stack]:
        """Yield shifts by connected components, without what is unread of a table."""
        N, starts = self.shifts, self.layout.starts
        shifts = self.layout.shifts if N.shape[1] else None
        if shifts is None:
            return
        of = torch.full((self.layout.frame.entries.size,), -1)
        of[shifts.every] = shifts.of
        tables = [n for n in self.layout.tables if n in self.unread]
        ways = [of[self.layout.walk.uses[n].entries[:, 0, 0]] for n in tables]
        free = [torch.zeros(len(N), self.unread[n].shape[1], dtype=torch.float64) for n in tables]
        for n, way, each in zip(tables, ways, free, strict=True):
            each[way] = self.unread[n]
        N = _minus(N, torch.cat([N[:, :0], *free], 1))
        touching = csr_matrix(((N @ N.T).abs() > TINY).numpy())
        part = torch.from_numpy(connected_components(touching, directed=False)[1])
        in_table = torch.zeros(len(N), dtype=torch.bool)
        in_table[torch.cat([part[:0].long(), *ways])] = True
        owner = torch.bucketize(shifts.entries[0].contiguous(), starts, right=True) - 1
        pairs = torch.stack([owner, shifts.source])
        for k in part.unique().tolist():
            some = within(N, part == k)
            if not some.shape[1]:
                continue
            moved = (part == k) & (some.abs().amax(1) > TINY)
            parts = []
            for o, source in torch.unique(pairs[:, moved], dim=1).T.tolist():
                name = list(self.layout.frame.entries.start)[o]
                mine = torch.nonzero(moved & (owner == o) & (shifts.source == source))[:, 0]
                entries = torch.stack([shifts.every[shifts.of == way] for way in mine.tolist()]) - starts[o]
                rows = Rows.at(name, tuple(self.layout.frame.entries.shapes[name]), entries)
                right = shifts.by[shifts.of == mine[0]][None]
                parts.append(Part(rows, some[mine], right if rows.columns > 1 else None))
            yield Stack(Translation(tuple(parts)), "shift", True)


def _parts(block: Block, N: Tensor, z: Tensor | None) -> tuple[Part, ...]:
    """Return z n^T in the maps of a block that n has."""
    pieces = zip(block.maps, N.split([len(m.columns) for m in block.maps]), strict=True)
    return tuple(Part(m.rows, z, n.T) for m, n in pieces if float(n.abs().amax()) > TINY)


def within(N: Tensor, some: Tensor) -> Tensor:
    """Return the part of a space that is 0 outside of some coordinates."""
    return N @ null_space(N[~some], TINY, scale=1.0)[0]


def _minus(N: Tensor, M: Tensor) -> Tensor:
    """Return the part of a space that is orthogonal to another, both given by columns."""
    if not (N.shape[1] and M.shape[1]):
        return N
    return N @ null_space(M.T @ N, TINY, scale=1.0)[0]
