"""Determine the groups of wide wires from their charges, if one null space of all unknowns would be too large.

The charges of all generators X_ij of a wire are one matrix C = a^T b of token vectors. If C_ij vanishes at generic
points, X_ij is free on its own. Combinations that are the same for all pairs of aligned channels are rotations.
Log-scales and planes are solved for by instances. Samples are added until two fresh points in a row refute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.instances import Instances
from quotient_manifolds.symmetries.charges.kernel import NOISE, null_space
from quotient_manifolds.symmetries.charges.positions import Positions, Vectors, components, names
from quotient_manifolds.symmetries.charges.samples import Sample, Undecided
from quotient_manifolds.symmetries.groups import (
    GL,
    SO,
    Algebra,
    CenteredSO,
    DirectSum,
    FromSum,
    Gauge,
    IntoMean,
    Pattern,
    Symmetry,
)

Draw = Callable[[int, int], Iterable[tuple[Mapping[str, Tensor], Sample]]]
"""Function (points, losses) -> (weights, sample) for that many losses at each of that many generic points."""

_DOUBTFUL = 1e-4
"""Entries with a smaller relative charge are followed on further samples, so that the smallest refused one is known."""
_ROWS = 256
_DENSE = 32
"""A product of matrices is computed as a whole if more than one in this many of its entries is needed."""
_ENTRIES = 1 << 29
"""Maximum number of entries of a charge matrix."""
_POINTS, _LOSSES, _ROUNDS = 2, 5, 12


@dataclass(frozen=True, eq=False)
class Readings:
    """Hold the symmetries that charges show, and sentences that say what was refused and why.

    largest: the largest relative charge (over the sum of absolute summands) that counted as 0. smallest: the smallest
    one that did not.
    """

    symmetries: tuple[Symmetry, ...]
    refused: tuple[str, ...]
    largest: float
    smallest: float


class Alone:
    """Hold the generators X_ij, within and between wires, whose own charges vanish on all samples so far.

    pairs: their positions (i, j), shape (n, 2). A position is a channel, or several that ties make one.
    """

    def __init__(self, positions: Positions, data: Sequence[Vectors], generator: torch.Generator) -> None:
        self.positions = positions
        self.refused: list[str] = []
        self.smallest = 1.0
        self._kinds = []
        weights = torch.randn(len(data), generator=generator, dtype=torch.float64)
        for a, b, shared in self._mixing():
            sizes = len(positions.wires[a].positions), len(positions.wires[b].positions)
            if sizes[0] * sizes[1] > _ENTRIES:
                where = positions.parameters(positions.wires[a].positions)
                self.refused.append(f"{sizes[0]} x {sizes[1]} entries between channels of {where}: too many to be read")
                continue
            i, j = self._first(a, b, shared, data, weights)
            self._kinds.append((a, b, shared, i, j, torch.zeros(len(i), dtype=torch.float64)))
        self.survives(data)

    def _mixing(self) -> list[tuple[int, int, list[int]]]:
        """Return (a, b, shared ports) for wires such that X_ij may be free, with i on wire a and j on wire b.

        Every covariant port of b must also have a, and every other port of a must also have b.
        """
        p = self.positions
        has = torch.zeros(2, len(p.ports), len(p.wires))
        for number, wire in enumerate(p.wires):
            for port in wire.rows:
                has[int(p.ports[port].covariant), port, number] = 1.0
        con, co = has
        fits = (co.T @ co == co.sum(0)) & (con.T @ con == con.sum(0)[:, None])
        fits &= (co.sum(0) > 0) & (con.sum(0)[:, None] > 0)
        rows = [set(wire.rows) for wire in p.wires]
        return [(a, b, sorted(rows[a] & rows[b])) for a, b in torch.nonzero(fits).tolist()]

    def _first(
        self, a: int, b: int, shared: list[int], data: Sequence[Vectors], weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return i, j of entries whose charge nearly vanishes in a random combination of samples, but not its terms."""
        p = self.positions
        A, B = ([p.stacked(p.wires[k], sample, shared)[side] for sample in data] for k, side in ((a, 0), (b, 1)))
        x = torch.cat([w * each for w, each in zip(weights.tolist(), A, strict=True)]).T.contiguous()
        y = torch.cat(B)
        may = [~p.mixed[p.wires[k].positions] for k in (a, b)]
        found = []
        for start in range(0, len(x), _ROWS):
            C, size = x[start : start + _ROWS] @ y, x[start : start + _ROWS].abs() @ y.abs()
            near = (C.abs() < _DOUBTFUL * size) & may[0][start : start + _ROWS, None] & may[1]
            i, j = torch.nonzero(near, as_tuple=True)
            found.append(torch.stack([i + start, j]))
        i, j = torch.cat(found, 1)
        return i, j

    def survives(self, data: Sequence[Vectors]) -> bool:
        """Update the relative charges with these samples; return whether all free entries are still free."""
        p, before = self.positions, len(self.pairs)
        for number, (a, b, shared, i, j, worst) in enumerate(self._kinds):
            for sample in data:
                x, y = p.stacked(p.wires[a], sample, shared)[0], p.stacked(p.wires[b], sample, shared)[1]
                torch.maximum(worst, _relative(x, y, i, j), out=worst)
            keep = worst < _DOUBTFUL
            self._kinds[number] = a, b, shared, i[keep], j[keep], worst[keep]
        return len(self.pairs) == before

    @property
    def pairs(self) -> Tensor:
        """Return the positions (i, j) of all free X_ij, shape (n, 2)."""
        w = self.positions.wires
        found = [
            torch.stack([w[a].positions[i[worst <= NOISE]], w[b].positions[j[worst <= NOISE]]], 1)
            for a, b, _, i, j, worst in self._kinds
        ]
        return torch.cat([torch.zeros(0, 2, dtype=torch.long), *found])

    @property
    def gap(self) -> tuple[float, float]:
        """Return the largest relative charge of a free entry, and the smallest one of an entry that is not free."""
        every = torch.cat([torch.zeros(1, dtype=torch.float64), *(each[-1] for each in self._kinds)])
        above = every[every > NOISE]
        return float(every[every <= NOISE].max()), float(above.min()) if len(above) else _DOUBTFUL

    def gauges(self, blocks: Tensor) -> tuple[list[Symmetry], list[str]]:
        """Return a group for each connected set of free entries, and refusals. Number their diagonals in `blocks`."""
        p, pairs = self.positions, self.pairs
        count = len(p.held)
        off = pairs[pairs[:, 0] != pairs[:, 1]]
        diagonal = torch.zeros(count, dtype=torch.bool).index_fill_(0, pairs[pairs[:, 0] == pairs[:, 1], 0], True)
        part = components(count, off[:, 0], off[:, 1])
        order = torch.argsort(part[off[:, 0]], stable=True)
        sizes = torch.unique_consecutive(part[off[order, 0]], return_counts=True)[1].tolist()
        left, alike = list[tuple[Tensor, Algebra]](), dict[tuple[int, int], list[Tensor]]()
        for own in off[order].split(sizes) if len(off) else ():
            channels, at = own.unique(return_inverse=True)
            mask = torch.diag(diagonal[channels])
            mask[at[:, 0], at[:, 1]] = True
            if bool(mask.all()):  # full blocks of one size on a wire, such as heads, form one group
                alike.setdefault((int(p.wire_of[channels[0]]), len(channels)), []).append(channels)
            else:
                left.append((channels[None], Pattern(len(channels), mask)))
        left += [(torch.stack(sets), GL(n)) for (_, n), sets in alike.items()]
        made, refused = list[Symmetry](), list[str]()
        for sets, each in left:
            n = sets.numel()
            algebra = each if len(sets) == 1 else DirectSum(n, ((torch.arange(n).view(sets.shape), each),))
            try:
                made.append(Gauge(p.wire(sets.flatten()), algebra))
                own = sets[:, each.mask.diagonal()] if isinstance(each, Pattern) else sets
                blocks[own] = 1 + own
            except ValueError as error:
                if len(sets) > 1:
                    left += [(one, each) for one in sets.split(1)]
                else:
                    refused.append(f"{each.dimension} entries between channels of {p.parameters(sets)}: {error}")
        return made, refused


