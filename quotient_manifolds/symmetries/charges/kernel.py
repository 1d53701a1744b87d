"""Solve for all generators of narrow wires at once: the null space of their charges at generic points.

The unknowns of a generator xi are an entry X_ij for every two channels that ports allow to mix, a log-scale of each
channel in its units, and a log-scale of each slice of each parameter. Each sampled gradient gives one linear equation:
the charge <grad, xi> is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import scipy.linalg
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from quotient_manifolds.symmetries.charges.entries import Reading
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.nodes import Classes
from quotient_manifolds.symmetries.charges.samples import Undecided

_ALL = 20_000
"""Most pairs of channels in all components together; beyond it, wider components are read, not solved for."""
MOST = 1500
"""Most unknowns that are solved for together."""
NOISE = 1e-9
_OFTEN, _RARE = 6, 8
"""An unknown must be exercised at _OFTEN points, among about _RARE times as many in all."""
_CHUNK = 256
"""Gradients whose charges are computed at once."""
_STUCK = 4
"""Times in a row that fresh points, doubled each time, may break a null space that gets no smaller, due to rounding."""
_FLOOR = 1e-6
"""Relative to the largest sum of summands: smaller ones may be rounding, and charges are compared with this instead."""


def null_space(rows: Tensor, tolerance: float = NOISE, scale: float | None = None) -> tuple[Tensor, float]:
    """Return an orthonormal basis (k, m) of the null space of rows (n, k), and the smallest nonzero pivot over `scale`.

    Pivots up to tolerance times `scale`, by default the largest pivot, count as 0.
    """
    k = rows.shape[1]
    if not rows.numel():
        return torch.eye(k, dtype=torch.float64), float("inf")
    if len(rows) > 2 * k:
        rows = torch.linalg.qr(rows, mode="r")[1]
    R, order = scipy.linalg.qr(rows.numpy(), mode="r", pivoting=True, check_finite=False)
    R, at = torch.from_numpy(np.ascontiguousarray(R[:k])), torch.from_numpy(order).long()
    pivots = R.diagonal().abs()
    top = max(float(pivots[0]) if scale is None else scale, 1e-300)
    rank = int((pivots > tolerance * top).sum())
    N = torch.zeros(k, k - rank, dtype=torch.float64)
    N[at[rank:]] = torch.eye(k - rank, dtype=torch.float64)
    N[at[:rank]] = torch.linalg.solve_triangular(R[:rank, :rank], -R[:rank, rank:], upper=True)
    return torch.linalg.qr(N)[0], float(pivots[rank - 1]) / top if rank else float("inf")


def connected(X: Tensor) -> Iterator[Tensor]:
    """Yield the index sets of matrices (k, n, n) that are connected by common channels."""
    touched = ((X != 0).any(1) | (X != 0).any(2)).numpy()
    part = connected_components(coo_matrix(touched @ touched.T), directed=False)[1]
    for one in np.unique(part):
        yield torch.from_numpy(np.flatnonzero(part == one))


@dataclass(frozen=True, eq=False)
class Point:
    """Hold the vector of weights (P,), the values of functions of them, and gradients (losses, P) of random losses."""

    theta: Tensor
    reading: Reading
    gradients: Tensor


class Charged(Protocol):
    """Number the unknowns of a generator, and compute their charges at points."""

    count: int
    size: int
    """The number of entries of theta."""

    @property
    def groups(self) -> list[Tensor]:
        """Return sets of unknowns that are solved for together."""

    def charges(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, (losses, unknowns), and the sums of their absolute summands."""

    def slices_of(self, entries: Tensor) -> Tensor:
        """Return which unknowns are undetermined if no gradient reaches these entries, bool (unknowns,)."""


U = TypeVar("U", bound=Charged)


