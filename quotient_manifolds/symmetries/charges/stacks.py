r"""Find what small nets have at given weights alone: directions along which entries may be moved on a straight line.

With G the gradient of a matrix by its rows, they are z n^T with G n = 0 for all inputs and losses, and any z:

| matrix | directions |
|---|---|
| W^T, of one use | `unread`: outputs of W on which nothing depends |
| [W b] | `unreached`: inputs of W that never occur, or whose combination is constant, as a bias is |
| biases and columns of tables, as one row | `shift`: constants that later biases take back |

What holds at all weights is found elsewhere (`shifts.py`), and none of it is left here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.recognition import sparse
from quotient_manifolds.symmetries.charges.samples import Undecided
from quotient_manifolds.symmetries.charges.uses import Lookup
from quotient_manifolds.symmetries.groups.linear import Linear
from quotient_manifolds.symmetries.groups.rows import Rows
from quotient_manifolds.symmetries.groups.translation import Part, Translation

Draw = Callable[[Mapping[str, Tensor]], Tensor]
"""Return gradients (losses, P) at these weights, of random losses at fresh inputs."""
_FLOOR = 1e-6
"""Of a gradient's length: columns that are smaller may be rounding."""
_ROUNDS, _WAKE, _STEP = 60, 4, 0.5
_TINY = 1e-7
"""Coordinates of unit vectors that count as 0."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Hold directions at the weights where they were found.

    family: "unread", "unreached", "beside" or "shift". outputs: whether activations change, in directions on which
    nothing depends, or by what is taken back downstream. All with the same `outputs` may be moved in one
    element: those without leave all activations as they are but the terms of a sum; those with leave what the others
    rely on. Elements of both together are wrong in general: each direction is linear in weights that the others move.
    apart: the number of a set that is moved with no others, as nothing more is known of it than that it may be moved
    alone; 0 for all others.
    """

    translation: Translation | Linear
    family: str
    outputs: bool
    apart: int = 0