def _relative(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return |x_i . y_j| over the sum of absolute summands, for columns i of x and j of y."""
    if _DENSE * len(i) > x.shape[1] * y.shape[1]:
        value, size = (a.T @ b for a, b in ((x, y), (x.abs(), y.abs())))
        return value[i, j].abs() / size[i, j].clamp(min=1e-300)
    made = [torch.zeros(0, dtype=torch.float64)]
    for at in torch.arange(len(i)).split(max(1, (1 << 24) // max(1, len(x)))):
        terms = x[:, i[at]] * y[:, j[at]]
        made.append(terms.sum(0).abs() / terms.abs_().sum(0).clamp(min=1e-300))
    return torch.cat(made)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Hold k combinations of X_ij and X_ji on several wires that have no charge, the same for all pairs of channels.

    aligned: positions (n, wires). basis: coefficients (2 * wires, k). centered: whether means over channels are left
    out.
    """

    wires: Sequence[int]
    aligned: Tensor
    basis: Tensor
    centered: bool
    worst: float


class Rotations:
    """Find generators that act on several aligned wires at once: R or -R^T on each, with R skew or arbitrary."""

    def __init__(self, positions: Positions, free: Tensor, generator: torch.Generator) -> None:
        self.positions, self.generator = positions, generator
        n = len(positions.held)
        self._free = (free @ torch.tensor([n, 1])).sort()[0]
        self.refused: list[str] = []
        self.smallest = float("inf")

    def _is_free(self, i: Tensor, j: Tensor) -> Tensor:
        key = i * len(self.positions.held) + j
        if not len(self._free):
            return torch.zeros_like(i, dtype=torch.bool)
        at = torch.searchsorted(self._free, key).clamp(max=len(self._free) - 1)
        return self._free[at] == key

    def families(self) -> list[tuple[list[int], Tensor]]:
        """Return (wires, positions (n, wires)) for all components that have one position on each of the same wires."""
        p = self.positions
        order = torch.argsort(p.wire_of, stable=True)
        order = order[torch.argsort(p.component[order], stable=True)]
        c, k = p.component[order], p.wire_of[order]
        _, which, count = torch.unique_consecutive(c, return_inverse=True, return_counts=True)
        name = torch.zeros(len(count), dtype=torch.long).index_add(0, which, names(len(p.wires), p.generator)[k])
        name[which[1:][(which[1:] == which[:-1]) & (k[1:] == k[:-1])]] = 0  # two channels of one wire
        name[which[p.held[order]]] = 0
        found = []
        for one in name.unique().tolist():
            at = torch.nonzero(name == one)[:, 0]
            if one and len(at) > 2:
                rows = (count.cumsum(0) - count)[at][:, None] + torch.arange(int(count[at[0]]))
                found.append((k[rows[0]].tolist(), order[rows]))
        return found

    def find(self, data: Sequence[Vectors]) -> list[Rotation]:
        """Return the combinations whose charges vanish at random pairs, and at all pairs on the last two samples."""
        found = []
        for wires, aligned in self.families():
            for centered in (False, True):
                N = self._pattern(wires, aligned, centered, data)
                if not N.shape[1]:
                    continue
                worst = self.worst(wires, aligned, N, centered, data[-2:])
                if worst < NOISE:
                    found.append(Rotation(wires, aligned, N, centered, worst))
                    break
                self.smallest = min(self.smallest, worst)
                where = self.positions.parameters(aligned)
                self.refused.append(f"rotations of {len(aligned)} channels of {where}: relative charge {worst:.1e}")
        return found

    def _pattern(self, wires: list[int], aligned: Tensor, centered: bool, data: Sequence[Vectors]) -> Tensor:
        """Return combinations (2 * wires, k) of X_ij and X_ji of all wires whose charges vanish at random pairs."""
        many = max(24, 8 * len(wires) // len(data))
        i, j = torch.randint(len(aligned), (2, 6 * many), generator=self.generator)
        keep = i != j
        for column in aligned.T:
            keep &= ~self._is_free(column[i], column[j]) & ~self._is_free(column[j], column[i])
        i, j = i[keep][:many], j[keep][:many]
        if len(i) < min(many, len(aligned)) // 2:
            return torch.zeros(2 * len(wires), 0, dtype=torch.float64)
        N = torch.eye(2 * len(wires), dtype=torch.float64)
        for some in (data[:2], data):  # two samples suffice to refute most families
            rows = [self._rows(wires, aligned, i, j, centered, sample) for sample in some]
            M, size = (torch.stack(each) for each in zip(*rows, strict=True))
            M = M / size.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-300)
            idle = torch.diag_embed((size.amax((0, 1)) == 0).double())
            equations = torch.cat([M.flatten(0, 1), idle, self._tie_rows(wires, aligned, i, j)])
            N, pivot = null_space(equations, scale=1.0)
            if not N.shape[1]:
                break
        self.smallest = min(self.smallest, pivot)
        return N

    def _rows(
        self, wires: list[int], aligned: Tensor, i: Tensor, j: Tensor, centered: bool, sample: Vectors
    ) -> tuple[Tensor, Tensor]:
        """Return the charges (pairs, 2 * wires) of X_ij and X_ji of all wires, and the sums of absolute summands."""
        p, columns, sizes = self.positions, [], []
        for k, column in zip(wires, p.place_of[aligned].T, strict=True):
            a, b = p.stacked(p.wires[k], sample, list(p.wires[k].rows))
            if centered:
                a, b = (each - each.mean(1, keepdim=True) for each in (a, b))
            x, y = column[i], column[j]
            for terms in (a[:, x] * b[:, y], a[:, y] * b[:, x]):
                columns.append(terms.sum(0))
                sizes.append(terms.abs().sum(0))
        return torch.stack(columns, 1), torch.stack(sizes, 1)

    def _tie_rows(self, wires: list[int], aligned: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return equations (n, 2 * wires): X acts in the same way on a row of entries in each of its two roles."""
        p, K = self.positions, len(wires)
        rows = [torch.zeros(0, 2 * K, dtype=torch.float64)]
        ties, frame = p.loose, self.positions.frame
        position = p.of[frame.channel_of[ties.nodes]]
        role = torch.stack([p.wire_of[position[0]], p.wire_of[position[1]], *ties.way, *ties.covariant])
        flipped = torch.zeros(len(frame.roots), dtype=torch.bool)
        flipped[p.channels] = p.flipped
        turned = flipped[frame.channel_of[ties.nodes]]
        role = torch.cat([role, turned.long()])
        where = {k: c for c, k in enumerate(wires)}
        for one in torch.unique(role, dim=1).T:
            at = torch.nonzero((role == one[:, None]).all(0))[:, 0]
            if int(one[0]) not in where or int(one[1]) not in where:
                continue
            M = torch.zeros(2, len(i), 2 * K, dtype=torch.float64)
            for side, sign in ((0, 1.0), (1, -1.0)):
                c = where[int(one[side])]
                place = torch.full((len(p.held),), -1)
                place[aligned[:, c]] = torch.arange(len(aligned))
                row = place[position[side, at]]
                s = torch.ones(len(aligned), dtype=torch.float64)
                s[row[row >= 0]] = (p.units[ties.nodes[side, at]] ** float(one[2 + side]))[row >= 0]
                covariant = bool(one[4 + side]) != bool(one[6 + side])
                for t, (x, y) in enumerate(((i, j), (j, i))):  # s_x / s_y X_xy if covariant, else -s_x / s_y X_yx
                    entry = 2 * c + (t if covariant else 1 - t)
                    M[t, :, entry] += sign * (1.0 if covariant else -1.0) * s[x] / s[y]
            rows.append(M.reshape(-1, 2 * K))
        return torch.cat(rows)

    def worst(self, wires: Sequence[int], aligned: Tensor, N: Tensor, centered: bool, data: Sequence[Vectors]) -> float:
        """Return the largest charge of combinations at all pairs, over the sum over wires of max |a_i| max |b_j|."""
        p, worst = self.positions, 0.0
        for sample in data:
            D = [torch.zeros(len(aligned), len(aligned), dtype=torch.float64) for _ in range(N.shape[1])]
            size = 0.0
            for c, (k, column) in enumerate(zip(wires, p.place_of[aligned].T, strict=True)):
                a, b = p.stacked(p.wires[k], sample, list(p.wires[k].rows))
                if centered:
                    a, b = (each - each.mean(1, keepdim=True) for each in (a, b))
                a, b = a[:, column], b[:, column]
                C = a.T @ b
                size += float(a.norm(dim=0).max() * b.norm(dim=0).max())
                for each, (v, w) in zip(D, N[2 * c : 2 * c + 2].T.tolist(), strict=True):
                    each.add_(C, alpha=v).add_(C.T, alpha=w)
            for each in D:
                worst = max(worst, float(each.fill_diagonal_(0).abs().max()) / max(size, 1e-300))
        return worst

    def gauges(self, found: Sequence[Rotation], blocks: Tensor) -> list[Symmetry]:
        """Return the groups of rotations, and append families without one to `refused`.

        The diagonals of `GL` are numbered in `blocks`.
        """
        made: list[Symmetry] = []
        for each in found:
            N = torch.where(each.basis.abs() > 1e-8, each.basis, 0.0)
            K = len(each.wires)
            used = (N.view(K, 2, -1) != 0).any(1)
            group = components(K + N.shape[1], *(torch.nonzero(used) + torch.tensor([0, K])).T)
            for one in group[K:].unique().tolist():
                own = torch.nonzero((group[:K] == one) & used.any(1))[:, 0]
                try:
                    made.append(self._gauge(each, own, N.view(K, 2, -1)[own][:, :, group[K:] == one], blocks))
                except ValueError as error:
                    where = self.positions.parameters(each.aligned[:, own])
                    self.refused.append(f"rotations of {len(each.aligned)} channels of {where}: {error}")
        return made

    def _gauge(self, found: Rotation, own: Tensor, N: Tensor, blocks: Tensor) -> Gauge:
        """Return the group of one family, with coefficients N (wires, 2, k) of X_ij and X_ji."""
        n = len(found.aligned)
        positions = found.aligned[:, own].T
        flip = torch.zeros(len(own), dtype=torch.bool)
        close = lambda a, b: bool((a - b).abs().max() < 1e-7 * N.abs().max())  # noqa: E731
        if N.shape[2] == 1 and close(N[:, 0], -N[:, 1]) and close(N[:, 0], N[:1, 0]):
            algebra: Algebra = CenteredSO(n) if found.centered else SO(n)
        elif N.shape[2] == 2 and not found.centered:
            back = torch.linalg.inv(N[0])
            ways = N @ back
            flip = (ways[:, 0, 0].abs() < 0.5) & (ways[:, 0, 1] < 0)
            swap = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
            if not close(ways, torch.where(flip[:, None, None], swap, torch.eye(2, dtype=torch.float64))):
                raise ValueError("matrices on aligned wires must be equal or contragredient. Found others")
            algebra = GL(n)
        else:
            raise ValueError(f"the family of matrices must be a known algebra. Found one of {N.shape[2]} patterns")
        made = Gauge(self.positions.folded(positions, flip), algebra)
        if isinstance(algebra, GL):
            blocks[positions] = (1 + positions[:1]) * (1 - 2 * flip[:, None].long())
        return made


def _means(positions: Positions, data: Sequence[Vectors], free: Tensor) -> tuple[list[Symmetry], float]:
    """Return the symmetries 1 w^T and t 1^T of whole wires if their charges vanish, and the largest of these charges.

    If all readers of a wire have a bias, t 1^T is left out: it is a sum of constants that these biases take up.
    """
    made: list[Symmetry] = []
    largest = 0.0
    taken = torch.zeros(len(positions.held), dtype=torch.bool).index_fill_(0, free.reshape(-1), True) | positions.mixed
    for wire in positions.wires:
        n, ways = len(wire.positions), {positions.ports[port].covariant for port in wire.rows}
        if n < 3 or len(ways) < 2 or bool(taken[wire.positions].any()):
            continue
        readers = {positions.ports[port].use for port in wire.rows if not positions.ports[port].covariant}
        kinds = [(IntoMean, 0), (FromSum, 1)]
        for kind, side in kinds if readers - set(positions.frame.walk.biases) else kinds[:1]:
            worst, size = 0.0, 0.0
            for sample in data:
                a, b = positions.stacked(wire, sample, list(wire.rows))
                if side:
                    a, b = b, a
                charge = a.sum(1) @ b
                summands = a.abs().sum(1) @ b.abs()
                worst = max(worst, float((charge.abs() / summands.clamp(min=1e-300)).max()))
                size = max(size, float(summands.min()))
            if worst < NOISE and size > 0:
                with suppress(ValueError):  # groups cannot act on some wires
                    made.append(Gauge(positions.wire(wire.positions), kind(n)))
                    largest = max(largest, worst)
    return made, largest


def sums(frame: Frame, draw: Draw) -> Iterator[Gauge]:
    """Yield the symmetries t 1^T of whole wires whose readers do not all have a bias, if their charges vanish."""
    drawn = list(draw(_POINTS, _LOSSES)) if len(frame.roots) else []
    if drawn:
        positions = Positions(frame, torch.arange(len(frame.roots)), drawn[0][0])
        found, _ = _means(positions, positions.drawn(drawn), torch.zeros(0, dtype=torch.long))
        yield from filter(is_of_sums, found)


def is_of_sums(symmetry: Symmetry) -> bool:
    """Return whether a symmetry is t 1^T, which turns a known sum of inputs into constants."""
    return isinstance(symmetry, Gauge) and isinstance(symmetry.algebra, FromSum)


def is_of_means(symmetry: Symmetry) -> bool:
    """Return whether a symmetry is 1 w^T or t 1^T, whose orbits need not be closed."""
    return isinstance(symmetry, Gauge) and isinstance(symmetry.algebra, (FromSum, IntoMean))


def read(frame: Frame, channels: Tensor, draw: Draw, generator: torch.Generator) -> Readings:
    """Return the symmetries of the wires of some channels, which must be whole components of a frame.

    draw: returns samples with gradients of the parameters `positions.vectors(frame)`. Raises Undecided if fresh points
    keep refuting what was found.
    """
    if not len(channels):
        return Readings((), (), 0.0, float("inf"))
    drawn = list(draw(_POINTS, _LOSSES))
    positions = Positions(frame, channels, drawn[0][0])
    data = positions.drawn(drawn)
    alone = Alone(positions, data[_LOSSES - 1 :: _LOSSES], generator)
    calm = rounds = 0
    while calm < 2:
        if not calm:
            blocks = torch.zeros(len(positions.held), dtype=torch.long)
            gauges, refused = alone.gauges(blocks)
            free = alone.pairs
            rotations = Rotations(positions, free, generator)
            turned = rotations.find(data)
            rotated = rotations.gauges(turned, blocks)
            instances = Instances(positions, free, blocks)
            for points, losses in instances.wanted(data):
                fresh = positions.drawn(draw(points, losses))
                alone.survives(fresh)
                data += fresh
            kinds, short, *gaps = instances.solve(data)
        fresh = positions.drawn(draw(1, 2))
        stays = alone.survives(fresh)
        held, worst = instances.survives(kinds, fresh)
        angles = [rotations.worst(r.wires, r.aligned, r.basis, r.centered, fresh) for r in turned]
        calm = calm + 1 if stays and held and all(each < NOISE for each in angles) else 0
        data += fresh
        rounds += 1
        if rounds > _ROUNDS:
            raise Undecided("Charges at fresh points must settle. Found that they go on to break what was found")
    scales, others = instances.groups(kinds)
    means, mean = _means(positions, data, free)
    largest = max(gaps[0], worst, alone.gap[0], mean, *angles, *(r.worst for r in turned), 0.0)
    smallest = min(gaps[1], alone.gap[1], rotations.smallest)
    symmetries = (*gauges, *rotated, *means, *scales)
    return Readings(symmetries, (*alone.refused, *refused, *short, *others, *rotations.refused), largest, smallest)