class Unknowns:
    """Number the unknowns of narrow components of a frame, and compute their charges and fields.

    pairs: (n, 2), the channels i, j of entries X_ij, i != j. The log-scales of channels follow, numbered as in the
    frame, then the log-scales of slices. Slices are solved for together with log-scales, separately from pairs.
    left: the channels of components that are too wide to solve for.
    """

    def __init__(self, frame: Frame, most: int = MOST) -> None:
        self.frame, entries = frame, frame.entries
        self.components = self._components()
        self.pairs, self.left = self._possible(most)
        while len(self.pairs) > _ALL:  # a basis vector has an entry for each unknown
            most //= 2
            self.pairs, self.left = self._possible(most)
        C = len(frame.roots)
        order = torch.argsort(self.pairs[:, 0] * C + self.pairs[:, 1])
        self.pairs = self.pairs[order]
        self._keys = self.pairs[:, 0] * C + self.pairs[:, 1]
        self.first_scale = len(self.pairs)
        self.first_slice = self.first_scale + len(frame.scales)
        self.slices = list(self._slices())
        self.count = self.first_slice + sum(shape[axis] for _, shape, axis in self.slices)
        self.size = entries.size
        self._ids = [self._of(port.channels) for port in frame.ports]
        self._tables = [(port.entries, port.places) for port in frame.ports]

    def _components(self) -> Tensor:
        """Return the component of each channel: channels joined by functions, or by uses of the same entries."""
        frame, walk = self.frame, self.frame.walk
        classes = Classes(len(frame.nodes.wires))
        classes.join(frame.nodes.solved, torch.arange(len(frame.nodes.wires)))
        of_use: dict[int, list[Tensor]] = {}
        for port in frame.ports:
            of_use.setdefault(port.use, []).append(port.nodes)
        for number, gain in zip(frame.uses[len(frame.ports) :], walk.gains, strict=True):
            both = torch.cat([gain.before, gain.after])
            of_use[number] = [both[both > 0]]
        nodes = {number: torch.cat(each) for number, each in of_use.items()}
        owner = torch.full((frame.entries.size,), -1)
        entries = [*(port.entries for port in frame.ports), *(gain.entries for gain in walk.gains)]
        for number, used in zip(frame.uses, entries, strict=True):
            at = used[used >= 0].unique()
            for other in owner[at].unique().tolist():
                if other not in (-1, number):
                    every = torch.cat([nodes[number], nodes[other]])
                    classes.join(every[:1].expand(len(every)), every)
            owner[at] = number
        return classes.of[frame.roots]

    def _possible(self, most: int) -> tuple[Tensor, Tensor]:
        """Return the pairs (i, j) that ports allow to mix, and the channels of components with too many unknowns."""
        count = len(self.frame.roots)
        ports = [piece for port in self.frame.ports for piece in self.frame.by_parameter(port)]
        names = torch.randint(1 << 62, (len(ports),), generator=torch.Generator().manual_seed(1))
        signature = torch.zeros(count, dtype=torch.long)  # sums of random names distinguish sets of ports
        for name, port in zip(names, ports, strict=True):
            signature[port.channels] += name
        unique, kind = signature.unique(return_inverse=True)
        kinds = torch.zeros(2, max(1, len(ports)), len(unique))
        for row, port in enumerate(ports):
            kinds[int(port.covariant), row, kind[port.channels]] = 1.0
        con, co = kinds
        self.kind = kind
        fits = (co.T @ co == co.sum(0)) & (con.T @ con == con.sum(0)[:, None])
        each = fits.double() @ torch.bincount(kind, minlength=len(fits)).double() - 1
        classes, place = self.components.unique(return_inverse=True)
        wide = torch.zeros(len(classes), dtype=torch.float64).index_add(0, place, each[kind]) > most
        mixed, count = (fits | fits.T).double(), -1
        while int(wide.sum()) > count:  # a component that mixes with a wide one is wide, too
            count = int(wide.sum())
            near = (mixed @ torch.bincount(kind[wide[place]], minlength=len(fits)).double()) > 0
            wide = wide.index_fill(0, place[near[kind]], True)
        narrow = torch.nonzero(~wide[place])[:, 0]
        first, second = torch.nonzero(fits[kind[narrow]][:, kind], as_tuple=True)
        pairs = torch.stack([narrow[first], second], 1)
        return pairs[pairs[:, 0] != pairs[:, 1]], torch.nonzero(wide[place])[:, 0]

    def _of(self, channels: Tensor) -> Tensor:
        """Return the unknown of each pair of a port's channels, (n, n), `count` if there is none."""
        key = channels[:, None] * len(self.frame.roots) + channels
        if not len(self._keys):
            return torch.full_like(key, self.count)
        at = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        return torch.where(self._keys[at] == key, at, self.count)

    def _slices(self) -> Iterator[tuple[str, torch.Size, int]]:
        for name, shape in self.frame.entries.shapes.items():
            for axis in range(len(shape)):
                if shape.numel() and (shape[axis] > 1 or len(shape) == 1):
                    yield name, shape, axis

    @property
    def groups(self) -> list[Tensor]:
        """Return sets of unknowns that are solved for together."""
        scales = torch.arange(self.first_scale, self.count)
        found = [scales] if len(scales) <= MOST else [torch.arange(self.first_scale, self.first_slice)]
        if self.first_scale:
            of_pair = self.components[self.pairs[:, 0]]
            channel = self.frame.channel_of[self.frame.scales]
            of_scale = torch.where(channel >= 0, self.components[channel.clamp(0)], -1)
            for component in of_pair.unique().tolist():
                pairs = torch.nonzero(of_pair == component)[:, 0]
                found.append(torch.cat([pairs, self.first_scale + torch.nonzero(of_scale == component)[:, 0]]))
        return found

    # At a point

    def fields(self, point: Point) -> Tensor:
        """Return the change of theta by each unknown, (P, unknowns): the charges of gradients that are unit vectors."""
        each = torch.eye(self.size, dtype=torch.float64).split(_CHUNK)
        return torch.cat([self.charges(replace(point, gradients=G))[0] for G in each])

    def slices_of(self, entries: Tensor) -> Tensor:
        """Return which unknowns are slices of parameters that contain some of these entries, bool (unknowns,)."""
        found, at = torch.zeros(self.count, dtype=torch.bool), self.first_slice
        for name, shape, axis in self.slices:
            start = self.frame.entries.start[name]
            found[at : at + shape[axis]] = bool(entries[start : start + shape.numel()].any())
            at += shape[axis]
        return found

    def agreement(self, point: Point, count: int, generator: torch.Generator) -> Tensor:
        """Return rows (count, unknowns) that vanish on generators under which all uses of an entry change it alike."""
        frame, P = self.frame, self.size
        several = frame.shares > 1
        used = [*(port.entries for port in frame.ports), *(gain.entries for gain in frame.walk.gains)]
        of_use: dict[int, Tensor] = {}
        for number, entries in zip(frame.uses, used, strict=True):
            has = torch.zeros(P, dtype=torch.bool).index_fill_(0, entries[entries >= 0], True) & several
            if bool(has.any()):
                of_use[number] = of_use[number] | has if number in of_use else has
        drawn = {n: torch.randn(count, P, generator=generator, dtype=torch.float64) * has for n, has in of_use.items()}
        if not drawn:
            return torch.zeros(0, self.count, dtype=torch.float64)
        mean = sum(drawn.values()) / sum(has.double() for has in of_use.values()).clamp(min=1)  # type: ignore[union-attr]
        none = torch.zeros(count, P, dtype=torch.float64)
        uses = {n: (Y - mean) * of_use[n] for n, Y in drawn.items()}
        total, size = self.charges(replace(point, gradients=none), lambda use: uses.get(use, none))
        return total / size.amax(1, keepdim=True).clamp(min=1e-300)

    def charges(self, point: Point, of_use: Callable[[int], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the charges of all unknowns, (losses, unknowns), and the sums of their absolute summands.

        of_use: returns the part of the gradient that belongs to each use; equal parts if None.
        """
        frame, shared = self.frame, point.gradients / self.frame.shares
        units = frame.units(point.reading)
        total = torch.zeros(len(shared), self.count + 1, dtype=torch.float64)
        size = torch.zeros_like(total)
        for port, ids, (entries, places) in zip(frame.ports, self._ids, self._tables, strict=True):
            G = shared if of_use is None else of_use(port.use)
            w, slope = point.reading.at(port.memory, places)
            u = units[port.nodes][:, None]
            alive = (entries >= 0) & (slope != 0)
            g = torch.where(alive, G[:, entries.clamp(0)] / torch.where(alive, slope, 1.0), 0.0)
            a, b = (g * u, w / u) if port.writes else (g / u, w * u)
            a, b = torch.nan_to_num(a, 0.0, 0.0, 0.0), torch.nan_to_num(b, 0.0, 0.0, 0.0)
            Q, Z = a @ b.T, a.abs() @ b.abs().T
            if not port.covariant:
                Q, Z = -Q.mT, Z.mT
            scale, turn = frame.scale_of(port.nodes)  # X_ii is the node's log-scale, negative if dual
            q, z = (each.diagonal(dim1=1, dim2=2) for each in (Q, Z))
            sign = turn * (1 - 2 * frame.nodes.dual[port.nodes].double())
            total.index_add_(1, self.first_scale + scale, sign * q)
            size.index_add_(1, self.first_scale + scale, z)
            total.index_add_(1, ids.reshape(-1), Q.flatten(1))
            size.index_add_(1, ids.reshape(-1), Z.flatten(1))
        for gain, number in zip(frame.walk.gains, frame.uses[len(frame.ports) :], strict=True):
            G = shared if of_use is None else of_use(number)
            v, slope = point.reading.at(gain.memory, gain.places)
            alive = (gain.entries >= 0) & (slope != 0)
            rate = torch.where(alive, gain.power * v / torch.where(alive, slope, 1.0), 0.0)
            q = G[:, gain.entries.clamp(0)] * rate
            for nodes, way in ((gain.after, 1.0), (gain.before, -1.0)):
                keep = nodes > 0
                scale, turn = frame.scale_of(nodes[keep])
                total.index_add_(1, self.first_scale + scale, way * turn * q[:, keep])
                size.index_add_(1, self.first_scale + scale, q[:, keep].abs())
        at = self.first_slice
        q = point.gradients * point.theta
        for name, shape, axis in self.slices:
            start = frame.entries.start[name]
            part = (
                q[:, start : start + shape.numel()]
                .view(len(q), *shape)
                .movedim(axis + 1, 1)
                .reshape(len(q), shape[axis], -1)
            )
            total[:, at : at + shape[axis]], size[:, at : at + shape[axis]] = part.sum(2), part.abs().sum(2)
            at += shape[axis]
        return total[:, :-1], size[:, :-1]


@dataclass(frozen=True, eq=False)
class Kernel(Generic[U]):
    """Hold the generators whose charges vanish at all points that were tried.

    parts: a basis (unknowns, k) for each group of unknowns. largest: the largest charge of a basis vector over the sum
    of its absolute summands. smallest: the smallest pivot of rejected directions. points: the number of points tried.
    """

    unknowns: U
    parts: tuple[Tensor, ...]
    largest: float
    smallest: float
    points: int

    @property
    def basis(self) -> Tensor:
        """Return the bases of all groups side by side."""
        return torch.cat(self.parts, 1) if self.parts else torch.zeros(self.unknowns.count, 0, dtype=torch.float64)


def solve(unknowns: U, draw: Callable[[], Point]) -> Kernel[U]:
    """Return the null space of charges at points, which are added until two fresh ones in a row confirm it.

    Unknowns that are exercised at few points, as of a unit that is rarely active, are set to 0. So are slices of
    parameters with entries that no gradient reaches: whether these entries must change with others is undetermined.
    Raises Undecided if the null space does not settle.
    """
    groups = unknowns.groups
    wanted = int(1.1 * max(map(len, groups), default=0)) + 24
    rows, sizes, points = [], [], 0
    touched = torch.zeros(unknowns.size, dtype=torch.bool)
    exercised = torch.zeros(unknowns.count, dtype=torch.long)

    def more(count: int) -> tuple[Tensor, Tensor]:
        nonlocal points
        fresh: list[tuple[Tensor, Tensor]] = []
        dry = 0
        while sum(len(total) for total, _ in fresh) < count:
            if dry > _RARE * _OFTEN:
                raise Undecided(f"Outputs must depend on weights. Found none that does at {dry} points in turn")
            points += 1
            point = draw()
            touched.logical_or_((point.gradients != 0).any(0))
            total, size = unknowns.charges(point)
            exercised.add_((size > 0).any(0).long())
            norm = size.norm(dim=1, keepdim=True)
            keep = (norm[:, 0] > 0) & torch.isfinite(norm[:, 0])
            fresh.append(((total / norm)[keep], (size / norm)[keep]))
            dry = 0 if bool(keep.any()) else dry + 1
        total, size = (torch.cat(each) for each in zip(*fresh, strict=True))
        rows.append(total)
        sizes.append(size)
        return total, size

    def solved() -> tuple[list[Tensor], float]:
        idle = (exercised < _OFTEN) | unknowns.slices_of(~touched)
        return _solved(torch.cat(rows), torch.cat(sizes), groups, idle)

    if not unknowns.count:
        return Kernel(unknowns, (), 0.0, 0.0, 0)
    more(wanted)
    while points < _RARE * _OFTEN and bool(((exercised > 0) & (exercised < _OFTEN)).any()):
        more(1)
    parts, smallest = solved()
    calm, largest, stuck = 0, 0.0, 0
    least = sum(part.shape[1] for part in parts)
    while calm < 2 and any(part.shape[1] for part in parts):
        basis = torch.cat(parts, 1)
        total, size = more(1)
        worst = relative(total @ basis, size @ basis.abs())
        if float(worst.max()) <= NOISE:
            calm, largest = calm + 1, max(largest, float(worst.max()))
            continue
        calm, largest = 0, 0.0
        more(max(16, wanted // 3) << stuck)
        parts, smallest = solved()
        left = sum(part.shape[1] for part in parts)
        stuck, least = (0, left) if left < least else (stuck + 1, least)
        if points > 40 + 2 * wanted or stuck == _STUCK:
            raise Undecided("Charges at fresh points must settle. Found that they go on to break what was found")
    return Kernel(unknowns, tuple(parts), largest, smallest, points)


def relative(charge: Tensor, size: Tensor) -> Tensor:
    """Return |charge| / size, with a floor on sizes that may be rounding of others."""
    floor = _FLOOR * size.amax(dim=-1, keepdim=True).clamp(min=1e-300)
    return charge.abs() / torch.maximum(size, floor)


def _solved(total: Tensor, size: Tensor, groups: Sequence[Tensor], idle: Tensor) -> tuple[list[Tensor], float]:
    """Return a basis of the null space for each group, and the smallest pivot that rejects a direction."""
    scale = size.square().mean(0).sqrt()
    scale = scale.clamp(min=_FLOOR * float(scale.max()))
    rows, found, smallest = total / scale, [], float("inf")
    for ids in groups:
        N = torch.zeros(total.shape[1], 0, dtype=torch.float64)
        ids = ids[~idle[ids]]
        if len(ids):
            part = rows[:, ids]
            alone = part.abs().amax(0) < NOISE
            parts = [torch.eye(len(ids), dtype=torch.float64)[:, alone]]
            if not bool(alone.all()):
                rest, least = null_space(part[:, ~alone])
                smallest = min(smallest, least)
                parts.append(torch.zeros(len(ids), rest.shape[1], dtype=torch.float64))
                parts[1][~alone] = rest
            columns = torch.cat(parts, 1) / scale[ids][:, None]
            N = torch.zeros(total.shape[1], columns.shape[1], dtype=torch.float64)
            N[ids] = columns / columns.norm(dim=0).clamp(min=1e-300)
        found.append(N)
    return found, smallest