@dataclass(frozen=True, eq=False)
class Stacks:
    """Hold all stacks of a model.

    refused: what was not moved, and why. largest: the largest fresh gradient along a direction, relative to its
    summands; smallest: the smallest relative pivot of what was refused.
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


@dataclass(frozen=True, eq=False)
class Block:
    """Hold entries of theta (rows, columns, terms) that are moved by z n^T, all terms of one alike."""

    entries: Tensor
    family: str
    outputs: bool

    def vectors(self, gradients: Tensor) -> Tensor:
        """Return rows (n, columns) that null vectors are orthogonal to: sums, 0 if only rounding is left of them."""
        terms = torch.where(self.entries >= 0, gradients[:, self.entries.clamp(0)], 0.0).flatten(0, 1)
        made, size = terms.sum(2), terms.abs().sum(2)
        top = _FLOOR * gradients.abs().amax(1).repeat_interleave(len(self.entries))[:, None]
        return torch.where(made.abs() > NOISE * torch.maximum(size, top), made, 0.0) if terms.shape[2] > 1 else made

    def moved(self, theta: Tensor, N: Tensor, generator: torch.Generator) -> Tensor:
        """Return theta, moved along random z n^T."""
        z = torch.randn(len(self.entries), N.shape[1], generator=generator, dtype=torch.float64)
        change = (z @ N.T)[..., None].expand(self.entries.shape)[self.entries >= 0]
        at = self.entries[self.entries >= 0]
        size = _STEP * (theta[at].norm() + 0.1) / change.norm().clamp(min=1e-300)
        return theta.index_add(0, at, size * change)

    def stacks(self, frame: Frame, N: Tensor) -> Iterator[Stack]:
        """Yield the directions of null vectors N (columns, k), those of one row one by one."""
        single = len(self.entries) == 1
        for some in sparse(N, N).split(1 if single else max(1, N.shape[1]), 1) if N.shape[1] else ():
            parts = tuple(self._parts(frame, torch.where(some.abs() > _TINY, some, 0.0)))
            yield Stack(Translation(parts), self.family, self.outputs)

    def _parts(self, frame: Frame, N: Tensor) -> Iterator[Part]:
        alive = torch.nonzero(N.any(1))[:, 0]
        entries = self.entries[:, alive]
        by, terms = torch.nonzero(entries[0] >= 0, as_tuple=True)
        entries = entries[:, by, terms]
        owner = frame.owners(entries[0])
        for one in owner.unique().tolist():
            name = list(frame.entries.start)[one - 1]
            at = torch.nonzero(owner == one)[:, 0]
            rows = Rows.at(name, tuple(frame.entries.shapes[name]), entries[:, at] - frame.entries.start[name])
            yield Part(rows, None, N[alive[by[at]]].T)


def blocks(frame: Frame) -> Iterator[Block]:
    """Yield the matrices of a frame: of uses by both sides, entries being those of the first use, and all constants."""
    first = torch.full((frame.entries.size,), len(frame.walk.uses))
    for n, use in reversed([*enumerate(frame.walk.uses)]):
        first[use.entries[use.entries >= 0]] = n
    constants = []
    for n, use in enumerate(frame.walk.uses):
        if frame.entries.affine(use.memory) != (1.0, 0.0):
            continue
        W = torch.where((use.entries >= 0) & (first[use.entries.clamp(0)] == n), use.entries, -1)
        if isinstance(use.tokens, Lookup):
            constants += [row[row >= 0] for row in W[..., 0]] if bool((W >= 0).all()) else []
        by_inputs, by_outputs = W.flatten(1).T, W.flatten(1)
        bias = frame.walk.biases.get(n)
        if bias is not None and bool((bias >= 0).all()) and int(frame.shares[bias].max()) == 1:
            by_outputs = torch.cat([by_outputs, bias[:, None]], 1)
        for entries, family, outputs in ((by_inputs, "unread", True), (by_outputs, "unreached", False)):
            whole = entries[:, (entries >= 0).all(0)]
            if (
                whole.numel()
                and len(whole.unique()) == whole.numel()
                and not (family == "unreached" and isinstance(use.tokens, Lookup))
            ):
                yield Block(whole[..., None], family, outputs)
    leaves = torch.zeros(frame.entries.size, dtype=torch.bool)
    for name, occurring in frame.walk.occurring.items():
        leaves[frame.entries.start[name] :][: len(occurring)] = occurring
    leaves[torch.cat([leaves[:0].long(), *constants])] = False
    every = [*torch.nonzero(leaves), *constants]
    if every:
        width = max(map(len, every))
        padded = [torch.cat([each, torch.full((width - len(each),), -1)]) for each in every]
        yield Block(torch.stack(padded)[None], "shift", True)


def read_stacks(
    frame: Frame, draw: Draw, elsewhere: Draw, weights: Mapping[str, Tensor], generator: torch.Generator
) -> Stacks:
    """Return all directions at these weights by gradients of all parameters, for small nets.

    draw: gradients at weights near those given. elsewhere: gradients at generic weights; entries that have one there
    and none here are idle, as a unit that is never on, and not free. What is found is confirmed at weights that are
    moved along all of it.
    """
    theta = torch.cat([weights[name].double().reshape(-1) for name in frame.entries.shapes])
    every = list(blocks(frame))

    def at(moved: Tensor) -> Tensor:
        parts = moved.split([shape.numel() for shape in frame.entries.shapes.values()])
        G = draw({n: w.view(s) for (n, s), w in zip(frame.entries.shapes.items(), parts, strict=True)})
        return G / G.norm(dim=1, keepdim=True).clamp(min=1e-300)

    need = max((1.1 * block.entries.shape[1] / len(block.entries) for block in every), default=0.0)
    drawn = [at(theta)]
    while sum(map(len, drawn)) < need + 20 and len(drawn) < 400:
        drawn.append(at(theta))
    G = torch.cat(drawn)
    other = torch.cat([elsewhere(weights) for _ in range(6)])
    still = (G == 0).all(0)
    idle = still & ~(other == 0).all(0)
    nulls = []
    for block in every:
        rows = G
        if block.family == "shift":
            own = torch.zeros_like(idle).index_fill_(0, block.entries[block.entries >= 0], True)
            rows = torch.cat([G, *map(at, _woken(theta, idle & own, generator))])
        none, one = (rows == 0).all(0), block.entries[..., 0]
        nulls.append(Null(block, block.vectors(rows), none[one].all(0) & idle[one].any(0)))
    largest = confirm(nulls, theta, at, generator) if nulls else 0.0
    refused = []
    for name, start in frame.entries.start.items():
        count = int(idle[start : start + frame.entries.shapes[name].numel()].sum())
        if count:
            refused.append(f"{name}: {count} entries have no gradient here, but have one at other weights")
    erased = torch.zeros_like(still).index_fill_(0, frame.entries.erased, True)
    unused = _unused(frame, erased & still & (other == 0).all(0))
    found = [stack for block, null in zip(every, nulls, strict=True) for stack in block.stacks(frame, null.basis)]
    return Stacks(
        (*found, *unused), tuple(refused), largest, min((null.smallest for null in nulls), default=float("inf"))
    )


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
